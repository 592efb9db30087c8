//! Hardware files: presets, round trips, refusals.

use super::*;

#[test]
fn every_preset_is_read_has_sources_and_is_written_again() {
    for (name, _) in PRESETS {
        let h = preset(name).unwrap().unwrap();
        assert!(!h.sources.is_empty() && h.memory > 4e9 && h.peak(Precision::Bf16) > 1e13, "{name}");
        let again = Hardware::parse(&h.save().to_string(), name).unwrap();
        assert!(
            (again.bandwidth / h.bandwidth - 1.0).abs() < 1e-5 && again.links.len() == h.links.len(),
            "{name}"
        );
        assert_eq!(again.compute.len(), h.compute.len());
    }
    assert_eq!(Hardware::open("KLX_P800").unwrap().memory, 96e9);
}

#[test]
fn wrong_files_are_refused_in_one_line_that_names_the_key() {
    let file = |text: &str| Hardware::parse(text, "x.json5").unwrap_err();
    let with = |memory: &str, compute: &str, rest: &str| {
        file(&format!("{{name: 'x', memory: {memory}, compute: {compute}, {rest}}}"))
    };
    let (m, c) = ("{size: '80 GB', bandwidth: '3 TB/s'}", "{bf16: '900 TFLOP/s'}");
    for (line, key) in [
        (file("[]"), "the file"),
        (file("{"), "JSON5"),
        (file(&"[".repeat(200)), "JSON5"),
        (file(&"[".repeat(100_000)), "200 objects and lists"),
        (file("{name: 'x'}"), "memory"),
        (with("{size: 80, bandwidth: '3 TB/s'}", c, ""), "memory.size: 80 has no unit"),
        (with("{size: '80 GB', bandwidth: '3 GB'}", c, ""), "memory.bandwidth"),
        (with("{size: '80 GB', bandwidth: NaN}", c, ""), "memory.bandwidth: NaN"),
        (with("{size: null, bandwidth: '3 TB/s'}", c, ""), "memory.size: null"),
        (with(m, "{fp32: '60 TFLOP/s', bf16: NaN}", ""), "compute.bf16: NaN"),
        (with(m, c, "launch: '1 us', launch: '2 us'"), "launch is given twice"),
        (with(m, c, "power: -Infinity"), "power: -inf"),
        (with(m, c, "kernels: {dot: {compute: Infinity}}"), "kernels.dot.compute: inf"),
        (with(m, c, "cache: [null]"), "cache[0]: null"),
        (with(m, "{bf16: '900000 PFLOP/s'}", ""), "compute.bf16"),
        (with(m, "{int4: '1 TOP/s'}", ""), "compute.int4 is not known"),
        (with(m, c, "links: [{devices: 1, bandwidth: '1 GB/s', latency: '1 us'}]"), "links[0].devices"),
        (with(m, c, "kernels: {dot: {compute: 1.5}}"), "kernels.dot.compute"),
        (with(m, c, "kernels: {dot: {bf16: {compute: 0}}}"), "kernels.dot.bf16.compute"),
        (with(m, c, "kernels: {dot: {bf17: {}}}"), "kernels.dot.bf17 is not known"),
        (with(m, c, "cache: [{size: '2 MB'}]"), "cache[0].bandwidth"),
        (
            with(m, c, "cache: [{size: '2 MB', bandwidth: '9 GB/s'}, {size: '1 MB', bandwidth: '8 GB/s'}]"),
            "the smallest",
        ),
        (with(m, c, "units: -3"), "units"),
        (with(m, c, "units: 1.5"), "units: 1.5"),
    ] {
        assert!(line.starts_with("x.json5: ") && line.contains(key) && !line.contains('\n'), "{line}");
    }
}

#[test]
fn files_of_llmsim_are_understood_as_meant() {
    let text = "{device_type: 'gpu', name: 'H800', memory: {hbm_size_gb: 80, cache_line_size: 128},
        bandwidth: {hbm_bandwidth_gb_s: 3.35, dma_bandwidth_gb_s: 85.0, link_bandwidth_gb_s: 400.0, rdma_bandwidth_gb_s: 200.0},
        compute: {mac_int8_gflops: 1979.0, mac_fp32_gflops: 989.0, mac_bf16_gflops: 989.0}}";
    let h = Hardware::parse(text, "h800.json5").unwrap();
    assert_eq!([h.bandwidth, h.memory, h.peak(Precision::Bf16)], [3.35e12, 80e9, 989e12]);
    let wrong = Hardware::parse(&text.replace("3.35", "3350"), "h800.json5").unwrap_err();
    assert!(wrong.contains("bandwidth.hbm_bandwidth_gb_s"), "{wrong}");
    let wrong = Hardware::parse(&text.replace("mac_bf16", "mac_fp16"), "h800.json5").unwrap_err();
    assert!(wrong.contains("compute.mac_fp16_gflops is not known"), "{wrong}");
}

#[test]
fn kernels_of_a_type_have_numbers_of_their_own_and_caches_stand_in_a_row() {
    let text = "{name: 'x', kind: 'cpu', memory: {size: '8 GB', bandwidth: '20 GB/s'}, compute: {fp32: '200 GFLOP/s', fp32_pieces: '600 GFLOP/s'},
        cache: [{size: '1 MB', bandwidth: '90 GB/s'}, {size: '32 MB', bandwidth: '40 GB/s'}], exchange: '6 GB/s', product: '100 GFLOP/s',
        kernels: {dot: {compute: 0.5, fp32_pieces: {compute: 0.9, apart: 0.25}}, turn: '30 us', logit: '0.2 ns', usual: 10, panels: {memory: 2}}}";
    let read = Hardware::parse(text, "x.json5").unwrap();
    for h in [&read, &Hardware::parse(&read.save().to_string(), "again").unwrap()] {
        let told = Speeds { read: 20e9, exchange: None, product: None };
        let read_at = |part: f64| h.at(Some(Speeds { read: 20e9 * part, ..told }));
        assert_eq!([1e5, 32e6, 2e8].map(|bytes| h.rate(bytes)), [90e9, 40e9, 20e9]);
        // Between two sizes lies what is between their speeds, and nothing is in a cache of a quarter of it.
        assert!((h.rate(32e6f64.sqrt() * 1e3) / 60e9 - 1.0).abs() < 1e-9);
        assert!((h.rate(64e6) / 800f64.sqrt() / 1e9 - 1.0).abs() < 1e-9);
        // Where memory is read slower, so is what is hardly faster than it.
        assert_eq!([1e5, 32e6, 2e8].map(|bytes| read_at(0.5).rate(bytes)), [90e9, 40e9, 10e9]);
        // Single lines come little sooner from a memory that is read faster.
        let paced = [0.5, 2.0].map(read_at).map(|h| [1e5, 2e8].map(|bytes| h.paced(bytes)));
        assert_eq!(paced, [0.5f64, 2.0].map(|by| [90e9, 20e9 * by.sqrt()]));
        assert_eq!(read_at(4.0).paced(32e6), 40e9, "a cache is no memory, however fast that is");
        // Other speeds are those seen beside a run, or what the file says; a file without them has them in its other numbers.
        let slow = Speeds { exchange: Some(3e9), product: Some(75e9), ..told };
        let seen =
            |h: &Hardware| (h.exchange, h.launch, h.peak(Precision::F32), h.peak(Precision::F32Pieces));
        let launch = h.launch;
        assert_eq!(seen(&h.at(Some(told))), (Some(6e9), launch, 200e9, 600e9));
        assert_eq!(seen(&h.at(Some(slow))), (Some(3e9), 2.0 * launch, 150e9, 450e9));
        assert_eq!(
            h.at(Some(slow)).at(Some(Speeds { product: Some(100e9), ..told })).peak(Precision::F32),
            200e9
        );
        let blind = Hardware { exchange: None, product: None, ..h.clone() };
        assert_eq!(seen(&blind.at(Some(slow))), (None, launch, 200e9, 600e9));
        let [pieces, vectors] =
            [Precision::F32Pieces, Precision::F32].map(|p| (h.kernels.of("dot", p), h.peak(p)));
        assert_eq!(
            [pieces.0.compute, pieces.0.apart, pieces.1, vectors.0.compute, vectors.1],
            [0.9, 0.25, 600e9, 0.5, 200e9]
        );
        assert_eq!([h.kernels.usual, h.kernels.of("panels", Precision::F32).memory], [10.0, 2.0]);
        assert_eq!([h.kernels.turn, h.kernels.logit].map(|s| (s * 1e12).round()), [30e6, 200.0]);
    }
    for (from, to, key) in [("usual: 10", "usual: 0.9", "usual"), ("memory: 2}", "memory: 2.01}", "memory")] {
        let wrong = Hardware::parse(&text.replace(from, to), "x.json5").unwrap_err();
        assert!(wrong.contains(key), "{wrong}");
    }
    assert_eq!(
        Hardware::open("h200").unwrap().peak(Precision::F32Pieces),
        Hardware::open("h200").unwrap().peak(Precision::F32)
    );
}

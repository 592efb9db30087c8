//! Packed weights made by hand: numbers and codes, and what is refused.

use super::*;
use crate::weights::write;
use astrai_ir::packing::{Awq, Blocks, Compressed, Gptq, Share};

/// Numbers of a file that look random.
fn draw(count: usize, of: u64) -> impl Iterator<Item = u32> {
    (0..count as u64).map(move |i| (((i + 3 * of) * 2_654_435_761) >> 7) as u32)
}

fn words(count: usize, of: u64) -> Vec<u8> {
    draw(count, of).map(|w| w.wrapping_mul(0x9e37_79b9)).flat_map(u32::to_le_bytes).collect()
}

fn halves(count: usize) -> Vec<u8> {
    draw(count, 9).flat_map(|w| half::f16::from_f32((w % 64) as f32 / 512.0 + 0.01).to_le_bytes()).collect()
}

type Tensors = Vec<(&'static str, DType, Vec<usize>, Vec<u8>)>;

/// A checkpoint of these tensors of the module `m`, a matrix of this shape.
fn open(tensors: &Tensors, packing: Packing, shape: [usize; 2]) -> Result<Packed, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let names: Vec<String> = tensors.iter().map(|t| format!("m.{}", t.0)).collect();
    let all = tensors.iter().zip(&names).map(|(t, name)| (name.as_str(), t.1, &t.2[..], &t.3[..]));
    write(&path, all, &BTreeMap::new()).unwrap();
    let file = Checkpoint::open(&path).unwrap();
    let wanted = [("m.weight".to_string(), shape.to_vec())].into_iter();
    Packed::open(file, packing, wanted, &|_| false).map_err(|e| e.to_string())
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at * 4..][..4].try_into().unwrap())
}

fn floats(source: &Source) -> Vec<f64> {
    source.bytes.chunks(source.dtype.bytes()).map(|b| source.dtype.decode(b)).collect()
}

/// What the parts stand for is the widened matrix.
fn parts_agree(packed: &Packed) {
    let (wide, narrow) = (packed.tensor("m.weight").unwrap(), packed.narrow());
    let part = |p: Part| packed.tensor(&p.of("m.weight")).unwrap();
    let (codes, scales) = (part(Part::Codes), floats(&part(Part::Scales)));
    let offsets = if narrow.offsets { floats(&part(Part::Offsets)) } else { vec![0.0; scales.len()] };
    assert_eq!(codes.shape[1] * narrow.code.per_element(), wide.shape[1]);
    let group = narrow.group_of(wide.shape[1]).unwrap();
    for (i, w) in floats(&wide).iter().enumerate() {
        let value = match narrow.code {
            Code::Int4 => f64::from(codes.bytes[i / 2] >> (4 * (i % 2)) & 15) - 8.0,
            Code::Int8 => f64::from(codes.bytes[i] as i8),
            Code::Fp8 => codes.dtype.decode(&codes.bytes[i..=i]),
            Code::Fp4 => panic!("no packing of matrices has it"),
        };
        let got = scales[i / group] * value + offsets[i / group];
        assert!((got - w).abs() <= 1e-6, "{i}: {got} {w}");
    }
}

/// Packed integers of 4 and of 8 bits, with zero points and without, held to the format's own formula.
#[test]
fn compressed_tensors_in_words() {
    let (n, k, group) = (20, 64, 32);
    for (code, zeros) in [(Code::Int4, false), (Code::Int4, true), (Code::Int8, false), (Code::Int8, true)] {
        let bits = words::bits(code);
        let (per, middle) = (32 / bits, 1i64 << (bits - 1));
        let (codes, points) = (words(n * k / per, 1), words(n.div_ceil(per) * 2, 2));
        let mut tensors: Tensors = vec![
            ("weight_packed", DType::I32, vec![n, k / per], codes.clone()),
            ("weight_scale", DType::F16, vec![n, 2], halves(n * 2)),
            (
                "weight_shape",
                DType::I64,
                vec![2],
                [n, k].iter().flat_map(|x| (*x as i64).to_le_bytes()).collect(),
            ),
        ];
        if zeros {
            tensors.push(("weight_zero_point", DType::I32, vec![n.div_ceil(per), 2], points.clone()));
        }
        let format = Compressed { code, packed: true, share: Share::Group(group), zeros };
        let packed = open(&tensors, Packing::Compressed(format), [n, k]).unwrap();
        assert!(packed.stays("m.weight") && packed.narrow().offsets == zeros);
        assert_eq!(packed.narrow().scales, if zeros { DType::F32 } else { DType::F16 });
        let wide = floats(&packed.tensor("m.weight").unwrap());
        let scales = halves(n * 2);
        let lane = |w: u32, at: usize| i64::from(w >> (bits * at)) & ((1 << bits) - 1);
        for (r, i) in (0..n).flat_map(|r| (0..k).map(move |i| (r, i))) {
            let q = lane(word(&codes, r * k / per + i / per), i % per);
            let zero = if zeros { lane(word(&points, r / per * 2 + i / group), r % per) } else { middle };
            let scale = DType::F16.decode(&scales[(r * 2 + i / group) * 2..]);
            assert_eq!(wide[r * k + i], scale * (q - zero) as f64, "{code:?} {r} {i}");
        }
        parts_agree(&packed);
    }
}

#[test]
fn compressed_tensors_apart() {
    let (n, k) = (6, 64);
    let codes: Vec<u8> = draw(n * k, 4).map(|w| w as u8 & 0x77).collect();
    let apart = |code, share| Packing::Compressed(Compressed { code, packed: false, share, zeros: false });
    let whole = Packing::Fp8(Blocks { rows: 0, columns: 0 });
    for (packing, scale, shape) in [
        (apart(Code::Int8, Share::Row), "weight_scale", vec![n, 1]),
        (apart(Code::Int8, Share::Tensor), "weight_scale", vec![1]),
        (apart(Code::Fp8, Share::Row), "weight_scale", vec![n, 1]),
        (apart(Code::Fp8, Share::Tensor), "weight_scale", vec![1]),
        (whole, "weight_scale_inv", vec![]),
    ] {
        let (code, count) = (packing.code(), shape.iter().product());
        let tensors: Tensors = vec![
            ("weight", code.dtype(), vec![n, k], codes.clone()),
            (scale, DType::F16, shape, halves(count)),
            ("input_scale", DType::F16, vec![1], halves(1)),
        ];
        let packed = open(&tensors, packing, [n, k]).unwrap();
        let wide = floats(&packed.tensor("m.weight").unwrap());
        let value = |b: u8| if code == Code::Fp8 { code.dtype().decode(&[b]) } else { f64::from(b as i8) };
        for (i, w) in wide.iter().enumerate() {
            let scale = DType::F16.decode(&halves(count)[i / k % count * 2..]);
            assert_eq!(*w, scale * value(codes[i]), "{code:?} {i}");
        }
        parts_agree(&packed);
    }
}

fn gptq(code: Code, index: Option<Vec<i32>>) -> Tensors {
    let (n, k, per) = (16, 64, 32 / words::bits(code));
    let mut tensors: Tensors = vec![
        ("qweight", DType::I32, vec![k / per, n], words(n * k / per, 5)),
        ("qzeros", DType::I32, vec![2, n / per], words(2 * n / per, 6)),
        ("scales", DType::F16, vec![2, n], halves(2 * n)),
    ];
    if let Some(index) = index {
        tensors.push(("g_idx", DType::I32, vec![k], index.iter().flat_map(|g| g.to_le_bytes()).collect()));
    }
    tensors
}

#[test]
fn gptq_of_eight_bits_and_groups_that_are_no_neighbours() {
    let format =
        |code, act_order| Packing::Gptq(Gptq { code, share: Share::Group(32), act_order, less_one: false });
    let packed = open(&gptq(Code::Int8, None), format(Code::Int8, false), [16, 64]).unwrap();
    let (wide, all) = (floats(&packed.tensor("m.weight").unwrap()), gptq(Code::Int8, None));
    let (q, z) = (word(&all[0].3, 9 * 16 + 3) >> 16 & 255, word(&all[1].3, 4) >> 24 & 255);
    let scale = DType::F16.decode(&all[2].3[(16 + 3) * 2..]);
    assert_eq!(wide[3 * 64 + 38], scale * (f64::from(q) - f64::from(z)));
    parts_agree(&packed);
    let orders = [((0..64).map(|i| i / 32).collect(), true), ((0..64).map(|i| i % 2).collect(), false)];
    for (index, stays) in orders {
        let packed = open(&gptq(Code::Int4, Some(index)), format(Code::Int4, true), [16, 64]).unwrap();
        assert_eq!(packed.stays("m.weight"), stays);
    }
    for (index, says) in
        [(Some(vec![2; 64]), "in a group beyond its 2"), (Some(vec![-1; 64]), "beyond"), (None, "missing")]
    {
        let e = open(&gptq(Code::Int4, index), format(Code::Int4, true), [16, 64]).err().unwrap();
        assert!(e.contains(says), "{e}");
    }
}

#[test]
fn what_is_no_such_matrix_is_refused() {
    let format = Packing::Awq(Awq { share: Share::Group(32) });
    let e = open(&gptq(Code::Int4, None), format, [16, 64]).err().unwrap();
    assert!(e.contains("\"m.qweight\" is [8, 16] instead of [64, 2]"), "{e}");
    let mut wrong = gptq(Code::Int4, None);
    wrong[2] = ("scales", DType::I8, vec![2, 16], vec![0; 32]);
    let format = Gptq { code: Code::Int4, share: Share::Group(32), act_order: false, less_one: true };
    let e = open(&wrong, Packing::Gptq(format), [16, 64]).err().unwrap();
    assert!(e.contains("\"m.scales\" is of i8"), "{e}");
    // Codes whose scales are not there are no weights.
    let codes: Tensors = vec![("weight", DType::F8E4M3, vec![3, 5], vec![0; 15])];
    let e = open(&codes, Packing::Fp8(Blocks { rows: 2, columns: 4 }), [3, 5]).err().unwrap();
    assert!(e.contains("\"m.weight_scale_inv\""), "{e}");
}

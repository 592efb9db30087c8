//! What sound files give: elements of every type, rows, integers, comparison with a model, and memory given back.

use super::*;

#[test]
fn a_directory_and_its_file_read_alike() {
    let dir = directory();
    let file = dir.path().join("model.safetensors");
    sample(&file);
    for path in [dir.path(), file.as_path()] {
        let checkpoint = Checkpoint::open(path).expect("open");
        assert_eq!(checkpoint.path(), path);
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b", "ids"]);
        assert_eq!(checkpoint.metadata().get("format").map(String::as_str), Some("pt"));
        let a = checkpoint.get("a").expect("a");
        assert_eq!(a.path, file);
        assert_eq!((a.name(), a.dtype(), a.shape(), a.elements()), ("a", DType::F32, &[2, 3][..], 6));
        assert!(checkpoint.get("c").is_none());
    }
}

#[test]
fn every_type_is_read_as_ir_decodes_it() {
    let dir = directory();
    let path = dir.path().join("w.safetensors");
    // Every bit pattern of the narrow types, and many of the wide ones; odd counts leave later tensors unaligned.
    let count = 65_537usize;
    let data: Vec<Vec<u8>> = DType::ALL
        .iter()
        .map(|d| {
            (0..count as u64)
                .flat_map(|i| {
                    i.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17).to_le_bytes()[..d.bytes()].to_vec()
                })
                .collect()
        })
        .collect();
    let shape = [count];
    let one_byte_first = DType::ALL.iter().zip(&data).rev();
    write(&path, one_byte_first.map(|(d, bytes)| (d.name(), *d, &shape[..], &bytes[..])), &BTreeMap::new())
        .expect("written");
    let checkpoint = Checkpoint::open(&path).expect("open");
    for (d, bytes) in DType::ALL.iter().zip(&data) {
        let view = checkpoint.get(d.name()).expect("there");
        assert_eq!((view.dtype(), view.bytes()), (*d, &bytes[..]));
        let mut wide = vec![0f32; count];
        if !d.is_float() {
            let meant: Vec<i64> = bytes.chunks_exact(d.bytes()).map(|b| d.decode_int(b)).collect();
            assert_eq!(view.to_i64().expect("integers"), meant);
            said(
                &view.to_f32(&mut wide).expect_err("no floats"),
                &["w.safetensors: tensor", "floats are wanted"],
            );
            continue;
        }
        view.to_f32(&mut wide).expect("floats");
        for (x, b) in wide.iter().zip(bytes.chunks_exact(d.bytes())) {
            let meant = d.decode(b) as f32;
            assert!(x.to_bits() == meant.to_bits() || x.is_nan() && meant.is_nan(), "{d} {b:?}: {x} {meant}");
        }
        said(&view.to_i64().expect_err("no integers"), &["integers are wanted"]);
    }
}

#[test]
fn elements_fit_the_buffer_or_are_refused() {
    let dir = directory();
    let path = dir.path().join("w.safetensors");
    sample(&path);
    let checkpoint = Checkpoint::open(&path).expect("open");
    let a = checkpoint.get("a").expect("a");
    let mut row = [0f32; 3];
    said(&a.to_f32(&mut row).expect_err("too small"), &["6 elements do not fit a buffer of 3"]);
    assert_eq!(checkpoint.get("ids").expect("ids").to_i64().expect("integers"), [7, -1]);
}

#[test]
fn scalars_and_empty_tensors() {
    let dir = directory();
    let path = dir.path().join("w.safetensors");
    let tensors: [(&str, DType, &[usize], &[u8]); 3] = [
        ("none", DType::BF16, &[0, 5], &[]),
        ("scalar", DType::F32, &[], &1.5f32.to_le_bytes()),
        ("hollow", DType::F32, &[usize::MAX, 0], &[]),
    ];
    write(&path, tensors, &BTreeMap::new()).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("open");
    let mut one = [0f32];
    checkpoint.get("scalar").expect("there").to_f32(&mut one).expect("one element");
    assert_eq!(one, [1.5]);
    for name in ["none", "hollow"] {
        let view = checkpoint.get(name).expect("there");
        view.to_f32(&mut []).expect("nothing");
        checkpoint.release(name).expect("nothing to release");
    }
}

#[test]
fn check_names_all_kinds_of_trouble_in_a_bounded_line() {
    let dir = directory();
    let path = dir.path().join("w.safetensors");
    sample(&path);
    let checkpoint = Checkpoint::open(&path).expect("open");
    let own = |name: &str, shape: &[usize]| (name.to_string(), shape.to_vec());
    checkpoint.check(&[own("a", &[2, 3]), own("b", &[4])], &|name| name == "ids").expect("fits");
    let mut expected = vec![own("a", &[3, 2])];
    expected.extend((0..1000).map(|i| own(&format!("layer.{i}"), &[1])));
    let error = checkpoint.check(&expected, &|name| name == "ids").expect_err("a mismatch");
    said(
        &error,
        &[
            "1000 tensors missing: \"layer.0\", \"layer.1\"",
            "\"layer.7\" and 992 more",
            "1 tensors misshapen: \"a\" is [2, 3] instead of [3, 2]",
            "1 tensors surplus: \"b\"",
            "config.json",
        ],
    );
    assert!(matches!(error, WeightsError::Mismatch { .. }));
}

/// Kilobytes of the file `path` that are mapped and resident in this process.
fn resident(path: &Path) -> usize {
    let maps = fs::read_to_string("/proc/self/smaps").expect("smaps");
    let of_file = maps.split_once(&*path.to_string_lossy()).expect("the map").1;
    let line = of_file.lines().find(|l| l.starts_with("Rss:")).expect("its Rss");
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
}

#[test]
fn released_tensors_leave_memory_and_stay_readable() {
    let dir = directory();
    let path = dir.path().canonicalize().expect("a path").join("w.safetensors");
    let data: Vec<u8> = (0..1usize << 20).map(|i| (i % 251) as u8).collect();
    let shape = [data.len()];
    let names = ["a", "b", "c", "d"];
    write(&path, names.map(|n| (n, DType::U8, &shape[..], &data[..])), &BTreeMap::new()).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("open");
    for name in names {
        let view = checkpoint.get(name).expect("there");
        assert_eq!(view.bytes(), data);
        assert!(resident(&path) >= 900);
        checkpoint.release(name).expect("released");
        assert!(resident(&path) <= 128, "{} kB stay", resident(&path));
    }
    for name in names {
        assert_eq!(checkpoint.get(name).expect("there").bytes(), data);
    }
    said(&checkpoint.release("e").expect_err("no such tensor"), &["no tensor \"e\" to release"]);
}

#[test]
fn checkpoints_are_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Checkpoint>();
    shared::<WeightsError>();
}

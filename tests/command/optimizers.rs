//! Optimisers and schedules: what `astrai verify` says of a folder with `optimizers.json`.

use crate::cases::case;
use astrai_engine::golden::optimizers::Optimizers;
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::unheard;

/// Adam, AdamW with averaged weights, SGD with Nesterov's look ahead, Muon rounded and not; every schedule. Then other settings.
#[test]
fn the_references_numbers() {
    let Some(folder) = case("optimizers") else { return };
    let machine = Machine::new(Kind::Cpu, 1).unwrap();
    let check = |folder: &std::path::Path, only: &[usize]| {
        Optimizers::open(folder, &machine).unwrap().check(Some(only), &mut unheard).unwrap()
    };
    let rows = check(&folder, &[0, 2, 4, 5, 8, 11]);
    assert!(rows.len() == 5 && rows.iter().all(|r| r.verdict == "ok"), "{rows:#?}");
    let other = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(&folder).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), other.path().join(entry.file_name())).unwrap();
    }
    for (name, from, to) in [
        ("optimizers.json", "\"lr\": 0.01,", "\"lr\": 0.0101,"),
        ("schedules.json", "0.333333333333", "0.333333343333"),
    ] {
        let text = std::fs::read_to_string(folder.join(name)).unwrap();
        std::fs::remove_file(other.path().join(name)).unwrap();
        std::fs::write(other.path().join(name), text.replacen(from, to, 1)).unwrap();
    }
    let off: Vec<_> =
        check(other.path(), &[0]).into_iter().filter(|r| r.verdict != "ok").map(|r| r.check).collect();
    assert_eq!(off, ["losses", "grad_norms", "final_logits", "schedules"]);
}

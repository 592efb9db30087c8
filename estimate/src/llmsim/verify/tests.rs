//! LLMSim's records, and changed copies of them.

use super::*;

/// The shared records, or nothing with a word.
fn folder() -> Option<PathBuf> {
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden/llmsim");
    if !found.is_dir() {
        println!("skipped: there is no ../shared/golden/llmsim");
    }
    found.is_dir().then_some(found)
}

#[test]
fn every_record_is_reproduced() {
    let Some(folder) = folder() else { return };
    let all: Vec<Checked> = records(&folder).iter().map(|p| check(p).unwrap()).collect();
    assert_eq!(all.len(), 7);
    for c in &all {
        assert!(c.ok(), "{c:?}");
    }
}

#[test]
fn a_changed_number_word_or_row_is_found() {
    let Some(folder) = folder() else { return };
    let dir = std::env::temp_dir().join(format!("astrai-llmsim-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let text = std::fs::read_to_string(folder.join("deepseek_v3_decode_p800.json")).unwrap();
    let graph = std::fs::read_to_string(folder.join("ir_qwen3_32b.json")).unwrap();
    for (i, (text, from, to)) in [
        (&text, "\"compute_us\": 3.875536896", "\"compute_us\": 3.875556896"),
        (&text, "\"in_dtype\": \"INT8\"", "\"in_dtype\": \"FP16\""),
        (&text, "\"tpot_ms\"", "\"ttft_ms\""),
        (&text, "\"layers\": 61", "\"layers\": 62"),
        (&text, "\"ep_size\": 16,\n", "\"ep_size\": 8,\n"),
        (&graph, "\"tp_dim\": 1", "\"tp_dim\": 0"),
    ]
    .into_iter()
    .enumerate()
    {
        let changed = text.replacen(from, to, 1);
        assert_ne!(&changed, text, "{from}");
        let path = dir.join(format!("{i}.json"));
        std::fs::write(&path, changed).unwrap();
        assert!(!check(&path).is_ok_and(|c| c.ok()), "{from}");
    }
    for (i, (from, to, key)) in [
        ("\"tp_size\": 1", "\"tp_size\": 3", "num_attention_heads 128 does not divide by tp 3"),
        ("\"tp_size\": 1", "\"tp_size\": 0", "inputs.schedule.tp_size"),
        ("\"hbm_bandwidth_gb_s\": 1.8", "\"hbm_bandwidth_gb_s\": 1800", "bandwidth.hbm_bandwidth_gb_s"),
        ("\"mode\": \"DECODE\"", "\"mode\": \"MIXED\"", "inputs.schedule.mode"),
        ("\"config\"", "\"conf\"", "inputs.model.config"),
    ]
    .into_iter()
    .enumerate()
    {
        let path = dir.join(format!("bad{i}.json"));
        std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
        let line = check(&path).unwrap_err();
        assert!(line.contains(&format!("bad{i}.json")) && line.contains(key), "{line}");
    }
    std::fs::remove_dir_all(dir).unwrap();
}

/// A file without rows is no file that agrees, and none that is passed over.
#[test]
fn a_file_without_rows_fails_in_words() {
    let dir = std::env::temp_dir().join(format!("astrai-llmsim-empty-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for (name, text, is) in [
        ("empty.json", r#"{"rows": []}"#, true),
        ("whole.json", r#"{"inputs": {}, "rows": [], "summary": {}}"#, true),
        ("other.json", r#"{"rows": 3}"#, false),
    ] {
        std::fs::write(dir.join(name), text).unwrap();
        let found = records(&dir);
        assert_eq!(found.iter().any(|p| p.ends_with(name)), is, "{name}: {found:?}");
        if is {
            let checked = check(&dir.join(name)).unwrap();
            assert!(!checked.ok() && checked.note == "the file has no rows to compare", "{checked:?}");
        }
    }
    std::fs::remove_dir_all(dir).unwrap();
}

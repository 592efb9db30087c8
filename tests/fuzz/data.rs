//! Targets of prepared data and of records: HDF5 files, lines of numbers, `meta.json` of several keys, configurations and records of
//! preprocessing.

use crate::mutate::{Draws, bytes, object};
use crate::targets::{Run, shown};
use astrai_serve::tokenizer::Tokenizer;
use astrai_train::data::preprocess::{Builder, Config};
use astrai_train::data::store::{Array, Element, Layout, Numbers, WriteOptions, Writer};
use astrai_train::data::{IDS, Kind, Packing, Records, Rows, Store, WindowOptions, Windows};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// A file of three records in each of five types.
fn sound(layout: Layout, gzip: bool) -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("data");
    let write = || {
        let mut writer = Writer::create(&path, WriteOptions { layout, gzip })?;
        for i in 0..3 {
            let keys = [
                ("sequence", Element::Int32),
                ("loss_mask", Element::Bool),
                ("position_ids", Element::Int64),
            ];
            for (key, element) in keys {
                writer.begin(key, &Array { element, count: 40 + i, rows: vec![] })?;
                let kinds = if element == Element::Bool { 2 } else { 3 };
                writer.put(Numbers::Ints(&(0..40 + i as i32).map(|t| t % kinds).collect::<Vec<_>>()))?;
            }
            writer.begin("responses", &Array { element: Element::Uint16, count: 6, rows: vec![3; 2] })?;
            writer.put(Numbers::Ints(&[1, 2, 3, 4, 5, 6]))?;
            writer.begin("rewards", &Array { element: Element::Float32, count: 2, rows: vec![] })?;
            writer.put(Numbers::Floats(&[0.5, -1.0]))?;
            writer.end_record()?;
        }
        writer.finish()
    };
    write().unwrap_or_else(|e: astrai_train::data::DataError| panic!("{e}"));
    fs::read(path).expect("what was written")
}

pub fn hdf5(d: &mut Draws) -> Vec<u8> {
    static PLAIN: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    let both = PLAIN.get_or_init(|| [false, true].map(|gzip| sound(Layout::Hdf5, gzip)));
    bytes(both[d.below(2)].clone(), d)
}

pub fn lines(d: &mut Draws) -> Vec<u8> {
    static LINES: OnceLock<Vec<u8>> = OnceLock::new();
    bytes(LINES.get_or_init(|| sound(Layout::Jsonl, false)).clone(), d)
}

/// Reads all that a store shows, as training would.
fn look(path: &Path) -> Result<(), String> {
    let store = Arc::new(shown(Store::open(path))?);
    for (key, column) in store.keys() {
        for i in 0..column.segments() {
            shown(store.floats(key, i))?;
            if !column.elements().any(Element::is_float) {
                shown(store.rows(key, i))?;
            }
        }
    }
    shown(store.check(&IDS, 1000, &mut |_, _| {}))?;
    let options = WindowOptions { seq: 7, stride: Some(3), packing: Packing::Masked };
    let windows = shown(Windows::new(shown(Rows::of(&store, true))?, &options))?;
    let mut batch = astrai_train::batch::PackedBatch::default();
    let records = shown(Records::new(store, Kind::Sft, 30, Packing::Masked))?;
    for i in 0..records.count() {
        shown(batch.fill(&records, [i]))?;
    }
    shown(batch.fill(&windows, [0, 1]))?;
    assert_eq!(batch.starts.last(), Some(&14));
    Ok(())
}

pub fn open_hdf5(folder: &Path) -> Run {
    let path = folder.join("data.h5");
    Box::new(move |input| {
        shown(fs::write(&path, input))?;
        look(&path)
    })
}

pub fn open_lines(folder: &Path) -> Run {
    let path = folder.join("data.jsonl");
    Box::new(move |input| {
        shown(fs::write(&path, input))?;
        look(&path)
    })
}

pub fn keyed(d: &mut Draws) -> Vec<u8> {
    let sound = json!({"sequence": {"shape": [12], "dtype": "int32", "offsets": [0, 4, 12]},
        "loss_mask": {"shape": [12], "dtype": "bool", "offsets": [0, 4, 12], "rows": [0, 0]}});
    object(&sound, d)
}

pub fn open_keyed(folder: &Path) -> Run {
    let folder = folder.join("shard");
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join("sequence.bin"), [1, 0, 0, 0].repeat(12)).expect("written");
    fs::write(folder.join("loss_mask.bin"), [0, 1, 1].repeat(4)).expect("written");
    Box::new(move |input| {
        shown(fs::write(folder.join("meta.json"), input))?;
        look(&folder)
    })
}

pub fn record(d: &mut Draws) -> Vec<u8> {
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
    let chat = json!({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "x", "tool_calls": [call]}, {"role": "tool", "content": "r"},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]}], "domain": "d", "tools": [{"type": "function"}]});
    let all = [
        chat,
        json!({"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]}),
        json!({"prompt": "a", "responses": ["b", "c"], "rewards": [1, 0.5]}),
        json!({"prompt": "a", "completion": "b", "label": true}),
        json!({"text": "some text", "domain": 1}),
    ];
    let which = d.below(all.len());
    [vec![which as u8], object(&all[which], d)].concat()
}

/// The first byte says by which configuration the rest is read.
pub fn read_records(folder: &Path) -> Run {
    const TEMPLATE: &str = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}\
        {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|end|>{% endgeneration %}\
        {% else %}{{ m.content }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    write_tokenizer(folder);
    fs::write(folder.join("chat_template.jinja"), TEMPLATE).expect("written");
    let tokenizer = Tokenizer::open(folder).expect("a tokenizer");
    let kinds = [Kind::Sft, Kind::Dpo, Kind::Grpo, Kind::Kto, Kind::Seq];
    let builders = kinds.map(|kind| {
        let mut config = Config::of(kind, 64);
        config.output.domain_key = Some("domain".into());
        Builder::new(config, tokenizer.clone()).expect("a builder")
    });
    Box::new(move |input| {
        let (&which, line) = input.split_first().ok_or("empty")?;
        let builder = &builders[usize::from(which) % builders.len()];
        let made = builder.line(line).map_err(|e| format!("{e:?}"))?;
        assert!(made.tokens() > 0 && !made.domain.contains('/'));
        Ok(())
    })
}

/// A byte-level tokenizer.
fn write_tokenizer(folder: &Path) {
    use astrai_train::data::Piece;
    use astrai_train::data::bpe::{Bpe, BpeOptions};
    let piece = Piece { text: "some text and more text".into(), last: true, read: 23 };
    let bpe = Bpe::train(&BpeOptions::new(260), [Ok(piece)], 23, &mut |_, _, _| {}).expect("trained");
    bpe.write(folder).expect("written");
}

pub fn config(d: &mut Draws) -> Vec<u8> {
    let section = json!({"field": "messages", "action": "$role", "template": true});
    let sound = json!({"version": 1, "input": {"sections": [section]}, "mask": {"assistant": "train"},
        "mask_default": "mask", "preprocessing": {"max_seq_len": 240, "packing_strategy": "bfd", "max_packed_len": 300,
        "truncation_mode": "keep_start"}, "output": {"domain_key": "domain", "position_ids_mode": "doc_reset",
        "dtype": {"loss_mask": "bool"}, "weights": {"a": 1.5}}});
    object(&sound, d)
}

pub fn read_config(input: &[u8]) -> Result<(), String> {
    let config = Config::parse(&String::from_utf8_lossy(input))?;
    let again = serde_json::to_value(&config).map_err(|e| e.to_string())?;
    let read: Value = serde_json::to_value(Config::parse(&again.to_string())?).map_err(|e| e.to_string())?;
    assert_eq!(again, read, "what is written is read as another");
    Ok(())
}

//! Stores: what is written is read, in every layout, and what does not fit together is refused.

use super::*;
use crate::batch::{Items, PackedBatch};
use crate::data::store::{Array, Element, Layout, Numbers, WriteOptions, Writer};
use crate::preference::{Batch, GroupBatch, PairBatch};
use proptest::prelude::*;
use std::sync::Arc;

/// A key: its name, type, numbers and rows.
type Key<'a> = (&'a str, Element, Vec<i32>, usize);
type Record<'a> = &'a [Key<'a>];

fn write(path: &Path, layout: Layout, gzip: bool, records: &[Record]) -> Result<(), DataError> {
    let mut writer = Writer::create(path, WriteOptions { layout, gzip })?;
    for record in records {
        for (key, element, numbers, rows) in record.iter() {
            let each = numbers.len() / (*rows).max(1);
            writer.begin(key, &Array { element: *element, count: numbers.len(), rows: vec![each; *rows] })?;
            writer.put(Numbers::Ints(numbers))?;
        }
        writer.end_record()?;
    }
    writer.finish()
}

const ALL: [(Layout, bool, &str); 4] = [
    (Layout::Hdf5, false, "a.h5"),
    (Layout::Hdf5, true, "b.h5"),
    (Layout::Bin, false, "c"),
    (Layout::Jsonl, false, "d.jsonl"),
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn what_is_written_is_read(lengths in prop::collection::vec(0_usize..30, 1..14), rows in 1_usize..4, from in 0_u64..40) {
        let dir = tempfile::tempdir().unwrap();
        let numbers = |n: usize, i: usize, top: i32| (0..n).map(|t| (t + i) as i32 % top).collect::<Vec<_>>();
        let records: Vec<Vec<Key>> = lengths.iter().enumerate().map(|(i, &n)| vec![
            ("sequence", Element::Int32, numbers(n, i, 9), 0),
            ("loss_mask", Element::Bool, numbers(n, i, 2), 0),
            ("responses", Element::Uint16, numbers(rows * n, i, 7), rows),
        ]).collect();
        let flat: Vec<i32> = records.iter().flat_map(|r| r[0].2.clone()).collect();
        for (layout, gzip, name) in ALL {
            let path = dir.path().join(name);
            write(&path, layout, gzip, &records.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
            if flat.is_empty() {
                prop_assert!(Store::open(&path).is_err());
                continue;
            }
            let store = Store::open(&path).unwrap();
            prop_assert_eq!(store.need("sequence").unwrap().segments(), lengths.len());
            for (i, record) in records.iter().enumerate() {
                prop_assert_eq!(&store.record("sequence", i).unwrap(), &record[0].2);
                prop_assert_eq!(&store.record("loss_mask", i).unwrap(), &record[1].2);
                if lengths[i] > 0 {
                    let got = store.rows("responses", i).unwrap();
                    prop_assert_eq!(got.len(), rows);
                    prop_assert_eq!(&got.concat(), &record[2].2);
                }
            }
            let from = from.min(flat.len() as u64);
            let mut rest = vec![0; flat.len() - from as usize];
            store.ints("sequence", from, &mut rest).unwrap();
            prop_assert_eq!(&rest, &flat[from as usize..]);
            prop_assert!(store.ints("sequence", from + 1, &mut rest).is_err() || rest.is_empty());
        }
    }
}

#[test]
fn records_that_do_not_fit_together_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut number = 0;
    let mut open = |records: &[Record]| {
        number += 1;
        let path = dir.path().join(format!("{number}.h5"));
        write(&path, Layout::Hdf5, false, records).unwrap();
        Arc::new(Store::open(&path).unwrap())
    };
    let ints = |key, list: &[i32]| (key, Element::Int32, list.to_vec(), 0);
    let short = open(&[&[ints("sequence", &[1, 2, 3]), ints("loss_mask", &[0, 1])]]);
    let records = Records::new(short.clone(), Kind::Sft, 9, Packing::Masked).unwrap();
    let line = PackedBatch::default().fill(&records, [0]).unwrap_err().to_string();
    assert!(line.contains("1.h5") && line.contains("record 0") && line.contains("3 tokens"), "{line}");
    let line = Records::new(short.clone(), Kind::Dpo, 9, Packing::Joined).unwrap_err().to_string();
    assert!(line.contains("`chosen`") && line.contains("loss_mask, sequence"), "{line}");
    assert!(short.check(&IDS, 3, &mut quiet).unwrap_err().to_string().contains("token 2 is 3"));
    let negative = open(&[&[ints("sequence", &[1, -100])]]);
    assert!(negative.check(&IDS, 9, &mut quiet).unwrap_err().to_string().contains("token 1 is -100"));
    let uneven = open(&[&[ints("sequence", &[1]), ints("loss_mask", &[1])], &[ints("sequence", &[1])]]);
    assert!(
        Records::new(uneven, Kind::Sft, 9, Packing::Joined)
            .unwrap_err()
            .to_string()
            .contains("2 records and")
    );
    let pair = |mask: &[i32]| {
        [
            ints("chosen", &[5, 0, 7]),
            ints("chosen_mask", mask),
            ints("rejected", &[5, 0]),
            ints("rejected_mask", &[0, 1]),
        ]
    };
    let pairs = open(&[&pair(&[0, 0, 1]), &pair(&[0, 1])]);
    let records = Records::new(pairs, Kind::Dpo, 9, Packing::Joined).unwrap();
    let mut batch = PairBatch::default();
    batch.fill(&records, [0]).unwrap();
    assert_eq!((batch.pairs(), batch.chosen.targets.as_slice()), (1, &[-100, 7, -100][..]));
    assert!(batch.fill(&records, [1]).is_err() && batch.pairs() == 0);
    let group = [
        ints("prompts", &[4, 0]),
        ("responses", Element::Int32, vec![6, 7, 0, 8, 0, 0], 2),
        ("masks", Element::Bool, vec![1, 1, 0, 1, 0, 0], 2),
        ints("rewards", &[1, 0]),
    ];
    let records = Records::new(open(&[&group]), Kind::Grpo, 9, Packing::Joined).unwrap();
    let mut batch = GroupBatch::default();
    batch.fill(&records, [0, 0]).unwrap();
    assert_eq!((batch.groups(), batch.size, &batch.sequences.starts), (2, 2, &vec![0, 4, 7, 11, 14]));
    assert_eq!(batch.sequences.targets[..7], [-100, 6, 7, -100, -100, 8, -100]);
}

/// Documents of a record are sequences of their own; padding and boundaries are never told by an id.
#[test]
fn documents_of_a_record_are_apart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.h5");
    let ints = |key, list: &[i32]| (key, Element::Int32, list.to_vec(), 0);
    let record = [
        ints("sequence", &[0, 7, 0, 0, 9]),
        ints("loss_mask", &[0, 1, 1, 1, 1]),
        ints("position_ids", &[0, 1, 2, 0, 1]),
    ];
    write(&path, Layout::Hdf5, false, &[&record, &record]).unwrap();
    let store = Arc::new(Store::open(&path).unwrap());
    let records =
        Records::new(store.clone(), Kind::Sft, 9, Kind::Sft.packing(&store, Packing::Joined)).unwrap();
    let mut batch = PackedBatch::default();
    batch.fill(&records, [1]).unwrap();
    assert_eq!((batch.starts.as_slice(), batch.positions.as_slice()), (&[0, 3, 5][..], &[0, 1, 2, 0, 1][..]));
    assert_eq!(batch.targets, [7, 0, -100, 9, -100]);
    let options = WindowOptions { seq: 5, stride: Some(2), packing: Packing::Masked };
    let windows = Windows::new(Rows::of(&store, true).unwrap(), &options).unwrap();
    // The token behind the window begins another record.
    batch.fill(&windows, [0]).unwrap();
    assert_eq!(
        (batch.starts.as_slice(), batch.targets.as_slice()),
        (&[0, 3, 5][..], &[7, 0, -100, 9, -100][..])
    );
    assert_eq!((windows.len(), Items::<PackedBatch>::len(&records)), (3, 2));
}

/// What nobody should have written, each with its line.
#[test]
fn stores_that_should_not_be_are_refused() {
    let (dir, huge) = (tempfile::tempdir().unwrap(), 1_u64 << 63);
    let open = |name: &str| Store::open(&dir.path().join(name)).map(Arc::new);
    let bin = |name: &str, numbers: usize, meta: String| {
        put(dir.path(), &format!("{name}/sequence.bin"), vec![0; 4 * numbers]);
        put(dir.path(), &format!("{name}/meta.json"), meta);
        open(name)
    };
    let meta = |shape: String, offsets: String| {
        format!(r#"{{"sequence": {{"shape": {shape}, "dtype": "int32", "offsets": {offsets}}}}}"#)
    };
    says(bin("a", 0, meta(format!("[0, {huge}, 4]"), "[0]".into())), "`shape` is larger than any file");
    says(bin("b", 4, meta("[1, 4]".into(), format!("[0, {huge}, 1]"))), "`offsets` goes down");
    let lines = |name: &str, text: &str| {
        put(dir.path(), name, text);
        open(name)
    };
    says(lines("c.jsonl", "{\"sequence\": [1]}\n{\"sequence\": [1, null]}"), "line 2, `sequence` is no list");
    let apart = "{\"sequence\": [1], \"loss_mask\": [1]}\n{\"sequence\": [2]}\n{\"loss_mask\": [0]}\n";
    let store = lines("d.jsonl", apart).unwrap();
    says(Records::new(store, Kind::Sft, 9, Packing::Joined), "`loss_mask` number 1 is of another record");
    let empty = lines("e.jsonl", "{\"sequence\": [1, 2], \"loss_mask\": []}").unwrap();
    let options = WindowOptions { seq: 1, stride: None, packing: Packing::Joined };
    says(Windows::new(Rows::of(&empty, true).unwrap(), &options), "0 tokens of data do not fill one window");
    for (kind, line, words) in [
        (
            Kind::Sft,
            r#"{"sequence": [1, 2], "loss_mask": [0, 1], "position_ids": [0]}"#,
            "`position_ids` has 1",
        ),
        (Kind::Sft, r#"{"sequence": [], "loss_mask": [], "x": 1}"#, "`sequence` is empty"),
        (Kind::Grpo, r#"{"prompts": [1], "responses": [[2]], "masks": [[1]], "rewards": [1, 2]}"#, "not 1"),
        (Kind::Kto, r#"{"sequence": [1, 2], "loss_mask": [0, 1], "label": [1, 0]}"#, "`label` has 2"),
    ] {
        let checked = lines("f.jsonl", line).and_then(|store| {
            Records::new(store, kind, 9, Packing::Joined).and_then(|records| records.check())
        });
        says(checked.map(drop), words);
    }
    let state = crate::data::preprocess::State { version: 1, ..Default::default() };
    let inside = lines("g/domain/data_0000.jsonl", "{\"sequence\": [1]}");
    inside.unwrap();
    for (place, is_refused) in [("progress.json", false), ("g/progress.json", true)] {
        state.write(&dir.path().join(place)).unwrap();
        assert_eq!(open("g/domain").is_err(), is_refused);
    }
}

#[test]
fn what_a_layout_cannot_hold_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (layout, gzip, name) in ALL {
        let path = dir.path().join(name);
        for key in ["../x", "", ".", "a/b", "a\0"] {
            says(
                write(&path, layout, gzip, &[&[(key, Element::Int32, vec![1], 0)]]),
                "no plain name of a key",
            );
        }
        for (element, x) in
            [(Element::Uint8, 256), (Element::Bool, 2), (Element::Int16, -32769), (Element::Uint32, -1)]
        {
            let said = write(&path, layout, gzip, &[&[("x", element, vec![0, x], 0)]]);
            says(said, &format!("{} cannot hold {x}", element.name()));
        }
        let mut writer = Writer::create(&path, WriteOptions { layout, gzip }).unwrap();
        writer.begin("x", &Array { element: Element::Float32, count: 1, rows: vec![] }).unwrap();
        says(writer.put(Numbers::Floats(&[f32::NAN])), "float32 cannot hold NaN");
    }
    // Nor is anything left of what was begun.
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

//! The file of metrics after crashes, full disks and strangers' edits.

use proptest::prelude::*;

use super::*;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

fn step(step: u64) -> Row {
    Row::Step(StepMetrics {
        step,
        epoch: step as f64 / 7.0,
        tokens: 100 * step,
        loss: 5.0 / (1.0 + step as f64),
        lr: 1e-3,
        grad_norm: 0.1,
        tokens_per_s: 1e4,
        seconds: 0.01,
        mfu: 0.25,
        loss_scale: None,
        router: None,
        metrics: Default::default(),
    })
}

fn validation(step: u64) -> Row {
    let metrics = BTreeMap::from([("eval/a/acc".into(), 0.5)]);
    Row::Validation(Validation { step, val_loss: 4.5, metrics })
}

fn file(rows: &[Row], tail: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("metrics.jsonl");
    let mut metrics = Metrics::create(&path).expect("created");
    rows.iter().for_each(|row| metrics.add(row).expect("added"));
    metrics.0.file.write_all(tail.as_bytes()).expect("written");
    (folder, path)
}

#[test]
fn a_line_is_what_the_readme_says() {
    let (_folder, path) = file(&[step(7), validation(7)], "");
    let text = fs::read_to_string(path).expect("read");
    let first = "{\"step\":7,\"epoch\":1.0,\"tokens\":700,\"loss\":0.625,\"lr\":0.001,\"grad_norm\":0.1,\
                 \"tokens_per_s\":10000.0,\"seconds\":0.01,\"mfu\":0.25}\n";
    assert_eq!(text, format!("{first}{{\"step\":7,\"val_loss\":4.5,\"eval/a/acc\":0.5}}\n"));
}

#[test]
fn a_resumed_file_is_that_of_an_uninterrupted_run() {
    let rows = [step(1), step(2), validation(2), step(3), validation(3), step(4)];
    for tail in ["", "{\"step\":5,\"ep", "{\"step\":5,\"val_loss\":1.0}"] {
        let (folder, path) = file(&rows, tail);
        assert_eq!(read(&path).expect("read"), (rows.to_vec(), Vec::new()));
        let (mut metrics, notes) = Metrics::resume(&path, 2).expect("resumed");
        assert!(notes.is_empty(), "{notes:?}");
        assert_eq!(read(&path).expect("read").0, rows[..3]);
        rows[3..].iter().for_each(|row| metrics.add(row).expect("added"));
        metrics.sync().expect("durable");
        let (_other, straight) = file(&rows, "");
        assert_eq!(fs::read(&path).expect("read"), fs::read(straight).expect("read"));
        assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 1);
    }
}

#[test]
fn what_is_not_finite_is_null_and_back() {
    let mut row = step(1);
    if let Row::Step(step) = &mut row {
        (step.loss, step.grad_norm) = (f64::NAN, f64::INFINITY);
    }
    let (_folder, path) = file(&[row], "");
    assert!(fs::read_to_string(&path).expect("read").contains("\"loss\":null"));
    let (rows, notes) = read(&path).expect("read");
    assert!(matches!(&rows[0], Row::Step(row) if row.loss.is_nan() && row.grad_norm.is_nan()));
    assert!(notes.is_empty());
}

#[test]
fn lines_of_strangers_are_left_out_and_said() {
    let long = format!("{}\n", "x".repeat(3 * LONGEST as usize));
    let (_folder, path) = file(&[step(1)], &format!("what?\n{long}{{\"step\":2,\"val_loss\":1.0}}\n\n"));
    let (rows, notes) = read(&path).expect("read");
    assert_eq!(rows.iter().map(Row::step).collect::<Vec<_>>(), [1, 2]);
    assert!(notes[0].contains("metrics.jsonl: 3 lines cannot be read and are left out, the first is line 2"));
    let (_metrics, again) = Metrics::resume(&path, 9).expect("resumed");
    assert_eq!(notes, again);
    assert_eq!(read(&path).expect("read"), (rows, Vec::new()));
}

#[test]
fn a_full_disk_is_an_error_and_nothing_more() {
    let (_folder, path) = file(&[step(1)], "");
    let (mut metrics, _) = Metrics::resume(&path, 1).expect("resumed");
    let whole =
        std::mem::replace(&mut metrics.0.file, File::options().write(true).open("/dev/full").expect("full"));
    let line = metrics.add(&step(2)).expect_err("no room").to_string();
    assert!(line.contains("metrics.jsonl: cannot append to it: No space left"), "{line}");
    metrics.0.file = whole;
    metrics.add(&step(3)).expect("room again");
    assert_eq!(read(&path).expect("read").0, [step(1), step(3)]);
}

#[test]
fn a_missing_file_has_no_rows_and_can_be_resumed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("metrics.jsonl");
    assert_eq!(read(&path).expect("read"), (Vec::new(), Vec::new()));
    let (mut metrics, _) = Metrics::resume(&path, 5).expect("resumed");
    metrics.add(&step(6)).expect("added");
    assert_eq!(read(&path).expect("read").0, [step(6)]);
    assert!(Metrics::create(&folder.path().join("a/b")).is_err());
}

#[test]
fn utilisation_by_hand() {
    assert_eq!(mfu(6e8, 1000.0, 2.4e12), 0.25);
    assert_eq!(mfu(6e8, 1000.0, 0.0), 0.0);
}

proptest! {
    #[test]
    fn any_bytes_can_be_read(bytes in proptest::collection::vec(any::<u8>(), 0..400), at in 0u64..9) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("m");
        fs::write(&path, bytes).expect("written");
        let (rows, _) = read(&path).expect("read");
        let (_metrics, _) = Metrics::resume(&path, at).expect("resumed");
        let kept: Vec<u64> = rows.iter().map(Row::step).filter(|step| *step <= at).collect();
        prop_assert_eq!(kept, read(&path).expect("read").0.iter().map(Row::step).collect::<Vec<_>>());
    }
}

/// A field that comes later is the last column; a table that is begun again from its rows is the same.
#[test]
fn a_table_has_a_column_for_each_field() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("metrics.csv");
    let lost = Row::Step(StepMetrics { loss: f64::NAN, ..as_step(step(2)) });
    let named = BTreeMap::from([("eval/a, b/\"acc\"".into(), 0.5)]);
    let rows = [step(1), lost, Row::Validation(Validation { step: 2, val_loss: 4.5, metrics: named })];
    let mut csv = Csv::create(&path, &[]).expect("created");
    rows.iter().for_each(|row| csv.add(row).expect("added"));
    let text = fs::read_to_string(&path).expect("read");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        "step,epoch,tokens,loss,lr,grad_norm,tokens_per_s,seconds,mfu,val_loss,\"eval/a, b/\"\"acc\"\"\""
    );
    assert!(
        lines[2].starts_with("2,") && lines[2].contains(",200,NaN,0.001,") && lines[2].ends_with(",,"),
        "{text}"
    );
    assert_eq!(lines[3], "2,,,,,,,,,4.5,0.5");
    Csv::create(&path, &rows).expect("created");
    assert_eq!(fs::read_to_string(&path).expect("read"), text);
}

fn as_step(row: Row) -> StepMetrics {
    let Row::Step(step) = row else { panic!() };
    step
}

//! `astrai data`: what prepared data hold, as training sees them, and their conversion from one layout to another.

use crate::failure::{Done, Failure, bail, warn};
use crate::progress::Progress;
use crate::table::table;
use astrai_serve::tokenizer::Tokenizer;
use astrai_train::batch::{Items, PackedBatch};
use astrai_train::data::store::{Array, Element, Layout, Numbers, WriteOptions, Writer};
use astrai_train::data::{
    Column, DataError, Kind, Packing, Records, Rows, Store, WindowOptions, Windows, padded,
};
use astrai_train::preference::{Batch, Sample};
use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Numbers that are converted at a time.
const BLOCK: u64 = 1 << 20;

/// Windows of a table, unless told otherwise.
const SHOWN: u64 = 20;

/// Tokens of a record that is shown; more are a row that windows are cut from.
const ROW: u64 = 1 << 20;

/// Look at prepared data, or convert them
///
/// Prepared data are HDF5 files (a group per key, `data_0` and on in it), folders of .bin shards with a meta.json, JSON lines of
/// numbers, or the shards that `astrai train` makes of text.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai data info prepared
  astrai data show prepared --limit 3
  astrai data windows prepared --strategy sft --window 64 --stride 32 --limit 2 --json
  astrai data convert prepared prepared.h5 --gzip")]
pub struct Data {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Info(Info),
    Show(Show),
    Windows(Cut),
    Convert(Convert),
}

/// Keys, shapes and counts
#[derive(Args)]
struct Info {
    /// A file or folder
    path: PathBuf,
    /// One JSON object instead of the table
    #[arg(long)]
    json: bool,
}

/// Records as training sees them, with the tokens that are learnt marked
#[derive(Args)]
struct Show {
    /// A file or folder
    path: PathBuf,
    /// What the keys are for [default: what they speak of]
    #[arg(long, value_enum, value_name = "NAME")]
    strategy: Option<Kind>,
    /// Records to show
    #[arg(long, value_name = "N", default_value_t = 3)]
    limit: u64,
    /// The first of them
    #[arg(long, value_name = "N", default_value_t = 0)]
    from: u64,
    /// tokenizer.json, or the folder of one, to show text [default: the one beside the data]
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
    /// A JSON object a record: ids, masks, targets with -100 where none is learnt, where sequences start
    #[arg(long)]
    json: bool,
}

/// Windows of a row of tokens as training sees them
#[derive(Args)]
struct Cut {
    /// A file or folder
    path: PathBuf,
    /// What is learnt: seq every token, sft those of the mask
    #[arg(long, value_enum, value_name = "NAME", default_value = "seq")]
    strategy: Kind,
    /// Tokens of a window
    #[arg(long, value_name = "TOKENS")]
    window: usize,
    /// From the start of one window to the next [default: --window]
    #[arg(long, value_name = "TOKENS")]
    stride: Option<usize>,
    /// How attention treats documents that share a window; sft data with positions always tell them apart
    #[arg(long, value_enum, value_name = "NAME", default_value = "joined")]
    packing: Packing,
    /// Windows to show [default: 20, with --json all]
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// A JSON object a window instead of a table
    #[arg(long)]
    json: bool,
}

/// Write data in another layout
#[derive(Args)]
struct Convert {
    /// A file or folder
    from: PathBuf,
    /// Where to: NAME.h5, NAME.jsonl, or a folder for .bin files
    to: PathBuf,
    /// HDF5: packed chunks, which random windows are slower to read from
    #[arg(long)]
    gzip: bool,
}

impl Data {
    /// Does what was asked.
    pub fn run(self, out: &mut dyn Write) -> Done {
        let done = match self.what {
            What::Info(c) => c.run(out),
            What::Show(c) => c.run(out),
            What::Windows(c) => c.run(out),
            What::Convert(c) => c.run(out),
        };
        done.map(|()| ExitCode::SUCCESS)
    }
}

fn open(path: &Path) -> Result<Arc<Store>, Failure> {
    let store = Store::open(path).map_err(line)?;
    warn(store.warnings());
    Ok(Arc::new(store))
}

fn line(e: DataError) -> Failure {
    Failure::Message(e.to_string())
}

fn layout(layout: Layout) -> String {
    json!(layout).as_str().unwrap_or_default().to_string()
}

impl Info {
    fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let store = open(&self.path)?;
        let key = |(key, column): (&str, &Column)| {
            let lengths = (0..column.segments()).map(|i| column.shape(i).0);
            let types: Vec<&str> = column.elements().map(Element::name).collect();
            let rows = (0..column.segments()).filter_map(|i| column.shape(i).1).max();
            let (least, most) = (lengths.clone().min().unwrap_or(0), lengths.max().unwrap_or(0));
            json!({"key": key, "types": types, "segments": column.segments(), "numbers": column.len(),
                "shortest": least, "longest": most, "rows": rows})
        };
        let keys: Vec<Value> = store.keys().map(key).collect();
        let kind = Kind::of(&store);
        let files: Vec<String> = store.files().map(|f| f.display().to_string()).collect();
        if self.json {
            let info = json!({"layout": store.layout(), "strategy": kind, "files": files, "eos": store.eos(), "keys": keys});
            return Ok(writeln!(out, "{info}")?);
        }
        writeln!(out, "{}: {}, {} files", self.path.display(), layout(store.layout()), files.len())?;
        let text = |v: &Value| match v {
            Value::Null => String::new(),
            Value::String(s) => s.clone(),
            Value::Array(list) => list.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" "),
            other => other.to_string(),
        };
        let head = ["key", "types", "segments", "numbers", "shortest", "longest", "rows"];
        let rows: Vec<Vec<String>> =
            keys.iter().map(|k| head.iter().map(|h| text(&k[*h])).collect()).collect();
        Ok(write!(out, "{}", table(&head, &rows))?)
    }
}

/// Ids, mask, what training predicts of them and where sequences start.
fn seen(ids: &str, mask: &str, sample: &Sample, batch: &PackedBatch) -> Map<String, Value> {
    let learnt: Vec<i32> = sample.trained.iter().map(|t| i32::from(*t)).collect();
    let all = [
        (ids.to_string(), json!(sample.ids)),
        (mask.to_string(), json!(learnt)),
        (format!("{ids}_labels"), json!(batch.targets)),
        (format!("{ids}_starts"), json!(batch.starts)),
    ];
    all.into_iter().collect()
}

impl Show {
    fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let store = open(&self.path)?;
        let kind = self.strategy.or(Kind::of(&store)).ok_or_else(|| {
            format!("{}: its keys are of no strategy; see `astrai data info`", self.path.display())
        })?;
        let packing = kind.packing(&store, Packing::Joined);
        let records = Records::new(store, kind, usize::MAX, packing).map_err(line)?;
        let (tokenizer, count) = (self.tokenizer()?, records.count());
        if self.from > 0 && self.from >= count {
            bail!(
                "--from {}: {} has {count} records, the first of which is 0",
                self.from,
                self.path.display()
            );
        }
        let colour = std::io::stdout().is_terminal();
        for i in self.from..count.min(self.from.saturating_add(self.limit)) {
            let longest = kind
                .keys()
                .iter()
                .filter_map(|key| Some(records.store().column(key)?.shape(i as usize).0))
                .max();
            if let Some(tokens) = longest.filter(|tokens| *tokens > ROW) {
                bail!(
                    "{}: record {i} is a row of {tokens} tokens; `astrai data windows` shows what training cuts from it",
                    self.path.display()
                );
            }
            let (shown, samples) = record(&records, i).map_err(line)?;
            if self.json {
                let mut object = json!({"record": i}).as_object().cloned().unwrap_or_default();
                object.extend(shown);
                writeln!(out, "{}", Value::Object(object))?;
                continue;
            }
            for (name, sample) in samples {
                let learnt = sample.trained.iter().filter(|t| **t).count();
                writeln!(out, "record {i}, {name}: {} tokens, {learnt} learnt", sample.ids.len())?;
                writeln!(out, "{}", marked(&sample, tokenizer.as_ref(), colour))?;
            }
        }
        Ok(())
    }

    fn tokenizer(&self) -> Result<Option<Tokenizer>, Failure> {
        let folder = if self.path.is_dir() { &self.path } else { self.path.parent().unwrap_or(&self.path) };
        let path = match &self.tokenizer {
            Some(path) => path,
            None if folder.join("tokenizer.json").exists() => folder,
            None => return Ok(None),
        };
        Tokenizer::open(path).map(Some).map_err(|e| Failure::Message(e.to_string()))
    }
}

/// A record as JSON, and its sequences by name.
type Shown = (Map<String, Value>, Vec<(String, Sample)>);

fn record(records: &Records, i: u64) -> Result<Shown, DataError> {
    let mut batch = PackedBatch::default();
    Ok(match records.kind() {
        Kind::Seq | Kind::Sft => {
            let sample = records.sample(i)?;
            // A row that windows are cut from may have empty pieces; a record has none.
            batch.fill(records, (!sample.ids.is_empty()).then_some(i))?;
            let mut shown = seen("sequence", "loss_mask", &sample, &batch);
            if records.store().column("position_ids").is_some() {
                shown.insert(
                    "position_ids".into(),
                    json!(records.store().record("position_ids", i as usize)?),
                );
            }
            (shown, vec![("sequence".into(), sample)])
        }
        Kind::Kto => {
            let record = records.labelled(i)?;
            batch.push_trained(&record.sample.ids, &record.sample.trained);
            let mut shown = seen("sequence", "loss_mask", &record.sample, &batch);
            shown.insert("label".into(), json!(record.desirable));
            let name = if record.desirable { "wanted" } else { "unwanted" };
            (shown, vec![(name.into(), record.sample)])
        }
        Kind::Dpo => {
            let pair = records.pair(i)?;
            let mut pairs = astrai_train::preference::PairBatch::default();
            pairs.fill(records, [i])?;
            let mut shown = seen("chosen", "chosen_mask", &pair.chosen, &pairs.chosen);
            shown.extend(seen("rejected", "rejected_mask", &pair.rejected, &pairs.rejected));
            shown.extend(pair.reference.map(|r| ("reference".to_string(), json!(r))));
            (shown, vec![("chosen".into(), pair.chosen), ("rejected".into(), pair.rejected)])
        }
        Kind::Grpo => {
            let group = records.group(i)?;
            let ids: Vec<Vec<i32>> = group.responses.iter().map(|r| r.ids.clone()).collect();
            let masks = group.responses.iter().map(|r| r.trained.iter().map(|t| i32::from(*t)).collect());
            let masks: Vec<Vec<i32>> = masks.collect();
            let shown = [
                ("prompts", json!(group.prompt)),
                ("responses", json!(padded(&ids, false).0)),
                ("masks", json!(padded(&masks, false).0)),
                ("rewards", json!(group.rewards)),
            ];
            let answer = |(g, r): (usize, &Sample)| {
                let ids = [group.prompt.as_slice(), &r.ids].concat();
                let trained = [vec![false; group.prompt.len()], r.trained.clone()].concat();
                (format!("answer {g} of reward {}", group.rewards[g]), Sample { ids, trained })
            };
            let samples = group.responses.iter().enumerate().map(answer).collect();
            (shown.into_iter().map(|(k, v)| (k.to_string(), v)).collect(), samples)
        }
    })
}

/// A sequence as text, or as ids without a tokenizer; what is learnt is green on a terminal and in brackets elsewhere.
fn marked(sample: &Sample, tokenizer: Option<&Tokenizer>, colour: bool) -> String {
    let (open, close) = if colour { ("\u{1b}[32m", "\u{1b}[0m") } else { ("\u{27e6}", "\u{27e7}") };
    let mut text = String::new();
    let mut at = 0;
    while at < sample.ids.len() {
        let learnt = sample.trained[at];
        let run = sample.trained[at..].iter().take_while(|t| **t == learnt).count();
        let shown = &sample.ids[at..at + run];
        let ids: Option<Vec<u32>> = shown.iter().map(|&id| u32::try_from(id).ok()).collect();
        let text_of = |ids: Vec<u32>| tokenizer?.decode(&ids, false).ok();
        let part = ids.and_then(text_of).unwrap_or_else(|| format!("{shown:?}"));
        // What the data hold must not command the terminal.
        let part = part.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c });
        text.push_str(if learnt { open } else { "" });
        text.extend(part);
        text.push_str(if learnt { close } else { "" });
        at += run;
    }
    text
}

impl Cut {
    fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        if !matches!(self.strategy, Kind::Seq | Kind::Sft) {
            bail!("--strategy: only seq and sft cut windows; `astrai data show` shows records of the others");
        }
        let store = open(&self.path)?;
        let packing = self.strategy.packing(&store, self.packing);
        let rows = Rows::of(&store, self.strategy == Kind::Sft).map_err(line)?;
        let options = WindowOptions { seq: self.window, stride: self.stride, packing };
        let windows = Windows::new(rows, &options).map_err(line)?;
        let mut batch = PackedBatch::default();
        let mut rows = Vec::new();
        let limit = self.limit.unwrap_or(if self.json { u64::MAX } else { SHOWN });
        for i in 0..windows.len().min(limit) {
            let window = windows.window(i).map_err(line)?;
            batch.fill(&windows, [i]).map_err(line)?;
            if !self.json {
                let numbers = [i, window.begin, batch.sequences() as u64, batch.valid() as u64];
                rows.push(numbers.map(|n| n.to_string()).to_vec());
                continue;
            }
            let mut shown = json!({"window": i, "begin": window.begin, "input_ids": window.input_ids,
                "target_ids": window.target_ids, "labels": batch.targets, "starts": batch.starts});
            let beside = [("loss_mask", window.loss_mask), ("position_ids", window.position_ids)];
            beside
                .into_iter()
                .filter_map(|(key, v)| Some((key, v?)))
                .for_each(|(key, v)| shown[key] = json!(v));
            writeln!(out, "{shown}")?;
        }
        if !self.json {
            writeln!(out, "{} windows of {}", windows.len(), self.window)?;
            write!(out, "{}", table(&["window", "begin", "documents", "learnt"], &rows))?;
        }
        Ok(())
    }
}

impl Convert {
    fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let store = open(&self.from)?;
        let layout = match self.to.extension().and_then(|e| e.to_str()) {
            Some("h5" | "hdf5") => Layout::Hdf5,
            Some("jsonl") => Layout::Jsonl,
            _ => Layout::Bin,
        };
        if self.gzip && layout != Layout::Hdf5 {
            bail!("--gzip: only HDF5 is packed; name a .h5 file, or remove it");
        }
        let options = WriteOptions { layout, gzip: self.gzip };
        let done = Progress::during("converting", |progress| convert(&store, &self.to, options, progress));
        let numbers = done.map_err(line)?;
        Ok(writeln!(out, "{numbers} numbers of {} keys in {}", store.keys().count(), self.to.display())?)
    }
}

fn convert(
    store: &Store,
    to: &Path,
    options: WriteOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, DataError> {
    let mut writer = Writer::create(to, options)?;
    let total = store.keys().map(|(_, column)| column.len()).sum();
    let most = store.keys().map(|(_, column)| column.segments()).max().unwrap_or(0);
    let mut done = 0;
    for i in 0..most {
        for (key, column) in store.keys().filter(|(_, column)| i < column.segments()) {
            let element = column.elements().max().unwrap_or(Element::Int32);
            let ((count, matrix), begin) = (column.shape(i), column.begin(i));
            let rows = if matrix.is_some() { store.row_lengths(key, i)? } else { vec![] };
            writer.begin(key, &Array { element, count: count as usize, rows })?;
            if element.is_float() {
                writer.put(Numbers::Floats(&store.floats(key, i)?))?;
            } else if matrix.is_some() {
                writer.put(Numbers::Ints(&store.record(key, i)?))?;
            } else {
                for from in (0..count).step_by(BLOCK as usize) {
                    let mut block = vec![0; BLOCK.min(count - from) as usize];
                    store.ints(key, begin + from, &mut block)?;
                    writer.put(Numbers::Ints(&block))?;
                    progress(done + from, total);
                }
            }
            done += count;
            progress(done, total);
        }
        writer.end_record()?;
    }
    writer.finish()?;
    Ok(total)
}

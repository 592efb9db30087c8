//! The run. In: files of JSON lines, a builder, a folder. Out: shards, written in the order of the input whatever threads do, and a
//! [`Summary`]. Lines are read some megabytes at a time, built by all threads, and kept until a shard is full; then each domain's
//! are packed and written, and the place in the input is noted. A run that is started again goes on from there.

use super::build::{Builder, Nothing, Prepared, Values};
use super::config::{Config, Input, Positions, Processing, is_mask};
use super::state::{DATASET, Domain, State, progress};
use crate::data::documents::next_line;
use crate::data::packing::{pack, pieces};
use crate::data::store::{Array, Layout, Numbers, WriteOptions, Writer};
use crate::data::text::{Corpus, Kind, Source};
use crate::data::{DataError, IDS, Progress, padded};
use astrai_files::{UNFINISHED, hex};
use astrai_serve::tokenizer::Tokenizer;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufReader, Seek, SeekFrom};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Bytes of lines that are read before threads build them, for each thread.
const WAVE: usize = 4 << 20;

/// Records of a shard at most, so that its `meta.json` stays small.
const RECORDS: u64 = 500_000;

/// Domains at most: each has a folder, and a shard whenever one is full.
const DOMAINS: usize = 1000;

/// What is to be done.
pub struct Preprocess {
    builder: Builder,
    files: Vec<Source>,
    out: PathBuf,
    layout: Layout,
    state: State,
    /// Whether the folder held part of the results already.
    resumed: bool,
}

/// What was made.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Counts by domain, and of what was left out.
    pub state: State,
    /// Whether nothing had to be done, because the folder held it all.
    pub cached: bool,
    /// Whether an earlier run's shards were kept.
    pub resumed: bool,
}

/// What a line gives: a blank one nothing.
type Built = Option<Result<Prepared, Nothing>>;

/// A line of the input, and where it ends.
struct Line {
    bytes: Vec<u8>,
    file: usize,
    end: u64,
    number: u64,
}

impl Preprocess {
    /// Looks at the input and at what the folder `out` holds already.
    ///
    /// # Errors
    /// The input cannot be read, or `out` holds something else.
    pub fn new(
        config: Config,
        tokenizer: Tokenizer,
        inputs: &[PathBuf],
        out: &Path,
    ) -> Result<Preprocess, DataError> {
        let layout = config.layout().unwrap_or(Layout::Bin);
        let builder = Builder::new(config, tokenizer)?;
        let files = lines_of(inputs, out)?;
        let mut sum = Sha256::new();
        // What changes no result is no part of it.
        let known = builder.config().clone();
        let known = Config {
            tokenizer: None,
            input: Input { files: vec![], ..known.input },
            preprocessing: Processing { batch_size: 1, ..known.preprocessing },
            ..known
        };
        let what = serde_json::to_value(known);
        let what =
            what.map_err(|e| DataError::Options(format!("the configuration cannot be written: {e}")))?;
        sum.update(what.to_string());
        sum.update(builder.identity());
        for file in &files {
            let path = file.path.canonicalize().unwrap_or_else(|_| file.path.clone());
            sum.update(format!("{:?} {} {}\n", path, file.bytes, file.modified));
        }
        let fingerprint = hex(sum);
        let weights = builder.config().output.weights.clone();
        let fresh = State { version: 1, fingerprint: fingerprint.clone(), weights, ..State::default() };
        let found = State::read(&progress(out))?;
        let done = State::read(&out.join(DATASET))?;
        let (state, resumed) = match (found, done) {
            (_, Some(done)) if done.fingerprint == fingerprint => (done, true),
            (Some(found), None) if found.fingerprint == fingerprint => (found, true),
            // Nothing is whole yet: a record was wrong, say, and is mended.
            (Some(found), None) if found.domains.values().all(|domain| domain.shards == 0) => (fresh, false),
            (None, None) => {
                // A run that was killed at once leaves only what it had not finished.
                let other =
                    |name: std::ffi::OsString| !name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes());
                let holds = |entries: fs::ReadDir| entries.flatten().any(|entry| other(entry.file_name()));
                if fs::read_dir(out).is_ok_and(holds) {
                    let message =
                        "is not empty and was not written by `astrai preprocess`; choose another folder";
                    return Err(DataError::refused(out, message));
                }
                (fresh, false)
            }
            _ => {
                let message = "holds data of another configuration, tokenizer or input (paths, sizes or times differ); choose another folder, or remove it";
                return Err(DataError::refused(out, message));
            }
        };
        Ok(Preprocess { builder, files, out: out.to_path_buf(), layout, state, resumed })
    }

    /// Bytes of the input.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Does what is left to do. `progress` is told bytes of the input done of all.
    ///
    /// # Errors
    /// A record is wrong, which the line says; or something cannot be read or written. What is written by then stays, and the
    /// next run goes on from it.
    pub fn run(mut self, progress_of: Progress<'_>) -> Result<Summary, DataError> {
        let marker = progress(&self.out);
        self.state.check(&self.out, self.layout)?;
        if self.out.join(DATASET).exists() {
            // A run that was killed between its last two steps.
            Writer::remove(&marker)?;
            return Ok(Summary { state: self.state, cached: true, resumed: true });
        }
        fs::create_dir_all(&self.out).map_err(DataError::io(&self.out, "make the folder"))?;
        self.state.write(&marker)?;
        self.state.clean(&self.out, self.layout)?;
        self.builder.tokenizer().save_to(&self.out)?;
        let before: u64 = self.files.iter().take(self.state.file).map(|f| f.bytes).sum();
        progress_of(before + self.state.offset, self.bytes());
        let mut pending = Pending::default();
        while let Some(wave) = self.read()? {
            // Two threads a core: one waits while its conversation is rendered in another process.
            let threads = 2 * thread::available_parallelism().map_or(1, NonZero::get);
            let built = build(&self.builder, &wave, threads);
            for (line, built) in wave.iter().zip(built) {
                if self.full() {
                    break;
                }
                self.take(line, built, &mut pending)?;
            }
            let Some(last) = wave.last() else { break };
            let before: u64 = self.files.iter().take(last.file).map(|f| f.bytes).sum();
            progress_of(before + last.end, self.bytes());
            if self.full() {
                break;
            }
        }
        self.flush(&mut pending)?;
        if self.state.domains.is_empty() {
            let dropped = &self.state.dropped;
            let message = format!(
                "no record is left (left out: {dropped:?}); look at the records and the configuration"
            );
            return Err(DataError::Options(message));
        }
        self.state.write(&self.out.join(DATASET))?;
        Writer::remove(&marker)?;
        Ok(Summary { state: self.state, cached: false, resumed: self.resumed })
    }

    /// Whether as many records are made as the configuration allows.
    fn full(&self) -> bool {
        self.builder.config().preprocessing.max_items.is_some_and(|most| self.state.records >= most)
    }

    /// The next lines, from where the state stands; moves the state's reading place only when lines are taken.
    fn read(&self) -> Result<Option<Vec<Line>>, DataError> {
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        let (mut lines, mut bytes) = (Vec::new(), 0);
        let (mut file, mut at, mut number) = (self.state.file, self.state.offset, self.state.line);
        while bytes < WAVE * threads {
            let Some(source) = self.files.get(file) else { break };
            let (opened, _) = astrai_files::open(&source.path)?;
            let mut reader = BufReader::with_capacity(1 << 18, opened);
            reader.seek(SeekFrom::Start(at)).map_err(DataError::io(&source.path, "read on"))?;
            loop {
                let line = next_line(&mut reader, &source.path, number + 1)?;
                let Some(line) = line else {
                    (file, at, number) = (file + 1, 0, 0);
                    break;
                };
                at += line.len() as u64;
                number += 1;
                bytes += line.len();
                lines.push(Line { bytes: line, file, end: at, number });
                if bytes >= WAVE * threads {
                    break;
                }
            }
        }
        Ok((!lines.is_empty()).then_some(lines))
    }

    /// Takes what a line gave; writes shards when they are full.
    fn take(&mut self, line: &Line, built: Built, pending: &mut Pending) -> Result<(), DataError> {
        (self.state.file, self.state.offset, self.state.line) = (line.file, line.end, line.number);
        match built {
            None => {}
            Some(Err(Nothing::Dropped(why))) => *self.state.dropped.entry(why.into()).or_default() += 1,
            Some(Err(Nothing::Wrong(what))) => {
                let path = &self.files[line.file].path;
                return Err(DataError::refused(path, format!("line {}: {what}", line.number)));
            }
            Some(Ok(prepared)) => {
                let domains = &mut self.state.domains;
                if domains.len() >= DOMAINS && !domains.contains_key(&prepared.domain) {
                    let message = format!(
                        "line {}: there are more than {DOMAINS} domains; name a field of few values in `domain_key`",
                        line.number
                    );
                    return Err(DataError::refused(&self.files[line.file].path, message));
                }
                domains.entry(prepared.domain.clone()).or_default();
                self.state.records += 1;
                self.state.cut += u64::from(prepared.cut);
                pending.tokens += prepared.tokens();
                pending.records += 1;
                pending.domains.entry(prepared.domain.clone()).or_default().push(prepared);
                let most = self.builder.config().output.max_tokens_per_shard;
                if pending.tokens >= most || pending.records >= RECORDS {
                    self.flush(pending)?;
                }
            }
        }
        Ok(())
    }

    /// Writes a shard for each domain, then the state that counts them.
    fn flush(&mut self, pending: &mut Pending) -> Result<(), DataError> {
        for (name, records) in std::mem::take(&mut pending.domains) {
            let domain = self.state.domains.entry(name.clone()).or_default();
            let path = Writer::path(&self.out.join(&name), self.layout, domain.shards);
            let config = self.builder.config();
            let mut writer =
                Writer::create(&path, WriteOptions { layout: self.layout, gzip: config.output.gzip })?;
            domain.records += records.len() as u64;
            for record in arrange(config, records) {
                domain.sequences += 1;
                count(domain, &record);
                for (key, values) in &record {
                    write(&mut writer, config, key, values)?;
                }
                writer.end_record()?;
            }
            writer.finish()?;
            domain.shards += 1;
        }
        (pending.tokens, pending.records) = (0, 0);
        self.state.write(&progress(&self.out))
    }
}

/// Records that wait for their shard.
#[derive(Default)]
struct Pending {
    domains: BTreeMap<String, Vec<Prepared>>,
    tokens: u64,
    records: u64,
}

/// The files of JSON lines under these paths.
fn lines_of(inputs: &[PathBuf], out: &Path) -> Result<Vec<Source>, DataError> {
    let corpus = Corpus::find(inputs, &[out.to_path_buf()])?;
    let files: Vec<Source> = corpus.files().iter().filter(|f| f.kind == Kind::JsonLines).cloned().collect();
    let named = inputs.iter().find(|path| path.is_file() && !files.iter().any(|f| f.path == **path));
    match (named, inputs.first()) {
        (Some(path), _) => Err(DataError::refused(path, "is no .jsonl file; give records as lines of JSON")),
        (None, Some(path)) if files.is_empty() => {
            Err(DataError::refused(path, "holds no .jsonl file; give records as lines of JSON"))
        }
        _ => Ok(files),
    }
}

/// What each line gives, by all threads; blank lines give nothing.
fn build(builder: &Builder, lines: &[Line], threads: usize) -> Vec<Built> {
    let size = builder.config().preprocessing.batch_size;
    let parts: Vec<&[Line]> = lines.chunks(size).collect();
    let done: Vec<OnceLock<Vec<Built>>> = parts.iter().map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let one = |line: &Line| {
        let first = if line.number == 1 { line.bytes.strip_prefix("\u{feff}".as_bytes()) } else { None };
        let bytes = first.unwrap_or(&line.bytes).trim_ascii();
        (!bytes.is_empty()).then(|| builder.line(bytes))
    };
    let work = || {
        while let Some((part, slot)) = {
            let at = next.fetch_add(1, Ordering::Relaxed);
            parts.get(at).zip(done.get(at))
        } {
            slot.get_or_init(|| part.iter().map(one).collect());
        }
    };
    thread::scope(|scope| {
        (1..threads.min(parts.len())).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    done.into_iter().filter_map(OnceLock::into_inner).flatten().collect()
}

/// Counts tokens of a record, and those that are learnt; without a mask all are.
fn count(domain: &mut Domain, record: &[(String, Values)]) {
    let masked = record.iter().any(|(key, _)| is_mask(key));
    for (key, values) in record {
        let (len, sum) = match values {
            Values::Ints(list) => (list.len() as u64, list.iter().map(|&m| m as u64).sum::<u64>()),
            Values::Rows(rows) => {
                let all = rows.iter().flatten();
                (all.clone().count() as u64, all.map(|&m| m as u64).sum())
            }
            Values::Floats(_) => continue,
        };
        if is_mask(key) {
            domain.learnt += sum;
        } else if IDS.contains(&key.as_str()) {
            domain.tokens += len;
            domain.learnt += if masked { 0 } else { len };
        }
    }
}

/// The records of a shard as they are written: packed, with positions.
pub fn arrange(
    config: &Config,
    records: Vec<Prepared>,
) -> Box<dyn Iterator<Item = Vec<(String, Values)>> + '_> {
    let p = &config.preprocessing;
    if config.input.sections.is_none() {
        return Box::new(records.into_iter().map(|record| record.keys));
    }
    let lengths: Vec<usize> = records.iter().map(|record| record.tokens() as usize).collect();
    let slices = pieces(&lengths, p.max_packed_len, p.packing, p.truncation);
    let mut continued = 0;
    let bins = pack(&slices, p.max_packed_len, p.packing);
    let bin = move |bin: Vec<usize>| {
        let mut keys: Vec<(String, Values)> = Vec::new();
        let mut positions = Vec::new();
        for slice in bin.into_iter().map(|i| slices[i]) {
            for (at, (key, values)) in records[slice.document].keys.iter().enumerate() {
                let Values::Ints(list) = values else { continue };
                let part = &list[slice.begin..slice.end];
                match keys.get_mut(at) {
                    Some((_, Values::Ints(all))) => all.extend_from_slice(part),
                    _ => keys.push((key.clone(), Values::Ints(part.to_vec()))),
                }
            }
            let from = if config.output.position_ids_mode == Positions::Continuous { continued } else { 0 };
            continued += slice.len() as i32;
            positions.extend(from..from + slice.len() as i32);
        }
        if config.output.position_ids_mode != Positions::None {
            keys.push(("position_ids".into(), Values::Ints(positions)));
        }
        keys
    };
    Box::new(bins.into_iter().map(bin))
}

fn write(writer: &mut Writer, config: &Config, key: &str, values: &Values) -> Result<(), DataError> {
    let element = config.element(key, matches!(values, Values::Floats(_)));
    let begin = |writer: &mut Writer, count: usize, rows: Vec<usize>| {
        writer.begin(key, &Array { element, count, rows })
    };
    match values {
        Values::Ints(list) => {
            begin(writer, list.len(), vec![])?;
            writer.put(Numbers::Ints(list))
        }
        Values::Floats(list) => {
            begin(writer, list.len(), vec![])?;
            writer.put(Numbers::Floats(list))
        }
        Values::Rows(rows) => {
            let (rows, _) = padded(rows, false);
            begin(writer, rows.iter().map(Vec::len).sum(), rows.iter().map(Vec::len).collect())?;
            writer.put(Numbers::Ints(&rows.concat()))
        }
    }
}

//! Log-probabilities of records under frozen policies, computed once before a run so that no step needs another model. In: records, a model.
//! Out: a file in the run's folder, of each record a count and as many f32, and beside it a note of what they were made of. Records are scored in
//! their order, a batch at a time; what was written when a process was killed stays, and the next one goes on from it.

use crate::batch::{Items, PackedBatch};
use crate::data::{DataError, Records};
use crate::engine::{Recipe, wide};
use crate::error::Error;
use crate::preference::Batch as _;
use crate::strategies::{self, Batch, Sizes};
use astrai_builders::ModelConfig;
use astrai_files::{FileError, System, hex, read_text, replace};
use astrai_ir::Backend;
use astrai_runtime::{Compiled, Device, Options, Session, WeightSource, compile};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Names of the frozen policies, in the order of [`PackedBatch::logps`].
pub const POLICIES: [&str; 2] = ["reference", "old"];
/// Folder of their log-probabilities, inside the run's.
const FOLDER: &str = "logps";
/// Batches after which what was computed is made durable.
const CHUNK: u64 = 32;

/// Records, with log-probabilities under (the reference, the policy that wrote the answers) once they are known.
#[derive(Debug)]
pub struct Scored {
    records: Records,
    logps: [OnceLock<Logps>; 2],
}

impl Scored {
    /// Records that no policy has scored.
    pub fn new(records: Records) -> Scored {
        Scored { records, logps: [const { OnceLock::new() }; 2] }
    }

    /// The records.
    pub fn records(&self) -> &Records {
        &self.records
    }

    /// Adds the log-probabilities of a record, whose sequences were added to these parts of a batch one after another.
    fn add(&self, item: u64, parts: &mut [&mut PackedBatch]) -> Result<(), DataError> {
        for (policy, logps) in self.logps.iter().enumerate() {
            let Some(logps) = logps.get() else { continue };
            let all = logps.read(item)?;
            let mut rest = all.as_slice();
            for part in &mut *parts {
                let tokens = part.tokens() - part.logps[policy].len();
                let (own, others) = rest.split_at_checked(tokens).ok_or_else(|| logps.misfit(item))?;
                part.logps[policy].extend_from_slice(own);
                rest = others;
            }
            if !rest.is_empty() {
                return Err(logps.misfit(item));
            }
        }
        Ok(())
    }
}

impl Items<Batch> for Scored {
    fn len(&self) -> u64 {
        self.records.count()
    }

    fn append(&self, item: u64, batch: &mut Batch) -> Result<(), DataError> {
        match batch {
            Batch::Tokens(b) => self.records.append(item, b),
            Batch::Pairs(b) => {
                self.records.append(item, b)?;
                self.add(item, &mut [&mut b.chosen, &mut b.rejected])
            }
            Batch::Groups(b) => {
                self.records.append(item, b)?;
                self.add(item, &mut [&mut b.sequences])
            }
            Batch::Labelled(b) => {
                self.records.append(item, b)?;
                self.add(item, &mut [&mut b.sequences, &mut b.mismatched])
            }
        }
    }
}

/// Log-probabilities in a file, all there.
#[derive(Debug)]
struct Logps {
    path: PathBuf,
    file: File,
    /// Where the numbers of each record begin, and how many there are.
    places: Vec<(u64, u32)>,
}

impl Logps {
    fn read(&self, item: u64) -> Result<Vec<f32>, DataError> {
        let (at, count) = *self.places.get(item as usize).ok_or_else(|| self.misfit(item))?;
        let mut bytes = vec![0; 4 * count as usize];
        self.file.read_exact_at(&mut bytes, at).map_err(FileError::io(&self.path, "read it"))?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }

    fn misfit(&self, item: u64) -> DataError {
        FileError::refused(&self.path, format!("record {item} is of another length; {REMEDY}")).into()
    }
}

const REMEDY: &str = "remove the folder `logps`, and they are computed again";

/// What log-probabilities were made of, and how far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    /// Fingerprint of the records.
    data: String,
    /// Fingerprint of the model, and the type it computed in.
    model: String,
    /// Records that are done.
    records: u64,
    /// Bytes of them.
    bytes: u64,
    /// SHA-256 of the file, once it is complete.
    sha256: Option<String>,
}

/// A file of log-probabilities, perhaps not complete.
pub struct Scores<'a> {
    path: PathBuf,
    state: State,
    records: &'a Arc<Scored>,
    policy: usize,
}

impl<'a> Scores<'a> {
    /// What a run's folder has for set number `set` of its records, whose fingerprint is `data`, under a policy of [`POLICIES`].
    ///
    /// # Errors
    /// It has those of other records, or they cannot be read.
    pub fn find(
        run: &Path,
        (set, policy): (usize, usize),
        records: &'a Arc<Scored>,
        data: &str,
    ) -> Result<Scores<'a>, Error> {
        let path = run.join(FOLDER).join(format!("{}_{set}.f32", POLICIES[policy]));
        let note = note(&path);
        let mut state = State { data: data.into(), ..State::default() };
        if note.exists() {
            state = serde_json::from_str(&read_text(&note, 1 << 16)?)
                .map_err(|e| FileError::refused(&note, format!("is damaged ({e}); {REMEDY}")))?;
            if state.data != data {
                return Err(FileError::refused(&path, format!("is of other data; {REMEDY}")).into());
            }
        }
        Ok(Scores { path, state, records, policy })
    }

    /// Whether all are there.
    pub fn complete(&self) -> bool {
        self.state.sha256.is_some()
    }

    /// Says by which model they are made: its [`fingerprint`].
    ///
    /// # Errors
    /// What is there was computed by another model.
    pub fn by(&mut self, model: &str) -> Result<(), Error> {
        match self.state.model.as_str() {
            "" => self.state.model = model.into(),
            known if known == model => {}
            _ => return Err(FileError::refused(&self.path, format!("is of another model; {REMEDY}")).into()),
        }
        Ok(())
    }

    /// Computes what is missing, `batch` records at a time. `progress` hears how many are done.
    ///
    /// # Errors
    /// The device or the disk failed.
    pub fn compute(
        &mut self,
        scorer: &mut Scorer,
        batch: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        if self.complete() {
            return Ok(());
        }
        let io = |doing| FileError::io(&self.path, doing);
        let folder = self.path.parent().unwrap_or(Path::new(""));
        fs::create_dir_all(folder).map_err(io("make its folder"))?;
        let file = File::options().create(true).truncate(false).write(true).open(&self.path);
        let mut file = file.map_err(io("open it"))?;
        file.set_len(self.state.bytes).map_err(io("cut it"))?;
        file.seek(SeekFrom::End(0)).map_err(io("append to it"))?;
        let all = self.records.records.count();
        let (mut one, mut together) = (Batch::of(self.records.records.kind(), 0), PackedBatch::default());
        while self.state.records < all {
            let mut chunk = Vec::new();
            for _ in 0..CHUNK {
                let items = self.state.records..(self.state.records + batch).min(all);
                if items.is_empty() {
                    break;
                }
                let mut ends = vec![0];
                together.clear();
                self.state.records = items.end;
                for item in items {
                    one.fill(&**self.records, [item])?;
                    together.extend(&one.sequences());
                    ends.push(together.tokens());
                }
                let logps = scorer.score(&together)?;
                for own in ends.windows(2).map(|ends| &logps[ends[0]..ends[1]]) {
                    chunk.extend((own.len() as u32).to_le_bytes());
                    chunk.extend(own.iter().flat_map(|x| x.to_le_bytes()));
                }
            }
            file.write_all(&chunk).map_err(io("append to it"))?;
            file.sync_data().map_err(io("make it durable"))?;
            self.state.bytes += chunk.len() as u64;
            self.write()?;
            progress(self.state.records, all);
        }
        let (_, sum) = scan(&self.path, self.state.bytes)?;
        self.state.sha256 = Some(sum);
        Ok(self.write()?)
    }

    fn write(&self) -> Result<(), FileError> {
        let text = serde_json::to_string(&self.state)
            .map_err(|e| FileError::refused(&self.path, format!("its note is no JSON: {e}")))?;
        replace(&System, &note(&self.path), text.as_bytes())
    }

    /// Gives the complete log-probabilities to the records; answers their SHA-256.
    ///
    /// # Errors
    /// The file is not what was written.
    pub fn attach(self) -> Result<String, Error> {
        let (places, sum) = scan(&self.path, self.state.bytes)?;
        if self.state.sha256.as_ref() != Some(&sum) || places.len() as u64 != self.records.records.count() {
            return Err(FileError::refused(&self.path, format!("is damaged; {REMEDY}")).into());
        }
        let file = astrai_files::open(&self.path)?.0;
        let _first = self.records.logps[self.policy].set(Logps { path: self.path, file, places });
        Ok(sum)
    }
}

fn note(path: &Path) -> PathBuf {
    path.with_extension("json")
}

/// Where the numbers of each record lie, and the SHA-256 of the file's first `bytes`.
fn scan(path: &Path, bytes: u64) -> Result<(Vec<(u64, u32)>, String), Error> {
    let io = |doing| FileError::io(path, doing);
    let mut file = BufReader::with_capacity(1 << 16, astrai_files::open(path)?.0);
    let (mut places, mut at, mut sum) = (Vec::new(), 0, Sha256::new());
    let (mut count, mut block) = ([0; 4], vec![0; 1 << 16]);
    while at < bytes {
        file.read_exact(&mut count).map_err(io("read it"))?;
        sum.update(count);
        at += 4;
        let numbers = u32::from_le_bytes(count);
        places.push((at, numbers));
        let mut left = 4 * u64::from(numbers);
        at += left;
        while left > 0 && at <= bytes {
            let now = &mut block[..left.min(1 << 16) as usize];
            file.read_exact(now).map_err(io("read it"))?;
            sum.update(&*now);
            left -= now.len() as u64;
        }
    }
    Ok((places, hex(sum)))
}

/// A fingerprint of a model: its configuration and weights, and in which type it computes.
pub fn fingerprint(config: &ModelConfig, source: &dyn WeightSource, recipe: &Recipe) -> String {
    let mut sum = Sha256::new();
    sum.update(config.save().to_string());
    for spec in config.tensors() {
        sum.update(&spec.name);
        if let Some(tensor) = source.tensor(&spec.name) {
            sum.update(format!("{} {:?}", tensor.dtype, tensor.shape));
            sum.update(&tensor.bytes);
        }
        source.done(&spec.name);
    }
    let types = [recipe.storage.to_string()].into_iter().chain(recipe.wide.iter().cloned());
    format!("{} {}", hex(sum), types.collect::<Vec<_>>().join(" "))
}

/// A frozen policy at work.
pub struct Scorer {
    session: Session,
}

impl Scorer {
    /// The program of a policy for batches of a recipe.
    ///
    /// # Errors
    /// The model has no logits, or cannot be planned.
    pub fn plan(config: &ModelConfig, recipe: &Recipe, backend: &dyn Backend) -> Result<Compiled, Error> {
        let sizes = Sizes { tokens: recipe.tokens, sequences: recipe.sequences as usize, span: recipe.span };
        let graph = strategies::scores(config, &sizes).map_err(astrai_runtime::Error::from)?;
        let wide = wide(config, recipe)?;
        let options = Options { storage: recipe.storage, wide, ..Options::default() };
        Ok(compile(&graph, backend, &options)?)
    }

    /// Bytes that scoring takes: weights, activations and scratch.
    ///
    /// # Errors
    /// Those of [`plan`](Self::plan).
    pub fn memory(config: &ModelConfig, recipe: &Recipe, backend: &dyn Backend) -> Result<u64, Error> {
        let program = Scorer::plan(config, recipe, backend)?;
        let weights: u64 =
            config.tensors().iter().map(|t| t.elements() * recipe.storage.bytes() as u64).sum();
        Ok(weights + program.arena_bytes()?)
    }

    /// A policy with its weights.
    ///
    /// # Errors
    /// They do not fit the memory, or are not those of the program.
    pub fn open(
        program: Compiled,
        source: &dyn WeightSource,
        device: &Arc<dyn Device>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Scorer, Error> {
        program.check_memory(&**device)?;
        Ok(Scorer { session: Session::new(Arc::new(program), source, device, progress)? })
    }

    /// Log-probabilities of the targets of sequences, `[tokens]`, 0 where there is none.
    fn score(&mut self, all: &PackedBatch) -> Result<Vec<f32>, Error> {
        let inputs = strategies::token_inputs(all, &all.targets);
        let given: Vec<_> = inputs.iter().map(|(name, value)| (*name, value)).collect();
        self.session.execute(&given)?;
        Ok(self.session.floats("logps").map(|(_, x)| x.collect()).unwrap_or_default())
    }
}

//! The engine's side of a checkpoint. In: an engine between steps. Out: its tensors under checkpoint names, as views of its
//! memory; and back.

use crate::checkpoint::{Attachment, Contents, MODEL, OPTIMIZER, Part, Sink, TrainerState};
use crate::engine::Engine;
use crate::update::MASTER;
use astrai_files::FileError;
use astrai_ir::ops::Weight;
use astrai_runtime::weights::{Checkpoint, Entry};
use astrai_runtime::{Error, Source, WeightSource};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

/// An engine as a checkpoint's contents.
pub struct Snapshot<'a> {
    engine: &'a Engine,
    config: &'a str,
    tokenizer: &'a [Attachment],
    state: TrainerState,
    adapter: Option<String>,
    parts: [Vec<Entry>; 2],
    /// Buffer and bytes of each entry.
    places: HashMap<String, (String, Range<usize>)>,
}

impl<'a> Snapshot<'a> {
    /// The contents of a checkpoint of this engine now; where an adapter is trained, with the text of its configuration.
    pub fn new(
        engine: &'a Engine,
        config: &'a str,
        tokenizer: &'a [Attachment],
        state: TrainerState,
    ) -> Snapshot<'a> {
        let lora = state.settings.lora().zip(engine.recipe().adapter.as_ref());
        let adapter = lora.map(|(lora, adapter)| lora.text(adapter));
        let (parts, places) = ([vec![], vec![]], HashMap::new());
        let mut s = Snapshot { engine, config, tokenizer, state, adapter, parts, places };
        s.add(0, "");
        engine.recipe().kept().for_each(|prefix| s.add(1, prefix));
        s
    }

    /// Adds the checkpoint tensors of every weight's buffer of this prefix.
    fn add(&mut self, part: usize, prefix: &str) {
        let all = self.adapter.is_none();
        for w in self.engine.weights().iter().filter(|w| all || !w.frozen) {
            let mut buffer = format!("{prefix}{}", w.name);
            let master = format!("{MASTER}{}", w.name);
            // Readers of adapters take f32, whatever the base is stored in.
            if !all && prefix.is_empty() && self.engine.buffers().shape(&master).is_some() {
                buffer = master;
            }
            let Some((dtype, shape)) = self.engine.buffers().shape(&buffer) else { continue };
            let row: usize = shape.iter().skip(1).product::<usize>() * dtype.bytes();
            let mut first = 0;
            for rows in w.rows() {
                let mut shape = shape.to_vec();
                shape[0] = rows.rows;
                let name = format!("{prefix}{}", rows.name);
                let range = first * row..(first + rows.rows) * row;
                first += rows.rows;
                self.places.insert(name.clone(), (buffer.clone(), range));
                self.parts[part].push(Entry { name, dtype, shape });
            }
        }
    }
}

impl Snapshot<'_> {
    /// A copy in this memory, for which the engine need not stand still.
    ///
    /// # Errors
    /// The engine's memory cannot be read.
    pub fn copied(&mut self, mut bytes: Vec<u8>) -> Result<Copied, FileError> {
        bytes.clear();
        let mut places = HashMap::new();
        for part in [Part::Model, Part::Optimizer] {
            for entry in self.entries(part) {
                let begin = bytes.len();
                self.write(part, &entry, &mut |piece| {
                    bytes.extend_from_slice(piece);
                    Ok(())
                })?;
                places.insert(entry.name, begin..bytes.len());
            }
        }
        let (config, tokenizer) = (self.config.to_string(), self.tokenizer.to_vec());
        let (state, adapter, parts) = (self.state.clone(), self.adapter.clone(), self.parts.clone());
        Ok(Copied { config, tokenizer, state, adapter, parts, bytes, places })
    }
}

/// A copy of a checkpoint's contents.
pub struct Copied {
    config: String,
    tokenizer: Vec<Attachment>,
    state: TrainerState,
    adapter: Option<String>,
    parts: [Vec<Entry>; 2],
    bytes: Vec<u8>,
    /// Bytes of each entry.
    places: HashMap<String, Range<usize>>,
}

impl Copied {
    /// Its memory.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

impl Contents for Copied {
    fn config(&self) -> String {
        self.config.clone()
    }

    fn tokenizer(&self) -> &[Attachment] {
        &self.tokenizer
    }

    fn adapter(&self) -> Option<String> {
        self.adapter.clone()
    }

    fn trainer(&self) -> TrainerState {
        self.state.clone()
    }

    fn entries(&self, part: Part) -> Vec<Entry> {
        self.parts[usize::from(part == Part::Optimizer)].clone()
    }

    fn write(&mut self, part: Part, entry: &Entry, sink: &mut Sink) -> Result<(), FileError> {
        let bytes = self.places.get(&entry.name).and_then(|place| self.bytes.get(place.clone()));
        sink(bytes.ok_or_else(|| missing(part, entry))?)
    }
}

fn missing(part: Part, entry: &Entry) -> FileError {
    let file = if part == Part::Model { MODEL } else { OPTIMIZER };
    FileError::refused(Path::new(file), format!("no tensor `{}`", entry.name))
}

impl Contents for Snapshot<'_> {
    fn config(&self) -> String {
        self.config.to_string()
    }

    fn tokenizer(&self) -> &[Attachment] {
        self.tokenizer
    }

    fn adapter(&self) -> Option<String> {
        self.adapter.clone()
    }

    fn trainer(&self) -> TrainerState {
        self.state.clone()
    }

    fn entries(&self, part: Part) -> Vec<Entry> {
        self.parts[usize::from(part == Part::Optimizer)].clone()
    }

    fn write(&mut self, part: Part, entry: &Entry, sink: &mut Sink) -> Result<(), FileError> {
        let file = if part == Part::Model { MODEL } else { OPTIMIZER };
        let refused = |why: String| FileError::refused(Path::new(file), why);
        let (buffer, range) = self.places.get(&entry.name).ok_or_else(|| missing(part, entry))?;
        let written = self.engine.buffers().read_some(buffer, range.clone(), sink);
        written.map_err(|e| refused(e.to_string()))?
    }
}

/// Tensors of a checkpoint whose names begin with a prefix, without it.
struct Prefixed<'a> {
    checkpoint: &'a Checkpoint,
    prefix: &'a str,
}

impl WeightSource for Prefixed<'_> {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        self.checkpoint.tensor(&format!("{}{name}", self.prefix))
    }
}

impl Engine {
    /// Takes moments and master weights from a checkpoint's `optimizer.safetensors`, and the number of steps they stand for.
    /// The weights were given when the engine was opened.
    pub fn restore(&mut self, optimizer: &Checkpoint, steps: u64) -> Result<(), Error> {
        for prefix in self.recipe().kept() {
            let source = Prefixed { checkpoint: optimizer, prefix };
            for w in self.weights().iter().filter(|w| !w.frozen && self.recipe().optimizer.keeps(prefix, w)) {
                let state = Weight { ty: self.recipe().optimizer.state(prefix, w), ..w.clone() };
                self.buffers().load(&format!("{prefix}{}", w.name), &state, &source)?;
            }
        }
        self.steps = steps;
        Ok(())
    }
}

//! A model opened for serving. In: a model directory, and how much room it may take. Out: a running engine, and what text is
//! to it: tokenizer, chat template, the ids that end a text, the sampling its makers recommend. Everything that answers
//! requests (generate, chat, serve, quickstart, verify) comes through here.

mod draft;
mod fit;

pub use self::draft::Speculation;
use self::draft::{draft_steps, module_steps};
use self::fit::{Fit, PageBytes, fit};
use crate::adapters::Reader;
use crate::gguf;
use crate::machine::Machine;
use crate::model::{Model, plan_within, served_fidelity};
use crate::programs::Programs;
use crate::{Error, Hear, Note};
use astrai_builders::config::EncoderSpec;
use astrai_builders::config::{MlpSpec, Pooling, Slots, TensorSpec};
use astrai_builders::{Cache, Logits, ModelConfig, Program};
use astrai_ir::{Code, DType, Narrow, Target};
use astrai_passes::Fidelity;
use astrai_runtime::Error as RuntimeError;
use astrai_runtime::weights::is_gguf;
use astrai_serve::cache::{KvCache, stored};
use astrai_serve::engine::{Engine, Settings};
use astrai_serve::http::{HttpSettings, Served};
use astrai_serve::paged::PagedModel;
use astrai_serve::recommended::{self, Asked, Recommended};
use astrai_serve::scheduler::plan::{Embedding, ProgramKind};
use astrai_serve::template::{Chat, ChatTemplate, Message};
use astrai_serve::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Most sequences in one step unless told otherwise.
pub const SEQUENCES: usize = 32;

/// Most tokens in one step unless told otherwise, on any device.
pub const TOKENS: usize = 512;

/// Tokens in one step unless told otherwise: enough to fill the device, few enough to keep others' steps short. Experts see their part of them.
fn usual_tokens(config: &ModelConfig, target: &Target) -> usize {
    let dense = config.layers.iter().all(|l| matches!(l.mlp, MlpSpec::Dense { .. }));
    let each = if target.matrix_unit { 256 } else { 64 };
    if dense { TOKENS.min(each * target.units as usize) } else { TOKENS }
}

/// Of the memory that is free beside the weights, the part that keys and values take unless told otherwise.
const SHARE: f64 = 0.5;

/// Memory for keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvMemory {
    /// So many bytes.
    Bytes(u64),
    /// This part, in (0, 1], of what is free beside the weights.
    Share(f64),
}

impl FromStr for KvMemory {
    type Err = String;

    /// `4GiB`, `500MB`, a number of bytes, or `40%`.
    fn from_str(text: &str) -> Result<KvMemory, String> {
        let wrong = || "give a size, 4GiB or 500MB say, or a part of the free memory, 40% say".to_string();
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let number: f64 = digits.parse().map_err(|_| wrong())?;
        let unit = match text[digits.len()..].trim().to_ascii_lowercase().as_str() {
            "%" if number > 0.0 && number <= 100.0 => return Ok(KvMemory::Share(number / 100.0)),
            "" | "b" => 1.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "tb" => 1e12,
            "k" | "kib" => 1024.0,
            "m" | "mib" => 1024f64.powi(2),
            "g" | "gib" => 1024f64.powi(3),
            "t" | "tib" => 1024f64.powi(4),
            _ => return Err(wrong()),
        };
        let size = number * unit;
        if size >= 1.0 && size < 2f64.powi(60) { Ok(KvMemory::Bytes(size as u64)) } else { Err(wrong()) }
    }
}

/// The room a served model may take.
#[derive(Clone, Debug)]
pub struct Room {
    /// The type of weights, activations, keys and values in memory.
    pub storage: DType,
    /// How far steps may go from the numbers of the model's graph; none for what suits the model.
    pub fidelity: Option<Fidelity>,
    /// Most sequences in one step.
    pub sequences: usize,
    /// Most tokens in one step; none for a number that suits the rest.
    pub tokens: Option<usize>,
    /// Most tokens of prompt and answer together; none for what the model takes, as far as the memory goes.
    pub context: Option<usize>,
    /// Memory for keys and values; none for half of what is free beside the weights, or less where less is of use.
    pub kv: Option<KvMemory>,
    /// Requests that may wait.
    pub queue: usize,
    /// Tokens of prompts that may wait, at most; none for any.
    pub queue_tokens: Option<usize>,
    /// Whether pages are kept to be found again.
    pub prefix_cache: bool,
    /// Bytes of pages that are taken from the system before the first request, not as requests come to need them.
    pub populated: u64,
    /// Which tokens make a text's vector; none where no vectors are wanted.
    pub pooling: Option<Pooling>,
    /// How tokens are proposed, if they are.
    pub speculation: Option<Speculation>,
    /// Room for adapters that requests choose among.
    pub adapters: Option<Slots>,
}

impl Room {
    /// Room for one sequence at a time.
    pub fn of_one(storage: DType, fidelity: Option<Fidelity>) -> Room {
        Room {
            storage,
            fidelity,
            sequences: 1,
            tokens: None,
            context: None,
            kv: None,
            queue: 1,
            queue_tokens: None,
            prefix_cache: true,
            populated: 0,
            pooling: None,
            speculation: None,
            adapters: None,
        }
    }

    /// Settings of an engine of these sequences, which are fewer than the model's rows where tokens are proposed.
    pub fn settings(&self) -> Settings {
        Settings {
            queue: self.queue,
            queue_tokens: self.queue_tokens,
            prefix_cache: self.prefix_cache,
            sequences: Some(self.sequences),
            proposed: self.speculation.map_or(0, Speculation::proposed),
            ..Settings::default()
        }
    }

    /// Pages that keys and values have in so many `free` bytes, and the longest sequence. A page takes the first of `bytes` in layers
    /// that see all that came before, the second in windowed layers.
    ///
    /// # Errors
    /// Not one sequence fits; the line names the flags.
    pub fn pages(&self, config: &ModelConfig, bytes: [u64; 2], free: u64) -> Result<(Cache, usize), String> {
        let fit = fit(self, config.max_positions, PageBytes::of(config, bytes), free)?;
        Ok((fit.cache, fit.context))
    }

    /// Tokens of a step of this model, where sequences may have so many.
    pub fn step_tokens(&self, context: usize, config: &ModelConfig, target: &Target) -> usize {
        let usual = usual_tokens(config, target).min(context.saturating_mul(self.sequences));
        self.tokens.unwrap_or(self.rows().max(usual))
    }

    /// Rows of a step: a sequence that runs alone has some for what is proposed.
    pub fn rows(&self) -> usize {
        let alone = 1 + self.speculation.map_or(0, Speculation::proposed);
        self.sequences.max(self.tokens.map_or(alone, |tokens| alone.min(tokens)))
    }
}

/// A model directory as it was published: weights, and what text is to them.
pub struct Published {
    /// Where it lies.
    pub folder: PathBuf,
    /// Configuration and weights.
    pub model: Model,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// The sampling its makers recommend.
    pub recommended: Recommended,
}

impl Published {
    /// Reads all but the weights, which are only looked at.
    pub fn read(folder: &Path, hear: Hear) -> Result<Published, Error> {
        Published::read_adapted(folder, None, hear)
    }

    /// The same with the adapter of a folder merged into the weights, where one is given.
    pub fn read_adapted(folder: &Path, adapter: Option<&Path>, hear: Hear) -> Result<Published, Error> {
        let model = Model::open_adapted(folder, adapter)?;
        model.config.check_decoder()?;
        Published::of(folder, adapter, model, hear)
    }

    /// The same of an encoder too, whose engine gives vectors and no answers.
    pub fn read_any(folder: &Path, adapter: Option<&Path>, hear: Hear) -> Result<Published, Error> {
        Published::of(folder, adapter, Model::open_adapted(folder, adapter)?, hear)
    }

    fn of(folder: &Path, adapter: Option<&Path>, model: Model, hear: Hear) -> Result<Published, Error> {
        // A file holds its texts itself.
        let written = is_gguf(folder).then(|| gguf::texts(folder)).transpose()?;
        let base = written.as_ref().map(|w| w.path()).or(model.folder.as_deref()).unwrap_or(folder);
        // An adapter's folder need not have all of these files; what it lacks, its base has.
        let places = [adapter, Some(folder), Some(base)];
        let with = |name: &str| places.into_iter().flatten().find(|p| p.join(name).is_file()).unwrap_or(base);
        let tokenizer = Tokenizer::open(with("tokenizer.json")).map_err(|e| e.to_string())?.without_files();
        let mut template = None;
        for place in places.into_iter().flatten().filter(|p| p.is_dir()) {
            if template.is_none() {
                template = ChatTemplate::open(place).map_err(|e| e.to_string())?;
            }
        }
        let (has, takes) = (tokenizer.vocabulary(), model.config.vocab_size);
        if has > takes {
            let line = format!("its tokenizer has {has} tokens, the model {takes}; use the model's own");
            return Err(format!("{}: {line}", folder.display()).into());
        }
        let recommended = Recommended::read(with(recommended::FILE), takes).map_err(|e| e.to_string())?;
        let all = model.warnings.iter().chain(tokenizer.warnings()).chain(&recommended.warnings);
        all.for_each(|line| hear(Note::Warning(line)));
        Ok(Published { folder: folder.to_path_buf(), model, tokenizer, template, recommended })
    }

    /// The same with narrow weights, where they are asked for.
    pub fn quantised(self, narrow: Option<Narrow>) -> Published {
        Published { model: self.model.quantised(narrow), ..self }
    }

    /// The same with codes in pages, where they are asked for.
    pub fn with_pages(self, code: Option<Code>) -> Published {
        Published { model: self.model.with_pages(code), ..self }
    }

    /// The same with weights that are looked for as kernels read them, and kept so if that is asked for.
    pub fn kept(self, keep: bool) -> Published {
        Published { model: self.model.kept(keep), ..self }
    }

    /// Loads the weights and starts an engine.
    pub fn start(&self, room: &Room, machine: &Machine, hear: Hear) -> Result<Engine, Error> {
        self.start_drafted(None, room, machine, hear)
    }

    /// What a server of this model answers with, under these names.
    pub fn served(self, engine: Engine, names: Vec<String>, settings: HttpSettings) -> Served {
        let sampling = self.recommended.fill(&Asked::default());
        let settings = HttpSettings { sampling, ..settings };
        Served { engine, tokenizer: self.tokenizer, template: self.template, names, settings }
    }

    /// Every id that one of the model's files says ends a text.
    pub fn eos(&self) -> Vec<u32> {
        let stated = self.model.config.eos.iter().chain(&self.recommended.eos).copied();
        let mut all = Vec::new();
        for id in stated.chain(self.tokenizer.special().eos.as_ref().map(|t| t.id)) {
            if !all.contains(&id) {
                all.push(id);
            }
        }
        all
    }

    /// The chat template, or a line that says that there is none and what to do instead.
    pub fn template(&self, instead: &str) -> Result<&ChatTemplate, Error> {
        let none = || format!("{}: no chat template; {instead}", self.folder.display());
        self.template.as_ref().ok_or_else(|| none().into())
    }

    /// The name it is served under unless told otherwise: its folder's.
    pub fn name(&self) -> String {
        let whole = self.folder.canonicalize().unwrap_or_else(|_| self.folder.clone());
        whole.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned())
    }
}

/// Ids of a conversation, ready for the model's answer.
pub fn chat_ids(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    messages: &[Message],
) -> Result<Vec<u32>, String> {
    let mut messages = messages.to_vec();
    template.adapt(&mut messages, None, false).map_err(|e| e.to_string())?;
    let chat = Chat { messages: &messages, add_generation_prompt: true, ..Chat::default() };
    let text = template.render(&chat).map_err(|e| e.to_string())?;
    // The template has put the special tokens there.
    tokenizer.encode(&text, false).map_err(|e| e.to_string())
}

/// A model that computes steps of many sequences, with its weights and its KV state.
pub fn steps(model: &Model, room: &Room, machine: &Machine, hear: Hear) -> Result<PagedModel, Error> {
    Ok(steps_drafted(model, None, room, machine, hear)?.0)
}

/// The same and a draft model beside it, with as many pages.
pub fn steps_drafted(
    model: &Model,
    draft: Option<&Model>,
    room: &Room,
    machine: &Machine,
    hear: Hear,
) -> Result<(PagedModel, Option<PagedModel>), Error> {
    if let Some(encoder) = model.config.encoder {
        return Ok((encoder_steps(model, encoder, room, machine, hear)?, None));
    }
    let mut config = ModelConfig { adapters: room.adapters, ..model.config.clone() };
    let module = matches!(room.speculation, Some(Speculation::Module(_))).then(|| draft::module(&mut config));
    let (config, module) = (&config, module.transpose()?);
    let adapters = room.adapters.map(|_| Reader::new(config, room.storage, machine.backend())).transpose()?;
    let bytes = KvCache::page_bytes_apart(config, Cache::PAGE, room.storage);
    let drafted = draft.map_or(0, |d| KvCache::page_bytes(&d.config, Cache::PAGE, room.storage));
    let page = PageBytes::of(config, [bytes[0] + drafted, bytes[1]]);
    let mut parameters = config.parameter_count() + draft.map_or(0, |d| d.config.parameter_count());
    if module.is_some() {
        parameters += config.module_tensors().iter().map(TensorSpec::elements).sum::<u64>();
    }
    let weights = parameters.saturating_mul(room.storage.bytes() as u64);
    let beside = adapters.as_ref().map_or(0, Reader::bytes);
    let free = machine.device.available().saturating_sub(weights.saturating_add(beside));
    let (fit, tokens, programs) = plan(config, room, page, free, machine)?;
    let Fit { cache, context, .. } = fit;
    fit.warning.iter().for_each(|line| hear(Note::Warning(line)));
    programs.prefill().check_memory(&*machine.device).map_err(with_remedy)?;
    let kv = KvCache::new(config, cache, room.storage, &machine.device)?;
    let kept = KvCache::bytes(config, cache, room.storage);
    let what = "loading weights";
    let mut progress = |done, total| hear(Note::Progress { what, done, total });
    let mut buffers = kv.buffers().clone();
    buffers.add_all(adapters.iter().flat_map(Reader::states))?;
    let sessions = programs.start(model, &buffers, &mut progress)?;
    let sizes = [config.vocab_size, context, tokens, room.rows()];
    let draft = match (&module, sessions.first()) {
        (Some(module), Some((_, beside))) => {
            let source = model.source();
            Some(module_steps(
                module,
                (beside, source),
                (cache, context, tokens),
                room,
                machine,
                &mut progress,
            )?)
        }
        _ => draft.map(|d| draft_steps(d, cache, tokens, room, machine, &mut progress)).transpose()?,
    };
    // What programs and weights take is checked against what is free: pages come behind them.
    kv.buffers().populate(room.populated.min(machine.device.available() / 8));
    let paged = PagedModel::new(sessions, cache, sizes)
        .holding(stored(config.pages, room.storage), [bytes.iter().sum(), kept])
        .with_adapters(room.adapters.map(|a| (buffers, a.slots)));
    Ok((paged, draft))
}

/// The same of an encoder: texts, each in one step; without pages, which are only counted.
fn encoder_steps(
    model: &Model,
    encoder: EncoderSpec,
    room: &Room,
    machine: &Machine,
    hear: Hear,
) -> Result<PagedModel, Error> {
    let config = &model.config;
    let none_of = [
        ("--embeddings", room.pooling.is_some()),
        ("--kv-memory", room.kv.is_some()),
        ("--kv-cache-dtype", config.pages.is_some()),
        ("--speculate and --draft", room.speculation.is_some()),
        ("--adapter", room.adapters.is_some()),
    ];
    for (flag, given) in none_of {
        if given {
            let what = "is an encoder, which keeps no keys and values, answers nothing and makes vectors in its own way";
            return Err(format!("{flag}: `{}` {what}; leave it out", config.model_type).into());
        }
    }
    let positions = config.max_positions;
    let context = room.context.unwrap_or(positions);
    if context > positions {
        let line = format!("--max-model-len {context}: the model takes at most {positions} positions");
        return Err(line.into());
    }
    let tokens = room.tokens.unwrap_or(TOKENS.max(context).max(room.sequences));
    let context = context.min(tokens);
    let [most, sequences, span] = [tokens, room.sequences, context].map(|n| n as u64);
    let program = Program { tokens: most, sequences, span, logits: Logits::None, ..Program::full(1, span) };
    let fidelity = room.fidelity.unwrap_or_default();
    let planned = plan_within(config, &program, room.storage, machine, fidelity)?;
    planned.check_memory(&*machine.device).map_err(with_remedy)?;
    let what = "loading weights";
    let session =
        model.start(planned, machine, &mut |done, total| hear(Note::Progress { what, done, total }))?;
    let table = context.div_ceil(Cache::PAGE);
    // One beyond its own for each, which the scheduler holds back.
    let pages = room.sequences.saturating_mul(table + 1).min(i32::MAX as usize / Cache::PAGE);
    let cache = Cache { page: Cache::PAGE, pages, table, windows: None };
    let embedding = Embedding { pooling: encoder.pooling, width: config.hidden_size, whole: true };
    let sizes = [config.vocab_size, context, tokens, room.sequences];
    Ok(PagedModel::new(vec![(ProgramKind::Embed(embedding), session)], cache, sizes))
}

/// Pages that fit the memory beside the weights, tokens of a step, and programs for these. What a second program takes of the
/// `free` bytes is known only of a plan: where it leaves fewer pages, it is planned for these.
fn plan(
    config: &ModelConfig,
    room: &Room,
    page: PageBytes,
    free: u64,
    machine: &Machine,
) -> Result<(Fit, usize, Programs), Error> {
    let fidelity = room.fidelity.unwrap_or_else(|| served_fidelity(config));
    let fit_beside = |bytes: u64| fit(room, config.max_positions, page, free.saturating_sub(bytes));
    let (mut beside, mut fit) = (0, fit_beside(0)?);
    loop {
        let tokens = room.step_tokens(fit.context, config, machine.backend().target());
        if tokens < room.sequences {
            let n = room.sequences;
            let line =
                format!("{tokens} tokens a step are too few for {n} sequences, each of which takes one");
            return Err(format!("{line}; give more --max-batch-tokens or fewer --max-seqs").into());
        }
        let sizes = [tokens as u64, room.rows() as u64];
        let mut programs = Programs::plan(config, sizes, fit.cache, room.storage, machine, fidelity)?;
        if let Some(pooling) = room.pooling {
            programs.embed(config, sizes, fit.cache, pooling, (room.storage, machine, fidelity))?;
        }
        // It only grows, so that this ends.
        beside = programs.bytes_beside()?.max(beside);
        let again = fit_beside(beside)?;
        if again.cache == fit.cache {
            return Ok((fit, tokens, programs));
        }
        fit = again;
    }
}

/// The same error, with a remedy that there is here.
fn with_remedy(e: RuntimeError) -> RuntimeError {
    match e {
        RuntimeError::Memory { what, need, have, .. } => {
            RuntimeError::Memory { what, need, have, remedy: "use a smaller model, or --dtype bf16".into() }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(sequences: usize, context: Option<usize>, kv: Option<KvMemory>) -> Room {
        Room { sequences, context, kv, ..Room::of_one(DType::F32, None) }
    }

    #[test]
    fn speculation_is_read_and_has_rows() {
        let read = |text: &str| text.parse::<Speculation>();
        assert_eq!((read("ngram"), read("ngram:7")), (Ok(Speculation::NGram(4)), Ok(Speculation::NGram(7))));
        assert_eq!((read("mtp"), read("mtp:1")), (Ok(Speculation::Module(3)), Ok(Speculation::Module(1))));
        for wrong in ["", "ngram:", "ngram:0", "ngram:17", "ngram:-1", "draft", "ngram:4:4", "mtp:0", "mtp:"]
        {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        let rows = |sequences, tokens| {
            let speculation = Some(Speculation::NGram(4));
            Room { speculation, tokens, ..room(sequences, None, None) }.rows()
        };
        assert_eq!((rows(1, None), rows(1, Some(3)), rows(32, None)), (5, 3, 32));
    }

    #[test]
    fn sizes_are_read() {
        let read = |text: &str| text.parse::<KvMemory>();
        assert_eq!(read("4GiB"), Ok(KvMemory::Bytes(4 << 30)));
        assert_eq!(read("1.5k"), Ok(KvMemory::Bytes(1536)));
        assert_eq!(read("500 MB"), Ok(KvMemory::Bytes(500_000_000)));
        assert_eq!(read("40%"), Ok(KvMemory::Share(0.4)));
        for wrong in ["", "GiB", "-1", "0", "0%", "101%", "NaN", "inf", "4 bananas", "1e30", "é"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}

//! A model opened for serving. In: a model directory, and how much room it may take. Out: a running engine, and what text is
//! to it: tokenizer, chat template, the ids that end a text, the sampling its makers recommend. Everything that answers
//! requests (generate, chat, serve, quickstart, verify) comes through here.

use crate::adapters::Reader;
use crate::figures::bytes;
use crate::gguf;
use crate::machine::Machine;
use crate::model::{Model, plan_within, served_fidelity};
use crate::programs::Programs;
use crate::{Error, Hear, Note};
use astrai_builders::config::EncoderSpec;
use astrai_builders::config::{Pooling, Slots};
use astrai_builders::{Cache, Logits, ModelConfig, Program, Windows};
use astrai_ir::{Code, DType, Narrow};
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

/// Most tokens in one step unless told otherwise: enough to fill the processor, few enough to keep others' steps short.
const TOKENS: usize = 512;

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

/// Speculation: how tokens are proposed that the model then verifies, several in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speculation {
    /// Those that followed the last few tokens before, at most so many.
    NGram(usize),
}

impl Speculation {
    /// Proposed tokens of a step, at most.
    pub fn proposed(self) -> usize {
        let Speculation::NGram(most) = self;
        most
    }
}

impl FromStr for Speculation {
    type Err = String;

    /// `ngram`, or `ngram:N`.
    fn from_str(text: &str) -> Result<Speculation, String> {
        let most = match text.split_once(':') {
            Some(("ngram", n)) => n.parse().ok().filter(|n| (1..=16).contains(n)),
            None if text == "ngram" => Some(4),
            _ => None,
        };
        most.map(Speculation::NGram).ok_or_else(|| "give ngram, or ngram:N with 1 to 16 tokens".into())
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
    /// Whether pages are kept to be found again.
    pub prefix_cache: bool,
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
            prefix_cache: true,
            pooling: None,
            speculation: None,
            adapters: None,
        }
    }

    /// Settings of an engine of these sequences, which are fewer than the model's rows where tokens are proposed.
    pub fn settings(&self) -> Settings {
        Settings {
            queue: self.queue,
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

    /// Tokens of a step, where sequences may have so many.
    pub fn step_tokens(&self, context: usize) -> usize {
        self.tokens.unwrap_or(self.rows().max(TOKENS.min(context.saturating_mul(self.sequences))))
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
        let tokenizer = Tokenizer::open(with("tokenizer.json")).map_err(|e| e.to_string())?;
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

    /// Loads the weights and starts an engine.
    pub fn start(&self, room: &Room, machine: &Machine, hear: Hear) -> Result<Engine, Error> {
        let model = steps(&self.model, room, machine, hear)?;
        let settings = Settings { eos: self.eos(), ..room.settings() };
        Ok(Engine::start(model, &settings).map_err(|e| e.to_string())?)
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
    if let Some(encoder) = model.config.encoder {
        return encoder_steps(model, encoder, room, machine, hear);
    }
    let config = &ModelConfig { adapters: room.adapters, ..model.config.clone() };
    let adapters = room.adapters.map(|_| Reader::new(config, room.storage)).transpose()?;
    let bytes = KvCache::page_bytes_apart(config, Cache::PAGE, room.storage);
    let page = PageBytes::of(config, bytes);
    let weights = config.parameter_count().saturating_mul(room.storage.bytes() as u64);
    let beside = adapters.as_ref().map_or(0, Reader::bytes);
    let free = machine.device.available().saturating_sub(weights.saturating_add(beside));
    let (fit, tokens, programs) = plan(config, room, page, free, machine)?;
    let Fit { cache, context, .. } = fit;
    fit.warning.iter().for_each(|line| hear(Note::Warning(line)));
    programs.prefill().check_memory(&*machine.device).map_err(with_remedy)?;
    let kv = KvCache::new(config, cache, room.storage, &machine.device)?;
    let what = "loading weights";
    let mut progress = |done, total| hear(Note::Progress { what, done, total });
    let mut buffers = kv.buffers().clone();
    buffers.add_all(adapters.iter().flat_map(Reader::states))?;
    let sessions = programs.start(model, &buffers, &mut progress)?;
    let sizes = [config.vocab_size, context, tokens, room.rows()];
    Ok(PagedModel::new(sessions, cache, sizes)
        .holding(stored(config.pages, room.storage), bytes.iter().sum())
        .with_adapters(room.adapters.map(|a| (buffers, a.slots))))
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
        ("--speculate", room.speculation.is_some()),
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
        let tokens = room.step_tokens(fit.context);
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

/// What pages take.
#[derive(Clone, Copy)]
struct PageBytes {
    /// Bytes of a page of layers that see all that came before, and of one of windowed layers.
    bytes: [u64; 2],
    /// The widest window.
    window: usize,
    /// What they hold in eight bits, if they do.
    code: Option<Code>,
}

impl PageBytes {
    fn of(config: &ModelConfig, bytes: [u64; 2]) -> PageBytes {
        let window = config.layers.iter().filter_map(|l| l.attention.window).max();
        PageBytes { bytes, window: window.unwrap_or(usize::MAX), code: config.pages }
    }

    /// Pages of their own for windowed layers, where a sequence needs fewer of them than of others: for all sequences, twice where
    /// prefixes are kept; but no more than the budget has of others. Of `most` there are never more.
    fn windows(&self, room: &Room, context: usize, budget: u64, most: usize) -> Option<Windows> {
        let [whole, windowed] = self.bytes;
        // What a window and a step need, wherever in their pages they begin.
        let step = room.tokens.unwrap_or(TOKENS.max(room.rows()));
        let each = self.window.saturating_add(step) / Cache::PAGE + 2;
        let all = each.saturating_mul(room.sequences << u32::from(room.prefix_cache));
        let held = usize::try_from(budget / (whole + windowed).max(1)).unwrap_or(usize::MAX);
        let pages = all.min(most).min(held);
        let fits = windowed > 0 && each < context.div_ceil(Cache::PAGE) && each <= pages;
        fits.then_some(Windows { pages, window: self.window, every: whole == 0 })
    }

    /// Pages that a budget holds beside those of windowed layers.
    fn held(&self, budget: u64, windows: Option<Windows>) -> usize {
        let [whole, windowed] = self.bytes;
        let (each, beside) = windows.map_or((whole + windowed, 0), |w| (whole, w.pages as u64 * windowed));
        // Where nothing lies in them, they are only counted.
        budget.saturating_sub(beside).checked_div(each).and_then(|n| n.try_into().ok()).unwrap_or(usize::MAX)
    }
}

/// A KV state that fits the memory.
#[derive(Debug)]
struct Fit {
    cache: Cache,
    context: usize,
    warning: Option<String>,
}

/// Pages for as many sequences as there may be, each as long as may be, or for what the memory holds; never less than one
/// sequence of the context.
fn fit(room: &Room, positions: usize, page: PageBytes, free: u64) -> Result<Fit, String> {
    let mut context = room.context.unwrap_or(positions);
    if context > positions {
        return Err(format!("--max-model-len {context}: the model takes at most {positions} positions"));
    }
    let budget = match room.kv {
        Some(KvMemory::Bytes(n)) if n > free => {
            let (n, free) = (bytes(n), bytes(free));
            return Err(format!("--kv-memory {n}: only {free} are free beside the weights; give less"));
        }
        Some(KvMemory::Bytes(n)) => n,
        Some(KvMemory::Share(part)) => (part * free as f64) as u64,
        None => (SHARE * free as f64) as u64,
    };
    // The kernels' indices have 32 bits.
    let most =
        room.sequences.saturating_mul(context.div_ceil(Cache::PAGE)).min(i32::MAX as usize / Cache::PAGE);
    let windows = page.windows(room, context, budget, most);
    let held = page.held(budget, windows);
    let (mut pages, mut table) = (most.min(held), context.div_ceil(Cache::PAGE));
    let mut warning = None;
    if pages < table {
        let (tokens, budget) = (held.saturating_mul(Cache::PAGE), bytes(budget));
        let (each, of) =
            (page.bytes.iter().sum::<u64>() / Cache::PAGE as u64, stored(page.code, room.storage));
        let short = format!(
            "{budget} of keys and values in {of}, {each} bytes a token, hold {tokens} tokens, one sequence of the context has {context}"
        );
        let narrower = match (page.code, room.storage) {
            (Some(_), _) => "",
            (None, DType::F32) => ", --dtype bf16 or --kv-cache-dtype int8",
            _ => ", or --kv-cache-dtype int8",
        };
        if room.kv.is_some() || room.context.is_some() || pages == 0 {
            let less =
                if tokens > 0 { format!(", or --max-model-len {tokens} at most") } else { String::new() };
            return Err(format!("{short}; give more --kv-memory{less}{narrower}"));
        }
        warning = Some(format!("{short}: the context is cut to {tokens}; --kv-memory gives it more"));
        (context, table) = (tokens, pages);
    }
    pages = pages.max(table);
    Ok(Fit { cache: Cache { page: Cache::PAGE, pages, table, windows }, context, warning })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: PageBytes = PageBytes { bytes: [1 << 10, 0], window: usize::MAX, code: None };

    fn room(sequences: usize, context: Option<usize>, kv: Option<KvMemory>) -> Room {
        Room { sequences, context, kv, ..Room::of_one(DType::F32, None) }
    }

    #[test]
    fn keys_and_values_take_what_is_of_use_and_no_more_than_there_is() {
        let fits = |room: &Room, free| {
            let f = fit(room, 100, PAGE_BYTES, free).unwrap();
            (f.cache.pages, f.cache.table, f.context, f.warning.is_some())
        };
        // 100 tokens are 7 pages.
        assert_eq!(fits(&room(4, None, None), 1 << 30), (28, 7, 100, false));
        assert_eq!(fits(&room(4, None, None), 40 << 10), (20, 7, 100, false), "half of what is free");
        assert_eq!(fits(&room(4, None, None), 8 << 10), (4, 4, 64, true), "a shorter context");
        assert_eq!(fits(&room(4, Some(30), None), 1 << 30), (8, 2, 30, false));
        assert_eq!(fits(&room(4, None, Some(KvMemory::Bytes(9 << 10))), 1 << 30), (9, 7, 100, false));
        assert_eq!(fits(&room(4, None, Some(KvMemory::Share(0.25))), 40 << 10), (10, 7, 100, false));
    }

    #[test]
    fn windowed_layers_have_pages_of_their_own_where_they_need_fewer() {
        // A sequence of 1,600 tokens is 100 pages; of windowed layers it needs (64 + 32) / 16 + 2 = 8.
        let room = |prefix_cache| Room { tokens: Some(32), prefix_cache, ..room(4, None, None) };
        let fits = |bytes, window, free: u64, prefix_cache| {
            let f =
                fit(&room(prefix_cache), 1600, PageBytes { bytes, window, code: None }, free << 10).unwrap();
            let windows = f.cache.windows.map(|w| (w.pages, w.every));
            (f.cache.pages, windows, f.context)
        };
        assert_eq!(fits([1 << 10, 1 << 10], 64, 1 << 20, false), (400, Some((32, false)), 1600));
        assert_eq!(fits([1 << 10, 1 << 10], 64, 1 << 20, true), (400, Some((64, false)), 1600));
        assert_eq!(fits([0, 1 << 10], 64, 1 << 20, true), (400, Some((64, true)), 1600));
        // A window as long as the context, or longer: pages that all layers have.
        assert_eq!(fits([1 << 10, 1 << 10], 1600, 1 << 20, true), (400, None, 1600));
        // 300 pages of both kinds are half of what is free.
        assert_eq!(fits([1 << 10, 1 << 10], 64, 600, true), (236, Some((64, false)), 1600));
        assert_eq!(fits([1 << 10, 1 << 10], 64, 160, false), (48, Some((32, false)), 768));
        assert_eq!(fits([0, 1 << 10], 64, 20, true), (400, Some((10, true)), 1600));
        assert_eq!(fits([0, 1 << 10], 64, 12, true), (6, None, 96));
    }

    #[test]
    fn too_little_room_is_told_with_what_would_do() {
        let told = |room: &Room, free| fit(room, 100, PAGE_BYTES, free).unwrap_err();
        let few = room(4, None, Some(KvMemory::Bytes(4 << 10)));
        let narrow = fit(&few, 100, PageBytes { code: Some(Code::Int8), ..PAGE_BYTES }, 1 << 30).unwrap_err();
        assert!(narrow.contains("in int8, 64 bytes a token") && !narrow.contains("dtype"), "{narrow}");
        assert!(told(&few, 1 << 30).contains("in f32, 64 bytes a token"));
        assert!(told(&few, 1 << 30).contains("--kv-cache-dtype int8"));
        let little = told(&room(4, None, Some(KvMemory::Bytes(4 << 10))), 1 << 30);
        assert!(little.contains("64 tokens") && little.contains("--max-model-len 64"), "{little}");
        assert!(told(&room(1, Some(101), None), 1 << 30).contains("at most 100"));
        assert!(told(&room(1, Some(100), None), 1 << 10).contains("--kv-memory"));
        assert!(told(&room(1, None, None), 0).contains("--kv-memory"));
        assert!(told(&room(1, None, Some(KvMemory::Bytes(1 << 30))), 1 << 20).contains("1.00 MiB are free"));
    }

    #[test]
    fn speculation_is_read_and_has_rows() {
        let read = |text: &str| text.parse::<Speculation>();
        assert_eq!((read("ngram"), read("ngram:7")), (Ok(Speculation::NGram(4)), Ok(Speculation::NGram(7))));
        for wrong in ["", "ngram:", "ngram:0", "ngram:17", "ngram:-1", "draft", "ngram:4:4"] {
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

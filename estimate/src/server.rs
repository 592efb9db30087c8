//! Steps of a server. In: a schedule that prefills or decodes. Out: the programs that a step runs on a rank of one stage, as the engine
//! chooses them, each with its rows and with the keys that these see: whole prompts or pieces of them (chunked prefill), what the prefix
//! cache already holds, tokens that are proposed and verified (speculation), prompts beside decode.

use crate::Refused;
use crate::lengths::Lengths;
use crate::schedule::{self, Memory, Purpose, Schedule, Stage, forward, states};
use crate::work::arrivals;
use astrai_builders::config::{Hidden, LayerSpec};
use astrai_builders::{Cache, Logits, ModelConfig, Program, Windows, build, placements};
use astrai_engine::model::served_fidelity;
use astrai_engine::serving::{Speculation, TOKENS};
use astrai_ir::ops::Op;
use astrai_ir::{Backend, Graph, Mesh, Node};
use astrai_passes::{Fidelity, MeshSharding, Policy, Wide, pipeline, precision, shard};
use astrai_runtime::Compiled;

/// What steps have beside one token of each sequence, or beside whole prompts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Server {
    /// Tokens proposed for each sequence in a step of decode.
    pub proposals: Option<Proposals>,
    /// Tokens of prompts that a step computes: of prefill in pieces, of decode beside its own. None: prompts whole, nothing beside decode.
    pub chunk: Option<u64>,
    /// Part of each prompt that the prefix cache holds.
    pub cached: f64,
}

/// Speculation: what proposes tokens, and how often it is right.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposals {
    /// What proposes, and how many tokens.
    pub how: Speculation,
    /// The draft model; none where another part of the server proposes.
    pub draft: Option<ModelConfig>,
    /// Probability that a proposed token is accepted where all before it were.
    pub acceptance: f64,
}

impl Proposals {
    /// Tokens of a sequence that a step gives on average: those accepted and the one that the model itself says behind them
    /// (Leviathan et al. 2023, arXiv 2211.17192, equation 1).
    pub fn tokens(&self) -> f64 {
        (0..=self.how.proposed() as i32).map(|n| self.acceptance.powi(n)).sum()
    }
}

impl Server {
    /// Tokens of a sequence that a step of decode gives.
    pub fn tokens(&self) -> f64 {
        self.proposals.as_ref().map_or(1.0, Proposals::tokens)
    }

    /// Tokens of a prompt of `seq` that are in the prefix cache: whole pages, and never the last token, whose logits are wanted.
    pub fn found(&self, seq: u64) -> u64 {
        let page = Cache::PAGE as u64;
        ((seq as f64 * self.cached) as u64).min(seq.saturating_sub(1)) / page * page
    }

    /// Whether prompts of so many tokens are computed over pages, in pieces or behind what is found of them.
    pub fn pages(&self, seq: u64) -> bool {
        self.chunk.is_some() || self.found(seq) > 0
    }

    /// Whether steps have anything beside one token of each sequence, or beside whole prompts of so many tokens.
    pub fn more(&self, seq: u64) -> bool {
        self.pages(seq) || self.proposals.is_some()
    }

    /// Why these steps are none of such a program.
    ///
    /// # Errors
    /// The line names the flag.
    pub fn check(&self, config: &ModelConfig, s: &Schedule) -> Result<(), Refused> {
        let decode = s.purpose == Purpose::Decode;
        if let Some(p) = &self.proposals {
            let flag = if p.draft.is_some() { "--draft" } else { "--speculate" };
            if !decode {
                return Err(format!("{flag}: tokens are proposed in decode; give --for decode"));
            }
            if s.ranks.pp > 1 && !matches!(p.how, Speculation::NGram(_)) {
                return Err(format!("{flag}: what proposes is not divided into stages; leave --pp out"));
            }
            if matches!(p.how, Speculation::Module(_)) && config.module().is_none() {
                return Err("--speculate mtp: the model has no module of multi-token prediction (num_nextn_predict_layers)".into());
            }
            if let Some(draft) = p.draft.as_ref().filter(|d| d.vocab_size != config.vocab_size) {
                let [a, b] = [draft, config].map(|c| c.vocab_size);
                return Err(format!("--draft: vocab_size {a} is not the model's {b}"));
            }
        }
        let chunk = self.chunk.map(|_| "--chunk").or((self.cached > 0.0).then_some("--prefix-hit"));
        if let Some(flag) = chunk {
            if s.purpose == Purpose::Train {
                return Err(format!("{flag}: only a server keeps keys and values; leave it out in training"));
            }
            if config.encoder.is_some() {
                return Err(format!("{flag}: an encoder keeps no keys and values; leave it out"));
            }
        }
        if decode && self.cached > 0.0 && self.chunk.is_none() {
            return Err("--prefix-hit: decode computes no prompts; give --chunk N for those beside it".into());
        }
        Ok(())
    }
}

/// Sequences of a run whose tokens see alike; averages over the runs of a step need not be whole.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// How many.
    pub count: f64,
    /// Tokens of each in the run.
    pub tokens: f64,
    /// Keys that the last of them sees, itself the newest.
    pub at: f64,
}

/// The rows of a run.
#[derive(Clone, Debug)]
pub struct Rows {
    /// Tokens.
    pub tokens: u64,
    /// Sequences; each proposed token is a row of its own.
    pub sequences: u64,
    /// What they see.
    pub groups: Vec<Group>,
}

impl Rows {
    /// Keys that all tokens see together, of a window no more than it has.
    pub fn seen(&self, window: Option<u64>) -> f64 {
        let window = window.map_or(f64::INFINITY, |w| w as f64);
        // Of the first n tokens of a sequence.
        let of = |n: f64| match n <= window {
            true => n * (n + 1.0) / 2.0,
            false => window * (window + 1.0) / 2.0 + (n - window) * window,
        };
        self.groups.iter().map(|g| g.count * (of(g.at) - of(g.at - g.tokens))).sum()
    }

    /// Keys that are read: of each sequence those that any of its tokens sees.
    pub fn held(&self, window: Option<u64>) -> f64 {
        let most = |g: &Group| window.map_or(g.at, |w| g.at.min(w as f64 + g.tokens - 1.0));
        self.groups.iter().map(|g| g.count * most(g)).sum()
    }

    /// These and others in one run.
    fn and(self, other: Rows) -> Rows {
        Rows {
            tokens: self.tokens + other.tokens,
            sequences: self.sequences + other.sequences,
            groups: [self.groups, other.groups].concat(),
        }
    }

    /// Pages that hold these keys.
    pub fn pages(&self) -> u64 {
        let pages = |g: &Group| g.count * (g.at / Cache::PAGE as f64).ceil();
        self.groups.iter().map(pages).sum::<f64>().ceil() as u64
    }
}

/// Runs of a program in a step.
pub struct Run {
    /// `forward`; where a step has several programs `prefill`, `decode`, `draft`; in training `gradient` and `update`.
    pub name: &'static str,
    /// The program.
    pub planned: Compiled,
    /// How often it runs in each piece of a step.
    pub times: u64,
    /// Its rows; none where all sizes are at their bounds, and every token sees what it can.
    pub rows: Option<Rows>,
}

impl Run {
    /// Once a piece, with sizes at their bounds.
    pub fn whole(name: &'static str, planned: Compiled) -> Run {
        Run { name, planned, times: 1, rows: None }
    }
}

impl Schedule {
    /// Tokens of a prompt that are computed, of decode those of prompts beside it.
    pub fn fresh(&self) -> u64 {
        self.seq - self.server.found(self.seq)
    }

    /// Runs in which the prompts of a piece are computed.
    pub fn chunks(&self) -> u64 {
        match (self.purpose, self.server.chunk, self.rank_batch()) {
            (Purpose::Prefill, Some(chunk), Ok(batch)) => batch.saturating_mul(self.fresh()).div_ceil(chunk),
            _ => 1,
        }
    }

    /// Rows of a run of this name over so many sequences of a rank; none where all sizes are at their bounds.
    pub fn rows(&self, name: &str, batch: u64) -> Option<Rows> {
        let decoded = || {
            let proposed = self.server.proposals.as_ref().map_or(0, |p| p.how.proposed() as u64);
            self.decoded(batch, 1 + proposed)
        };
        let beside = |chunk: u64| self.beside(chunk);
        match (self.purpose, self.server.chunk) {
            (Purpose::Train, _) => None,
            (Purpose::Prefill, _) if !self.server.pages(self.seq) => None,
            (Purpose::Prefill, chunk) => {
                let fresh = batch.saturating_mul(self.fresh());
                Some(self.prompts(batch, chunk.unwrap_or(fresh).min(fresh)))
            }
            (Purpose::Decode, Some(chunk)) if name == "prefill" => Some(beside(chunk)),
            (Purpose::Decode, Some(chunk)) if name != "decode" => Some(decoded().and(beside(chunk))),
            (Purpose::Decode, _) => Some(decoded()),
        }
    }

    /// Runs one behind another on a stage in a step.
    pub fn pieces(&self) -> u64 {
        self.micro.saturating_mul(self.chunks())
    }

    /// Prompts in pieces of at most so many tokens, `count` of each piece in a run on average.
    fn pieces_of(&self, tokens: u64, count: f64) -> Vec<Group> {
        let fresh = self.fresh();
        let pieces = fresh.div_ceil(tokens).max(1);
        // So many tell what more see.
        let n = pieces.min(Lengths::TELLING);
        let group = |i: u64| Group {
            count: count * pieces as f64 / n as f64,
            tokens: fresh as f64 / pieces as f64,
            at: (self.seq - fresh) as f64 + fresh as f64 * (i + 1) as f64 / n as f64,
        };
        (0..n).map(group).collect()
    }

    /// Rows of a run that computes so many tokens of prompts of `sequences` sequences, those of all chunks on average.
    fn prompts(&self, sequences: u64, tokens: u64) -> Rows {
        let all = sequences.saturating_mul(self.fresh());
        let runs = all.div_ceil(tokens).max(1);
        let groups = self.pieces_of(tokens, sequences as f64 / runs as f64);
        let tokens = all.div_ceil(runs);
        let at_once = tokens.div_ceil(self.fresh().max(1)).clamp(1, sequences.max(1));
        Rows { tokens, sequences: at_once, groups }
    }

    /// Rows of the tokens of prompts beside decode, one prompt behind another, those of all steps on average.
    fn beside(&self, chunk: u64) -> Rows {
        let groups = self.pieces_of(chunk, chunk as f64 / self.fresh() as f64);
        Rows { tokens: chunk, sequences: self.at_once(), groups }
    }

    /// Prompts that a step of decode has beside its sequences.
    pub fn at_once(&self) -> u64 {
        self.server.chunk.filter(|_| self.purpose == Purpose::Decode).map_or(0, |n| n.div_ceil(self.fresh()))
    }

    /// Rows of a step of decode: so many of each sequence.
    fn decoded(&self, batch: u64, each: u64) -> Rows {
        let rows = batch * each;
        let of = |at: u64, count: f64| Group { count, tokens: 1.0, at: at as f64 };
        let groups = match &self.lengths {
            None => vec![of(self.seq, rows as f64)],
            Some(lengths) => {
                // As many as tell the distribution.
                let n = self.batch.min(Lengths::TELLING);
                lengths.of(n).map(|at| of(at, rows as f64 / n as f64)).collect()
            }
        };
        Rows { tokens: rows, sequences: rows, groups }
    }
}

/// Where a stage's programs are planned.
struct At<'a> {
    s: &'a Schedule,
    backend: &'a dyn Backend,
    mesh: &'a Mesh,
    stage: usize,
}

impl At<'_> {
    /// A program over pages of so many sequences, for so many tokens and rows.
    fn paged(
        &self,
        config: &ModelConfig,
        [tokens, rows]: [u64; 2],
        sequences: u64,
        fidelity: Fidelity,
    ) -> Result<Compiled, Refused> {
        let program = self.program(config, [tokens, rows], sequences);
        forward(config, self.s.storage, self.backend, (self.mesh, self.stage), &program, fidelity)
    }

    fn program(&self, config: &ModelConfig, [tokens, rows]: [u64; 2], sequences: u64) -> Program {
        let table = (self.s.seq as usize).div_ceil(Cache::PAGE);
        let pages = table.saturating_mul(sequences as usize);
        let windows = windows(config, table, sequences as usize);
        let cache = Cache { page: Cache::PAGE, pages, table, windows };
        let program = Program::paged(tokens, rows, cache).drawing(self.backend.samples());
        Program { span: self.s.seq, ..program }
    }

    /// Bytes of keys and values that prompts leave in pages of so many sequences, and of a token: of a graph whose states are settled,
    /// of which nothing is planned.
    fn left(&self, config: &ModelConfig, sequences: u64) -> Result<(u64, u64), Refused> {
        let graph = build(config, &self.program(config, [sequences; 2], sequences));
        let graph = graph.map_err(|e| e.to_string())?;
        let leaves = placements(config, self.mesh, &graph);
        let shards = MeshSharding { mesh: self.mesh.clone(), leaves, stage: self.stage, trained: false };
        let of_stage = match shards.stages() {
            Some(axis) => pipeline(&graph, axis, self.stage),
            None => Ok(graph),
        };
        let policy = Policy { storage: self.s.storage, wide: &Wide::default() };
        let graph = of_stage.and_then(|g| shard(&g, &shards)).and_then(|g| precision(&g, policy));
        let graph = graph.map_err(|e| e.to_string())?;
        // The first dimension of a state are its rows, one a token.
        let row = |n: &Node| Some(n.ty().bytes().size()? / n.ty().shape.first()?.size()?.max(1));
        let states = graph.nodes().iter().filter(|n| matches!(n.op, Op::State(_)));
        let each: usize = states.filter_map(row).sum();
        Ok((held(&graph, self.s), each as u64))
    }
}

/// The programs of one stage of a server, for so many sequences of a rank.
///
/// # Errors
/// Sizes that do not divide, or a model that cannot be planned; one line that names the key or flag.
pub fn stage(
    config: &ModelConfig,
    s: &Schedule,
    backend: &dyn Backend,
    (mesh, stage): (&Mesh, usize),
    batch: u64,
) -> Result<Stage, Refused> {
    let at = At { s, backend, mesh, stage };
    let mut keeping = config.clone();
    let module = s.server.proposals.as_ref().filter(|p| matches!(p.how, Speculation::Module(_)));
    let module = module.and_then(|_| config.module());
    if module.is_some() {
        keeping.hidden = Some(Hidden::Kept);
    }
    let config = &keeping;
    // With latents in pages exact steps would make every key again; engines do not.
    let fidelity = served_fidelity(config);
    let decode = s.purpose == Purpose::Decode;
    let beside = s.server.chunk.filter(|_| decode);
    let sequences = batch + s.at_once();
    let plan = |rows: &Rows| at.paged(config, [rows.tokens, rows.sequences], sequences, fidelity);
    let run = |name, planned| Run { rows: s.rows(name, batch), ..Run::whole(name, planned) };
    let (forward, mut left) = (s.rows("forward", batch), None);
    let mut runs = match &forward {
        Some(rows) => {
            let both = plan(rows)?;
            let alone = match (beside, s.rows("decode", batch)) {
                (Some(_), Some(rows)) if fidelity != Fidelity::Exact => Some(plan(&rows)?),
                _ => None,
            };
            // As an engine does: another program where decode has other kernels.
            match alone.filter(|alone| !names(alone).eq(names(&both))) {
                Some(alone) => vec![run("prefill", both), run("decode", alone)],
                None => vec![run("forward", both)],
            }
        }
        None => {
            let logits = if config.encoder.is_some() { Logits::None } else { Logits::Last };
            let program = Program { logits, ..Program::full(batch, s.seq) };
            let planned =
                schedule::forward(config, s.storage, backend, (mesh, stage), &program, Fidelity::default())?;
            if config.encoder.is_none() {
                // What is left of a prompt is what pages hold of it: latents themselves, of a window no more than is seen.
                left = Some(at.left(config, sequences)?);
            }
            vec![run("forward", planned)]
        }
    };
    let (kv, kv_per_token) = match (left, config.encoder) {
        (Some(left), _) => left,
        (None, None) => kept(&runs[0].planned, s)?,
        (None, Some(_)) => (0, 0),
    };
    let mut memory = Memory { kv, kv_per_token, ..Memory::default() };
    let own = |p: &Compiled| p.cost().map(|c| c.weight_bytes).map_err(|e| e.to_string());
    let beside = |p: &Compiled, other: &Compiled| {
        let bytes = p.bytes_beside(other).and_then(|all| Ok(all.saturating_sub(p.arena_bytes()?)));
        bytes.map_err(|e| e.to_string())
    };
    memory.weights = own(&runs[0].planned)?;
    for run in &runs[1..] {
        memory.weights += beside(&run.planned, &runs[0].planned)?;
    }
    if let Some(p) = &s.server.proposals {
        let drafts = drafts(&at, p, module.as_ref(), batch)?;
        if let Some(first) = drafts.first() {
            memory.weights += match module {
                Some(_) => beside(&first.planned, &runs[0].planned)?,
                None => own(&first.planned)?,
            };
            let (kv, each) = kept(&first.planned, s)?;
            // A module writes its hidden states where the model's are.
            let hidden = states(&first.planned.graph, &|name| name == Cache::HIDDEN);
            let rows = (s.seq.div_ceil(Cache::PAGE as u64) * Cache::PAGE as u64 * sequences).max(1);
            memory.kv += kv - hidden.min(kv);
            memory.kv_per_token += each - (hidden / rows).min(each);
        }
        runs.extend(drafts);
    }
    memory.kv = memory.kv.saturating_mul(s.micro);
    let programs: Vec<&Compiled> = runs.iter().map(|r| &r.planned).collect();
    let arena = Compiled::arena_bytes_of(&programs).map_err(|e| e.to_string())?;
    memory.buffers = programs.iter().map(|p| arrivals(p)).max().unwrap_or(0).min(arena);
    memory.activations = arena - memory.buffers;
    Ok(Stage { runs, memory, weights: [memory.weights, 0] })
}

/// The runs of what proposes tokens: one over what it has not seen yet, then one a further proposal.
fn drafts(at: &At, p: &Proposals, module: Option<&ModelConfig>, batch: u64) -> Result<Vec<Run>, Refused> {
    let Some(config) = module.or(p.draft.as_ref()) else { return Ok(vec![]) };
    let proposed = p.how.proposed() as u64;
    // A module takes the hidden state of every token that is new; a draft model has seen its own proposals, but not the last.
    let unseen = match module {
        Some(_) => p.tokens(),
        None => 1.0 + p.acceptance.powi(proposed as i32),
    };
    let fidelity = if module.is_some() { served_fidelity(config) } else { Fidelity::Exact };
    let tokens = (batch as f64 * unseen).ceil() as u64;
    let sequences = batch + at.s.at_once();
    let all = |tokens: u64, times: u64, beside: Option<Rows>| -> Result<Run, Refused> {
        let rows = at.s.decoded(batch, 1);
        let group = |g: &Group| Group { tokens: tokens as f64 / batch as f64, ..*g };
        let rows = Rows { tokens, sequences: batch, groups: rows.groups.iter().map(group).collect() };
        let rows = beside.into_iter().fold(rows, Rows::and);
        let planned = at.paged(config, [rows.tokens, rows.sequences], sequences, fidelity)?;
        Ok(Run { name: "draft", planned, times, rows: Some(rows) })
    };
    // Whatever proposes goes through prompts, too.
    let prompts = at.s.server.chunk.map(|chunk| at.s.beside(chunk));
    let further = (proposed > 1).then(|| all(batch, proposed - 1, None)).transpose()?;
    Ok([Some(all(tokens, 1, prompts)?), further].into_iter().flatten().collect())
}

/// Bytes of keys and values in the pages of a program, and of a token.
fn kept(paged: &Compiled, s: &Schedule) -> Result<(u64, u64), Refused> {
    let cost = paged.cost().map_err(|e| e.to_string())?;
    Ok((held(&paged.graph, s), cost.kv_bytes_per_token))
}

/// Bytes of keys and values in the pages of a graph.
fn held(paged: &Graph, s: &Schedule) -> u64 {
    let windowed = states(paged, &|name| name.starts_with(Cache::WINDOWED));
    let whole = states(paged, &|_| true) - windowed;
    windowed + (whole as f64 * s.part(None)).ceil() as u64
}

/// Whether a layer sees a window, of which pages of its own are kept.
pub fn in_windows(l: &LayerSpec) -> bool {
    l.attention.window.is_some() && l.attention.latent.is_none()
}

/// Pages of windowed layers for so many sequences, as a server has them: each window with a step of prefill.
pub fn windows(config: &ModelConfig, table: usize, sequences: usize) -> Option<Windows> {
    let window = config.layers.iter().filter(|l| in_windows(l)).filter_map(|l| l.attention.window).max()?;
    let each = Windows::each(window, TOKENS.max(sequences));
    let every = config.layers.iter().all(in_windows);
    (each < table).then(|| Windows { pages: each.saturating_mul(sequences), window, every })
}

/// Names of a program's kernels in the order of its launches.
pub fn names(planned: &Compiled) -> impl Iterator<Item = Option<&str>> {
    let launches = planned.plan.each_launch().into_iter();
    launches.map(|(_, region)| planned.kernels[region.0].as_ref().map(|k| k.identity.as_str()))
}

#[cfg(test)]
mod tests;

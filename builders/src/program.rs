//! What a program of a model computes: its sizes, its outputs, its cache. In: sizes. Out: plain data that the graph builder and
//! the placements read.

use crate::config::{AttentionSpec, Hidden, LatentSpec, ModelConfig, Pooling, RopeKey};
use astrai_ir::narrow::Part;
use astrai_ir::{DType, Symbol};

/// Symbol of the pages in use.
pub(crate) const CONTEXT: &str = "context";

/// Which program is built, and for what sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Most tokens in one run, of all sequences together.
    pub tokens: u64,
    /// Most sequences in one run.
    pub sequences: u64,
    /// Longest sequence: for the cost of attention, and for rope that turns otherwise in long contexts (LongRoPE).
    pub span: u64,
    /// Logits of which positions.
    pub logits: Logits,
    /// Which cross-entropy of `targets`.
    pub loss: Loss,
    /// Keys and values in pages that outlive runs: prefill and decode. `None`: those of the run's own tokens.
    pub cache: Option<Cache>,
}

/// Keys and values in pages: states `kv.<layer>.k` and `kv.<layer>.v`, each `[pages * page, kv_heads, ..]`, or the latents they
/// are made of: `kv.<layer>.latent`, `[pages * page, 1, rank + rope]`. In eight bits each is two: codes of that shape, and a scale
/// for each token and head, f32 `[pages * page, kv_heads, 1]`; of latents for each [`scaled`](Cache::scaled) neighbours. Hidden states, where
/// they are kept: `kv.hidden`, `[pages * page, 1, hidden]`. Those of
/// windowed layers are `kv.window.<layer>...` where they have pages of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Rows (tokens) of a page, a power of two.
    pub page: usize,
    /// Pages of every layer.
    pub pages: usize,
    /// Most pages of a sequence.
    pub table: usize,
    /// Pages of their own for windowed layers; none where all layers have the same.
    pub windows: Option<Windows>,
}

/// Pages of windowed layers, with tables of their own: what left the window need not be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Pages of every windowed layer.
    pub pages: usize,
    /// The widest window: a token sees so many, itself the last.
    pub window: usize,
    /// Whether every layer is windowed, so that nothing lies in other pages.
    pub every: bool,
}

impl Windows {
    /// Pages that a sequence needs of a window and of a step's tokens, wherever in their pages they begin.
    pub fn each(window: usize, step: usize) -> usize {
        window.saturating_add(step) / Cache::PAGE + 2
    }
}

impl Cache {
    /// Rows of a page unless there is a reason for another number.
    pub const PAGE: usize = 16;

    /// What the names of states in pages of windowed layers begin with.
    pub const WINDOWED: &str = "kv.window.";

    /// Name of the state of hidden states that are kept for a module of multi-token prediction.
    pub const HIDDEN: &str = "kv.hidden";

    /// The pages of a layer, if it has those of windowed layers.
    pub(crate) fn windows_of(&self, spec: &AttentionSpec) -> Option<Windows> {
        self.windows.filter(|_| spec.window.is_some() && spec.latent.is_none())
    }

    /// Name of a state of a layer.
    pub(crate) fn state(&self, spec: &AttentionSpec, layer: usize, part: &str) -> String {
        let first = if self.windows_of(spec).is_some() { Cache::WINDOWED } else { "kv." };
        format!("{first}{layer}.{part}")
    }

    /// Rows of a state of a layer.
    pub(crate) fn rows(&self, spec: &AttentionSpec) -> usize {
        self.windows_of(spec).map_or(self.pages, |w| w.pages) * self.page
    }

    /// The name of the hidden states in pages, and their shape.
    pub(crate) fn hidden(&self, config: &ModelConfig) -> (String, [usize; 3]) {
        (Cache::HIDDEN.into(), [self.pages * self.page, 1, config.hidden_size])
    }

    /// The states of all layers, and what is there for a module of multi-token prediction: hidden states and its layer's.
    pub fn all_states(&self, config: &ModelConfig, storage: DType) -> Vec<(String, DType, [usize; 3])> {
        let mut all: Vec<_> =
            (0..config.num_layers).flat_map(|layer| self.states(config, layer, storage)).collect();
        if let (Some(Hidden::Kept), Some(module)) = (config.hidden, config.module()) {
            let (name, shape) = self.hidden(config);
            all.push((name, storage, shape));
            all.extend(self.states(&module, 0, storage));
        }
        all
    }

    /// Names, types and shapes of the states of a layer, numbers being stored in this type.
    pub fn states(
        &self,
        config: &ModelConfig,
        layer: usize,
        storage: DType,
    ) -> Vec<(String, DType, [usize; 3])> {
        let Some(spec) = config.layers.get(layer).map(|l| &l.attention) else { return vec![] };
        let parts = match &spec.latent {
            Some(l) if l.rope_key == RopeKey::Shared => {
                vec![("latent", [1, l.rank + l.rope], Cache::scaled(l))]
            }
            _ => {
                let (heads, d) = (config.kv_heads, config.head_dim);
                let value = spec.value_dim(d);
                vec![("k", [heads, d], d), ("v", [heads, value], value)]
            }
        };
        let rows = self.rows(spec);
        let mut states = Vec::new();
        for (part, [heads, d], group) in parts {
            let name = self.state(spec, config.first_layer() + layer, part);
            let Some(code) = config.pages else {
                states.push((name, storage, [rows, heads, d]));
                continue;
            };
            states.push((Part::Codes.of(&name), code.dtype(), [rows, heads, d]));
            states.push((Part::Scales.of(&name), DType::F32, [rows, heads, d / group.max(1)]));
        }
        states
    }

    /// Neighbours of a latent and its rotated part that share a scale: none are of both.
    pub(crate) fn scaled(l: &LatentSpec) -> usize {
        let (mut a, mut b) = (l.rank, l.rope);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let Cache { page, pages, table, windows } = *self;
        let windowed = windows.map_or(pages, |w| w.pages);
        if !page.is_power_of_two() || [pages, table, windowed].contains(&0) {
            return Err(format!(
                "{pages} pages of {page} rows, {table} a sequence: a page has a power of two of rows, and there is one at least"
            ));
        }
        match [pages, table, windowed]
            .iter()
            .all(|n| n.checked_mul(page).is_some_and(|rows| rows <= i32::MAX as usize))
        {
            true => Ok(()),
            false => {
                Err(format!("{pages} pages of {page} rows, {table} a sequence: rows are counted in 32 bits"))
            }
        }
    }
}

/// Outputs of a program with [`Loss::Tokens`]: the negative log-probability of the target, then the statistics of
/// [`astrai_ir::ops::Statistic`] in their order.
pub const TOKEN_OUTPUTS: [&str; 6] = ["nll", "lse", "mean_logit", "entropy", "log_sum_square", "top"];

/// The loss of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// None; there are no targets.
    None,
    /// The mean over the targets that count.
    Mean,
    /// Their sum times the scalar input `loss_scale`: with one over the number of all targets that count, the losses of
    /// several runs, and their gradients, add up to those of the mean over all.
    Scaled,
    /// As `Scaled`, of a model with experts. The output `router_load` f32 `[layers with experts, experts]` is the number of tokens
    /// of each expert; where `balanced`, the outputs `router_balance` and `router_z` times the scalar inputs `balance_scale`
    /// and `z_scale` are added to `loss`, and the output `cross_entropy` is its first term.
    Routed {
        /// The routers' losses are computed and added to `loss`.
        balanced: bool,
    },
    /// No loss but what an objective is made of, of each token, f32 `[tokens]`, 0 where its target is negative: the outputs
    /// [`TOKEN_OUTPUTS`].
    Tokens {
        /// Of a model with experts also the outputs `router_load`, `router_balance` and `router_z` of [`Loss::Routed`].
        balanced: bool,
    },
}

/// Positions whose logits a program puts out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// Of none (a program that only scores).
    None,
    /// Of every token: `[tokens, vocab]`.
    All,
    /// Of the tokens at `last`, one a sequence: `[sequences, vocab]`.
    Last,
    /// The same, and the output `tokens` i32 `[sequences]`: a token drawn from each row.
    Drawn,
    /// Of none. In their place comes `embedding` `[sequences, hidden]`: each sequence's final hidden states, normed, of the positions
    /// of this run.
    Embedding(Pooling),
}

impl Program {
    /// Everything of a batch of `batch` sequences of up to `seq` tokens.
    pub fn full(batch: u64, seq: u64) -> Program {
        let (logits, loss) = (Logits::All, Loss::None);
        Program { tokens: batch * seq, sequences: batch, span: seq, logits, loss, cache: None }
    }

    /// Prefill of up to `tokens` tokens of up to `sequences` sequences and, at a token each, their decode.
    pub fn paged(tokens: u64, sequences: u64, cache: Cache) -> Program {
        let span = (cache.table.saturating_mul(cache.page)) as u64;
        let (logits, loss) = (Logits::Last, Loss::None);
        Program { tokens, sequences, span, logits, loss, cache: Some(cache) }
    }

    /// The same where tokens are drawn from the logits in the program, if they are.
    pub fn drawing(self, draws: bool) -> Program {
        Program { logits: if draws { Logits::Drawn } else { self.logits }, ..self }
    }

    pub(crate) fn symbols(&self, config: &ModelConfig) -> Vec<Symbol> {
        let one = |name: &str, max: u64| Symbol { name: name.into(), min: 1, max, multiple_of: 1 };
        let pages = self.cache.filter(|_| config.caches_latents());
        let pages = pages.map(|cache| one(CONTEXT, cache.pages as u64));
        pages.into_iter().chain([one("sequences", self.sequences), one("tokens", self.tokens)]).collect()
    }
}

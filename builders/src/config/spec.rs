//! The resolved description of a model: plain data, nothing left to default. Every number here has been checked to be
//! in range, so that whoever builds from it computes shapes without further care.

use super::mtp::{Hidden, MtpSpec};
use super::names::Names;
use super::rope::RopeSpec;
use astrai_ir::ops::{Groups, Scores};
use astrai_ir::{Code, DType, Narrow, Storage};

/// Most layers accepted.
pub const MAX_LAYERS: usize = 1 << 14;
/// Most heads accepted, of either kind.
pub const MAX_HEADS: usize = 1 << 16;
/// Widest head accepted.
pub const MAX_HEAD_DIM: usize = 1 << 14;
/// Widest residual stream or MLP accepted.
pub const MAX_WIDTH: usize = 1 << 24;
/// Largest vocabulary accepted.
pub const MAX_VOCAB: usize = 1 << 28;
/// Most experts accepted, of all layers together.
pub const MAX_EXPERTS: usize = 1 << 16;
/// Longest context accepted, and largest window.
pub const MAX_POSITIONS: usize = 1 << 31;
/// Most parameters accepted; byte counts of weights, gradients and moments then fit 63 bits.
pub const MAX_PARAMETERS: u128 = 1 << 48;

/// A decoder-only language model, or an encoder of the same parts, fully resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Name of the registered model type, the value of `model_type`.
    pub model_type: &'static str,
    /// The checkpoint's names of the weights.
    pub names: &'static Names,
    /// Rows of the embedding, logits of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Layers; `layers.len()`.
    pub num_layers: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Components of a head of queries and keys, even; `heads * head_dim` may differ from `hidden_size`.
    pub head_dim: usize,
    /// Inner width of the MLP (of mixtral: of its experts).
    pub intermediate_size: usize,
    /// Longest sequence that the model states, tokens.
    pub max_positions: usize,
    /// Added to the mean square in every RMSNorm.
    pub norm_eps: f64,
    /// RMSNorms multiply by `1 + w` in place of `w` (Gemma).
    pub norm_offset: bool,
    /// Factor on the rows of the embedding before the first layer.
    pub embed_scale: f64,
    /// When set, logits become `cap * tanh(logit / cap)`.
    pub logit_softcap: Option<f64>,
    /// The head is the embedding.
    pub tie_embeddings: bool,
    /// The MLP is `down(activation(gate(x)) * up(x))`.
    pub activation: Activation,
    /// Element type of the checkpoint, if the file states it.
    pub dtype: Option<DType>,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
    /// How fresh weights are drawn.
    pub init_style: InitStyle,
    /// Token that opens a sequence, if stated.
    pub bos: Option<u32>,
    /// Tokens that end one; empty if none is stated.
    pub eos: Vec<u32>,
    /// Padding token, if stated.
    pub pad: Option<u32>,
    /// Each layer, first to last; equal entries are one kind.
    pub layers: Vec<LayerSpec>,
    /// How the weights of linear layers are stored where the model runs, if not as numbers of their own.
    pub narrow: Option<Narrow>,
    /// How the checkpoint has them, so that they can stay so where kernels read codes; `narrow` goes before it.
    pub packed: Option<Storage>,
    /// What keys and values, or latents, are stored as in pages, if not as numbers of their own: codes of eight bits.
    pub pages: Option<Code>,
    /// Room for adapters that requests choose among, where it is served with some.
    pub adapters: Option<Slots>,
    /// Set of an encoder: attention is to the whole sequence, and there is no head but this.
    pub encoder: Option<EncoderSpec>,
    /// The module of multi-token prediction, where the model has one.
    pub mtp: Option<Box<MtpSpec>>,
    /// What programs over pages have to do with hidden states, where a module proposes tokens.
    pub hidden: Option<Hidden>,
}

/// How an encoder makes one vector of a sequence's normed stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderSpec {
    /// Which positions count.
    pub pooling: Pooling,
    /// Vectors are divided by their Euclidean length.
    pub normalise: bool,
}

/// Positions of a sequence that make its vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean over all.
    Mean,
    /// The first.
    Cls,
    /// The last.
    Last,
}

/// Pointwise function of the MLP's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * Phi(x)` with the error function.
    Gelu,
    /// GELU by its tanh approximation.
    GeluTanh,
}

/// How fresh weights are drawn; norms multiply by one and biases are zero in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitStyle {
    /// Every matrix `N(0, initializer_range)`.
    Normal,
    /// As `Normal`, but attention output and MLP down projections `N(0, initializer_range / sqrt(2 * num_layers))`.
    ScaledOutputs,
}

/// What one layer computes.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Self-attention.
    pub attention: AttentionSpec,
    /// Feed-forward part.
    pub mlp: MlpSpec,
    /// Where the residual branches are normed.
    pub norms: NormPlacement,
}

/// Where the RMSNorms of attention and of the MLP stand, both `x + branch(x)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// `x + f(norm(x))`.
    Pre,
    /// `x + norm(f(x))` (OLMo 2).
    Post,
    /// `x + norm(f(norm(x)))` (Gemma 2 and 3, GLM 4).
    Sandwich,
}

/// Attention of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Biases on the query, key and value projections; of latent attention on those that make latents.
    pub qkv_bias: bool,
    /// Bias on the output projection.
    pub o_bias: bool,
    /// RMSNorm of queries and keys.
    pub qk_norm: QkNorm,
    /// Output multiplied by `sigmoid(linear(x))`, `x` the layer's normed input, before the output projection.
    pub gate: bool,
    /// Key j is visible to query i iff `0 <= i - j < window`; without a window iff `0 <= i - j`.
    pub window: Option<usize>,
    /// Factor on the scores before softmax.
    pub scale: f64,
    /// When set, scores become `cap * tanh(score / cap)` before softmax.
    pub softcap: Option<f64>,
    /// Rotary embedding of queries and keys.
    pub rope: RopeSpec,
    /// A learned score of each head joins the denominator of its softmax (gpt-oss).
    pub sinks: bool,
    /// Keys and values are made of one latent a token; `None`: of the layer's normed input, heads of queries sharing them.
    pub latent: Option<LatentSpec>,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a token's keys and values are products of its normed latent.
/// Heads of queries and keys have `nope` components that are not rotated, then `rope` that are.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentSpec {
    /// Width of the queries' own normed latent; `None`: queries are projected at once.
    pub q_rank: Option<usize>,
    /// Width of the latent.
    pub rank: usize,
    /// Components of a head that are not rotated.
    pub nope: usize,
    /// Components that are; even.
    pub rope: usize,
    /// Components of a value.
    pub value: usize,
    /// Where the rotated components of keys come from.
    pub rope_key: RopeKey,
    /// Added to the mean square in the norms of the latents.
    pub norm_eps: f64,
    /// Names of the weights.
    pub names: &'static LatentNames,
}

/// Where the rotated components of keys come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeKey {
    /// The projection that makes the latent; all heads share them (DeepSeek).
    Shared,
    /// The latent, for each head of keys between its other components and its value (AstrAI).
    OfLatent,
}

/// The checkpoint's names of latent attention, within the layer and before `.weight`; those of queries with a latent of their
/// own are empty where the family has none.
#[derive(Debug, PartialEq)]
pub struct LatentNames {
    /// Queries at once, `[heads * (nope + rope), hidden]`.
    pub q: &'static str,
    /// To the queries' latent, `[q_rank, hidden]`.
    pub q_down: &'static str,
    /// Its norm, `[q_rank]`.
    pub q_norm: &'static str,
    /// Queries from it, `[heads * (nope + rope), q_rank]`.
    pub q_up: &'static str,
    /// To the latent, and the shared rotated components behind it, `[rank + rope, hidden]` or `[rank, hidden]`.
    pub kv_down: &'static str,
    /// Its norm, `[rank]`.
    pub kv_norm: &'static str,
    /// Keys and values from it, by heads of keys: `nope`, `rope` of the latent's own, `value`.
    pub kv_up: &'static str,
}

impl LatentSpec {
    /// Components of a head of queries and keys.
    pub fn width(&self) -> usize {
        self.nope + self.rope
    }

    /// Rows of the weight that makes the latent.
    pub fn down(&self) -> usize {
        self.rank + if self.rope_key == RopeKey::Shared { self.rope } else { 0 }
    }

    /// Rows, for each head of keys, of the weight that makes keys and values.
    pub fn up(&self) -> usize {
        self.nope + self.value + if self.rope_key == RopeKey::OfLatent { self.rope } else { 0 }
    }
}

impl AttentionSpec {
    /// Components of a value, in heads of `head_dim`.
    pub fn value_dim(&self, head_dim: usize) -> usize {
        self.latent.as_ref().map_or(head_dim, |l| l.value)
    }
}

/// Where queries and keys are normed; over each head, weight `[head_dim]`, unless it says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Nowhere.
    None,
    /// Before the rotation (Qwen3).
    BeforeRope,
    /// After it (AstrAI).
    AfterRope,
    /// Before it, over all heads of a token together, weights `[heads * head_dim]` and `[kv_heads * head_dim]` (OLMo 2).
    WholeBeforeRope,
}

/// Feed-forward part of one layer.
#[derive(Clone, Debug, PartialEq)]
pub enum MlpSpec {
    /// One gated MLP for every token.
    Dense {
        /// Inner width.
        intermediate: usize,
        /// Biases on all three projections.
        bias: bool,
    },
    /// A few of many gated MLPs for each token.
    Experts(ExpertsSpec),
    /// The same in gpt-oss's form.
    Stacked(StackedExperts),
}

impl MlpSpec {
    /// Inner width of the MLP, or of an expert.
    pub fn intermediate(&self) -> usize {
        match self {
            MlpSpec::Dense { intermediate, .. } => *intermediate,
            MlpSpec::Experts(e) => e.intermediate,
            MlpSpec::Stacked(e) => e.intermediate,
        }
    }

    /// What its router chooses by, if it has experts.
    pub fn router(&self) -> Option<RouterSpec> {
        match self {
            MlpSpec::Dense { .. } => None,
            MlpSpec::Experts(e) => Some(e.router()),
            MlpSpec::Stacked(e) => Some(e.router()),
        }
    }
}

/// What the choice of experts and its losses hang on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterSpec {
    /// Experts.
    pub count: usize,
    /// Experts of a token.
    pub chosen: usize,
    /// From the router's logits to weights.
    pub scores: Scores,
    /// Which loss keeps the experts' loads even.
    pub balance: Balance,
}

impl ExpertsSpec {
    /// What its router chooses by.
    pub fn router(&self) -> RouterSpec {
        RouterSpec { count: self.count, chosen: self.chosen, scores: self.scores, balance: self.balance }
    }
}

impl StackedExperts {
    /// What its router chooses by.
    pub fn router(&self) -> RouterSpec {
        let (scores, balance) = (Scores::SoftmaxChosen, Balance::Global);
        RouterSpec { count: self.count, chosen: self.chosen, scores, balance }
    }
}

/// Mixture of experts of one layer: `Σ w_e · down_e(activation(gate_e(x)) * up_e(x))` over the experts chosen for a token, and
/// what shared experts make of every token.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// Experts.
    pub count: usize,
    /// Experts of a token, at most those of the groups kept.
    pub chosen: usize,
    /// Inner width of an expert.
    pub intermediate: usize,
    /// From the router's logits to weights.
    pub scores: Scores,
    /// The choice is limited to the best of equal groups of consecutive experts.
    pub groups: Option<Groups>,
    /// A fixed tensor of the checkpoint is added to the scores for the choice, and only for it.
    pub correction: bool,
    /// The weights of the chosen are divided by their sum.
    pub normalise: bool,
    /// Factor on the weights, after that.
    pub scale: f64,
    /// Experts of every token.
    pub shared: Option<SharedSpec>,
    /// Which loss keeps the experts' loads even, where a run asks for one.
    pub balance: Balance,
    /// An expert to which no token was routed is skipped in that step of training (see `Weight::skip_zero_grad`); else only its
    /// gradient is zero.
    pub skip_unrouted: bool,
    /// Names of the weights.
    pub names: &'static ExpertNames,
}

/// A loss that is least when all experts have equally many tokens: with `f` the number of tokens of each of `E` experts and `p`
/// the mean of its probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balance {
    /// `E Σ f p`, tokens of all layers taken together, `f` over their number: `chosen` when loads are even (transformers'
    /// `load_balancing_loss_func`).
    Global,
    /// The mean over layers of `E Σ f p`, `f` over the number of choices: 1 when loads are even (AstrAI).
    PerLayer,
}

/// Experts that every token meets: the mean of what gated MLPs make of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedSpec {
    /// MLPs.
    pub count: usize,
    /// Inner width of each.
    pub intermediate: usize,
}

/// The checkpoint's names of a layer's experts, behind the layer's prefix and before `.weight`; `{e}` is the expert.
#[derive(Debug, PartialEq)]
pub struct ExpertNames {
    /// Router, `[experts, hidden]`.
    pub router: &'static str,
    /// Correction of the choice, `[experts]`; the whole name.
    pub correction: &'static str,
    /// Gate of an expert, `[intermediate, hidden]`.
    pub gate: &'static str,
    /// Up projection of an expert, `[intermediate, hidden]`.
    pub up: &'static str,
    /// Down projection of an expert, `[hidden, intermediate]`.
    pub down: &'static str,
    /// Gate, up and down projections of a shared expert.
    pub shared: [&'static str; 3],
}

impl ExpertNames {
    /// Name of an expert's tensor within its layer.
    pub fn of(&self, part: &str, expert: usize) -> String {
        format!("{}.weight", part.replace("{e}", &expert.to_string()))
    }

    /// `experts.*.{gate_proj,up_proj}` for names that differ in their last part: the name of the buffer that joins them.
    pub fn joined(names: &[&str]) -> String {
        let all = |name: &str| name.replace("{e}", "*");
        match names {
            [one] => all(one),
            _ => {
                let split = |n: &&str| n.rsplit_once('.').map(|(a, b)| (a.to_string(), b.to_string()));
                let ends: Vec<String> = names.iter().filter_map(split).map(|(_, end)| end).collect();
                let stem = names.first().and_then(split).map(|(stem, _)| stem).unwrap_or_default();
                format!("{}.{{{}}}", all(&stem), ends.join(","))
            }
        }
    }
}

/// Mixture of experts whose matrices the checkpoint has as one tensor, with biases everywhere. With the gate's columns and
/// those of up in turn, `g = min(gate, limit)` and `u = max(min(up, limit), -limit)`:
/// `Σ w_e · down_e((u + 1) * g * sigmoid(alpha * g))`, `w` the softmax over the logits of the chosen alone.
#[derive(Clone, Debug, PartialEq)]
pub struct StackedExperts {
    /// Experts.
    pub count: usize,
    /// Experts of a token, `1..=count`.
    pub chosen: usize,
    /// Inner width of an expert.
    pub intermediate: usize,
    /// Largest gate, and largest magnitude of up.
    pub limit: f64,
    /// Factor on the gate within the sigmoid.
    pub alpha: f64,
    /// Names of the weights.
    pub names: &'static StackedNames,
}

/// The checkpoint's names of a layer's stacked experts, whole but for the layer's prefix.
#[derive(Debug, PartialEq)]
pub struct StackedNames {
    /// Router `[experts, hidden]` and its bias `[experts]`.
    pub router: [&'static str; 2],
    /// Gate and up `[experts, hidden, 2 * intermediate]`, in turn, and their biases `[experts, 2 * intermediate]`.
    pub gate_up: [&'static str; 2],
    /// Down `[experts, intermediate, hidden]` and its biases `[experts, hidden]`.
    pub down: [&'static str; 2],
}

/// Room for adapters: so many, of this rank at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Adapters at once.
    pub slots: usize,
    /// Greatest rank.
    pub rank: usize,
}

impl ModelConfig {
    /// Refuses an encoder where tokens are to be predicted; one line says what there is for it.
    pub fn check_decoder(&self) -> Result<(), String> {
        match self.encoder {
            None => Ok(()),
            Some(_) => Err(format!(
                "`{}` is an encoder: it predicts no tokens, so there is nothing to train or generate; `astrai serve` and `astrai run \
                 --want embedding` give its vectors",
                self.model_type
            )),
        }
    }

    /// True when pages hold what keys and values are made of; no family has other layers beside such ones.
    pub fn caches_latents(&self) -> bool {
        let shared = |l: &LatentSpec| l.rope_key == RopeKey::Shared;
        self.layers.iter().any(|l| l.attention.latent.as_ref().is_some_and(shared))
    }

    /// The distinct layers in order of first appearance, and for each layer the index of its kind.
    pub fn layer_kinds(&self) -> (Vec<&LayerSpec>, Vec<usize>) {
        let mut kinds: Vec<&LayerSpec> = Vec::new();
        let index = |layer| {
            kinds.iter().position(|k| *k == layer).unwrap_or_else(|| {
                kinds.push(layer);
                kinds.len() - 1
            })
        };
        let of_layer = self.layers.iter().map(index).collect();
        (kinds, of_layer)
    }
}

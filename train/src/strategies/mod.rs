//! Strategies: what is learnt from a batch. In: what a policy says of each token (`astrai_builders::TOKEN_OUTPUTS`), a batch, and
//! log-probabilities under frozen policies. Out: a graph with the outputs `loss` and `metric.<name>`, and the inputs that a
//! batch gives it. A strategy is one file and one line of [`STRATEGIES`]; its options are a struct that its file reads from key and value.
//! No logits enter: the head computes log-probabilities, log-sum-exp and entropies some tokens at a time.

mod cpo;
mod dpo;
mod grpo;
mod kto;
mod orpo;
mod sft;
mod terms;

pub use grpo::{Scale, advantages};
pub use terms::{Objective, Terms};

use crate::batch::PackedBatch;
use crate::data::Kind;
use crate::preference::{self, GroupBatch, LabelledBatch, PairBatch};
use astrai_builders::{Logits, Loss, ModelConfig, Program, build};
use astrai_ir::{DType, Graph, IrError, Tape};
use astrai_runtime::Value;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value as Json};
use std::fmt::Debug;

/// Options of a strategy by key, as the flags and files give them.
pub type Options = Map<String, Json>;

/// Prefix of a metric's output.
pub const METRIC: &str = "metric.";

/// A batch of any strategy.
#[derive(Clone, Debug)]
pub enum Batch {
    /// Sequences whose tokens have targets.
    Tokens(PackedBatch),
    /// Pairs of a better and a worse answer.
    Pairs(PairBatch),
    /// Groups of answers with rewards.
    Groups(GroupBatch),
    /// Answers with a label.
    Labelled(LabelledBatch),
}

impl Batch {
    /// An empty one for records of a kind; `tokens` of next tokens fit in without allocation.
    pub fn of(kind: Kind, tokens: usize) -> Batch {
        match kind {
            Kind::Seq | Kind::Sft => Batch::Tokens(PackedBatch::with_capacity(tokens)),
            Kind::Dpo => Batch::Pairs(PairBatch::default()),
            Kind::Grpo => Batch::Groups(GroupBatch::default()),
            Kind::Kto => Batch::Labelled(LabelledBatch::default()),
        }
    }

    /// Tokens of all sequences.
    pub fn tokens(&self) -> usize {
        match self {
            Batch::Tokens(b) => b.tokens(),
            Batch::Pairs(b) => b.chosen.tokens() + b.rejected.tokens(),
            Batch::Groups(b) => b.sequences.tokens(),
            Batch::Labelled(b) => b.sequences.tokens() + b.mismatched.tokens(),
        }
    }

    /// All sequences, in the order in which programs read them.
    pub fn sequences(&self) -> PackedBatch {
        let mut all = PackedBatch::default();
        match self {
            Batch::Tokens(b) => all.extend(b),
            Batch::Pairs(b) => b.joined(&mut all),
            Batch::Groups(b) => all.extend(&b.sequences),
            Batch::Labelled(b) => [&b.sequences, &b.mismatched].into_iter().for_each(|b| all.extend(b)),
        }
        all
    }
}

impl preference::Batch for Batch {
    fn clear(&mut self) {
        match self {
            Batch::Tokens(b) => b.clear(),
            Batch::Pairs(b) => b.clear(),
            Batch::Groups(b) => b.clear(),
            Batch::Labelled(b) => b.clear(),
        }
    }

    fn complete(&mut self) {
        if let Batch::Tokens(b) = self {
            b.complete();
        }
    }
}

/// Log-probabilities of the targets of a batch's sequences under frozen policies, `[tokens]` each, where they were computed.
#[derive(Clone, Debug, Default)]
pub struct Frozen {
    /// Under the reference policy.
    pub reference: Option<Vec<f32>>,
    /// Under the policy that wrote the answers.
    pub old: Option<Vec<f32>>,
}

impl Frozen {
    /// Those that the sequences of a batch came with.
    pub fn of(sequences: &PackedBatch) -> Frozen {
        let own = |x: &Vec<f32>| (!x.is_empty() && x.len() == sequences.tokens()).then(|| x.clone());
        let [reference, old] = &sequences.logps;
        Frozen { reference: own(reference), old: own(old) }
    }
}

/// Inputs of the graph of a strategy beside the model's own, f32: name, shape, elements.
pub type Column = (&'static str, Vec<usize>, Vec<f32>);

/// A strategy with its options.
pub trait Strategy: Debug + Send + Sync {
    /// Whether the loss reads log-probabilities under (a reference policy, the policy that wrote the answers).
    fn frozen(&self) -> [bool; 2] {
        [false, false]
    }

    /// Whether tokens of the prompt have targets, too.
    fn learns_prompts(&self) -> bool {
        false
    }

    /// What one over is the scale of the loss of each micro-batch of a step, so that their losses add up to the step's. The default is for means
    /// over a micro-batch: their number.
    fn denominator(&self, window: &[Batch]) -> f64 {
        window.len() as f64
    }

    /// The inputs that a batch, one of the `window` of a step, gives beside tokens, mask and sequences.
    ///
    /// # Errors
    /// The batch is of another strategy, or something it needs is missing.
    fn columns(&self, batch: &Batch, frozen: &Frozen, window: &[Batch]) -> Result<Vec<Column>, String>;

    /// Metrics that a batch shows by itself.
    fn observed(&self, _batch: &Batch) -> Vec<(&'static str, f64)> {
        vec![]
    }

    /// The loss before its scale, and metrics.
    fn objective(&self, t: &Terms) -> Objective;
}

/// A strategy of the table.
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// What it learns from.
    pub description: &'static str,
    /// Reads its options.
    pub make: fn(Options) -> Result<Box<dyn Strategy>, String>,
}

/// All strategies.
pub static STRATEGIES: [Entry; 8] =
    [sft::SEQ, sft::SFT, dpo::DPO, grpo::GRPO, kto::KTO, orpo::ORPO, cpo::CPO, cpo::SIMPO];

/// The strategy of this name with these options.
///
/// # Errors
/// There is none, or it has no such option, or not with that value.
pub fn strategy(name: &str, options: Options) -> Result<Box<dyn Strategy>, String> {
    let found = STRATEGIES.iter().find(|s| s.name == name).ok_or_else(|| {
        let names: Vec<&str> = STRATEGIES.iter().map(|s| s.name).collect();
        format!("there is no strategy `{name}`; there are {}", names.join(", "))
    })?;
    (found.make)(options).map_err(|e| format!("strategy {name}: {e}"))
}

/// Options as a strategy's own struct.
fn read<T: DeserializeOwned>(options: Options) -> Result<T, String> {
    serde_json::from_value(Json::Object(options)).map_err(|e| e.to_string())
}

/// `key=value` as an option: the value is JSON where it can be read as such, a list where it has commas, else text.
///
/// # Errors
/// There is no `=`.
pub fn option(text: &str) -> Result<(String, Json), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("`{text}`: an option is KEY=VALUE"))?;
    let one = |v: &str| serde_json::from_str(v).unwrap_or_else(|_| Json::String(v.to_string()));
    let whole = match value.contains(',') && !value.starts_with('[') {
        true => Json::Array(value.split(',').map(one).collect()),
        false => one(value),
    };
    Ok((key.to_string(), whole))
}

/// Sizes of a program of a strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Most tokens of a batch.
    pub tokens: u64,
    /// Sequences of every batch.
    pub sequences: usize,
    /// Longest sequence.
    pub span: u64,
}

impl Sizes {
    /// Those of one batch.
    pub fn of(batch: &PackedBatch) -> Sizes {
        let span = batch.positions.iter().max().map_or(1, |p| *p as u64 + 1);
        Sizes { tokens: batch.tokens().max(1) as u64, sequences: batch.sequences(), span }
    }

    fn program(&self, loss: Loss) -> Program {
        let (tokens, sequences) = (self.tokens, self.sequences as u64);
        Program { tokens, sequences, span: self.span, logits: Logits::None, loss, cache: None }
    }
}

/// The graph of a model with the loss of a strategy. Inputs beside the model's: `mask` f32 `[tokens]`, `sequence` i32 `[tokens]`, the scalar `loss_scale`,
/// the strategy's columns, and where `balanced` the scalars `balance_scale` and `z_scale` of the routers' losses. The output `objective` is then the loss without
/// these.
///
/// # Errors
/// The model has no logits, or the strategy does not fit the sizes.
pub fn graph(
    config: &ModelConfig,
    strategy: &dyn Strategy,
    sizes: &Sizes,
    balanced: bool,
) -> Result<Graph, IrError> {
    let (tape, values) = Tape::over(build(config, &sizes.program(Loss::Tokens { balanced }))?);
    let terms = Terms::new(&tape, &values, sizes.sequences);
    let made = tape.scope("objective", || {
        let mut made = strategy.objective(&terms);
        made.loss = made.loss * tape.input("loss_scale", DType::F32, [0; 0]);
        let alone = made.loss.clone();
        for (router, factor) in [("router_balance", "balance_scale"), ("router_z", "z_scale")] {
            if let Some(x) = values.get(router) {
                made.loss = made.loss + x * tape.input(factor, DType::F32, [0; 0]);
            }
        }
        (made, alone)
    });
    let (made, alone) = made;
    let mut outputs = vec![("loss".to_string(), &made.loss)];
    if balanced {
        outputs.push(("objective".to_string(), &alone));
    }
    outputs.extend(made.metrics.iter().map(|(name, v)| (format!("{METRIC}{name}"), v)));
    outputs.extend(values.iter().filter(|(n, _)| n.starts_with("router_")).map(|(n, v)| (n.clone(), v)));
    let outputs: Vec<_> = outputs.iter().map(|(n, v)| (n.as_str(), *v)).collect();
    tape.finish(&outputs)
}

/// The graph of a model that answers `logps`, f32 `[tokens]`: log-probabilities of targets, 0 where there are none.
///
/// # Errors
/// The model has no logits.
pub fn scores(config: &ModelConfig, sizes: &Sizes) -> Result<Graph, IrError> {
    let (tape, values) = Tape::over(build(config, &sizes.program(Loss::Tokens { balanced: false }))?);
    let logps = -&values["nll"];
    tape.finish(&[("logps", &logps)])
}

/// The inputs of the graph of [`scores`]: sequences with a target for each token.
pub fn token_inputs(all: &PackedBatch, targets: &[i32]) -> [(&'static str, Value); 4] {
    let n = all.tokens();
    [
        ("input_ids", Value::i32(&[n], &all.input_ids)),
        ("positions", Value::i32(&[n], &all.positions)),
        ("starts", Value::i32(&[all.starts.len()], &all.starts)),
        ("targets", Value::i32(&[n], targets)),
    ]
}

/// The inputs of a batch, one of the `window` of a step, for the graphs of this module.
///
/// # Errors
/// As [`Strategy::columns`].
pub fn inputs(
    strategy: &dyn Strategy,
    (batch, window): (&Batch, &[Batch]),
    frozen: &Frozen,
    scale: f64,
) -> Result<Vec<(&'static str, Value)>, String> {
    let all = batch.sequences();
    let n = all.tokens();
    let mask: Vec<f32> = all.targets.iter().map(|t| if *t >= 0 { 1.0 } else { 0.0 }).collect();
    let mut sequence = Vec::with_capacity(n);
    for (i, bounds) in all.starts.windows(2).enumerate() {
        sequence.extend((bounds[0]..bounds[1]).map(|_| i as i32));
    }
    let targets = if strategy.learns_prompts() { next_tokens(&all) } else { all.targets.clone() };
    let mut inputs = Vec::from(token_inputs(&all, &targets));
    inputs.extend([
        ("mask", Value::f32(&[n], &mask)),
        ("sequence", Value::i32(&[n], &sequence)),
        ("loss_scale", Value::f32(&[], &[scale as f32])),
    ]);
    for (name, shape, x) in strategy.columns(batch, frozen, window)? {
        inputs.push((name, Value::f32(&shape, &x)));
    }
    Ok(inputs)
}

/// The next token of every token, prompts included; -1 at the end of a sequence.
fn next_tokens(batch: &PackedBatch) -> Vec<i32> {
    let mut next: Vec<i32> = batch.input_ids.iter().skip(1).copied().chain([-1]).collect();
    batch.starts[1..].iter().filter(|end| **end > 0).for_each(|end| next[*end as usize - 1] = -1);
    next
}

/// Tokens that `counted` finds in a batch, the mean over the window: with it as its denominator, a mean over tokens is one over all tokens of the window
/// when it is averaged over micro-batches. A column for [`Terms::mean_of_window`].
fn share(window: &[Batch], counted: impl Fn(&Batch) -> usize) -> Column {
    let all: usize = window.iter().map(counted).sum();
    ("window_tokens", vec![], vec![(all.max(1) as f64 / window.len().max(1) as f64) as f32])
}

/// Completion tokens of each sequence.
fn lengths(batch: &PackedBatch) -> Vec<f32> {
    let counted =
        |b: &[i32]| batch.targets[b[0] as usize..b[1] as usize].iter().filter(|t| **t >= 0).count() as f32;
    batch.starts.windows(2).map(counted).collect()
}

/// Sums over each sequence of a value of its tokens.
pub fn sums(batch: &PackedBatch, x: &[f32]) -> Vec<f32> {
    let sum = |b: &[i32]| x[b[0] as usize..b[1] as usize].iter().map(|x| f64::from(*x)).sum::<f64>() as f32;
    batch.starts.windows(2).map(sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use astrai_ir::Tensor;

    #[test]
    fn options_are_read_and_unknown_ones_refused() {
        let options = |list: &[&str]| list.iter().map(|t| option(t).unwrap()).collect::<Options>();
        assert_eq!(option("loss_type=sigmoid,sft").unwrap().1, serde_json::json!(["sigmoid", "sft"]));
        assert!(strategy("dpo", options(&["loss_type=sigmoid,sft", "loss_weights=0.5,1"])).is_ok());
        for (name, list, says) in [
            ("dpo", &["loss_type=ppo"][..], "unknown variant `ppo`"),
            ("dpo", &["betta=0.1"], "unknown field `betta`"),
            ("dpo", &["loss_type=exo_pair"], "label_smoothing"),
            ("dpo", &["loss_type=sft,ipo", "loss_weights=[1]"], "weight each"),
            ("grpo", &["loss_type=dr_grpo"], "max_completion_length"),
            ("sft", &["label_smoothing=1"], "[0, 1)"),
            ("simpo", &["loss_type=ipo"], "the strategy cpo has others"),
            ("ppo", &[], "there is no strategy `ppo`"),
        ] {
            let e = strategy(name, options(list)).unwrap_err();
            assert!(e.contains(says), "{e}");
        }
    }

    #[test]
    fn advantages_by_hand() {
        let near = |got: Vec<f32>, want: [f32; 4]| {
            assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-4), "{got:?}");
        };
        let rewards = [1.0, 3.0, 5.0, 5.0];
        let half = 0.5f32.sqrt();
        near(advantages(&rewards, 2, Scale::Group), [-half, half, 0.0, 0.0]);
        near(advantages(&rewards, 2, Scale::None), [-1.0, 1.0, 0.0, 0.0]);
        near(advantages(&rewards, 2, Scale::Population), [-1.0, 1.0, 0.0, 0.0]);
        // The deviation of 1, 3, 5, 5 is √(11/3).
        let all = 1.0 / (11.0f32 / 3.0).sqrt();
        near(advantages(&rewards, 2, Scale::Batch), [-all, all, 0.0, 0.0]);
    }

    /// At 0, where a policy is its own reference, the slope is a half.
    #[test]
    fn log_sigmoid_is_smooth_at_zero_and_finite_far_away() {
        let tape = Tape::new();
        let x = tape.input("x", DType::F32, [3]);
        let y = terms::log_sigmoid(&x, 3);
        let slope = &y.backward(&[&x])[0];
        let leaves = [("x".to_string(), Tensor::f32(&[3], &[0.0, -200.0, 200.0]))];
        let out = tape.run(&[("y", &y), ("slope", slope)], &leaves.into()).unwrap();
        assert_eq!(out["slope"].reals(), [0.5, 1.0, 0.0]);
        assert!((out["y"].at(1) + 200.0).abs() < 1e-4 && out["y"].at(2) == 0.0);
    }

    /// Prompts are learnt where a strategy says so, never across sequences.
    #[test]
    fn next_tokens_end_with_their_sequence() {
        let mut batch = PackedBatch::default();
        batch.push(&[5, 6], &[-1, -1]);
        batch.push(&[7], &[-1]);
        assert_eq!(next_tokens(&batch), [6, -1, -1]);
    }
}

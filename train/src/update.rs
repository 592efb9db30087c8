//! The update program. In: the weights of a gradient program and an optimiser. Out: a graph over states that holds the norm
//! of all gradients, clips them, and updates every weight with its moments in one sweep each. A step whose gradients are not
//! finite changes nothing; skipped parts of a weight ([`Weight::skip_zero_grad`]) keep their moments too. Tensors of one shape and
//! type share a block for the norm and one for the update, called once a tensor, so that planning follows the kinds of tensors.

use astrai_ir::ops::{
    AllReduce, BinaryKind, Call, CompareKind, ReduceKind, ReduceOp, State, Store, UnaryKind, Weight,
};
use astrai_ir::{Axis, Block, BlockId, DType, Dim, Graph, IrError, NodeId, Type};
use astrai_runtime::GRAD;
use std::sync::Arc;

mod codes;
mod muon;
mod round;
mod rule;
mod signal;

use codes::Codes;
pub use muon::{Muon, Scale};
pub use round::COUNTERS as ROUND_COUNTERS;
pub use rule::{Group, Optimizer, Rest, Rule, matches};
use rule::{Step, Treatment};
pub use signal::{SUMS as MOMENT_SUMS, ratio as signal_to_noise};

/// Prefix of f32 master weights; here and below a buffer's or checkpoint tensor's name follows.
pub const MASTER: &str = "master.";
/// Prefix of AdamW's first moments.
pub const EXP_AVG: &str = "exp_avg.";
/// Prefix of AdamW's second moments.
pub const EXP_AVG_SQ: &str = "exp_avg_sq.";
/// Prefixes of the scales of first and second moments that are stored as codes.
pub const MOMENT_SCALES: [&str; 2] = ["exp_avg_scale.", "exp_avg_sq_scale."];
/// Prefix of the weights' moving averages.
pub const EMA: &str = "ema.";
/// Prefix of SGD's velocity and Muon's momentum.
pub const MOMENTUM: &str = "momentum_buffer.";

/// The other stages of a pipeline, whose weights' gradients count in the norm.
#[derive(Clone, Debug)]
pub struct Stages {
    /// Their axis.
    pub axis: Axis,
    /// Weights that are here and at an earlier stage, which counts them.
    pub counted: Vec<String>,
}

/// The update of these weights. Inputs, all f32 scalars: `lr`, and for AdamW `correction1` = 1/(1 - beta1^t) and
/// `correction2` = 1/(1 - beta2^t) for step t from 1; [`UNSCALE`] where gradients are scaled. Output: `grad_norm`, of the gradients before clipping. States: `grad.<buffer>`,
/// the weight itself, `master.<buffer>` where the weight is narrower than f32, and the optimiser's moments.
pub fn build(weights: &[Weight], optimizer: &Optimizer, stages: Option<&Stages>) -> Result<Graph, IrError> {
    let mut g = Graph::default();
    optimizer.check(weights).map_err(|m| g.error(m))?;
    let kinds = Kinds::of(&mut g, weights, optimizer)?;
    let counts = |w: &Weight| !stages.is_some_and(|s| s.counted.contains(&w.name));
    let mut total = g.constant(Type::scalar(DType::F32), 0.0)?;
    for (i, w) in weights.iter().enumerate().filter(|(_, w)| counts(w)) {
        total = kinds.call(&mut g, kinds.norms[kinds.of_weight[i]], (i, w), &[(TOTAL, total)])?;
    }
    let norm = g.scope("norm", |g| {
        if let Some(s) = stages {
            total = g.push(AllReduce { kind: ReduceOp::Sum, over: vec![s.axis.clone()] }, &[total])?;
        }
        g.unary(UnaryKind::Sqrt, total)
    })?;
    g.set_output("grad_norm", norm)?;
    let most = g.constant(Type::scalar(DType::F32), optimizer.most())?;
    let mut given = vec![(FINITE, g.compare(CompareKind::Le, norm, most)?)];
    if let Some(most) = optimizer.clip {
        given.push((FACTOR, g.scope("clip", |g| clip_factor(g, norm, most))?));
    }
    let first = given.len();
    if optimizer.signal {
        let zero = g.constant(Type::scalar(DType::F32), 0.0)?;
        given.extend(signal::SUMS.map(|name| (name, zero)));
    }
    for (i, w) in weights.iter().enumerate() {
        let block = kinds.updates[kinds.of_weight[i]];
        let made = kinds.call(&mut g, block, (i, w), &given)?;
        for (at, (name, _)) in (0..).zip(g.block(block).clone().graph.outputs()) {
            let version = g.part(made, at)?;
            match given[first..].iter_mut().find(|(sum, _)| sum == name) {
                Some((_, sum)) => *sum = version,
                None => g.set_output(&of_tensor(name, w), version)?,
            }
        }
    }
    given[first..].iter().try_for_each(|(name, sum)| g.set_output(name, *sum))?;
    Ok(g)
}

/// Name of the tensor in the bodies of blocks; its states' names follow from it.
const TENSOR: &str = "weight";
/// One over what the loss was multiplied by, an input.
pub const UNSCALE: &str = "unscale";
/// The sum of squares so far, a parameter.
const TOTAL: &str = "total";
/// Whether all gradients are finite and none too large, a parameter.
const FINITE: &str = "finite";
/// What gradients are scaled by to clip them, a parameter.
const FACTOR: &str = "factor";

/// The name of a tensor's own state, given that of the block's.
fn of_tensor(name: &str, w: &Weight) -> String {
    format!("{}{}", name.strip_suffix(TENSOR).unwrap_or(name), w.name)
}

/// The blocks of each kind of tensor: tensors of one type that are treated alike, with the same parts where each of those is treated by itself.
struct Kinds {
    of_weight: Vec<usize>,
    norms: Vec<BlockId>,
    updates: Vec<BlockId>,
}

impl Kinds {
    fn of(g: &mut Graph, weights: &[Weight], optimizer: &Optimizer) -> Result<Kinds, IrError> {
        let mut known = Vec::new();
        let mut kinds = Kinds { of_weight: vec![], norms: vec![], updates: vec![] };
        for w in weights {
            let treatment = optimizer.treatment(w);
            let apart = w.skip_zero_grad || matches!(treatment.step, Step::Muon(_));
            let parts = apart.then(|| w.rows().iter().map(|part| part.rows).collect::<Vec<_>>());
            let key = (&w.ty, w.skip_zero_grad, parts, treatment);
            let kind = known.iter().position(|k| *k == key).unwrap_or(known.len());
            kinds.of_weight.push(kind);
            if kind == known.len() {
                let tensor = Weight { name: TENSOR.into(), parts: w.rows(), ..w.clone() };
                let mut add =
                    |what: &str, body| g.add_block(Arc::new(Block::new(&format!("{what}_{kind}"), body)));
                kinds.norms.push(add("norm", squares(&tensor, optimizer)?));
                kinds.updates.push(add("update", update(&tensor, optimizer, &key.3)?));
                known.push(key);
            }
        }
        Ok(kinds)
    }

    /// A call of a block on a tensor's states, these values, and inputs of the program.
    fn call(
        &self,
        g: &mut Graph,
        block: BlockId,
        (at, w): (usize, &Weight),
        given: &[(&str, NodeId)],
    ) -> Result<NodeId, IrError> {
        let body = g.block(block).clone();
        g.scope(&w.name, |g| {
            let mut args = Vec::with_capacity(body.params.len());
            for (param, ty) in body.params.iter().zip(body.param_types()?) {
                args.push(match given.iter().find(|(name, _)| name == param) {
                    Some((_, value)) => *value,
                    None if round::COUNTERS.contains(&param.as_str()) => {
                        round::counter_of(g, param, (at, self.of_weight.len()))?
                    }
                    None if param.ends_with(TENSOR) => {
                        g.push(State { name: of_tensor(param, w), ty: ty.clone() }, &[])?
                    }
                    None => scalar(g, param)?,
                });
            }
            g.push(Call { block, layer: at as u32 }, &args)
        })
    }
}

fn scalar(g: &mut Graph, name: &str) -> Result<NodeId, IrError> {
    g.input(name, DType::F32, vec![])
}

fn state(g: &mut Graph, prefix: &str, w: &Weight, dtype: DType) -> Result<NodeId, IrError> {
    g.push(State { name: format!("{prefix}{}", w.name), ty: w.ty.with(dtype) }, &[])
}

/// A tensor's gradient, of the loss as it is.
fn gradient(g: &mut Graph, w: &Weight, optimizer: &Optimizer) -> Result<NodeId, IrError> {
    let grad = state(g, GRAD, w, DType::F32)?;
    if !optimizer.scaled {
        return Ok(grad);
    }
    let (factor, shape) = (scalar(g, UNSCALE)?, g.ty(grad).shape.clone());
    let factor = g.broadcast(factor, &shape)?;
    g.mul(grad, factor)
}

/// The sum of all elements, in a fixed order: along rows, then over rows.
fn sum_of_all(g: &mut Graph, x: NodeId) -> Result<NodeId, IrError> {
    let mut sum = x;
    while g.ty(sum).rank() > 0 {
        let last = g.ty(sum).rank() - 1;
        sum = g.reduce(ReduceKind::Sum, sum, &[last])?;
    }
    Ok(sum)
}

/// The body that adds the squares of a tensor's gradient to a sum, in a fixed order: along rows, then over rows.
fn squares(w: &Weight, optimizer: &Optimizer) -> Result<Graph, IrError> {
    let mut g = Graph::default();
    g.scope("norm", |g| {
        let total = scalar(g, TOTAL)?;
        let grad = gradient(g, w, optimizer)?;
        let square = g.mul(grad, grad)?;
        let sum = sum_of_all(g, square)?;
        let total = g.add(total, sum)?;
        g.set_output(TOTAL, total)
    })?;
    Ok(g)
}

/// The body that updates a tensor and its moments.
fn update(w: &Weight, optimizer: &Optimizer, treatment: &Treatment) -> Result<Graph, IrError> {
    let mut g = Graph::default();
    g.scope("update", |g| {
        let grad = gradient(g, w, optimizer)?;
        let lr = scalar(g, "lr")?;
        let corrections = match treatment.step {
            Step::Adam { .. } => [scalar(g, "correction1")?, scalar(g, "correction2")?],
            _ => [lr, lr],
        };
        let factor = optimizer.clip.map(|_| scalar(g, FACTOR)).transpose()?;
        let finite = g.input(FINITE, DType::Bool, vec![])?;
        let active = if w.skip_zero_grad { rows_with_gradient(g, w, grad, finite)? } else { finite };
        let lr = g.scale(lr, treatment.rate)?;
        let block = optimizer.block(w);
        let draws = optimizer.rounds(w).then(|| round::counters(g)).transpose()?;
        WeightUpdate {
            ema: optimizer.ema,
            signal: optimizer.signal,
            block,
            draws,
            treatment,
            weight: w,
            lr,
            corrections,
            factor,
            active,
        }
        .build(g, grad)
    })?;
    Ok(g)
}

/// Which rows are updated, `[rows, 1, ..]`: those of parts (experts) whose gradient is not zero, if all gradients are finite.
fn rows_with_gradient(g: &mut Graph, w: &Weight, grad: NodeId, finite: NodeId) -> Result<NodeId, IrError> {
    let rows = g.ty(grad).shape[0].clone();
    let parts = Dim::from(w.rows().len());
    let each = Dim::from(w.rows().first().map_or(0, |part| part.rows));
    let numbers = g.ty(grad).shape[1..].iter().fold(each.clone(), |n, d| &n * d);
    let sizes = g.unary(UnaryKind::Abs, grad)?;
    let sizes = g.reshape(sizes, vec![parts.clone(), numbers])?;
    let most = g.reduce(ReduceKind::Max, sizes, &[1])?;
    let most = g.reshape(most, vec![parts.clone(), Dim::from(1)])?;
    let none = g.fill(most, 0.0)?;
    let nonzero = g.compare(CompareKind::Lt, none, most)?;
    let shape = g.ty(nonzero).shape.clone();
    let finite = g.broadcast(finite, &shape)?;
    let active = g.binary(BinaryKind::And, nonzero, finite)?;
    let active = g.broadcast(active, &[parts, each])?;
    let column = (0..g.ty(grad).rank()).map(|axis| if axis == 0 { rows.clone() } else { Dim::from(1) });
    g.reshape(active, column.collect())
}

/// min(1, most / (norm + 1e-6)), as PyTorch's `clip_grad_norm_` has it.
fn clip_factor(g: &mut Graph, norm: NodeId, most: f64) -> Result<NodeId, IrError> {
    let ty = Type::scalar(DType::F32);
    let (tiny, most, one) =
        (g.constant(ty.clone(), 1e-6)?, g.constant(ty.clone(), most)?, g.constant(ty, 1.0)?);
    let above = g.add(norm, tiny)?;
    let factor = g.div(most, above)?;
    let smaller = g.compare(CompareKind::Lt, factor, one)?;
    g.select(smaller, factor, one)
}

/// The update of one weight.
struct WeightUpdate<'a> {
    ema: Option<f64>,
    /// Whether moments are summed for the gradient's signal over its noise.
    signal: bool,
    /// Elements of a block of moments that are stored as codes.
    block: Option<usize>,
    /// Counters of the draws by which the weight is rounded, where it is at random.
    draws: Option<[NodeId; 2]>,
    treatment: &'a Treatment,
    weight: &'a Weight,
    lr: NodeId,
    corrections: [NodeId; 2],
    factor: Option<NodeId>,
    /// Whether elements are updated, a bool that broadcasts.
    active: NodeId,
}

impl WeightUpdate<'_> {
    fn build(&self, g: &mut Graph, grad: NodeId) -> Result<(), IrError> {
        let w = self.weight;
        let narrow = w.ty.dtype != DType::F32;
        let compute = state(g, "", w, w.ty.dtype)?;
        let p = match (narrow, self.draws) {
            (true, None) => state(g, MASTER, w, DType::F32)?,
            (true, Some(_)) => g.cast(compute, DType::F32)?,
            (false, _) => compute,
        };
        let clipped = match self.factor {
            Some(f) => self.times(g, grad, f)?,
            None => grad,
        };
        let next = match &self.treatment.step {
            Step::Adam { .. } => self.adam(g, p, clipped)?,
            Step::Sgd { momentum, nesterov } => self.sgd(g, p, clipped, (*momentum, *nesterov))?,
            Step::Muon(muon) => self.muon(g, p, clipped, muon)?,
        };
        let next = match self.draws {
            Some(_) => next,
            None => self.store(g, if narrow { MASTER } else { "" }, p, next)?,
        };
        if let Some(kept) = self.ema {
            let average = state(g, EMA, w, DType::F32)?;
            let moved = self.moving_average(g, average, next, kept)?;
            self.store(g, EMA, average, moved)?;
        }
        if let Some(draws) = self.draws {
            let rounded = round::at_random(g, next, draws)?;
            self.store(g, "", compute, rounded)?;
        } else if narrow {
            let rounded = g.cast(next, w.ty.dtype)?;
            let stored = g.push(Store {}, &[compute, rounded])?;
            g.set_output(&w.name, stored)?;
        }
        Ok(())
    }

    /// Stores the next version of a state where elements are updated; answers the value.
    fn store(&self, g: &mut Graph, prefix: &str, state: NodeId, next: NodeId) -> Result<NodeId, IrError> {
        let shape = g.ty(state).shape.clone();
        let active = g.broadcast(self.active, &shape)?;
        let next = g.select(active, next, state)?;
        let stored = g.push(Store {}, &[state, next])?;
        g.set_output(&format!("{prefix}{}", self.weight.name), stored)?;
        Ok(next)
    }

    fn times(&self, g: &mut Graph, x: NodeId, factor: NodeId) -> Result<NodeId, IrError> {
        let shape = g.ty(x).shape.clone();
        let factor = g.broadcast(factor, &shape)?;
        g.mul(x, factor)
    }

    /// The exponential moving average: decay·a + (1 - decay)·b
    fn moving_average(&self, g: &mut Graph, a: NodeId, b: NodeId, decay: f64) -> Result<NodeId, IrError> {
        let (a, b) = (g.scale(a, decay)?, g.scale(b, 1.0 - decay)?);
        g.add(a, b)
    }

    /// `x` with the decay times the weight added, where there is any.
    fn decayed(&self, g: &mut Graph, x: NodeId, p: NodeId) -> Result<NodeId, IrError> {
        let decay = self.treatment.decay;
        if decay == 0.0 {
            return Ok(x);
        }
        let decayed = g.scale(p, decay)?;
        g.add(x, decayed)
    }

    /// p - lr·by
    fn moved(&self, g: &mut Graph, p: NodeId, by: NodeId) -> Result<NodeId, IrError> {
        let by = self.times(g, by, self.lr)?;
        g.sub(p, by)
    }

    fn adam(&self, g: &mut Graph, p: NodeId, grad: NodeId) -> Result<NodeId, IrError> {
        let Step::Adam { betas: [beta1, beta2], eps, coupled, ahead } = self.treatment.step else {
            return Err(g.error("is no step of Adam's".into()));
        };
        let grad = if coupled { self.decayed(g, grad, p)? } else { grad };
        let (first, second) = (self.moment(g, true)?, self.moment(g, false)?);
        let (m, v) = (first[0], second[0]);
        let next_m = self.moving_average(g, m, grad, beta1)?;
        let square = g.mul(grad, grad)?;
        let next_v = self.moving_average(g, v, square, beta2)?;
        let next_m = self.keep(g, true, &first, next_m)?;
        let next_v = self.keep(g, false, &second, next_v)?;
        let first = if ahead { self.moving_average(g, next_m, grad, beta1)? } else { next_m };
        let (mean, square) =
            (self.times(g, first, self.corrections[0])?, self.times(g, next_v, self.corrections[1])?);
        if self.signal {
            let own = if ahead { self.times(g, next_m, self.corrections[0])? } else { mean };
            signal::add(g, own, square)?;
        }
        let root = g.unary(UnaryKind::Sqrt, square)?;
        let eps = g.fill(root, eps)?;
        let root = g.add(root, eps)?;
        let direction = g.div(mean, root)?;
        let by = if coupled { direction } else { self.decayed(g, direction, p)? };
        self.moved(g, p, by)
    }

    fn codes(&self, first: bool) -> Option<Codes> {
        self.block.map(|block| Codes { block, signed: first })
    }

    /// The first moment or the second: its value, and where that is not one, its states.
    fn moment(&self, g: &mut Graph, first: bool) -> Result<Vec<NodeId>, IrError> {
        let (prefix, scales) = prefixes(first);
        Ok(match self.codes(first) {
            Some(codes) => codes.read(g, self.weight, [prefix, scales])?.to_vec(),
            None => vec![state(g, prefix, self.weight, DType::F32)?],
        })
    }

    /// Stores the next version of a moment; answers the value.
    fn keep(&self, g: &mut Graph, first: bool, moment: &[NodeId], next: NodeId) -> Result<NodeId, IrError> {
        let (prefix, scales) = prefixes(first);
        match (self.codes(first), moment) {
            (Some(codes), [_, before, scales_before]) => {
                let [made, scales_made] = codes.write(g, next)?;
                self.store(g, prefix, *before, made)?;
                self.store(g, scales, *scales_before, scales_made)?;
                Ok(next)
            }
            _ => self.store(g, prefix, moment[0], next),
        }
    }

    fn sgd(
        &self,
        g: &mut Graph,
        p: NodeId,
        grad: NodeId,
        (momentum, nesterov): (f64, bool),
    ) -> Result<NodeId, IrError> {
        let mut by = self.decayed(g, grad, p)?;
        if momentum != 0.0 {
            let b = state(g, MOMENTUM, self.weight, DType::F32)?;
            let kept = g.scale(b, momentum)?;
            let next = g.add(kept, by)?;
            let next = self.store(g, MOMENTUM, b, next)?;
            if nesterov {
                let further = g.scale(next, momentum)?;
                by = g.add(by, further)?;
            } else {
                by = next;
            }
        }
        self.moved(g, p, by)
    }

    fn muon(&self, g: &mut Graph, p: NodeId, grad: NodeId, muon: &Muon) -> Result<NodeId, IrError> {
        let b = state(g, MOMENTUM, self.weight, DType::F32)?;
        let next = self.moving_average(g, b, grad, muon.momentum)?;
        let next = self.store(g, MOMENTUM, b, next)?;
        let u = if muon.nesterov { self.moving_average(g, grad, next, 1.0 - muon.momentum)? } else { next };
        let direction = muon.direction(g, u, self.weight)?;
        let by = self.decayed(g, direction, p)?;
        self.moved(g, p, by)
    }
}

/// Of the first moment or the second, and of its scales.
fn prefixes(first: bool) -> (&'static str, &'static str) {
    if first { (EXP_AVG, MOMENT_SCALES[0]) } else { (EXP_AVG_SQ, MOMENT_SCALES[1]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use astrai_ir::{Mesh, Precision, Sizes, Tensor, eval_ranks};
    use std::collections::HashMap;

    /// Two stages have `own`, and both have `tied`, whose gradient the first one counts.
    #[test]
    fn the_norm_is_of_all_stages_and_counts_a_weight_once() {
        let axis = Axis::new("pp", 2);
        let weights = ["own", "tied"].map(|name| Weight::new(name, Type::new(DType::F32, [Dim::from(2)])));
        let optimizer = Optimizer::new(Rule::Sgd { momentum: 0.0, nesterov: false }, 0.0, Some(1.0));
        let norms = |counted: &[&str]| -> Vec<f64> {
            let counted = counted.iter().map(ToString::to_string).collect();
            let stages = Stages { axis: axis.clone(), counted };
            let g = build(&weights, &optimizer, Some(&stages)).unwrap();
            let of_stage = |own: f32| {
                let pair = |x: f32| Tensor::f32(&[2], &[x, 0.0]);
                let values =
                    [("grad.own", pair(own)), ("grad.tied", pair(12.0)), ("lr", Tensor::f32(&[], &[0.1]))];
                let weights = [("own", pair(1.0)), ("tied", pair(1.0))];
                values.into_iter().chain(weights).map(|(n, t)| (n.to_string(), t)).collect::<HashMap<_, _>>()
            };
            let mesh = Mesh { axes: vec![axis.clone()] };
            let sizes = [Sizes::new(), Sizes::new()];
            let outs =
                eval_ranks(&g, &mesh, &[of_stage(3.0), of_stage(4.0)], &sizes, Precision { exact: true });
            let norm = |outs: &Vec<(String, Tensor)>| {
                outs.iter().find(|(n, _)| n == "grad_norm").unwrap().1.reals()[0]
            };
            outs.unwrap().iter().map(norm).collect()
        };
        assert_eq!(norms(&["tied"]), [5.0, 5.0]);
        assert_eq!(norms(&[]), [f64::sqrt(25.0 + 2.0 * 144.0); 2]);
    }
}

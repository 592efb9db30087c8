//! Where a model's weights lie on a mesh. In: a configuration, and ranks along `pp`, `dp`, `tp` and `ep`. Out: the mesh, and
//! for every weight and state of a built graph what a rank holds: a table of roles, by the names of the weights. What does not
//! divide is refused by the name of its key.

use crate::config::{ExpertNames, ExpertsSpec, MlpSpec, ModelConfig, QkNorm};
use astrai_ir::ops::Op;
use astrai_ir::shard::{STAGES, Shard};
use astrai_ir::{Axis, Dim, Graph, Mesh, Placement, Type};
use std::collections::HashMap;

/// Ranks along each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// Stages of a pipeline: each has some of the layers.
    pub pp: usize,
    /// Data: every rank has sequences of its own.
    pub dp: usize,
    /// Experts, sharded over ranks that have sequences of their own, too.
    pub ep: usize,
    /// Tensors: heads, inner widths and the vocabulary.
    pub tp: usize,
}

/// What a weight does, which says how it is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Rows belong to query heads.
    Heads,
    /// Rows belong to key heads.
    KeyHeads,
    /// Rows of queries, keys and values in one tensor.
    AllHeads,
    /// Columns belong to query heads.
    FromHeads,
    /// Rows belong to the inner width of an MLP.
    Inner,
    /// Rows of gate and up in one tensor.
    TwoInner,
    /// Columns belong to the inner width of an MLP.
    FromInner,
    /// Matrices of experts, gate and up of each, rows belong to the inner width.
    ExpertsIn,
    /// Matrices of experts, columns belong to the inner width.
    ExpertsOut,
    /// Matrices of experts in one tensor `[experts, in, inner]`, the last dimension belongs to the inner width.
    StackedIn,
    /// Biases of those, `[experts, inner]`.
    StackedInBias,
    /// Matrices of experts in one tensor `[experts, inner, out]`.
    StackedOut,
    /// Rows are tokens of the vocabulary.
    Vocabulary,
    /// A state of keys or values, `[rows, key heads, ..]`.
    Cache,
}

/// Axes of key heads and, where these are fewer than the ranks, of ranks that share one.
const SHARED: [&str; 2] = ["tp.kv", "tp.q"];

impl Ranks {
    /// The mesh for a model, or which of its keys does not go with it.
    pub fn mesh(&self, c: &ModelConfig) -> Result<Mesh, String> {
        // How many experts there are, and the width of a shared one.
        let experts = c.layers.iter().find_map(|l| match &l.mlp {
            MlpSpec::Experts(e) => Some((e.count, e.shared.map(|s| s.intermediate))),
            MlpSpec::Stacked(e) => Some((e.count, None)),
            MlpSpec::Dense { .. } => None,
        });
        let inner = c.layers.iter().map(|l| l.mlp.intermediate());
        let inner_key = key_of(c, ["moe_intermediate_size", "intermediate_size"]);
        let experts_key = key_of(c, ["num_local_experts", "n_routed_experts", "num_experts"]);
        let divides = |key: &str, value: usize, axis: &str, n: usize| match value.is_multiple_of(n) {
            true => Ok(()),
            false => Err(format!("{key} {value} does not divide by {axis}={n}")),
        };
        let tp = |key, value| divides(key, value, "tp", self.tp);
        tp("num_attention_heads", c.heads)?;
        tp("vocab_size", c.vocab_size)?;
        inner.into_iter().try_for_each(|n| tp(inner_key, n))?;
        if let Some((_, Some(shared))) = experts {
            tp("the width of a shared expert", shared)?;
        }
        match experts {
            Some((count, _)) => divides(experts_key, count, "ep", self.ep)?,
            None if self.ep > 1 => {
                return Err(format!("ep={}: {} has no experts; use dp", self.ep, c.model_type));
            }
            None => {}
        }
        if c.layers.len() < self.pp {
            return Err(format!("num_hidden_layers {} are fewer than pp={}", c.layers.len(), self.pp));
        }
        let mut axes = vec![Axis::new(STAGES, self.pp), Axis::new("dp", self.dp), Axis::new("ep", self.ep)];
        if c.kv_heads.is_multiple_of(self.tp) {
            axes.push(Axis::new("tp", self.tp));
        } else if self.tp.is_multiple_of(c.kv_heads) && c.names.qkv.is_none() {
            axes.push(Axis::new(SHARED[0], c.kv_heads));
            axes.push(Axis::new(SHARED[1], self.tp / c.kv_heads));
        } else {
            return Err(format!(
                "num_key_value_heads {} does not go with tp={}: one must be a multiple of the other",
                c.kv_heads, self.tp
            ));
        }
        Ok(Mesh { axes })
    }
}

/// The first of these keys that files of this model have, else the last.
fn key_of<const N: usize>(c: &ModelConfig, keys: [&'static str; N]) -> &'static str {
    let saved = c.save();
    keys.into_iter().find(|key| saved.get(key).is_some()).unwrap_or(keys[N - 1])
}

/// For every weight and state of `graph`, which was built from this configuration, what ranks hold along each axis; those
/// that are not listed are replicated.
pub fn placements(c: &ModelConfig, mesh: &Mesh, graph: &Graph) -> HashMap<String, Vec<(String, Placement)>> {
    let mut found = HashMap::new();
    for node in graph.nodes() {
        let Some(name) = node.op.leaf_name() else { continue };
        let role = match node.op {
            Op::Weight(_) => role(c, name),
            Op::State(_) if name.starts_with("kv.") && heads_apart(c, node.ty()) => Some((Role::Cache, None)),
            _ => None,
        };
        if let Some((role, experts)) = role {
            let rank = node.ty().rank();
            let place = |a: &Axis| Some((a.name.clone(), placed(c, role, experts, rank, a, mesh)?));
            found.insert(name.to_string(), mesh.axes.iter().filter_map(place).collect());
        }
    }
    found
}

/// True for keys or values of every head; latents are of all heads together.
fn heads_apart(c: &ModelConfig, ty: &Type) -> bool {
    ty.rank() == 3 && ty.shape[1] == Dim::from(c.kv_heads)
}

/// What a weight of this name does, and in which experts.
fn role<'a>(c: &'a ModelConfig, name: &str) -> Option<(Role, Option<&'a ExpertsSpec>)> {
    let names = c.names;
    if name == names.embed || name == names.head {
        return Some((Role::Vocabulary, None));
    }
    let (before, after) = names.layer.split_once("{i}")?;
    let (layer, local) = name.strip_prefix(before)?.split_once(after)?;
    let layer = c.layers.get(layer.parse::<usize>().ok()?.checked_sub(c.first_layer())?)?;
    if let MlpSpec::Stacked(e) = &layer.mlp {
        let table = [
            (e.names.gate_up[0], Role::StackedIn),
            (e.names.gate_up[1], Role::StackedInBias),
            (e.names.down[0], Role::StackedOut),
        ];
        if let Some((_, role)) = table.into_iter().find(|(name, _)| *name == local) {
            return Some((role, None));
        }
    }
    if names.sinks == Some(local) {
        return Some((Role::Heads, None));
    }
    let local = local.strip_suffix(".weight").or(local.strip_suffix(".bias"))?;
    if let MlpSpec::Experts(e) = &layer.mlp {
        if local == ExpertNames::joined(&[e.names.gate, e.names.up]) {
            return Some((Role::ExpertsIn, Some(e)));
        }
        if local == ExpertNames::joined(&[e.names.down]) {
            return Some((Role::ExpertsOut, Some(e)));
        }
        let is = |name: &str, i: usize| local == name.replace("{e}", &i.to_string());
        let any = |name: &str| (0..e.shared.map_or(0, |s| s.count)).any(|i| is(name, i));
        let [gate, up, down] = e.names.shared;
        if any(gate) || any(up) {
            return Some((Role::Inner, None));
        }
        if any(down) {
            return Some((Role::FromInner, None));
        }
    }
    let whole_norm = layer.attention.qk_norm == QkNorm::WholeBeforeRope;
    let table = [
        (Some(names.q), Role::Heads),
        (Some(names.k), Role::KeyHeads),
        (Some(names.v), Role::KeyHeads),
        (names.qkv, Role::AllHeads),
        (whole_norm.then_some(names.q_norm), Role::Heads),
        (whole_norm.then_some(names.k_norm), Role::KeyHeads),
        (Some(names.gate), Role::Heads),
        (Some(names.o), Role::FromHeads),
        (Some(names.mlp_gate), Role::Inner),
        (Some(names.mlp_up), Role::Inner),
        (names.mlp_gate_up, Role::TwoInner),
        (Some(names.mlp_down), Role::FromInner),
    ];
    let latent = layer.attention.latent.as_ref().map(|l| l.names);
    let latent = latent.map(|l| [(Some(l.q_up), Role::Heads), (Some(l.kv_up), Role::KeyHeads)]);
    let mut table = table.into_iter().chain(latent.into_iter().flatten());
    table.find(|(n, _)| *n == Some(local)).map(|(_, role)| (role, None))
}

/// What a rank along `axis` holds of a tensor of `rank` dimensions in this role; `None`: the default.
fn placed(
    c: &ModelConfig,
    role: Role,
    experts: Option<&ExpertsSpec>,
    rank: usize,
    axis: &Axis,
    mesh: &Mesh,
) -> Option<Placement> {
    let rows = Some(Placement::Shard(Shard::of(0)));
    // A bias behind a sum over ranks is added once, to the sum.
    let columns = (rank == 2).then(|| Placement::Shard(Shard::of(1)));
    let sections = |list: Vec<usize>| Some(Placement::Shard(Shard::sections(0, list)));
    let of_experts = matches!(role, Role::ExpertsIn | Role::ExpertsOut | Role::StackedIn | Role::StackedOut);
    let along = |dim: usize| Some(Placement::Shard(Shard::of(dim)));
    match axis.name.as_str() {
        "ep" if of_experts => return rows,
        "dp" | "ep" | STAGES => return None,
        _ => {}
    }
    let shared = axis.name == SHARED[1];
    // An axis is sharded after those before it: of the rows of each matrix this divides what is left.
    let before = if shared { mesh.size(SHARED[0]) } else { 1 };
    match role {
        Role::KeyHeads | Role::Cache if shared => None,
        Role::Heads | Role::KeyHeads | Role::Inner | Role::Vocabulary => rows,
        Role::StackedIn => along(2),
        Role::Cache | Role::StackedInBias | Role::StackedOut => along(1),
        Role::FromHeads | Role::FromInner | Role::ExpertsOut => columns,
        Role::AllHeads => {
            let kv = c.kv_heads * c.head_dim;
            sections(vec![c.heads * c.head_dim, kv, kv])
        }
        Role::TwoInner => sections(vec![c.intermediate_size / before; 2]),
        Role::ExpertsIn => {
            let e = experts?;
            sections(vec![e.intermediate / before; 2 * e.count / mesh.size("ep")])
        }
    }
}

//! Narrow weights. In: a graph of layers, how their weights are stored. Out: the same graph in which each weight of a linear layer is
//! what codes, scales and offsets stand for, which are weights of their own; a checkpoint has them under names made of the weight's. So it is with
//! the matrices of experts that lie one after another. Weights that something else reads too, routers, and rows that groups do not divide
//! stay as they are, as do norms; the head has a storage of its own, and an embedding that is the head as well has the head's. Where the device multiplies integers, and the codes are
//! some, the other side of each such dot is rounded to integers as well.

use crate::adapt::linear;
use crate::{eliminate_dead_nodes, flatten, merge};
use astrai_ir::narrow::Part;
use astrai_ir::ops::{Call, Dequant, Dot, FakeQuant, Gather, GroupedDot, Op, Rows, Weight};
use astrai_ir::{Backend, Block, BlockId, Code, DType, Dim, Graph, IrError, Narrow, NodeId, Storage, Type};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// The graph with narrow weights, for a backend whose dots read them.
///
/// # Errors
/// The backend's do not, or the graph is wrong.
pub fn quantise(graph: &Graph, storage: &Storage, backend: &dyn Backend) -> Result<Graph, IrError> {
    let storage = storage.rounding(backend.target().integer_dots);
    if !backend.reads_codes() {
        let line = "this device has no kernels for narrow weights; leave --quantize out, or use --device cpu";
        return Err(graph.error(line.into()));
    }
    if storage.rounds() && !backend.multiplies_codes() {
        let line = "this device has no kernels for integer activations; leave activations=int8 out";
        return Err(graph.error(line.into()));
    }
    with_codes(graph, &storage)
}

fn with_codes(graph: &Graph, storage: &Storage) -> Result<Graph, IrError> {
    // A kind of layer whose layers are stored differently becomes several.
    let users: Vec<_> = graph.blocks().iter().map(|b| b.graph.users()).collect();
    let mut kinds: Vec<(BlockId, BTreeMap<String, Narrow>)> = Vec::new();
    let mut of_call: HashMap<NodeId, usize> = HashMap::new();
    for id in graph.ids() {
        let node = graph.node(id);
        let Op::Call(c) = &node.op else { continue };
        let (body, users) = (graph.block(c.block), &users[c.block.0 as usize]);
        let stored = |(p, arg): (&String, &NodeId)| {
            let (leaf, Op::Weight(w)) = (body.leaf(p)?, &graph.node(*arg).op) else { return None };
            let narrow = storage.of(w.rows().iter().map(|r| r.name.as_str()))?;
            let plain = || linear(&body.graph, users, leaf).or_else(|| experts(&body.graph, users, leaf));
            // Columns become rows in the codes of a file alone.
            let turned = || stacked(&body.graph, users, leaf).filter(|_| narrow.code == Code::Fp4);
            plain().or_else(turned).filter(|_| fits(w, narrow))?;
            Some((p.clone(), narrow))
        };
        let kind = (c.block, body.params.iter().zip(&node.args).filter_map(stored).collect());
        let at = kinds.iter().position(|k| *k == kind).unwrap_or(kinds.len());
        if at == kinds.len() {
            kinds.push(kind);
        }
        of_call.insert(id, at);
    }
    // Whoever asks for groups that no layer has would else be given the model as it is.
    if let (Storage::Alike(narrow), true) = (storage, kinds.iter().all(|(_, chosen)| chosen.is_empty()))
        && !kinds.is_empty()
    {
        let rows = match narrow.group {
            0 => "whose length 32 divides".to_string(),
            n => format!("that groups of {n} divide"),
        };
        return Err(graph.error(format!("no linear layer of this model has rows {rows}")));
    }
    let (mut blocks, mut seen) = (Vec::with_capacity(kinds.len()), BTreeSet::new());
    for (of, chosen) in &kinds {
        let block = graph.block(*of);
        let name = match seen.insert(*of) {
            true => block.name.clone(),
            false => format!("{}_{}", block.name, blocks.len()),
        };
        blocks.push(match chosen.is_empty() {
            true => block.clone(),
            false => Arc::new(Block::new(&name, narrowed(&block.graph, chosen)?)),
        });
    }
    let graph = &graph.rebuild_with(blocks.clone(), |out, id, args| match &graph.node(id).op {
        Op::Call(c) => {
            let at = of_call[&id];
            let before = graph.block(c.block).params.iter().map(String::as_str);
            let own: HashMap<&str, NodeId> = before.zip(args.iter().copied()).collect();
            let mut bound = Vec::with_capacity(args.len());
            for param in &blocks[at].params {
                bound.push(match (own.get(param.as_str()), Part::named(param)) {
                    (Some(arg), _) => *arg,
                    (None, Some((name, part))) => {
                        let weight = own.get(name).map(|arg| out.node(*arg).op.clone());
                        let (Some(Op::Weight(w)), Some(narrow)) = (weight, kinds[at].1.get(name)) else {
                            return Err(out.error(format!("parameter `{param}` has no weight")));
                        };
                        let weight = stored(out, &w, *narrow, part)?;
                        out.push(weight, &[])?
                    }
                    (None, None) => return Err(out.error(format!("parameter `{param}` has no argument"))),
                });
            }
            out.push(Call { block: BlockId(at as u32), layer: c.layer }, &bound)
        }
        op => out.push_exact(op.clone(), args),
    })?;
    eliminate_dead_nodes(&heads(graph, storage)?)
}

/// Rows in a panel of codes: no panel belongs to two experts.
const PANEL: usize = 32;

/// The shape of a weight whose matrices one product of rows in groups reads, a matrix a group.
pub(crate) fn experts(g: &Graph, users: &[Vec<NodeId>], leaf: NodeId) -> Option<[usize; 2]> {
    let [product] = users[leaf.index()].as_slice() else { return None };
    let node = g.node(*product);
    let (Op::GroupedDot(GroupedDot { transposed: false }), [_, w, _]) = (&node.op, node.args.as_slice())
    else {
        return None;
    };
    let columns = node.ty().shape.get(1).and_then(Dim::size)?;
    let size = |axis: usize| g.ty(leaf).shape.get(axis).and_then(Dim::size);
    (*w == leaf && columns.is_multiple_of(PANEL)).then_some([size(0)?, size(1)?])
}

/// The shape `[groups * n, k]` of the rows of a weight `[groups, k, n]` whose matrices, columns for rows, one product of rows in groups reads.
fn stacked(g: &Graph, users: &[Vec<NodeId>], leaf: NodeId) -> Option<[usize; 2]> {
    let [view] = users[leaf.index()].as_slice() else { return None };
    let [product] = users[view.index()].as_slice() else { return None };
    let sizes: Vec<usize> = g.ty(leaf).shape.iter().filter_map(Dim::size).collect();
    let ([groups, k, n], Op::Reshape(_)) = (sizes.as_slice(), &g.node(*view).op) else { return None };
    let node = g.node(*product);
    let reads = matches!(node.op, Op::GroupedDot(GroupedDot { transposed: true })) && node.args[1] == *view;
    let whole = g.ty(*view).shape == [Dim::from(groups * k), Dim::from(*n)] && n.is_multiple_of(PANEL);
    (reads && whole).then_some([groups * n, *k])
}

/// The checkpoint tensors that narrow weights are made of in a graph as it is built.
///
/// # Errors
/// The graph is wrong.
pub fn narrow_weights(graph: &Graph, narrow: Narrow) -> Result<BTreeSet<String>, IrError> {
    let graph = with_codes(&merge(&flatten(graph)?)?, &narrow.into())?;
    let weight = |id: NodeId| if let Op::Weight(w) = &graph.node(id).op { Some(w.rows()) } else { None };
    let rows = graph.ids().filter_map(weight).flatten();
    let plain = |name: &str| match Part::named(name) {
        Some((plain, Part::Codes)) => Some(plain.to_string()),
        _ => None,
    };
    Ok(rows.filter_map(|r| plain(&r.name)).collect())
}

/// The graph whose products outside of layers read codes, as does an embedding that is the head as well, or a file's, where nothing
/// else reads it.
fn heads(graph: &Graph, storage: &Storage) -> Result<Graph, IrError> {
    let of_head = |id: NodeId| {
        let (Op::Dot(Dot { batch, contract }), [x, w]) = (&graph.node(id).op, &*graph.node(id).args) else {
            return None;
        };
        let rank = graph.ty(*x).rank();
        let plain = batch.is_empty() && rank > 0 && *contract == [(rank - 1, 1)] && graph.ty(*w).rank() == 2;
        let Op::Weight(weight) = &graph.node(*w).op else { return None };
        let narrow = storage.of_head(weight.rows().iter().map(|r| r.name.as_str()))?;
        (plain && fits(weight, narrow)).then_some((*w, narrow))
    };
    let mut chosen: BTreeMap<NodeId, Narrow> = graph.ids().filter_map(of_head).collect();
    let rows = |id: NodeId| match (&graph.node(id).op, &*graph.node(id).args) {
        (Op::Gather(Gather { axis: 0, batch: 0 }), [table, _]) => Some(*table),
        _ => None,
    };
    // Embeddings of a file stay as the file has them.
    for table in graph.ids().filter_map(rows).filter(|_| matches!(storage, Storage::Each(_))) {
        let Op::Weight(w) = &graph.node(table).op else { continue };
        let narrow = storage.of(w.rows().iter().map(|r| r.name.as_str()));
        chosen.extend(narrow.filter(|n| fits(w, *n)).map(|narrow| (table, narrow)));
    }
    let users = graph.users();
    let by_codes = |table: NodeId| {
        let reads = |user: &NodeId| of_head(*user).is_some() || rows(*user) == Some(table);
        users[table.index()].iter().all(reads)
    };
    let mut made: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
    graph.rebuild(|out, id, args| {
        let node = graph.node(id);
        // Which argument is the weight. No kernel looks floats of four bits up row by row.
        let at = match node.op {
            Op::Dot(_) => of_head(id).map(|_| 1),
            _ => rows(id).filter(|table| by_codes(*table)).map(|_| 0),
        };
        let known = at.and_then(|at| Some((at, *chosen.get(&node.args[at])?)));
        let Some((at, narrow)) = known.filter(|(at, n)| *at == 1 || n.code != Code::Fp4) else {
            return out.push_exact(node.op.clone(), args);
        };
        let Op::Weight(weight) = &graph.node(node.args[at]).op else {
            return out.push_exact(node.op.clone(), args);
        };
        let parts = match made.get(&node.args[at]) {
            Some(parts) => parts.clone(),
            None => parts_of(out, weight, narrow)?,
        };
        made.insert(node.args[at], parts.clone());
        if at == 0 {
            let of_row = |part: NodeId| out.push(node.op.clone(), &[part, args[1]]);
            let parts = parts.into_iter().map(of_row).collect::<Result<Vec<_>, _>>()?;
            return out.push(Dequant { code: narrow.code }, &parts);
        }
        let codes = out.push(Dequant { code: narrow.code }, &parts)?;
        let x = rounded(out, args[0], codes, narrow)?;
        out.push(node.op.clone(), &[x, codes])
    })
}

/// True for a weight that can be stored so.
fn fits(w: &Weight, narrow: Narrow) -> bool {
    let columns = w.ty.shape.get(1).and_then(Dim::size);
    w.ty.dtype == DType::F32 && !w.keeps_type && columns.and_then(|k| narrow.group_of(k)).is_some()
}

/// A body whose weights of these names are codes and scales.
fn narrowed(body: &Graph, chosen: &BTreeMap<String, Narrow>) -> Result<Graph, IrError> {
    // How the weight of a product is stored, also behind the view of stacked experts.
    let of = |product: NodeId| {
        let w = body.node(product).args[1];
        let leaf = if let Op::Reshape(_) = body.node(w).op { body.node(w).args[0] } else { w };
        body.node(leaf).op.leaf_name().and_then(|name| chosen.get(name))
    };
    body.rebuild(|out, id, args| match (&body.node(id).op, args) {
        // The matrices of stacked experts, as codes have them.
        (Op::Reshape(_), &[w]) if matches!(out.node(w).op, Op::Dequant(_)) => Ok(w),
        (Op::GroupedDot(_), &[x, w, offsets]) if matches!(out.node(w).op, Op::Dequant(_)) => {
            let x = of(id).map_or(Ok(x), |narrow| rounded(out, x, w, *narrow))?;
            out.push_exact(GroupedDot { transposed: false }.into(), &[x, w, offsets])
        }
        (Op::Weight(w), _) => match chosen.get(&w.name) {
            Some(narrow) => dequantised(out, w, *narrow),
            None => out.push_exact(Op::Weight(w.clone()), args),
        },
        (op @ Op::Dot(_), &[x, w]) => {
            let x = of(id).map_or(Ok(x), |narrow| rounded(out, x, w, *narrow))?;
            out.push_exact(op.clone(), &[x, w])
        }
        (op, _) => out.push_exact(op.clone(), args),
    })
}

/// The left side of a dot by this weight: rounded to integers where the weight's codes are some and that is wanted.
fn rounded(g: &mut Graph, x: NodeId, w: NodeId, narrow: Narrow) -> Result<NodeId, IrError> {
    let (Op::Dequant(_), [codes, scales, ..]) = (&g.node(w).op, g.node(w).args.as_slice()) else {
        return Ok(x);
    };
    let per = narrow.code.per_element();
    let [k, groups] = [codes, scales].map(|id| g.ty(*id).shape.last().and_then(Dim::size).unwrap_or(0));
    let group = (k * per).checked_div(groups).and_then(|group| narrow.rounded(group));
    match group.filter(|_| narrow.activations == Some(true)) {
        Some(group) => g.push(FakeQuant { group }, &[x]),
        None => Ok(x),
    }
}

/// What the parts of a weight stand for.
fn dequantised(g: &mut Graph, w: &Weight, narrow: Narrow) -> Result<NodeId, IrError> {
    let parts = parts_of(g, w, narrow)?;
    g.push(Dequant { code: narrow.code }, &parts)
}

/// The parts of a weight: codes, scales and, where there are any, offsets.
fn parts_of(g: &mut Graph, w: &Weight, narrow: Narrow) -> Result<Vec<NodeId>, IrError> {
    let push = |part: &Part| {
        let weight = stored(g, w, narrow, *part)?;
        g.push(weight, &[])
    };
    narrow.parts().iter().map(push).collect()
}

/// A part of what a weight `[n, k]` is stored as.
fn stored(g: &Graph, w: &Weight, narrow: Narrow, part: Part) -> Result<Weight, IrError> {
    let size = |axis: usize| w.ty.shape.get(axis).and_then(Dim::size).unwrap_or(0);
    let (n, k) = (size(0) * if w.ty.rank() == 3 { size(2) } else { 1 }, size(1));
    let group = narrow.group_of(k).ok_or_else(|| g.error(format!("rows of {k} numbers have no groups")))?;
    let (dtype, width) = match part {
        Part::Codes => (narrow.code.dtype(), k / narrow.code.per_element()),
        Part::Scales | Part::Offsets => (narrow.scales, k / group),
    };
    // Of stacked experts a tensor has all rows.
    let rows = |p: &Rows| if w.ty.rank() == 3 { n } else { p.rows };
    let parts = w.parts.iter().map(|p| Rows { name: part.of(&p.name), rows: rows(p) }).collect();
    let ty = Type::new(dtype, [Dim::from(n), Dim::from(width)]);
    Ok(Weight { parts, ..Weight::fixed(&part.of(&w.name), ty) })
}

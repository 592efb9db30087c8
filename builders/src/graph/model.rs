//! From a resolved configuration to the graph that computes it. One builder serves every program: they differ in the
//! bounds of their symbols and in their outputs, not in model code. Each distinct layer is one block; the outer graph
//! embeds, calls the blocks in order, norms, and applies the head.

use super::cache;
use super::components::{norm_weight, softcap};
use super::layer;
use super::mtp;
use super::pool::pool;
use super::router::Routers;
use crate::config::{EncoderSpec, Hidden, LayerSpec, ModelConfig, RopeSpec};
use crate::program::{Logits, Loss, Program, TOKEN_OUTPUTS};
use astrai_ir::ops::{Call, CompareKind, Const, Drawing, ReduceKind, Sample, UnaryKind};
use astrai_ir::{Block, BlockId, DType, Dim, Graph, IrError, NodeId, Real, Tensor, Type, ops};
use std::sync::Arc;

/// The graph of a model. Inputs: `input_ids` i32 `[tokens]`, `positions` i32 `[tokens]` (from 0 in each sequence),
/// `starts` i32 `[sequences + 1]`, and as wanted `last` i32 `[sequences]`, `targets` i32 `[tokens]` (negative:
/// ignored), `loss_scale` f32, and, where tokens are drawn, `sampling` f32 and `draws` i32, rows of [`Drawing`]. Outputs: `logits`, `tokens`, `loss`, of [`Loss::Routed`] those of the routers, of [`Loss::Tokens`] those of tokens. Over a cache `positions` go on from run to run, and there are
/// `slots` i32 `[tokens]` (the row of each token's key and value, -1: none), `tables` i32 `[sequences, table]` (each
/// sequence's pages), `lens` i32 `[sequences]` (its tokens in them, those of this run included) and an output for the next
/// version of each state. Where pages hold latents, `pages` i32 `[context]` lists the pages in use, each once, and `tables` holds
/// places in that list. Where hidden states are [kept](Hidden) in pages, a module also has
/// `next_slots` i32 `[tokens]` (the row that each token's own state goes to, -1: none). Where windowed layers have pages of their own, their rows and pages are `window_slots` and `window_tables`. An encoder's only output is `embedding` `[sequences, hidden]`; its program wants nothing else. A decoder has it with
/// [`Logits::Embedding`]. All
/// arithmetic is f32; the precision pass changes what is stored.
pub fn build(config: &ModelConfig, program: &Program) -> Result<Graph, IrError> {
    let mut g = Graph::new(program.symbols(config));
    program.cache.map_or(Ok(()), |c| c.check()).map_err(|m| g.error(m))?;
    if config.pages.is_some_and(|code| code.per_element() > 1) {
        return Err(g.error("pages hold numbers or codes of eight bits".into()));
    }
    if program.logits != Logits::None || program.loss != Loss::None || program.cache.is_some() {
        config.check_decoder().map_err(|m| g.error(m))?;
    }
    let tokens = Dim::symbol("tokens");
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let names = config.names;
    let ids = g.input("input_ids", DType::I32, vec![tokens.clone()])?;
    let positions = g.input("positions", DType::I32, vec![tokens.clone()])?;
    let starts = g.input("starts", DType::I32, vec![&Dim::symbol("sequences") + &Dim::from(1)])?;
    let embed = g.scope("embed", |g| g.weight(names.embed, DType::F32, &[vocab, hidden]))?;
    let mut x = g.scope("embed", |g| g.gather(embed, ids, 0))?; // [tokens, hidden]
    if config.embed_scale != 1.0 {
        x = g.scope("embed", |g| g.scale(x, config.embed_scale))?;
    }
    let mut given = vec![("positions", positions), ("starts", starts)];
    if let Some(cache) = &program.cache {
        for held in cache::Held::all(config, cache) {
            given.extend(cache::inputs(&mut g, cache, held)?);
        }
    }
    let slots = given.iter().find(|(name, _)| *name == "slots").map(|(_, id)| *id);
    if let (Some(Hidden::Read(_)), Some(cache), Some(slots)) = (config.hidden, &program.cache, slots) {
        x = g.scope("mtp", |g| mtp::join(g, config, cache, [x, slots]))?;
    }
    let mut routers = Routers::default();
    x = layers(&mut g, config, program, x, &given, &mut routers)?;
    let norm = g.scope("norm", |g| norm_weight(g, config, &config.final_norm(), hidden))?;
    let vectors = match program.logits {
        Logits::Embedding(pooling) => Some(EncoderSpec { pooling, normalise: false }),
        _ => config.encoder,
    };
    if let Some(encoder) = &vectors {
        let normed = |g: &mut Graph, x| g.scope("norm", |g| g.rms_norm(x, norm, config.norm_eps));
        let embedding = pool(&mut g, encoder, [x, starts], normed)?;
        g.set_output("embedding", embedding)?;
        return Ok(g);
    }
    let head = match config.tie_embeddings {
        true => embed,
        false => g.scope("lm_head", |g| g.weight(names.head, DType::F32, &[vocab, hidden]))?,
    };
    if let (Some(kept), Some(cache), Some(slots)) = (config.hidden, &program.cache, slots) {
        let slots = match kept {
            Hidden::Kept => slots,
            Hidden::Read(_) => g.input("next_slots", DType::I32, vec![tokens])?,
        };
        let x = g.scope("norm", |g| g.rms_norm(x, norm, config.norm_eps))?;
        g.scope("mtp", |g| mtp::keep(g, config, cache, [x, slots]))?;
    }
    let finish = |g: &mut Graph, x| {
        let x = g.scope("norm", |g| g.rms_norm(x, norm, config.norm_eps))?;
        g.scope("lm_head", |g| {
            let logits = g.linear(x, head)?; // [.., vocab]
            config.logit_softcap.map_or(Ok(logits), |cap| softcap(g, logits, cap))
        })
    };
    let wanted = match program.logits {
        Logits::None | Logits::Embedding(_) => None,
        Logits::All => Some(x),
        Logits::Last | Logits::Drawn => {
            let last = g.input("last", DType::I32, vec![Dim::symbol("sequences")])?;
            Some(g.scope("last", |g| g.gather(x, last, 0))?)
        }
    };
    if let Some(rows) = wanted {
        let logits = finish(&mut g, rows)?;
        g.set_output("logits", logits)?;
        if program.logits == Logits::Drawn {
            let rows = |n: usize| vec![Dim::symbol("sequences"), Dim::from(n)];
            let sampling = g.input("sampling", DType::F32, rows(Drawing::REALS))?;
            let draws = g.input("draws", DType::I32, rows(Drawing::INTEGERS))?;
            let tokens = g.scope("sample", |g| g.push(Sample {}, &[logits, sampling, draws]))?;
            g.set_output("tokens", tokens)?;
        }
    }
    if program.loss != Loss::None {
        let x = g.scope("norm", |g| g.rms_norm(x, norm, config.norm_eps))?;
        let loss = g.scope("loss", |g| loss(g, [x, head], config, program.loss))?;
        if let Some(loss) = g.scope("router", |g| routers.loss(g, config, program.loss, loss))? {
            g.set_output("loss", loss)?;
        }
    }
    Ok(g)
}

/// Calls the layers in order on `x` `[tokens, hidden]`; `given` are the inputs that all layers share. Next versions of their
/// states become outputs; what they show of their routers is gathered.
fn layers(
    g: &mut Graph,
    config: &ModelConfig,
    program: &Program,
    mut x: NodeId,
    given: &[(&str, NodeId)],
    routers: &mut Routers,
) -> Result<NodeId, IrError> {
    let (kinds, of_layer) = config.layer_kinds();
    let mut blocks: Vec<BlockId> = Vec::with_capacity(kinds.len());
    for (i, spec) in kinds.iter().enumerate() {
        let name = if kinds.len() == 1 { "layer".to_string() } else { format!("layer_{i}") };
        let block = Block::new(&name, layer::body(config, spec, program)?);
        blocks.push(g.add_block(Arc::new(block)));
    }
    let bodies: Vec<Arc<Block>> = blocks.iter().map(|b| g.block(*b).clone()).collect();
    let types = bodies.iter().map(|b| b.param_types()).collect::<Result<Vec<_>, _>>()?;
    for (at, &kind) in of_layer.iter().enumerate() {
        let i = at + config.first_layer();
        let spec: &LayerSpec = kinds[kind];
        let [cos, sin] =
            g.scope("rope", |g| rope_tables(g, &spec.attention.rope, program.span, given[0].1))?;
        let block = &bodies[kind];
        let mut args = Vec::with_capacity(block.params.len());
        for (param, &leaf) in block.params.iter().zip(&types[kind]) {
            args.push(match param.as_str() {
                "x" => x,
                "cos" => cos,
                "sin" => sin,
                name if name.contains(cache::STATE) => {
                    let part = name.replace(cache::STATE, "");
                    let name = program.cache.map(|c| c.state(&spec.attention, i, &part)).unwrap_or_default();
                    g.push(ops::State { name, ty: leaf.clone() }, &[])?
                }
                name => match given.iter().find(|(shared, _)| *shared == name) {
                    Some((_, id)) => *id,
                    None => {
                        let weight = of_layer_weight(block, name, &config.names.prefix(i), leaf);
                        g.scope(&format!("layers.{i}"), |g| g.push(weight, &[]))?
                    }
                },
            });
        }
        let call = Call { block: blocks[kind], layer: i as u32 };
        let made = g.scope(&format!("layers.{i}"), |g| g.push(call, &args))?;
        x = made;
        if g.node(made).types.len() > 1 {
            x = g.part(made, 0)?;
        }
        routers.see(g, block, made)?;
        if let Some(cache) = &program.cache {
            for (part, (name, ..)) in (1..).zip(cache.states(config, at, DType::F32)) {
                let next = g.part(made, part)?;
                g.set_output(&name, next)?;
            }
        }
    }
    Ok(x)
}

/// The weight that a layer binds to a parameter of its block, trained as that is: the layer's prefix before its name and those
/// of its parts.
fn of_layer_weight(block: &Block, param: &str, layer: &str, ty: &Type) -> ops::Weight {
    let mut weight = ops::Weight::new(&format!("{layer}{param}"), ty.clone());
    if let Some(ops::Op::Weight(w)) = block.leaf(param).map(|leaf| &block.graph.node(leaf).op) {
        let part = |p: &ops::Rows| ops::Rows { name: format!("{layer}{}", p.name), rows: p.rows };
        weight.parts = w.parts.iter().map(part).collect();
        (weight.frozen, weight.keeps_type) = (w.frozen, w.keeps_type);
        weight.skip_zero_grad = w.skip_zero_grad;
    }
    weight
}

/// Cosines and sines of every token's angles: two tensors `[tokens, dim/2]`.
fn rope_tables(g: &mut Graph, rope: &RopeSpec, span: u64, positions: NodeId) -> Result<[NodeId; 2], IrError> {
    let freq = rope.inv_freq_within(span);
    let half = freq.len();
    let table = Tensor::float(DType::F32, &[half], freq);
    let freq = g.push(Const::new(&table), &[])?;
    let p = g.cast(positions, DType::F32)?;
    let shape = vec![Dim::symbol("tokens"), Dim::from(half)];
    let p = g.reshape(p, vec![Dim::symbol("tokens"), Dim::from(1)])?;
    let p = g.broadcast(p, &shape)?;
    let angle = g.mul(p, freq)?;
    let mut side = |kind| {
        let t = g.unary(kind, angle)?;
        match rope.attention_factor() {
            1.0 => Ok(t),
            factor => g.scale(t, factor),
        }
    };
    Ok([side(UnaryKind::Cos)?, side(UnaryKind::Sin)?])
}

/// Cross-entropy of `targets` from the normed hidden states `[tokens, hidden]` and the head `[vocab, hidden]`.
fn loss(
    g: &mut Graph,
    [x, head]: [NodeId; 2],
    config: &ModelConfig,
    kind: Loss,
) -> Result<Option<NodeId>, IrError> {
    let targets = g.input("targets", DType::I32, vec![Dim::symbol("tokens")])?;
    let softcap = config.logit_softcap.map(Real);
    let statistics = matches!(kind, Loss::Tokens { .. });
    let op = ops::LinearCrossEntropy { label_smoothing: Real(0.0), softcap, statistics };
    let losses = g.push(op, &[x, head, targets])?; // [tokens]
    if statistics {
        for (i, name) in (0..).zip(TOKEN_OUTPUTS) {
            let part = g.part(losses, i)?;
            g.set_output(name, part)?;
        }
        return Ok(None);
    }
    let sum = g.reduce(ReduceKind::Sum, losses, &[0])?;
    if kind != Loss::Mean {
        let scale = g.input("loss_scale", DType::F32, vec![])?;
        return Ok(Some(g.mul(sum, scale)?));
    }
    let zero = g.fill(targets, 0.0)?;
    let valid = g.compare(CompareKind::Ge, targets, zero)?;
    let valid = g.cast(valid, DType::F32)?;
    let count = g.reduce(ReduceKind::Sum, valid, &[0])?;
    Ok(Some(g.div(sum, count)?))
}

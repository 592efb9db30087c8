//! From a resolved configuration to the graph that computes it. One builder serves every program: they differ in the
//! bounds of their symbols and in what is wanted, not in model code. Each distinct layer is one block; the outer graph
//! embeds, calls the blocks in order, norms, and applies the head.

use crate::config::{LayerSpec, ModelConfig, RopeKey, RopeSpec};
use crate::layer;
use crate::pool::pool;
use crate::router::Routers;
use astrai_ir::ops::{Call, CompareKind, Const, ReduceKind, UnaryKind};
use astrai_ir::{Block, BlockId, DType, Dim, Graph, IrError, NodeId, Real, Symbol, Tensor, Type, ops};
use std::sync::Arc;

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
/// are made of: `kv.<layer>.latent`, `[pages * page, 1, rank + rope]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Rows (tokens) of a page, a power of two.
    pub page: usize,
    /// Pages of every layer.
    pub pages: usize,
    /// Most pages of a sequence.
    pub table: usize,
}

impl Cache {
    /// Rows of a page unless there is a reason for another number.
    pub const PAGE: usize = 16;

    /// Names and shapes of the states of a layer.
    pub fn states(&self, config: &ModelConfig, layer: usize) -> Vec<(String, [usize; 3])> {
        let Some(spec) = config.layers.get(layer).map(|l| &l.attention) else { return vec![] };
        let parts = match &spec.latent {
            Some(l) if l.rope_key == RopeKey::Shared => vec![("latent", [1, l.rank + l.rope])],
            _ => {
                let (heads, d) = (config.kv_heads, config.head_dim);
                vec![("k", [heads, d]), ("v", [heads, spec.value_dim(d)])]
            }
        };
        let rows = self.pages * self.page;
        parts.into_iter().map(|(x, [heads, d])| (format!("kv.{layer}.{x}"), [rows, heads, d])).collect()
    }

    fn check(&self) -> Result<(), String> {
        let Cache { page, pages, table } = *self;
        if !page.is_power_of_two() || pages == 0 || table == 0 {
            return Err(format!(
                "{pages} pages of {page} rows, {table} a sequence: a page has a power of two of rows, and there is one at least"
            ));
        }
        match [pages, table].iter().all(|n| n.checked_mul(page).is_some_and(|rows| rows <= i32::MAX as usize))
        {
            true => Ok(()),
            false => {
                Err(format!("{pages} pages of {page} rows, {table} a sequence: rows are counted in 32 bits"))
            }
        }
    }
}

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
    /// The same, of a model with experts, and what its routers did: see [`router`](crate::router).
    Routed {
        /// The routers' losses are made, too, and added to `loss`.
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

    pub(crate) fn symbols(&self, config: &ModelConfig) -> Vec<Symbol> {
        let one = |name: &str, max: u64| Symbol { name: name.into(), min: 1, max, multiple_of: 1 };
        let pages = self.cache.filter(|_| config.caches_latents());
        let pages = pages.map(|cache| one(layer::CONTEXT, cache.pages as u64));
        pages.into_iter().chain([one("sequences", self.sequences), one("tokens", self.tokens)]).collect()
    }
}

/// The graph of a model. Inputs: `input_ids` i32 `[tokens]`, `positions` i32 `[tokens]` (from 0 in each sequence),
/// `starts` i32 `[sequences + 1]`, and as wanted `last` i32 `[sequences]`, `targets` i32 `[tokens]` (negative:
/// ignored) and `loss_scale` f32. Outputs: `logits`, `loss`, and of [`Loss::Routed`] those of the routers. Over a cache `positions` go on from run to run, and there are
/// `slots` i32 `[tokens]` (the row of each token's key and value, -1: none), `tables` i32 `[sequences, table]` (each
/// sequence's pages), `lens` i32 `[sequences]` (its tokens in them, those of this run included) and an output for the next
/// version of each state. Where pages hold latents, `pages` i32 `[context]` lists the pages in use, each once, and `tables` holds
/// places in that list. An encoder's only output is `embedding` `[sequences, hidden]`; its program wants nothing else. All
/// arithmetic is f32; the precision pass changes what is stored.
pub fn build(config: &ModelConfig, program: &Program) -> Result<Graph, IrError> {
    let mut g = Graph::new(program.symbols(config));
    program.cache.map_or(Ok(()), |c| c.check()).map_err(|m| g.error(m))?;
    if program.logits != Logits::None || program.loss != Loss::None || program.cache.is_some() {
        config.check_decoder().map_err(|m| g.error(m))?;
    }
    let tokens = Dim::symbol("tokens");
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let names = config.model_type.names;
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
        given.extend(layer::CACHE.into_iter().zip(layer::cache_inputs(
            &mut g,
            cache,
            config.caches_latents(),
        )?));
    }
    let mut routers = Routers::default();
    x = layers(&mut g, config, program, x, &given, &mut routers)?;
    let norm = g.scope("norm", |g| layer::norm_weight(g, config, names.final_norm, hidden))?;
    if let Some(encoder) = &config.encoder {
        let normed = |g: &mut Graph, x| g.scope("norm", |g| g.rms_norm(x, norm, config.norm_eps));
        let embedding = pool(&mut g, encoder, [x, starts], normed)?;
        g.set_output("embedding", embedding)?;
        return Ok(g);
    }
    let head = match config.tie_embeddings {
        true => embed,
        false => g.scope("lm_head", |g| g.weight(names.head, DType::F32, &[vocab, hidden]))?,
    };
    let finish = |g: &mut Graph, x| {
        let x = g.scope("norm", |g| g.rms_norm(x, norm, config.norm_eps))?;
        g.scope("lm_head", |g| {
            let logits = g.linear(x, head)?; // [.., vocab]
            config.logit_softcap.map_or(Ok(logits), |cap| softcap(g, logits, cap))
        })
    };
    match program.logits {
        Logits::None => {}
        Logits::All => {
            let logits = finish(&mut g, x)?;
            g.set_output("logits", logits)?;
        }
        Logits::Last => {
            let last = g.input("last", DType::I32, vec![Dim::symbol("sequences")])?;
            let rows = g.scope("last", |g| g.gather(x, last, 0))?;
            let logits = finish(&mut g, rows)?;
            g.set_output("logits", logits)?;
        }
    }
    if program.loss != Loss::None {
        let x = g.scope("norm", |g| g.rms_norm(x, norm, config.norm_eps))?;
        let loss = g.scope("loss", |g| loss(g, [x, head], config, program.loss))?;
        let loss = g.scope("router", |g| routers.loss(g, config, program.loss, loss))?;
        g.set_output("loss", loss)?;
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
    for (i, &kind) in of_layer.iter().enumerate() {
        let spec: &LayerSpec = kinds[kind];
        let [cos, sin] =
            g.scope("rope", |g| rope_tables(g, &spec.attention.rope, program.span, given[0].1))?;
        let block = g.block(blocks[kind]).clone();
        let mut args = Vec::with_capacity(block.params.len());
        for (param, leaf) in block.params.iter().zip(block.param_types()?) {
            args.push(match param.as_str() {
                "x" => x,
                "cos" => cos,
                "sin" => sin,
                "k_cache" | "v_cache" | "latent_cache" => {
                    let name = format!("kv.{i}.{}", param.trim_end_matches("_cache"));
                    g.push(ops::State { name, ty: leaf.clone() }, &[])?
                }
                shared if given.iter().any(|(name, _)| *name == shared) => {
                    given.iter().find(|(name, _)| *name == shared).map_or(x, |(_, id)| *id)
                }
                weight => {
                    let layer = config.model_type.names.layer.replace("{i}", &i.to_string());
                    let weight = of_layer_weight(&block, weight, &layer, leaf);
                    g.scope(&format!("layers.{i}"), |g| g.push(weight, &[]))?
                }
            });
        }
        let call = Call { block: blocks[kind], layer: i as u32 };
        let made = g.scope(&format!("layers.{i}"), |g| g.push(call, &args))?;
        x = made;
        if g.node(made).types.len() > 1 {
            x = g.part(made, 0)?;
        }
        routers.see(g, &block, made)?;
        if let Some(cache) = &program.cache {
            for (part, (name, _)) in (1..).zip(cache.states(config, i)) {
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
        (weight.frozen, weight.skip_zero_grad) = (w.frozen, w.skip_zero_grad);
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

/// `cap * tanh(x / cap)`.
fn softcap(g: &mut Graph, x: NodeId, cap: f64) -> Result<NodeId, IrError> {
    let whole = g.fill(x, cap)?;
    let x = g.div(x, whole)?;
    let x = g.unary(UnaryKind::Tanh, x)?;
    g.mul(x, whole)
}

/// Cross-entropy of `targets` from the normed hidden states `[tokens, hidden]` and the head `[vocab, hidden]`.
fn loss(g: &mut Graph, [x, head]: [NodeId; 2], config: &ModelConfig, kind: Loss) -> Result<NodeId, IrError> {
    let targets = g.input("targets", DType::I32, vec![Dim::symbol("tokens")])?;
    let softcap = config.logit_softcap.map(Real);
    let op = ops::LinearCrossEntropy { label_smoothing: Real(0.0), softcap };
    let losses = g.push(op, &[x, head, targets])?; // [tokens]
    let sum = g.reduce(ReduceKind::Sum, losses, &[0])?;
    if kind != Loss::Mean {
        let scale = g.input("loss_scale", DType::F32, vec![])?;
        return g.mul(sum, scale);
    }
    let zero = g.fill(targets, 0.0)?;
    let valid = g.compare(CompareKind::Ge, targets, zero)?;
    let valid = g.cast(valid, DType::F32)?;
    let count = g.reduce(ReduceKind::Sum, valid, &[0])?;
    g.div(sum, count)
}

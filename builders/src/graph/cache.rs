//! Keys and values, or the latents that they are computed from, in pages that outlive runs. In: what this run's tokens add. Out:
//! the operands of attention, and the next versions of the states. Pages of eight bits hold codes and, of each token and head, a
//! scale, which the token itself decides: what older tokens left is never rounded again.

use super::components::{Layer, Outputs};
use crate::config::{LatentSpec, ModelConfig};
use crate::program::{CONTEXT, Cache};
use astrai_ir::narrow::Part;
use astrai_ir::ops::{self, BinaryKind, Concat, Dequant, ReduceKind, UnaryKind};
use astrai_ir::{Code, DType, Dim, Graph, IrError, NodeId, Type};

/// The pages that a layer's states lie in: those of all layers, those of windowed layers, those that hold latents.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Held {
    Keys,
    Windowed,
    Latents,
}

/// What the names of states have in a layer's body.
pub(super) const STATE: &str = "_cache";

/// Least scale: of a head that is all zero, so that its codes are numbers.
const LEAST: f64 = 1e-30;

impl Held {
    /// Names of the inputs of programs over such pages: the row of each token's key and value, each sequence's pages, how many
    /// tokens it has. Of latents last also the pages in use: the tables then hold places in that list.
    fn names(self) -> &'static [&'static str] {
        match self {
            Held::Keys => &["slots", "tables", "lens"],
            Held::Windowed => &["window_slots", "window_tables", "lens"],
            Held::Latents => &["slots", "tables", "lens", "pages"],
        }
    }

    /// What the layers of a model hold, each once.
    pub(super) fn all(config: &ModelConfig, cache: &Cache) -> Vec<Held> {
        let mut all = vec![];
        for layer in &config.layers {
            let held = match cache.windows_of(&layer.attention) {
                Some(_) => Held::Windowed,
                None if config.caches_latents() => Held::Latents,
                None => Held::Keys,
            };
            if !all.contains(&held) {
                all.push(held);
            }
        }
        all
    }
}

/// The inputs of programs over such pages, by name.
pub(super) fn inputs(
    g: &mut Graph,
    cache: &Cache,
    held: Held,
) -> Result<Vec<(&'static str, NodeId)>, IrError> {
    let sequences = Dim::symbol("sequences");
    let shapes = [
        vec![Dim::symbol("tokens")],
        vec![sequences.clone(), Dim::from(cache.table)],
        vec![sequences],
        vec![Dim::symbol(CONTEXT)],
    ];
    let input = |(name, shape): (&&'static str, _)| Ok((*name, g.input(name, DType::I32, shape)?));
    held.names().iter().zip(shapes).map(input).collect()
}

/// Rows of this run's tokens on their way into pages.
struct Stored {
    /// Rows of the pages.
    pages: usize,
    code: Option<Code>,
    /// The row of each token.
    slots: NodeId,
    versions: Outputs,
}

impl Stored {
    /// Stores rows `[tokens, heads, d]` as part of what pages hold, in eight bits with a scale for each `group` neighbours; then all
    /// rows that `taken` takes of the pages.
    fn rows(
        &mut self,
        g: &mut Graph,
        (name, rows, group): (&str, NodeId, usize),
        taken: &dyn Fn(&mut Graph, NodeId) -> Result<NodeId, IrError>,
    ) -> Result<NodeId, IrError> {
        let name = format!("{name}{STATE}");
        let Some(code) = self.code else {
            let next = self.store(g, name, rows)?;
            return taken(g, next);
        };
        let [codes, scales] = rounded(g, code, rows, group)?;
        let codes = self.store(g, Part::Codes.of(&name), codes)?;
        let scales = self.store(g, Part::Scales.of(&name), scales)?;
        let parts = [taken(g, codes)?, taken(g, scales)?];
        g.push(Dequant { code }, &parts)
    }

    /// The next version of the state of this name.
    fn store(&mut self, g: &mut Graph, name: String, rows: NodeId) -> Result<NodeId, IrError> {
        let Type { dtype, shape, .. } = g.ty(rows).clone();
        let ty = Type::new(dtype, [&[Dim::from(self.pages)], &shape[1..]].concat());
        let state = g.push(ops::State { name: name.clone(), ty }, &[])?;
        let next = g.push(ops::Store {}, &[state, self.slots, rows])?;
        self.versions.push((name, next));
        Ok(next)
    }
}

/// Codes of rows `[tokens, heads, d]`, and a scale for each `group` neighbours, f32 `[tokens, heads, d / group]`: the largest magnitude
/// becomes the largest code.
fn rounded(g: &mut Graph, code: Code, rows: NodeId, group: usize) -> Result<[NodeId; 2], IrError> {
    let shape = g.ty(rows).shape.clone();
    let (Some(width), [tokens, heads, _]) = (shape[2].size(), shape.as_slice()) else {
        return Err(g.error(format!("pages of eight bits want rows of literal width, got {}", g.ty(rows))));
    };
    let groups = vec![tokens.clone(), heads.clone(), Dim::from(width / group), Dim::from(group)];
    let x = g.reshape(rows, groups.clone())?;
    let size = g.unary(UnaryKind::Abs, x)?;
    let top = g.reduce(ReduceKind::Max, size, &[3])?; // [tokens, heads, groups]
    let (most, least) = (g.fill(top, f64::from(code.most()))?, g.fill(top, LEAST)?);
    let scale = g.div(top, most)?;
    let scales = g.binary(BinaryKind::Max, scale, least)?;
    let each = g.reshape(scales, [&groups[..3], &[Dim::from(1)]].concat())?;
    let each = g.broadcast(each, &groups)?;
    let mut value = g.div(x, each)?;
    if code == Code::Int8 {
        let half = g.fill(value, 0.5)?;
        let above = g.add(value, half)?;
        value = g.unary(UnaryKind::Floor, above)?;
    }
    let codes = g.cast(value, code.dtype())?;
    Ok([g.reshape(codes, shape)?, scales])
}

impl Layer<'_> {
    fn stored(&self, pages: usize, slots: NodeId) -> Stored {
        Stored { pages, code: self.config.pages, slots, versions: vec![] }
    }

    /// What attention takes behind the queries: this run's keys and values, or the pages that these were stored into.
    pub(super) fn keys(&mut self, [k, v, starts]: [NodeId; 3]) -> Result<(Vec<NodeId>, Outputs), IrError> {
        let Some(cache) = self.program.cache else { return Ok((vec![k, v, starts], vec![])) };
        let spec = &self.spec.attention;
        let held = if cache.windows_of(spec).is_some() { Held::Windowed } else { Held::Keys };
        let made = self.g.scope("attn.cache", |g| inputs(g, &cache, held))?;
        let made: Vec<NodeId> = made.into_iter().map(|(_, id)| id).collect();
        let mut stored = self.stored(cache.rows(spec), made[0]);
        self.g.scope("attn.cache", |g| {
            let mut all = Vec::new();
            for (name, rows) in [("k", k), ("v", v)] {
                let width = g.ty(rows).shape[2].size().unwrap_or(1);
                all.push(stored.rows(g, (name, rows, width), &|_, pages| Ok(pages))?);
            }
            all.push(starts);
            all.extend(&made[1..]);
            Ok((all, stored.versions))
        })
    }

    /// Latents `[rows, rank]` and shared rotated parts `[rows, 1, rope]` that attention walks, and what it takes behind keys
    /// and values: of this run's tokens, or of the pages in use after these were stored there.
    pub(super) fn latents(
        &mut self,
        l: &LatentSpec,
        [c, turned, starts]: [NodeId; 3],
    ) -> Result<(NodeId, NodeId, Vec<NodeId>, Outputs), IrError> {
        let Some(cache) = self.program.cache else { return Ok((c, turned, vec![starts], vec![])) };
        let made = self.g.scope("attn.cache", |g| inputs(g, &cache, Held::Latents))?;
        let made: Vec<NodeId> = made.into_iter().map(|(_, id)| id).collect();
        let [slots, tables, lens, used] = made[..] else {
            return Err(self.g.error("latents in pages want the pages in use".into()));
        };
        let mut stored = self.stored(cache.pages * cache.page, slots);
        self.g.scope("attn.cache", |g| {
            let row = vec![Dim::symbol("tokens"), Dim::from(1), Dim::from(l.rank)];
            let c = g.reshape(c, row)?;
            let row = g.push(Concat { axis: 2 }, &[c, turned])?; // [tokens, 1, rank + rope]
            let rows = &Dim::symbol(CONTEXT) * &Dim::from(cache.page);
            let in_use = |g: &mut Graph, pages: NodeId| {
                let width = g.ty(pages).shape[2].clone();
                let by_pages = vec![Dim::from(cache.pages), Dim::from(cache.page), width.clone()];
                let pages = g.reshape(pages, by_pages)?;
                let pages = g.gather(pages, used, 0)?; // [context, page, width]
                g.reshape(pages, vec![rows.clone(), Dim::from(1), width])
            };
            let all = stored.rows(g, ("latent", row, Cache::scaled(l)), &in_use)?;
            let c = g.slice(all, 2, Dim::from(0), Dim::from(l.rank))?;
            let c = g.reshape(c, vec![rows.clone(), Dim::from(l.rank)])?;
            let turned = g.slice(all, 2, Dim::from(l.rank), Dim::from(l.rope))?;
            Ok((c, turned, vec![starts, tables, lens], stored.versions))
        })
    }
}

//! Keys and values, or the latents that they are computed from, in pages that outlive runs. In: what this run's tokens add. Out:
//! the operands of attention, and the next versions of the states.

use super::components::{Layer, Outputs};
use crate::config::{LatentSpec, ModelConfig};
use crate::program::{CONTEXT, Cache};
use astrai_ir::ops::{self, Concat};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId, Type};

/// The pages that a layer's states lie in: those of all layers, those of windowed layers, those that hold latents.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Held {
    Keys,
    Windowed,
    Latents,
}

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

impl Layer<'_> {
    /// What attention takes behind the queries: this run's keys and values, or the pages that these were stored into.
    pub(super) fn keys(&mut self, [k, v, starts]: [NodeId; 3]) -> Result<(Vec<NodeId>, Outputs), IrError> {
        let Some(cache) = self.program.cache else { return Ok((vec![k, v, starts], vec![])) };
        let spec = &self.spec.attention;
        let held = if cache.windows_of(spec).is_some() { Held::Windowed } else { Held::Keys };
        self.g.scope("attn.cache", |g| {
            let made: Vec<NodeId> = inputs(g, &cache, held)?.into_iter().map(|(_, id)| id).collect();
            let (slots, rest) = (made[0], &made[1..]);
            let mut versions = Vec::new();
            for (name, rows) in [("k_cache", k), ("v_cache", v)] {
                let row = g.ty(rows).shape[1..].to_vec();
                let ty = Type::new(DType::F32, [vec![Dim::from(cache.rows(spec))], row].concat());
                let state = g.push(ops::State { name: name.into(), ty }, &[])?;
                versions.push((name, g.push(ops::Store {}, &[state, slots, rows])?));
            }
            Ok(([&[versions[0].1, versions[1].1, starts], rest].concat(), versions))
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
        let width = l.rank + l.rope;
        let ty = Type::new(DType::F32, [cache.pages * cache.page, 1, width].map(Dim::from));
        self.g.scope("attn.cache", |g| {
            let made: Vec<NodeId> = inputs(g, &cache, Held::Latents)?.into_iter().map(|(_, id)| id).collect();
            let [slots, tables, lens, used] = made[..] else {
                return Err(g.error("latents in pages want the pages in use".into()));
            };
            let row = vec![Dim::symbol("tokens"), Dim::from(1), Dim::from(l.rank)];
            let c = g.reshape(c, row)?;
            let row = g.push(Concat { axis: 2 }, &[c, turned])?; // [tokens, 1, rank + rope]
            let state = g.push(ops::State { name: "latent_cache".into(), ty }, &[])?;
            let next = g.push(ops::Store {}, &[state, slots, row])?;
            let by_pages = [cache.pages, cache.page, width].map(Dim::from).to_vec();
            let pages = g.reshape(next, by_pages)?;
            let pages = g.gather(pages, used, 0)?; // [context, page, rank + rope]
            let rows = &Dim::symbol(CONTEXT) * &Dim::from(cache.page);
            let all = g.reshape(pages, vec![rows.clone(), Dim::from(1), Dim::from(width)])?;
            let c = g.slice(all, 2, Dim::from(0), Dim::from(l.rank))?;
            let c = g.reshape(c, vec![rows, Dim::from(l.rank)])?;
            let turned = g.slice(all, 2, Dim::from(l.rank), Dim::from(l.rope))?;
            Ok((c, turned, vec![starts, tables, lens], vec![("latent_cache", next)]))
        })
    }
}

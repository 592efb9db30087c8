//! How weights lie in memory. In: a draft, the backend. Out: for each weight that every kernel built around a node would read in one
//! packed layout, that layout; all others stay row-major.

use super::Draft;
use astrai_ir::backend::Backend;
use astrai_ir::{Layout, NodeId};
use std::collections::BTreeMap;

/// The draft with layouts. Weights that are `trained` change at every step and stay row-major; others are packed ahead for the
/// kernels that read them.
pub fn assign_layouts<'g>(mut draft: Draft<'g>, backend: &dyn Backend, trained: bool) -> Draft<'g> {
    for body in draft.bodies.iter_mut().filter(|_| !trained) {
        let mut wanted: BTreeMap<NodeId, Layout> = BTreeMap::new();
        for (value, layout) in body.graph.ids().flat_map(|id| backend.layouts(body.graph, id)) {
            let first = *wanted.entry(value).or_insert(layout);
            if first != layout {
                wanted.insert(value, Layout::Rows);
            }
        }
        wanted.retain(|_, layout| layout.is_packed());
        body.layouts = wanted;
    }
    draft
}

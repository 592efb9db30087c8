//! Hidden states in pages, beside keys and values, and what a module of multi-token prediction makes of them. In: the states that a model
//! or a module has computed. Out: the state's next version; of a module also the input of its layer.

use super::components::norm_weight;
use crate::config::ModelConfig;
use crate::program::Cache;
use astrai_ir::ops::{self, Concat};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId, Type};

/// The state: hidden states of all pages' tokens, `[rows, 1, hidden]`.
fn state(g: &mut Graph, config: &ModelConfig, cache: &Cache) -> Result<NodeId, IrError> {
    let (name, shape) = cache.hidden(config);
    let ty = Type::new(DType::F32, shape.into_iter().map(Dim::from).collect::<Vec<_>>());
    g.push(ops::State { name, ty }, &[])
}

/// Keeps the normed states `x` `[tokens, hidden]` in these rows of the pages.
pub(super) fn keep(
    g: &mut Graph,
    config: &ModelConfig,
    cache: &Cache,
    [x, slots]: [NodeId; 2],
) -> Result<(), IrError> {
    let state = state(g, config, cache)?;
    let row = vec![Dim::symbol("tokens"), Dim::from(1), Dim::from(config.hidden_size)];
    let x = g.reshape(x, row)?;
    let next = g.push(ops::Store {}, &[state, slots, x])?;
    g.set_output(&cache.hidden(config).0, next)
}

/// The input of a module's layer, `[tokens, hidden]`: of the embeddings of tokens, and of the states of those before them, which are in
/// these rows of the pages.
pub(super) fn join(
    g: &mut Graph,
    config: &ModelConfig,
    cache: &Cache,
    [embedded, slots]: [NodeId; 2],
) -> Result<NodeId, IrError> {
    let Some(mtp) = &config.mtp else { return Err(g.error("there is no module of this model".into())) };
    let (hidden, layer) = (config.hidden_size, config.names.prefix(config.first_layer()));
    let state = state(g, config, cache)?;
    let before = g.gather(state, slots, 0)?; // [tokens, 1, hidden]
    let before = g.reshape(before, vec![Dim::symbol("tokens"), Dim::from(hidden)])?;
    let mut normed = [embedded, before];
    for (x, name) in normed.iter_mut().zip([mtp.names.token_norm, mtp.names.hidden_norm]) {
        let weight = norm_weight(g, config, &format!("{layer}{name}.weight"), hidden)?;
        *x = g.rms_norm(*x, weight, config.norm_eps)?;
    }
    let both = g.push(Concat { axis: 1 }, &normed)?; // [tokens, 2 * hidden]
    let join = g.weight(&format!("{layer}{}.weight", mtp.names.join), DType::F32, &[hidden, 2 * hidden])?;
    g.linear(both, join)
}

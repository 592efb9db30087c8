//! The hall. In: a graph, a backend. Out: a compiled program: its plan and the source of its kernels. Every stage is named here in
//! order, and each is told the backend whose kernels it plans for.

use crate::Error;
use crate::compiled::{Compiled, Options, Report, emit};
use crate::stages::Stages;
use astrai_ir::{Backend, Graph};
use astrai_passes as passes;

/// Compiles a graph for a backend.
///
/// # Errors
/// The graph is wrong, or a stage made what the verifier refuses.
pub fn compile(graph: &Graph, backend: &dyn Backend, options: &Options) -> Result<Compiled, Error> {
    let (mut s, o, trained) = (Stages::new(&options.dump), options, options.is_trained());
    let g = s.graph("build", graph.clone(), |g| Ok(g.clone()))?;
    let g = s.graph_if(o.adapter.as_ref(), "adapt", g, passes::adapt)?;
    let g = s.graph_if(o.frozen.as_ref(), "freeze", g, passes::freeze)?;
    let g = s.graph_if(o.noise.as_ref(), "perturb", g, passes::perturb)?;
    let g =
        s.graph_if(o.shards.stages(), "pipeline", g, |g, axis| passes::pipeline(g, axis, o.shards.stage))?;
    let g = s.graph_if(o.shards.axes().next(), "shard", g, |g, _| passes::shard(g, &o.shards))?;
    let g = s.graph("flatten", g, passes::flatten)?;
    let g = s.graph("merge", g, |g| passes::merge_alike(g, o.narrow.as_ref()))?;
    let g = s.graph_if(o.stack, "stack", g, passes::stack)?;
    let g = s.graph_if(o.narrow.as_ref(), "quantise", g, |g, n| passes::quantise(g, n, backend))?;
    let g = s.graph("precision", g, |g| passes::precision(g, o.policy()))?;
    let g = s.graph_if(o.gradient_of.as_ref(), "differentiate", g, |g, of| {
        passes::differentiate_over(g, of, o.gradients, &o.shards.data_axes())
    })?;
    let g = s.graph("canonicalise", g, passes::canonicalise)?;
    let (g, searched) =
        s.found("saturate", g, |g| passes::saturate(g, backend.target(), o.saturate, trained))?;
    let (g, derived) = s.found_if(o.saturate.folds(trained), "fold", g, passes::fold)?;
    let g = s.graph("decompose", g, |g| passes::decompose(g, |op| backend.native(op)))?;
    let draft = s.draft("form_regions", || passes::form_regions(&g, backend))?;
    let draft = s.draft("alias_states", || Ok(passes::alias_states(draft, backend)))?;
    let draft = s.draft("assign_layouts", || Ok(passes::assign_layouts(draft, backend, trained)))?;
    let plan = s.plan("schedule", || passes::schedule(&draft, backend))?;
    let plan = s.plan("place", || passes::place(plan, backend))?;
    let kernels = s.kernels("emit", || emit(&plan, backend))?;
    let report = Report { searched, stages: s.done };
    Ok(Compiled { graph: g, plan, kernels, derived, report })
}

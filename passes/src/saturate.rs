//! Equality saturation. In: a graph. Out: a graph of the same values, within what the fidelity allows, extracted from the e-graph
//! for the least cost on the target at the program's sizes. Every block is saturated by itself, so that the time does not grow
//! with depth; limits are counts, never a clock, so that the same graph always gives the same result.

mod algebra;
mod cost;
mod encode;
mod extract;
mod rules;
#[cfg(test)]
mod samples;
mod term;
#[cfg(test)]
mod tests;

pub use extract::Extraction;
pub use rules::{Fidelity, RULES, Rule, RuleClass};

use algebra::{EGraph, Facts, parts};
use astrai_ir::ops::Op;
use astrai_ir::{BlockId, Graph, IrError, NodeId, Target};
use cost::Costs;
use egg::Id;
use encode::Encoded;
use extract::{ENode, extract};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use term::Term;

/// Most iterations of all rewrite rules.
const ROUNDS: usize = 12;

/// Most e-nodes of an e-graph. A layer has about a hundred; beyond this limit rules multiply forms instead of simplifying, and
/// extraction would take seconds.
const TERMS: usize = 2_000;

/// Most nodes of an outer graph that is saturated: a larger one is mostly a list of calls and weights.
const OUTER: usize = 256;

/// How a graph is saturated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saturate {
    /// Which rewrite rules are applied.
    pub fidelity: Fidelity,
    /// False leaves the graph as it is.
    pub enabled: bool,
    /// Which equal form is extracted.
    pub extraction: Extraction,
}

impl Default for Saturate {
    fn default() -> Saturate {
        Saturate { fidelity: Fidelity::Exact, enabled: true, extraction: Extraction::Cheapest }
    }
}

impl Saturate {
    /// True when weight folding is allowed.
    pub fn folds(self, trained: bool) -> bool {
        self.enabled && !trained && self.fidelity.allows(RuleClass::WeightFold)
    }
}

/// What saturation did in one body.
#[derive(Clone, Debug, Default)]
pub struct SaturationReport {
    /// Name of the block; empty for the graph around the blocks.
    pub name: String,
    /// Rules that fired, each with the number of new equalities.
    pub fired: BTreeMap<&'static str, usize>,
    /// Iterations, e-nodes and e-classes of the e-graph.
    pub size: [usize; 3],
    /// True when the e-graph is saturated: no rule had a new equality left.
    pub saturated: bool,
    /// Predicted picoseconds of the body before and after.
    pub cost: [u64; 2],
}

/// The graph with every body in its extracted form, and a report for each body. `trained` weights change between runs, so no
/// weights are folded.
pub fn saturate(
    graph: &Graph,
    target: &Target,
    how: Saturate,
    trained: bool,
) -> Result<(Graph, Vec<SaturationReport>), IrError> {
    if !how.enabled {
        return Ok((graph.clone(), vec![]));
    }
    let search = Saturator { target, how, fold: how.folds(trained) };
    let mut report = Vec::new();
    let mut blocks = Vec::new();
    let mut same = graph.live().iter().all(|live| *live);
    for (i, block) in graph.blocks().iter().enumerate() {
        let weights = weight_leaves(graph, BlockId(i as u32));
        let (body, found) = search.body(&Arc::new(block.graph.clone()), weights)?;
        report.push(SaturationReport { name: block.name.clone(), ..found });
        same &= body.is_none();
        blocks.push(body.map_or_else(|| block.clone(), |graph| block.with(graph).into()));
    }
    let outer = if same { graph.clone() } else { graph.with_blocks(blocks)? };
    if outer.nodes().len() > OUTER {
        return Ok((outer, report));
    }
    let weights = outer.ids().filter(|id| matches!(outer.node(*id).op, Op::Weight(_))).collect();
    let outer = Arc::new(outer);
    let (body, found) = search.body(&outer, weights)?;
    report.push(found);
    Ok((body.unwrap_or_else(|| (*outer).clone()), report))
}

/// Leaves of a block that are weights and that every call binds to a weight.
fn weight_leaves(graph: &Graph, id: BlockId) -> HashSet<NodeId> {
    let (block, bound) = (graph.block(id), graph.params_bound_to_weights(id));
    let weights = block.params.iter().zip(bound).filter(|(name, bound)| *bound && block.is_weight(name));
    weights.filter_map(|(name, _)| block.leaf(name)).collect()
}

struct Saturator<'a> {
    target: &'a Target,
    how: Saturate,
    fold: bool,
}

impl Saturator<'_> {
    /// The extracted form of one body whose leaves `weights` are weights; `None` when that is the body itself.
    fn body(
        &self,
        graph: &Arc<Graph>,
        weights: HashSet<NodeId>,
    ) -> Result<(Option<Graph>, SaturationReport), IrError> {
        let mut encoded = Encoded::of(graph, weights)?;
        let mut found = self.apply_rules(&mut encoded.egraph);
        if found.fired.is_empty() {
            // No rule fired: the body is its only form.
            let cost = self.cost_of(&encoded);
            found.cost = [cost, cost];
            found.size[2] = encoded.egraph.classes().filter(|c| c.data.attr.is_none()).count();
            return Ok((None, found));
        }
        let forms = ExtractorInput::of(&encoded, self);
        found.size[2] = forms.classes.len();
        let unchanged = || graph.error("no form of the body can be computed".into());
        let roots: Vec<usize> = encoded.roots().iter().map(|r| forms.at[r]).collect();
        // Extraction that met its limit may have no result: then the body stays as it is.
        let Some(choice) = extract(&forms.classes, &roots, self.how.extraction) else {
            return Ok((None, found));
        };
        let only_originals = ExtractorInput::originals(&forms.classes);
        let before = extract(&only_originals, &roots, Extraction::Cheapest).ok_or_else(unchanged)?;
        found.cost = [extract::total(&only_originals, &before).0, extract::total(&forms.classes, &choice).0];
        let (_, new, _) = extract::total(&forms.classes, &choice);
        if new == 0 && choice.len() == graph.live().iter().filter(|l| **l).count() {
            return Ok((None, found));
        }
        let terms: HashMap<Id, Term> =
            choice.iter().map(|(&c, &t)| (forms.ids[c], forms.terms[c][t].clone())).collect();
        Ok((Some(encoded.decode(&terms)?), found))
    }

    /// The cost of the unchanged body.
    fn cost_of(&self, encoded: &Encoded) -> u64 {
        let (g, costs) = (&encoded.egraph, Costs { target: self.target, fold: self.fold });
        let cost = |t: &Term, class: Id| {
            let Some((op, args)) = parts(g, t) else { return 0 };
            let facts: Vec<&Facts> = args.iter().map(|a| &g[*a].data).collect();
            costs.of(&g.analysis, &op, &facts, &g[class].data)
        };
        let all = encoded.originals();
        let of = |t: &Term| g.lookup(t.clone()).map_or(0, |class| cost(t, class));
        all.iter().map(of).fold(0, u64::saturating_add)
    }

    /// Applies all rules that the fidelity allows until the e-graph is saturated or a limit is met.
    fn apply_rules(&self, egraph: &mut EGraph) -> SaturationReport {
        let mut found = SaturationReport::default();
        let allowed = |c: RuleClass| self.how.fidelity.allows(c) && (c != RuleClass::WeightFold || self.fold);
        for round in 1..=ROUNDS {
            let mut new = 0;
            for (i, rule) in RULES.iter().enumerate().filter(|(_, r)| allowed(r.class)) {
                if egraph.total_size() > TERMS {
                    break;
                }
                let times = rules::apply(egraph, i, TERMS);
                egraph.rebuild();
                if times > 0 {
                    *found.fired.entry(rule.name).or_default() += times;
                }
                new += times;
            }
            found.size = [round, egraph.total_size(), 0];
            if new == 0 {
                found.saturated = true;
                break;
            }
            if egraph.total_size() > TERMS {
                break;
            }
        }
        found
    }
}

/// An e-graph as the extractor sees it: e-classes by number, their e-nodes in a fixed order.
struct ExtractorInput {
    ids: Vec<Id>,
    at: HashMap<Id, usize>,
    terms: Vec<Vec<Term>>,
    classes: Vec<Vec<ENode>>,
}

impl ExtractorInput {
    fn of(encoded: &Encoded, search: &Saturator) -> ExtractorInput {
        let g = &encoded.egraph;
        let costs = Costs { target: search.target, fold: search.fold };
        let originals = encoded.originals();
        let mut ids: Vec<Id> = g.classes().filter(|c| c.data.attr.is_none()).map(|c| c.id).collect();
        ids.sort_unstable();
        let at: HashMap<Id, usize> = ids.iter().enumerate().map(|(i, id)| (*id, i)).collect();
        let mut forms = ExtractorInput { ids, at, terms: vec![], classes: vec![] };
        for id in &forms.ids {
            let mut terms: Vec<Term> = g[*id].nodes.clone();
            terms.sort_by_cached_key(|t| (!originals.contains(t), t.clone()));
            let candidate = |t: &Term| {
                let new = !originals.contains(t) as u32;
                let Some((op, args)) = parts(g, t) else {
                    return ENode { args: vec![], cost: (0, new, 1) };
                };
                let args: Vec<Id> = args.iter().map(|a| g.find(*a)).collect();
                let facts: Vec<&Facts> = args.iter().map(|a| &g[*a].data).collect();
                let cost = costs.of(&g.analysis, &op, &facts, &g[*id].data);
                ENode { args: args.iter().map(|a| forms.at[a]).collect(), cost: (cost, new, 1) }
            };
            forms.classes.push(terms.iter().map(candidate).collect());
            forms.terms.push(terms);
        }
        forms
    }

    /// The e-nodes of the original body.
    fn originals(classes: &[Vec<ENode>]) -> Vec<Vec<ENode>> {
        classes.iter().map(|c| c.iter().filter(|t| t.cost.1 == 0).cloned().collect()).collect()
    }
}

//! Equal forms of a body and the cheapest of them. In: a graph. Out: the same values, within what the fidelity allows, from what
//! the target computes fastest at the program's sizes. Every block is searched by itself, so that the time does not grow with
//! depth; limits are counts, never a clock, and the same graph always gives the same form.

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

pub use extract::Wanted;
pub use rules::{Class, Fidelity, RULES, Rule};

use algebra::{EGraph, Facts, parts};
use astrai_ir::ops::Op;
use astrai_ir::{Block, BlockId, Graph, IrError, NodeId, Target};
use cost::Costs;
use egg::Id;
use encode::Encoded;
use extract::{Candidate, extract};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use term::Term;

/// Rounds of rules at most.
const ROUNDS: usize = 12;

/// Terms of an e-graph at most. A layer has about a hundred; what has more than this is multiplied, not simplified, and
/// the search for the cheapest would take seconds.
const TERMS: usize = 2_000;

/// Nodes of a graph around blocks that is searched: one with many weights is mostly a list of calls.
const OUTER: usize = 256;

/// How a graph is saturated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saturate {
    /// Which rules are used.
    pub fidelity: Fidelity,
    /// False leaves the graph as it is.
    pub enabled: bool,
    /// Which form is taken.
    pub wanted: Wanted,
}

impl Default for Saturate {
    fn default() -> Saturate {
        Saturate { fidelity: Fidelity::Exact, enabled: true, wanted: Wanted::Cheapest }
    }
}

impl Saturate {
    /// True when weights may be folded into one another.
    pub fn folds(self, trained: bool) -> bool {
        self.enabled && !trained && self.fidelity.allows(Class::WeightFold)
    }
}

/// What was found in one body.
#[derive(Clone, Debug, Default)]
pub struct Searched {
    /// Name of the block; empty for the graph around the blocks.
    pub name: String,
    /// Rules that said something new, with how often.
    pub fired: BTreeMap<&'static str, usize>,
    /// Rounds, terms and classes of the e-graph.
    pub size: [usize; 3],
    /// True when no rule had more to say.
    pub saturated: bool,
    /// Predicted picoseconds of the body as it was and as it is.
    pub cost: [u64; 2],
}

/// The graph in its cheapest form, and what was found in each body. `trained` weights change between runs: nothing is made of
/// them ahead.
pub fn saturate(
    graph: &Graph,
    target: &Target,
    how: Saturate,
    trained: bool,
) -> Result<(Graph, Vec<Searched>), IrError> {
    if !how.enabled {
        return Ok((graph.clone(), vec![]));
    }
    let search = Search { target, how, fold: how.folds(trained) };
    let mut report = Vec::new();
    let mut blocks = Vec::new();
    for (i, block) in graph.blocks().iter().enumerate() {
        let weights = given_weights(graph, BlockId(i as u32));
        let (body, found) = search.body(&Arc::new(block.graph.clone()), weights)?;
        report.push(Searched { name: block.name.clone(), ..found });
        blocks.push(
            body.map(|graph| {
                Arc::new(Block { name: block.name.clone(), graph, params: block.params.clone() })
            }),
        );
    }
    let same = blocks.iter().all(Option::is_none) && graph.live().iter().all(|live| *live);
    let mut next = blocks.into_iter();
    let outer = match same {
        true => graph.clone(),
        false => graph.rebuild(
            |b| Ok(next.next().flatten().unwrap_or_else(|| b.clone())),
            |out, id, args| out.push_exact(graph.node(id).op.clone(), args),
        )?,
    };
    if outer.nodes().len() > OUTER {
        return Ok((outer, report));
    }
    let weights = outer.ids().filter(|id| matches!(outer.node(*id).op, Op::Weight(_))).collect();
    let outer = Arc::new(outer);
    let (body, found) = search.body(&outer, weights)?;
    report.push(found);
    Ok((body.unwrap_or_else(|| (*outer).clone()), report))
}

/// Leaves of a block that every call binds to a weight.
fn given_weights(graph: &Graph, id: BlockId) -> HashSet<NodeId> {
    let block = graph.block(id);
    let calls: Vec<_> =
        graph.nodes().iter().filter(|n| matches!(&n.op, Op::Call(c) if c.block == id)).collect();
    let given = |p: usize| calls.iter().all(|n| matches!(graph.node(n.args[p]).op, Op::Weight(_)));
    let params = block.params.iter().enumerate().filter(|(p, name)| given(*p) && block.is_weight(name));
    params.filter_map(|(_, name)| block.leaf(name)).collect()
}

struct Search<'a> {
    target: &'a Target,
    how: Saturate,
    fold: bool,
}

impl Search<'_> {
    /// The wanted form of one body whose leaves `weights` are weights; `None` when that is the body as it is.
    fn body(
        &self,
        graph: &Arc<Graph>,
        weights: HashSet<NodeId>,
    ) -> Result<(Option<Graph>, Searched), IrError> {
        let mut encoded = Encoded::of(graph, weights)?;
        let mut found = self.apply_rules(&mut encoded.egraph);
        if found.fired.is_empty() {
            // The body is its only form: nothing is left to choose.
            let cost = self.cost_of(&encoded);
            found.cost = [cost, cost];
            found.size[2] = encoded.egraph.classes().filter(|c| c.data.attr.is_none()).count();
            return Ok((None, found));
        }
        let forms = Forms::of(&encoded, self);
        found.size[2] = forms.classes.len();
        let unchanged = || graph.error("no form of the body can be computed".into());
        let roots: Vec<usize> = encoded.roots().iter().map(|r| forms.at[r]).collect();
        // A search that was cut short may have no form of its own: then the body stays what it is.
        let Some(choice) = extract(&forms.classes, &roots, self.how.wanted) else {
            return Ok((None, found));
        };
        let only_originals = Forms::originals(&forms.classes);
        let before = extract(&only_originals, &roots, Wanted::Cheapest).ok_or_else(unchanged)?;
        found.cost = [extract::total(&only_originals, &before).0, extract::total(&forms.classes, &choice).0];
        let (_, new, _) = extract::total(&forms.classes, &choice);
        if new == 0 && choice.len() == graph.live().iter().filter(|l| **l).count() {
            return Ok((None, found));
        }
        let terms: HashMap<Id, Term> =
            choice.iter().map(|(&c, &t)| (forms.ids[c], forms.terms[c][t].clone())).collect();
        Ok((Some(encoded.decode(&terms)?), found))
    }

    /// What the body costs as it is.
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

    /// Rounds of all rules that the fidelity allows, until nothing is new or a limit is met.
    fn apply_rules(&self, egraph: &mut EGraph) -> Searched {
        let mut found = Searched::default();
        let allowed = |c: Class| self.how.fidelity.allows(c) && (c != Class::WeightFold || self.fold);
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

/// An e-graph as the extractor sees it: classes by number, candidates in order.
struct Forms {
    ids: Vec<Id>,
    at: HashMap<Id, usize>,
    terms: Vec<Vec<Term>>,
    classes: Vec<Vec<Candidate>>,
}

impl Forms {
    fn of(encoded: &Encoded, search: &Search) -> Forms {
        let g = &encoded.egraph;
        let costs = Costs { target: search.target, fold: search.fold };
        let originals = encoded.originals();
        let mut ids: Vec<Id> = g.classes().filter(|c| c.data.attr.is_none()).map(|c| c.id).collect();
        ids.sort_unstable();
        let at: HashMap<Id, usize> = ids.iter().enumerate().map(|(i, id)| (*id, i)).collect();
        let mut forms = Forms { ids, at, terms: vec![], classes: vec![] };
        for id in &forms.ids {
            let mut terms: Vec<Term> = g[*id].nodes.clone();
            terms.sort_by_cached_key(|t| (!originals.contains(t), t.clone()));
            let candidate = |t: &Term| {
                let new = !originals.contains(t) as u32;
                let Some((op, args)) = parts(g, t) else {
                    return Candidate { args: vec![], cost: (0, new, 1) };
                };
                let args: Vec<Id> = args.iter().map(|a| g.find(*a)).collect();
                let facts: Vec<&Facts> = args.iter().map(|a| &g[*a].data).collect();
                let cost = costs.of(&g.analysis, &op, &facts, &g[*id].data);
                Candidate { args: args.iter().map(|a| forms.at[a]).collect(), cost: (cost, new, 1) }
            };
            forms.classes.push(terms.iter().map(candidate).collect());
            forms.terms.push(terms);
        }
        forms
    }

    /// The candidates that the body had.
    fn originals(classes: &[Vec<Candidate>]) -> Vec<Vec<Candidate>> {
        classes.iter().map(|c| c.iter().filter(|t| t.cost.1 == 0).cloned().collect()).collect()
    }
}

//! The rewrite rules, one row each. In: an e-graph. Out: more e-nodes in its e-classes. A rule has a pattern (left-hand side),
//! and a function that checks its guard on the analysis data of the bound e-classes (rank, exact sizes, dtype, weights only)
//! and adds the right-hand side; its class says what it may change. A row without a sample for the property test does not
//! compile.

mod attention;
mod casts;
mod dots;
mod numbers;
mod sums;
mod views;

use super::algebra::{self, EGraph, Facts};
#[cfg(test)]
use super::samples::{self, Draw};
use super::term::Term;
#[cfg(test)]
use astrai_ir::Graph;
use astrai_ir::ops::Cast;
use astrai_ir::{Op, Type};
use egg::{Id, Pattern, Searcher, Subst, Var};
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// What a rewrite rule may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RuleClass {
    /// Nothing: the same bits.
    Exact,
    /// The association of sums and products: their order of evaluation.
    Reassoc,
    /// Expressions of frozen weights, which are folded into derived weights and rounded once.
    WeightFold,
}

/// How far a program may deviate from the numerics of its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Fidelity {
    /// The same bits.
    #[default]
    Exact,
    /// Reassociation of sums and products.
    Standard,
    /// Reassociation, and weight folding.
    Fast,
}

impl Fidelity {
    /// True when rules of this class are applied.
    pub fn allows(self, class: RuleClass) -> bool {
        match class {
            RuleClass::Exact => true,
            RuleClass::Reassoc => self != Fidelity::Exact,
            RuleClass::WeightFold => self == Fidelity::Fast,
        }
    }
}

/// A rewrite rule.
pub struct Rule {
    /// Its name in reports.
    pub name: &'static str,
    /// What it may change.
    pub class: RuleClass,
    /// The left-hand sides. The first child is the attributes, unless the name determines the operator (`mul`). `?0..?2` stands
    /// for three patterns, that end in `?0`, in `?0 ?1` and in `?0 ?1 ?2`.
    pub patterns: &'static [&'static str],
    /// Adds the right-hand side; `None` where a guard fails.
    pub apply: fn(&mut Match) -> Option<Id>,
    /// A sample for the property test: a graph whose only output the rule rewrites.
    #[cfg(test)]
    pub sample: fn(&mut Draw) -> Graph,
}

macro_rules! rules {
    ($($name:literal $class:ident [$($pattern:expr),+ $(,)?] $apply:path, $sample:ident;)*) => {
        &[$(Rule {
            name: $name,
            class: RuleClass::$class,
            patterns: &[$($pattern),+],
            apply: $apply,
            #[cfg(test)]
            sample: samples::$sample,
        }),*]
    };
}

/// Every rewrite rule.
#[rustfmt::skip]
pub const RULES: &[Rule] = rules! {
    // casts: a narrowing cast is neither dropped nor moved
    "cast-of-cast"          Exact      ["(cast ?c (cast ?d ?x))"] casts::of_cast, cast_of_cast;
    "cast-into-view"        Exact      ["(cast ?c (reshape ?v ?x))", "(cast ?c (permute ?v ?x))", "(cast ?c (expand ?v ?x))"]
                                       casts::into_view, cast_of_view;
    "cast-of-widened-view"  Exact      ["(cast ?c (reshape ?v (cast ?d ?x)))"] casts::of_widened_view, cast_of_widened_view;
    "cast-out-of-slice"     Exact      ["(slice ?v (cast ?c ?x))"] casts::out_of_view, slice_of_cast;
    "cast-out-of-gather"    Exact      ["(gather ?v (cast ?c ?x) ?i)"] casts::out_of_gather, gather_of_cast;
    "cast-out-of-concat"    Exact      ["(concat ?v (cast ?c ?x) (cast ?d ?y))"] casts::out_of_concat, concat_of_casts;
    // views
    "slice-of-concat"       Exact      ["(slice ?s (concat ?c ?x ?y))"] views::slice_of_concat, slice_of_concat;
    "concat-of-slices"      Exact      ["(concat ?c (slice ?s ?x) (slice ?t ?x))"] views::concat_of_slices, concat_of_slices;
    "expand-out"            Exact      ["(add (expand ?v ?x) (expand ?w ?y))", "(sub (expand ?v ?x) (expand ?w ?y))",
                                        "(mul (expand ?v ?x) (expand ?w ?y))", "(div (expand ?v ?x) (expand ?w ?y))",
                                        "(add (reshape ?v ?x) (reshape ?w ?y))", "(sub (reshape ?v ?x) (reshape ?w ?y))",
                                        "(mul (reshape ?v ?x) (reshape ?w ?y))", "(div (reshape ?v ?x) (reshape ?w ?y))"]
                                       views::out_of_binary, sum_of_expands;
    "expand-out-of-unary"   Exact      ["(neg (expand ?v ?x))", "(exp (expand ?v ?x))", "(log (expand ?v ?x))", "(sqrt (expand ?v ?x))",
                                        "(rsqrt (expand ?v ?x))", "(sin (expand ?v ?x))", "(cos (expand ?v ?x))"]
                                       views::out_of_unary, cosine_of_expand;
    "permute-of-dot"        Exact      ["(permute ?p (dot ?d ?x ?w))"] dots::permuted, permute_of_dot;
    "dot-of-permute"        Exact      ["(dot ?d (permute ?p ?x) ?w)"] dots::of_permuted, dot_of_permute;
    "gather-of-dot"         Exact      ["(gather ?g (dot ?d ?w ?a) ?i)"] dots::gather_of_dot, gather_of_dot;
    "grouped-heads"         Exact      ["(attention ?a ?q (reshape ?r (expand ?e (reshape ?s ?k))) (reshape ?t (expand ?f (reshape ?u ?v))) ?0..?2)"]
                                       attention::grouped, repeated_heads;
    "pages-in-place"        Exact      ["(attention ?a ?q (reshape ?r (gather ?g (reshape ?s ?x) ?i)) (slice ?v (reshape ?r (gather ?g (reshape ?s ?x) ?i))) ?0 ?1 ?2)",
                                        "(attention ?a ?q (reshape ?r (cast ?c (gather ?g (reshape ?s ?x) ?i))) (slice ?v (reshape ?r (cast ?c (gather ?g (reshape ?s ?x) ?i)))) ?0 ?1 ?2)"]
                                       attention::pages_in_place, attention_over_gathered_pages;
    // numbers
    "negated-twice"         Exact      ["(neg (neg ?x))"] numbers::itself, negated_twice;
    "add-of-negated"        Exact      ["(add ?x (neg ?y))", "(add (neg ?y) ?x)"] numbers::difference, add_of_negated;
    "times-one"             Exact      ["(mul ?x ?c)", "(mul ?c ?x)", "(div ?x ?c)"] numbers::times_one, times_one;
    "times-minus-one"       Exact      ["(mul ?x ?c)", "(mul ?c ?x)"] numbers::times_minus_one, times_minus_one;
    "constant-chain"        Reassoc    ["(mul (mul ?x ?c) ?d)", "(mul (mul ?c ?x) ?d)", "(mul ?d (mul ?x ?c))", "(mul ?d (mul ?c ?x))"]
                                       numbers::chain, constant_chain;
    "divide-by-constant"    Reassoc    ["(div ?x ?c)"] numbers::reciprocal, divide_by_constant;
    // sums
    "extreme-of-expand"     Exact      ["(reduce ?r (expand ?e ?x))"] sums::extreme_of_expand, extreme_of_expand;
    "extreme-of-one"        Exact      ["(reduce ?r ?x)"] sums::extreme_of_one, extreme_of_one;
    "extreme-of-extremes"   Exact      ["(reduce ?r (reduce ?s ?x))"] sums::extreme_of_extremes, extreme_of_extremes;
    "sum-of-expand"         Reassoc    ["(reduce ?r (expand ?e ?x))"] sums::sum_of_expand, sum_of_expand;
    "sum-of-one"            Reassoc    ["(reduce ?r ?x)"] sums::sum_of_one, sum_of_one;
    "sum-of-sums"           Reassoc    ["(reduce ?r (reduce ?s ?x))"] sums::sum_of_sums, sum_of_sums;
    "sums-added"            Reassoc    ["(add (reduce ?r ?x) (reduce ?s ?y))"] sums::added, sums_added;
    "sum-of-scaled"         Reassoc    ["(reduce ?r (mul ?x (expand ?e ?c)))", "(reduce ?r (mul (expand ?e ?c) ?x))"]
                                       sums::of_scaled, sum_of_scaled;
    // dots
    "row-scale-out"         Reassoc    ["(dot ?d (mul ?x (expand ?e ?r)) ?w)", "(dot ?d (mul (expand ?e ?r) ?x) ?w)"]
                                       dots::row_scale_out, dot_of_scaled_rows;
    "row-scale-in"          Reassoc    ["(mul (dot ?d ?x ?w) (expand ?e ?r))", "(mul (expand ?e ?r) (dot ?d ?x ?w))"]
                                       dots::row_scale_in, scaled_rows_of_dot;
    "factor"                Reassoc    ["(dot ?d ?x (dot ?e ?a ?b))"] dots::factor, dot_of_product;
    "distribute"            Reassoc    ["(dot ?d ?x (add ?a ?b))"] dots::distribute, dot_of_sum;
    "scale-out-of-weight"   Reassoc    ["(dot ?d ?x (mul ?w ?s))", "(dot ?d ?x (mul ?s ?w))"] dots::scale_out, dot_of_scaled_weight;
    "scale-into-attention"  Reassoc    ["(attention ?a (mul ?q ?s) ?k ?v ?0..?3)"]
                                       attention::scaled_query, attention_of_scaled_query;
    "latent-attention"      Reassoc    ["(part ?p (attention ?a ?q (concat ?c (reshape ?r (dot ?d ?l ?wk)) (expand ?x ?kr)) (reshape ?t (dot ?e ?l ?wv)) ?0..?3))"]
                                       attention::latent, latent_attention;
    "joint-latent-attention" Reassoc   ["(part ?p (attention ?a ?q (concat ?c (slice ?u (reshape ?r (dot ?d ?l ?w))) (expand ?x ?kr)) (slice ?v (reshape ?r (dot ?d ?l ?w))) ?0..?3))",
                                        "(part ?p (attention ?a ?q (cast ?f (cast ?b (concat ?c (slice ?u (reshape ?r (cast ?f (cast ?b (dot ?d ?l ?w))))) (expand ?x ?kr)))) (slice ?v (reshape ?r (cast ?f (cast ?b (dot ?d ?l ?w))))) ?0..?3))"]
                                       attention::joint_latent, joint_latent_attention;
    "product-ahead"         WeightFold ["(dot ?e (dot ?d ?x ?a) ?b)"] dots::product_ahead, dot_of_dot;
    "sum-ahead"             WeightFold ["(add (dot ?d ?x ?a) (dot ?e ?x ?b))"] dots::sum_ahead, dots_added;
    "scale-into-weight"     WeightFold ["(dot ?d (mul ?x ?s) ?w)", "(dot ?d (mul ?s ?x) ?w)", "(mul (dot ?d ?x ?w) ?s)", "(mul ?s (dot ?d ?x ?w))"]
                                       dots::scale_into_weight, scaled_dot;
    "norm-into-dot"         WeightFold ["(dot ?d (rms_norm ?n ?x ?g) ?w)", "(dot ?d (cast ?c (cast ?b (rms_norm ?n ?x ?g))) ?w)"]
                                       dots::norm_into_dot, dot_of_norm;
    "biases-ahead"          WeightFold ["(add (add ?y (expand ?e ?a)) (expand ?f ?b))", "(add (add (expand ?e ?a) ?y) (expand ?f ?b))",
                                        "(add (expand ?f ?b) (add ?y (expand ?e ?a)))", "(add (expand ?f ?b) (add (expand ?e ?a) ?y))"]
                                       numbers::biases_ahead, biases_added;
    "product-of-table"      WeightFold ["(dot ?d (gather ?g ?w ?i) ?a)"] dots::product_of_table, dot_of_gather;
};

/// A match of a rule's pattern.
pub struct Match<'a> {
    /// The e-graph.
    pub g: &'a mut EGraph,
    /// Index of the rule's pattern that matched.
    pub pattern: usize,
    bound: &'a BTreeMap<Var, Id>,
    root: Id,
}

impl Match<'_> {
    /// The e-class bound to a variable.
    pub fn var(&self, name: &str) -> Option<Id> {
        let wanted = |v: &&Var| v.to_string().strip_prefix('?') == Some(name);
        self.bound.iter().find(|(v, _)| wanted(v)).map(|(_, id)| *id)
    }

    /// The operator whose attributes are bound to a variable.
    pub fn op(&self, name: &str) -> Option<Op> {
        let attr = self.g[self.var(name)?].data.attr?;
        Some(self.g.analysis.attr(attr).clone())
    }

    /// The analysis data of the e-class bound to a variable.
    pub fn facts(&self, name: &str) -> Option<&Facts> {
        Some(&self.g[self.var(name)?].data)
    }

    /// Type of the e-class bound to a variable.
    pub fn ty(&self, name: &str) -> Option<Type> {
        self.facts(name)?.types.first().cloned()
    }

    /// Type of the matched e-class.
    pub fn root_ty(&self) -> Option<Type> {
        self.g[self.root].data.types.first().cloned()
    }

    /// The trailing arguments, which patterns bind to ?0, ?1, ?2 and ?3.
    pub fn rest(&self) -> Vec<Id> {
        ["0", "1", "2", "3"].iter().map_while(|n| self.var(n)).collect()
    }

    /// The e-class of `op` on what these variables are bound to.
    pub fn make_of<const N: usize>(&mut self, op: impl Into<Op>, vars: [&str; N]) -> Option<Id> {
        let args = vars.iter().map(|name| self.var(name)).collect::<Option<Vec<Id>>>()?;
        self.make(op, &args)
    }

    /// The e-class of `op` on `args`.
    pub fn make(&mut self, op: impl Into<Op>, args: &[Id]) -> Option<Id> {
        algebra::make(self.g, op, args)
    }

    /// `x` everywhere.
    pub fn fill(&mut self, ty: &Type, x: f64) -> Option<Id> {
        algebra::fill(self.g, ty, x)
    }
}

/// The roundings of products: a narrowing cast, and the widening cast that follows it.
type Rounding = Option<[Cast; 2]>;

fn rounded(s: &mut Match, x: Id, rounding: &Rounding) -> Option<Id> {
    let Some([narrow, wide]) = rounding else { return Some(x) };
    let x = s.make(narrow.clone(), &[x])?;
    s.make(wide.clone(), &[x])
}

/// Most matches of a rule that are applied in one iteration: beyond this limit the rule multiplies forms instead of simplifying.
const MATCHES: usize = 1000;

fn patterns(rule: usize) -> &'static [Pattern<Term>] {
    static PATTERNS: OnceLock<Vec<Vec<Pattern<Term>>>> = OnceLock::new();
    let all = PATTERNS.get_or_init(|| {
        // A malformed pattern is an error in the table above, which every test of the pass finds.
        let read = |p: String| p.parse().unwrap_or_else(|e| panic!("`{p}` is no pattern: {e}"));
        RULES.iter().map(|r| r.patterns.iter().flat_map(|p| expanded(p)).map(read).collect()).collect()
    });
    &all[rule]
}

/// The patterns that one with `?0..?2` stands for.
fn expanded(pattern: &str) -> Vec<String> {
    let Some((head, tail)) = pattern.split_once(" ?0..?") else { return vec![pattern.to_string()] };
    let (last, tail) = tail.split_at(1);
    let rest = |n: usize| (0..=n).map(|i| format!(" ?{i}")).collect::<String>();
    let last = last.parse().unwrap_or_else(|e| panic!("`{pattern}` is no pattern: {e}"));
    (0..=last).map(|n| format!("{head}{}{tail}", rest(n))).collect()
}

/// Applies rule number `rule` to its matches while the e-graph has at most `terms` e-nodes; returns the number of new equalities.
pub fn apply(g: &mut EGraph, rule: usize, terms: usize) -> usize {
    let mut matches: Vec<(usize, Id, Subst)> = Vec::new();
    for (i, pattern) in patterns(rule).iter().enumerate() {
        for m in pattern.search_with_limit(g, MATCHES) {
            matches.extend(m.substs.into_iter().map(|s| (i, m.eclass, s)));
        }
    }
    let mut new = 0;
    for (i, root, subst) in matches.into_iter().take(MATCHES) {
        if g.total_size() > terms {
            break;
        }
        let vars = patterns(rule)[i].vars();
        let bound: BTreeMap<Var, Id> = vars.iter().map(|v| (*v, g.find(subst[*v]))).collect();
        if bound.values().any(|id| g[*id].data.pinned) {
            continue;
        }
        let root = g.find(root);
        g.analysis.here = g[root].data.origin.clone();
        let made = (RULES[rule].apply)(&mut Match { g, pattern: i, bound: &bound, root });
        let Some(made) = made else { continue };
        if g[made].data.types == g[root].data.types {
            new += g.union(root, made) as usize;
        } else {
            debug_assert!(false, "rule `{}` makes another type", RULES[rule].name);
        }
    }
    new
}

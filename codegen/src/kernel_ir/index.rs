//! Index arithmetic as linear forms. In: loop variables with known extents. Out: sums `coefficient * atom + offset` in
//! which divisions and remainders that views bring in are resolved whenever the extents prove them, so that the inner loops
//! of kernels have plain affine addresses.

use astrai_ir::Dim;
use std::rc::Rc;

/// A loop variable: counts `0 .. extent`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Var {
    /// Name in the kernel.
    pub name: Rc<str>,
    /// Number of values.
    pub extent: Dim,
    /// How deep the loop is nested; 0 is outside all loops.
    pub depth: usize,
}

/// What a linear form multiplies.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Atom {
    /// A loop variable.
    Var(Var),
    /// Quotient by a size, rounded down.
    Div(Rc<Index>, Dim),
    /// Remainder by a size.
    Mod(Rc<Index>, Dim),
    /// The form, held inside `0 .. size`.
    Clamp(Rc<Index>, Dim),
    /// An integer that the kernel computed: the name of a local, its depth, and the size it lies below.
    Local(Rc<str>, usize, Dim),
}

/// A linear form: `Σ coefficient · atom + offset`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Index {
    /// Products, sorted by atom.
    pub terms: Vec<(Dim, Atom)>,
    /// Constant part.
    pub offset: Dim,
}

impl Index {
    /// A number.
    pub fn constant(d: Dim) -> Index {
        Index { terms: vec![], offset: d }
    }

    /// An atom.
    pub fn atom(a: Atom) -> Index {
        Index { terms: vec![(Dim::from(1), a)], offset: Dim::from(0) }
    }

    /// A loop variable; a loop of one iteration has only the value 0.
    pub fn var(v: &Var) -> Index {
        if v.extent.is_one() { Index::default() } else { Index::atom(Atom::Var(v.clone())) }
    }

    /// Sum.
    pub fn add(&self, o: &Index) -> Index {
        let mut terms = self.terms.clone();
        for (c, a) in &o.terms {
            match terms.iter_mut().find(|(_, b)| a == b) {
                Some((d, _)) => *d = &*d + c,
                None => terms.push((c.clone(), a.clone())),
            }
        }
        terms.retain(|(c, _)| c.literal() != Some(0));
        terms.sort_by(|x, y| x.1.cmp(&y.1));
        Index { terms, offset: &self.offset + &o.offset }.joined()
    }

    /// `c·d·(i / d) + c·(i % d)` is `c·i`: what a split axis is when it is one axis again.
    fn joined(mut self) -> Index {
        let rest_of = |c: &Dim, a: &Atom| match a {
            Atom::Div(i, d) => {
                let part = Atom::Mod(i.clone(), d.clone());
                self.terms.iter().position(|(of, b)| *b == part && of * d == *c)
            }
            _ => None,
        };
        let found = self.terms.iter().enumerate().find_map(|(at, (c, a))| Some((at, rest_of(c, a)?)));
        let Some((quotient, rest)) = found else { return self };
        let (c, atom) = self.terms[rest].clone();
        let Atom::Mod(i, _) = atom else { return self };
        let mut at = 0;
        self.terms.retain(|_| (at != quotient && at != rest, at += 1).0);
        self.add(&i.times(&c))
    }

    /// Sum with a size.
    pub fn plus(&self, d: &Dim) -> Index {
        Index { terms: self.terms.clone(), offset: &self.offset + d }
    }

    /// Product with a size.
    pub fn times(&self, d: &Dim) -> Index {
        if d.literal() == Some(0) {
            return Index::default();
        }
        Index {
            terms: self.terms.iter().map(|(c, a)| (c * d, a.clone())).collect(),
            offset: &self.offset * d,
        }
    }

    /// Largest value that the extents allow.
    fn upper(&self) -> Dim {
        self.terms.iter().fold(self.offset.clone(), |m, (c, a)| &m + &(c * &a.upper()))
    }

    /// (smallest, largest) value, where both are literal.
    pub fn range(&self) -> Option<(i64, i64)> {
        Some((self.offset.literal()?, self.upper().literal()?))
    }

    /// True when every value is provably below `d`.
    fn below(&self, d: &Dim) -> bool {
        (d - &self.upper()).literal().is_some_and(|v| v > 0)
    }

    /// (part that `d` divides, the rest).
    fn split(&self, d: &Dim) -> (Index, Index) {
        let (mut whole, mut rest) = (Index::default(), Index::default());
        for (c, a) in &self.terms {
            match c.div_exact(d) {
                Some(q) => whole.terms.push((q, a.clone())),
                None => rest.terms.push((c.clone(), a.clone())),
            }
        }
        match (self.offset.div_exact(d), self.offset.size(), d.size()) {
            (Some(q), _, _) => whole.offset = q,
            (None, Some(o), Some(n)) if n > 0 => {
                whole.offset = Dim::from(o / n);
                rest.offset = Dim::from(o % n);
            }
            _ => rest.offset = self.offset.clone(),
        }
        (whole, rest)
    }

    /// Quotient by a size, rounded down.
    pub fn div(&self, d: &Dim) -> Index {
        if d.is_one() {
            return self.clone();
        }
        let (whole, rest) = self.split(d);
        if rest.below(d) {
            return whole;
        }
        whole.add(&Index::atom(Atom::Div(Rc::new(rest), d.clone())))
    }

    /// Remainder by a size.
    pub fn rem(&self, d: &Dim) -> Index {
        if d.is_one() {
            return Index::default();
        }
        let (_, rest) = self.split(d);
        if rest.below(d) { rest } else { Index::atom(Atom::Mod(Rc::new(rest), d.clone())) }
    }

    /// The value held inside `0 .. size`; the form itself when it cannot leave.
    pub fn hold(&self, size: &Dim) -> Index {
        let never_negative = self.offset.literal().is_some_and(|o| o >= 0);
        if never_negative && self.below(size) {
            return self.clone();
        }
        Index::atom(Atom::Clamp(Rc::new(self.clone()), size.clone()))
    }

    /// Depth of the innermost loop that the value depends on.
    pub fn depth(&self) -> usize {
        self.terms.iter().map(|(_, a)| a.depth()).max().unwrap_or(0)
    }

    /// Row-major position of an index of a tensor of this shape.
    pub fn linear(at: &[Index], shape: &[Dim]) -> Index {
        at.iter().zip(shape).fold(Index::default(), |acc, (i, n)| acc.times(n).add(i))
    }

    /// The index whose row-major position this is.
    pub fn unravel(&self, shape: &[Dim]) -> Vec<Index> {
        let mut at = vec![Index::default(); shape.len()];
        let mut rest = self.clone();
        for d in (0..shape.len()).rev() {
            if d == 0 {
                at[0] = rest;
                break;
            }
            at[d] = rest.rem(&shape[d]);
            rest = rest.div(&shape[d]);
        }
        at
    }

    /// Coefficient of a loop variable when the form is linear in it.
    pub fn coefficient(&self, v: &Var) -> Option<Dim> {
        let mut found = Dim::from(0);
        for (c, a) in &self.terms {
            match a {
                Atom::Var(x) if x == v => found = c.clone(),
                Atom::Var(_) => {}
                other if other.mentions(v) => return None,
                _ => {}
            }
        }
        Some(found)
    }

    /// Where a form that runs over neighbours as this loop variable counts begins.
    pub fn without(&self, v: &Var) -> Option<Index> {
        let own = |a: &Atom| matches!(a, Atom::Var(x) if x == v);
        let terms = self.terms.iter().filter(|(_, a)| !own(a)).cloned().collect();
        self.coefficient(v)?.is_one().then(|| Index { terms, offset: self.offset.clone() })
    }

    fn mentions(&self, v: &Var) -> bool {
        self.terms.iter().any(|(_, a)| a.mentions(v))
    }
}

impl Atom {
    fn upper(&self) -> Dim {
        let one = Dim::from(1);
        match self {
            Atom::Var(v) => &v.extent - &one,
            Atom::Mod(_, d) | Atom::Clamp(_, d) | Atom::Local(_, _, d) => d - &one,
            // Rounded down: the quotient of the largest value is an upper bound where it is exact or literal.
            Atom::Div(i, d) => {
                let top = i.upper();
                match (top.literal(), d.literal()) {
                    (Some(t), Some(d)) if d > 0 => Dim::from((t.max(0) / d) as usize),
                    _ => top.div_exact(d).unwrap_or(top),
                }
            }
        }
    }

    fn depth(&self) -> usize {
        match self {
            Atom::Var(v) => v.depth,
            Atom::Div(i, _) | Atom::Mod(i, _) | Atom::Clamp(i, _) => i.depth(),
            Atom::Local(_, depth, _) => *depth,
        }
    }

    fn mentions(&self, v: &Var) -> bool {
        match self {
            Atom::Var(x) => x == v,
            Atom::Div(i, _) | Atom::Mod(i, _) | Atom::Clamp(i, _) => i.mentions(v),
            Atom::Local(..) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn var(name: &str, extent: usize) -> Var {
        Var { name: name.into(), extent: Dim::from(extent), depth: 1 }
    }

    #[test]
    fn heads_of_a_joined_row_need_no_division() {
        let t = Var { name: "t".into(), extent: Dim::symbol("tokens"), depth: 1 };
        let (h, j) = (var("h", 4), var("j", 16));
        let shape = [Dim::symbol("tokens"), Dim::from(4), Dim::from(16)];
        let at = [Index::var(&t), Index::var(&h), Index::var(&j)];
        let flat = Index::linear(&at, &shape).unravel(&[Dim::symbol("tokens"), Dim::from(64)]);
        assert_eq!(flat[0], Index::var(&t));
        assert_eq!(flat[1].coefficient(&h), Some(Dim::from(16)));
        assert_eq!(flat[1].coefficient(&j), Some(Dim::from(1)));
        assert_eq!(flat[1].without(&j), Some(Index::var(&h).times(&Dim::from(16))));
        assert_eq!(flat[1].without(&h), None);
    }

    #[test]
    fn an_axis_split_and_joined_is_itself() {
        let i = Index::var(&var("i", 576));
        let heads = [Dim::from(9), Dim::from(64)];
        assert_eq!(Index::linear(&i.unravel(&heads), &heads), i);
        let t = Index::atom(Atom::Var(Var { name: "t".into(), extent: Dim::symbol("tokens"), depth: 1 }));
        let shape = [Dim::symbol("tokens"), Dim::from(9), Dim::from(64)];
        let flat = Index::linear(&[t, i], &[Dim::symbol("tokens"), Dim::from(576)]);
        assert_eq!(Index::linear(&flat.unravel(&shape), &shape), flat);
    }

    #[test]
    fn what_cannot_be_proved_stays_a_division() {
        let x = Index::var(&var("x", 100));
        assert!(matches!(x.div(&Dim::from(16)).terms[0].1, Atom::Div(..)));
        assert!(matches!(x.rem(&Dim::from(16)).terms[0].1, Atom::Mod(..)));
        assert_eq!(x.rem(&Dim::from(100)), x);
        assert_eq!(
            x.times(&Dim::from(2)).plus(&Dim::from(1)).rem(&Dim::from(2)),
            Index::constant(Dim::from(1))
        );
    }
}

//! Symbolic sizes. In: literals and named symbols (`tokens`, `sequences`). Out: sums of products in one normal form, so
//! that two sizes are equal exactly when their forms are; what cannot be proved equal is an error for the caller. Launch
//! geometry and workspaces also need ceiling division, minimum and maximum: each is one more factor of a product.

use std::cmp::Ordering;
use std::fmt;
use std::ops::{Add, Mul, Sub};
use std::sync::Arc;

/// A named size with bounds; the planner evaluates it at `max`, kernels take its value at run time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Symbol {
    /// Name as it appears in shapes.
    pub name: Arc<str>,
    /// Smallest value allowed.
    pub min: u64,
    /// Largest value allowed.
    pub max: u64,
    /// Every value is a multiple of this.
    pub multiple_of: u64,
}

/// What a product multiplies.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Factor {
    /// A symbol's value.
    Symbol(Arc<str>),
    /// The first size divided by the second, rounded up; 0 where the second is 0.
    CeilDiv(Arc<[Dim; 2]>),
    /// The smaller of two sizes.
    Min(Arc<[Dim; 2]>),
    /// The greater of two sizes.
    Max(Arc<[Dim; 2]>),
}

/// One product: a coefficient and the factors multiplied, sorted.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Term {
    factors: Vec<Factor>,
    coef: i64,
}

/// A size: a sum of products of symbols, in normal form.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Dim {
    terms: Vec<Term>,
}

/// The sizes of a tensor, outermost first.
pub type Shape = Vec<Dim>;

impl Dim {
    /// The size of the named symbol.
    pub fn symbol(name: &str) -> Dim {
        Dim { terms: vec![Term { factors: vec![Factor::Symbol(name.into())], coef: 1 }] }
    }

    /// The literal value, when no symbol occurs.
    pub fn literal(&self) -> Option<i64> {
        match self.terms.as_slice() {
            [] => Some(0),
            [t] if t.factors.is_empty() => Some(t.coef),
            _ => None,
        }
    }

    /// The literal as a size; `None` for symbolic or negative ones.
    pub fn size(&self) -> Option<usize> {
        self.literal().and_then(|v| usize::try_from(v).ok())
    }

    /// True for the literal 1.
    pub fn is_one(&self) -> bool {
        self.literal() == Some(1)
    }

    /// Value under `lookup`; `Err` names the symbol without a value, or says that the size overflows or is negative.
    pub fn eval(&self, lookup: &dyn Fn(&str) -> Option<u64>) -> Result<u64, String> {
        let sum = self.value(lookup)?;
        u64::try_from(sum).map_err(|_| format!("size {self} is {sum}, outside what a tensor can have"))
    }

    fn value(&self, lookup: &dyn Fn(&str) -> Option<u64>) -> Result<i128, String> {
        let overflows = || format!("size {self} overflows");
        let mut sum: i128 = 0;
        for t in &self.terms {
            let mut p = t.coef as i128;
            for f in &t.factors {
                p = p.checked_mul(f.value(lookup)?).ok_or_else(overflows)?;
            }
            sum = sum.checked_add(p).ok_or_else(overflows)?;
        }
        Ok(sum)
    }

    /// Symbols that occur, each once, sorted by name.
    pub fn symbols(&self) -> Vec<Arc<str>> {
        let mut all: Vec<_> = self.terms.iter().flat_map(|t| &t.factors).flat_map(Factor::symbols).collect();
        all.sort();
        all.dedup();
        all
    }

    /// `self / by`, rounded up.
    pub fn ceil_div(&self, by: &Dim) -> Dim {
        match (self.literal(), by.literal(), self.div_exact(by)) {
            (_, _, Some(exact)) => exact,
            (Some(n), Some(d), _) if n >= 0 && d > 0 => Dim::from((n as usize).div_ceil(d as usize)),
            _ => Dim::of(Factor::CeilDiv, self, by),
        }
    }

    /// `self` rounded up to a multiple of `of`.
    pub fn next_multiple_of(&self, of: usize) -> Dim {
        &self.ceil_div(&Dim::from(of)) * &Dim::from(of)
    }

    /// The smaller of the two.
    pub fn at_most(&self, other: &Dim) -> Dim {
        self.extreme(other, Ordering::Less, Factor::Min)
    }

    /// The greater of the two.
    pub fn at_least(&self, other: &Dim) -> Dim {
        self.extreme(other, Ordering::Greater, Factor::Max)
    }

    fn extreme(&self, other: &Dim, wanted: Ordering, factor: fn(Arc<[Dim; 2]>) -> Factor) -> Dim {
        match (self.literal(), other.literal()) {
            _ if self == other => self.clone(),
            (Some(a), Some(b)) if a.cmp(&b) == wanted => self.clone(),
            (Some(_), Some(_)) => other.clone(),
            _ => Dim::of(factor, self, other),
        }
    }

    fn of(factor: fn(Arc<[Dim; 2]>) -> Factor, a: &Dim, b: &Dim) -> Dim {
        let factors = vec![factor(Arc::new([a.clone(), b.clone()]))];
        Dim { terms: vec![Term { factors, coef: 1 }] }
    }

    /// `self / by` when that is exact for every value of the symbols; `by` must be a single product.
    pub fn div_exact(&self, by: &Dim) -> Option<Dim> {
        let [d] = by.terms.as_slice() else { return None };
        let mut terms = Vec::with_capacity(self.terms.len());
        for t in &self.terms {
            if t.coef.checked_rem(d.coef)? != 0 {
                return None;
            }
            let mut factors = t.factors.clone();
            for f in &d.factors {
                let at = factors.iter().position(|x| x == f)?;
                factors.remove(at);
            }
            terms.push(Term { factors, coef: t.coef / d.coef });
        }
        Some(Dim::normal(terms))
    }

    /// Product of many sizes; 1 for none.
    pub fn product<'a>(dims: impl IntoIterator<Item = &'a Dim>) -> Dim {
        dims.into_iter().fold(Dim::from(1), |a, b| &a * b)
    }

    /// The products as (coefficient, factors), in normal order.
    pub fn products(&self) -> impl Iterator<Item = (i64, &[Factor])> {
        self.terms.iter().map(|t| (t.coef, t.factors.as_slice()))
    }

    /// Reads what `Display` writes: `"2*tokens*hidden + 1"`, `"ceil(tokens, 32)*min(heads, 8)"`.
    pub fn parse(text: &str) -> Result<Dim, String> {
        let bad = || format!("`{text}` is not a size; write sums of products such as 2*tokens + 1");
        let plain: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let mut parser = Parser { rest: &plain, deep: 0 };
        parser.sum().filter(|_| parser.rest.is_empty()).ok_or_else(bad)
    }

    fn normal(mut terms: Vec<Term>) -> Dim {
        terms.sort();
        let mut out: Vec<Term> = Vec::with_capacity(terms.len());
        for t in terms {
            match out.last_mut() {
                Some(last) if last.factors == t.factors => last.coef = last.coef.saturating_add(t.coef),
                _ => out.push(t),
            }
        }
        out.retain(|t| t.coef != 0);
        Dim { terms: out }
    }
}

impl Factor {
    fn value(&self, lookup: &dyn Fn(&str) -> Option<u64>) -> Result<i128, String> {
        let both = |pair: &[Dim; 2]| Ok::<_, String>((pair[0].value(lookup)?, pair[1].value(lookup)?));
        Ok(match self {
            Factor::Symbol(s) => lookup(s).ok_or_else(|| format!("symbol `{s}` has no value"))?.into(),
            Factor::CeilDiv(pair) => match both(pair)? {
                (_, 0) => 0,
                (a, b) => a.div_euclid(b) + i128::from(a.rem_euclid(b) != 0),
            },
            Factor::Min(pair) => both(pair).map(|(a, b)| a.min(b))?,
            Factor::Max(pair) => both(pair).map(|(a, b)| a.max(b))?,
        })
    }

    fn symbols(&self) -> Vec<Arc<str>> {
        match self {
            Factor::Symbol(s) => vec![s.clone()],
            Factor::CeilDiv(pair) | Factor::Min(pair) | Factor::Max(pair) => {
                pair.iter().flat_map(Dim::symbols).collect()
            }
        }
    }
}

impl fmt::Display for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Factor::Symbol(s) => f.write_str(s),
            Factor::CeilDiv(pair) => write!(f, "ceil({}, {})", pair[0], pair[1]),
            Factor::Min(pair) => write!(f, "min({}, {})", pair[0], pair[1]),
            Factor::Max(pair) => write!(f, "max({}, {})", pair[0], pair[1]),
        }
    }
}

/// Functions within functions that a text may have.
const DEEPEST: usize = 16;

/// Reads a size from text without spaces; what is no size is `None`.
struct Parser<'a> {
    rest: &'a str,
    deep: usize,
}

impl Parser<'_> {
    fn take(&mut self, c: char) -> bool {
        let rest = self.rest.strip_prefix(c);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn sum(&mut self) -> Option<Dim> {
        let negative = self.take('-');
        let mut terms = vec![self.product(negative)?];
        while let Some(sign @ ('+' | '-')) = self.rest.chars().next() {
            self.rest = &self.rest[1..];
            terms.push(self.product(sign == '-')?);
        }
        Some(Dim::normal(terms))
    }

    fn product(&mut self, negative: bool) -> Option<Term> {
        let mut term = Term { factors: vec![], coef: if negative { -1 } else { 1 } };
        loop {
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let end = self.rest.find(|c| !word(c)).unwrap_or(self.rest.len());
            let (name, rest) = self.rest.split_at(end);
            self.rest = rest;
            match name.bytes().next()? {
                b'0'..=b'9' => term.coef = term.coef.checked_mul(name.parse().ok()?)?,
                _ if self.take('(') => term.factors.push(self.function(name)?),
                _ => term.factors.push(Factor::Symbol(name.into())),
            }
            if !self.take('*') {
                term.factors.sort();
                return Some(term);
            }
        }
    }

    /// A function's arguments and its closing parenthesis.
    fn function(&mut self, name: &str) -> Option<Factor> {
        self.deep += 1;
        let a = (self.deep < DEEPEST).then(|| self.sum())??;
        let b = if self.take(',') { self.sum()? } else { return None };
        self.deep -= 1;
        let pair = Arc::new([a, b]);
        let factor = match name {
            "ceil" => Factor::CeilDiv(pair),
            "min" => Factor::Min(pair),
            "max" => Factor::Max(pair),
            _ => return None,
        };
        self.take(')').then_some(factor)
    }
}

impl From<usize> for Dim {
    fn from(n: usize) -> Dim {
        let coef = i64::try_from(n).unwrap_or(i64::MAX);
        Dim { terms: if n == 0 { vec![] } else { vec![Term { factors: vec![], coef }] } }
    }
}

impl Add for &Dim {
    type Output = Dim;
    fn add(self, o: &Dim) -> Dim {
        Dim::normal(self.terms.iter().chain(&o.terms).cloned().collect())
    }
}

impl Sub for &Dim {
    type Output = Dim;
    fn sub(self, o: &Dim) -> Dim {
        let minus =
            o.terms.iter().map(|t| Term { factors: t.factors.clone(), coef: t.coef.saturating_neg() });
        Dim::normal(self.terms.iter().cloned().chain(minus).collect())
    }
}

impl Mul for &Dim {
    type Output = Dim;
    fn mul(self, o: &Dim) -> Dim {
        let mut terms = Vec::with_capacity(self.terms.len() * o.terms.len());
        for a in &self.terms {
            for b in &o.terms {
                let mut factors = [a.factors.as_slice(), b.factors.as_slice()].concat();
                factors.sort();
                terms.push(Term { factors, coef: a.coef.saturating_mul(b.coef) });
            }
        }
        Dim::normal(terms)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.terms.is_empty() {
            return f.write_str("0");
        }
        // Symbols first, the constant last: `2*tokens + 1`.
        let (plain, named): (Vec<_>, Vec<_>) = self.terms.iter().partition(|t| t.factors.is_empty());
        for (i, t) in named.into_iter().chain(plain).enumerate() {
            let sign = match (i, t.coef < 0) {
                (0, false) => "",
                (0, true) => "-",
                (_, false) => " + ",
                (_, true) => " - ",
            };
            f.write_str(sign)?;
            let c = t.coef.unsigned_abs();
            if t.factors.is_empty() {
                write!(f, "{c}")?;
            } else {
                if c != 1 {
                    write!(f, "{c}*")?;
                }
                let factors: Vec<String> = t.factors.iter().map(Factor::to_string).collect();
                f.write_str(&factors.join("*"))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_form_decides_equality() {
        let (t, two) = (Dim::symbol("tokens"), Dim::from(2));
        assert_eq!(&(&t * &two) + &t, &Dim::from(3) * &t);
        assert_eq!(&t - &t, Dim::from(0));
        assert_eq!((&(&t * &Dim::from(6)) + &Dim::from(4)).to_string(), "6*tokens + 4");
        assert_eq!((&t * &Dim::from(6)).div_exact(&two), Some(&t * &Dim::from(3)));
        assert_eq!((&t + &Dim::from(1)).div_exact(&two), None);
    }

    #[test]
    fn parse_reads_what_display_writes() {
        for s in [
            "0",
            "7",
            "tokens",
            "2*tokens*hidden",
            "tokens + 1",
            "-3*a + b - 2",
            "sequences - 1",
            "4*ceil(tokens + 1, 32)*min(a, 8) - max(a, ceil(b, 2))",
        ] {
            let d = Dim::parse(s).unwrap();
            assert_eq!(Dim::parse(&d.to_string()).unwrap(), d, "{s}");
        }
        for s in [
            "",
            "+",
            "2**3",
            "a b*",
            "1.5",
            "9999999999999999999999",
            "a++b",
            "tökens",
            "ceil(a)",
            "ceil(a, 2",
            "sin(a, 2)",
            "2a",
        ] {
            assert!(Dim::parse(s).is_err(), "{s}");
        }
    }

    #[test]
    fn ceilings_and_bounds_are_values() {
        let look = |s: &str| (s == "t").then_some(70u64);
        let t = Dim::symbol("t");
        let at = |d: Dim| d.eval(&look).unwrap();
        assert_eq!(at(t.ceil_div(&Dim::from(32))), 3);
        assert_eq!(at(t.next_multiple_of(32)), 96);
        assert_eq!((at(t.at_most(&Dim::from(8))), at(t.at_least(&Dim::from(8)))), (8, 70));
        assert_eq!((&t * &Dim::from(64)).ceil_div(&Dim::from(32)), &t * &Dim::from(2));
        assert_eq!(Dim::from(33).ceil_div(&Dim::from(32)).literal(), Some(2));
        assert_eq!(t.ceil_div(&Dim::from(32)).symbols().len(), 1);
    }

    #[test]
    fn eval_refuses_what_is_no_size() {
        let look = |s: &str| (s == "t").then_some(3u64);
        assert_eq!(Dim::parse("2*t + 1").unwrap().eval(&look), Ok(7));
        assert!(Dim::parse("t - 4").unwrap().eval(&look).unwrap_err().contains("-1"));
        assert!(Dim::symbol("u").eval(&look).unwrap_err().contains("`u`"));
    }
}

//! Symbolic sizes. In: literals and named symbols (`tokens`, `sequences`). Out: sums of products in one normal form, so
//! that two sizes are equal exactly when their forms are; what cannot be proved equal is an error for the caller.

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

/// One product: a coefficient and the symbols multiplied, sorted by name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Term {
    symbols: Vec<Arc<str>>,
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
        Dim { terms: vec![Term { symbols: vec![name.into()], coef: 1 }] }
    }

    /// The literal value, when no symbol occurs.
    pub fn literal(&self) -> Option<i64> {
        match self.terms.as_slice() {
            [] => Some(0),
            [t] if t.symbols.is_empty() => Some(t.coef),
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
        let mut sum: i128 = 0;
        for t in &self.terms {
            let mut p = t.coef as i128;
            for s in &t.symbols {
                let v = lookup(s).ok_or_else(|| format!("symbol `{s}` has no value"))?;
                p = p.checked_mul(v as i128).ok_or_else(|| format!("size {self} overflows"))?;
            }
            sum = sum.checked_add(p).ok_or_else(|| format!("size {self} overflows"))?;
        }
        u64::try_from(sum).map_err(|_| format!("size {self} is {sum}, outside what a tensor can have"))
    }

    /// Symbols that occur, each once, sorted by name.
    pub fn symbols(&self) -> Vec<Arc<str>> {
        let mut all: Vec<_> = self.terms.iter().flat_map(|t| t.symbols.iter().cloned()).collect();
        all.sort();
        all.dedup();
        all
    }

    /// `self / by` when that is exact for every value of the symbols; `by` must be a single product.
    pub fn div_exact(&self, by: &Dim) -> Option<Dim> {
        let [d] = by.terms.as_slice() else { return None };
        let mut terms = Vec::with_capacity(self.terms.len());
        for t in &self.terms {
            if t.coef.checked_rem(d.coef)? != 0 {
                return None;
            }
            let mut symbols = t.symbols.clone();
            for s in &d.symbols {
                let at = symbols.iter().position(|x| x == s)?;
                symbols.remove(at);
            }
            terms.push(Term { symbols, coef: t.coef / d.coef });
        }
        Some(Dim::normal(terms))
    }

    /// Product of many sizes; 1 for none.
    pub fn product<'a>(dims: impl IntoIterator<Item = &'a Dim>) -> Dim {
        dims.into_iter().fold(Dim::from(1), |a, b| &a * b)
    }

    /// The products as (coefficient, symbols), in normal order.
    pub fn products(&self) -> impl Iterator<Item = (i64, &[Arc<str>])> {
        self.terms.iter().map(|t| (t.coef, t.symbols.as_slice()))
    }

    /// Reads what `Display` writes: `"2*tokens*hidden + 1"`.
    pub fn parse(text: &str) -> Result<Dim, String> {
        let bad = || format!("`{text}` is not a size; write sums of products such as 2*tokens + 1");
        let mut terms = Vec::new();
        for (i, part) in text.replace('-', "+-").split('+').enumerate() {
            let part: String = part.chars().filter(|c| !c.is_whitespace()).collect();
            if part.is_empty() && i == 0 && text.trim_start().starts_with('-') {
                continue;
            }
            let (neg, part) = match part.strip_prefix('-') {
                Some(rest) => (true, rest),
                None => (false, part.as_str()),
            };
            let mut term = Term { symbols: Vec::new(), coef: if neg { -1 } else { 1 } };
            for f in part.split('*') {
                if let Ok(v) = f.parse::<i64>() {
                    term.coef = term.coef.checked_mul(v).ok_or_else(bad)?;
                } else if is_name(f) {
                    term.symbols.push(f.into());
                } else {
                    return Err(bad());
                }
            }
            term.symbols.sort();
            terms.push(term);
        }
        Ok(Dim::normal(terms))
    }

    fn normal(mut terms: Vec<Term>) -> Dim {
        terms.sort();
        let mut out: Vec<Term> = Vec::with_capacity(terms.len());
        for t in terms {
            match out.last_mut() {
                Some(last) if last.symbols == t.symbols => last.coef = last.coef.saturating_add(t.coef),
                _ => out.push(t),
            }
        }
        out.retain(|t| t.coef != 0);
        Dim { terms: out }
    }
}

fn is_name(s: &str) -> bool {
    let mut c = s.chars();
    c.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && c.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

impl From<usize> for Dim {
    fn from(n: usize) -> Dim {
        let coef = i64::try_from(n).unwrap_or(i64::MAX);
        Dim { terms: if n == 0 { vec![] } else { vec![Term { symbols: vec![], coef }] } }
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
            o.terms.iter().map(|t| Term { symbols: t.symbols.clone(), coef: t.coef.saturating_neg() });
        Dim::normal(self.terms.iter().cloned().chain(minus).collect())
    }
}

impl Mul for &Dim {
    type Output = Dim;
    fn mul(self, o: &Dim) -> Dim {
        let mut terms = Vec::with_capacity(self.terms.len() * o.terms.len());
        for a in &self.terms {
            for b in &o.terms {
                let mut symbols = [a.symbols.as_slice(), b.symbols.as_slice()].concat();
                symbols.sort();
                terms.push(Term { symbols, coef: a.coef.saturating_mul(b.coef) });
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
        let (plain, named): (Vec<_>, Vec<_>) = self.terms.iter().partition(|t| t.symbols.is_empty());
        for (i, t) in named.into_iter().chain(plain).enumerate() {
            let sign = match (i, t.coef < 0) {
                (0, false) => "",
                (0, true) => "-",
                (_, false) => " + ",
                (_, true) => " - ",
            };
            f.write_str(sign)?;
            let c = t.coef.unsigned_abs();
            if t.symbols.is_empty() {
                write!(f, "{c}")?;
            } else {
                if c != 1 {
                    write!(f, "{c}*")?;
                }
                f.write_str(&t.symbols.join("*"))?;
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
        for s in ["0", "7", "tokens", "2*tokens*hidden", "tokens + 1", "-3*a + b - 2", "sequences - 1"] {
            let d = Dim::parse(s).unwrap();
            assert_eq!(Dim::parse(&d.to_string()).unwrap(), d, "{s}");
        }
        for s in ["", "+", "2**3", "a b*", "1.5", "9999999999999999999999", "a++b", "tökens"] {
            assert!(Dim::parse(s).is_err(), "{s}");
        }
    }

    #[test]
    fn eval_refuses_what_is_no_size() {
        let look = |s: &str| (s == "t").then_some(3u64);
        assert_eq!(Dim::parse("2*t + 1").unwrap().eval(&look), Ok(7));
        assert!(Dim::parse("t - 4").unwrap().eval(&look).unwrap_err().contains("-1"));
        assert!(Dim::symbol("u").eval(&look).unwrap_err().contains("`u`"));
    }
}

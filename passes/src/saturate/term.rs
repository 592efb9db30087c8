//! The e-node language. In: operators of a graph. Out: terms (e-nodes), whose children are e-classes. All attributes of an operator
//! are one interned child, so that two terms are equal only when all their attributes are.

use astrai_ir::NodeId;
use astrai_ir::ops::{Binary, BinaryKind, Op, Unary, UnaryKind};
use egg::{FromOp, Id, Language};

/// Name of an operator in patterns: the operator's own, for functions of numbers the function's (`mul`, `neg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub &'static str);

/// Position of an operator with its attributes in the table of the e-graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttrId(pub u32);

/// A node of the e-graph.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Term {
    /// An operator on its attributes (unless the tag says everything) and its arguments.
    Op(Tag, Box<[Id]>),
    /// Attributes.
    Attr(AttrId),
    /// A node without arguments of the graph: input, weight, state, random numbers.
    Leaf(NodeId),
}

/// Pointwise functions, whose tag determines the operator without attributes.
const BINARY: [(&str, BinaryKind); 9] = {
    use BinaryKind::*;
    [
        ("add", Add),
        ("sub", Sub),
        ("mul", Mul),
        ("div", Div),
        ("maximum", Max),
        ("minimum", Min),
        ("pow", Pow),
        ("and", And),
        ("or", Or),
    ]
};
const UNARY: [(&str, UnaryKind); 13] = {
    use UnaryKind::*;
    [
        ("neg", Neg),
        ("abs", Abs),
        ("exp", Exp),
        ("log", Log),
        ("sqrt", Sqrt),
        ("rsqrt", Rsqrt),
        ("sin", Sin),
        ("cos", Cos),
        ("tanh", Tanh),
        ("erf", Erf),
        ("sigmoid", Sigmoid),
        ("floor", Floor),
        ("not", Not),
    ]
};

impl Tag {
    /// The tag of an operator.
    pub fn of(op: &Op) -> Tag {
        let name = match op {
            Op::Binary(b) => BINARY.iter().find(|(_, k)| *k == b.kind).map(|(n, _)| *n),
            Op::Unary(u) => UNARY.iter().find(|(_, k)| *k == u.kind).map(|(n, _)| *n),
            _ => None,
        };
        Tag(name.unwrap_or(op.name()))
    }

    /// The operator, when the tag says everything.
    pub fn op(self) -> Option<Op> {
        let binary = BINARY.iter().find(|(n, _)| *n == self.0).map(|(_, kind)| Binary { kind: *kind }.into());
        binary.or_else(|| {
            UNARY.iter().find(|(n, _)| *n == self.0).map(|(_, kind)| Unary { kind: *kind }.into())
        })
    }
}

impl Language for Term {
    /// Tag and number of children: terms that agree in it may match.
    type Discriminant = (Option<Tag>, u64);

    fn discriminant(&self) -> Self::Discriminant {
        match self {
            Term::Op(tag, children) => (Some(*tag), children.len() as u64),
            Term::Attr(a) => (None, a.0 as u64 * 2),
            Term::Leaf(id) => (None, id.0 as u64 * 2 + 1),
        }
    }

    fn matches(&self, other: &Self) -> bool {
        self.discriminant() == other.discriminant()
    }

    fn children(&self) -> &[Id] {
        if let Term::Op(_, children) = self { children } else { &[] }
    }

    fn children_mut(&mut self) -> &mut [Id] {
        if let Term::Op(_, children) = self { children } else { &mut [] }
    }
}

impl FromOp for Term {
    type Error = String;

    /// Reads a pattern's node.
    fn from_op(name: &str, children: Vec<Id>) -> Result<Term, String> {
        let functions = BINARY.iter().map(|(n, _)| n).chain(UNARY.iter().map(|(n, _)| n));
        let tag = Op::NAMES.iter().chain(functions).find(|n| **n == name);
        let tag = tag.ok_or_else(|| format!("`{name}` is no operator"))?;
        Ok(Term::Op(Tag(tag), children.into()))
    }
}

//! The C-like printer. In: kernel statements. Out: source text of either dialect: C, whose parallel loops are vector loops and
//! whose reductions run in sixteen fixed lanes; C++ of blocks, whose parallel loops and reductions are shared by the threads of
//! a block.

use crate::kernel_ir::expr::{Expr, Part, Stmt, reduces};
use crate::kernel_ir::index::{Atom, Index, Var};
use astrai_ir::dim::Factor;
use astrai_ir::ops::{Activation, BinaryKind, CompareKind, ReduceKind, UnaryKind};
use astrai_ir::{DType, Dim};
use std::fmt::Write;
use std::rc::Rc;

/// Which language the text is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// GNU C of one thread: parallel loops are vector loops.
    C,
    /// C++ of blocks of threads.
    Blocks,
}

/// Lanes of a reduction of one thread: part of the numerics, whatever the vectors' width.
const LANES: usize = 16;

/// Prints statements.
pub struct Printer {
    dialect: Dialect,
    out: String,
    indent: usize,
    /// Inside a loop whose iterations are already spread over threads.
    spread: bool,
}

impl Printer {
    /// An empty text.
    pub fn new(dialect: Dialect, indent: usize) -> Printer {
        Printer { dialect, out: String::new(), indent, spread: false }
    }

    /// The text.
    pub fn finish(self) -> String {
        self.out
    }

    /// One line.
    pub fn line(&mut self, text: &str) {
        let _ = writeln!(self.out, "{:1$}{text}", "", self.indent * 4);
    }

    /// A line that opens a brace, the body, and the closing brace.
    pub fn braces(&mut self, head: &str, body: impl FnOnce(&mut Printer)) {
        self.line(&format!("{head} {{"));
        self.indent += 1;
        body(self);
        self.indent -= 1;
        self.line("}");
    }

    /// Statements of one thread alone: loops and reductions inside are its own.
    pub fn alone(&mut self, body: impl FnOnce(&mut Printer)) {
        let spread = std::mem::replace(&mut self.spread, true);
        body(self);
        self.spread = spread;
    }

    /// Type of loop variables.
    fn counter(&self) -> &'static str {
        match self.dialect {
            Dialect::C => "int64_t",
            Dialect::Blocks => "index_t",
        }
    }

    /// Statements in order.
    pub fn statements(&mut self, body: &[Stmt]) {
        body.iter().for_each(|s| self.statement(s));
    }

    fn statement(&mut self, s: &Stmt) {
        match s {
            Stmt::Let { name, dtype, value } => {
                let value = expr(value);
                self.line(&format!("const {} {name} = {value};", local(*dtype)));
            }
            Stmt::Store { buf, at, dtype, value } => {
                let value = stored(*dtype, value);
                self.line(&format!("w{buf}[{}] = {value};", index(at)));
            }
            Stmt::Loop { var, body } => self.parallel(var, body),
            Stmt::Reduce { name, kind, dtype, outer, parts, count } => {
                self.reduce(name, *kind, *dtype, outer, parts, count)
            }
        }
    }

    fn parallel(&mut self, var: &Var, body: &[Stmt]) {
        let (v, n, t) = (&var.name, dim(&var.extent), self.counter());
        if self.dialect == Dialect::Blocks && !self.spread {
            let head = format!("for ({t} {v} = threadIdx.x; {v} < {n}; {v} += BLOCK)");
            self.braces(&head, |p| p.alone(|p| p.statements(body)));
            return;
        }
        if self.dialect == Dialect::C && !reduces(body) {
            self.line("#pragma GCC ivdep");
        }
        self.braces(&format!("for ({t} {v} = 0; {v} < {n}; {v}++)"), |p| p.statements(body));
    }

    fn reduce(
        &mut self,
        name: &Rc<str>,
        kind: ReduceKind,
        dtype: DType,
        outer: &[Var],
        parts: &[Part],
        n: &Index,
    ) {
        let (ty, first) = (local(dtype), identity(kind, dtype));
        self.line(&format!("{ty} {name};"));
        self.braces("", |p| match p.dialect {
            Dialect::C => {
                p.line(&format!("{ty} acc[{LANES}];"));
                p.line(&format!("for (int l = 0; l < {LANES}; l++) acc[l] = {first};"));
                p.around(outer, |p| parts.iter().for_each(|part| p.lanes(kind, dtype, part)));
                let step = step(kind, dtype, "acc[l]", "acc[l + half]");
                p.line(&format!("for (int half = {}; half; half /= 2)", LANES / 2));
                p.line(&format!("    for (int l = 0; l < half; l++) acc[l] = {step};"));
                p.line(&format!("{name} = {};", mean(kind, dtype, "acc[0]", n)));
            }
            Dialect::Blocks => {
                p.line(&format!("{ty} acc = {first};"));
                match (p.spread, parts) {
                    (false, [part]) if !outer.is_empty() => p.flattened(kind, dtype, outer, part),
                    _ => p.around(outer, |p| parts.iter().for_each(|part| p.strided(kind, dtype, part))),
                }
                let all =
                    if p.spread { "acc".to_string() } else { format!("block_{}(acc)", reduce_name(kind)) };
                p.line(&format!("{name} = {};", mean(kind, dtype, &all, n)));
            }
        });
    }

    /// Loops one in the other, and the body inside.
    pub fn around(&mut self, outer: &[Var], body: impl FnOnce(&mut Printer)) {
        for v in outer {
            let (name, n, t) = (&v.name, dim(&v.extent), self.counter());
            self.line(&format!("for ({t} {name} = 0; {name} < {n}; {name}++) {{"));
            self.indent += 1;
        }
        body(self);
        for _ in outer {
            self.indent -= 1;
            self.line("}");
        }
    }

    fn lanes(&mut self, kind: ReduceKind, dtype: DType, part: &Part) {
        let (v, n) = (&part.var.name, dim(&part.var.extent));
        let at = format!("{v}_0");
        let one = |p: &mut Printer| {
            p.line(&format!("const int64_t {v} = {at} + l;"));
            p.statements(&part.body);
            for value in &part.values {
                p.line(&format!("acc[l] = {};", step(kind, dtype, "acc[l]", &expr(value))));
            }
        };
        self.braces("", |p| {
            p.line(&format!("int64_t {at} = 0;"));
            p.braces(&format!("for (; {at} + {LANES} <= {n}; {at} += {LANES})"), |p| {
                p.braces(&format!("for (int l = 0; l < {LANES}; l++)"), one);
            });
            p.braces(&format!("for (int l = 0; l < {n} - {at}; l++)"), one);
        });
    }

    fn strided(&mut self, kind: ReduceKind, dtype: DType, part: &Part) {
        let (v, n, t) = (&part.var.name, dim(&part.var.extent), self.counter());
        let head = match self.spread {
            true => format!("for ({t} {v} = 0; {v} < {n}; {v}++)"),
            false => format!("for ({t} {v} = threadIdx.x; {v} < {n}; {v} += BLOCK)"),
        };
        self.braces(&head, |p| p.alone(|p| p.accumulate(kind, dtype, part)));
    }

    /// The loops of a reduction over several axes as one, so that short inner axes still keep all threads busy.
    fn flattened(&mut self, kind: ReduceKind, dtype: DType, outer: &[Var], part: &Part) {
        let (t, all) = (self.counter(), format!("{}_all", part.var.name));
        let vars: Vec<&Var> = outer.iter().chain([&part.var]).collect();
        let total = dim(&Dim::product(vars.iter().map(|v| &v.extent)));
        self.braces(&format!("for ({t} {all} = threadIdx.x; {all} < {total}; {all} += BLOCK)"), |p| {
            for (i, v) in vars.iter().enumerate() {
                let inner = Dim::product(vars[i + 1..].iter().map(|v| &v.extent));
                p.line(&format!(
                    "const {t} {} = {};",
                    v.name,
                    digit(&all, &inner, (i > 0).then_some(&v.extent))
                ));
            }
            p.alone(|p| p.accumulate(kind, dtype, part));
        });
    }

    fn accumulate(&mut self, kind: ReduceKind, dtype: DType, part: &Part) {
        self.statements(&part.body);
        for value in &part.values {
            self.line(&format!("acc = {};", step(kind, dtype, "acc", &expr(value))));
        }
    }
}

/// `x / divisor % size`; without a size, `x` is below `divisor` times it.
pub fn digit(x: &str, divisor: &Dim, size: Option<&Dim>) -> String {
    let whole = if divisor.is_one() { x.to_string() } else { format!("{x} / {}", dim(divisor)) };
    size.map_or(whole.clone(), |n| format!("{whole} % {}", dim(n)))
}

fn reduce_name(kind: ReduceKind) -> &'static str {
    match kind {
        ReduceKind::Sum | ReduceKind::Mean => "sum",
        ReduceKind::Max => "max",
        ReduceKind::Min => "min",
        ReduceKind::Prod => "prod",
    }
}

/// What a reduction begins with.
pub fn identity(kind: ReduceKind, dtype: DType) -> String {
    match (kind, dtype.is_float()) {
        (ReduceKind::Sum | ReduceKind::Mean, _) => "0".into(),
        (ReduceKind::Prod, _) => "1".into(),
        (ReduceKind::Max, true) => "-INF_F".into(),
        (ReduceKind::Min, true) => "INF_F".into(),
        (ReduceKind::Max, false) => "INT64_MIN".into(),
        (ReduceKind::Min, false) => "INT64_MAX".into(),
    }
}

/// What a reduction makes of two values.
pub fn step(kind: ReduceKind, dtype: DType, a: &str, b: &str) -> String {
    match kind {
        ReduceKind::Sum | ReduceKind::Mean => format!("{a} + {b}"),
        ReduceKind::Prod => format!("{a} * {b}"),
        ReduceKind::Max | ReduceKind::Min => format!("{}_{}({a}, {b})", family(dtype), reduce_name(kind)),
    }
}

fn mean(kind: ReduceKind, dtype: DType, acc: &str, n: &Index) -> String {
    let value =
        if kind == ReduceKind::Mean { format!("{acc} / (float){}", index(n)) } else { acc.to_string() };
    // The accumulator is f32 or i64; a narrow type rounds or wraps once, at the end.
    if dtype.is_float() { round(dtype, value) } else { wrap(dtype, value) }
}

/// Prefix of the functions on a type: `m` for floats, `i` for integers.
fn family(dtype: DType) -> char {
    if dtype.is_float() { 'm' } else { 'i' }
}

/// Type of a local.
fn local(dtype: DType) -> &'static str {
    match dtype {
        d if d.is_float() => "float",
        DType::Bool => "int",
        _ => "int64_t",
    }
}

/// Type of an element in memory.
pub fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F8E4M3 => "f8e4m3",
        DType::F8E5M2 => "f8e5m2",
        DType::I64 => "int64_t",
        DType::I32 => "int32_t",
        DType::I8 => "int8_t",
        DType::U8 | DType::Bool => "uint8_t",
    }
}

fn round(dtype: DType, x: String) -> String {
    if dtype == DType::F32 { x } else { format!("{0}_to_f32(f32_to_{0}({x}))", element(dtype)) }
}

/// The value as an element of memory. A value that was just rounded to the type is not widened first.
fn stored(dtype: DType, value: &Expr) -> String {
    match value {
        Expr::Cast(from, to, x)
            if *to == dtype && from.is_float() && dtype.is_float() && dtype != DType::F32 =>
        {
            format!("f32_to_{}({})", element(dtype), expr(x))
        }
        // A local of this type holds one of its values: nothing is left to round.
        Expr::Local(name, DType::BF16) if dtype == DType::BF16 => format!("(bf16)(f32_bits({name}) >> 16)"),
        v if dtype.is_float() && dtype != DType::F32 => format!("f32_to_{}({})", element(dtype), expr(v)),
        v if dtype == DType::Bool => format!("({}) != 0", expr(v)),
        v => expr(v),
    }
}

/// A size's variable in a kernel, which no other variable of kernels is named like.
pub fn symbol(name: &str) -> String {
    format!("n_{name}")
}

/// A size as an expression over the kernel's symbols.
pub fn dim(d: &Dim) -> String {
    let mut out = String::new();
    for (coef, factors) in d.products() {
        if !out.is_empty() {
            out.push_str(" + ");
        }
        let mut factors: Vec<String> = factors.iter().map(factor).collect();
        if coef != 1 || factors.is_empty() {
            factors.insert(0, coef.to_string());
        }
        out.push_str(&factors.join(" * "));
    }
    match out.as_str() {
        "" => "0".into(),
        s if s.contains(' ') => format!("({s})"),
        _ => out,
    }
}

fn factor(f: &Factor) -> String {
    match f {
        Factor::Symbol(s) => symbol(s),
        Factor::CeilDiv(pair) => {
            let [n, by] = [dim(&pair[0]), dim(&pair[1])];
            format!("(({n} + {by} - 1) / {by})")
        }
        Factor::Min(pair) => format!("i_min({}, {})", dim(&pair[0]), dim(&pair[1])),
        Factor::Max(pair) => format!("i_max({}, {})", dim(&pair[0]), dim(&pair[1])),
    }
}

/// An index as an expression.
pub fn index(i: &Index) -> String {
    let mut out = Vec::new();
    for (c, a) in &i.terms {
        let a = atom(a);
        out.push(if c.is_one() { a } else { format!("{} * {a}", dim(c)) });
    }
    if out.is_empty() || i.offset.literal() != Some(0) {
        out.push(dim(&i.offset));
    }
    if out.len() == 1 { out.remove(0) } else { format!("({})", out.join(" + ")) }
}

fn atom(a: &Atom) -> String {
    match a {
        Atom::Var(v) => v.name.to_string(),
        Atom::Div(i, d) => format!("({} / {})", index(i), dim(d)),
        Atom::Mod(i, d) => format!("({} % {})", index(i), dim(d)),
        Atom::Clamp(i, d) => format!("i_hold({}, {})", index(i), dim(d)),
        Atom::Local(name, _, _) => format!("(index_t){name}"),
    }
}

/// An expression as text.
pub fn expr(e: &Expr) -> String {
    match e {
        Expr::Real(x) => real(*x),
        Expr::Int(i) => format!("(int64_t)({})", index(i)),
        Expr::Local(name, _) => name.to_string(),
        Expr::Load { buf, at, dtype } => {
            let load = format!("r{buf}[{}]", index(at));
            match dtype.is_float() && *dtype != DType::F32 {
                true => format!("{}_to_f32({load})", element(*dtype)),
                false => load,
            }
        }
        Expr::Unary(kind, dtype, x) => unary(*kind, *dtype, &expr(x)),
        Expr::Act(act, x) => {
            let x = expr(x);
            match act {
                Activation::Silu => format!("m_silu({x})"),
                Activation::Gelu => format!("m_gelu({x})"),
                Activation::GeluTanh => format!("m_gelu_tanh({x})"),
                Activation::Swish(beta) => format!("({x} * m_sigmoid({} * {x}))", real(beta.0)),
            }
        }
        Expr::Binary(kind, dtype, a, b) => binary(*kind, *dtype, &expr(a), &expr(b)),
        Expr::Compare(kind, a, b) => {
            let sign = match kind {
                CompareKind::Eq => "==",
                CompareKind::Ne => "!=",
                CompareKind::Lt => "<",
                CompareKind::Le => "<=",
                CompareKind::Gt => ">",
                CompareKind::Ge => ">=",
            };
            format!("({} {sign} {})", expr(a), expr(b))
        }
        Expr::Select(c, a, b) => format!("({} ? {} : {})", expr(c), expr(a), expr(b)),
        Expr::Uniform { seed, step, stream, at } => {
            format!("random_uniform({}, {}, {stream}u, {})", expr(seed), expr(step), index(at))
        }
        Expr::Cast(from, to, x) => convert(*from, *to, expr(x)),
    }
}

fn convert(from: DType, to: DType, x: String) -> String {
    match (from.is_float(), to.is_float()) {
        (true, true) => round(to, x),
        (false, true) => round(to, format!("(float)({x})")),
        (_, false) if to == DType::Bool => format!("(({x}) != 0)"),
        (true, false) => format!("(int64_t)({})f32_to_i64({x})", element(to)),
        (false, false) => format!("(int64_t)({})({x})", element(to)),
    }
}

fn real(x: f64) -> String {
    let x = x as f32;
    match x {
        x if x.is_nan() => "NAN_F".into(),
        x if x.is_infinite() => format!("({}INF_F)", if x < 0.0 { "-" } else { "" }),
        x if x.is_sign_negative() => format!("({x:?}f)"),
        x => format!("{x:?}f"),
    }
}

fn unary(kind: UnaryKind, dtype: DType, x: &str) -> String {
    match kind {
        UnaryKind::Neg => wrap(dtype, format!("(-{x})")),
        UnaryKind::Not => format!("(!{x})"),
        UnaryKind::Abs if !dtype.is_float() => wrap(dtype, format!("i_abs({x})")),
        // The prelude's functions have the names of the kinds.
        _ => format!("m_{}({x})", format!("{kind:?}").to_lowercase()),
    }
}

fn binary(kind: BinaryKind, dtype: DType, a: &str, b: &str) -> String {
    let f = family(dtype);
    let sign = match kind {
        BinaryKind::Add => "+",
        BinaryKind::Sub => "-",
        BinaryKind::Mul => "*",
        BinaryKind::Div if dtype.is_float() => "/",
        BinaryKind::And => "&",
        BinaryKind::Or => "|",
        BinaryKind::Div => return wrap(dtype, format!("i_div({a}, {b})")),
        BinaryKind::Max => return format!("{f}_max({a}, {b})"),
        BinaryKind::Min => return format!("{f}_min({a}, {b})"),
        BinaryKind::Pow => return format!("{f}_pow({a}, {b})"),
    };
    wrap(dtype, format!("({a} {sign} {b})"))
}

/// Narrow integers wrap where their type ends.
fn wrap(dtype: DType, value: String) -> String {
    match dtype {
        DType::I32 | DType::I8 | DType::U8 => format!("(int64_t)({})({value})", element(dtype)),
        _ => value,
    }
}

//! One instruction: its operation, types and operands.

use super::modifiers::Words;
use super::{Builder, Named, TRASH};
use crate::kernel::{Class, Ins, Join, Op, Slot, Space, TRUE, Ty};
use crate::memory::{LOCAL, PARAM, SHARED};
use crate::parse::{Arg, Written};

pub(super) type Made = Result<Ins, String>;

impl Builder<'_> {
    pub(super) fn operation(&mut self, w: &Written) -> Made {
        let base = w.op.split('.').next().unwrap_or("");
        let nothing = matches!(
            base,
            "nanosleep" | "prefetch" | "prefetchu" | "discard" | "applypriority" | "griddepcontrol"
        );
        let words =
            if nothing || base == "call" { Words { base, ..Words::default() } } else { Words::read(&w.op)? };
        let guard = match &w.guard {
            None => TRUE,
            Some((negated, n)) => self.predicate(&Arg::Name(n.clone()))? | u32::from(*negated),
        };
        let ty = words.types.first().copied().unwrap_or(Ty::U32);
        let i = Ins {
            op: Op::Nop,
            ty,
            ty2: words.types.get(1).copied().unwrap_or(ty),
            mods: words.mods,
            guard,
            d: 0,
            a: 0,
            b: 0,
            c: 0,
            e: 0,
            imm: 0,
            list: (0, 0),
            line: w.line,
            loc: w.loc,
            class: Class::Other,
        };
        let mut i = if nothing { i } else { self.operands(i, &words, w)? };
        i.class = class(&i, words.has("const"));
        Ok(i)
    }

    fn operands(&mut self, i: Ins, words: &Words, w: &Written) -> Made {
        let args = &w.args[..];
        match words.base {
            "setp" | "set" => self.compare(i, words, args),
            "selp" | "slct" => self.select(i, words, args),
            "testp" => self.test(i, words, args),
            "mov" => self.mov(i, args),
            "cvt" => self.convert(i, args),
            "cvta" => self.window(i, words, args),
            "isspacep" => {
                let [p, a] = two(args)?;
                Ok(Ins { op: Op::IsSpace, d: self.written(p)?, a: self.source(a, Ty::U64)?, ..i })
            }
            "ld" | "ldu" => self.load(i, words, args),
            "st" => self.store(i, words, args),
            "atom" | "red" => self.atomic(i, words, args),
            "cp" | "ldmatrix" | "mma" => self.tensor(i, words, args),
            "bra" | "brx" | "ret" | "exit" | "trap" | "brkpt" | "call" | "bar" | "barrier" | "fence"
            | "membar" => self.control(i, words, args),
            "shfl" | "vote" | "match" | "redux" | "activemask" => self.collective(i, words, args),
            _ if args.len() > 1 => self.arithmetic(i, words, args),
            b => Err(format!("instruction {b} is not known")),
        }
    }

    fn arithmetic(&mut self, mut i: Ins, words: &Words, args: &[Arg]) -> Made {
        let t = i.ty;
        if t == Ty::Pred {
            i.op = match words.base {
                "and" => Op::And,
                "or" => Op::Or,
                "xor" => Op::Xor,
                "not" => Op::Not,
                b => return Err(format!("{b} of predicates")),
            };
            i.d = self.written(&args[0])?;
            i.a = self.predicate(&args[1])?;
            i.b = args.get(2).map_or(Ok(TRUE), |a| self.predicate(a))?;
            return Ok(i);
        }
        let shift = if words.has("l") { Op::ShfL } else { Op::ShfR };
        let known = if words.base == "shf" { Some((shift, 3)) } else { operation(words.base, words.part, t) };
        let (op, sources) = known.ok_or("this instruction is not known")?;
        i.op = op;
        if matches!(words.base, "addc" | "subc" | "madc") {
            i.mods.carry_in = true;
        }
        if args.len() != sources + 1 {
            return Err(format!("{} operands instead of {}", args.len(), sources + 1));
        }
        let (d, wide) = self.destination(&args[0])?;
        i.d = d;
        i.mods.wide = wide;
        // Shift amounts and the positions of bits are 32 bits wide, whatever is shifted; so are results of counts.
        let mut slots = [0; 4];
        for (n, a) in args[1..].iter().enumerate() {
            let ty = match (op, n) {
                (Op::Shl | Op::Shr | Op::Bfe, 1..) | (Op::Bfi, 2..) => Ty::U32,
                (Op::MadWide, 2) => {
                    if t.bytes() == 4 {
                        Ty::U64
                    } else {
                        Ty::U32
                    }
                }
                (Op::Prmt | Op::Lop3 | Op::Dp4a, _) => Ty::U32,
                _ => t,
            };
            if op == Op::Lop3 && n == 3 {
                let Arg::Int(v) = a else { return Err("lop3's table is no number".into()) };
                i.imm = *v as i64;
                continue;
            }
            slots[n] = self.source(a, ty)?;
        }
        [i.a, i.b, i.c, i.e] = slots;
        Ok(i)
    }

    fn compare(&mut self, mut i: Ins, words: &Words, args: &[Arg]) -> Made {
        if words.base == "set" {
            let [d, a, b] = three(args)?;
            let (d, _) = self.destination(d)?;
            let (a, b) = (self.source(a, i.ty2)?, self.source(b, i.ty2)?);
            return Ok(Ins { op: Op::Set, d, a, b, ..i });
        }
        i.op = Op::Setp;
        (i.d, i.e) = match &args[0] {
            Arg::Pair(p, q) => (self.written(p)?, self.written(q)?),
            p => (self.written(p)?, TRASH),
        };
        let [a, b] = two(&args[1..3.min(args.len())])?;
        (i.a, i.b) = (self.source(a, i.ty)?, self.source(b, i.ty)?);
        i.c = args.get(3).map_or(Ok(TRUE), |p| self.predicate(p))?;
        Ok(i)
    }

    fn select(&mut self, i: Ins, words: &Words, args: &[Arg]) -> Made {
        let [d, a, b, c] = four(args)?;
        let (d, _) = self.destination(d)?;
        let (a, b) = (self.source(a, i.ty)?, self.source(b, i.ty)?);
        match words.base {
            "selp" => Ok(Ins { op: Op::Selp, d, a, b, c: self.predicate(c)?, ..i }),
            _ => Ok(Ins { op: Op::Slct, d, a, b, c: self.source(c, i.ty2)?, ..i }),
        }
    }

    fn test(&mut self, i: Ins, words: &Words, args: &[Arg]) -> Made {
        let [p, a] = two(args)?;
        let kinds = ["finite", "infinite", "number", "notanumber", "normal", "subnormal"];
        let imm = kinds.iter().position(|k| words.has(k)).ok_or("what is tested?")? as i64;
        Ok(Ins { op: Op::Testp, d: self.written(p)?, a: self.source(a, i.ty)?, imm, ..i })
    }

    fn mov(&mut self, mut i: Ins, args: &[Arg]) -> Made {
        let [d, a] = two(args)?;
        if i.ty == Ty::Pred {
            return Ok(Ins { op: Op::Mov, d: self.written(d)?, a: self.predicate(a)?, ..i });
        }
        match (d, a) {
            (Arg::Vector(parts), a) => {
                i.op = Op::Unpack;
                i.a = self.source(a, i.ty)?;
                let part = self.part(i.ty, parts.len())?;
                let slots: Vec<Slot> =
                    parts.iter().map(|p| self.destination(p).map(|d| d.0)).collect::<Result<_, _>>()?;
                i.ty2 = part;
                i.list = self.list(&slots);
            }
            (d, Arg::Vector(parts)) => {
                i.op = Op::Pack;
                i.d = self.destination(d)?.0;
                i.ty2 = self.part(i.ty, parts.len())?;
                let slots: Vec<Slot> =
                    parts.iter().map(|p| self.source(p, i.ty2)).collect::<Result<_, _>>()?;
                i.list = self.list(&slots);
            }
            (d, a) => {
                i.op = Op::Mov;
                let (d, wide) = self.destination(d)?;
                if wide != i.ty.wide() {
                    return Err("the destination has another width".into());
                }
                (i.d, i.a) = (d, self.source(a, i.ty)?);
            }
        }
        Ok(i)
    }

    fn part(&self, ty: Ty, count: usize) -> Result<Ty, String> {
        match ty.bytes() / count.max(1) {
            1 => Ok(Ty::U8),
            2 => Ok(Ty::U16),
            4 => Ok(Ty::U32),
            _ => Err("a vector that does not fit".into()),
        }
    }

    /// A source of any width: slot, and true where its register is 64 bits wide.
    pub(super) fn any(&mut self, a: &Arg, ty: Ty) -> Result<(Slot, bool), String> {
        if let Arg::Name(n) = a
            && super::special(n).is_none()
            && let Named::Reg(s, w) = self.find(n)?
        {
            return Ok((s, w));
        }
        Ok((self.source(a, ty)?, ty.wide()))
    }

    fn convert(&mut self, mut i: Ins, args: &[Arg]) -> Made {
        let (d, wide) = self.destination(&args[0])?;
        (i.d, i.mods.wide) = (d, wide);
        if let [_, a, b] = args {
            i.op = Op::CvtPair;
            (i.a, i.b) = (self.source(a, i.ty2)?, self.source(b, i.ty2)?);
            return Ok(i);
        }
        i.op = Op::Cvt;
        let (a, from_wide) = self.any(&args[1], i.ty2)?;
        (i.a, i.imm) = (a, i64::from(from_wide));
        Ok(i)
    }

    fn window(&mut self, i: Ins, words: &Words, args: &[Arg]) -> Made {
        let [d, a] = two(args)?;
        let at = match i.mods.space {
            Space::Shared => SHARED,
            Space::Local => LOCAL,
            Space::Param => PARAM,
            _ => 0,
        };
        let imm = if words.has("to") { (at as i64).wrapping_neg() } else { at as i64 };
        let a = match a {
            Arg::Name(n) => match self.find(n)? {
                Named::Reg(s, true) => s,
                n => self.address(n, 0, true)?,
            },
            a => self.source(a, Ty::U64)?,
        };
        Ok(Ins { op: Op::Window, d: self.destination(d)?.0, a, imm, ..i })
    }

    fn control(&mut self, mut i: Ins, words: &Words, args: &[Arg]) -> Made {
        let scopes = |b: &Builder| b.scopes.iter().map(|s| s.id).collect::<Vec<_>>();
        match (words.base, args) {
            ("bra", [Arg::Name(l)]) => {
                i.op = Op::Bra;
                self.fixes.push((self.k.code.len(), l.clone(), scopes(self)));
            }
            ("brx", [index, Arg::Name(l)]) => {
                i.op = Op::Brx;
                i.a = self.source(index, Ty::U32)?;
                self.fixes.push((self.k.code.len(), l.clone(), scopes(self)));
            }
            ("ret" | "exit", _) => i.op = Op::Exit,
            ("trap" | "brkpt", _) => i.op = Op::Trap,
            ("call", args) => {
                let name =
                    args.iter().find_map(|a| if let Arg::Name(n) = a { Some(n.as_str()) } else { None });
                i.op = match name {
                    Some("vprintf") => Op::Nop,
                    Some("__assertfail") => Op::Trap,
                    n => return Err(format!("a call of {n:?}")),
                };
                i.imm = i64::from(i.op == Op::Trap);
            }
            ("fence" | "membar", _) => {
                i.op = Op::Fence;
                i.imm = i64::from(!words.has("cta"));
            }
            (_, args) if words.has("warp") => {
                i.op = Op::SyncWarp;
                i.b = self.source(args.first().ok_or("no mask")?, Ty::U32)?;
            }
            (_, args) => return self.barrier(i, words, args),
        }
        Ok(i)
    }

    /// `bar.sync a{, b}`, `bar.arrive a, b`, `bar.red.op d, a{, b}, p`: a and b are in a and b, b zero where all threads are meant.
    fn barrier(&mut self, mut i: Ins, words: &Words, args: &[Arg]) -> Made {
        i.mods.aligned |= words.base == "bar";
        i.op = if words.has("arrive") { Op::BarArrive } else { Op::Bar };
        let mut args = args;
        if words.has("red") {
            i.ty = words.types.first().copied().unwrap_or(Ty::U32);
            (i.d, i.c) = match (i.ty, &args[0]) {
                (Ty::Pred, p) => (self.written(p)?, 0),
                (_, r) => (self.destination(r)?.0, 0),
            };
            i.c = self.predicate(args.last().ok_or("no predicate")?)?;
            args = &args[1..args.len() - 1];
        } else {
            i.mods.join = Join::None;
        }
        i.a = self.source(args.first().ok_or("which barrier?")?, Ty::U32)?;
        i.b = match args.get(1) {
            Some(n) => self.source(n, Ty::U32)?,
            None => self.number(0, false),
        };
        Ok(i)
    }

    fn collective(&mut self, mut i: Ins, words: &Words, args: &[Arg]) -> Made {
        match words.base {
            "activemask" => return Ok(Ins { op: Op::ActiveMask, d: self.destination(&args[0])?.0, ..i }),
            "shfl" => {
                let (d, p) = match &args[0] {
                    Arg::Pair(d, p) => (d.as_ref(), self.written(p)?),
                    d => (d, TRASH),
                };
                let [a, b, c, m] = four(&args[1..])?;
                (i.d, i.list.0) = (self.destination(d)?.0, p);
                let mut s = |a| self.source(a, Ty::U32);
                (i.a, i.b, i.c, i.e) = (s(a)?, s(b)?, s(c)?, s(m)?);
                i.op = Op::Shfl;
            }
            "vote" => {
                let [d, p, m] = three(args)?;
                i.op = Op::Vote;
                i.d = if i.mods.join == Join::Ballot { self.destination(d)?.0 } else { self.written(d)? };
                (i.a, i.e) = (self.predicate(p)?, self.source(m, Ty::U32)?);
            }
            "match" => {
                let (d, p) = match &args[0] {
                    Arg::Pair(d, p) => (d.as_ref(), self.written(p)?),
                    d => (d, TRASH),
                };
                i.op = if i.mods.join == Join::Any { Op::MatchAny } else { Op::MatchAll };
                (i.d, i.list.0) = (self.destination(d)?.0, p);
                (i.a, i.e) = (self.source(&args[1], i.ty)?, self.source(&args[2], Ty::U32)?);
            }
            _ => {
                let [d, a, m] = three(args)?;
                i.op = Op::Redux;
                (i.d, i.a, i.e) =
                    (self.destination(d)?.0, self.source(a, Ty::U32)?, self.source(m, Ty::U32)?);
            }
        }
        Ok(i)
    }
}

pub(super) fn two(args: &[Arg]) -> Result<[&Arg; 2], String> {
    let [a, b] = args else { return Err("takes two operands".into()) };
    Ok([a, b])
}

fn three(args: &[Arg]) -> Result<[&Arg; 3], String> {
    let [a, b, c] = args else { return Err("takes three operands".into()) };
    Ok([a, b, c])
}

pub(super) fn four(args: &[Arg]) -> Result<[&Arg; 4], String> {
    let [a, b, c, d] = args else { return Err("takes four operands".into()) };
    Ok([a, b, c, d])
}

/// Operation and number of sources.
fn operation(base: &str, part: &str, ty: Ty) -> Option<(Op, usize)> {
    let whole = part.is_empty() || ty.float();
    Some(match (base, part) {
        ("add" | "addc", _) => (Op::Add, 2),
        ("sub" | "subc", _) => (Op::Sub, 2),
        ("mul", "hi") => (Op::MulHi, 2),
        ("mul", "wide") => (Op::MulWide, 2),
        ("mul", _) => (Op::MulLo, 2),
        ("mad" | "madc", "hi") => (Op::MadHi, 3),
        ("mad", "wide") => (Op::MadWide, 3),
        ("mad" | "fma", _) if whole => (Op::Fma, 3),
        ("mad" | "madc", _) => (Op::MadLo, 3),
        ("div", _) => (Op::Div, 2),
        ("rem", _) => (Op::Rem, 2),
        ("min", _) => (Op::Min, 2),
        ("max", _) => (Op::Max, 2),
        ("abs", _) => (Op::Abs, 1),
        ("neg", _) => (Op::Neg, 1),
        ("and", _) => (Op::And, 2),
        ("or", _) => (Op::Or, 2),
        ("xor", _) => (Op::Xor, 2),
        ("not", _) => (Op::Not, 1),
        ("cnot", _) => (Op::Cnot, 1),
        ("shl", _) => (Op::Shl, 2),
        ("shr", _) => (Op::Shr, 2),
        ("bfe", _) => (Op::Bfe, 3),
        ("bfi", _) => (Op::Bfi, 4),
        ("bfind", _) => (Op::Bfind, 1),
        ("brev", _) => (Op::Brev, 1),
        ("popc", _) => (Op::Popc, 1),
        ("clz", _) => (Op::Clz, 1),
        ("prmt", _) => (Op::Prmt, 3),
        ("lop3", _) => (Op::Lop3, 4),
        ("sad", _) => (Op::Sad, 3),
        ("dp4a", _) => (Op::Dp4a, 3),
        ("copysign", _) => (Op::Copysign, 2),
        ("rcp", _) => (Op::Rcp, 1),
        ("sqrt", _) => (Op::Sqrt, 1),
        ("rsqrt", _) => (Op::Rsqrt, 1),
        ("ex2", _) => (Op::Ex2, 1),
        ("lg2", _) => (Op::Lg2, 1),
        ("sin", _) => (Op::Sin, 1),
        ("cos", _) => (Op::Cos, 1),
        ("tanh", _) => (Op::Tanh, 1),
        _ => return None,
    })
}

fn class(i: &Ins, constant: bool) -> Class {
    use Op::*;
    match i.op {
        Ld | St => match i.mods.space {
            _ if constant => Class::Param,
            Space::Shared => Class::Shared,
            Space::Local => Class::Local,
            Space::Param => Class::Param,
            _ => Class::Global,
        },
        Atom => Class::Atomic,
        CpAsync => Class::Global,
        LdMatrix => Class::Shared,
        Mma => Class::Tensor,
        CpCommit | CpWait | Bar | BarArrive | SyncWarp | Fence => Class::Barrier,
        Shfl | Vote | MatchAny | MatchAll | Redux | ActiveMask => Class::Warp,
        Bra | Brx | Exit | Trap => Class::Branch,
        Setp | Testp | IsSpace => Class::Predicate,
        _ if i.ty == Ty::Pred => Class::Predicate,
        Mov | Pack | Unpack | Selp | Slct => Class::Move,
        Cvt | CvtPair => Class::Convert,
        Rcp | Sqrt | Rsqrt | Ex2 | Lg2 | Sin | Cos | Tanh => Class::Special,
        Nop => Class::Other,
        _ => match i.ty {
            Ty::F32 | Ty::Tf32 => Class::Float,
            Ty::F64 => Class::Double,
            Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 => Class::Half,
            _ => Class::Integer,
        },
    }
}

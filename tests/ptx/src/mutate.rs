//! Kernels with one instruction changed. In: a kernel, and which instructions were executed. Out: mutants, to see whether tests
//! notice them. A change that cannot alter a result (operands of a sum swapped) is not made.

use crate::counts::Count;
use crate::kernel::{Cmp, Fill, Ins, Join, Kernel, Op, Slot, TRUE, Ty};

/// A kernel with a mistake.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// The kernel.
    pub kernel: Kernel,
    /// Number of the instruction that was changed.
    pub pc: usize,
    /// What was changed.
    pub change: &'static str,
}

/// One mutant for each change that can be made to each executed instruction.
pub fn mutants(k: &Kernel, counts: &[Count]) -> Vec<Mutant> {
    let executed = (0..k.code.len() - 1).filter(|pc| counts.get(*pc).is_some_and(|c| c.lanes > 0));
    let one = |pc: usize| {
        CHANGES.iter().filter_map(move |(change, f)| {
            let mut kernel = k.clone();
            let i = f(&mut kernel, &k.code[pc])?;
            kernel.code[pc] = i;
            Some(Mutant { kernel, pc, change })
        })
    };
    executed.flat_map(one).collect()
}

type Change = fn(&mut Kernel, &Ins) -> Option<Ins>;

const CHANGES: [(&str, Change); 8] = [
    ("another operation", operation),
    ("another comparison", comparison),
    ("the guard negated", guard),
    ("a constant one more", constant),
    ("the address moved", address),
    ("the sources swapped", swapped),
    ("left out", absent),
    ("another predicate's join", join),
];

fn operation(_: &mut Kernel, i: &Ins) -> Option<Ins> {
    let op = match i.op {
        Op::Add => Op::Sub,
        Op::Sub => Op::Add,
        Op::MulLo => Op::Add,
        Op::MadLo => Op::MulLo,
        Op::Fma => Op::MulLo,
        Op::Min => Op::Max,
        Op::Max => Op::Min,
        Op::And => Op::Or,
        Op::Or => Op::And,
        Op::Xor => Op::Or,
        Op::Shl => Op::Shr,
        Op::Shr => Op::Shl,
        Op::Div => Op::MulLo,
        Op::Rem => Op::Div,
        Op::Neg => Op::Abs,
        Op::Abs => Op::Neg,
        Op::Rcp => Op::Sqrt,
        Op::Sqrt => Op::Rcp,
        Op::Rsqrt => Op::Sqrt,
        Op::Ex2 => Op::Lg2,
        Op::Lg2 => Op::Ex2,
        _ => return None,
    };
    // Shifts and remainders by the types that have them; halves have no quotients.
    let known = !matches!((op, i.ty), (Op::Sqrt | Op::Rcp, t) if t != Ty::F32 && t != Ty::F64);
    known.then(|| Ins { op, ..i.clone() })
}

fn comparison(_: &mut Kernel, i: &Ins) -> Option<Ins> {
    if !matches!(i.op, Op::Setp | Op::Set) {
        return None;
    }
    let mut i = i.clone();
    i.mods.cmp = match i.mods.cmp {
        Cmp::Eq => Cmp::Ne,
        Cmp::Ne => Cmp::Eq,
        Cmp::Lt => Cmp::Ge,
        Cmp::Le => Cmp::Gt,
        Cmp::Gt => Cmp::Le,
        Cmp::Ge => Cmp::Lt,
        Cmp::Equ => Cmp::Neu,
        Cmp::Neu => Cmp::Equ,
        Cmp::Ltu => Cmp::Geu,
        Cmp::Leu => Cmp::Gtu,
        Cmp::Gtu => Cmp::Leu,
        Cmp::Geu => Cmp::Ltu,
        Cmp::Num => Cmp::Nan,
        Cmp::Nan => Cmp::Num,
    };
    Some(i)
}

fn guard(_: &mut Kernel, i: &Ins) -> Option<Ins> {
    (i.guard != TRUE).then(|| Ins { guard: i.guard ^ 1, ..i.clone() })
}

/// A slot with the constant of another, plus one.
fn more(k: &mut Kernel, slot: Slot) -> Option<Slot> {
    let (fill, _) = *k.fills.iter().find(|(_, s)| *s == slot)?;
    let (fill, wide) = match fill {
        Fill::Word(v) => (Fill::Word(v.wrapping_add(1)), false),
        Fill::Long(v) => (Fill::Long(v.wrapping_add(1)), true),
        _ => return None,
    };
    let at = k.slots as Slot;
    k.slots += 1 + usize::from(wide);
    k.fills.push((fill, at));
    Some(at)
}

fn constant(k: &mut Kernel, i: &Ins) -> Option<Ins> {
    // The bits of a float plus one are nearly the same float; a mask of lanes is no number.
    let integer =
        !i.ty.float() && !matches!(i.op, Op::Ld | Op::St | Op::Atom | Op::Bar | Op::Vote | Op::SyncWarp);
    if !integer || i.ty == Ty::Pred {
        return None;
    }
    let two = matches!(i.op, Op::Mov | Op::Cvt | Op::Not | Op::Neg | Op::Abs | Op::Pack | Op::Unpack);
    let places = if two { &[0][..] } else { &[0, 1] };
    for p in places {
        let mut i = i.clone();
        let slot = if *p == 0 { i.a } else { i.b };
        if let Some(s) = more(k, slot) {
            if *p == 0 {
                i.a = s
            } else {
                i.b = s
            }
            return Some(i);
        }
    }
    None
}

fn address(_: &mut Kernel, i: &Ins) -> Option<Ins> {
    let by = match i.op {
        Op::Ld | Op::St => i.ty.bytes() * i.list.1 as usize,
        Op::Atom => i.ty.bytes(),
        Op::LdMatrix | Op::CpAsync => 16,
        _ => return None,
    };
    Some(Ins { imm: i.imm + by as i64, ..i.clone() })
}

fn swapped(_: &mut Kernel, i: &Ins) -> Option<Ins> {
    let differs = matches!(i.op, Op::Sub | Op::Div | Op::Rem | Op::Selp) && i.a != i.b;
    differs.then(|| Ins { a: i.b, b: i.a, ..i.clone() })
}

fn absent(_: &mut Kernel, i: &Ins) -> Option<Ins> {
    matches!(i.op, Op::St | Op::Bar | Op::SyncWarp | Op::Atom | Op::CpWait | Op::Mma)
        .then(|| Ins { op: Op::Nop, ..i.clone() })
}

fn join(_: &mut Kernel, i: &Ins) -> Option<Ins> {
    let mut i = i.clone();
    i.mods.join = match (i.op, i.mods.join) {
        (Op::Setp, Join::And) => Join::Or,
        (Op::Setp, Join::Or) => Join::And,
        (Op::Shfl, Join::Bfly) => Join::Idx,
        (Op::Vote, Join::All) => Join::Any,
        (Op::Vote, Join::Any) => Join::All,
        _ => return None,
    };
    Some(i)
}

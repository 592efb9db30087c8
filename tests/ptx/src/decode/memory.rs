//! Instructions that name memory, and those of the tensor cores: addresses, registers of vectors, shapes. Instructions of Hopper
//! (`mbarrier`, bulk copies, `wgmma`) would be rows of `tensor`; a text that has them is refused.

use super::modifiers::Words;
use super::operation::{Made, four, two};
use super::{Builder, Named};
use crate::kernel::{Ins, Join, Op, Slot, Space, Ty};
use crate::parse::Arg;

impl Builder<'_> {
    /// Fills in the address: its register, that register's type as the second type, and the offset.
    pub(super) fn place(&mut self, mut i: Ins, a: &Arg) -> Made {
        let Arg::Mem(base, off) = a else { return Err(format!("operand {a:?} is no address")) };
        i.imm = *off;
        let zero = self.number(0, true);
        match &**base {
            Arg::Int(v) => (i.a, i.ty2, i.imm) = (zero, Ty::U64, *off + *v as i64),
            Arg::Name(n) => match self.find(n)? {
                Named::Reg(s, wide) => (i.a, i.ty2) = (s, if wide { Ty::U64 } else { Ty::U32 }),
                Named::Param(at) => (i.a, i.ty2, i.imm) = (zero, Ty::U64, *off + at as i64),
                Named::Local(at) => {
                    i.mods.space = Space::Local;
                    (i.a, i.ty2, i.imm) = (zero, Ty::U64, *off + at as i64);
                }
                n @ Named::Dynamic => (i.a, i.ty2) = (self.address(n, 0, false)?, Ty::U32),
                n => (i.a, i.ty2) = (self.address(n, 0, true)?, Ty::U64),
            },
            _ => return Err("this address is not known".into()),
        }
        Ok(i)
    }

    pub(super) fn load(&mut self, i: Ins, words: &Words, args: &[Arg]) -> Made {
        let [d, a] = two(args)?;
        let mut i = self.place(i, a)?;
        i.op = Op::Ld;
        let one = std::slice::from_ref(d);
        let parts = if let Arg::Vector(v) = d { v } else { one };
        let found: Vec<(Slot, bool)> = parts.iter().map(|p| self.destination(p)).collect::<Result<_, _>>()?;
        i.mods.wide = found.iter().zip(parts).any(|(f, p)| f.1 && *p != Arg::Name("_".into()));
        let slots: Vec<Slot> = found.iter().map(|f| f.0).collect();
        self.whole(i, words, &slots)
    }

    pub(super) fn store(&mut self, i: Ins, words: &Words, args: &[Arg]) -> Made {
        let [a, s] = two(args)?;
        let mut i = self.place(i, a)?;
        i.op = Op::St;
        let one = std::slice::from_ref(s);
        let parts = if let Arg::Vector(v) = s { v } else { one };
        let found: Vec<(Slot, bool)> = parts.iter().map(|p| self.any(p, i.ty)).collect::<Result<_, _>>()?;
        i.mods.wide = found[0].1;
        if found.iter().any(|f| f.1 != i.mods.wide) {
            return Err("registers of several widths".into());
        }
        let slots: Vec<Slot> = found.iter().map(|f| f.0).collect();
        self.whole(i, words, &slots)
    }

    /// An access to memory with its registers.
    fn whole(&mut self, mut i: Ins, words: &Words, slots: &[Slot]) -> Made {
        if slots.len() != words.count {
            return Err(format!("{} registers for {}", slots.len(), words.count));
        }
        i.list = self.list(slots);
        self.accesses(&i, words.count * i.ty.bytes());
        self.k.talks |= i.mods.strong && matches!(i.mods.space, Space::Global | Space::Generic);
        Ok(i)
    }

    pub(super) fn atomic(&mut self, mut i: Ins, words: &Words, args: &[Arg]) -> Made {
        let red = words.base == "red";
        let (d, args) =
            if red { (None, args) } else { (args.first(), args.get(1..).ok_or("too few operands")?) };
        let ty = i.ty;
        i = self.place(i, args.first().ok_or("no address")?)?;
        i.op = Op::Atom;
        i.d = d.map_or(Ok(self.trash), |d| self.destination(d).map(|d| d.0))?;
        i.b = self.source(args.get(1).ok_or("no value")?, ty)?;
        if let Some(c) = args.get(2) {
            i.c = self.source(c, ty)?;
        }
        if i.mods.join == Join::Cas && args.len() != 3 {
            return Err("cas takes two values".into());
        }
        self.accesses(&i, ty.bytes());
        self.k.talks |= i.mods.space != Space::Shared;
        Ok(i)
    }

    pub(super) fn tensor(&mut self, i: Ins, words: &Words, args: &[Arg]) -> Made {
        match (words.base, words.all.get(1).copied()) {
            ("cp", Some("commit_group")) => Ok(Ins { op: Op::CpCommit, ..i }),
            ("cp", Some("wait_all")) => Ok(Ins { op: Op::CpWait, imm: -1, ..i }),
            ("cp", Some("wait_group")) => match args {
                [Arg::Int(n)] => Ok(Ins { op: Op::CpWait, imm: *n as i64, ..i }),
                _ => Err("how many groups?".into()),
            },
            ("cp", Some("shared" | "shared::cta" | "ca" | "cg")) => self.copy(i, args),
            ("ldmatrix", _) if words.shape == "m8n8" => {
                let [Arg::Vector(d), a] = two(args)? else { return Err("operands".into()) };
                let mut i = self.place(i, a)?;
                let slots: Vec<Slot> =
                    d.iter().map(|d| self.destination(d).map(|d| d.0)).collect::<Result<_, _>>()?;
                if slots.len() != words.count {
                    return Err("registers".into());
                }
                i.list = self.list(&slots);
                i.mods.space = Space::Shared;
                self.accesses(&i, 16);
                Ok(Ins { op: Op::LdMatrix, ..i })
            }
            ("mma", _) => self.mma(i, words, args),
            _ => Err("this instruction is not known".into()),
        }
    }

    fn copy(&mut self, i: Ins, args: &[Arg]) -> Made {
        let (Some(d), Some(s), Some(Arg::Int(n))) = (args.first(), args.get(1), args.get(2)) else {
            return Err("cp.async takes two addresses and a number".into());
        };
        // The source's address: a and imm; the destination's: b and, as a list of one, its offset.
        let to = self.place(i.clone(), d)?;
        let mut i = self.place(i, s)?;
        let wide = to.ty2.wide();
        i.op = Op::CpAsync;
        (i.b, i.mods.wide) = (to.a, wide);
        i.c = self.number(*n, false);
        i.e = match args.get(3) {
            Some(bytes) => self.source(bytes, Ty::U32)?,
            None => i.c,
        };
        i.list = self.list(&[to.imm as u32, *n as u32]);
        self.k.granule.0 = self.k.granule.0.min(*n as usize);
        self.k.granule.1 = self.k.granule.1.min(*n as usize);
        Ok(i)
    }

    fn mma(&mut self, mut i: Ins, words: &Words, args: &[Arg]) -> Made {
        let [d, a, b, c] = four(args)?;
        let [td, ta, tb, _] = words.types[..] else { return Err("four types".into()) };
        let k: usize = words.shape.strip_prefix("m16n8k").and_then(|k| k.parse().ok()).ok_or("shape")?;
        (i.op, i.ty, i.ty2, i.imm) = (Op::Mma, td, ta, k as i64);
        i.mods.alt = tb.signed();
        let each = 4 / ta.bytes();
        let known =
            matches!((ta, k), (Ty::F16 | Ty::Bf16, 8 | 16) | (Ty::Tf32, 4 | 8) | (Ty::U8 | Ty::S8, 16 | 32));
        let sums = if td == Ty::F16 { 2 } else { 4 };
        let (na, nb) = (16 * k / 32 / each, 8 * k / 32 / each);
        if !known {
            return Err("an mma of this shape and type is not known".into());
        }
        let mut slots = vec![];
        for (v, n, is_d) in [(d, sums, true), (a, na, false), (b, nb, false), (c, sums, false)] {
            let one = std::slice::from_ref(v);
            let parts = if let Arg::Vector(v) = v { v } else { one };
            if parts.len() != n {
                return Err(format!("{} registers instead of {n}", parts.len()));
            }
            for p in parts {
                slots.push(if is_d { self.destination(p)?.0 } else { self.source(p, Ty::U32)? });
            }
        }
        i.list = self.list(&slots);
        Ok(i)
    }
}

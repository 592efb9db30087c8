//! Instructions by which lanes of a warp speak to each other. All lanes of the mask are there.

use crate::fault::{Kind, Step, Wrong};
use crate::kernel::{Ins, Join, Op, Ty};
use crate::registers::{Regs, V32};

pub(crate) fn step(r: &mut Regs, i: &Ins, m: u32) -> Step<()> {
    match i.op {
        Op::Shfl => return shuffle(r, i, m),
        Op::Vote => vote(r, i, m),
        Op::MatchAny | Op::MatchAll => matching(r, i, m),
        _ => redux(r, i, m),
    }
    Ok(())
}

fn shuffle(r: &mut Regs, i: &Ins, m: u32) -> Step<()> {
    let (a, b, c) = (*r.v32(i.a), *r.v32(i.b), *r.v32(i.c));
    let (mut out, mut inside) = ([0u32; 32], 0u32);
    for l in (0..32u32).filter(|l| m >> l & 1 == 1) {
        let (bv, cv, segment) = (b[l as usize] & 31, c[l as usize] & 31, c[l as usize] >> 8 & 31);
        let (first, last) = (l & segment, l & segment | cv & !segment);
        let (from, within) = match i.mods.join {
            Join::Up => (l.wrapping_sub(bv), l as i32 - bv as i32 >= last as i32),
            Join::Down => (l + bv, l + bv <= last),
            Join::Bfly => (l ^ bv, l ^ bv <= last),
            _ => (first | bv & !segment, (first | bv & !segment) <= last),
        };
        let from = if within { from } else { l };
        if m >> from & 1 == 0 {
            return Err(Wrong::new(
                Kind::Divergence,
                l as usize,
                None,
                format!("it reads lane {from}, which is absent"),
            ));
        }
        inside |= u32::from(within) << l;
        out[l as usize] = a[from as usize];
    }
    r.put32(i.d, &out, m);
    r.put_pred(i.list.0, inside, m);
    Ok(())
}

fn vote(r: &mut Regs, i: &Ins, m: u32) {
    let v = r.pred(i.a) & m;
    let holds = match i.mods.join {
        Join::Ballot => return r.put32(i.d, &[v; 32], m),
        Join::All => v == m,
        Join::Any => v != 0,
        _ => v == m || v == 0,
    };
    r.put_pred(i.d, if holds { !0 } else { 0 }, m);
}

fn matching(r: &mut Regs, i: &Ins, m: u32) {
    let a = if i.ty.wide() { *r.v64(i.a) } else { r.v32(i.a).map(u64::from) };
    let same = |l: usize| (0..32).filter(|k| m >> k & 1 == 1 && a[*k] == a[l]).fold(0u32, |o, k| o | 1 << k);
    let each: V32 = std::array::from_fn(same);
    if i.op == Op::MatchAny {
        return r.put32(i.d, &each, m);
    }
    let all = each[m.trailing_zeros() as usize & 31] == m;
    r.put32(i.d, &[if all { m } else { 0 }; 32], m);
    r.put_pred(i.list.0, if all { !0 } else { 0 }, m);
}

fn redux(r: &mut Regs, i: &Ins, m: u32) {
    let a = *r.v32(i.a);
    let values = || (0..32).filter(|l| m >> l & 1 == 1).map(|l| a[l]);
    let signed = i.ty == Ty::S32;
    let v = match i.mods.join {
        Join::Add => values().fold(0, u32::wrapping_add),
        Join::And => values().fold(!0, |x, y| x & y),
        Join::Or => values().fold(0, |x, y| x | y),
        Join::Xor => values().fold(0, |x, y| x ^ y),
        Join::Min if signed => values().map(|v| v as i32).min().unwrap_or(0) as u32,
        Join::Max if signed => values().map(|v| v as i32).max().unwrap_or(0) as u32,
        Join::Min => values().min().unwrap_or(0),
        _ => values().max().unwrap_or(0),
    };
    r.put32(i.d, &[v; 32], m);
}

//! Asynchronous copies, matrices in registers and their products. Copies land when they are waited for, as late as is legal.

use crate::access::addresses;
use crate::block::{Block, Pending, Warp, cell};
use crate::fault::{Kind, Step, Wrong};
use crate::kernel::{Ins, Space, Ty};
use crate::registers::{Regs, V32};
use crate::shadow::Who;
use half::f16;

impl Block<'_> {
    /// `cp.async`: the destination is unreadable from now on.
    pub fn copy(&mut self, w: &mut Warp, i: &Ins, m: u32, pc: usize) -> Step<()> {
        let from = addresses(&w.regs, i.a, i.ty2.wide(), i.imm);
        let list = i.range().start;
        let (off, whole) = (self.k.lists[list] as i32, self.k.lists[list + 1] as usize);
        let to = addresses(&w.regs, i.b, i.mods.wide, i64::from(off));
        let bytes = *w.regs.v32(i.e);
        for l in (0..32).filter(|l| m >> l & 1 == 1) {
            let n = (bytes[l] as usize).min(whole);
            let d = to[l] as usize;
            let size = self.k.dynamic_at() + self.launch.dynamic;
            if to[l] >= size as u64 || d + whole > size {
                let what = format!("of {size} bytes of shared memory");
                return Err(Wrong::new(Kind::OutOfBounds, l, Some(to[l]), what));
            }
            if !d.is_multiple_of(whole) || !from[l].is_multiple_of(whole as u64) {
                return Err(Wrong::new(
                    Kind::Misaligned,
                    l,
                    Some(from[l]),
                    format!("{whole} bytes to {d:#x}"),
                ));
            }
            let who = Who { warp: w.id, lane: l, strong: false };
            let mut place = std::ptr::null();
            if n > 0 {
                let (s, o) = self.span(from[l], n as u64, l)?;
                // SAFETY: `span` found the bytes inside the allocation.
                let written = unsafe { std::slice::from_raw_parts(s.written.add(o), n) };
                if written.contains(&0) {
                    return Err(Wrong::new(
                        Kind::NeverWritten,
                        l,
                        Some(from[l]),
                        format!("byte {o} of its allocation"),
                    ));
                }
                for g in o / self.k.granule.1..=(o + n - 1) / self.k.granule.1 {
                    // SAFETY: as above.
                    let judged = self.view.read(&self.clocks, who, unsafe { cell(&s, g) });
                    judged.map_err(|c| Wrong::new(c.kind, l, Some(from[l]), c.with))?;
                }
                // SAFETY: as above.
                place = unsafe { s.data.add(o) };
            }
            let judged = self.shadow.write(&self.clocks, who, d, whole, true);
            judged.map_err(|c| Wrong::new(c.kind, l, Some(to[l]), c.with))?;
            w.open.push(Pending { lane: l, to: d, from: place, bytes: n, whole });
        }
        if self.launch.counted {
            self.count(pc, m, &from, whole, Space::Global);
        }
        Ok(())
    }

    /// `cp.async.wait_group n` of these lanes; all groups and what is in none where n is negative.
    pub fn wait_copies(&mut self, w: &mut Warp, m: u32, n: i64) {
        if n < 0 {
            w.groups.push_back((m, std::mem::take(&mut w.open)));
        }
        let allowed = n.max(0) as u32;
        let mut later = [0u32; 32];
        let mut groups = std::mem::take(&mut w.groups);
        let mut landing = vec![];
        for (members, copies) in groups.iter_mut().rev() {
            let done: u32 = (0..32).filter(|l| m >> l & 1 == 1 && later[*l] >= allowed).map(|l| 1 << l).sum();
            copies.retain(|c| {
                let lands = done >> c.lane & 1 == 1;
                if lands {
                    landing.push(*c);
                }
                !lands
            });
            (0..32).filter(|l| *members >> l & 1 == 1).for_each(|l| later[l] += 1);
            *members &= !done;
        }
        groups.retain(|(members, copies)| *members != 0 || !copies.is_empty());
        w.groups = groups;
        for c in landing {
            let d = &mut self.shared[c.to..c.to + c.whole];
            d[c.bytes..].fill(0);
            if c.bytes > 0 {
                // SAFETY: `copy` found the bytes in an allocation that lives as long as the launch.
                unsafe { std::ptr::copy_nonoverlapping(c.from, d.as_mut_ptr(), c.bytes) };
            }
            let who = Who { warp: w.id, lane: c.lane, strong: false };
            self.shadow.land(&self.clocks, who, c.to, c.whole);
        }
    }

    /// `ldmatrix`: each lane names a row of eight 16-bit elements.
    pub fn ldmatrix(&mut self, w: &mut Warp, i: &Ins, pc: usize) -> Step<()> {
        let at = addresses(&w.regs, i.a, i.ty2.wide(), i.imm);
        let size = self.k.dynamic_at() + self.launch.dynamic;
        let count = i.list.1 as usize;
        for l in 0..8 * count {
            let o = at[l] as usize;
            if at[l] >= size as u64 || o + 16 > size {
                let what = format!("of {size} bytes of shared memory");
                return Err(Wrong::new(Kind::OutOfBounds, l, Some(at[l]), what));
            }
            if !o.is_multiple_of(16) {
                return Err(Wrong::new(Kind::Misaligned, l, Some(at[l]), "a row of 16 bytes"));
            }
            let who = Who { warp: w.id, lane: l, strong: false };
            let judged = self.shadow.read(&self.clocks, who, o, 16);
            judged.map_err(|c| Wrong::new(c.kind, l, Some(at[l]), c.with))?;
        }
        for j in 0..count {
            let element = |row: usize, col: usize| {
                let o = at[8 * j + row] as usize + 2 * col;
                u32::from(u16::from_le_bytes([self.shared[o], self.shared[o + 1]]))
            };
            let v: V32 = std::array::from_fn(|l| {
                let (g, t) = (l / 4, l % 4 * 2);
                if i.mods.alt {
                    element(t, g) | element(t + 1, g) << 16
                } else {
                    element(g, t) | element(g, t + 1) << 16
                }
            });
            w.regs.put32(self.k.lists[i.range().start + j], &v, !0);
            if self.launch.counted {
                let (units, ideal) = crate::counts::passes(&at, 0xff << (8 * j), 16);
                let c = &mut self.counts[pc];
                (c.units, c.ideal) = (c.units + units, c.ideal + ideal);
            }
        }
        Ok(())
    }

    /// `mma.sync.m16n8k*`: fragments as the PTX manual lays them out; products and sums in f32, or in 32-bit integers.
    pub fn mma(&mut self, w: &mut Warp, i: &Ins) {
        let r = &mut w.regs;
        let k = i.imm as usize;
        let each = 4 / i.ty2.bytes();
        let slots: Vec<u32> = i.range().map(|s| r.lists[s]).collect();
        let sums = if i.ty == Ty::F16 { 2 } else { 4 };
        let (d, rest) = slots.split_at(sums);
        let (a, rest) = rest.split_at(16 * k / 32 / each);
        let (b, c) = rest.split_at(8 * k / 32 / each);
        if matches!(i.ty2, Ty::U8 | Ty::S8) {
            integers(r, i, k, [d, a, b, c]);
        } else {
            floats(r, i, k, [d, a, b, c]);
        }
    }
}

/// Element `h` of a register of type `ty`.
fn float(ty: Ty, word: u32, h: usize) -> f32 {
    match ty {
        Ty::F16 => f16::from_bits((word >> (16 * h)) as u16).to_f32(),
        Ty::Bf16 => f32::from_bits(word >> (16 * h) << 16),
        // The lower bits of a tf32 are ignored.
        _ => f32::from_bits(word & 0xffff_e000),
    }
}

fn floats(r: &mut Regs, i: &Ins, k: usize, [d, a, b, c]: [&[u32]; 4]) {
    let each = 4 / i.ty2.bytes();
    let (mut fa, mut fb, mut acc) = ([[0f32; 16]; 16], [[0f32; 8]; 16], [[0f32; 8]; 16]);
    for l in 0..32 {
        let (g, t) = (l / 4, l % 4);
        for h in 0..each {
            for (n, s) in a.iter().enumerate() {
                fa[g + 8 * (n & 1)][t * each + h + 4 * each * (n >> 1)] = float(i.ty2, r.v32(*s)[l], h);
            }
            for (n, s) in b.iter().enumerate() {
                fb[t * each + h + 4 * each * n][g] = float(i.ty2, r.v32(*s)[l], h);
            }
        }
        for (n, s) in c.iter().enumerate() {
            let v = r.v32(*s)[l];
            if i.ty == Ty::F16 {
                (0..2).for_each(|h| acc[g + 8 * n][2 * t + h] = float(Ty::F16, v, h));
            } else {
                acc[g + 8 * (n >> 1)][2 * t + (n & 1)] = f32::from_bits(v);
            }
        }
    }
    for row in 0..16 {
        for x in 0..k {
            for n in 0..8 {
                acc[row][n] += fa[row][x] * fb[x][n];
            }
        }
    }
    for (n, s) in d.iter().enumerate() {
        let v: V32 = std::array::from_fn(|l| {
            let (g, t) = (l / 4, l % 4);
            if i.ty == Ty::F16 {
                let h = |j: usize| u32::from(f16::from_f32(acc[g + 8 * n][2 * t + j]).to_bits());
                h(0) | h(1) << 16
            } else {
                crate::float::total(acc[g + 8 * (n >> 1)][2 * t + (n & 1)])
            }
        });
        r.put32(*s, &v, !0);
    }
}

fn integers(r: &mut Regs, i: &Ins, k: usize, [d, a, b, c]: [&[u32]; 4]) {
    let byte = |v: u32, h: usize, signed: bool| {
        let v = (v >> (8 * h)) as u8;
        if signed { i32::from(v as i8) } else { i32::from(v) }
    };
    let (mut fa, mut fb, mut acc) = ([[0i32; 32]; 16], [[0i32; 8]; 32], [[0i32; 8]; 16]);
    for l in 0..32 {
        let (g, t) = (l / 4, l % 4);
        for h in 0..4 {
            for (n, s) in a.iter().enumerate() {
                fa[g + 8 * (n & 1)][t * 4 + h + 16 * (n >> 1)] = byte(r.v32(*s)[l], h, i.ty2.signed());
            }
            for (n, s) in b.iter().enumerate() {
                fb[t * 4 + h + 16 * n][g] = byte(r.v32(*s)[l], h, i.mods.alt);
            }
        }
        for (n, s) in c.iter().enumerate() {
            acc[g + 8 * (n >> 1)][2 * t + (n & 1)] = r.v32(*s)[l] as i32;
        }
    }
    for row in 0..16 {
        for n in 0..8 {
            let sum: i64 = (0..k).map(|x| i64::from(fa[row][x]) * i64::from(fb[x][n])).sum();
            let all = i64::from(acc[row][n]) + sum;
            acc[row][n] =
                if i.mods.sat { all.clamp(i32::MIN.into(), i32::MAX.into()) as i32 } else { all as i32 };
        }
    }
    for (n, s) in d.iter().enumerate() {
        let v: V32 = std::array::from_fn(|l| acc[l / 4 + 8 * (n >> 1)][2 * (l % 4) + (n & 1)] as u32);
        r.put32(*s, &v, !0);
    }
}

//! Accesses to memory. In: an instruction, addresses of the lanes that execute it. Out: bytes read or written, after every
//! check: inside an allocation, aligned, written before, no race.

use crate::block::{Block, Warp, cell};
use crate::fault::{Kind, Step, Wrong};
use crate::kernel::{Ins, Join, Op, Space, Ty};
use crate::memory::{LOCAL, PARAM, SHARED};
use crate::registers::{Regs, V64};
use crate::shadow::{Conflict, Who};
use half::{bf16, f16};

/// The space of a generic address.
pub(crate) fn space(at: u64) -> Space {
    match at >> 40 {
        1 => Space::Shared,
        2 => Space::Local,
        3 => Space::Param,
        _ => Space::Global,
    }
}

/// Addresses of an instruction's lanes.
pub(crate) fn addresses(r: &Regs, slot: u32, wide: bool, off: i64) -> V64 {
    let off = off as u64;
    if wide {
        r.v64(slot).map(|a| a.wrapping_add(off))
    } else {
        r.v32(slot).map(|a| u64::from(a).wrapping_add(off) & 0xffff_ffff)
    }
}

fn lanes(m: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |l| m >> l & 1 == 1)
}

/// The value of a register, whatever its width.
#[inline(always)]
fn value(r: &Regs, slot: u32, wide: bool, l: usize) -> u64 {
    if wide { r.v64(slot)[l] } else { u64::from(r.v32(slot)[l]) }
}

#[inline(always)]
fn written(p: *const u8, n: usize) -> bool {
    const ONES: u64 = 0x0101_0101_0101_0101;
    // SAFETY: the caller found `n` bytes inside a span; `n` is a power of two to 32.
    unsafe {
        match n {
            1 => *p == 1,
            2 => p.cast::<u16>().read_unaligned() == ONES as u16,
            4 => p.cast::<u32>().read_unaligned() == ONES as u32,
            _ => (0..n / 8).all(|j| p.add(8 * j).cast::<u64>().read_unaligned() == ONES),
        }
    }
}

/// What an access does to memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Does {
    Read,
    Write,
    Both,
}

impl Block<'_> {
    /// `ld` and `st`.
    pub fn access(&mut self, w: &mut Warp, i: &Ins, m: u32, pc: usize) -> Step<()> {
        let at = addresses(&w.regs, i.a, i.ty2.wide(), i.imm);
        if i.mods.space != Space::Generic {
            return self.in_space(w, i, m, pc, &at, i.mods.space);
        }
        for s in [Space::Global, Space::Shared, Space::Local, Space::Param] {
            let here = m & crate::alu::mask(|l| space(at[l]) == s);
            if here != 0 {
                let base = match s {
                    Space::Shared => SHARED,
                    Space::Local => LOCAL,
                    Space::Param => PARAM,
                    _ => 0,
                };
                self.in_space(w, i, here, pc, &at.map(|a| a.wrapping_sub(base)), s)?;
            }
        }
        Ok(())
    }

    fn in_space(&mut self, w: &mut Warp, i: &Ins, m: u32, pc: usize, at: &V64, s: Space) -> Step<()> {
        let n = i.ty.bytes();
        let total = n * i.list.1 as usize;
        let does = if i.op == Op::Ld { Does::Read } else { Does::Write };
        // Lanes that do not execute it read zeros from here, so that the loop over lanes needs no mask.
        let zeros = [0u64; 4];
        let mut places = [zeros.as_ptr().cast_mut().cast::<u8>(); 32];
        let mut before = 0u32;
        let aligned = |l: usize| at[l] & (total as u64 - 1) == 0;
        let together =
            s == Space::Shared && lanes(m).all(aligned) && self.shared_together(w, i, m, at, total, does);
        if together {
            // SAFETY: in bounds.
            lanes(m).for_each(|l| places[l] = unsafe { self.shared.as_mut_ptr().add(at[l] as usize) });
        }
        for l in lanes(if together { 0 } else { m }) {
            if !aligned(l) {
                return Err(Wrong::new(Kind::Misaligned, l, Some(at[l]), format!("{total} bytes")));
            }
            places[l] = match s {
                Space::Shared => self.shared_place(w, i, l, at, total, does, before)?,
                Space::Local => local_place(w, l, at[l], total, does, self.k.local)?,
                Space::Param => {
                    let o = at[l] as usize;
                    let inside = o + total <= self.launch.params.len() && does == Does::Read;
                    if !inside {
                        return Err(Wrong::new(Kind::OutOfBounds, l, Some(at[l]), "of the parameters"));
                    }
                    self.launch.params[o..].as_ptr().cast_mut()
                }
                _ => self.global_place(w, i, l, at, total, does, before)?,
            };
            before |= 1 << l;
        }
        if does == Does::Read {
            load(&mut w.regs, i, m, &places, n);
        } else {
            store(&w.regs, i, m, &places, n);
        }
        if self.launch.counted {
            self.count(pc, m, at, total, s);
        }
        Ok(())
    }

    pub(crate) fn count(&mut self, pc: usize, m: u32, at: &V64, bytes: usize, s: Space) {
        let (units, ideal) = match s {
            Space::Shared => crate::counts::passes(at, m, bytes as u64),
            Space::Global => crate::counts::sectors(at, m, bytes as u64),
            _ => return,
        };
        let c = &mut self.counts[pc];
        c.units += units;
        c.ideal += ideal;
    }

    /// Whether all lanes may do this to shared memory, as far as that is known without looking at each by itself.
    fn shared_together(&mut self, w: &Warp, i: &Ins, m: u32, at: &V64, n: usize, does: Does) -> bool {
        let last = self.shared_size.checked_sub(n);
        let inside = last.is_some_and(|last| lanes(m).all(|l| at[l] <= last as u64));
        let who = Who { warp: w.id, lane: 0, strong: i.mods.strong };
        inside
            && match does {
                Does::Read => self.shadow.read_together(&self.clocks, who, m, at, n),
                _ => self.shadow.write_together(&self.clocks, who, m, at, n),
            }
    }

    #[allow(clippy::too_many_arguments)]
    fn shared_place(
        &mut self,
        w: &Warp,
        i: &Ins,
        l: usize,
        at: &V64,
        n: usize,
        does: Does,
        before: u32,
    ) -> Step<*mut u8> {
        let o = at[l] as usize;
        let size = self.shared_size;
        if at[l] >= size as u64 || o + n > size {
            return Err(Wrong::new(
                Kind::OutOfBounds,
                l,
                Some(at[l]),
                format!("of {size} bytes of shared memory"),
            ));
        }
        let who = Who { warp: w.id, lane: l, strong: i.mods.strong || does == Does::Both };
        let judged = match does {
            Does::Read => self.shadow.read(&self.clocks, who, o, n),
            Does::Write => self.shadow.write(&self.clocks, who, o, n, false),
            Does::Both if !self.shadow.there(&self.clocks, o) => {
                Err(Conflict { kind: Kind::NeverWritten, with: String::new(), twin: None })
            }
            Does::Both => self.shadow.write(&self.clocks, who, o, n, false),
        };
        judged.or_else(|c| self.judge(w, i, c, l, at, before))?;
        // SAFETY: in bounds.
        Ok(unsafe { self.shared.as_mut_ptr().add(o) })
    }

    #[allow(clippy::too_many_arguments)]
    fn global_place(
        &mut self,
        w: &Warp,
        i: &Ins,
        l: usize,
        at: &V64,
        n: usize,
        does: Does,
        before: u32,
    ) -> Step<*mut u8> {
        let (s, o) = self.span(at[l], n as u64, l)?;
        let who = Who { warp: w.id, lane: l, strong: i.mods.strong || does == Does::Both };
        // SAFETY: `span` found the bytes inside the allocation.
        let mark = unsafe { s.written.add(o) };
        if does != Does::Write && !written(mark, n) {
            return Err(Wrong::new(
                Kind::NeverWritten,
                l,
                Some(at[l]),
                format!("byte {o} of its allocation"),
            ));
        }
        let shift = self.k.granule.1.trailing_zeros();
        for g in o >> shift..=(o + n - 1) >> shift {
            // SAFETY: as above.
            let cell = unsafe { cell(&s, g) };
            let judged = match does {
                Does::Read => self.view.read(&self.clocks, who, cell),
                _ => self.view.write(&self.clocks, who, cell),
            };
            judged.or_else(|c| self.judge(w, i, c, l, at, before))?;
        }
        if does != Does::Read {
            // SAFETY: as above.
            unsafe { std::ptr::write_bytes(mark, 1, n) };
        }
        if i.mods.strong && does != Does::Both {
            self.talk(w, at[l], does == Does::Read, does == Does::Write, i.mods.alt);
        }
        // SAFETY: as above.
        Ok(unsafe { s.data.add(o) })
    }

    /// What an atomic or a strong access tells other blocks and learns from them.
    fn talk(&mut self, w: &Warp, at: u64, learns: bool, tells: bool, fences: bool) {
        if fences && tells {
            self.clocks.fence(w.id, self.view.block);
        }
        let known = self.sync.entry(at).or_default();
        if tells {
            self.clocks.release(w.id, known);
        }
        if learns {
            self.clocks.acquire(w.id, known);
        }
    }

    /// A conflict, unless it is lanes of one instruction that write the same value to the same place.
    fn judge(&self, w: &Warp, i: &Ins, c: Conflict, l: usize, at: &V64, before: u32) -> Step<()> {
        if let (Some(k), Op::St) = (c.twin, i.op)
            && before >> k & 1 == 1
            && at[k] == at[l]
        {
            let v = |s: usize, l| value(&w.regs, self.k.lists[s], i.mods.wide, l);
            if i.range().all(|s| v(s, k) == v(s, l)) {
                return Ok(());
            }
            let detail = format!("lane {k} writes another value there at once");
            return Err(Wrong::new(c.kind, l, Some(at[l]), detail));
        }
        Err(Wrong::new(c.kind, l, Some(at[l]), c.with))
    }

    /// `atom` and `red`: lanes in order.
    pub fn atomic(&mut self, w: &mut Warp, i: &Ins, m: u32, pc: usize) -> Step<()> {
        let all = addresses(&w.regs, i.a, i.ty2.wide(), i.imm);
        let n = i.ty.bytes();
        let wide = i.ty.wide();
        let mut old = [0u64; 32];
        for l in lanes(m) {
            let mut at = all;
            let s = if i.mods.space == Space::Generic { space(all[l]) } else { i.mods.space };
            if at[l] & (n as u64 - 1) != 0 {
                return Err(Wrong::new(Kind::Misaligned, l, Some(at[l]), format!("{n} bytes")));
            }
            let p = match s {
                Space::Shared => {
                    if i.mods.space == Space::Generic {
                        at[l] -= SHARED;
                    }
                    self.shared_place(w, i, l, &at, n, Does::Both, 0)?
                }
                Space::Global => {
                    let p = self.global_place(w, i, l, &at, n, Does::Both, 0)?;
                    self.talk(w, at[l], true, true, i.mods.alt);
                    p
                }
                _ => {
                    return Err(Wrong::new(
                        Kind::OutOfBounds,
                        l,
                        Some(at[l]),
                        "an atomic of a thread's own memory",
                    ));
                }
            };
            let (b, c) = (value(&w.regs, i.b, wide, l), value(&w.regs, i.c, wide, l));
            let mut bytes = [0u8; 8];
            // SAFETY: `n` bytes are there, at most 8.
            unsafe { std::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), n) };
            old[l] = u64::from_le_bytes(bytes);
            let new = updated(i, old[l], b, c).to_le_bytes();
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(new.as_ptr(), p, n) };
        }
        if self.launch.counted {
            let s = if i.mods.space == Space::Shared { Space::Shared } else { Space::Global };
            self.count(pc, m, &all, n, s);
        }
        if i.d != 0 {
            if wide { w.regs.put64(i.d, &old, m) } else { w.regs.put32(i.d, &old.map(|v| v as u32), m) }
        }
        Ok(())
    }
}

fn local_place(w: &mut Warp, l: usize, at: u64, n: usize, does: Does, size: usize) -> Step<*mut u8> {
    if at >= size as u64 || at as usize + n > size {
        return Err(Wrong::new(Kind::OutOfBounds, l, Some(at), format!("of {size} bytes of local memory")));
    }
    let o = l * size + at as usize;
    let mark = &mut w.local_written[o..o + n];
    if does == Does::Read {
        if mark.contains(&0) {
            return Err(Wrong::new(Kind::NeverWritten, l, Some(at), "of the thread's own memory"));
        }
    } else {
        mark.fill(1);
    }
    Ok(w.local[o..].as_mut_ptr())
}

/// Registers from memory, extended to their width.
fn load(r: &mut Regs, i: &Ins, m: u32, places: &[*mut u8; 32], n: usize) {
    let (wide, signed) = (i.mods.wide, i.ty.signed());
    for (j, s) in i.range().enumerate() {
        let slot = r.lists[s];
        if slot == 0 {
            continue;
        }
        macro_rules! gather {
            ($t:ty, $s:ty) => {{
                // SAFETY: every place has the access's bytes behind it.
                let v = |l: usize| unsafe { places[l].add(j * n).cast::<$t>().read_unaligned() };
                if wide {
                    let o =
                        crate::alu::lanes64(|l| if signed { v(l) as $s as i64 as u64 } else { v(l) as u64 });
                    r.put64(slot, &o, m);
                } else {
                    let o =
                        crate::alu::lanes32(|l| if signed { v(l) as $s as i32 as u32 } else { v(l) as u32 });
                    r.put32(slot, &o, m);
                }
            }};
        }
        match n {
            1 => gather!(u8, i8),
            2 => gather!(u16, i16),
            4 => gather!(u32, i32),
            _ => gather!(u64, i64),
        }
    }
}

fn store(r: &Regs, i: &Ins, m: u32, places: &[*mut u8; 32], n: usize) {
    for (j, s) in i.range().enumerate() {
        let slot = r.lists[s];
        for l in lanes(m) {
            let v = value(r, slot, i.mods.wide, l);
            // SAFETY: every place has the access's bytes behind it.
            unsafe {
                let p = places[l].add(j * n);
                match n {
                    1 => p.write(v as u8),
                    2 => p.cast::<u16>().write_unaligned(v as u16),
                    4 => p.cast::<u32>().write_unaligned(v as u32),
                    _ => p.cast::<u64>().write_unaligned(v),
                }
            }
        }
    }
}

/// The new value of an atomic.
fn updated(i: &Ins, old: u64, b: u64, c: u64) -> u64 {
    let f = |v: u64| f32::from_bits(v as u32);
    let pair = |g: &dyn Fn(u16, u16) -> u16| {
        let one = |n: u32| u64::from(g((old >> n) as u16, (b >> n) as u16)) << n;
        one(0) | one(16)
    };
    let h = |x: u16, y: u16| f16::from_f32(f16::from_bits(x).to_f32() + f16::from_bits(y).to_f32()).to_bits();
    let n =
        |x: u16, y: u16| bf16::from_f32(bf16::from_bits(x).to_f32() + bf16::from_bits(y).to_f32()).to_bits();
    match (i.mods.join, i.ty) {
        (Join::Add, Ty::F32) => u64::from((f(old) + f(b)).to_bits()),
        (Join::Add, Ty::F64) => (f64::from_bits(old) + f64::from_bits(b)).to_bits(),
        (Join::Add, Ty::F16) => u64::from(h(old as u16, b as u16)),
        (Join::Add, Ty::Bf16) => u64::from(n(old as u16, b as u16)),
        (Join::Add, Ty::F16x2) => pair(&h),
        (Join::Add, Ty::Bf16x2) => pair(&n),
        (Join::Add, _) => old.wrapping_add(b),
        (Join::And, _) => old & b,
        (Join::Or, _) => old | b,
        (Join::Xor, _) => old ^ b,
        (Join::Exch, _) => b,
        (Join::Cas, _) => {
            if old == b {
                c
            } else {
                old
            }
        }
        (Join::Inc, _) => {
            if old >= b {
                0
            } else {
                old + 1
            }
        }
        (Join::Dec, _) => {
            if old == 0 || old > b {
                b
            } else {
                old - 1
            }
        }
        (Join::Min, Ty::S32) => {
            if (b as i32) < old as i32 {
                b
            } else {
                old
            }
        }
        (Join::Max, Ty::S32) => {
            if (b as i32) > old as i32 {
                b
            } else {
                old
            }
        }
        (Join::Min, Ty::S64) => {
            if (b as i64) < old as i64 {
                b
            } else {
                old
            }
        }
        (Join::Max, Ty::S64) => {
            if (b as i64) > old as i64 {
                b
            } else {
                old
            }
        }
        (Join::Min, _) => old.min(b),
        (Join::Max, _) => old.max(b),
        _ => old,
    }
}

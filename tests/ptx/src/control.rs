//! A warp's way through its code. Lanes that part at a branch become fragments; the fragment at the lowest instruction runs,
//! and fragments that meet are joined. Instructions of several lanes wait until the lanes that they name are there.

use crate::block::{Block, Fragment, State, Warp};
use crate::fault::{Kind, Step, Wrong};
use crate::kernel::{Ins, Join, Op, Ty};
use crate::registers::Regs;

/// Instructions that a warp may take before others have their turn.
const SLICE: u32 = 1 << 16;

type Ran = Result<(), (Box<Wrong>, u32)>;

/// Takes the fragment at the lowest instruction that does not wait, with all others there; true where it had waited in vain.
fn choose(w: &mut Warp) -> Option<(Fragment, bool)> {
    let forced = !w.fragments.iter().any(|f| !f.wait);
    let pc = w.fragments.iter().filter(|f| forced || !f.wait).map(|f| f.pc).min()?;
    let (mut mask, mut need) = (0, 0);
    w.fragments.retain(|f| {
        let taken = f.pc == pc && (forced || !f.wait);
        if taken {
            (mask, need) = (mask | f.mask, need | f.need);
        }
        !taken
    });
    Some((Fragment { pc, mask, wait: false, need }, forced))
}

fn lowest(w: &Warp) -> u32 {
    w.fragments.iter().filter(|f| !f.wait).map(|f| f.pc).min().unwrap_or(u32::MAX)
}

impl Block<'_> {
    /// Runs a warp until it waits, is done, or others should have their turn.
    pub fn warp(&mut self, w: &mut Warp, others: bool) -> Ran {
        let mut slice = SLICE;
        let k = self.k;
        while let Some((mut f, mut forced)) = choose(w) {
            let (mut pc, mut mask) = (f.pc, f.mask);
            let mut next = lowest(w);
            loop {
                if pc >= next {
                    w.fragments.push(Fragment { pc, mask, wait: false, need: 0 });
                    break;
                }
                let i = &k.code[pc as usize];
                let m = if i.guard == 0 { mask } else { mask & w.regs.pred(i.guard) };
                let count = &mut self.counts[pc as usize];
                count.warps += 1;
                count.lanes += u64::from(m.count_ones());
                if self.left == 0 {
                    let e = Wrong::new(
                        Kind::Timeout,
                        m.trailing_zeros() as usize & 31,
                        None,
                        "the block does not end",
                    );
                    return Err((e, pc));
                }
                self.left -= 1;
                slice = slice.saturating_sub(1);
                match i.op {
                    Op::Bra => {
                        let to = i.imm as u32;
                        if slice == 0 && others && to <= pc {
                            part(w, m, to);
                            part(w, mask & !m, pc + 1);
                            return Ok(());
                        }
                        if m == mask {
                            pc = to;
                            continue;
                        }
                        if m != 0 {
                            part(w, m, to);
                            mask &= !m;
                            next = next.min(to);
                        }
                    }
                    Op::Brx => {
                        self.indexed(w, i, m).map_err(|e| (e, pc))?;
                        part(w, mask & !m, pc + 1);
                        break;
                    }
                    Op::Exit => {
                        w.live &= !m;
                        mask &= !m;
                        if mask == 0 {
                            break;
                        }
                    }
                    Op::Bar
                    | Op::BarArrive
                    | Op::SyncWarp
                    | Op::Shfl
                    | Op::Vote
                    | Op::MatchAny
                    | Op::MatchAll
                    | Op::Redux
                    | Op::Mma
                    | Op::LdMatrix
                        if m != 0 =>
                    {
                        let (mut all, mut need) = (m, f.need);
                        w.fragments.retain(|f| {
                            let here = f.wait && f.pc == pc;
                            if here {
                                (all, need) = (all | f.mask, need | f.need);
                            }
                            !here
                        });
                        match self.together(w, i, all, pc) {
                            // Lanes that it waited for and that left without coming are missing.
                            Ok(true) if need & !all != 0 => return Err((self.missing(w, i, all), pc)),
                            Ok(true) => {
                                mask |= all;
                                (forced, f.need) = (false, 0);
                                if w.state != State::Ready {
                                    w.at = pc;
                                    part(w, mask, pc + 1);
                                    return Ok(());
                                }
                            }
                            Ok(false) if forced => return Err((self.missing(w, i, all), pc)),
                            Ok(false) => {
                                need |= self.named(w, i, all) & w.live & !self.leaving(w);
                                w.fragments.push(Fragment { pc, mask: all, wait: true, need });
                                part(w, mask & !all, pc + 1);
                                break;
                            }
                            Err(e) => return Err((e, pc)),
                        }
                    }
                    _ if m != 0 => self.step(w, i, m, pc as usize).map_err(|e| (e, pc))?,
                    _ => {}
                }
                pc += 1;
            }
        }
        w.state = State::Done;
        Ok(())
    }

    fn step(&mut self, w: &mut Warp, i: &Ins, m: u32, pc: usize) -> Step<()> {
        match i.op {
            Op::Ld | Op::St => self.access(w, i, m, pc),
            Op::Cvt | Op::CvtPair => {
                crate::convert::step(&mut w.regs, i, m, self.fast);
                Ok(())
            }
            Op::Atom => self.atomic(w, i, m, pc),
            Op::CpAsync => self.copy(w, i, m, pc),
            Op::CpCommit => {
                let mine = |p: &crate::block::Pending| m >> p.lane & 1 == 1;
                let (group, rest) = w.open.drain(..).partition(mine);
                w.open = rest;
                w.groups.push_back((m, group));
                Ok(())
            }
            Op::CpWait => {
                self.wait_copies(w, m, i.imm);
                Ok(())
            }
            Op::Fence => {
                if i.imm == 1 {
                    self.clocks.fence(w.id, self.view.block);
                }
                Ok(())
            }
            Op::ActiveMask => {
                w.regs.put32(i.d, &[m; 32], m);
                Ok(())
            }
            Op::IsSpace => {
                let a = *w.regs.v64(i.a);
                let is = crate::alu::mask(|l| crate::access::space(a[l]) == i.mods.space);
                w.regs.put_pred(i.d, is, m);
                Ok(())
            }
            Op::Trap => {
                let what = if i.imm == 1 { "an assertion failed" } else { "" };
                Err(Wrong::new(Kind::Trap, m.trailing_zeros() as usize, None, what))
            }
            Op::Nop => Ok(()),
            _ => {
                if crate::alu::step(&mut w.regs, i, m, self.fast) {
                    return Ok(());
                }
                let what = "this instruction has no meaning for this type";
                Err(Wrong::new(Kind::Unsupported, m.trailing_zeros() as usize, None, what))
            }
        }
    }

    /// Jumps by a table.
    fn indexed(&mut self, w: &mut Warp, i: &Ins, m: u32) -> Step<()> {
        let (index, table) = (*w.regs.v32(i.a), &self.k.tables[i.e as usize]);
        for l in (0..32).filter(|l| m >> l & 1 == 1) {
            let to = table.get(index[l] as usize).ok_or_else(|| {
                Wrong::new(
                    Kind::OutOfBounds,
                    l,
                    None,
                    format!("entry {} of a jump table of {}", index[l], table.len()),
                )
            })?;
            part(w, 1 << l, *to);
        }
        Ok(())
    }

    /// An instruction of several lanes: false where lanes that it names are not there yet.
    fn together(&mut self, w: &mut Warp, i: &Ins, m: u32, pc: u32) -> Step<bool> {
        let first = m.trailing_zeros() as usize;
        let members = self.named(w, i, m);
        if members & w.live & !m != 0 {
            return Ok(false);
        }
        if m & !members != 0 {
            let l = (m & !members).trailing_zeros() as usize;
            return Err(Wrong::new(
                Kind::Divergence,
                l,
                None,
                format!("the lane is not in its own mask {members:#x}"),
            ));
        }
        match i.op {
            Op::Bar | Op::BarArrive => self.barrier(w, i, m)?,
            Op::SyncWarp => self.clocks.sync_lanes(w.id, members, w.live),
            Op::Mma | Op::LdMatrix if m != !0 => {
                return Err(Wrong::new(Kind::Divergence, first, None, "the whole warp must execute it"));
            }
            Op::Mma => self.mma(w, i),
            Op::LdMatrix => self.ldmatrix(w, i, pc as usize)?,
            _ => crate::collective::step(&mut w.regs, i, m)?,
        }
        Ok(true)
    }

    /// Lanes that an instruction of several lanes names.
    fn named(&self, w: &Warp, i: &Ins, m: u32) -> u32 {
        let first = m.trailing_zeros() as usize & 31;
        match i.op {
            Op::Bar | Op::BarArrive | Op::Mma | Op::LdMatrix => !0,
            Op::SyncWarp => w.regs.v32(i.b)[first],
            _ => w.regs.v32(i.e)[first],
        }
    }

    /// Lanes whose next instruction is their last: they left, though not yet.
    fn leaving(&self, w: &Warp) -> u32 {
        let last = |f: &&Fragment| {
            let i = &self.k.code[f.pc as usize];
            i.op == Op::Exit && i.guard == 0
        };
        w.fragments.iter().filter(last).map(|f| f.mask).sum()
    }

    fn missing(&self, w: &Warp, i: &Ins, m: u32) -> Box<Wrong> {
        let waits: Vec<String> = w
            .fragments
            .iter()
            .map(|f| format!("{:#x} at `{}`", f.mask, self.k.texts[f.pc as usize]))
            .collect();
        let what = if matches!(i.op, Op::Bar | Op::BarArrive) { "of the warp" } else { "of its mask" };
        let detail = format!("lanes {m:#x} are there, the others {what} are not: {}", waits.join(", "));
        Wrong::new(Kind::Divergence, m.trailing_zeros() as usize, None, detail)
    }

    fn barrier(&mut self, w: &mut Warp, i: &Ins, m: u32) -> Step<()> {
        let l = m.trailing_zeros() as usize;
        let (number, expected) = (w.regs.v32(i.a)[l] as usize, w.regs.v32(i.b)[l]);
        if number >= 16 || expected % 32 != 0 {
            let what = format!("barrier {number} of {expected} threads");
            return Err(Wrong::new(Kind::Divergence, l, None, what));
        }
        let b = &mut self.barriers[number];
        if b.came > 0 && b.expected != expected {
            let what = format!("{expected} threads expected at barrier {number}, by others {}", b.expected);
            return Err(Wrong::new(Kind::Divergence, l, None, what));
        }
        b.expected = expected;
        b.came += 32;
        self.clocks.arrive(w.id, &mut b.arrivals);
        if i.op == Op::BarArrive {
            self.clocks.pass(w.id);
            return Ok(());
        }
        if i.mods.join != Join::None {
            b.held += (w.regs.pred(i.c) & m).count_ones();
            b.asked += m.count_ones();
        }
        b.waiting |= 1 << w.id;
        w.state = State::Barrier(number);
        Ok(())
    }
}

/// The result of a barrier that reduces predicates.
pub(crate) fn reduced(r: &mut Regs, i: &Ins, live: u32, held: u32, asked: u32) {
    if i.ty == Ty::Pred {
        let holds = if i.mods.join == Join::And { held == asked } else { held > 0 };
        r.put_pred(i.d, if holds { !0 } else { 0 }, live);
    } else {
        r.put32(i.d, &[held; 32], live);
    }
}

fn part(w: &mut Warp, mask: u32, pc: u32) {
    if mask != 0 {
        w.fragments.push(Fragment { pc, mask, wait: false, need: 0 });
    }
}

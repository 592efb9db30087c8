//! Who last wrote and read each granule of shared and global memory, and when. In: accesses. Out: whether the access is
//! ordered after those that it must not race with.

use crate::clocks::{Clocks, Order};
use crate::fault::Kind;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// An access: the warp in its block, the lane, and whether other threads may make such an access at the same time.
#[derive(Clone, Copy)]
pub(crate) struct Who {
    pub warp: usize,
    pub lane: usize,
    pub strong: bool,
}

/// What an access conflicts with.
#[derive(Debug)]
pub(crate) struct Conflict {
    pub kind: Kind,
    pub with: String,
    /// The other lane, where it is of the same warp and instant.
    pub twin: Option<usize>,
}

fn conflict(kind: Kind, with: String) -> Conflict {
    Conflict { kind, with, twin: None }
}

impl Order<'_> {
    /// True where all lanes are ordered after the write of this entry, which is not on its way.
    #[inline(always)]
    fn written(&self, e: u64, strong: bool) -> bool {
        e & FLIGHT == 0
            && (strong && e & ATOMIC != 0 || self.after((e >> 8 & 0xff) as usize, (e >> 32) as u32))
    }
}

const FLIGHT: u64 = 1 << 31;
const ATOMIC: u64 = 1 << 30;
/// Readers of one warp that are several lanes.
const MANY: u32 = 63;
/// Clocks of reads have 26 bits from this origin.
const LONG: u32 = 1 << 25;

/// What a write leaves in a granule.
#[inline(always)]
fn entry(c: &Clocks, who: Who) -> u64 {
    let flags = if who.strong { ATOMIC } else { 0 };
    u64::from(c.now(who.warp)) << 32 | flags | (who.warp as u64) << 8 | who.lane as u64
}

/// What a read of a lane leaves in a granule of its warp, at so many clocks since the origin.
#[inline(always)]
fn mark(read: &mut u32, now: u32, lane: usize) {
    let other = *read >> 6 == now && *read & MANY != lane as u32;
    *read = now << 6 | if other { MANY } else { lane as u32 };
}

/// Shadow of a block's shared memory.
pub(crate) struct SharedShadow {
    shift: u32,
    warps: usize,
    /// Clock, flags, warp, lane.
    writes: Vec<u64>,
    /// By warp and granule, for a warp reads neighbours at once: clock since the origin, lane.
    reads: Vec<u32>,
    origin: u32,
}

impl SharedShadow {
    pub fn new(bytes: usize, granule: usize, warps: usize, origin: u32) -> SharedShadow {
        let cells = bytes.div_ceil(granule);
        let shift = granule.trailing_zeros();
        SharedShadow { shift, warps, writes: vec![0; cells], reads: vec![0; cells * warps], origin }
    }

    /// Begins a block.
    pub fn start(&mut self, base: u32) {
        if base - self.origin > LONG {
            self.reads.fill(0);
            self.origin = base;
        }
    }

    #[inline(always)]
    fn cells(&self, at: usize, n: usize) -> std::ops::RangeInclusive<usize> {
        at >> self.shift..=(at + n - 1) >> self.shift
    }

    #[inline(always)]
    fn last_write(c: &Clocks, who: Who, e: u64) -> Result<bool, Conflict> {
        let clock = (e >> 32) as u32;
        if clock < c.base {
            return Ok(false);
        }
        if e & FLIGHT != 0 {
            return Err(conflict(Kind::InFlight, "a cp.async of it was not waited for".into()));
        }
        if who.strong && e & ATOMIC != 0 {
            return Ok(true);
        }
        let (warp, lane) = ((e >> 8 & 0xff) as usize, (e & 31) as usize);
        if warp == who.warp {
            if !c.lane_after(warp, who.lane, lane, clock) {
                let twin = (clock == c.now(warp)).then_some(lane);
                let with = format!("lane {lane} wrote it");
                return Err(Conflict { kind: Kind::WarpRace, with, twin });
            }
        } else if !c.after(who.warp, warp, clock) {
            let with = format!("warp {warp} lane {lane} wrote it and no barrier is between");
            return Err(conflict(Kind::SharedRace, with));
        }
        Ok(true)
    }

    /// True where the granule was written in this block.
    pub fn there(&self, c: &Clocks, at: usize) -> bool {
        (self.writes[at >> self.shift] >> 32) as u32 >= c.base
    }

    /// A read of bytes; they must have been written.
    #[inline(always)]
    pub fn read(&mut self, c: &Clocks, who: Who, at: usize, n: usize) -> Result<(), Conflict> {
        let now = c.now(who.warp) - self.origin + 1;
        let (cells, of_warp) = (self.cells(at, n), who.warp * self.writes.len());
        let reads = &mut self.reads[of_warp..of_warp + self.writes.len()][cells.clone()];
        for (r, e) in reads.iter_mut().zip(&self.writes[cells]) {
            if !Self::last_write(c, who, *e)? {
                return Err(conflict(Kind::NeverWritten, String::new()));
            }
            mark(r, now, who.lane);
        }
        Ok(())
    }

    /// A read by these lanes at once; false where not every byte is known to be there and ordered before for each of them: then each lane is
    /// to be asked by itself.
    pub fn read_together(&mut self, c: &Clocks, who: Who, lanes: u32, at: &[u64; 32], n: usize) -> bool {
        let now = c.now(who.warp) - self.origin + 1;
        let (cells, shift, order) = (self.writes.len(), self.shift, c.order(who.warp));
        let reads = &mut self.reads[who.warp * cells..][..cells];
        let mut before = None;
        for l in (0..32).filter(|l| lanes >> l & 1 == 1) {
            let (first, last) = (at[l] as usize >> shift, (at[l] as usize + n - 1) >> shift);
            if before == Some(at[l]) {
                reads[first..=last].fill(now << 6 | MANY);
                continue;
            }
            before = Some(at[l]);
            for (r, e) in reads[first..=last].iter_mut().zip(&self.writes[first..=last]) {
                if ((e >> 32) as u32) < c.base || !order.written(*e, who.strong) {
                    return false;
                }
                mark(r, now, l);
            }
        }
        true
    }

    /// A write by these lanes at once; false as above.
    pub fn write_together(&mut self, c: &Clocks, who: Who, lanes: u32, at: &[u64; 32], n: usize) -> bool {
        let order = c.order(who.warp);
        for l in (0..32).filter(|l| lanes >> l & 1 == 1) {
            for cell in self.cells(at[l] as usize, n) {
                let e = self.writes[cell];
                let written = (e >> 32) as u32 >= c.base && !order.written(e, who.strong);
                if written || self.readers(c, cell).any(|(v, clock, _)| !order.after(v, clock)) {
                    return false;
                }
                self.writes[cell] = entry(c, Who { lane: l, ..who });
            }
        }
        true
    }

    /// A write of bytes; `flight` where they come later.
    #[inline(always)]
    pub fn write(&mut self, c: &Clocks, who: Who, at: usize, n: usize, flight: bool) -> Result<(), Conflict> {
        for cell in self.cells(at, n) {
            Self::last_write(c, who, self.writes[cell])?;
            self.no_reader(c, who, cell)?;
            self.writes[cell] = entry(c, who) | if flight { FLIGHT } else { 0 };
        }
        Ok(())
    }

    /// Warps that read the granule in this block, each with the clock of its last read and the lane, or [`MANY`].
    #[inline(always)]
    fn readers(&self, c: &Clocks, cell: usize) -> impl Iterator<Item = (usize, u32, usize)> {
        let (base, origin) = (c.base, self.origin);
        let reads =
            self.reads.iter().skip(cell).step_by(self.writes.len().max(1)).take(self.warps).enumerate();
        reads.filter(|(_, r)| **r != 0).filter_map(move |(v, r)| {
            let clock = (origin - 1).wrapping_add(r >> 6);
            (clock >= base).then_some((v, clock, (r & MANY) as usize))
        })
    }

    #[inline(always)]
    fn no_reader(&self, c: &Clocks, who: Who, cell: usize) -> Result<(), Conflict> {
        for (v, clock, lane) in self.readers(c, cell) {
            if v == who.warp {
                if !c.lane_after(v, who.lane, lane, clock) {
                    return Err(conflict(Kind::WarpRace, format!("lane {lane} reads it")));
                }
            } else if !c.after(who.warp, v, clock) {
                let with = format!("warp {v} reads it and no barrier is between");
                return Err(conflict(Kind::SharedRace, with));
            }
        }
        Ok(())
    }

    /// Bytes of an asynchronous copy are there.
    pub fn land(&mut self, c: &Clocks, who: Who, at: usize, n: usize) {
        for cell in self.cells(at, n) {
            self.writes[cell] = entry(c, Who { strong: false, ..who });
        }
    }
}

const STRONG: u64 = 1 << 31;
const ONE: u64 = 0;
const BLOCK: u64 = 1 << 30;
const ALL: u64 = 2 << 30;
const KINDS: u64 = 3 << 30;

/// A launch, as races in global memory are judged.
#[derive(Clone, Copy)]
pub(crate) struct View {
    /// Accesses before this were before the launch.
    pub base: u32,
    /// Warps of a block.
    pub warps: usize,
    /// Number of the block.
    pub block: u32,
    /// True where blocks run at the same time.
    pub parallel: bool,
    /// False where there are more warps than the shadow can name.
    pub on: bool,
}

impl View {
    #[inline(always)]
    fn ordered(&self, c: &Clocks, who: Who, warp: u32, lane: usize, clock: u32) -> Result<(), Conflict> {
        let (block, v) = (warp / self.warps as u32, warp as usize % self.warps);
        if block != self.block {
            if c.acquires(who.warp) && c.acquired(who.warp, block, v, clock) {
                return Ok(());
            }
            let with = format!("block {block} warp {v} lane {lane} has it, too");
            return Err(conflict(Kind::GlobalRace, with));
        }
        if v == who.warp {
            if !c.lane_after(v, who.lane, lane, clock) {
                let twin = (clock == c.now(v)).then_some(lane);
                return Err(Conflict {
                    kind: Kind::WarpRace,
                    with: format!("lane {lane} has it, too"),
                    twin,
                });
            }
        } else if !c.after(who.warp, v, clock) {
            let with = format!("warp {v} lane {lane} has it, too, and no barrier is between");
            return Err(conflict(Kind::GlobalRace, with));
        }
        Ok(())
    }

    #[inline(always)]
    fn writer(&self, c: &Clocks, who: Who, e: u64) -> Result<(), Conflict> {
        let clock = (e >> 32) as u32;
        if clock < self.base || who.strong && e & STRONG != 0 {
            return Ok(());
        }
        self.ordered(c, who, (e >> 5 & 0x3ff_ffff) as u32, (e & 31) as usize, clock)
    }

    fn me(&self, who: Who) -> u64 {
        u64::from(self.block) * self.warps as u64 + who.warp as u64
    }

    /// A read of a granule, whose cells these are.
    #[inline(always)]
    pub fn read(&self, c: &Clocks, who: Who, cell: &[AtomicU64; 2]) -> Result<(), Conflict> {
        if !self.on {
            return Ok(());
        }
        self.writer(c, who, cell[0].load(Relaxed))?;
        if who.strong {
            return Ok(());
        }
        let r = cell[1].load(Relaxed);
        let now = u64::from(c.now(who.warp)) << 32;
        let mine = now | ONE | self.me(who) << 6 | who.lane as u64;
        let clock = (r >> 32) as u32;
        if r == mine {
            return Ok(());
        }
        let new = if clock < self.base {
            mine
        } else {
            match r & KINDS {
                ONE => {
                    let warp = (r >> 6 & 0xff_ffff) as u32;
                    let (block, v) = (warp / self.warps as u32, warp as usize % self.warps);
                    if block != self.block {
                        now | ALL
                    } else if v == who.warp {
                        let same = u64::from(clock) << 32 == now && r & 63 != who.lane as u64;
                        if same { mine | 63 } else { mine }
                    } else if c.after(who.warp, v, clock) {
                        mine
                    } else {
                        now.max(u64::from(clock) << 32) | BLOCK | u64::from(self.block)
                    }
                }
                BLOCK if r & 0x3fff_ffff == u64::from(self.block) => {
                    if (0..self.warps).all(|v| v == who.warp || c.after(who.warp, v, clock)) {
                        mine
                    } else {
                        now.max(u64::from(clock) << 32) | BLOCK | u64::from(self.block)
                    }
                }
                _ => now | ALL,
            }
        };
        cell[1].store(new, Relaxed);
        Ok(())
    }

    /// A write of a granule.
    #[inline(always)]
    pub fn write(&self, c: &Clocks, who: Who, cell: &[AtomicU64; 2]) -> Result<(), Conflict> {
        if !self.on {
            return Ok(());
        }
        let flag = if who.strong { STRONG } else { 0 };
        let mine = u64::from(c.now(who.warp)) << 32 | flag | self.me(who) << 5 | who.lane as u64;
        let old = if self.parallel {
            cell[0].swap(mine, Relaxed)
        } else {
            let old = cell[0].load(Relaxed);
            cell[0].store(mine, Relaxed);
            old
        };
        self.writer(c, who, old)?;
        let r = cell[1].load(Relaxed);
        let clock = (r >> 32) as u32;
        if clock < self.base {
            return Ok(());
        }
        let other = |with: &str| Err(conflict(Kind::GlobalRace, with.into()));
        match r & KINDS {
            ONE => self.ordered(c, who, (r >> 6 & 0xff_ffff) as u32, (r & 63) as usize, clock).map_err(
                |mut e| {
                    e.twin = None;
                    e
                },
            ),
            BLOCK if r & 0x3fff_ffff == u64::from(self.block) => {
                let after = |v| v == who.warp || c.after(who.warp, v, clock);
                if c.partial || (0..self.warps).all(after) {
                    Ok(())
                } else {
                    other("other warps read it and no barrier is between")
                }
            }
            _ if c.acquires(who.warp) => Ok(()),
            _ => other("other blocks read it"),
        }
    }
}

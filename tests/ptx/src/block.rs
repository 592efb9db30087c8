//! One block: its warps, shared memory and barriers. In: a launch and the number of a block. Out: its effect on memory, counts,
//! or its first fault. Warps run in a seeded order, each until it waits.

use crate::clocks::{Arrivals, Clocks, Known};
use crate::counts::Count;
use crate::fault::{Fault, Kind, Step, Wrong};
use crate::kernel::{Fill, Kernel, Special};
use crate::launch::Launch;
use crate::memory::Span;
use crate::registers::{Lanes, Regs};
use crate::shadow::{SharedShadow, View};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicU64;

/// Lanes of a warp that are at the same instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fragment {
    pub pc: u32,
    pub mask: u32,
    /// They wait for other lanes there.
    pub wait: bool,
    /// Lanes that were still to come when they began to wait.
    pub need: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Ready,
    Barrier(usize),
    Done,
}

/// An asynchronous copy that has not landed.
#[derive(Clone, Copy)]
pub(crate) struct Pending {
    pub lane: usize,
    pub to: usize,
    pub from: *const u8,
    pub bytes: usize,
    pub whole: usize,
}

pub(crate) struct Warp {
    pub id: usize,
    pub regs: Regs,
    pub fragments: Vec<Fragment>,
    pub live: u32,
    pub state: State,
    /// Instruction of the barrier at which the warp waits.
    pub at: u32,
    pub open: Vec<Pending>,
    pub groups: VecDeque<(u32, Vec<Pending>)>,
    pub local: Vec<u8>,
    pub local_written: Vec<u8>,
}

#[derive(Default, Clone)]
pub(crate) struct Barrier {
    pub waiting: u32,
    /// Threads expected, zero where all are; threads that came.
    pub expected: u32,
    pub came: u32,
    pub arrivals: Arrivals,
    /// Predicates of a reduction: how many held, of how many.
    pub held: u32,
    pub asked: u32,
}

/// Runs blocks of a launch one after another.
pub(crate) struct Block<'a> {
    pub k: &'a Kernel,
    pub launch: &'a Launch<'a>,
    pub spans: &'a [Span],
    /// Span of the last access.
    pub last: usize,
    pub shared: Vec<u8>,
    /// Bytes of shared memory that the launch has.
    pub shared_size: usize,
    pub shadow: SharedShadow,
    pub clocks: Clocks,
    pub view: View,
    pub counts: Vec<Count>,
    /// What was released at addresses of global memory.
    pub sync: HashMap<u64, Known>,
    pub barriers: Vec<Barrier>,
    pub left: u64,
    pub fast: bool,
    at: [u32; 3],
    warps: Vec<Warp>,
    /// Constants of the kernel and special registers that are the same in all blocks.
    template: Vec<(u32, Lanes)>,
    clock: u32,
}

impl<'a> Block<'a> {
    pub fn new(launch: &'a Launch<'a>, spans: &'a [Span], base: u32, parallel: bool) -> Block<'a> {
        let k = launch.kernel;
        let threads = launch.block.iter().product::<u32>() as usize;
        let warps = threads.div_ceil(32);
        let bytes = k.dynamic_at() + launch.dynamic;
        let all = u64::from(launch.blocks()) * warps as u64;
        let view = View { base, warps, block: 0, parallel, on: launch.races && all < 1 << 24 };
        let regs = |_| Regs::new(k.slots, k.preds, k.lists.clone());
        let warp = |id| Warp {
            id,
            regs: regs(id),
            fragments: vec![],
            live: 0,
            state: State::Done,
            at: 0,
            open: vec![],
            groups: VecDeque::new(),
            local: vec![0; k.local * 32],
            local_written: vec![0; k.local * 32],
        };
        let mut b = Block {
            k,
            launch,
            spans,
            last: 0,
            shared: vec![0; bytes.next_multiple_of(16)],
            shared_size: bytes,
            shadow: SharedShadow::new(bytes, k.granule.0, warps, base),
            clocks: Clocks::default(),
            view,
            counts: vec![Count::default(); k.code.len()],
            sync: HashMap::new(),
            barriers: vec![Barrier::default(); 16],
            left: 0,
            fast: crate::float::fast(),
            at: [0; 3],
            warps: (0..warps).map(warp).collect(),
            template: vec![],
            clock: base,
        };
        b.template = b.fills(false);
        for w in 0..b.warps.len() {
            let all = b.template.clone();
            all.iter().for_each(|(s, v)| *b.warps[w].regs.set32(*s) = v.0);
        }
        b
    }

    /// A time after all that ran here.
    pub fn end(&self) -> u32 {
        self.clock
    }

    /// Contents of constant slots: those of all blocks, or of this block.
    fn fills(&self, of_block: bool) -> Vec<(u32, Lanes)> {
        let mut out = vec![];
        for (fill, slot) in &self.k.fills {
            let mut wide = |v: u64| {
                // A 64-bit register holds its lanes' words one after the other.
                let words: Vec<u32> =
                    (0..64).map(|n| if n % 2 == 0 { v as u32 } else { (v >> 32) as u32 }).collect();
                out.push((*slot, Lanes(std::array::from_fn(|n| words[n]))));
                out.push((*slot + 1, Lanes(std::array::from_fn(|n| words[32 + n]))));
            };
            match fill {
                Fill::Special(s) => {
                    if matches!(s, Special::Ctaid(_) | Special::Sm | Special::Clock | Special::Clock64)
                        == of_block
                        && let Some(v) = self.special(*s)
                    {
                        if matches!(s, Special::Clock64 | Special::DynamicAt64) {
                            wide(u64::from(v))
                        } else {
                            out.push((*slot, Lanes([v; 32])))
                        }
                    }
                }
                _ if of_block => {}
                Fill::Word(v) => out.push((*slot, Lanes([*v; 32]))),
                Fill::Long(v) => wide(*v),
                Fill::Variable(n, off) => wide(self.launch.variables[*n].wrapping_add(*off)),
            }
        }
        out
    }

    fn special(&self, s: Special) -> Option<u32> {
        let l = self.launch;
        Some(match s {
            Special::Ntid(a) => l.block[a as usize],
            Special::Ctaid(a) => self.at[a as usize],
            Special::Nctaid(a) => l.grid[a as usize],
            Special::Warps => self.view.warps as u32,
            Special::Sm => self.view.block % 8,
            Special::DynamicAt | Special::DynamicAt64 => self.k.dynamic_at() as u32,
            Special::DynamicSize => l.dynamic as u32,
            Special::TotalShared => (self.k.dynamic_at() + l.dynamic) as u32,
            Special::Clock | Special::Clock64 => self.clock,
            Special::GridId => 0,
            _ => return None,
        })
    }

    /// Special registers of a warp's lanes.
    fn of_lanes(&mut self, w: usize) {
        let [x, y, _] = self.launch.block;
        let k = self.k;
        for (fill, slot) in &k.fills {
            let Fill::Special(s) = fill else { continue };
            let value = |l: u32| {
                let t = w as u32 * 32 + l;
                Some(match s {
                    Special::Tid(0) => t % x,
                    Special::Tid(1) => t / x % y,
                    Special::Tid(_) => t / x / y,
                    Special::Lane => l,
                    Special::Warp => w as u32,
                    Special::LaneEq => 1 << l,
                    Special::LaneLt => (1 << l) - 1,
                    Special::LaneLe => !0 >> (31 - l),
                    Special::LaneGt => !(!0 >> (31 - l)),
                    Special::LaneGe => !((1 << l) - 1),
                    _ => return None,
                })
            };
            if value(0).is_some() {
                *self.warps[w].regs.set32(*slot) = std::array::from_fn(|l| value(l as u32).unwrap_or(0));
            }
        }
    }

    fn start(&mut self, number: u32) {
        let [gx, gy, _] = self.launch.grid;
        self.at = [number % gx, number / gx % gy, number / gx / gy];
        self.view.block = number;
        self.clocks.start(self.view.warps, self.clock);
        self.shadow.start(self.clock);
        self.left = self.launch.budget;
        self.barriers.iter_mut().for_each(|b| *b = Barrier::default());
        let threads = self.launch.block.iter().product::<u32>() as usize;
        let fills = self.fills(true);
        let first = self.clock == self.view.base;
        for w in 0..self.warps.len() {
            let warp = &mut self.warps[w];
            fills.iter().for_each(|(s, v)| *warp.regs.set32(*s) = v.0);
            let n = (threads - w * 32).min(32);
            warp.live = if n == 32 { !0 } else { (1 << n) - 1 };
            warp.fragments = vec![Fragment { pc: 0, mask: warp.live, wait: false, need: 0 }];
            warp.state = State::Ready;
            warp.open.clear();
            warp.groups.clear();
            warp.local_written.fill(0);
            if first {
                self.of_lanes(w);
            }
        }
    }

    /// Runs the block of this number.
    pub fn run(&mut self, number: u32) -> Result<(), Box<Fault>> {
        self.start(number);
        let mut random = self.launch.seed ^ u64::from(number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        loop {
            let ready: Vec<usize> =
                (0..self.warps.len()).filter(|w| self.warps[*w].state == State::Ready).collect();
            if ready.is_empty() {
                break;
            }
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let w = ready[(random >> 33) as usize % ready.len()];
            let mut warp = std::mem::replace(&mut self.warps[w], Warp::empty());
            let ran = self.warp(&mut warp, ready.len() > 1);
            self.warps[w] = warp;
            ran.map_err(|(e, pc)| self.fault(*e, w, pc))?;
            (0..16).for_each(|b| self.open(b));
        }
        if let Some(w) = self.warps.iter().find(|w| w.state != State::Done) {
            let at = |w: &Warp| match w.state {
                State::Barrier(b) => format!("warp {} at barrier {b}", w.id),
                _ => format!("warp {} is gone", w.id),
            };
            let detail = self.warps.iter().map(at).collect::<Vec<_>>().join(", ");
            let e = Wrong { kind: Kind::Deadlock, lane: 0, address: None, detail };
            return Err(self.fault(e, w.id, w.at));
        }
        self.clock = self.clocks.end();
        Ok(())
    }

    fn fault(&self, e: Wrong, warp: usize, pc: u32) -> Box<Fault> {
        Box::new(Fault {
            kind: e.kind,
            kernel: self.k.name.clone(),
            instruction: self.k.text(pc as usize),
            pc: pc as usize,
            block: self.at,
            warp,
            lane: e.lane,
            address: e.address,
            detail: e.detail,
        })
    }

    /// Opens a barrier whose warps are all there.
    fn open(&mut self, number: usize) {
        let b = &self.barriers[number];
        if b.waiting == 0 {
            return;
        }
        let complete = if b.expected == 0 {
            self.warps.iter().all(|w| w.state == State::Done || b.waiting >> w.id & 1 == 1)
        } else {
            b.came >= b.expected
        };
        if !complete {
            return;
        }
        let b = std::mem::take(&mut self.barriers[number]);
        self.clocks.leave(b.waiting, &b.arrivals);
        self.clocks.partial |= b.expected != 0;
        for w in self.warps.iter_mut().filter(|w| b.waiting >> w.id & 1 == 1) {
            w.state = State::Ready;
            if b.asked > 0 {
                crate::control::reduced(&mut w.regs, &self.k.code[w.at as usize], w.live, b.held, b.asked);
            }
        }
    }

    /// The allocation that holds these bytes.
    #[inline(always)]
    pub fn span(&mut self, at: u64, n: u64, lane: usize) -> Step<(Span, usize)> {
        let inside = |s: &Span| at.wrapping_sub(s.base) < s.len && at - s.base + n <= s.len;
        if let Some(s) = self.spans.get(self.last)
            && inside(s)
        {
            return Ok((*s, (at - s.base) as usize));
        }
        let next = self.spans.partition_point(|s| s.base <= at);
        match next.checked_sub(1).map(|p| (p, self.spans[p])) {
            Some((p, s)) if inside(&s) => {
                self.last = p;
                Ok((s, (at - s.base) as usize))
            }
            near => {
                let detail = match near {
                    Some((_, s)) => format!(
                        "{n} bytes, {} past the start of the allocation before, which has {}",
                        at - s.base,
                        s.len
                    ),
                    None => format!("{n} bytes"),
                };
                Err(Wrong::new(Kind::OutOfBounds, lane, Some(at), detail))
            }
        }
    }
}

impl Warp {
    fn empty() -> Warp {
        Warp {
            id: 0,
            regs: Regs::new(0, 1, std::sync::Arc::new([])),
            fragments: vec![],
            live: 0,
            state: State::Done,
            at: 0,
            open: vec![],
            groups: VecDeque::new(),
            local: vec![],
            local_written: vec![],
        }
    }
}

/// The cells of a granule of global memory.
///
/// # Safety
/// `o` is inside the span.
#[inline(always)]
pub(crate) unsafe fn cell<'a>(s: &Span, granule: usize) -> &'a [AtomicU64; 2] {
    // SAFETY: a span has a cell for each byte, which is at least one for each granule; zeroed memory is two atomics.
    unsafe { &*s.shadow.add(2 * granule).cast::<[AtomicU64; 2]>() }
}

//! A model without weights whose answers tell whether it was asked rightly: the KV entry of a token is a hash of all tokens
//! up to it, read through the page tables as attention would read them, and the logits hash all entries of the sequence. A
//! wrong page, slot, position or order gives other tokens; a write where another reads panics.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use astrai_builders::Windows;
use astrai_runtime::Threads;

use crate::engine::{Model, ModelError, Sizes};
use crate::request::{Limits, Request};
use crate::sample::{History, Rules, Sampler};
use crate::scheduler::batch::StepBatch;
use crate::scheduler::plan::{ProgramKind, StepEntry, StepPlan};

/// What a step says that fails.
pub const LOST: &str = "out of memory";

/// After this token the logits are NaN.
pub const POISON: u32 = 6;

pub const SIZES: Sizes =
    Sizes { vocabulary: 37, page_size: 4, pages: 24, windows: None, positions: 64, tokens: 12, sequences: 6 };

/// The same with windowed layers, whose pages are few.
pub const WINDOWED: Sizes = Sizes { windows: Some(Windows { pages: 14, window: 7, every: false }), ..SIZES };

/// What a fake does at a step, counted from 0.
pub type Fault = Box<dyn FnMut(u64) -> Result<(), ModelError> + Send>;

pub struct Fake {
    sizes: Sizes,
    /// The programs it has; one of decode gives other numbers than one of prefill.
    programs: Vec<ProgramKind>,
    memory: Vec<u64>,
    /// The same entries in the pages of windowed layers.
    windowed: Vec<u64>,
    /// Of each program.
    logits: Vec<Vec<f32>>,
    steps: u64,
    fault: Fault,
    /// Steps that failed by the fault.
    failed: Arc<AtomicU64>,
    /// Whether it is lost with the first of these.
    mortal: bool,
    /// What a step takes at least.
    least: Duration,
    /// If there, each step waits for a message, or for the sender to go.
    gate: Option<Receiver<()>>,
    /// Whether it may write what others read, as a draft model does: the same again.
    rewrites: bool,
    pool: Option<Arc<dyn Threads>>,
}

fn mix(a: u64, b: u64) -> u64 {
    let x = (a ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    (x ^ x >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ x >> 32
}

fn fill(logits: &mut [f32], state: u64, last: u32) {
    for (v, x) in logits.iter_mut().enumerate() {
        *x = (mix(state, v as u64) >> 40) as f32 * 2f32.powi(-24) * 6.0 - 3.0;
    }
    if last == POISON {
        logits[3] = f32::NAN;
    }
}

/// A batch as lists.
struct Lists {
    input_ids: Vec<i32>,
    positions: Vec<i32>,
    starts: Vec<i32>,
    slots: Vec<i32>,
    tables: Vec<i32>,
    window_slots: Vec<i32>,
    window_tables: Vec<i32>,
    table: usize,
    lens: Vec<i32>,
    last: Vec<i32>,
}

impl Lists {
    fn of(batch: &StepBatch, table: usize) -> Lists {
        let [input_ids, positions, starts, slots, tables, lens, last] =
            ["input_ids", "positions", "starts", "slots", "tables", "lens", "last"].map(|n| batch.list(n));
        let [window_slots, window_tables] = ["window_slots", "window_tables"].map(|n| batch.list(n));
        Lists { input_ids, positions, starts, slots, tables, window_slots, window_tables, table, lens, last }
    }
}

impl Fake {
    pub fn new(sizes: Sizes) -> Fake {
        let entries = |pages| vec![u64::MAX; pages * sizes.page_size];
        let (memory, windowed) = (entries(sizes.pages), entries(sizes.windows.map_or(0, |w| w.pages)));
        Fake {
            sizes,
            programs: vec![ProgramKind::Mixed],
            memory,
            windowed,
            logits: vec![vec![]; 2],
            steps: 0,
            fault: Box::new(|_| Ok(())),
            failed: Arc::default(),
            mortal: false,
            least: Duration::ZERO,
            gate: None,
            rewrites: false,
            pool: None,
        }
    }

    pub fn faulty(sizes: Sizes, fault: impl FnMut(u64) -> Result<(), ModelError> + Send + 'static) -> Fake {
        Fake { fault: Box::new(fault), ..Fake::new(sizes) }
    }

    /// The same, of which one call in so many fails.
    pub fn failing_each(self, calls: u64) -> Fake {
        let mut left = calls;
        let fault = move |_| {
            left -= 1;
            if left > 0 {
                return Ok(());
            }
            left = calls;
            Err(LOST.into())
        };
        Fake { fault: Box::new(fault), ..self }
    }

    /// Where it counts its steps that failed by the fault.
    pub fn failed(&self) -> Arc<AtomicU64> {
        self.failed.clone()
    }

    /// The same, which is lost once a step failed.
    pub fn mortal(self) -> Fake {
        Fake { mortal: true, ..self }
    }

    /// The same, whose steps take so long at least.
    pub fn slow(self, least: Duration) -> Fake {
        Fake { least, ..self }
    }

    /// One that proposes tokens.
    pub fn draft(sizes: Sizes) -> Fake {
        Fake { rewrites: true, ..Fake::new(Sizes { windows: None, ..sizes }) }
    }

    /// One whose tokens are drawn by so many threads.
    pub fn threaded(sizes: Sizes, threads: usize) -> Fake {
        Fake {
            pool: Some(Arc::new(astrai_runtime::device::cpu::Pool::new(threads).unwrap())),
            ..Fake::new(sizes)
        }
    }

    /// One with a program of prefill and a program of decode.
    pub fn of_two_programs(sizes: Sizes) -> Fake {
        Fake { programs: vec![ProgramKind::Prefill, ProgramKind::Decode], ..Fake::new(sizes) }
    }

    pub fn separates_decode(&self) -> bool {
        self.programs.len() > 1
    }

    pub fn gated(sizes: Sizes, gate: Receiver<()>) -> Fake {
        Fake { gate: Some(gate), ..Fake::new(sizes) }
    }

    fn check(&self, batch: &Lists, of_answers: bool) {
        let Sizes { page_size, pages, positions, tokens, sequences, .. } = self.sizes;
        let n = batch.lens.len();
        let count = batch.input_ids.len();
        assert!(n > 0 && n <= sequences && count <= if of_answers { sequences } else { tokens });
        let lengths = (batch.starts.len(), batch.last.len(), batch.positions.len(), batch.slots.len());
        assert_eq!(lengths, (n + 1, n, count, count));
        assert_eq!(batch.tables.len(), n * batch.table);
        let windowed = if self.sizes.windows.is_some() { (count, n * batch.table) } else { (0, 0) };
        assert_eq!((batch.window_slots.len(), batch.window_tables.len()), windowed);
        let (mut users, mut window_users) = (HashMap::new(), HashMap::new());
        for (s, table) in batch.tables.chunks(batch.table).enumerate() {
            assert!(batch.lens[s] as usize <= positions);
            let used = (batch.lens[s] as usize).div_ceil(page_size);
            assert!(table[..used].iter().all(|p| (*p as usize) < pages));
            // A proposed token stands behind the sequence that it may continue.
            let before = s.checked_sub(1).filter(|b| {
                let first = batch.starts[s] as usize;
                batch.starts[s + 1] as usize == first + 1 && batch.positions[first] == batch.lens[*b] && {
                    let shared = (batch.lens[*b] as usize).div_ceil(page_size);
                    batch.tables[b * batch.table..][..shared] == table[..shared]
                }
            });
            let known = before.map_or(0, |b| (batch.lens[b] as usize).div_ceil(page_size));
            table[known..used].iter().for_each(|p| *users.entry(*p).or_insert(0) += 1);
            if let Some(w) = self.sizes.windows {
                let table = &batch.window_tables[s * batch.table..][..batch.table];
                assert!(table[..used].iter().all(|p| (*p as usize) < w.pages));
                let first = self.sees_from(batch.positions[batch.starts[s] as usize] as usize) / page_size;
                let seen = &table[known.max(first)..used];
                seen.iter().for_each(|p| *window_users.entry(*p).or_insert(0) += 1);
            }
        }
        for (slots, users) in [(&batch.slots, users), (&batch.window_slots, window_users)] {
            for slot in slots {
                let alone = self.rewrites || users[&(slot / page_size as i32)] == 1;
                assert!(alone, "a page is written that others read");
            }
        }
    }

    /// The first position that one sees in windowed layers.
    fn sees_from(&self, position: usize) -> usize {
        self.sizes.windows.map_or(position, |w| (position + 1).saturating_sub(w.window))
    }
}

/// What the KV entry of a token hashes beside those before it.
fn entry(token: u64, of_answers: bool) -> u64 {
    token | u64::from(of_answers) << 32
}

impl Fake {
    fn compute(&mut self, program: usize, batch: &StepBatch) {
        let of_answers = self.programs[program] == ProgramKind::Decode;
        let logits = &mut std::mem::take(&mut self.logits[program]);
        let (size, vocabulary) = (self.sizes.page_size, self.sizes.vocabulary);
        logits.resize(batch.sequences() * vocabulary, 0.0);
        let batch = &Lists::of(batch, self.sizes.positions.div_ceil(size));
        self.check(batch, of_answers);
        self.fill_all(batch, of_answers, logits, size);
        std::mem::swap(&mut self.logits[program], logits);
    }

    fn fill_all(&mut self, batch: &Lists, of_answers: bool, logits: &mut [f32], size: usize) {
        let vocabulary = self.sizes.vocabulary;
        for s in 0..batch.lens.len() {
            let table = &batch.tables[s * batch.table..][..batch.table];
            let slot = |position: usize| table[position / size] as usize * size + position % size;
            let (from, to) = (batch.starts[s] as usize, batch.starts[s + 1] as usize);
            assert_eq!(batch.lens[s], batch.positions[to - 1] + 1);
            assert_eq!(batch.last[s] as usize, to - 1);
            for row in from..to {
                let position = batch.positions[row] as usize;
                assert_eq!(
                    (batch.slots[row] as usize, position),
                    (slot(position), batch.positions[from] as usize + row - from)
                );
                let before = if position == 0 { 0 } else { self.memory[slot(position - 1)] };
                self.memory[slot(position)] = mix(before, entry(batch.input_ids[row] as u64, of_answers));
                if self.sizes.windows.is_some() {
                    let table = &batch.window_tables[s * batch.table..][..batch.table];
                    let windowed = |p: usize| table[p / size] as usize * size + p % size;
                    assert_eq!(batch.window_slots[row] as usize, windowed(position));
                    self.windowed[windowed(position)] = self.memory[slot(position)];
                    let mut seen = self.sees_from(position)..=position;
                    let same = |p: usize| self.windowed[windowed(p)] == self.memory[slot(p)];
                    assert!(seen.all(same), "what a window sees is gone at position {position}");
                }
            }
            let keys = (0..batch.lens[s] as usize).map(|p| self.memory[slot(p)]);
            let state = keys.fold(1, mix);
            fill(&mut logits[s * vocabulary..][..vocabulary], state, batch.input_ids[to - 1] as u32);
        }
    }
}

impl Model for Fake {
    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn plan(&self) -> StepPlan {
        let Sizes { positions, page_size, .. } = self.sizes;
        let batch = StepBatch::new(page_size, positions.div_ceil(page_size));
        StepPlan::new(self.programs.iter().map(|kind| StepEntry::new(*kind, batch.clone())).collect())
    }

    fn pool(&self) -> Option<Arc<dyn Threads>> {
        self.pool.clone()
    }

    fn lost(&self) -> bool {
        self.mortal && self.failed.load(Ordering::Relaxed) > 0
    }

    fn step<'m>(&'m mut self, plan: &StepPlan, logits: &mut Vec<&'m mut [f32]>) -> Result<(), ModelError> {
        if let Some(gate) = &self.gate {
            let _ = gate.recv_timeout(Duration::from_secs(20));
        }
        std::thread::sleep(self.least);
        if let Err(e) = (self.fault)(self.steps) {
            self.failed.fetch_add(1, Ordering::Relaxed);
            return Err(e);
        }
        self.steps += 1;
        assert!(plan.rows().count() <= self.sizes.sequences && plan.tokens() <= self.sizes.tokens);
        assert_eq!(plan.entries().len(), self.programs.len());
        for (memory, copies) in [&mut self.memory, &mut self.windowed].into_iter().zip(plan.copies()) {
            for &(from, to) in copies {
                let (size, from) = (self.sizes.page_size, from as usize * self.sizes.page_size);
                memory.copy_within(from..from + size, to as usize * size);
            }
        }
        for (program, entry) in plan.entries().iter().enumerate() {
            assert_eq!((entry.rows.len(), entry.kind), (entry.batch.sequences(), self.programs[program]));
            if !entry.rows.is_empty() {
                self.compute(program, &entry.batch);
            }
        }
        let ran = self.logits.iter_mut().zip(plan.entries()).filter(|(_, entry)| !entry.rows.is_empty());
        logits.extend(ran.map(|(l, _)| &mut l[..]));
        Ok(())
    }
}

/// What a choice of a request must be, computed alone and without pages: tokens up to and with the last, or `None` after
/// them if its logits become NaN.
pub fn expected(request: &Request, index: u32, eos: &[u32]) -> (Vec<u32>, bool) {
    expected_of(request, index, eos, false)
}

/// The same of a model with a program of decode.
pub fn expected_of(request: &Request, index: u32, eos: &[u32], separate_decode: bool) -> (Vec<u32>, bool) {
    let context = SIZES.context().max(request.prompt.len() + request.sampling.max_tokens.unwrap_or(0));
    let limits = Limits { vocabulary: SIZES.vocabulary, context };
    let Request { prompt, sampling, .. } = request.clone().checked(limits).unwrap();
    let mut ends = sampling.stop_ids.clone();
    if !sampling.ignore_eos {
        ends.extend_from_slice(eos);
    }
    let rules = Rules::new(sampling.clone(), &prompt, sampling.seed.unwrap_or(0), ends.clone());
    let mut history = History::new(rules, index);
    let (mut sampler, mut output) = (Sampler::default(), Vec::new());
    let mut logits = vec![0.0; SIZES.vocabulary];
    while output.len() < sampling.max_tokens.unwrap() {
        let tokens = prompt.iter().chain(&output);
        let entries = tokens.clone().enumerate().scan(0, |chain, (at, t)| {
            *chain = mix(*chain, entry(u64::from(*t), separate_decode && at >= prompt.len()));
            Some(*chain)
        });
        fill(&mut logits, entries.fold(1, mix), *tokens.last().unwrap());
        let Ok(sampled) = sampler.sample(&mut logits, &mut history) else { return (output, true) };
        output.push(sampled.token);
        if ends.contains(&sampled.token) {
            break;
        }
    }
    (output, false)
}

//! What a step of a server takes. In: a configuration, a schedule's ranks, hardware, what the server was told. Out: for the rows of a
//! step plan, predicted seconds. The programs are those of the server, planned for sequences of several lengths; numbers of tokens and
//! of sequences are symbols in them, and between two lengths the times of what grows with them lie on a line.

use crate::Refused;
use crate::estimate::even;
use crate::hardware::Hardware;
use crate::model::{body, time_among, touched};
use crate::schedule::{Schedule, forward, states};
use crate::server::names;
use crate::work::{Work, work};
use astrai_builders::{Cache, ModelConfig, Program, Windows};
use astrai_engine::model::served_fidelity;
use astrai_engine::serving::Room;
use astrai_ir::{Backend, Mesh, Symbol};
use astrai_passes::Fidelity;
use astrai_runtime::Compiled;
use astrai_serve::scheduler::Bounds;
use astrai_serve::scheduler::batch::StepBatch;
use astrai_serve::scheduler::plan::{ProgramKind, StepEntry, StepPlan};
use std::collections::HashMap;

/// Sequences' lengths that are planned are powers of this number.
const BETWEEN: u64 = 4;

/// Numbers of tokens and sequences whose times are kept, at most.
const KEPT: usize = 1 << 16;

/// The server's room.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    /// Bounds of a step.
    pub bounds: Bounds,
    /// Tokens of a sequence, at most.
    pub context: usize,
    /// Pages of a sequence, at most.
    pub table: usize,
    /// Whether pages are kept to be found again.
    pub prefix_cache: bool,
    /// Whether pages hold latents.
    pub latents: bool,
    /// Bytes of a rank's weights.
    pub weight_bytes: u64,
    /// Bytes of a rank's pages.
    pub kv_bytes: u64,
}

/// What a kernel takes at each length: seconds of computing, of memory, and beside them.
type Grown = Vec<[f64; 3]>;

/// A kernel whose time depends on how long sequences are.
struct Growing {
    attention: bool,
    launches: f64,
    /// Part of the lesser of computing and memory that does not hide behind the greater.
    apart: f64,
    times: Grown,
}

/// The kernels of a program for so many tokens and sequences.
struct Known {
    /// Seconds of those that take as long whatever the lengths are.
    rest: f64,
    /// The others.
    grown: Vec<Growing>,
}

/// Kernels of a plan, and its symbols.
type Planned = (Vec<Work>, Vec<Symbol>);

/// A program, planned for each length.
struct Lengths {
    kind: ProgramKind,
    lengths: Vec<u64>,
    plans: Vec<Planned>,
    known: HashMap<[u64; 2], Known>,
}

/// Seconds of steps.
pub struct StepCosts {
    /// The room.
    pub served: Served,
    hardware: Hardware,
    mesh: Mesh,
    programs: Vec<Lengths>,
    /// Logits that the server itself looks at to draw a token: none where its programs draw.
    vocabulary: f64,
}

/// The rows of an entry.
#[derive(Default)]
struct Rows {
    tokens: u64,
    sequences: u64,
    /// Keys that all tokens see together, and keys of all sequences.
    seen: [f64; 2],
}

impl StepCosts {
    /// Plans a server of this model.
    ///
    /// # Errors
    /// Ranks that do not divide, a model that does not fit; one line that names the flag or key.
    pub fn plan(
        config: &ModelConfig,
        s: &Schedule,
        room: &Room,
        hardware: &Hardware,
        backend: &dyn Backend,
    ) -> Result<StepCosts, Refused> {
        config.check_decoder()?;
        if s.ranks.pp * s.ranks.dp * s.ranks.ep > 1 {
            return Err(
                "--replay serves with ranks that share all sequences (--tp); leave --pp, --dp and --ep out"
                    .into(),
            );
        }
        let mesh = s.mesh(config)?;
        let fidelity = served_fidelity(config);
        let sequences = room.sequences as u64;
        let plan = |tokens: u64, cache: Cache, span: u64| {
            let program = Program::paged(tokens, room.rows() as u64, cache).drawing(backend.samples());
            forward(config, s.storage, backend, (&mesh, 0), &Program { span, ..program }, fidelity)
        };
        let tokens_of = |context| room.step_tokens(context, config, backend.target());
        // What the pages leave is known of a plan, whose pages do not matter.
        let longest = room.context.unwrap_or(config.max_positions);
        let table = longest.div_ceil(Cache::PAGE);
        let windows = Some(Windows { pages: table, window: 1, every: false });
        let any = Cache { page: Cache::PAGE, pages: table, table, windows };
        let first = plan(tokens_of(longest) as u64, any, longest as u64)?;
        let cost = first.cost().map_err(|e| e.to_string())?;
        let page_bytes = [false, true].map(|windowed| {
            let these = |name: &str| name.starts_with(Cache::WINDOWED) == windowed;
            states(&first.graph, &these) / table as u64
        });
        let taken = cost.weight_bytes.saturating_add(cost.arena_bytes);
        let free = (hardware.memory as u64).checked_sub(taken).ok_or_else(|| {
            let [need, have] = [taken as f64, hardware.memory].map(|n| n / 1e9);
            format!("weights and activations need {need:.1} GB of the {have:.1} GB of a rank")
        })?;
        let (cache, context) = room.pages(config, page_bytes, free)?;
        let tokens = tokens_of(context);
        if tokens < room.sequences {
            return Err(format!("--max-batch-tokens {tokens}: each of {sequences} sequences takes one"));
        }
        if context <= Cache::PAGE {
            let page = Cache::PAGE;
            return Err(format!(
                "--max-model-len {context}: no more than a page of {page} tokens, and steps are planned for shorter sequences, too; give {} or more",
                page + 1
            ));
        }
        // One is near the longest, whose kernels others may not have.
        let (longest, page) = (context as u64, Cache::PAGE as u64);
        let near = (longest - longest / 8).div_ceil(page) * page;
        let mut lengths: Vec<u64> = std::iter::successors(Some(page), |n| Some(n * BETWEEN))
            .take_while(|n| *n < longest)
            .chain([near.min(longest), longest])
            .collect();
        lengths.sort_unstable();
        lengths.dedup();
        let all = |tokens: u64| -> Result<Vec<Compiled>, Refused> {
            let of = |n: u64| Cache { table: (n as usize).div_ceil(Cache::PAGE), ..cache };
            lengths.iter().map(|n| plan(tokens, of(*n), *n)).collect()
        };
        let first = all(tokens as u64)?;
        let mut programs = vec![(ProgramKind::Mixed, first)];
        if fidelity != Fidelity::Exact && tokens > room.sequences {
            // As an engine does: another program where decode has other kernels.
            let decode = all(room.rows() as u64)?;
            let differ = programs[0].1.iter().zip(&decode).any(|(a, b)| names(a).ne(names(b)));
            if differ {
                programs[0].0 = ProgramKind::Prefill;
                programs.push((ProgramKind::Decode, decode));
            }
        }
        let served = Served {
            bounds: Bounds {
                page_size: cache.page,
                pages: cache.pages,
                windows: cache.windows,
                tokens,
                sequences: room.sequences,
                rows: room.rows(),
                proposed: 0,
            },
            context,
            table: cache.table,
            prefix_cache: room.prefix_cache,
            latents: config.caches_latents(),
            weight_bytes: cost.weight_bytes,
            kv_bytes: page_bytes[0] * cache.pages as u64
                + page_bytes[1] * cache.windows.map_or(cache.pages, |w| w.pages) as u64,
        };
        let programs: Result<Vec<Lengths>, Refused> =
            programs.into_iter().map(|(kind, plans)| Lengths::of(kind, &plans, &lengths)).collect();
        let programs = programs?;
        let vocabulary = if backend.samples() { 0.0 } else { config.vocab_size as f64 };
        Ok(StepCosts { served, hardware: hardware.clone(), mesh, programs, vocabulary })
    }

    /// A plan without rows, for a scheduler.
    pub fn plan_of_step(&self) -> StepPlan {
        let Served { bounds, table, latents, .. } = self.served;
        let batch = || match latents {
            true => StepBatch::of_latents(bounds.page_size, table),
            false => StepBatch::new(bounds.page_size, table),
        };
        StepPlan::new(self.programs.iter().map(|p| StepEntry::new(p.kind, batch())).collect())
    }

    /// Seconds of a step.
    ///
    /// # Errors
    /// A size overflows.
    pub fn seconds(&mut self, plan: &StepPlan) -> Result<f64, Refused> {
        // Tokens are drawn from the logits of every row that is whole.
        let rows = plan.rows().filter(|row| row.complete).count() as f64;
        let kernels = &self.hardware.kernels;
        let (usual, mut all) = (kernels.usual, kernels.turn + rows * self.vocabulary * kernels.logit);
        for (entry, program) in plan.entries().iter().zip(&mut self.programs) {
            let mut rows = Rows::default();
            for row in &entry.rows {
                let (n, at) = (row.tokens as f64, row.at as f64);
                rows.tokens += row.tokens as u64;
                rows.sequences += 1;
                // The last token sees all keys, each before it one fewer.
                rows.seen[0] += n * (at - (n - 1.0) / 2.0);
                rows.seen[1] += at;
            }
            if rows.tokens > 0 {
                let pages = self.served.bounds.pages as u64;
                let program = program.seconds(&rows, (&self.hardware, &self.mesh), pages)?;
                all += self.hardware.kernels.step + usual * program;
            }
        }
        Ok(all)
    }
}

impl Lengths {
    /// A server has the kernels of its longest sequences: plans for others count where they have the same.
    fn of(kind: ProgramKind, plans: &[Compiled], lengths: &[u64]) -> Result<Lengths, Refused> {
        let mut all: Vec<(u64, Planned)> =
            lengths.iter().zip(plans).map(|(n, p)| (*n, (work(p), p.plan.symbols.clone()))).collect();
        let shape = |works: &[Work]| works.iter().map(|w| (w.origin.clone(), w.form)).collect::<Vec<_>>();
        let longest = all.last().map(|(_, (works, _))| shape(works)).unwrap_or_default();
        all.retain(|(_, (works, _))| shape(works) == longest);
        if all.len() < 2 {
            let longest = lengths.last().copied().unwrap_or(0);
            return Err(format!(
                "--max-model-len {longest}: no shorter sequences have the same kernels; give another length"
            ));
        }
        let (lengths, plans) = all.into_iter().unzip();
        Ok(Lengths { kind, lengths, plans, known: HashMap::new() })
    }

    fn seconds(&mut self, rows: &Rows, on: (&Hardware, &Mesh), pages: u64) -> Result<f64, Refused> {
        let key = [rows.tokens, rows.sequences];
        if !self.known.contains_key(&key) {
            if self.known.len() >= KEPT {
                self.known.clear();
            }
            let known = self.know(key, on, pages)?;
            self.known.insert(key, known);
        }
        let known = &self.known[&key];
        let means = [rows.seen[0] / rows.tokens as f64, rows.seen[1] / rows.sequences as f64];
        let [seen, held] = means.map(|n| place(&self.lengths, n));
        let grown = known.grown.iter().map(|g| {
            let compute = between(&g.times, if g.attention { seen } else { held }, 0);
            let memory = between(&g.times, held, 1);
            g.launches * (body(compute, [memory, 0.0], g.apart) + between(&g.times, held, 2))
        });
        Ok(known.rest + grown.sum::<f64>())
    }

    /// Times of all kernels at each length.
    fn know(
        &self,
        [tokens, sequences]: [u64; 2],
        (hardware, mesh): (&Hardware, &Mesh),
        pages: u64,
    ) -> Result<Known, Refused> {
        let mut known = Known { rest: 0.0, grown: vec![] };
        let mut runs = Vec::with_capacity(self.lengths.len());
        for ((works, symbols), length) in self.plans.iter().zip(&self.lengths) {
            let value = move |name: &str| match name {
                "tokens" => Some(tokens),
                "sequences" => Some(sequences),
                // Pages in use.
                "context" => Some((sequences * length.div_ceil(Cache::PAGE as u64)).clamp(1, pages)),
                name => symbols.iter().find(|s| &*s.name == name).map(|s| s.max),
            };
            runs.push((works, symbols, value, touched(works, &even(symbols, &value, 1.0))?));
        }
        for at in 0..self.plans[0].0.len() {
            let (mut times, mut apart): (Grown, f64) = (Vec::with_capacity(self.lengths.len()), 0.0);
            for (works, symbols, value, among) in &runs {
                let t = time_among(&works[at], *among, hardware, mesh, &even(symbols, value, 1.0))?;
                times.push([t.compute, t.all_memory(), t.fixed + t.communication()]);
                apart = t.apart;
            }
            let (w, first) = (&self.plans[0].0[at], times[0]);
            let launches = w.launches as f64;
            if times.iter().all(|t| *t == first) {
                known.rest += launches * (body(first[0], [first[1], 0.0], apart) + first[2]);
            } else {
                let attention = w.form == "attention";
                known.grown.push(Growing { attention, launches, apart, times });
            }
        }
        Ok(known)
    }
}

/// Between which two lengths a number of keys lies, and how far from the first.
fn place(lengths: &[u64], n: f64) -> (usize, f64) {
    let last = lengths.len().saturating_sub(2);
    let i = lengths.partition_point(|l| *l as f64 <= n).saturating_sub(1).min(last);
    let [a, b] = [i, i + 1].map(|i| lengths.get(i).copied().unwrap_or(lengths[0]) as f64);
    (i, if b > a { (n - a) / (b - a) } else { 0.0 })
}

/// The time on the line there, and none below zero.
fn between(grown: &Grown, (i, part): (usize, f64), which: usize) -> f64 {
    let a = grown[i][which];
    let b = grown.get(i + 1).map_or(a, |g| g[which]);
    (a + (b - a) * part).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::tests::{LLAMA, costs};

    #[test]
    fn a_step_takes_what_its_plan_takes() {
        let mut costs = costs(LLAMA, 8, 64, false);
        let rows = |tokens: u64, at: f64| Rows { tokens, sequences: tokens, seen: [at * tokens as f64; 2] };
        let mut seconds = |rows: &Rows| {
            let (hardware, mesh) = (costs.hardware.clone(), costs.mesh.clone());
            costs.programs[0].seconds(rows, (&hardware, &mesh), 64).unwrap()
        };
        let [short, middle, long] = [16.0, 72.0, 128.0].map(|at| seconds(&rows(8, at)));
        assert!(short < middle && middle < long, "{short} {middle} {long}");
        assert!(((short + long) / 2.0 / middle - 1.0).abs() < 0.2);
        assert!(seconds(&rows(8, 64.0)) > seconds(&rows(1, 64.0)));
    }
}

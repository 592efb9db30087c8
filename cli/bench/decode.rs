//! `astrai bench decode`: steps of one token a sequence over paged keys and values, as the peer's script measures them.

use super::breakdown::breakdown;
use super::{Bench, Runs, beside, costs, draw};
use crate::failure::Failure;
use crate::measure::{once, rounded};
use crate::progress::Progress;
use crate::run::profile_table;
use astrai_builders::Cache;
use astrai_engine::greedy::choose;
use astrai_engine::machine::Machine;
use astrai_engine::model::{Model, served_fidelity};
use astrai_engine::programs::Programs;
use astrai_runtime::Session;
use astrai_serve::cache::KvCache;
use astrai_serve::paged::TOKENS;
use astrai_serve::pages::Page;
use astrai_serve::scheduler::batch::StepBatch;
use astrai_serve::scheduler::plan::ProgramKind;
use serde_json::{Value, json};
use std::io::Write;

/// The peer's default of `--new`.
const NEW: u64 = 32;

/// Most tokens of a prompt in one run.
const CHUNK: u64 = 512;

/// Sequences that are continued greedily.
struct Decoding {
    programs: Vec<(ProgramKind, Session)>,
    batch: StepBatch,
    /// Pages of each sequence.
    pages: Vec<Vec<Page>>,
    next: Vec<u32>,
    /// Ids, and pages of all sequences.
    bounds: [usize; 2],
}

impl Decoding {
    /// Takes the prompts in, a chunk of one after the other.
    fn prefill(&mut self, prompt: usize, chunk: usize) -> Result<(), Failure> {
        let [vocab, _] = self.bounds;
        for s in 0..self.pages.len() {
            for first in (0..prompt).step_by(chunk) {
                let at = (first..prompt.min(first + chunk)).map(|i| (s * prompt + i) as u64);
                let tokens: Vec<u32> = at.map(|i| (draw(i) % vocab as u64) as u32).collect();
                self.batch.clear();
                self.batch.push(&tokens, first, &self.pages[s], self.bounds)?;
                self.run(ProgramKind::prefills)?;
            }
            self.next[s] = self.best(ProgramKind::prefills, 0)?;
        }
        Ok(())
    }

    /// `new` tokens of every sequence behind the first `prompt`.
    fn decode(&mut self, prompt: usize, new: usize) -> Result<(), Failure> {
        for done in prompt..prompt + new {
            self.batch.clear();
            for (pages, next) in self.pages.iter().zip(&self.next) {
                self.batch.push(&[*next], done, pages, self.bounds)?;
            }
            self.run(ProgramKind::decodes)?;
            for s in 0..self.pages.len() {
                self.next[s] = self.best(ProgramKind::decodes, s)?;
            }
        }
        Ok(())
    }

    fn run(&mut self, computes: fn(ProgramKind) -> bool) -> Result<(), Failure> {
        let session = session(&mut self.programs, computes)?;
        let inputs = self.batch.inputs(session.inputs());
        // Of a program that draws tokens nothing else is wanted.
        let logits = session.program().graph.output(TOKENS).is_none();
        Ok(session.execute_rows(&inputs, Some(&|_| logits))?)
    }

    /// What every step reads.
    fn weights(&self) -> Vec<&[u8]> {
        let found = self.programs.iter().find(|(kind, _)| kind.decodes());
        found.map_or(vec![], |(_, session)| session.weights())
    }

    /// The token of the largest logit of a row of the last run.
    fn best(&mut self, computes: fn(ProgramKind) -> bool, row: usize) -> Result<u32, Failure> {
        let [vocab, _] = self.bounds;
        let session = session(&mut self.programs, computes)?;
        if let Some(drawn) = session.result_of(TOKENS) {
            let token = drawn.as_chunks::<4>().0.get(row).map(|b| u32::from_le_bytes(*b));
            return Ok(token
                .filter(|t| (*t as usize) < vocab)
                .ok_or("the logits are not all finite numbers")?);
        }
        let logits = session.floats_mut(0).and_then(|all| all.chunks_exact(vocab).nth(row));
        let logits = logits.ok_or("the program's first result is not the logits")?;
        let best = choose(logits).ok_or("the logits are not all finite numbers")?;
        Ok(best.token as u32)
    }
}

/// The session of the program that computes tokens of prompts, or of outputs.
fn session(
    programs: &mut [(ProgramKind, Session)],
    computes: fn(ProgramKind) -> bool,
) -> Result<&mut Session, Failure> {
    let found = programs.iter_mut().find(|(kind, _)| computes(*kind));
    Ok(found.map(|(_, session)| session).ok_or("the model has no program for these tokens")?)
}

impl Bench {
    pub(super) fn decode(&self, machine: &Machine, out: &mut dyn Write) -> Result<(), Failure> {
        let new = self.new.unwrap_or(NEW);
        let (config, batch, seq) = self.shape(new)?;
        let (storage, vocab) = (self.machine.storage(), config.vocab_size);
        let table = ((seq + new) as usize).div_ceil(Cache::PAGE);
        let cache = Cache { page: Cache::PAGE, pages: table * batch as usize, table, windows: None };
        let chunk = seq.min(CHUNK);
        let fidelity = self.fidelity.asked().unwrap_or_else(|| served_fidelity(&config));
        let sizes = [chunk.max(batch), batch];
        let programs = Programs::plan(&config, sizes, cache, storage, machine, fidelity)?;
        // The least that a step takes: one token of each sequence.
        let size = |s: &str| match s {
            "context" => Some(cache.pages as u64),
            _ => matches!(s, "tokens" | "sequences").then_some(batch),
        };
        let costs = costs(programs.decode(), &size)?;
        let expected = self.predicted(programs.decode(), &size, new as f64)?;
        let kv = KvCache::new(&config, cache, storage, &machine.device)?;
        let model = Model::fresh(config, vec![], 0);
        let mut programs =
            Progress::during("making weights", |set| programs.start(&model, kv.buffers(), set))?;
        // Neighbours in a sequence are far apart in memory, as after many requests.
        let page = |s: usize, i: usize| (i * batch as usize + s) as Page;
        let pages = (0..batch as usize).map(|s| (0..table).map(|i| page(s, i)).collect()).collect();
        let inputs = session(&mut programs, ProgramKind::prefills)?.inputs();
        let batched = StepBatch::of_program(inputs, cache.page, cache.table);
        let (next, bounds) = (vec![0; batch as usize], [vocab, cache.pages]);
        let mut decoding = Decoding { programs, batch: batched, pages, next, bounds };
        decoding.prefill(seq as usize, chunk as usize)?;
        let first = decoding.next.clone();
        let mut runs = Runs::new(machine);
        let seconds = runs.repeat(self.repeat, &mut decoding, Decoding::weights, |decoding, _| {
            decoding.next.copy_from_slice(&first);
            decoding.decode(seq as usize, new as usize)
        })?;
        let mut line = self.line(machine, &seconds, runs.peak_rss_mb());
        let tokens = (batch * new) as f64;
        line.insert("tokens_per_s".into(), json!(rounded(tokens / seconds.median, 2)));
        line.extend(beside(expected, &seconds));
        line.insert("new".into(), json!(new));
        line.extend(runs.floor(&[(&costs, new as f64)], storage));
        writeln!(out, "{}", Value::Object(line))?;
        if self.profile {
            session(&mut decoding.programs, ProgramKind::decodes)?.start_profile();
            let (_, seconds) = once(|| decoding.decode(seq as usize, new as usize))?;
            let rows = session(&mut decoding.programs, ProgramKind::decodes)?
                .take_profile()
                .unwrap_or_default()
                .by_kernel();
            eprint!("\n{}", profile_table(&rows));
            if let Some(peaks) = runs.last() {
                eprint!("\n{}", breakdown(&[(None, &rows)], peaks, storage, seconds));
            }
        }
        Ok(())
    }
}

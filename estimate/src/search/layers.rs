//! A group of ranks by two layers of each kind. In: a configuration, a schedule, the most sequences of a piece. Out: seconds and bytes of any
//! number of layers, stages and sequences: the first layer of a kind stands for itself, the second for all others.

use crate::Refused;
use crate::estimate::{even, seen, sent};
use crate::hardware::Hardware;
use crate::lengths::Lengths;
use crate::model::{Sizes, message, time};
use crate::schedule::{Memory, Purpose, Schedule, experts, saved, stage};
use crate::server::{in_windows, windows};
use crate::work::{Message, Work, work};
use crate::zero::{gathering, summed};
use astrai_builders::{Cache, ModelConfig, Ranks};
use astrai_ir::shard::{STAGES, Traffic};
use astrai_ir::{Backend, Dim, Mesh, Symbol};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// The plan of a group.
pub struct Layers {
    config: ModelConfig,
    /// For each layer of the model the layer of the plan that stands for it.
    stands: Vec<usize>,
    programs: Vec<(&'static str, Vec<Work>, Vec<Symbol>)>,
    /// Bytes of weights outside of layers that come first and last, and of each planned layer: dense ones, and of experts.
    weights: ([u64; 2], Vec<[u64; 2]>),
    /// Bytes that the backward pass keeps of each planned layer at the most sequences.
    saved: Vec<u64>,
    /// Other bytes of activations there.
    scratch: u64,
    /// Keys and values of a token and layer.
    kv: f64,
    /// Whether planned layers see windows, of which pages are kept.
    windowed: Vec<bool>,
    /// The most sequences.
    most: u64,
    /// States of training beside a weight, bytes for each of the weight's: gradients, optimiser.
    states: [u64; 2],
    /// Of so many sequences and a window the part of the keys that there are, as far as they were asked for.
    parts: RefCell<BTreeMap<(u64, Option<u64>), f64>>,
}

impl Layers {
    /// Plans the group's programs for up to `most` sequences a piece.
    pub fn plan(
        config: &ModelConfig,
        s: &Schedule,
        most: u64,
        backend: &dyn Backend,
    ) -> Result<Layers, Refused> {
        let (kinds, of) = config.layer_kinds();
        let mut first: Vec<Option<usize>> = vec![None; kinds.len()];
        let (mut layers, mut stands): (Vec<_>, Vec<usize>) = (Vec::new(), Vec::new());
        let mut second: Vec<Option<usize>> = vec![None; kinds.len()];
        for kind in of {
            let place = if first[kind].is_none() { &mut first[kind] } else { &mut second[kind] };
            stands.push(*place.get_or_insert_with(|| {
                layers.push(kinds[kind].clone());
                layers.len() - 1
            }));
        }
        let short = ModelConfig { num_layers: layers.len(), layers, ..config.clone() };
        let alone = Schedule {
            ranks: Ranks { pp: 1, dp: s.ranks.dp, ep: s.ranks.ep, tp: s.ranks.tp },
            // Of several pieces gradients are states, of each weight as many bytes, and not among the values between kernels.
            micro: if s.purpose == Purpose::Train { 2 } else { 1 },
            zero: 0,
            interleave: 1,
            ..s.clone()
        };
        let mesh = alone.mesh(&short)?;
        let planned = stage(&short, &alone, backend, (&mesh, 0), most)?;
        let n = short.layers.len();
        let main = &planned.runs[0].planned;
        // Only a backward pass needs what layers leave.
        let saved = if s.purpose == Purpose::Train { saved(&main.plan, n) } else { vec![0; n] };
        let mut weights = ([0; 2], vec![[0; 2]; n]);
        let apart = experts(&main.graph);
        for w in &main.plan.weights {
            let bytes = w.weight.ty.bytes().size().unwrap_or(0) as u64;
            match number(&w.weight.name, n) {
                Some(layer) => weights.1[layer][usize::from(apart.contains(&w.weight.name))] += bytes,
                None => weights.0[usize::from(w.weight.name != config.names.embed)] += bytes,
            }
        }
        let all: u64 = saved.iter().sum();
        let m = planned.memory;
        let weight = weights.0.iter().chain(weights.1.iter().flatten()).sum::<u64>().max(1);
        Ok(Layers {
            config: config.clone(),
            stands,
            scratch: (m.activations + m.buffers).saturating_sub(all),
            saved,
            kv: m.kv_per_token as f64 / n as f64,
            windowed: short.layers.iter().map(in_windows).collect(),
            most,
            states: [m.gradients / weight, m.optimizer / weight],
            weights,
            parts: RefCell::default(),
            programs: planned
                .runs
                .iter()
                .map(|r| (r.name, sent(work(&r.planned), config, s), r.planned.plan.symbols.clone()))
                .collect(),
        })
    }

    /// The mesh of a schedule.
    pub fn mesh(&self, s: &Schedule) -> Result<Mesh, Refused> {
        s.mesh(&self.config)
    }

    /// Of the keys that sequences would have were all as long as the longest, the part that there are.
    fn part(&self, s: &Schedule, window: Option<u64>) -> f64 {
        if s.lengths.is_none() {
            return 1.0;
        }
        let batch = s.batch.min(Lengths::TELLING);
        *self.parts.borrow_mut().entry((batch, window)).or_insert_with(|| s.part(window))
    }

    /// A launch as this schedule has it, where that is not as the group was planned: among more or fewer data-parallel ranks, or over
    /// sequences of different lengths.
    fn changed(&self, w: &Work, s: &Schedule, mesh: &Mesh, sizes: Sizes) -> Result<Option<Work>, Refused> {
        let same = |m: &Message| m.over.iter().all(|a| mesh.axes.contains(a));
        // Where rows are told they have their lengths.
        let uneven = w.form == "attention" && s.lengths.is_some() && !s.server.more(s.seq);
        if w.messages.iter().all(same) && !uneven {
            return Ok(None);
        }
        let mut w = w.clone();
        for m in &mut w.messages {
            for axis in &mut m.over {
                axis.size = mesh.axes.iter().find(|a| a.name == axis.name).map_or(1, |a| a.size);
            }
            m.traffic.ranks = m.over.iter().map(|a| a.size as u64).product();
        }
        if uneven {
            let part = self.part(s, w.window);
            let of = |d: &Dim| Ok::<_, Refused>(Dim::from((d.eval(sizes)? as f64 * part) as usize));
            (w.flops, w.bytes) = (of(&w.flops)?, of(&w.bytes)?);
        }
        Ok(Some(w))
    }

    /// Planned layers of a stage.
    fn stage(&self, at: usize, stages: usize) -> impl Iterator<Item = usize> + '_ {
        let all = self.stands.len();
        // As `pipeline` places them; a test holds both together.
        let of = move |(i, planned): (usize, &usize)| (i * stages / all == at).then_some(*planned);
        self.stands.iter().enumerate().filter_map(of)
    }

    /// Bytes of a stage's weights before ranks share them: dense ones, and of experts.
    pub fn weights(&self, at: usize, stages: usize) -> [u64; 2] {
        let first = if at == 0 { self.weights.0[0] } else { 0 };
        // A tied embedding is the head of the last stage, too.
        let tied = if at > 0 && self.config.tie_embeddings { self.weights.0[0] } else { 0 };
        let last = if at + 1 == stages { self.weights.0[1] + tied } else { 0 };
        let layers = self.stage(at, stages).map(|l| self.weights.1[l]);
        layers.fold([first + last, 0], |[a, b], [dense, experts]| [a + dense, b + experts])
    }

    /// Memory of the fullest rank, with so many sequences a piece.
    pub fn memory(&self, s: &Schedule, batch: u64) -> Memory {
        let stages = s.ranks.pp;
        let tokens = |batch: u64| s.rows("forward", batch).map_or(batch, |rows| rows.tokens);
        let of_most = tokens(batch) as f64 / tokens(self.most) as f64;
        let scaled = |bytes: u64| (bytes as f64 * of_most) as u64;
        let one = |at: usize| {
            let layers: Vec<usize> = self.stage(at, stages).collect();
            let weights = self.weights(at, stages);
            let of = |from, times: u64| s.shared(from, weights.map(|bytes| bytes * times));
            let kept: u64 = layers.iter().map(|l| self.saved[*l]).sum();
            // As in whole plans: of the pieces in flight what is saved of each, interleaved of each group of layers.
            let flight = (s.ahead(at) as u64 + 1).min(s.micro * s.interleave);
            let saved = (kept.saturating_mul(flight) / s.interleave).max(kept);
            let train = s.purpose == Purpose::Train;
            // A prompt beside decode has keys, too; windowed layers have pages of their own.
            let sequences = batch + s.at_once();
            let table = s.seq.div_ceil(Cache::PAGE as u64);
            let windows = windows(&self.config, table as usize, sequences as usize);
            let held = |l: &usize| match windows.filter(|_| self.windowed[*l]) {
                Some(w) => (w.pages * Cache::PAGE) as f64,
                None => (sequences * table * Cache::PAGE as u64) as f64 * self.part(s, None),
            };
            let tokens = layers.iter().map(held).sum::<f64>() * s.micro as f64;
            Memory {
                weights: of(3, 1),
                kv: if train { 0 } else { (self.kv * tokens) as u64 },
                activations: scaled(saved.saturating_add(self.scratch)),
                gradients: of(2, self.states[0]),
                optimizer: of(1, self.states[1]),
                kv_per_token: (self.kv * layers.len() as f64) as u64,
                ..Memory::default()
            }
        };
        (0..stages).map(one).max_by_key(Memory::total).unwrap_or_default()
    }

    /// Seconds of a piece on each stage, and of the update.
    pub fn seconds(
        &self,
        s: &Schedule,
        batch: u64,
        hardware: &Hardware,
        mesh: &Mesh,
    ) -> Result<(Vec<f64>, f64), Refused> {
        let stages = s.ranks.pp;
        let (mut pieces, mut update) = (vec![hardware.kernels.step; stages], hardware.kernels.step);
        let mut tokens = 0;
        for (program, works, symbols) in &self.programs {
            // Steps without prompts have a row a sequence, of which the longest are planned.
            let rows = s.rows(program, batch).filter(|_| s.server.more(s.seq));
            let [all, sequences] = match &rows {
                Some(rows) => [rows.tokens, rows.sequences],
                None if s.purpose == Purpose::Decode => [batch; 2],
                None => [batch * s.seq, batch],
            };
            tokens += if *program == "update" { 0 } else { all };
            let value = |name: &str| match (name, &rows) {
                ("tokens", _) => Some(all),
                ("sequences", _) => Some(sequences),
                ("context", Some(rows)) => Some(rows.pages().max(1)),
                (name, _) => {
                    symbols.iter().find(|s| &*s.name == name).map(|s| (s.max / self.most).max(1) * batch)
                }
            };
            let sizes = even(symbols, &value, s.dispatch.imbalance);
            // With each piece, and once a step.
            let mut all = [(); 2].map(|()| Parts::new(self.weights.1.len()));
            let once = *program == "update";
            let part = s.updates(self.weights(0, 1));
            for w in works {
                let mut other = self.changed(w, s, mesh, &sizes)?;
                if let Some(rows) = rows.as_ref().filter(|_| w.form == "attention") {
                    seen(other.get_or_insert_with(|| w.clone()), rows, &sizes)?;
                }
                let w = other.as_ref().unwrap_or(w);
                let [piece, own] = if once { summed(s, w) } else { [Some(w.clone()), None] };
                for (w, all) in [piece, own].into_iter().zip(&mut all) {
                    let Some(w) = w else { continue };
                    let part = if once && w.messages.is_empty() { part } else { 1.0 };
                    let time = time(&w, hardware, mesh, &sizes)?;
                    // Starts are as many of a part.
                    all.add(&w, time.total() - (1.0 - part) * time.body());
                }
            }
            let [piece, own] = all.map(|all| {
                (0..stages).map(move |at| all.of(self.stage(at, stages), at, stages)).collect::<Vec<f64>>()
            });
            pieces.iter_mut().zip(piece).for_each(|(sum, seconds)| *sum += seconds);
            update += own.into_iter().fold(0.0, f64::max);
        }
        for (at, piece) in pieces.iter_mut().enumerate() {
            *piece += gathering(s, hardware, mesh, self.weights(at, stages))?;
        }
        if stages > 1 {
            let width = self.config.hidden_size * s.storage.bytes();
            let seconds = |bytes: usize| {
                let over = mesh.axes.iter().filter(|a| a.name == STAGES).cloned().collect();
                let traffic = Traffic::point_to_point(Dim::from(bytes));
                let sent = message(&Message::new("send", traffic, over), hardware, mesh, &|_| None)?;
                Ok::<f64, Refused>(sent.latency + sent.bandwidth)
            };
            let sent = seconds(tokens as usize * width)?;
            // There and back, and interleaved once for each group of layers.
            let times = if s.purpose == Purpose::Train { 2.0 } else { 1.0 } * s.interleave as f64;
            pieces.iter_mut().for_each(|p| *p += times * sent);
            if self.config.tie_embeddings && s.purpose == Purpose::Train {
                // Both stages that have the embedding add the other's gradient, in f32.
                let sent = seconds(self.weights.0[0] as usize / s.storage.bytes() * 4)?;
                [0, stages - 1].iter().for_each(|at| pieces[*at] += sent);
            }
        }
        Ok((pieces, update))
    }
}

/// Seconds of a program's works: of each planned layer, and of what is before the first and behind it.
struct Parts {
    layers: Vec<f64>,
    around: [f64; 2],
    begun: bool,
}

impl Parts {
    fn new(layers: usize) -> Parts {
        Parts { layers: vec![0.0; layers], around: [0.0; 2], begun: false }
    }

    /// Adds the launches of a work, so many seconds each.
    fn add(&mut self, work: &Work, seconds: f64) {
        self.begun |= !work.layers.is_empty();
        let last = self.layers.len() - 1;
        match work.layers.as_slice() {
            [] => self.around[usize::from(self.begun)] += seconds * work.launches as f64,
            list => list.iter().for_each(|l| self.layers[(*l).min(last)] += seconds),
        }
    }

    /// Seconds of a stage that has these layers.
    fn of(&self, layers: impl Iterator<Item = usize>, at: usize, stages: usize) -> f64 {
        let around = |has: bool, side: usize| if has { self.around[side] } else { 0.0 };
        layers.map(|l| self.layers[l]).sum::<f64>() + around(at == 0, 0) + around(at + 1 == stages, 1)
    }
}

/// The layer in the name of a weight.
fn number(name: &str, layers: usize) -> Option<usize> {
    name.split(['.', '|']).find_map(|part| part.parse::<usize>().ok()).filter(|n| *n < layers)
}

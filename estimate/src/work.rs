//! What a planned program does, launch by launch. In: a compiled program. Out: launches of one kernel in layers of one kind as one
//! entry: operations, bytes from memory and from what other kernels have just written, sizes of the product, messages.

use crate::Refused;
use astrai_ir::kernel::Products;
use astrai_ir::ops::Op;
use astrai_ir::plan::{Body, Buffer, BufferId, Place, Step};
use astrai_ir::region::{DotBatch, Form};
use astrai_ir::shard::Traffic;
use astrai_ir::{Axis, DType, Dim, Node, Plan, Region, Type};
use astrai_runtime::Compiled;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How names of symbols end that count rows from all ranks of experts.
pub const ARRIVED: &str = "_ep";

/// A collective of a launch.
#[derive(Clone, Debug)]
pub struct Message {
    /// Name of its operator.
    pub operator: &'static str,
    /// What a rank sends.
    pub traffic: Traffic,
    /// Axes whose ranks take part.
    pub over: Vec<Axis>,
    /// Of `all_to_all` whether rows come back from experts.
    pub back: bool,
    /// Bytes that are sent beside those that the plan counts.
    pub factor: f64,
    /// Of `all_to_all` where a token is sent once to each node of its experts: how many it has, and the part of all experts that are in the
    /// groups to which its choice is limited.
    pub by_nodes: Option<[f64; 2]>,
}

impl Message {
    /// A message as the plan has it.
    pub fn new(operator: &'static str, traffic: Traffic, over: Vec<Axis>) -> Message {
        Message { operator, traffic, over, back: false, factor: 1.0, by_nodes: None }
    }
}

/// Launches that do the same: of one region, in layers of one kind.
#[derive(Clone, Debug)]
pub struct Work {
    /// Where the computation was made, numbers of layers as `*`.
    pub origin: String,
    /// Kind of layer; empty around the layers.
    pub layer: String,
    /// Identity of the kernel; empty where none computes it.
    pub kernel: String,
    /// The archetype's name; `panels` where a dot's weight was packed ahead.
    pub form: &'static str,
    /// Launches of a run.
    pub launches: u64,
    /// Numbers of the layers, where they have one.
    pub layers: Vec<usize>,
    /// Rows, columns, length of the sums, products side by side.
    pub sizes: [Dim; 4],
    /// Element types of the left side, of the right side, of the result.
    pub types: [DType; 3],
    /// Operations of a launch.
    pub flops: Dim,
    /// Bytes of a launch.
    pub bytes: Dim,
    /// Of these, bytes of values between kernels, but for gradients of weights.
    pub warm: Dim,
    /// Of these, bytes of a gradient of weights, which is read when those of all layers are there: a processor writes it past the caches where it
    /// can, and evicts it where it cannot.
    pub past: Dim,
    /// Bytes that it writes for itself between its phases, and reads again.
    pub workspace: Dim,
    /// Bytes that a run of its program touches, among which its own come again a run later; all of its weights, states and values between kernels
    /// where sizes are not settled.
    pub among: u64,
    /// Phases, one after another.
    pub phases: u64,
    /// On what it multiplies.
    pub products: Products,
    /// Sequences that attention's tokens are of; none of other kernels.
    pub sequences: Dim,
    /// Keys that a token sees at most, of attention that sees no more.
    pub window: Option<u64>,
    /// Matrices of which rows choose some.
    pub groups: u64,
    /// What is sent.
    pub messages: Vec<Message>,
}

impl Work {
    /// What a program does beside its kernels: messages, or nothing that is counted.
    pub fn beside(origin: &str, messages: Vec<Message>) -> Work {
        let bytes = messages.iter().fold(Dim::from(0), |sum, m| &sum + &m.traffic.bytes);
        Work {
            origin: origin.into(),
            layer: String::new(),
            kernel: String::new(),
            form: if messages.is_empty() { "run" } else { "collective" },
            launches: 1,
            layers: vec![],
            sizes: [1; 4].map(Dim::from),
            types: [DType::F32; 3],
            flops: Dim::from(0),
            bytes,
            warm: Dim::from(0),
            past: Dim::from(0),
            workspace: Dim::from(0),
            among: u64::MAX,
            phases: 1,
            products: Products::Native,
            sequences: Dim::from(0),
            window: None,
            groups: 0,
            messages,
        }
    }

    /// Whether it is what one stage of a pipeline sends to the next: of a layer, not the gradient of a weight that two stages have.
    pub fn is_sent(&self) -> bool {
        !self.layers.is_empty() && self.messages.iter().any(|m| m.operator == "send")
    }

    /// Whose numbers it has, of [`crate::hardware::ARCHETYPES`].
    ///
    /// # Errors
    /// A size overflows.
    pub fn archetype(&self, sizes: &dyn Fn(&str) -> Option<u64>) -> Result<&'static str, Refused> {
        let alone = self.form == "attention" && self.sizes[0].eval(sizes)? <= self.sequences.eval(sizes)?;
        Ok(if alone { "attention_one" } else { self.form })
    }
}

/// The work of a program, in the order of the first launches.
pub fn work(program: &Compiled) -> Vec<Work> {
    in_order(program).0
}

/// The same, and which of it each launch of a run is.
pub fn in_order(program: &Compiled) -> (Vec<Work>, Vec<usize>) {
    let plan = &program.plan;
    let (order, launches, at, among) = (Vec::new(), Vec::new(), BTreeMap::new(), again(program));
    let mut found = Found { program, order, launches, at, among };
    for step in &plan.main.steps {
        match step {
            Step::Run { region, reads, writes, origin, .. } => {
                let warm = |b: &BufferId| is_warm(&plan.main, *b);
                let warm = [reads, writes].map(|l| l.iter().map(warm).collect());
                found.add(region.0, "", origin, warm);
            }
            Step::Call { body, args, results, origin, .. } => {
                let called = &plan.bodies[*body];
                let outer =
                    |list: &[BufferId], i: usize| list.get(i).is_some_and(|b| is_warm(&plan.main, *b));
                for step in &called.steps {
                    let Step::Run { region, reads, writes, origin: inner, .. } = step else { continue };
                    let warm = |b: &BufferId| match called.buffers[b.0].place {
                        Place::Param(i) => outer(args, i),
                        Place::Result(i) => outer(results, i),
                        _ => is_warm(called, *b),
                    };
                    let warm = [reads, writes].map(|l| l.iter().map(warm).collect());
                    found.add(region.0, &called.name, &format!("{origin}.{inner}"), warm);
                }
            }
        }
    }
    (found.order, found.launches)
}

/// Bytes of a program's weights, states without pages, and values between kernels.
fn again(program: &Compiled) -> u64 {
    let held = program.cost().map_or(u64::MAX, |c| c.weight_bytes.saturating_add(c.arena_bytes));
    held.saturating_add(crate::schedule::states(&program.graph, &|name| !name.starts_with("kv.")))
}

/// Bytes of values between kernels that are kept while each launch runs, in the order of the launches.
pub fn live(plan: &Plan) -> Vec<u64> {
    live_of(plan, &|_| true)
}

/// The same of some of the values.
fn live_of(plan: &Plan, these: &dyn Fn(&Buffer) -> bool) -> Vec<u64> {
    let mut all = Vec::with_capacity(plan.launches());
    for (step, outside) in plan.main.steps.iter().zip(kept(plan, &plan.main, these)) {
        match step {
            Step::Run { .. } => all.push(outside),
            Step::Call { body, .. } => {
                all.extend(kept(plan, &plan.bodies[*body], these).into_iter().map(|inside| outside + inside));
            }
        }
    }
    all
}

/// Of the bytes between a program's kernels, where they are most, those of rows that come from other ranks; and the greatest workspace.
pub fn arrivals(program: &Compiled) -> u64 {
    let plan = &program.plan;
    let arrive = |b: &Buffer| b.ty.shape.iter().any(|d| d.symbols().iter().any(|s| s.ends_with(ARRIVED)));
    let most = live(plan).into_iter().zip(live_of(plan, &arrive)).max_by_key(|(all, _)| *all);
    let workspaces = program.kernels.iter().flatten().map(|k| plan.bound(&k.workspace).unwrap_or(0));
    most.map_or(0, |(_, arrived)| arrived) + workspaces.max().unwrap_or(0)
}

/// Bytes of a body's own values, from the first step that touches each to the last, at each step.
fn kept(plan: &Plan, body: &Body, these: &dyn Fn(&Buffer) -> bool) -> Vec<u64> {
    let mut spans: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
    for (i, step) in body.steps.iter().enumerate() {
        let (Step::Run { reads: a, writes: b, .. } | Step::Call { args: a, results: b, .. }) = step;
        let own = |at: &&BufferId| {
            let buffer = &body.buffers[at.0];
            matches!(buffer.place, Place::Arena(_)) && these(buffer)
        };
        for at in a.iter().chain(b).filter(own) {
            spans.entry(at.0).or_insert((i, i)).1 = i;
        }
    }
    let mut bytes = vec![0; body.steps.len()];
    for (at, (first, last)) in spans {
        let size = plan.bound(&body.buffers[at].ty.bytes()).unwrap_or(0);
        bytes[first..=last].iter_mut().for_each(|sum| *sum += size);
    }
    bytes
}

/// True for a value between kernels: neither a weight nor a state nor what comes from outside.
fn is_warm(body: &Body, at: BufferId) -> bool {
    matches!(body.buffers[at.0].place, Place::Arena(_) | Place::Const(_))
}

struct Found<'a> {
    program: &'a Compiled,
    order: Vec<Work>,
    launches: Vec<usize>,
    at: BTreeMap<(usize, String, String), usize>,
    among: u64,
}

impl Found<'_> {
    /// One launch of a region, with which of its reads and writes are values between kernels.
    fn add(&mut self, region: usize, layer: &str, origin: &str, warm: [Vec<bool>; 2]) {
        let (origin, number) = without_numbers(origin);
        let next = self.order.len();
        let i = *self.at.entry((region, layer.to_string(), origin.clone())).or_insert(next);
        if i == next {
            let plan = &self.program.plan;
            let mut one = describe(plan, &plan.regions[region], &warm);
            if let Some(kernel) = &self.program.kernels[region] {
                let rounds = plan.bound(&kernel.rounds).unwrap_or(1);
                one.phases = (kernel.entries.len() as u64).saturating_mul(rounds);
                (one.kernel, one.products) = (kernel.identity.clone(), kernel.products);
                one.workspace = kernel.workspace.clone();
            }
            self.order.push(Work { origin, layer: layer.to_string(), among: self.among, ..one });
        }
        self.launches.push(i);
        self.order[i].launches += 1;
        self.order[i].layers.extend(number);
    }
}

/// The work with numbers for sizes.
///
/// # Errors
/// A size overflows or has no value.
pub fn settled(w: Work, sizes: &dyn Fn(&str) -> Option<u64>) -> Result<Work, Refused> {
    let at = |d: &Dim| d.eval(sizes).map(|n| Dim::from(n as usize));
    let all = [at(&w.sizes[0])?, at(&w.sizes[1])?, at(&w.sizes[2])?, at(&w.sizes[3])?];
    let mut messages = w.messages.clone();
    for m in &mut messages {
        m.traffic.bytes = at(&m.traffic.bytes)?;
    }
    let [flops, bytes, warm, past] = [&w.flops, &w.bytes, &w.warm, &w.past].map(at);
    let (flops, bytes, warm, past, workspace) = (flops?, bytes?, warm?, past?, at(&w.workspace)?);
    let sequences = at(&w.sequences)?;
    Ok(Work { flops, bytes, warm, past, workspace, sequences, sizes: all, messages, ..w })
}

/// An origin with `*` for numbers, and the first of them, which is the layer's.
pub fn without_numbers(origin: &str) -> (String, Option<usize>) {
    let mut number = None;
    let part = |p: &str| match p.parse::<usize>() {
        Ok(n) => {
            number.get_or_insert(n);
            "*".to_string()
        }
        Err(_) => p.to_string(),
    };
    let parts: Vec<String> = origin.split('.').map(part).collect();
    (parts.join("."), number)
}

/// What one launch of a region does.
fn describe(_: &Plan, region: &Arc<Region>, [reads, writes]: &[Vec<bool>; 2]) -> Work {
    let (reading, writing) = (region.piece.read_types(), region.piece.write_types());
    let bytes = |types: &[Type], warm: &[bool]| {
        let of = |(t, _): (&Type, &bool)| t.bytes();
        types.iter().zip(warm).filter(|(_, w)| **w).map(of).fold(Dim::from(0), |a, b| &a + &b)
    };
    let g = region.graph();
    let gradient = match region.form().name() {
        "dot" => g.nodes().iter().any(|n| match &n.op {
            Op::Dot(d) => d.over_rows([0, 1].map(|side| g.ty(n.args[side]).rank())),
            _ => false,
        }),
        name => name == "outer",
    };
    let read = bytes(&reading, reads);
    let (warm, past) = match gradient {
        true => (read, bytes(&writing, &vec![true; writing.len()])),
        false => (&read + &bytes(&writing, writes), Dim::from(0)),
    };
    let (sizes, groups) = sizes(region, &reading, &writing);
    let dtype = |i: usize| reading.get(i).or(writing.first()).map_or(DType::F32, |t| t.dtype);
    let sides = region.form().sides().unwrap_or_else(|| [dtype(0), dtype(1)]);
    let out = writing.first().map_or(DType::F32, |t| t.dtype);
    Work {
        origin: String::new(),
        layer: String::new(),
        kernel: String::new(),
        form: match region.form() {
            Form::Dot(d) if region.piece.layout(d.right.at).is_packed() => "panels",
            Form::Grouped(g) if region.piece.layout(g.right.at).is_packed() => "grouped_panels",
            form => form.name(),
        },
        launches: 0,
        layers: vec![],
        sizes,
        types: [sides[0], sides[1], out],
        flops: region.flops().clone(),
        bytes: region.bytes().clone(),
        warm,
        past,
        workspace: Dim::from(0),
        among: u64::MAX,
        phases: 1,
        products: Products::Native,
        sequences: match region.form() {
            Form::Attention(a) => a.sequences.clone(),
            _ => Dim::from(0),
        },
        window: match region.form() {
            Form::Attention(a) => a.op.window.map(|w| w as u64),
            _ => None,
        },
        groups,
        messages: region.graph().nodes().iter().filter_map(|n| message(region, n)).collect(),
    }
}

/// Rows, columns, length of sums, how many; matrices of which rows choose.
fn sizes(region: &Region, reads: &[Type], writes: &[Type]) -> ([Dim; 4], u64) {
    let one = || Dim::from(1);
    let of = |n: usize| Dim::from(n);
    match region.form() {
        Form::Dot(d) => {
            let batch = d.batch.as_ref().map_or(one(), |DotBatch { count, .. }| count.clone());
            ([d.m.clone(), d.n.clone(), d.k.clone(), batch], 0)
        }
        Form::Grouped(g) => ([g.rows.clone(), of(g.n), of(g.k), of(g.groups)], g.groups as u64),
        Form::Outer(o) => {
            let rows = reads.iter().find_map(|t| t.shape.first().filter(|d| d.literal().is_none()).cloned());
            let [m, n] = o.size.map(of);
            ([m, n, rows.unwrap_or_else(one), of(o.groups)], 0)
        }
        Form::Attention(a) => {
            let [heads, _, d, _] = a.sizes;
            ([a.tokens.clone(), a.op.span.clone(), of(d), of(heads)], 0)
        }
        Form::AttentionGrad(a) => {
            let [heads, _, d, _] = a.sizes;
            ([a.tokens.clone(), a.op.span.clone(), of(d), of(heads)], 0)
        }
        Form::Loss(l) => {
            let [vocabulary, width] = l.size.map(of);
            ([l.tokens.0.clone(), vocabulary, width, one()], 0)
        }
        _ => {
            let shape = writes.first().map(|t| t.shape.clone()).unwrap_or_default();
            let last = shape.last().cloned().unwrap_or_else(one);
            let rows = shape.split_last().map_or_else(one, |(_, rest)| Dim::product(rest));
            ([rows, last, one(), one()], 0)
        }
    }
}

fn message(region: &Region, node: &Node) -> Option<Message> {
    let args: Vec<&Type> = node.args.iter().map(|a| region.graph().ty(*a)).collect();
    let traffic = node.op.traffic(&args, &node.types)?;
    let over = match &node.op {
        Op::AllReduce(o) => o.over.clone(),
        Op::AllGather(o) => vec![o.over.clone()],
        Op::ReduceScatter(o) => vec![o.over.clone()],
        Op::AllToAll(o) => vec![o.over.clone()],
        Op::SendTo(o) => vec![o.over.clone()],
        _ => vec![],
    };
    let back = matches!(&node.op, Op::AllToAll(o) if o.back);
    Some(Message { back, ..Message::new(node.op.name(), traffic, over) })
}

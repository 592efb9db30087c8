//! Kernels with one instruction changed, to see whether the kernel table notices. In: mutants of executed instructions, drawn over all
//! cases, of loops and of cores alike. Out: how many are caught, and those that live.
//!
//! A mutant is caught where the table's own runs notice it: a result that is not the interpreter's, or what the emulator reports. One
//! that lives is then held against the right kernel at other sizes, small and large, and on other values (of loops edges, ties,
//! magnitudes): where no result changes by more than is allowed, and of loops no number by more than the part of it that is, the mutant
//! cannot show. It changes what nothing depends on, such as the exponential's polynomial in a softmax of one element, whose argument is
//! 0, or the last bits of a rounding.

use super::cases::{At, Case, Draw, cases};
use super::forms::{FORMS, Form};
use super::ptx::{Emulator, ORDERS};
use super::{agrees, compiled, numbers_agree, results, tolerance, wanted};
use crate::driver::checks_everything;
use crate::kernels::table::{self, Table, compare};
use astrai_engine::Machine;
use astrai_ir::ops::ReduceKind;
use astrai_ir::{DType, Op, Precision, Sizes, Tensor, eval};
use astrai_ptx::{Counts, Kernel, Mutant, mutants};
use astrai_runtime::{Compiled, Error};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What mutants of loops that live are tried with, and of cores.
const WIDER: [Draw; 8] = [
    Draw::Plain(1),
    Draw::Plain(2),
    Draw::Edges(1),
    Draw::Edges(2),
    Draw::Ties(1),
    Draw::Ties(2),
    Draw::Magnitudes(1),
    Draw::Magnitudes(2),
];
const SEEDS: [Draw; 3] = [Draw::Plain(1), Draw::Plain(2), Draw::Plain(3)];

type Tensors = Vec<(String, Tensor)>;
/// A run and what it must give.
type Run = (At, (u64, u64), Arc<Tensors>);

/// What is changed.
enum Of<'a> {
    Loops(&'a Case),
    Core(&'static Form, Box<Table>),
}

/// A kernel's case on the emulated device: what its runs must give, and what they executed.
struct Subject<'a> {
    name: String,
    of: Of<'a>,
    program: Arc<Compiled>,
    runs: Vec<Run>,
    ran: Vec<(Arc<Kernel>, Counts)>,
}

impl<'a> Subject<'a> {
    fn of_loops(case: &'a Case, device: &Emulator, machine: &Machine) -> Subject<'a> {
        let program = compiled(case, machine);
        Subject::new(case.name.clone(), Of::Loops(case), program, device, machine)
    }

    /// A case of a form's table, by number.
    fn of_core(form: &'static Form, random: usize, device: &Emulator, machine: &Machine) -> Subject<'a> {
        let table = (form.table)();
        let case = table.g.outputs()[random % table.g.outputs().len()].0.clone();
        let table = table.only(&case);
        let program = Arc::new(table.compiled_on(machine));
        Subject::new(
            format!("{}: {case}", form.name),
            Of::Core(form, Box::new(table)),
            program,
            device,
            machine,
        )
    }

    fn new(
        name: String,
        of: Of<'a>,
        program: Arc<Compiled>,
        device: &Emulator,
        machine: &Machine,
    ) -> Subject<'a> {
        let mut subject = Subject { name, of, program, runs: vec![], ran: vec![] };
        let all = match &subject.of {
            Of::Loops(case) => case.runs(),
            Of::Core(form, _) => form.sizes.iter().map(|n| (*n, Draw::Plain(0))).collect(),
        };
        device.took();
        device.order(ORDERS[0]);
        for (i, &at) in all.iter().enumerate() {
            subject.results(machine, at).unwrap_or_else(|e| panic!("{}: {e}", subject.name));
            let wanted = Arc::new(subject.wanted(at));
            // Tables of cores run in other orders at their largest size.
            let last = i + 1 == all.len() || matches!(subject.of, Of::Loops(_));
            let orders = if last { &ORDERS[..] } else { &ORDERS[..1] };
            subject.runs.extend(orders.iter().map(|order| (at, *order, wanted.clone())));
        }
        subject.ran = device.took();
        // Not what merely gives a core's table its size.
        let kernels = subject.program.kernels.iter().zip(&subject.program.plan.regions);
        let cores = kernels.filter(|(_, r)| r.form().name() != "loops").filter_map(|(k, _)| k.as_ref());
        let cores: Vec<&str> = cores.flat_map(|k| k.entries.iter().map(|e| &*e.symbol)).collect();
        subject.ran.retain(|(k, _)| cores.is_empty() || cores.contains(&&*k.name));
        subject
    }

    fn results(&self, machine: &Machine, at: At) -> Result<Tensors, Error> {
        match &self.of {
            Of::Loops(case) => {
                let results = results(case, &self.program, machine, at)?;
                Ok(results.into_iter().map(|(name, v)| (name, v.to_tensor().unwrap())).collect())
            }
            Of::Core(_, table) => table.results_of(&self.program, machine, (at.0, at.1.seed())),
        }
    }

    fn wanted(&self, at: At) -> Tensors {
        match &self.of {
            Of::Loops(case) => wanted(case, at),
            Of::Core(_, table) => {
                let sizes = Sizes::from([("n".to_string(), at.0)]);
                eval(&table.g, &table.values_of((at.0, at.1.seed())), &sizes, Precision::default()).unwrap()
            }
        }
    }

    fn tolerance(&self, name: &str, dtype: DType) -> f64 {
        match &self.of {
            Of::Loops(case) => tolerance(case, dtype),
            Of::Core(_, table) => table::tolerance(&table.g, table.g.output(name).unwrap(), DType::F32),
        }
    }

    /// What notices the device's mutant in the table's runs, if anything does.
    fn noticed(&self, device: &Emulator, machine: &Machine) -> Option<String> {
        let agrees = |name: &str, got: &Tensor, want: &Tensor| match &self.of {
            Of::Loops(case) => agrees(case, got, want),
            Of::Core(..) => compare(got, want, self.tolerance(name, want.dtype)),
        };
        let different = |want: &Tensors, got: Tensors| {
            let of = |name: &String| got.iter().find(|(n, _)| n == name).map(|(_, got)| got);
            let one = |(name, want): &(String, Tensor)| {
                of(name).map_or(Err("not there".into()), |got| agrees(name, got, want)).err()
            };
            want.iter().find_map(one)
        };
        self.runs.iter().find_map(|(at, order, want)| {
            device.order(*order);
            self.results(machine, *at).map_or_else(|e| Some(e.to_string()), |got| different(want, got))
        })
    }

    /// Other sizes and values.
    fn wider(&self) -> Vec<At> {
        let (rows, draws, [least, most]) = match &self.of {
            Of::Loops(case) => {
                // Sums of numbers of any magnitude cancel: the order of their terms shows, which is nobody's mistake.
                let cancels = |op: &Op| match op {
                    Op::Reduce(r) => matches!(r.kind, ReduceKind::Sum | ReduceKind::Mean),
                    op => matches!(op, Op::Dot(_) | Op::LayerNorm(_)),
                };
                let cancels = case.graph.nodes().iter().any(|n| cancels(&n.op));
                (&case.rows[..], if cancels { &WIDER[..6] } else { &WIDER[..] }, [1, 8192])
            }
            Of::Core(form, _) => (form.sizes, &SEEDS[..], [form.sizes[0], form.sizes[form.sizes.len() - 1]]),
        };
        let larger = rows.iter().map(|n| 8 * n).max().unwrap_or(1);
        let other = [2, 13, larger].map(|n| n.clamp(least, most));
        let runs = |draw: &Draw| other.map(|t| (t, *draw));
        draws.iter().flat_map(runs).collect()
    }

    /// Where the mutant shows, if it does anywhere.
    fn shows(&self, mutant: &(Mutant, u64), device: &Emulator, machine: &Machine) -> Option<String> {
        let orders = if matches!(self.of, Of::Loops(_)) { &ORDERS[..2] } else { &ORDERS[..1] };
        let mut runs = self.wider().into_iter().flat_map(|at| orders.iter().map(move |order| (at, *order)));
        runs.find_map(|(at, order)| {
            device.order(order);
            let [right, got] = [None, Some(mutant.clone())].map(|m| {
                device.instead(m);
                self.results(machine, at)
            });
            device.instead(None);
            let right = right.unwrap_or_else(|e| panic!("{} at {at:?}: {e}", self.name));
            let other = match got {
                Err(e) => Some(e.to_string()),
                Ok(got) => right.iter().zip(&got).find_map(|((name, a), (_, b))| self.apart(name, a, b)),
            };
            other.map(|e| format!("{at:?}: {e}"))
        })
    }

    /// How a result differs by more than is allowed, of loops in a number by its own share.
    fn apart(&self, name: &str, right: &Tensor, got: &Tensor) -> Option<String> {
        let allowed = self.tolerance(name, right.dtype);
        if matches!(self.of, Of::Core(..)) {
            return compare(got, right, allowed).err();
        }
        numbers_agree(got, right, allowed).map_err(|e| format!("{name}: {e}")).err()
    }
}

/// Of `ASTRAI_MUTANTS` mutants that could show, else of 4, in continuous integration 100, at least 95 in 100 are caught; those that live are
/// listed.
#[test]
fn a_kernel_with_one_wrong_instruction_is_noticed() {
    let Some(device) = Emulator::new(132) else { return };
    let machine = Machine::over(device.clone());
    let cases = cases();
    let asked = std::env::var("ASTRAI_MUTANTS").ok().and_then(|n| n.parse().ok());
    let count: usize = asked.unwrap_or(if checks_everything() { 100 } else { 4 });
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % below
    };
    let mut of_loops: BTreeMap<usize, Subject> = BTreeMap::new();
    let (mut caught, mut hidden, mut alive) = ([0, 0], vec![], vec![]);
    while caught[0] + caught[1] + alive.len() < count {
        // Every second is of a core.
        let core = (caught[0] + caught[1] + alive.len() + hidden.len()) % 2 == 1;
        let of_core;
        let subject = if core {
            of_core = Subject::of_core(&FORMS[random(FORMS.len())], random(1 << 20), &device, &machine);
            &of_core
        } else {
            let at = random(cases.len());
            of_loops.entry(at).or_insert_with(|| Subject::of_loops(&cases[at], &device, &machine))
        };
        let (k, counts) = &subject.ran[random(subject.ran.len())];
        let mut all = mutants(k, &counts.each);
        if all.is_empty() {
            continue;
        }
        let mutant = all.swap_remove(random(all.len()));
        let text = format!("{}: {}: {}", subject.name, mutant.change, mutant.kernel.text(mutant.pc));
        // A mutant that does not end takes more than all blocks of the right kernel together.
        let mutant = (mutant, (1 << 16) + 4 * counts.each.iter().map(|c| c.warps).sum::<u64>());
        device.instead(Some(mutant.clone()));
        let said = subject.noticed(&device, &machine);
        device.instead(None);
        if said.is_some() {
            caught[usize::from(core)] += 1;
            continue;
        }
        match subject.shows(&mutant, &device, &machine) {
            Some(shows) => alive.push(format!("{text}\n    {shows}")),
            None => hidden.push(text),
        }
    }
    let [loops, cores] = caught;
    println!(
        "{} of {count} mutants are caught, {loops} of loops, {cores} of cores; the others:\n{}",
        loops + cores,
        alive.join("\n")
    );
    println!("{} more cannot show:\n{}", hidden.len(), hidden.join("\n"));
    assert!(alive.len() * 20 <= count, "more than one in twenty live");
}

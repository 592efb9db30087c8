//! Kernels with one instruction changed, to see whether the kernel table notices. In: mutants of executed instructions, drawn over all
//! cases. Out: how many are caught, and those that live.
//!
//! A mutant is caught where the table's own runs notice it: a result that is not the interpreter's, or what the emulator reports. One
//! that lives is then held against the right kernel at other sizes, small and large, and on other values (edges, ties, magnitudes): where
//! that changes no number by more than the part of it that the table allows, the mutant cannot show. It changes what nothing depends on,
//! such as the exponential's polynomial in a softmax of one element, whose argument is 0, or the last bits of a rounding.

use super::cases::{At, Case, Draw, cases};
use super::ptx::{Emulator, ORDERS};
use super::{compiled, difference, results, tolerance, wanted};
use crate::driver::checks_everything;
use astrai_engine::Machine;
use astrai_ir::ops::ReduceKind;
use astrai_ir::{DType, Op, Tensor};
use astrai_ptx::{Counts, Kernel, Mutant, mutants};
use astrai_runtime::{Compiled, Value};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What mutants that live are tried with.
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

/// What a run must give.
type Run = (At, Vec<(String, Tensor)>);

/// A case on the emulated device: what its runs must give, and what they executed.
struct Subject<'a> {
    case: &'a Case,
    program: Arc<Compiled>,
    wanted: Vec<Run>,
    ran: Vec<(Arc<Kernel>, Counts)>,
}

impl<'a> Subject<'a> {
    fn new(case: &'a Case, device: &Emulator, machine: &Machine) -> Subject<'a> {
        let program = compiled(case, machine);
        device.took();
        device.order(ORDERS[0]);
        let wanted = case.runs().into_iter().map(|at| {
            results(case, &program, machine, at).unwrap();
            (at, wanted(case, at))
        });
        let wanted = wanted.collect();
        Subject { case, program, wanted, ran: device.took() }
    }

    /// What notices the device's mutant in the table's runs, if anything does.
    fn noticed(&self, device: &Emulator, machine: &Machine) -> Option<String> {
        let mut runs = self.wanted.iter().flat_map(|run| ORDERS.map(|order| (run, order)));
        let said = |((at, want), order): (&Run, _)| {
            device.order(order);
            match results(self.case, &self.program, machine, *at) {
                Err(e) => Some(e.to_string()),
                Ok(got) => difference(self.case, want, &got).err(),
            }
        };
        runs.find_map(said)
    }

    /// Where the mutant shows, if it does anywhere.
    fn shows(&self, mutant: &Mutant, device: &Emulator, machine: &Machine) -> Option<String> {
        let most = self.case.rows.iter().copied().max().unwrap_or(1);
        let sizes = self.case.rows.iter().copied().chain([2, 13, (8 * most).min(8192)]);
        // Sums of numbers of any magnitude cancel: the order of their terms shows, which is nobody's mistake.
        let cancels = |op: &Op| match op {
            Op::Reduce(r) => matches!(r.kind, ReduceKind::Sum | ReduceKind::Mean),
            op => matches!(op, Op::Dot(_) | Op::LayerNorm(_)),
        };
        let cancels = self.case.graph.nodes().iter().any(|n| cancels(&n.op));
        let wider = WIDER.iter().filter(|d| !cancels || !matches!(d, Draw::Magnitudes(_)));
        let wider: Vec<Draw> = wider.copied().collect();
        let mut runs = sizes
            .flat_map(|t| wider.iter().map(move |draw| (t, *draw)))
            .flat_map(|at| [(at, ORDERS[0]), (at, ORDERS[1])]);
        runs.find_map(|(at, order)| {
            device.order(order);
            let mut got = [None, Some(mutant.clone())].map(|m| {
                device.instead(m);
                results(self.case, &self.program, machine, at)
            });
            device.instead(None);
            let [Ok(right), got] = &mut got else { panic!("{} at {at:?}", self.case.name) };
            let other = match got {
                Err(e) => Some(e.to_string()),
                Ok(got) => right.iter().zip(got).find_map(|((name, a), (_, b))| self.apart(name, a, b)),
            };
            other.map(|e| format!("{at:?}: {e}"))
        })
    }

    /// The first number of a result that differs by more than its own share of what is allowed, and than the type's smallest number.
    fn apart(&self, name: &str, right: &Value, got: &Value) -> Option<String> {
        if right.bytes == got.bytes {
            return None;
        }
        let allowed = tolerance(self.case, right.dtype);
        let least = match right.dtype {
            _ if allowed == 0.0 => 0.0,
            DType::F16 => 2f64.powi(-24),
            DType::BF16 => 2f64.powi(-133),
            DType::F8E4M3 => 2f64.powi(-9),
            DType::F8E5M2 => 2f64.powi(-16),
            _ => 2f64.powi(-149),
        };
        let (right, got) = (right.to_tensor().unwrap(), got.to_tensor().unwrap());
        (0..right.len()).map(|i| (i, right.at(i), got.at(i))).find_map(|(i, a, b)| {
            let close = a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= allowed * a.abs() + least;
            (!close).then(|| format!("{name} {i} is {b:?}, not {a:?}"))
        })
    }
}

/// Of `ASTRAI_MUTANTS` mutants that could show, in continuous integration 300, at least 95 in 100 are caught; those that live are listed.
#[test]
fn a_kernel_with_one_wrong_instruction_is_noticed() {
    let Some(device) = Emulator::new(132) else { return };
    let machine = Machine::over(device.clone());
    let cases = cases();
    let asked = std::env::var("ASTRAI_MUTANTS").ok().and_then(|n| n.parse().ok());
    let count: usize = asked.unwrap_or(if checks_everything() { 300 } else { 24 });
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % below
    };
    let mut subjects: BTreeMap<usize, Subject> = BTreeMap::new();
    let (mut caught, mut hidden, mut alive) = (0, vec![], vec![]);
    while caught + alive.len() < count {
        let at = random(cases.len());
        let subject = subjects.entry(at).or_insert_with(|| Subject::new(&cases[at], &device, &machine));
        let (k, counts) = &subject.ran[random(subject.ran.len())];
        let mut all = mutants(k, &counts.each);
        if all.is_empty() {
            continue;
        }
        let mutant = all.swap_remove(random(all.len()));
        device.instead(Some(mutant.clone()));
        let said = subject.noticed(&device, &machine);
        device.instead(None);
        if said.is_some() {
            caught += 1;
            continue;
        }
        let text = format!("{}: {}: {}", subject.case.name, mutant.change, mutant.kernel.text(mutant.pc));
        match subject.shows(&mutant, &device, &machine) {
            Some(shows) => alive.push(format!("{text}\n    {shows}")),
            None => hidden.push(text),
        }
    }
    println!("{caught} of {count} mutants are caught, {} live:\n{}", alive.len(), alive.join("\n"));
    println!("{} others cannot show:\n{}", hidden.len(), hidden.join("\n"));
    assert!(alive.len() * 20 <= count, "more than one in twenty live");
}

//! How kernels read and write memory. In: the kernel table, executed with its accesses counted. Out: sectors of global memory and passes
//! of shared memory beside the least for the same accesses, kernel by kernel.
//!
//! An access is one instruction of one warp. **Sectors**: memory moves in sectors of 32 bytes; the least is what a run of as many distinct
//! bytes from the same first byte touches. **Passes**: shared memory serves a word of each of 32 banks a pass, to as many neighbouring
//! lanes as make 128 bytes (32 lanes of 4 bytes, 8 of 16); the least is a pass for 32 distinct words of these lanes. Lanes that want the
//! same word share it.

use super::cases::Draw;
use super::ptx::{Emulator, ORDERS};
use super::{UNITS, cases, compiled, forms, results};
use crate::driver::checks_everything;
use crate::kernels::table::run;
use astrai_engine::Machine;
use astrai_ptx::Class;
use std::collections::BTreeMap;

/// Units that were taken and the least, of sectors and of passes.
type Traffic = [[u64; 2]; 2];

/// The most sectors and passes that the whole table may take, and a kernel alone, as parts of the least.
const MOST: [(&str, f64, f64); 2] = [("sectors", 1.15, 2.0), ("passes", 1.1, 1.1)];
/// Kernels whose sectors are more than that, and why.
const BEYOND: [(&str, &str); 3] = [
    ("dot phase0", "over two batch axes, as loops: the rows that neighbours read are short"),
    ("gather_columns phase0", "single elements anywhere in a row"),
    (
        "gradients of attention phase3",
        "a number of every head of a token, heads apart: of all that the gradient reads next to nothing",
    ),
];

/// What the device did since it was last asked, by kernel.
fn traffic(device: &Emulator, name: &str, all: &mut BTreeMap<String, Traffic>) {
    for (k, counts) in device.took() {
        let of = [Class::Global, Class::Shared].map(|class| counts.units(&k, class));
        let phase = k.name.rsplit('_').next().unwrap_or_default();
        let sum = all.entry(format!("{name} {phase}")).or_default();
        for (sum, (units, least)) in sum.iter_mut().zip(of) {
            *sum = [sum[0] + units, sum[1] + least];
        }
    }
}

#[test]
fn sectors_and_passes_are_near_the_least() {
    if !checks_everything() {
        println!("skipped: all kernels are counted in continuous integration, CI=true");
        return;
    }
    let mut all = BTreeMap::new();
    for units in UNITS {
        let Some(device) = Emulator::new(units).map(Emulator::counting) else { return };
        let machine = Machine::over(device.clone());
        device.order(ORDERS[0]);
        for f in &forms::FORMS {
            let table = (f.table)();
            run(&mut table.session_on(&machine), &table.values(f.sizes[f.sizes.len() - 1]));
            traffic(&device, f.name, &mut all);
        }
        // Loops do not ask how many multiprocessors there are.
        let loops = cases::cases().into_iter().filter(|_| units > 1);
        for case in loops {
            let t = case.rows.iter().copied().max().unwrap_or(1);
            results(&case, &compiled(&case, &machine), &machine, (t, Draw::Plain(0))).unwrap();
            traffic(&device, &case.name, &mut all);
        }
    }
    for (at, (what, most, each)) in MOST.into_iter().enumerate() {
        let (taken, least) = all.values().fold((0, 0), |(t, l), of| (t + of[at][0], l + of[at][1]));
        let ratio = |t: u64, l: u64| t as f64 / l.max(1) as f64;
        println!("{what}: {taken}, least {least}: {:.3}; the most beyond it:", ratio(taken, least));
        let mut worst: Vec<_> = all.iter().map(|(name, of)| (of[at], name)).collect();
        worst.sort_by_key(|([taken, least], _)| least.wrapping_sub(*taken) as i64);
        for ([taken, least], name) in worst.into_iter().take(12) {
            println!("    {name}: {taken}, least {least}: {:.2}", ratio(taken, least));
        }
        let beyond = all.iter().filter(|(name, of)| {
            let named = BEYOND.iter().any(|(known, _)| name == known);
            (ratio(of[at][0], of[at][1]) > each) != (named && at == 0)
        });
        let beyond: Vec<&String> = beyond.map(|(name, _)| name).collect();
        assert!(
            beyond.is_empty(),
            "{what} beyond {each} times the least, or named and not beyond: {beyond:?}"
        );
        assert!(ratio(taken, least) <= most, "{what} are more than {most} times the least");
    }
}

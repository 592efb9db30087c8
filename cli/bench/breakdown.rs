//! Floors, and where a step's time beyond its floor goes. In: launches, measured peaks, the seconds of the whole step. Out: fields of a
//! line; a table by kind of kernel, the most above its floor first.

use crate::measure::{Seconds, rounded};
use crate::table::table;
use astrai_engine::machine::Peaks;
use astrai_ir::DType;
use astrai_runtime::ProfileRow;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The fields of the least seconds in which launches of these costs can run, all of them so many times, which part of the median they
/// are, and how the machine held its peaks; none where no peaks are known.
pub(super) fn floor(
    peaks: &Option<Peaks>,
    runs: &[(&[(f64, f64)], f64)],
    seconds: &Seconds,
    storage: DType,
) -> Vec<(String, Value)> {
    let Some(peaks) = peaks else { return vec![] };
    let one = |costs: &[(f64, f64)]| -> f64 {
        costs.iter().map(|(flops, bytes)| peaks.floor(*flops, *bytes, storage)).sum()
    };
    let least: f64 = runs.iter().map(|(costs, times)| times * one(costs)).sum();
    let part = |name: &str, x: f64| (name.to_string(), json!(rounded(x, 3)));
    vec![
        ("floor_seconds".into(), json!(rounded(least, 6))),
        part("of_floor", least / seconds.median),
        part("peak_held", peaks.arithmetic(storage).held),
        part("read_held", peaks.reading.held),
    ]
}

fn kind(form: &str) -> &str {
    match form {
        "dot" => "dots",
        "attention_grad" => "attention's gradient",
        "grouped" | "outer" => "dots of experts",
        "route" => "routing",
        "loops" => "element by element",
        "collective" => "collectives",
        "interpreted" => "interpreter",
        form => form,
    }
}

/// The table for launches of programs, one of which may have a name that stands for all its kinds. What `seconds` has beyond all
/// launches went between them.
pub(super) fn breakdown(
    programs: &[(Option<&'static str>, &[ProfileRow])],
    peaks: &Peaks,
    dtype: DType,
    seconds: f64,
) -> String {
    let mut sums: BTreeMap<&str, [f64; 2]> = BTreeMap::new();
    for (name, rows) in programs {
        for row in *rows {
            let [floor, measured] = sums.entry(name.unwrap_or(kind(row.form))).or_default();
            *floor += peaks.floor(row.flops as f64, row.bytes as f64, dtype);
            *measured += row.measured;
        }
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    let sum = |sums: &[(&str, [f64; 2])], of: usize| sums.iter().map(|(_, s)| s[of]).sum::<f64>();
    sums.push(("between kernels", [0.0, (seconds - sum(&sums, 1)).max(0.0)]));
    sums.sort_by(|(_, a), (_, b)| (b[1] - b[0]).total_cmp(&(a[1] - a[0])));
    let all = [sum(&sums, 0), sum(&sums, 1)];
    sums.push(("all", all));
    let row = |(kind, [floor, measured]): &(&str, [f64; 2])| {
        let above = measured - floor;
        let ms = |x: f64| format!("{:.2}", x * 1e3);
        let share = format!("{:.1}%", 100.0 * above / all[1].max(1e-12));
        vec![kind.to_string(), ms(*floor), ms(*measured), ms(above), share]
    };
    let rows: Vec<Vec<String>> = sums.iter().map(row).collect();
    table(&["what", "floor ms", "measured ms", "above floor ms", "of the time"], &rows)
}

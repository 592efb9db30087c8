//! Where a step's time beyond its floor goes. In: timed launches, measured peaks, the seconds of the whole step. Out: a table by
//! kind of kernel, the most above its floor first.

use crate::table::table;
use astrai_ir::DType;
use astrai_runtime::ProfileRow;
use astrai_runtime::device::cpu::peaks::Peaks;

/// Seconds of one kind.
#[derive(Default)]
struct Sum {
    floor: f64,
    measured: f64,
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
    let mut sums: Vec<(&str, Sum)> = Vec::new();
    for (name, rows) in programs {
        for row in *rows {
            let kind = name.unwrap_or(kind(row.form));
            let at = sums.iter().position(|(k, _)| *k == kind).unwrap_or_else(|| {
                sums.push((kind, Sum::default()));
                sums.len() - 1
            });
            sums[at].1.floor += peaks.floor(row.flops as f64, row.bytes as f64, dtype);
            sums[at].1.measured += row.measured;
        }
    }
    let launches: f64 = sums.iter().map(|(_, s)| s.measured).sum();
    sums.push(("between kernels", Sum { floor: 0.0, measured: (seconds - launches).max(0.0) }));
    sums.sort_by(|(_, a), (_, b)| (b.measured - b.floor).total_cmp(&(a.measured - a.floor)));
    let [floor, measured] =
        [|s: &Sum| s.floor, |s: &Sum| s.measured].map(|of| sums.iter().map(|(_, s)| of(s)).sum::<f64>());
    sums.push(("all", Sum { floor, measured }));
    let row = |(kind, s): &(&str, Sum)| {
        let above = s.measured - s.floor;
        let ms = |x: f64| format!("{:.2}", x * 1e3);
        let share = format!("{:.1}%", 100.0 * above / measured.max(1e-12));
        vec![kind.to_string(), ms(s.floor), ms(s.measured), ms(above), share]
    };
    let rows: Vec<Vec<String>> = sums.iter().map(row).collect();
    table(&["what", "floor ms", "measured ms", "above floor ms", "of the time"], &rows)
}

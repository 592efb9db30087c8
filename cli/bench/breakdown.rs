//! Floors, and where a step's time beyond its floor goes. In: launches, peaks measured beside the runs, the seconds of the runs. Out: fields
//! of a line; a table by kind of kernel, the most above its floor first.

use crate::measure::{Seconds, once, peak_rss_mb, rounded};
use crate::table::table;
use astrai_engine::machine::{Machine, Peaks, median};
use astrai_ir::DType;
use astrai_runtime::ProfileRow;
use astrai_runtime::device::forget_peak;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Seconds of a run that finds little of what it reads in the caches.
const LONG: f64 = 0.5;
/// Seconds of runs between two looks at the peaks, at least.
const BETWEEN: f64 = 1.0;

/// Runs, with the machine's peaks before, between and after them: others on the machine come and go, and a hypervisor moves its cores, so that
/// peaks of another moment may be those of another machine.
pub(super) struct Runs<'a> {
    machine: &'a Machine,
    looks: Vec<Option<Peaks>>,
    /// Of each run the looks before it, and its seconds.
    runs: Vec<(usize, f64)>,
    /// MiB that the process held at most, but for what looks took.
    most: u64,
    /// Whether the system keeps what looks took in the most that the process held.
    kept: bool,
}

impl<'a> Runs<'a> {
    /// None yet.
    pub(super) fn new(machine: &'a Machine) -> Runs<'a> {
        Runs { machine, looks: vec![], runs: vec![], most: 0, kept: false }
    }

    /// Measures the peaks, reading on `again`, as [`Peaks::measure`] does; whether there are any.
    pub(super) fn look(&mut self, again: &[&[u8]]) -> bool {
        self.most = self.peak_rss_mb();
        let peaks = Peaks::measure(&*self.machine.device, again);
        self.kept |= !forget_peak();
        self.looks.push(peaks);
        peaks.is_some()
    }

    /// A run took so long.
    pub(super) fn add(&mut self, seconds: f64) {
        self.runs.push((self.looks.len(), seconds));
    }

    /// Runs `work` on a subject that reads the bytes of `again` over and over, `repeat` times after one run that does not count, with looks
    /// before, between and after them. `work` hears whether it counts: what a look reads leaves the caches to it, so a short run behind
    /// one is run once before it does.
    pub(super) fn repeat<S, T, E>(
        &mut self,
        repeat: u32,
        subject: &mut S,
        again: impl Fn(&S) -> Vec<&[u8]>,
        mut work: impl FnMut(&mut S, bool) -> Result<T, E>,
    ) -> Result<Seconds, E> {
        let mut last = once(|| work(subject, false))?.1;
        let mut since = BETWEEN;
        for _ in 0..repeat {
            if since >= BETWEEN {
                since = 0.0;
                if self.look(&again(subject)) && last < LONG {
                    work(subject, false)?;
                }
            }
            last = once(|| work(subject, true))?.1;
            since += last;
            self.add(last);
        }
        self.look(&again(subject));
        Ok(Seconds::of(self.runs.iter().map(|(_, seconds)| *seconds).collect()))
    }

    /// MiB that the process held at most, but for what looks took.
    pub(super) fn peak_rss_mb(&self) -> u64 {
        if self.kept { self.most } else { self.most.max(peak_rss_mb()) }
    }

    /// The peaks of the last look.
    pub(super) fn last(&self) -> Option<&Peaks> {
        self.looks.last()?.as_ref()
    }

    /// The fields of the least seconds in which launches of these costs can run, all of them so many times, at the peaks before and after each
    /// run: the least of a run, which part it is of what the run took, and how the machine held its peaks, each in the middle of the runs;
    /// none where no peaks are known.
    pub(super) fn floor(&self, parts: &[(&[(f64, f64)], f64)], storage: DType) -> Vec<(String, Value)> {
        let one = |peaks: &Peaks| -> f64 {
            let sum = |costs: &[(f64, f64)]| -> f64 {
                costs.iter().map(|(flops, bytes)| peaks.floor(*flops, *bytes, storage)).sum()
            };
            parts.iter().map(|(costs, times)| times * sum(costs)).sum()
        };
        let looks: Vec<Option<f64>> = self.looks.iter().map(|peaks| peaks.as_ref().map(one)).collect();
        let look = |i: usize| looks.get(i).copied().flatten();
        let around = |(before, seconds): &(usize, f64)| {
            Some(((look(before.checked_sub(1)?)? + look(*before)?) / 2.0, *seconds))
        };
        let least: Vec<(f64, f64)> = self.runs.iter().filter_map(around).collect();
        if least.is_empty() {
            return vec![];
        }
        let middle = |of: &dyn Fn(&(f64, f64)) -> f64| Seconds::of(least.iter().map(of).collect()).median;
        let held =
            |of: &dyn Fn(&Peaks) -> f64| median(self.looks.iter().flatten().map(of)).unwrap_or(f64::NAN);
        [
            ("floor_seconds", middle(&|run| run.0), 6),
            ("of_floor", middle(&|run| run.0 / run.1), 3),
            ("peak_held", held(&|peaks| peaks.arithmetic(storage).held), 3),
            ("read_held", held(&|peaks| peaks.reading.held), 3),
        ]
        .map(|(name, x, decimals)| (name.to_string(), json!(rounded(x, decimals))))
        .into()
    }
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

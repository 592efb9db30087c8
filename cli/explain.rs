//! `astrai compile --explain KIND`. In: a program with its equal forms looked for, and the same without. Out: which rules said
//! something about one layer kind, and what its kernels, operations and bytes were before and are after.

use crate::failure::{Failure, bail};
use crate::page::MAIN;
use crate::table::{bytes, count, table};
use astrai_ir::plan::{Body, Step};
use astrai_runtime::Compiled;
use std::fmt::Write;

/// What became of a layer kind.
pub fn explain(kind: &str, before: &Compiled, after: &Compiled) -> Result<String, Failure> {
    let name = |n: &str| if n.is_empty() { MAIN.to_string() } else { n.to_string() };
    let Some(found) = after.report.searched.iter().find(|s| name(&s.name) == kind) else {
        let known: Vec<String> = after.report.searched.iter().map(|s| name(&s.name)).collect();
        bail!("--explain {kind}: there is no such layer kind; there are {}", known.join(", "));
    };
    let [rounds, terms, classes] = found.size;
    let end = if found.saturated { "nothing more was new" } else { "a limit ended it" };
    let mut text = format!("{kind}: {rounds} rounds, {terms} terms in {classes} classes; {end}\n\n");
    let (was, is) = (sums(before, kind)?, sums(after, kind)?);
    let rows = vec![
        vec!["kernels".to_string(), was[0].to_string(), is[0].to_string()],
        vec!["flops".to_string(), count(was[1]), count(is[1])],
        vec!["bytes".to_string(), bytes(was[2]), bytes(is[2])],
        vec!["predicted us".to_string(), us(found.cost[0]), us(found.cost[1])],
    ];
    text += &table(&["", "before", "after"], &rows);
    if found.fired.is_empty() {
        return Ok(text + "\nno rule applied\n");
    }
    let rows = found.fired.iter().map(|(rule, n)| vec![rule.to_string(), n.to_string()]).collect::<Vec<_>>();
    let _ = write!(text, "\n{}", table(&["rule", "times"], &rows));
    Ok(text)
}

/// Picoseconds as microseconds.
fn us(ps: u64) -> String {
    format!("{:.1}", ps as f64 / 1e6)
}

/// Launches, operations and bytes of one run of a body.
fn sums(program: &Compiled, kind: &str) -> Result<[u64; 3], Failure> {
    let plan = &program.plan;
    let body = plan.bodies.iter().find(|b| b.name == kind);
    let body: &Body = body.unwrap_or(&plan.main);
    let mut sums = [0u64; 3];
    for step in &body.steps {
        let Step::Run { region, .. } = step else { continue };
        let region = &plan.regions[*region];
        sums[0] += 1;
        sums[1] = sums[1].saturating_add(plan.bound(region.flops())?);
        sums[2] = sums[2].saturating_add(plan.bound(region.bytes())?);
    }
    Ok(sums)
}

//! A plan as lines for people: regions, then every body's steps with the buffers they read and write, then weights.

use super::{Body, Buffer, BufferId, Place, Plan, Step};
use std::fmt;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, r) in self.regions.iter().enumerate() {
            let ops = r.graph().nodes().iter().map(|n| n.op.name()).filter(|n| *n != "input");
            let ops: Vec<&str> = ops.collect();
            let layouts: Vec<String> = r.piece.reads.iter().map(|r| r.layout.to_string()).collect();
            let (form, origin) = (r.form().name(), &r.origin);
            writeln!(f, "region {i} {form} [{}]: {}   # {origin}", layouts.join(", "), ops.join(" "))?;
        }
        for b in self.bodies.iter().chain([&self.main]) {
            writeln!(f, "\nbody `{}` arena {}", b.name, b.arena)?;
            b.steps.iter().try_for_each(|s| step(f, b, s))?;
        }
        writeln!(f, "\nscratch {}", self.scratch)?;
        for w in &self.weights {
            writeln!(f, "weight {} {} {}", w.weight.name, w.weight.ty, w.layout)?;
        }
        Ok(())
    }
}

fn step(f: &mut fmt::Formatter<'_>, body: &Body, step: &Step) -> fmt::Result {
    let show = |ids: &[BufferId]| {
        let all: Vec<String> = ids.iter().map(|b| buffer(&body.buffers[*b])).collect();
        all.join(", ")
    };
    match step {
        Step::Run { region, reads, writes, .. } => {
            writeln!(f, "  run {region}: {} -> {}", show(reads), show(writes))
        }
        Step::Call { body, args, results, origin } => {
            writeln!(f, "  call {body}: {} -> {}   # {origin}", show(args), show(results))
        }
    }
}

fn buffer(b: &Buffer) -> String {
    let place = match &b.place {
        Place::Const(bits) => format!("const {} bytes", bits.len()),
        Place::Param(i) => format!("param {i}"),
        Place::Result(i) => format!("result {i}"),
        Place::Weight(i) => format!("weight {i}"),
        Place::Arena(offset) => format!("at {offset}"),
    };
    format!("{} {place}", b.ty)
}

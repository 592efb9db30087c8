//! A check of placed plans that shares nothing with the placer: every buffer's life step by step, every pair compared.

use astrai_ir::Plan;
use astrai_ir::plan::{Body, Place, Step};

/// A stretch of the arena and the steps between which it is needed, both ends included.
struct Life {
    offset: u64,
    bytes: u64,
    from: usize,
    to: usize,
}

/// `Ok` when no two values overlap, nothing is read before it is written, and the arena is not much larger than it must be.
pub fn check(plan: &Plan) -> Result<(), String> {
    for body in plan.bodies.iter().chain([&plan.main]) {
        let lives = lives(plan, body)?;
        for (i, a) in lives.iter().enumerate() {
            if a.offset + a.bytes > body.arena {
                return Err(format!("a value ends at {} of {}", a.offset + a.bytes, body.arena));
            }
            for b in &lives[i + 1..] {
                let together = a.from <= b.to && b.from <= a.to;
                if together && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes {
                    return Err(format!(
                        "bytes {} and {} are in use at once in `{}`",
                        a.offset, b.offset, body.name
                    ));
                }
            }
        }
        let need = (0..body.steps.len())
            .map(|s| {
                lives
                    .iter()
                    .filter(|l| l.from <= s && s <= l.to)
                    .map(|l| l.bytes.next_multiple_of(64))
                    .sum::<u64>()
            })
            .max()
            .unwrap_or(0);
        if body.arena as f64 > need as f64 * 1.3 {
            return Err(format!(
                "an arena of {} bytes for {need} in use at once in `{}`",
                body.arena, body.name
            ));
        }
    }
    let most = plan.bodies.iter().map(|b| b.arena).max().unwrap_or(0);
    if plan.scratch < most {
        Err(format!("{} bytes of scratch, a block needs {most}", plan.scratch))
    } else {
        Ok(())
    }
}

fn lives(plan: &Plan, body: &Body) -> Result<Vec<Life>, String> {
    let mut first: Vec<Option<usize>> = vec![None; body.buffers.len()];
    let mut last = vec![0; body.buffers.len()];
    for (at, step) in body.steps.iter().enumerate() {
        let (reads, writes) = match step {
            Step::Run { reads, writes, .. } => (reads, writes),
            Step::Call { args, results, .. } => (args, results),
        };
        for &r in reads {
            let made =
                matches!(body.buffers[r.0].place, Place::Param(_) | Place::Weight(_) | Place::Const(_));
            if first[r.0].is_none() && !made {
                return Err(format!("step {at} of `{}` reads a value that nothing wrote", body.name));
            }
            last[r.0] = at;
        }
        for &w in writes {
            if first[w.0].replace(at).is_some() {
                return Err(format!("step {at} of `{}` writes a value again", body.name));
            }
            last[w.0] = last[w.0].max(at);
        }
    }
    let mut lives = Vec::new();
    for (i, b) in body.buffers.iter().enumerate() {
        if let (Place::Arena(offset), Some(from)) = (&b.place, first[i]) {
            let bytes = plan.bound(&b.ty.bytes()).map_err(|e| e.to_string())?;
            lives.push(Life { offset: *offset, bytes, from, to: last[i] });
        }
    }
    Ok(lives)
}

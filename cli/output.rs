//! The folder that `astrai compile -o` writes: the graph after every pass, its picture, the plan, and the kernels, each of
//! which compiles by itself.

use astrai_ir::plan::{Body, Buffer, Place, Step};
use astrai_ir::{Backend, Graph, Type, graphviz, json as ir_json};
use astrai_runtime::{Compiled, Stage};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Writes everything about programs whose every stage was dumped into `folder`, made if it does not exist. Each comes with its
/// own folder inside, empty for none; kernels, which are named by what they do, lie together.
pub fn write(
    folder: &Path,
    programs: &[(&'static str, Compiled)],
    backend: &dyn Backend,
    summary: &Value,
) -> Result<(), String> {
    let make = |name: String| {
        let path = folder.join(name);
        fs::create_dir_all(&path).map_err(|e| format!("{}: {e}", path.display()))
    };
    let put = |name: String, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))
    };
    make("kernels".into())?;
    for (inside, program) in programs {
        make(format!("{inside}ir"))?;
        for (i, stage) in program.report.stages.iter().enumerate() {
            let name = format!("{inside}ir/{i:02}-{}", stage.name);
            if let Some(graph) = &stage.graph {
                put(format!("{name}.json"), &ir_json::write_json(graph))?;
            }
            if let Some(text) = text(stage) {
                put(format!("{name}.txt"), &text)?;
            }
        }
        put(format!("{inside}graph.dot"), &graphviz::to_dot(&program.graph))?;
        for kernel in program.kernels.iter().flatten() {
            put(format!("kernels/{}.{}", kernel.identity, backend.extension()), &backend.unit(&[kernel]))?;
        }
        put(format!("{inside}plan.json"), &format!("{:#}\n", plan(program)))?;
    }
    put("summary.json".into(), &format!("{summary:#}\n"))
}

/// Each dumped stage of each program, with its name.
pub fn stages<'a>(
    programs: &'a [(&'static str, Compiled)],
) -> impl Iterator<Item = (String, &'a Stage)> + 'a {
    let dumped = |s: &&Stage| s.graph.is_some() || s.text.is_some();
    let of = move |(of, p): &'a (&'static str, Compiled)| {
        p.report.stages.iter().filter(dumped).map(move |s| (format!("{of}{}", s.name), s))
    };
    programs.iter().flat_map(of)
}

/// What a dumped stage left, as lines for people.
pub fn text(stage: &Stage) -> Option<String> {
    stage.graph.as_ref().map(Graph::to_string).or(stage.text.clone())
}

fn plan(program: &Compiled) -> Value {
    let plan = &program.plan;
    let kernel = |r: usize| program.kernels.get(r).and_then(Option::as_ref);
    let name = |r: usize| kernel(r).map_or_else(|| format!("interpreter_{r}"), |k| k.identity.clone());
    let types = |list: Vec<Type>| list.iter().map(Type::to_string).collect::<Vec<_>>();
    let regions = plan.regions.iter().enumerate().map(|(i, r)| {
        json!({
            "kernel": name(i),
            "form": r.form().name(),
            "origin": r.origin,
            "reads": types(r.piece.read_types()),
            "layouts": r.piece.reads.iter().map(|r| r.layout.to_string()).collect::<Vec<_>>(),
            "writes": types(r.piece.write_types()),
            "flops": r.flops().to_string(),
            "bytes": r.bytes().to_string(),
        })
    });
    let weights = plan.weights.iter().map(|w| {
        let parts: Vec<_> = w.weight.rows().iter().map(|p| json!({"name": p.name, "rows": p.rows})).collect();
        json!({
            "name": w.weight.name,
            "type": w.weight.ty.to_string(),
            "layout": w.layout.to_string(),
            "parts": parts,
        })
    });
    let symbol = |s: &astrai_ir::Symbol| json!({"name": &*s.name, "min": s.min, "max": s.max, "multiple_of": s.multiple_of});
    let names: Vec<&str> = plan.bodies.iter().map(|b| b.name.as_str()).collect();
    json!({
        "symbols": plan.symbols.iter().map(symbol).collect::<Vec<_>>(),
        "regions": regions.collect::<Vec<_>>(),
        "weights": weights.collect::<Vec<_>>(),
        "scratch": plan.scratch,
        "main": body(&plan.main, &name, &names),
        "bodies": plan.bodies.iter().map(|b| body(b, &name, &names)).collect::<Vec<_>>(),
    })
}

fn body(b: &Body, kernel: &dyn Fn(usize) -> String, bodies: &[&str]) -> Value {
    let step = |s: &Step| match s {
        Step::Run { region, reads, writes, origin, .. } => {
            json!({"run": kernel(region.0), "reads": reads, "writes": writes, "origin": &**origin})
        }
        Step::Call { body, args, results, origin } => {
            json!({"call": bodies.get(body.0), "args": args, "results": results, "origin": &**origin})
        }
    };
    let param =
        |(name, layout): &(String, astrai_ir::Layout)| json!({"name": name, "layout": layout.to_string()});
    json!({
        "name": b.name,
        "params": b.params.iter().map(param).collect::<Vec<_>>(),
        "results": b.results,
        "arena": b.arena,
        "buffers": b.buffers.iter().map(buffer).collect::<Vec<_>>(),
        "steps": b.steps.iter().map(step).collect::<Vec<_>>(),
    })
}

fn buffer(b: &Buffer) -> Value {
    let (place, at) = match &b.place {
        Place::Param(i) => ("param", *i as u64),
        Place::Result(i) => ("result", *i as u64),
        Place::Weight(i) => ("weight", i.0 as u64),
        Place::Const(bits) => ("const_bytes", bits.len() as u64),
        Place::Arena(offset) => ("offset", *offset),
    };
    json!({"type": b.ty.to_string(), place: at, "origin": &*b.origin})
}

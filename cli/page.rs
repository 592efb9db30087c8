//! The page that `astrai compile --html` writes. In: programs whose every stage was dumped. Out: one file of HTML that shows
//! their graphs by layer kind, what every pass changed, the plan with its kernels, and memory over time. It fetches nothing
//! and says so to the browser; its size follows the kinds of layers, not their number.

mod bodies;
mod fold;
mod plans;

use crate::failure::Failure;
use crate::summary::fields;
use astrai_engine::page::Page;
use astrai_ir::Target;
use astrai_runtime::Compiled;
use bodies::Bodies;
pub use bodies::MAIN;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

const BODY: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
/// Parts of the one script, in the order in which they follow one another.
const SCRIPT: [&str; 9] = [
    include_str!("page/data.js"),
    include_str!("page/state.js"),
    include_str!("page/layout.js"),
    include_str!("page/plan.js"),
    include_str!("page/graph.js"),
    include_str!("page/passes.js"),
    include_str!("page/memory.js"),
    include_str!("page/details.js"),
    include_str!("page/main.js"),
];

/// The page of programs, each with what stands before the names of its passes, with the summary that the command prints.
pub fn page(
    programs: &[(&'static str, Compiled)],
    report: &Map<String, Value>,
    target: &Target,
) -> Result<String, Failure> {
    let mut strings = Strings::default();
    let mut bodies = Bodies::default();
    let shown = programs.iter().map(|(name, p)| program(name, p, target, &mut strings, &mut bodies));
    let shown = shown.collect::<Result<Vec<Value>, Failure>>()?;
    let data = json!({
        "report": report,
        "target": {
            "name": target.name, "flops": target.peak(astrai_ir::DType::F32), "bandwidth": target.bandwidth,
            "launch": target.launch,
        },
        "programs": shown,
        "bodies": bodies.finish(),
        "strings": strings.all,
    });
    Ok(Page { title: "astrai", style: STYLE, body: BODY, script: &SCRIPT.concat() }.text(&data))
}

/// Texts, each once; everything else refers to them by number.
#[derive(Default)]
struct Strings {
    all: Vec<String>,
    at: HashMap<String, usize>,
}

impl Strings {
    fn of(&mut self, text: &str) -> usize {
        if let Some(at) = self.at.get(text) {
            return *at;
        }
        self.all.push(text.to_string());
        self.at.insert(text.to_string(), self.all.len() - 1);
        self.all.len() - 1
    }
}

fn program<'a>(
    name: &str,
    program: &'a Compiled,
    target: &Target,
    strings: &mut Strings,
    bodies: &mut Bodies<'a>,
) -> Result<Value, Failure> {
    let mut stages = Vec::new();
    for stage in &program.report.stages {
        let kinds = stage.graph.as_ref().map(|g| bodies.kinds(g, strings));
        stages.push(json!({
            "name": stage.name, "seconds": stage.seconds, "nodes": stage.nodes, "kinds": kinds,
        }));
    }
    // Steps name nodes of this graph, which is that of the last stage that leaves one.
    let planned = bodies.kinds(&program.graph, strings);
    let symbols: Vec<String> =
        program.plan.symbols.iter().map(|s| format!("{} ≤ {}", s.name, s.max)).collect();
    let searched = program.report.searched.iter().map(|s| {
        json!({
            "kind": if s.name.is_empty() { bodies::MAIN } else { &s.name },
            "fired": s.fired, "size": s.size, "saturated": s.saturated, "cost": s.cost,
        })
    });
    let searched: Vec<Value> = searched.collect();
    let mut plan = plans::plan(program, target, &planned, strings, bodies)?;
    plan.extend(fields(json!({
        "name": name.trim_end_matches('/'), "symbols": symbols, "stages": stages, "searched": searched,
    })));
    Ok(Value::Object(plan))
}

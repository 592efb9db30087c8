//! The wrapper around stages: timing, verification and dumps for each, so that stages themselves stay plain functions.

use crate::Error;
use astrai_ir::{Graph, IrError, verify};
use std::time::Instant;

/// What a stage left behind.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Name of the pass.
    pub name: &'static str,
    /// Seconds it took.
    pub seconds: f64,
    /// Nodes of the graph and of all blocks (or kernels of a plan) after it.
    pub nodes: usize,
    /// The graph after it, when a dump was asked for.
    pub graph: Option<Graph>,
}

/// Which stages are dumped.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Dump {
    /// None.
    #[default]
    None,
    /// The one with this name.
    After(String),
    /// Every one.
    All,
}

/// The stages of one compilation.
pub(crate) struct Stages {
    pub(crate) done: Vec<Stage>,
    dump: Dump,
}

impl Stages {
    pub(crate) fn new(dump: &Dump) -> Stages {
        Stages { done: Vec::new(), dump: dump.clone() }
    }

    /// Runs a stage that makes a graph.
    pub(crate) fn graph(
        &mut self,
        name: &'static str,
        stage: impl FnOnce() -> Result<Graph, IrError>,
    ) -> Result<Graph, Error> {
        let started = Instant::now();
        let graph = stage()?;
        let seconds = started.elapsed().as_secs_f64();
        verify(&graph).map_err(|e| IrError { message: format!("after {name}: {}", e.message), ..e })?;
        let wanted = match &self.dump {
            Dump::None => false,
            Dump::All => true,
            Dump::After(n) => n == name,
        };
        let nodes = graph.nodes().len() + graph.blocks().iter().map(|b| b.graph.nodes().len()).sum::<usize>();
        self.done.push(Stage { name, seconds, nodes, graph: wanted.then(|| graph.clone()) });
        Ok(graph)
    }

    /// Runs a stage that makes something else; `count` says how much.
    pub(crate) fn other<T>(
        &mut self,
        name: &'static str,
        stage: impl FnOnce() -> Result<T, Error>,
        count: impl FnOnce(&T) -> usize,
    ) -> Result<T, Error> {
        let started = Instant::now();
        let made = stage()?;
        let seconds = started.elapsed().as_secs_f64();
        self.done.push(Stage { name, seconds, nodes: count(&made), graph: None });
        Ok(made)
    }
}

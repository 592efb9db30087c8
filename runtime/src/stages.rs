//! The wrapper around stages: timing, verification and dumps for each, so that stages themselves stay plain functions.

use crate::Error;
use astrai_ir::{Graph, IrError, Kernel, Plan, verify_since};
use astrai_passes::Draft;
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
    /// What a stage that makes no graph left, as lines for people, when a dump was asked for.
    pub text: Option<String>,
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

    fn wants(&self, name: &str) -> bool {
        match &self.dump {
            Dump::None => false,
            Dump::All => true,
            Dump::After(n) => n == name,
        }
    }

    /// Runs a stage that makes a graph of another, which it drops.
    pub(crate) fn graph(
        &mut self,
        name: &'static str,
        graph: Graph,
        stage: impl FnOnce(&Graph) -> Result<Graph, IrError>,
    ) -> Result<Graph, Error> {
        self.found(name, graph, |g| Ok((stage(g)?, ()))).map(|(graph, ())| graph)
    }

    /// Runs a stage that makes a graph of another, where there is something to make it for.
    pub(crate) fn graph_if<T>(
        &mut self,
        what: Option<T>,
        name: &'static str,
        graph: Graph,
        stage: impl FnOnce(&Graph, T) -> Result<Graph, IrError>,
    ) -> Result<Graph, Error> {
        match what {
            Some(what) => self.graph(name, graph, |g| stage(g, what)),
            None => Ok(graph),
        }
    }

    /// Runs a stage that makes a graph of another, which it drops, and finds something. What a stage leaves as it was is not
    /// verified again.
    pub(crate) fn found<T>(
        &mut self,
        name: &'static str,
        before: Graph,
        stage: impl FnOnce(&Graph) -> Result<(Graph, T), IrError>,
    ) -> Result<(Graph, T), Error> {
        let started = Instant::now();
        let (graph, found) = stage(&before)?;
        let seconds = started.elapsed().as_secs_f64();
        let known = if self.done.is_empty() { &Graph::default() } else { &before };
        verify_since(&graph, known).map_err(|e| after(name, e))?;
        drop(before);
        let nodes = graph.nodes().len() + graph.blocks().iter().map(|b| b.graph.nodes().len()).sum::<usize>();
        let kept = self.wants(name).then(|| graph.clone());
        self.done.push(Stage { name, seconds, nodes, graph: kept, text: None });
        Ok((graph, found))
    }

    /// The same where it is wanted; else the graph as it is, and nothing found.
    pub(crate) fn found_if<T: Default>(
        &mut self,
        wanted: bool,
        name: &'static str,
        graph: Graph,
        stage: impl FnOnce(&Graph) -> Result<(Graph, T), IrError>,
    ) -> Result<(Graph, T), Error> {
        if wanted { self.found(name, graph, stage) } else { Ok((graph, T::default())) }
    }

    /// Runs a stage that decides something of a draft.
    pub(crate) fn draft<'g>(
        &mut self,
        name: &'static str,
        stage: impl FnOnce() -> Result<Draft<'g>, IrError>,
    ) -> Result<Draft<'g>, Error> {
        self.other(name, stage, |d| d.verify(), Draft::values, |d| d.text())
    }

    /// Runs a stage that makes a plan.
    pub(crate) fn plan(
        &mut self,
        name: &'static str,
        stage: impl FnOnce() -> Result<Plan, IrError>,
    ) -> Result<Plan, Error> {
        self.other(name, stage, |p| p.verify(name == "place"), Plan::launches, ToString::to_string)
    }

    /// Runs the stage that writes kernels.
    pub(crate) fn kernels(
        &mut self,
        name: &'static str,
        stage: impl FnOnce() -> Result<Vec<Option<Kernel>>, Error>,
    ) -> Result<Vec<Option<Kernel>>, Error> {
        let names = |all: &Vec<Option<Kernel>>| {
            all.iter().flatten().map(|k| format!("{}\n", k.identity)).collect::<String>()
        };
        self.other(name, stage, |_| Ok(()), |k| k.len(), names)
    }

    fn other<T, E>(
        &mut self,
        name: &'static str,
        stage: impl FnOnce() -> Result<T, E>,
        verify: impl FnOnce(&T) -> Result<(), IrError>,
        count: impl FnOnce(&T) -> usize,
        text: impl FnOnce(&T) -> String,
    ) -> Result<T, Error>
    where
        Error: From<E>,
    {
        let started = Instant::now();
        let made = stage()?;
        let seconds = started.elapsed().as_secs_f64();
        verify(&made).map_err(|e| after(name, e))?;
        let kept = self.wants(name).then(|| text(&made));
        self.done.push(Stage { name, seconds, nodes: count(&made), graph: None, text: kept });
        Ok(made)
    }
}

fn after(name: &str, e: IrError) -> IrError {
    IrError { message: format!("after {name}: {}", e.message), ..e }
}

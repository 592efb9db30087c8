//! `astrai compile --mesh`. In: ranks along each axis, a configuration. Out: the mesh, the sequences of one rank, and what the
//! summary says of ranks.

use super::Compile;
use crate::failure::{Failure, bail};
use crate::summary::graph_parameters;
use astrai_builders::{ModelConfig, Ranks};
use astrai_ir::shard::{MAX_RANKS, STAGES};
use astrai_ir::{Axis, Mesh};
use astrai_runtime::Compiled;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Value of `--mesh`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshFlag(Ranks);

impl MeshFlag {
    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.pp * self.0.dp * self.0.ep * self.0.tp
    }
}

impl fmt::Display for MeshFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pp={},dp={},ep={},tp={}", self.0.pp, self.0.dp, self.0.ep, self.0.tp)
    }
}

impl FromStr for MeshFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<MeshFlag, String> {
        let mut ranks = Ranks { pp: 1, dp: 1, ep: 1, tp: 1 };
        let mut given: Vec<String> = Vec::new();
        for part in text.split(',') {
            let axis = Axis::parse(part)?;
            let size = match axis.name.as_str() {
                "pp" => &mut ranks.pp,
                "dp" => &mut ranks.dp,
                "ep" => &mut ranks.ep,
                "tp" => &mut ranks.tp,
                other => return Err(format!("`{other}` is no axis; there are pp, dp, ep, tp")),
            };
            if given.contains(&axis.name) {
                return Err(format!("{} is given twice", axis.name));
            }
            *size = axis.size;
            given.push(axis.name);
        }
        let sizes = [ranks.pp, ranks.dp, ranks.ep, ranks.tp];
        match sizes.into_iter().try_fold(1usize, |all, n| all.checked_mul(n)) {
            Some(n) if n <= MAX_RANKS => Ok(MeshFlag(ranks)),
            _ => Err(format!("there are more than {MAX_RANKS} ranks")),
        }
    }
}

impl Compile {
    /// The mesh, no axes without the flag, and how many of `batch` sequences are one rank's.
    pub(super) fn mesh(&self, config: &ModelConfig, batch: u64) -> Result<(Mesh, u64), Failure> {
        let stages = self.mesh.as_ref().map_or(1, |flag| flag.0.pp);
        if self.stage >= stages {
            bail!("--stage {}: --mesh has {stages} along pp, counted from 0", self.stage);
        }
        let Some(flag) = &self.mesh else { return Ok((Mesh::default(), batch)) };
        let mesh = flag.0.mesh(config).map_err(|m| format!("--mesh: {m}"))?;
        let shares = (flag.0.dp * flag.0.ep) as u64;
        if !batch.is_multiple_of(shares) {
            bail!("--batch {batch} does not divide by the {shares} ranks of dp and ep");
        }
        Ok((mesh, batch / shares))
    }
}

/// Adds what is known of ranks to a summary: which stage they are, the parameters of one, its collectives.
pub fn report(
    summary: &mut Map<String, Value>,
    programs: &[&Compiled],
    mesh: &Mesh,
    stage: usize,
) -> Result<(), Failure> {
    if mesh.size(STAGES) > 1 {
        summary.insert("stage".into(), json!({"number": stage, "stages": mesh.size(STAGES)}));
    }
    let mut collectives: BTreeMap<&str, [u64; 2]> = BTreeMap::new();
    for program in programs {
        for (kind, [count, bytes]) in program.collectives()? {
            let sum = collectives.entry(kind).or_insert([0, 0]);
            *sum = [sum[0] + count, sum[1].saturating_add(bytes)];
        }
    }
    let parameters = programs.first().map(|program| graph_parameters(&program.graph)).transpose()?;
    summary.insert("rank_parameters".into(), json!(parameters));
    let row = |(kind, [count, bytes]): (&str, [u64; 2])| {
        (kind.to_string(), json!({"count": count, "bytes": bytes}))
    };
    summary.insert("collectives".into(), Value::Object(collectives.into_iter().map(row).collect()));
    Ok(())
}

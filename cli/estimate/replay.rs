//! `astrai estimate --replay`: the flags of a server and of what it is sent, and what it would do.

use super::Estimate;
use super::shown::seconds;
use crate::failure::{Failure, bail};
use crate::table::{bytes, table};
use crate::workload::WorkloadFlags;
use astrai_builders::Cache;
use astrai_engine::load::Trace;
use astrai_engine::serving::{KvMemory, Room, SEQUENCES};
use astrai_estimate::hardware::Hardware;
use astrai_estimate::replay::{Replayed, Series, StepCosts, replay};
use clap::Args;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A server, and what it is sent.
#[derive(Args, Clone, Debug)]
pub(super) struct ReplayFlags {
    /// Serve requests in predicted time: the scheduler of `astrai serve`, with the seconds of each step in place of a device
    #[arg(long, conflicts_with_all = ["legacy", "list", "search", "check", "measure", "calibrate", "published"])]
    #[arg(conflicts_with_all = ["purpose", "batch", "seq", "dp", "pp", "micro_batches", "interleave", "zero", "recompute", "xlsx", "html", "timeline"])]
    pub(super) replay: bool,
    /// Requests that were there, in place of random ones: lines of JSON with timestamp (ms), input_length, output_length, and
    /// hash_ids of blocks of 512 tokens (Mooncake's traces)
    #[arg(long, value_name = "FILE", requires = "replay")]
    pub(super) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(super) workload: WorkloadFlags,
    /// Most answers computed at once [default: 32]
    #[arg(long, value_name = "N", requires = "replay", value_parser = clap::value_parser!(u16).range(1..=4096))]
    max_seqs: Option<u16>,
    /// Most tokens in one step, of prompts and answers together [default: 64 a core, 256 where it has a matrix unit, 512 at most, on GPUs and with experts]
    #[arg(long, value_name = "N", requires = "replay", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    max_batch_tokens: Option<u32>,
    /// Most tokens of prompt and answer together [default: what the model takes and the memory holds]
    #[arg(long, value_name = "N", requires = "replay", value_parser = clap::value_parser!(u32).range(2..))]
    max_model_len: Option<u32>,
    /// Memory for keys and values: a size, 4GiB say, or a part of what is free beside the weights, 40% say
    /// [default: what all sequences can use, at most 90%]
    #[arg(long, value_name = "SIZE", requires = "replay")]
    kv_memory: Option<KvMemory>,
    /// Compute every prompt whole
    #[arg(long, requires = "replay")]
    no_prefix_cache: bool,
}

impl ReplayFlags {
    /// Refuses what is of no use without --replay.
    pub(super) fn check(&self) -> Result<(), Failure> {
        if !self.replay && self.workload != WorkloadFlags::default() {
            bail!(
                "--num-prompts, --random-input-len and what else says which requests are sent go with --replay; leave them out"
            );
        }
        let w = &self.workload;
        let random = WorkloadFlags {
            num_prompts: None,
            max_concurrency: None,
            goodput: vec![],
            percentile_metrics: vec![],
            metric_percentiles: None,
            ..w.clone()
        };
        if self.trace.is_some() && random != WorkloadFlags::default() {
            bail!(
                "--trace says when requests are sent and how long they are; leave --request-rate, --random-… and --seed out"
            );
        }
        Ok(())
    }

    fn room(&self, storage: astrai_ir::DType) -> Room {
        Room {
            sequences: self.max_seqs.map_or(SEQUENCES, usize::from),
            tokens: self.max_batch_tokens.map(|n| n as usize),
            context: self.max_model_len.map(|n| n as usize),
            // Nothing else is on the device.
            kv: Some(self.kv_memory.unwrap_or(KvMemory::Share(0.9))),
            prefix_cache: !self.no_prefix_cache,
            ..Room::of_one(storage, None)
        }
    }
}

impl Estimate {
    /// What requests would wait.
    pub(super) fn replay(&self, model: &Path, out: &mut dyn Write) -> Result<(), Failure> {
        let flags = &self.replay;
        let (config, file) = self.config(model)?;
        let hardware = Hardware::open(self.hardware())?;
        let planner = hardware.planner();
        let schedule = self.schedule.schedule();
        let room = flags.room(schedule.storage);
        let named = |e: String| if e.starts_with('-') { e } else { format!("{file}: {e}") };
        let mut costs =
            StepCosts::plan(&config, &schedule, &room, &hardware, planner.backend()).map_err(named)?;
        let w = &flags.workload;
        let at_once = w.max_concurrency.map_or(usize::MAX, |n| n as usize);
        let started = Instant::now();
        let found = match &flags.trace {
            Some(path) => {
                let most = w.num_prompts.map_or(usize::MAX, |n| n as usize);
                let trace = Trace::open(path, config.vocab_size as u32, costs.served.context as u64)?;
                replay(&mut costs, trace.take(most), at_once)?
            }
            None => replay(&mut costs, w.workload()?.requests().map(Ok), at_once)?,
        };
        let took = started.elapsed().as_secs_f64();
        if let (Some(path), true) = (&flags.trace, found.answered.is_empty()) {
            bail!("{}: has no requests", path.display());
        }
        if let Some(path) = &self.csv {
            super::write(path, csv(&found.series).as_bytes())?;
        }
        let head = json!({
            "hardware": hardware.name, "devices": schedule.devices(), "num_prompts": found.answered.len(),
            "request_rate": w.request_rate.filter(|r| r.is_finite()).map_or(json!("inf"), |r| json!(r)),
            "max_concurrency": w.max_concurrency,
        });
        let mut told = w.figures(&found.answered, &found.between, found.seconds).told(head);
        told["server"] = server(&costs, &found, took);
        match self.json {
            true => {
                told["series"] = series(&found.series);
                writeln!(out, "{told}")?;
            }
            false => write!(out, "{}", shown(&told, &costs))?,
        }
        Ok(())
    }
}

/// What the server did.
fn server(costs: &StepCosts, found: &Replayed, took: f64) -> Value {
    let (b, c, mean, most) = (costs.served.bounds, found.counters, found.series.mean(), found.series.most);
    json!({
        "max_seqs": b.sequences, "max_batch_tokens": b.tokens, "max_model_len": costs.served.context, "pages": found.pages,
        "kv_tokens": b.pages * Cache::PAGE, "weight_bytes": costs.served.weight_bytes,
        "kv_bytes": costs.served.kv_bytes, "steps": found.steps, "preemptions": c.preemptions,
        "cached_tokens": c.cache_hits, "running_mean": mean.running, "running_most": most.running,
        "waiting_mean": mean.waiting, "waiting_most": most.waiting, "pages_mean": mean.pages, "pages_most": most.pages,
        "replayed_in_seconds": took,
    })
}

fn series(s: &Series) -> Value {
    let row = |r: [f64; 7]| {
        Value::Object(Series::COLUMNS.iter().map(|c| c.to_string()).zip(r.map(|x| json!(x))).collect())
    };
    s.rows().map(row).collect()
}

fn csv(s: &Series) -> String {
    let row = |r: [f64; 7]| r.map(|x| x.to_string()).join(",") + "\n";
    Series::COLUMNS.join(",") + "\n" + &s.rows().map(row).collect::<String>()
}

/// The same for people.
fn shown(told: &Value, costs: &StepCosts) -> String {
    let mut out = String::new();
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap_or(0.0);
    let (all, server) = (|key: &str| number(told, key), |key: &str| number(&told["server"], key));
    let mut line = |name: &str, text: String| out += &format!("{name:<20} {text}\n");
    let text = |key: &str| told[key].as_str().unwrap_or("").to_string();
    line("hardware", format!("{} x {}", all("devices"), text("hardware")));
    line(
        "server",
        format!(
            "{} sequences, {} tokens a step, {} a sequence; weights {}, keys and values of {} tokens {} a rank",
            server("max_seqs"),
            server("max_batch_tokens"),
            server("max_model_len"),
            bytes(costs.served.weight_bytes),
            server("kv_tokens"),
            bytes(costs.served.kv_bytes)
        ),
    );
    line("requests", format!("{} in {}", all("completed"), seconds(all("duration"))));
    line("requests/s", format!("{:.2}", all("request_throughput")));
    if told["request_goodput"].is_number() {
        line("good requests/s", format!("{:.2}", all("request_goodput")));
    }
    let tokens = ["output_throughput", "total_token_throughput"].map(|key| format!("{:.1}", all(key)));
    line("tokens/s", format!("{} of answers, {} with prompts", tokens[0], tokens[1]));
    let [running, waiting, pages] = ["running", "waiting", "pages"]
        .map(|key| ["mean", "most"].map(|which| server(&format!("{key}_{which}"))));
    line("running", format!("{:.1} on average, {} at most", running[0], running[1]));
    line("waiting", format!("{:.1} on average, {} at most", waiting[0], waiting[1]));
    line("pages", format!("{:.1} on average, {} at most, of {}", pages[0], pages[1], server("pages")));
    line("preemptions", format!("{}", server("preemptions")));
    line("tokens found", format!("{} of prompts, in the prefix cache", server("cached_tokens")));
    line("replayed", format!("{} steps in {}", server("steps"), seconds(server("replayed_in_seconds"))));
    let keys: Vec<&str> =
        told.as_object().map(|o| o.keys().map(String::as_str).collect()).unwrap_or_default();
    let names =
        ["ttft", "tpot", "itl", "e2el"].into_iter().filter(|n| told.get(format!("mean_{n}_ms")).is_some());
    let percentiles: Vec<&str> = keys
        .iter()
        .filter_map(|k| {
            k.strip_suffix("_ttft_ms")
                .or(k.strip_suffix("_e2el_ms"))
                .or(k.strip_suffix("_tpot_ms"))
                .or(k.strip_suffix("_itl_ms"))
        })
        .collect();
    let mut columns: Vec<&str> = Vec::new();
    percentiles.into_iter().for_each(|p| {
        if !columns.contains(&p) {
            columns.push(p)
        }
    });
    let row = |name: &str| {
        let cells = columns.iter().map(|c| format!("{:.2}", all(&format!("{c}_{name}_ms"))));
        [format!("{name}, ms")].into_iter().chain(cells).collect::<Vec<_>>()
    };
    let rows: Vec<_> = names.map(row).collect();
    let head: Vec<&str> = [""].into_iter().chain(columns.iter().copied()).collect();
    out + "\n" + &table(&head, &rows)
}

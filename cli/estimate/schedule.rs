//! The flags of a schedule: what is run, on which ranks, in which steps.

use crate::compile::{Purpose, config_value};
use crate::failure::{Failure, bail};
use crate::flags::{DTypeName, KvFlag, SpeculateFlag};
use astrai_builders::{ModelConfig, Ranks};
use astrai_estimate::lengths::Lengths;
use astrai_estimate::schedule::{Dispatch, Purpose as Estimated, Schedule};
use astrai_estimate::server::{Proposals, Server};
use astrai_ir::DType;
use astrai_train::settings::Recompute;
use clap::{Args, ValueEnum};
use std::path::Path;

/// What is run, on which ranks.
#[derive(Args, Clone, Debug)]
pub(super) struct ScheduleFlags {
    /// Which program: train, prefill (extend), decode
    #[arg(long = "for", alias = "mode", value_enum, value_name = "PROGRAM", default_value_t = Purpose::Prefill)]
    pub(super) purpose: Purpose,
    /// Sequences in a step, of all ranks together [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 31))]
    pub(super) batch: Option<u64>,
    /// Tokens of a sequence; in decode those that are there
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..=1 << 31))]
    pub(super) seq: u64,
    /// How long sequences are that decode goes on with, in place of --seq: uniform:128..4096, lognormal:MEDIAN,SIGMA..LONGEST, or a
    /// file with a length on every line
    #[arg(long, value_name = "LENGTHS", conflicts_with_all = ["seq", "legacy", "list", "check", "replay"])]
    pub(super) context_dist: Option<String>,
    /// Ranks that share tensors [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(super) tp: Option<u32>,
    /// Ranks with sequences of their own [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(super) dp: Option<u32>,
    /// Ranks that share experts, each with sequences of its own [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(super) ep: Option<u32>,
    /// Stages of layers [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 12))]
    pub(super) pp: Option<u32>,
    /// Pieces in which a rank's sequences go through the stages [default: 1; in training one a stage]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub(super) micro_batches: Option<u64>,
    /// Groups of layers of a stage, of an interleaved pipeline (train) [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 10))]
    pub(super) interleave: Option<u64>,
    /// What data-parallel ranks share of training's state: the optimiser's (1), gradients (2), weights (3) [default: 0]
    #[arg(long, value_name = "STAGE", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(super) zero: Option<u8>,
    /// Activations that training computes again [default: selective]
    #[arg(long, value_enum, value_name = "WHICH")]
    pub(super) recompute: Option<Recompute>,
    /// How weights and activations are stored
    #[arg(long, value_enum, default_value_t = DTypeName::Bf16)]
    pub(super) dtype: DTypeName,
    #[command(flatten)]
    pub(super) pages: KvFlag,
    #[command(flatten)]
    pub(super) experts: ExpertFlags,
    #[command(flatten)]
    pub(super) server: ServerFlags,
}

/// How rows come to the ranks of experts.
#[derive(Args, Clone, Debug)]
pub(super) struct ExpertFlags {
    /// Rows of the busiest rank of experts beside an even share (--ep) [default: 1]
    #[arg(long, value_name = "TIMES")]
    expert_imbalance: Option<f64>,
    /// How rows are sent to experts (--ep) [default: all-to-all]
    #[arg(long, value_enum, value_name = "HOW")]
    dispatch: Option<Sending>,
    /// Type in which rows are sent to experts, with a scale for 128 numbers (--ep); they come back as computed
    /// [default: as computed]
    #[arg(long, value_enum, value_name = "TYPE")]
    dispatch_dtype: Option<Narrow>,
}

/// Values of `--dispatch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Sending {
    /// A row for each expert of a token
    AllToAll,
    /// A token once to each node that has experts of it, and on from there, as DeepEP's kernels do
    Deepep,
}

/// Values of `--dispatch-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Narrow {
    /// 8-bit floats
    Fp8,
    /// 8-bit integers
    Int8,
}

/// What a server's steps have beside one token of each sequence, or beside whole prompts.
#[derive(Args, Clone, Debug)]
pub(super) struct ServerFlags {
    #[command(flatten)]
    speculate: SpeculateFlag,
    /// Probability that a proposed token is accepted where all before it were (--speculate, --draft)
    #[arg(long, value_name = "PART")]
    acceptance: Option<f64>,
    /// Tokens of prompts in a step (chunked prefill): of --for prefill those of a piece, of --for decode those beside the
    /// sequences that decode, of prompts of --seq tokens
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 31))]
    chunk: Option<u64>,
    /// Part of every prompt that the prefix cache holds, in whole pages [default: 0]
    #[arg(long, value_name = "PART")]
    prefix_hit: Option<f64>,
}

impl ServerFlags {
    /// The file of a draft model.
    pub(super) fn draft(&self) -> Option<&Path> {
        self.speculate.draft.as_deref()
    }

    /// The steps that these flags ask for.
    pub(super) fn server(&self) -> Result<Server, Failure> {
        let part = |flag: &str, of: Option<f64>, below: bool| match of {
            Some(n) if !(0.0..=1.0).contains(&n) || below && n == 1.0 => {
                let upper = if below { "less than 1" } else { "1" };
                bail!("{flag} {n}: a part from 0 to {upper}")
            }
            of => Ok::<_, Failure>(of),
        };
        let acceptance = part("--acceptance", self.acceptance, false)?;
        let cached = part("--prefix-hit", self.prefix_hit, true)?.unwrap_or(0.0);
        let proposals = match (self.speculate.asked(), acceptance) {
            (None, None) => None,
            (None, Some(_)) => bail!("--acceptance: nothing is proposed; give --speculate or --draft, too"),
            (Some(_), None) => {
                bail!(
                    "--speculate and --draft: how often proposals are right is not in the plan; give --acceptance PART"
                )
            }
            (Some(how), Some(acceptance)) => {
                let draft = self.speculate.draft.as_ref().map(|of| draft(of)).transpose()?;
                Some(Proposals { how, draft, acceptance })
            }
        };
        Ok(Server { proposals, chunk: self.chunk, cached })
    }
}

/// The configuration of a draft model.
fn draft(of: &Path) -> Result<ModelConfig, Failure> {
    let (value, file) = config_value(of)?;
    let reading = ModelConfig::parse(&value.to_string(), &file).map_err(|e| format!("--draft {e}"))?;
    reading.config.check_decoder().map_err(|e| format!("--draft {file}: {e}"))?;
    Ok(reading.config)
}

impl ScheduleFlags {
    pub(super) fn schedule(&self) -> Schedule {
        let [pp, dp, ep, tp] = [self.pp, self.dp, self.ep, self.tp].map(|n| n.unwrap_or(1) as usize);
        let micro = if self.purpose == Purpose::Train { pp as u64 } else { 1 };
        Schedule {
            purpose: match self.purpose {
                Purpose::Train => Estimated::Train,
                Purpose::Prefill => Estimated::Prefill,
                Purpose::Decode => Estimated::Decode,
            },
            batch: self.batch.unwrap_or(1),
            seq: self.seq,
            lengths: None,
            ranks: Ranks { pp, dp, ep, tp },
            micro: self.micro_batches.unwrap_or(micro),
            interleave: self.interleave.unwrap_or(1),
            zero: self.zero.unwrap_or(0),
            storage: if self.dtype == DTypeName::F32 { DType::F32 } else { DType::BF16 },
            recompute: self.recomputed().unwrap_or_default(),
            server: Server::default(),
            dispatch: Dispatch::default(),
        }
    }

    /// A flag that only a plan has.
    pub(super) fn of_plan(&self) -> Option<&'static str> {
        let server = [
            ("--speculate", self.server.speculate.speculate.is_some()),
            ("--draft", self.server.speculate.draft.is_some()),
            ("--acceptance", self.server.acceptance.is_some()),
            ("--chunk", self.server.chunk.is_some()),
            ("--prefix-hit", self.server.prefix_hit.is_some()),
        ];
        self.experts.given().into_iter().chain(server).find(|(_, given)| *given).map(|(flag, _)| flag)
    }

    /// What training computes again, where it is said.
    pub(super) fn recomputed(&self) -> Option<astrai_runtime::Recompute> {
        self.recompute.map(|which| match which {
            Recompute::None => astrai_runtime::Recompute::None,
            Recompute::Selective => astrai_runtime::Recompute::Selective,
            Recompute::Full => astrai_runtime::Recompute::Full,
        })
    }

    /// Gives a schedule the lengths of `--context-dist`, and the longest of so many sequences.
    pub(super) fn contexts(&self, schedule: &mut Schedule, sequences: u64) -> Result<(), Failure> {
        let Some(text) = &self.context_dist else { return Ok(()) };
        if schedule.purpose != Estimated::Decode {
            bail!("--context-dist: only sequences that decode goes on with differ; give --for decode");
        }
        let lengths = Lengths::parse(text).map_err(|e| format!("--context-dist {e}"))?;
        schedule.seq = lengths.longest(sequences);
        schedule.lengths = Some(lengths);
        Ok(())
    }

    /// The schedule with what the other flags of a plan say.
    pub(super) fn planned(&self) -> Result<Schedule, Failure> {
        let mut schedule = self.schedule();
        let batch = schedule.batch;
        self.contexts(&mut schedule, batch)?;
        schedule.server = self.server.server()?;
        schedule.dispatch = self.experts.dispatch(schedule.ranks.ep)?;
        Ok(schedule)
    }
}

impl ExpertFlags {
    fn given(&self) -> [(&'static str, bool); 3] {
        [
            ("--expert-imbalance", self.expert_imbalance.is_some()),
            ("--dispatch", self.dispatch.is_some()),
            ("--dispatch-dtype", self.dispatch_dtype.is_some()),
        ]
    }

    /// How rows are sent to so many ranks of experts.
    pub(super) fn dispatch(&self, ranks: usize) -> Result<Dispatch, Failure> {
        if let Some((flag, _)) = self.given().iter().find(|(_, given)| *given && ranks == 1) {
            bail!("{flag}: only ranks of experts are sent rows; give --ep N, too, or leave it out");
        }
        let imbalance = self.expert_imbalance.unwrap_or(1.0);
        if !(imbalance.is_finite() && imbalance >= 1.0) {
            bail!("--expert-imbalance {imbalance}: a number from 1, an even share, on");
        }
        let dtype = self.dispatch_dtype.map(|narrow| match narrow {
            Narrow::Fp8 => DType::F8E4M3,
            Narrow::Int8 => DType::I8,
        });
        Ok(Dispatch { imbalance, dtype, by_nodes: self.dispatch == Some(Sending::Deepep) })
    }
}

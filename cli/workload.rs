//! The flags of a load of requests, for a server that is measured and for one that is estimated. In: flags. Out: requests, and what
//! is told of them.

use crate::failure::{Failure, bail};
use astrai_engine::load::{Answered, Figures, LONGEST, Metric, Objective, Percentiles, Workload};
use clap::Args;

/// A load of requests, under the names of `vllm bench serve`.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct WorkloadFlags {
    /// Requests [default: 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub num_prompts: Option<u32>,
    /// Requests a second, at random times (Poisson); inf sends all at once [default: inf]
    #[arg(long, value_name = "R")]
    pub request_rate: Option<f64>,
    /// Requests at once; the next one waits for the end of one of them [default: any; over HTTP up to 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub max_concurrency: Option<u32>,
    /// Tokens of a prompt [default: 1024]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(LONGEST)))]
    pub random_input_len: Option<u32>,
    /// Tokens of an answer [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(LONGEST)))]
    pub random_output_len: Option<u32>,
    /// Lengths are drawn from (1 - R) to (1 + R) times these, 0 to 1 [default: 0]
    #[arg(long, value_name = "R")]
    pub random_range_ratio: Option<f64>,
    /// Tokens with which every prompt begins, before its own [default: 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=i64::from(LONGEST)))]
    pub random_prefix_len: Option<u32>,
    /// Prompts are drawn from the first N ids of the vocabulary [default: 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub random_vocab: Option<u32>,
    /// Draws other prompts, lengths and times [default: 0]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// What a good request keeps to, in milliseconds: ttft:200 tpot:50 e2el:5000; request_goodput counts these
    #[arg(long, value_name = "METRIC:MS", num_args = 1..)]
    pub goodput: Vec<Objective>,
    /// Metrics of which percentiles are told: of ttft, tpot, itl, e2el [default: ttft,tpot,itl]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub percentile_metrics: Vec<Metric>,
    /// Which percentiles [default: 99]
    #[arg(long, value_name = "LIST")]
    pub metric_percentiles: Option<Percentiles>,
}

impl WorkloadFlags {
    /// The random load.
    ///
    /// # Errors
    /// A number that is none of a rate or a ratio.
    pub fn workload(&self) -> Result<Workload, Failure> {
        let (rate, ratio) =
            (self.request_rate.unwrap_or(f64::INFINITY), self.random_range_ratio.unwrap_or(0.0));
        if rate.is_nan() || rate <= 0.0 {
            bail!("--request-rate {rate}: give a number above 0, or inf");
        }
        if !(0.0..=1.0).contains(&ratio) {
            bail!("--random-range-ratio {ratio}: give a number from 0 to 1");
        }
        Ok(Workload {
            requests: self.num_prompts.unwrap_or(1000),
            rate,
            input: self.random_input_len.unwrap_or(1024),
            output: self.random_output_len.unwrap_or(128),
            ratio,
            prefix: self.random_prefix_len.unwrap_or(0),
            vocabulary: self.random_vocab.unwrap_or(1000),
            seed: self.seed.unwrap_or(0),
        })
    }

    /// What is told of a load.
    pub fn figures<'a>(
        &'a self,
        answered: &'a [Answered],
        between: &'a [(f64, u64)],
        seconds: f64,
    ) -> Figures<'a> {
        let (goodput, metrics) = (&self.goodput, &self.percentile_metrics);
        Figures {
            answered,
            between,
            seconds,
            goodput,
            metrics,
            percentiles: self.metric_percentiles.as_ref(),
        }
    }
}

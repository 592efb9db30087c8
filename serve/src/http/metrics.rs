//! What operators measure, in Prometheus' text form. Names are vLLM's with `astrai_` before them; where dashboards read vLLM's own, with `vllm:`,
//! the same is told a second time.
//! Times are seconds; what the engine counts is read when somebody asks.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use prometheus::proto::{LabelPair, MetricFamily};
use prometheus::{
    Encoder, Error, Gauge, Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry,
    TextEncoder, register_gauge_with_registry, register_histogram_with_registry,
    register_int_counter_vec_with_registry, register_int_counter_with_registry,
    register_int_gauge_vec_with_registry, register_int_gauge_with_registry,
};

use super::app::App;
use super::error::ApiError;
use crate::answer::{Delta, Ended};
use crate::engine::{Stats, Usage};

/// Seconds until a first token, or a whole answer.
const LONG: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];

/// Seconds between tokens.
const SHORT: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0];

/// Tokens of a request.
const TOKENS: [f64; 16] =
    [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5];

/// The engine's state, by how it is shown.
type Level = (&'static str, &'static str, fn(&Stats) -> usize);
type Count = (&'static str, &'static str, fn(&Stats) -> u64);

const LEVELS: [Level; 6] = [
    ("num_requests_running", "Sequences that run.", |s| s.running),
    ("num_requests_waiting", "Sequences that wait, preempted ones among them.", |s| s.waiting),
    ("num_requests_queued", "Requests that were not yet admitted.", |s| s.queued),
    ("kv_pages", "Pages of keys and values.", |s| s.pages),
    ("kv_cache_bytes", "Bytes of these pages.", |s| usize::try_from(s.page.all).unwrap_or(usize::MAX)),
    ("kv_pages_cached", "Pages that nobody uses but the prefix cache knows.", |s| s.pages_cached),
];

const COUNTS: [Count; 15] = [
    ("prompt_tokens_total", "Tokens of prompts of admitted requests.", |s| s.prompt_tokens),
    ("generation_tokens_total", "Tokens sampled.", |s| s.output_tokens),
    ("prefix_cache_queries_total", "Tokens looked up in the prefix cache.", |s| s.scheduler.cache_queries),
    ("prefix_cache_hits_total", "Tokens found in the prefix cache.", |s| s.scheduler.cache_hits),
    ("forked_sequences_total", "Choices that began with the pages of another of their request.", |s| {
        s.scheduler.forks
    }),
    ("num_preemptions_total", "Sequences that lost their pages to another.", |s| s.scheduler.preemptions),
    ("computed_tokens_total", "Tokens computed.", |s| s.scheduler.computed),
    ("spec_decode_num_draft_tokens_total", "Tokens proposed by speculation.", |s| s.scheduler.proposed),
    ("spec_decode_num_accepted_tokens_total", "Of these, tokens that were sampled too.", |s| {
        s.scheduler.accepted
    }),
    ("engine_steps_total", "Steps of the engine.", |s| s.steps),
    ("engine_steps_failed_total", "Steps that failed, and the requests in them.", |s| s.failed_steps),
    ("spec_decode_failed_total", "Steps without proposals because the draft model failed.", |s| {
        s.failed_drafts
    }),
    ("requests_finished_total", "Requests that ended well.", |s| s.finished),
    ("requests_cancelled_total", "Requests that their clients gave up.", |s| s.cancelled),
    ("requests_failed_total", "Requests that failed.", |s| s.failed),
];

/// All that is measured.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    levels: Vec<IntGauge>,
    /// Locked while they are brought up to date, so that nothing is counted twice.
    counts: Mutex<Vec<IntCounter>>,
    cache_usage: Gauge,
    cache: IntGaugeVec,
    responses: IntCounterVec,
    ends: IntCounterVec,
    queue: Histogram,
    first: Histogram,
    each: Histogram,
    between: Histogram,
    prefill: Histogram,
    decode: Histogram,
    whole: Histogram,
    prompt: Histogram,
    output: Histogram,
    /// The model's name, where everything is told under vLLM's names too.
    vllm: Option<String>,
}

impl Metrics {
    /// Nothing measured yet; under vLLM's names too where the model's name is given.
    ///
    /// # Errors
    /// A name is not one, or there twice.
    pub fn new(vllm: Option<String>) -> Result<Metrics, Error> {
        let registry = Registry::new_custom(Some("astrai".into()), None)?;
        let r = &registry;
        let level = |(name, help, _): &Level| register_int_gauge_with_registry!(*name, *help, r);
        let count = |(name, help, _): &Count| register_int_counter_with_registry!(*name, *help, r);
        let counters =
            |name, help, labels: &[&str]| register_int_counter_vec_with_registry!(name, help, labels, r);
        let time =
            |name, help, buckets: &[f64]| register_histogram_with_registry!(name, help, buckets.to_vec(), r);
        let config = ["cache_dtype", "block_size", "bytes_per_token"];
        let stored = register_int_gauge_vec_with_registry!(
            "cache_config_info",
            "How keys and values are stored.",
            &config,
            r
        )?;
        let usage = "Share of the pages that sequences use, from 0 to 1.";
        Ok(Metrics {
            levels: LEVELS.iter().map(level).collect::<Result<_, _>>()?,
            counts: Mutex::new(COUNTS.iter().map(count).collect::<Result<_, _>>()?),
            cache_usage: register_gauge_with_registry!("kv_cache_usage_perc", usage, r)?,
            cache: stored,
            responses: counters("http_responses_total", "Responses.", &["path", "status"])?,
            ends: counters("request_success_total", "Choices that ended.", &["finished_reason"])?,
            queue: time("request_queue_time_seconds", "From submission to the first step.", &LONG)?,
            first: time("time_to_first_token_seconds", "From submission to the first token.", &LONG)?,
            each: time("request_time_per_output_token_seconds", "Between tokens of a choice.", &SHORT)?,
            between: time("inter_token_latency_seconds", "Between what is told of a choice.", &SHORT)?,
            prefill: time("request_prefill_time_seconds", "From the first step to the first token.", &LONG)?,
            decode: time("request_decode_time_seconds", "From the first token to the last.", &LONG)?,
            whole: time("e2e_request_latency_seconds", "From submission to the end.", &LONG)?,
            prompt: time("request_prompt_tokens", "Tokens of a prompt.", &TOKENS)?,
            output: time("request_generation_tokens", "Tokens generated for a prompt.", &TOKENS)?,
            registry,
            vllm,
        })
    }

    /// A response was begun.
    pub fn response(&self, path: &str, status: u16) {
        self.responses.with_label_values(&[path, &status.to_string()]).inc();
    }

    /// Choices went on, or ended; `told` is when they went on last, over all prompts.
    pub fn deltas(&self, deltas: &[Delta], told: &mut [Option<Instant>]) {
        let now = Instant::now();
        for delta in deltas {
            let before = told.get_mut(delta.index as usize).and_then(|told| told.replace(now));
            before.into_iter().for_each(|before| self.between.observe((now - before).as_secs_f64()));
        }
        for ended in deltas.iter().filter_map(|d| d.ended) {
            self.ends.with_label_values(&[Ended::name(ended)]).inc();
        }
    }

    /// A prompt's `n` choices have ended.
    pub fn finished(&self, usage: &Usage, n: u32, submitted: Instant, first: Option<Instant>) {
        let now = Instant::now();
        self.queue.observe(usage.queued.as_secs_f64());
        self.whole.observe((now - submitted).as_secs_f64());
        if let Some((begun, last)) = usage.first_token.zip(usage.last_token) {
            self.prefill.observe(begun.saturating_sub(usage.queued).as_secs_f64());
            self.decode.observe(last.saturating_sub(begun).as_secs_f64());
        }
        self.prompt.observe(usage.prompt as f64);
        self.output.observe(usage.output as f64);
        let Some(first) = first else { return };
        self.first.observe((first - submitted).as_secs_f64());
        let more = usage.output as f64 / f64::from(n.max(1)) - 1.0;
        if more > 0.0 {
            self.each.observe((now - first).as_secs_f64() / more);
        }
    }

    /// A text's vector was made.
    pub fn embedded(&self, usage: &Usage, submitted: Instant) {
        self.queue.observe(usage.queued.as_secs_f64());
        self.whole.observe(submitted.elapsed().as_secs_f64());
        self.prompt.observe(usage.prompt as f64);
    }

    fn text(&self, stats: &Stats) -> Result<String, Error> {
        for (gauge, (.., read)) in self.levels.iter().zip(LEVELS) {
            gauge.set(i64::try_from(read(stats)).unwrap_or(i64::MAX));
        }
        self.cache_usage.set(stats.kv_use());
        let (page, each) = (stats.page, stats.page.bytes / stats.page.tokens.max(1) as u64);
        let labels = [page.name, &page.tokens.to_string(), &each.to_string()];
        self.cache.with_label_values(&labels).set(1);
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        for (counter, (.., read)) in counts.iter().zip(COUNTS) {
            counter.inc_by(read(stats).saturating_sub(counter.get()));
        }
        drop(counts);
        let (mut out, mut all) = (Vec::new(), self.registry.gather());
        if let Some(model) = &self.vllm {
            let again: Vec<MetricFamily> = all.iter().map(|family| of_vllm(family.clone(), model)).collect();
            all.extend(again);
        }
        TextEncoder::new().encode(&all, &mut out)?;
        Ok(String::from_utf8_lossy(&out).into_owned())
    }
}

/// The same under vLLM's name, with the label by which its dashboards choose.
fn of_vllm(mut family: MetricFamily, model: &str) -> MetricFamily {
    family.set_name(family.name().replacen("astrai_", "vllm:", 1));
    for metric in family.mut_metric() {
        let mut label = LabelPair::default();
        label.set_name("model_name".into());
        label.set_value(model.into());
        metric.set_label(metric.get_label().iter().cloned().chain([label]).collect());
    }
    family
}

/// `GET /metrics`
pub async fn show(State(app): State<Arc<App>>) -> Response {
    let form = "text/plain; version=0.0.4; charset=utf-8";
    match app.metrics.text(&app.engine.stats()) {
        Ok(text) => ([(header::CONTENT_TYPE, form)], text).into_response(),
        Err(e) => ApiError::internal(format!("the metrics cannot be written: {e}")).into_response(),
    }
}

//! Estimates as lines for people.

use crate::table::{bytes, count, table};
use astrai_estimate::check::{Checked, Operator};
use astrai_estimate::estimate::{Estimate, Row as Kernel};
use astrai_estimate::hardware::{ARCHETYPES, Hardware, SAME};
use astrai_estimate::llmsim::{COLUMNS, DIFFERENCES, Machine, Report, Row};
use astrai_estimate::published::{Compared, ENGINES, Outcome};
use astrai_estimate::report::message;
use astrai_estimate::schedule::{Purpose, Schedule};
use astrai_estimate::search::{Found, Rejected};
use std::collections::BTreeMap;

/// Seconds in a unit that suits them.
pub(super) fn seconds(s: f64) -> String {
    match s {
        s if s >= 1.0 => format!("{s:.3} s"),
        s if s >= 1e-3 => format!("{:.3} ms", s * 1e3),
        s => format!("{:.2} us", s * 1e6),
    }
}

/// The summary, and under it the kernels in the order in which they first run.
pub fn estimate(e: &Estimate) -> String {
    let mut out = summary(e);
    let head = [
        "stage", "program", "layer", "operator", "form", "m", "n", "k", "batch", "runs", "types", "flops",
        "bytes", "compute", "memory", "overlap", "start", "sent", "time", "%", "bound by",
    ];
    let row = |r: &Kernel| {
        let (w, t, n) = (&r.work, &r.time, r.launches as f64);
        let [left, right, to] = w.types.map(|d| d.name());
        let mut cells =
            vec![r.stage.to_string(), r.program.into(), w.layer.clone(), w.origin.clone(), w.form.into()];
        cells.extend(r.sizes.map(|n| n.to_string()));
        cells.extend([r.launches.to_string(), format!("{left},{right}>{to}")]);
        cells.extend([count((t.flops * n) as u64), bytes((t.bytes * n) as u64)]);
        cells.extend(
            [t.compute, t.all_memory(), t.overlap(), t.fixed, t.communication()]
                .map(|s| format!("{:.1}", s * n * 1e6)),
        );
        cells.extend([
            format!("{:.1}", r.seconds * 1e6),
            format!("{:.1}", r.share * 100.0),
            t.bound().into(),
        ]);
        cells
    };
    let rows: Vec<Vec<String>> = e.ranks.iter().flat_map(|r| &r.rows).map(row).collect();
    out += "\nTimes are microseconds of all runs of a kernel in a step.\n";
    out += &table(&head, &rows);
    let sent: Vec<String> = e
        .ranks
        .iter()
        .flat_map(|r| &r.rows)
        .filter(|r| !r.time.sent.is_empty())
        .map(|r| format!("{} ({} times): {}\n", r.work.origin, r.launches, message(r)))
        .collect();
    if !sent.is_empty() {
        out += &format!("\nMessages:\n{}", sent.concat());
    }
    out
}

fn summary(e: &Estimate) -> String {
    let (s, t) = (&e.schedule, &e.summary);
    let mut out = String::new();
    let mut line = |name: &str, text: String| out += &format!("{name:<20} {text}\n");
    let r = s.ranks;
    line("hardware", format!("{} x {}", t.devices, e.hardware.name));
    line("parameters", format!("{} ({})", e.parameters, count(e.parameters)));
    let ranks = format!("tp={} dp={} ep={} pp={}", r.tp, r.dp, r.ep, r.pp);
    line(
        "schedule",
        format!(
            "{} of {} sequences of {} tokens{}, {}, {ranks}",
            s.purpose.name(),
            s.batch,
            s.seq,
            if s.lengths.is_some() {
                format!(" at most, {:.1} on average", s.seq as f64 * s.part(None))
            } else {
                String::new()
            },
            s.storage.name()
        ),
    );
    let name = match s.purpose {
        Purpose::Train => "step",
        Purpose::Prefill => "TTFT",
        Purpose::Decode => "TPOT",
    };
    line(name, seconds(t.step));
    line("tokens/s", format!("{:.1}, {:.1} a device", t.tokens_per_s, t.tokens_per_s / t.devices as f64));
    if let Some(p) = &s.server.proposals {
        let (n, all) = (p.tokens(), p.how.proposed());
        line(
            "speculation",
            format!("{all} tokens proposed, {n:.2} of a sequence in a step of {}", seconds(t.period)),
        );
    }
    if let Some([ttft, rate]) = t.beside {
        let chunk = s.server.chunk.unwrap_or(0);
        line(
            "prompts beside",
            format!(
                "{chunk} tokens a step: {rate:.1} tokens/s, one of {} has its first token after {}",
                s.seq,
                seconds(ttft)
            ),
        );
    }
    if s.fresh() < s.seq {
        line(
            "prefix cache",
            format!("{} tokens of every prompt found, {} computed", s.seq - s.fresh(), s.fresh()),
        );
    }
    line("MFU", format!("{:.1} %, {:.1} % of visible pairs", t.mfu[0] * 100.0, t.mfu[1] * 100.0));
    let [compute, memory, sent, fixed] = t.parts.map(seconds);
    line(
        "slowest stage",
        format!("computing {compute}, memory {memory} beside it; starts {fixed}, messages {sent}"),
    );
    if s.ranks.pp > 1 {
        line("bubble", format!("{:.1} %, {} pieces", t.bubble * 100.0, s.pieces()));
    }
    let m = &t.memory;
    let parts = [
        ("weights", m.weights),
        ("KV", m.kv),
        ("activations", m.activations),
        ("buffers", m.buffers),
        ("gradients", m.gradients),
        ("optimiser", m.optimizer),
        ("process", m.process),
    ];
    let parts: Vec<String> =
        parts.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name} {}", bytes(*n))).collect();
    line("memory of a rank", format!("{}: {}", bytes(m.total()), parts.join(", ")));
    let left = bytes(t.left.unsigned_abs());
    let fits =
        if t.left >= 0 { format!("fits, {left} left") } else { format!("does not fit: {left} missing") };
    line("", format!("{fits} of {}", bytes(e.hardware.memory as u64)));
    if m.kv_per_token > 0 {
        line("KV of a token", format!("{} a rank", bytes(m.kv_per_token)));
    }
    line(
        "largest",
        format!("{} sequences of {} tokens, or {} of {}", t.largest[0], s.seq, s.batch, t.largest[1]),
    );
    if let Some(cost) = t.cost {
        line("cost", format!("{cost:.4} USD for a million tokens"));
    }
    if let Some(energy) = t.energy {
        line("energy", format!("{energy:.3} J a token"));
    }
    out
}

/// The flags that ask for a schedule.
fn flags(s: &Schedule) -> String {
    let r = s.ranks;
    let mut text = format!("--batch {} --tp {} --dp {} --ep {} --pp {}", s.batch, r.tp, r.dp, r.ep, r.pp);
    text += &format!(" --micro-batches {}", s.micro);
    if let Some(chunk) = s.server.chunk {
        text += &format!(" --chunk {chunk}");
    }
    if s.purpose == Purpose::Train {
        let recompute = format!("{:?}", s.recompute).to_lowercase();
        if s.interleave > 1 {
            text += &format!(" --interleave {}", s.interleave);
        }
        text += &format!(" --zero {} --recompute {recompute}", s.zero);
    }
    text
}

/// The flags of a rejected schedule; of ranks that are refused whole no more than these.
fn which(r: &Rejected) -> String {
    let ranks = r.schedule.ranks;
    match r.whole {
        true => format!("--tp {} --dp {} --ep {} --pp {}", ranks.tp, ranks.dp, ranks.ep, ranks.pp),
        false => flags(&r.schedule),
    }
}

/// The frontier, the winner, and why the others were rejected, reasons of the same words once.
pub fn found(found: &Found, took: f64) -> String {
    let rejected = found.rejected.len();
    let mut out =
        format!("{} schedules looked at in {took:.2} s, {rejected} of them rejected\n\n", found.considered);
    let row = |(i, e): (usize, &Estimate)| {
        let t = &e.summary;
        let best = if i == found.winner { "best" } else { "" };
        let cells = [
            best.to_string(),
            seconds(t.step),
            format!("{:.1}", t.tokens_per_s),
            format!("{:.1}", t.tokens_per_s / t.devices as f64),
            t.devices.to_string(),
            bytes(t.memory.total()),
            flags(&e.schedule),
        ];
        cells.to_vec()
    };
    let rows: Vec<_> = found.frontier.iter().enumerate().map(row).collect();
    out += &table(&["", "step", "tokens/s", "a device", "devices", "memory", "schedule"], &rows);
    if !found.between.is_empty() {
        out += &format!("{} more between these, by the coarse plan\n", found.between.len());
    }
    // Numbers aside, reasons are few.
    let mut reasons: BTreeMap<String, (usize, &Rejected)> = BTreeMap::new();
    for one in &found.rejected {
        let words = one.why.split(|c: char| !c.is_alphabetic()).filter(|w| !w.is_empty());
        reasons.entry(words.collect()).or_insert((0, one)).0 += 1;
    }
    let mut rows: Vec<_> = reasons.into_values().collect();
    rows.sort_by_key(|(n, _)| std::cmp::Reverse(*n));
    let row = |(n, r): &(usize, &Rejected)| vec![n.to_string(), r.why.clone(), which(r)];
    out += "\n";
    out + &table(&["rejected", "why, of one of them", "which"], &rows.iter().map(row).collect::<Vec<_>>())
}

/// LLMSim's table, its summary, the plan's numbers beside it, and why they differ.
pub fn llmsim(report: &Report, machine: &Machine, truth: Option<&Estimate>) -> String {
    let row = |r: &Row| {
        let sizes = [r.m, r.n, r.k, r.batch, r.layers].map(|n| n.to_string());
        let us = r.us.into_iter().chain([r.single_layer_us(), r.total_ms()]).map(|x| format!("{x:.3}"));
        let last = [format!("{:.2}", report.percent(r)), format!("{:.0}", r.weight_bytes())];
        let names = [r.name.to_string(), r.kind().to_string()];
        let types = r.types.map(|t| t.name().to_string());
        names.into_iter().chain(sizes).chain(types).chain(us).chain(last).collect::<Vec<_>>()
    };
    let rows: Vec<_> = report.rows.iter().map(row).collect();
    let mut out = table(&COLUMNS, &rows);
    let s = &report.summary;
    let gib = |bytes: f64| bytes / 1073741824.0;
    let [compute, memory, transfer, total] = s.per_layer_ms;
    let latency = if report.decode { "TPOT" } else { "TTFT" };
    let mut line = |name: &str, text: String| out += &format!("{name:<20} {text}\n");
    line("\nhardware", machine.name.clone());
    let layer = format!(
        "compute {compute:.3} ms, memory {memory:.3} ms, transfer {transfer:.3} ms, total {total:.3} ms"
    );
    line("a layer of each", layer);
    line("bottleneck", format!("{} ({:.3} ms)", s.bottleneck.0, s.bottleneck.1));
    line(latency, format!("{:.3} ms", s.latency_ms));
    line("tokens/s", format!("{:.2}, {:.2} a GPU", s.throughput[0], s.throughput[1]));
    line("weights a GPU", format!("{:.3} GB", gib(s.weight_bytes)));
    line("KV of a token", format!("{} bytes a GPU, {} in all", s.kv_bytes[0], s.kv_bytes[1]));
    if let Some(e) = truth {
        let (t, n) = (&e.summary, e.summary.devices);
        line("\nthe plan that runs", format!("{n} ranks, {}", e.schedule.storage.name()));
        line(latency, format!("{:.3} ms", t.step * 1e3));
        line("tokens/s", format!("{:.2}, {:.2} a GPU", t.tokens_per_s, t.tokens_per_s / n as f64));
        line("weights a GPU", format!("{:.3} GB", gib(t.memory.weights as f64)));
        line("KV of a token", format!("{} bytes a GPU", t.memory.kv_per_token));
    }
    out += "\nWhat LLMSim counts otherwise than the plan:\n";
    out + &DIFFERENCES.map(|line| format!("- {line}\n")).concat()
}

/// Predicted beside measured, kernels that take the longest first.
pub fn checked(c: &Checked, hardware: &Hardware) -> String {
    let all: f64 = c.operators.iter().map(|o| o.measured).sum();
    let mut order: Vec<&Operator> = c.operators.iter().collect();
    order.sort_by(|a, b| b.measured.total_cmp(&a.measured));
    let row = |o: &&Operator| {
        let error = if o.measured > 0.0 { (o.predicted / o.measured - 1.0) * 100.0 } else { 0.0 };
        let us = |s: f64| format!("{:.1}", s * 1e6);
        vec![
            o.program.to_string(),
            o.work.layer.clone(),
            o.work.origin.clone(),
            o.work.form.to_string(),
            o.time.precision.name().to_string(),
            o.work.launches.to_string(),
            us(o.predicted),
            us(o.measured),
            format!("{:.1}", o.measured / all * 100.0),
            format!("{error:.1}"),
        ]
    };
    let head =
        ["program", "layer", "operator", "form", "in", "runs", "predicted", "measured", "%", "error %"];
    let mut out = table(&head, &order.iter().map(row).collect::<Vec<_>>());
    out += "\nTimes are microseconds of a step.\n";
    out += &format!("hardware             {}\n", hardware.name);
    out += &format!("predicted            {}\n", seconds(c.predicted));
    out += &format!(
        "measured             {}, the middle; runs differ by {:.1} %\n",
        seconds(c.measured),
        c.spread * 100.0
    );
    out += &format!("error                {:.1} %\n", c.error() * 100.0);
    if let Some([planned, peak]) = c.memory {
        let error = (planned as f64 / peak as f64 - 1.0) * 100.0;
        let [planned, peak] = [planned, peak].map(bytes);
        out += &format!("memory               {planned} planned, {peak} held at most, error {error:.1} %\n");
    }
    if let Some(now) = c.now {
        let speeds = [
            ("reading", Some(now.read), Some(hardware.bandwidth), "GB/s"),
            ("exchange", now.exchange, hardware.exchange, "GB/s between cores"),
            ("products", now.product, hardware.product, "GFLOP/s of small products"),
        ];
        for (name, now, told, unit) in speeds {
            let Some(now) = now else { continue };
            let told =
                told.map(|told| format!(", {:.1} in the hardware's file", told / 1e9)).unwrap_or_default();
            out += &format!("{name:<21}{:.1} {unit} beside the steps{told}\n", now / 1e9);
        }
        out += &format!(
            "as the file says     {}; predicted is for the speeds beside the steps\n",
            seconds(c.as_told)
        );
    }
    out
}

/// Every published measurement with its error, and the numbers fitted.
pub fn published(outcome: &Outcome) -> String {
    let row = |r: &Compared| {
        let c = &r.case;
        vec![
            if c.fitted { "fitted" } else { "tested" }.to_string(),
            c.hardware.name.clone(),
            c.what.clone(),
            seconds(c.measured),
            seconds(r.predicted),
            format!("{:.1}", r.error() * 100.0),
            c.source.clone(),
            c.reason.clone().unwrap_or_default(),
        ]
    };
    let head = ["half", "hardware", "what", "measured", "predicted", "error %", "source", "why"];
    let mut out = table(&head, &outcome.rows.iter().map(row).collect::<Vec<_>>());
    let (median, worst) = outcome.tested();
    out += &format!(
        "\n{} measurements; of the tested half the median error is {:.1} %, the greatest without a reason {:.1} %\n\n",
        outcome.rows.len(),
        median * 100.0,
        worst * 100.0
    );
    let numbers = &outcome.fitted.kernels;
    let row = |(name, r): (&&str, &astrai_estimate::hardware::Reach)| {
        vec![name.to_string(), format!("{:.3}", r.compute), format!("{:.3}", r.memory), seconds(r.fixed)]
    };
    let apart = |name: &str| SAME.iter().all(|(form, _)| *form != name);
    let rows: Vec<_> = ARCHETYPES.iter().zip(&numbers.reach).filter(|(n, _)| apart(n)).map(row).collect();
    out += &table(&["archetype", "of the peak", "of the bandwidth", "beside"], &rows);
    for (engine, launch) in ENGINES.iter().zip(outcome.fitted.launch) {
        out += &format!("between starts, {engine}: {}\n", seconds(launch));
    }
    out
}

//! What data-parallel ranks send that share training's state (ZeRO, arXiv 1910.02054). In: a schedule, works of the plans, which hold
//! whole states. Out: the messages in their place: by the formula of the paper, as the plans share nothing.

use crate::Refused;
use crate::hardware::Hardware;
use crate::model::message;
use crate::schedule::Schedule;
use crate::work::{Message, Work};
use astrai_ir::shard::Traffic;
use astrai_ir::{Dim, Mesh};
use astrai_passes::DATA;

/// What ranks that share weights (ZeRO 3) gather, once forward and once backward, a piece.
pub fn gathers(s: &Schedule, mesh: &Mesh, weights: [u64; 2]) -> Vec<Message> {
    let of = |((bytes, ranks), axes): ((u64, u64), &[&str])| {
        let bytes = Dim::from(usize::try_from(bytes).unwrap_or(usize::MAX));
        let over = mesh.axes.iter().filter(|a| axes.contains(&a.name.as_str())).cloned().collect();
        Message::new("all_gather", Traffic { bytes, times: 1, ranks }, over)
    };
    let all = weights.into_iter().zip(s.holders()).zip([&["dp", "ep"][..], &["dp"]]);
    all.filter(|((bytes, ranks), _)| s.zero > 2 && *ranks > 1 && *bytes > 0).map(of).collect()
}

/// Seconds of these, twice a piece.
///
/// # Errors
/// The hardware has no links.
pub fn gathering(s: &Schedule, hardware: &Hardware, mesh: &Mesh, weights: [u64; 2]) -> Result<f64, Refused> {
    let sent = gathers(s, mesh, weights).into_iter().map(|m| message(&m, hardware, mesh, &|_| None));
    sent.map(|sent| sent.map(|sent| 2.0 * (sent.latency + sent.bandwidth))).sum()
}

/// A work of the update of accumulated gradients: what of it ranks do with each piece, and what with the update. The sum of a gradient is
/// an all-reduce once a step. Where gradients are shared (ZeRO 2) the half of it that scatters comes with each piece, the half that gathers
/// with the update; where weights are shared, too, these are gathered with each piece instead.
pub fn summed(s: &Schedule, work: &Work) -> [Option<Work>; 2] {
    if !sums_gradients(work) {
        return [None, Some(work.clone())];
    }
    let half = |operator| {
        let mut half = work.clone();
        for m in &mut half.messages {
            (m.operator, m.traffic.times) = (operator, m.traffic.times.div_ceil(2));
        }
        Some(half)
    };
    match s.zero {
        // The plan of one piece has the sum in its gradient.
        0 | 1 if !s.accumulates() => [Some(work.clone()), None],
        0 | 1 => [None, Some(work.clone())],
        2 => [half("reduce_scatter"), half("all_gather")],
        _ => [half("reduce_scatter"), None],
    }
}

/// Whether it sums a gradient over data-parallel ranks: from the state into the state. Sums of the norm are values between kernels.
fn sums_gradients(work: &Work) -> bool {
    let data = |m: &Message| m.operator == "all_reduce" && m.over.iter().all(|a| DATA.contains(&&*a.name));
    !work.messages.is_empty() && work.messages.iter().all(data) && work.warm.size() == Some(0)
}

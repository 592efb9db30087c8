//! What a compiled program costs and holds. In: a plan at the upper bounds of its symbols. Out: launches, flops, bytes, memory, and
//! the refusal of what does not fit.

use crate::Error;
use crate::buffers::Buffers;
use crate::compiled::Compiled;
use crate::device::Device;
use crate::pack::layout_bytes;
use astrai_ir::ops::Op;
use astrai_ir::plan::{PlannedWeight, bound};
use astrai_ir::{DType, Graph, IrError, NodeId, Region, Type};
use astrai_passes::is_version;
use std::collections::BTreeMap;

/// Predicted cost of a program at the upper bounds of its symbols.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Kernel launches of a run.
    pub launches: u64,
    /// Floating-point operations of a run.
    pub flops: u64,
    /// Bytes that kernels read and write in a run.
    pub bytes: u64,
    /// Bytes of weights as stored.
    pub weight_bytes: u64,
    /// Bytes of values between kernels and of results, workspaces of kernels included.
    pub arena_bytes: u64,
    /// Bytes of keys and values that one token leaves behind.
    pub kv_bytes_per_token: u64,
}

/// Bytes of a weight in its layout.
pub(crate) fn weight_bytes(w: &PlannedWeight) -> u64 {
    let shape: Vec<usize> = w.weight.ty.shape.iter().map(|d| d.size().unwrap_or(1)).collect();
    layout_bytes(w.layout, w.weight.ty.dtype, &shape) as u64
}

impl Compiled {
    /// Predicted cost at the symbols' upper bounds.
    ///
    /// # Errors
    /// A size overflows.
    pub fn cost(&self) -> Result<Cost, Error> {
        let mut cost = Cost::default();
        for (_, r) in self.plan.each_launch() {
            let region = &self.plan.regions[r];
            cost.launches += 1;
            cost.flops = cost.flops.saturating_add(self.plan.bound(region.flops())?);
            cost.bytes = cost.bytes.saturating_add(self.plan.bound(region.bytes())?);
            cost.kv_bytes_per_token += kv_bytes(region);
        }
        cost.weight_bytes = self.plan.weights.iter().map(weight_bytes).sum();
        cost.arena_bytes = self.arena_bytes()?;
        Ok(cost)
    }

    /// Collectives of a run by kind: how many, and the bytes that a rank sends in them at the symbols' upper bounds.
    ///
    /// # Errors
    /// A size overflows.
    pub fn collectives(&self) -> Result<BTreeMap<&'static str, [u64; 2]>, Error> {
        let mut found = BTreeMap::new();
        for (_, r) in self.plan.each_launch() {
            let g = self.plan.regions[r].graph();
            for n in g.nodes() {
                let args: Vec<&Type> = n.args.iter().map(|a| g.ty(*a)).collect();
                if let Some(traffic) = n.op.traffic(&args, &n.types) {
                    let sent = traffic.sent(self.plan.bound(&traffic.bytes)?);
                    let [count, bytes] = found.entry(n.op.name()).or_insert([0u64, 0]);
                    (*count, *bytes) = (*count + 1, bytes.saturating_add(sent));
                }
            }
        }
        Ok(found)
    }

    /// Bytes of values between kernels and of results, workspaces of kernels included.
    ///
    /// # Errors
    /// A size overflows.
    pub fn arena_bytes(&self) -> Result<u64, Error> {
        Compiled::arena_bytes_of(&[self])
    }

    /// The same of programs whose sessions share the memory between kernels ([`Buffers::make_room`]).
    ///
    /// # Errors
    /// A size overflows.
    pub fn arena_bytes_of(programs: &[&Compiled]) -> Result<u64, Error> {
        let mut bytes = Compiled::room(programs)?.iter().sum::<u64>();
        for program in programs {
            bytes += program.result_bytes()?;
        }
        Ok(bytes)
    }

    /// Bytes of results, next versions of states left out.
    fn result_bytes(&self) -> Result<u64, Error> {
        let mut bytes = 0;
        for (_, id) in self.graph.outputs() {
            if !is_version(&self.graph, *id) {
                bytes += self.plan.bound(&self.graph.ty(*id).bytes())?;
            }
        }
        Ok(bytes)
    }

    /// Bytes between kernels, and between the phases of a kernel, that are enough for any one of the programs.
    pub(crate) fn room(programs: &[&Compiled]) -> Result<[u64; 2], Error> {
        let mut most = [0; 2];
        for program in programs {
            let own = [program.plan.main.arena + program.plan.scratch, program.workspace_bytes()?];
            most = [most[0].max(own[0]), most[1].max(own[1])];
        }
        Ok(most)
    }

    /// Refuses a program that needs more memory than the device has left, before anything is loaded.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn check_memory(&self, device: &dyn Device) -> Result<(), Error> {
        self.check_memory_beside(device, None, None)
    }

    /// Bytes of memory that a session of this program takes beside one of the other.
    ///
    /// # Errors
    /// A size overflows.
    pub fn bytes_beside(&self, other: &Compiled) -> Result<u64, Error> {
        Ok(self.fresh_weights(None, Some(other)).saturating_add(self.arena_bytes()?))
    }

    /// Bytes of the weights that are not in memory yet, where these buffers and the other program's weights are.
    pub(crate) fn fresh_weights(&self, buffers: Option<&Buffers>, other: Option<&Compiled>) -> u64 {
        let known = |w: &PlannedWeight| {
            buffers.is_some_and(|b| b.get(&w.weight.name).is_some())
                || other.is_some_and(|o| o.plan.weights.contains(w))
        };
        self.plan.weights.iter().filter(|w| !known(w)).map(weight_bytes).sum()
    }

    /// [`check_memory`](Self::check_memory) of what is not in memory yet: weights in these buffers and of the other program are.
    pub(crate) fn check_memory_beside(
        &self,
        device: &dyn Device,
        buffers: Option<&Buffers>,
        other: Option<&Compiled>,
    ) -> Result<(), Error> {
        let has_room =
            buffers.is_some_and(|b| Compiled::room(&[self]).is_ok_and(|own| b.room(own).is_some()));
        let own = if has_room { self.result_bytes()? } else { self.arena_bytes()? };
        let (need, have) = (self.fresh_weights(buffers, other).saturating_add(own), device.available());
        if need <= have {
            return Ok(());
        }
        Err(Error::Memory {
            what: "this program".into(),
            need,
            have,
            remedy: "use a smaller model, --batch or --seq, or --dtype bf16".into(),
        })
    }

    /// Bytes that the most demanding kernel keeps between its phases.
    pub(crate) fn workspace_bytes(&self) -> Result<u64, IrError> {
        let mut most = 0;
        for kernel in self.kernels.iter().flatten() {
            most = most.max(bound(&self.plan.symbols, &kernel.workspace)?);
        }
        Ok(most)
    }
}

/// Bytes of keys and values (or latents) a token: what a region stores of it in a state, or what attention without pages reads
/// of it.
fn kv_bytes(region: &Region) -> u64 {
    let g = region.graph();
    let mut bytes = 0;
    for n in g.nodes() {
        let kept = match (&n.op, n.args.as_slice()) {
            (Op::Attention(a), args) if a.page.is_none() => &args[1..3],
            (Op::Store(_), args @ [_, _, _]) => &args[..1],
            _ => &[],
        };
        for &a in kept {
            let per_token = g.ty(a).shape[1..].iter().filter_map(|d| d.size()).product::<usize>();
            bytes += (per_token * stored_dtype(g, a).bytes()) as u64;
        }
    }
    bytes
}

fn stored_dtype(g: &Graph, id: NodeId) -> DType {
    let node = g.node(id);
    match (&node.op, node.args.first()) {
        (Op::Input(i), _) => i.ty.dtype,
        (_, Some(a)) => stored_dtype(g, *a),
        _ => node.ty().dtype,
    }
}

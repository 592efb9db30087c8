//! The reference interpreter as a device: no kernels, every region is evaluated as it stands. Slow, and what all others are held
//! against.

use super::{Device, Executable, InProcess, Pointer, Threads, available_memory, with_bytes};
use crate::Error;
use crate::pack::{layout_bytes, unpack};
use astrai_codegen::archetype;
use astrai_ir::backend::{Backend, Root};
use astrai_ir::ops::Op;
use astrai_ir::region::{Matched, Piece};
use astrai_ir::{
    DType, Form, Graph, IrError, Kernel, Layout, NodeId, Precision, Region, Sizes, Target, Tensor, eval,
};
use std::collections::HashMap;
use std::sync::Arc;

/// The reference device.
pub struct Reference {
    backend: Interpreter,
}

impl Default for Reference {
    fn default() -> Reference {
        let target = Target {
            name: "interpreter".into(),
            kind: "reference".into(),
            isa: String::new(),
            units: 1,
            flops: vec![(DType::F32, 1e7)],
            bandwidth: 1e8,
            launch: 0.0,
            memory: available_memory(),
            vector_bytes: 8,
            registers: 1,
            integer_dots: false,
            matrix_unit: false,
            shared_memory: 0,
            warp: 1,
            stack: 8 << 20,
            links: vec![],
        };
        Reference { backend: Interpreter { target } }
    }
}

impl Threads for Reference {}

impl InProcess for Reference {}

impl Device for Reference {
    fn backend(&self) -> &dyn Backend {
        &self.backend
    }

    fn name(&self) -> &'static str {
        "interpreter"
    }

    fn load(&self, kernels: &[&Kernel]) -> Result<Vec<Arc<dyn Executable>>, Error> {
        match kernels.first() {
            None => Ok(vec![]),
            Some(k) => Err(Error::Input(format!("the interpreter runs no kernels, `{}` is one", k.identity))),
        }
    }
}

/// The backend without kernels: operators stay whole, values are stored where they are used twice.
#[derive(Clone, Debug)]
struct Interpreter {
    target: Target,
}

impl Backend for Interpreter {
    fn target(&self) -> &Target {
        &self.target
    }

    fn native(&self, _: &Op) -> bool {
        true
    }

    fn root(&self, _: &Graph, _: NodeId) -> Option<Root> {
        None
    }

    fn reads_codes(&self) -> bool {
        true
    }

    fn multiplies_codes(&self) -> bool {
        true
    }

    fn loops(&self, op: &Op) -> bool {
        op.is_pointwise() || op.is_view()
    }

    fn accumulates(&self, _: &Graph, _: NodeId) -> bool {
        false
    }

    fn layouts(&self, _: &Graph, _: NodeId) -> Vec<(NodeId, Layout)> {
        vec![]
    }

    fn matched(&self, piece: &Piece) -> Result<Matched, IrError> {
        let g = &piece.graph;
        let collective = g.nodes().iter().any(|n| n.op.collective_axes().is_some());
        let form = if collective { Form::Collective } else { Form::Interpreted };
        Ok(archetype::with(piece, form))
    }

    fn emit(&self, _: &Region) -> Result<Option<Kernel>, String> {
        Ok(None)
    }

    fn unit(&self, _: &[&Kernel]) -> String {
        String::new()
    }

    fn extension(&self) -> &'static str {
        "txt"
    }

    fn alignment(&self) -> u64 {
        64
    }
}

/// Evaluates a region on buffers of a device.
pub(super) fn run_region(
    device: &dyn Device,
    region: &Region,
    buffers: &[Pointer],
    sizes: &Sizes,
) -> Result<(), Error> {
    let reads = region.piece.read_types();
    let mut leaves = HashMap::new();
    for (i, (ty, read)) in reads.iter().zip(&region.piece.reads).enumerate() {
        let shape = crate::session::concrete(ty, sizes)?;
        let len = layout_bytes(read.layout, ty.dtype, &shape);
        let tensor = |bytes: &mut [u8]| match read.layout {
            Layout::Rows => Tensor::from_bytes(ty.dtype, &shape, bytes),
            layout => Tensor::from_bytes(ty.dtype, &shape, &unpack(bytes, layout, ty.dtype, &shape)),
        };
        // SAFETY: the buffer holds a value of this type and layout at these sizes, and no launch is under way.
        let tensor = unsafe { with_bytes(device, buffers[i], len, false, tensor) }?.map_err(Error::Input)?;
        let name = region.graph().node(read.leaf).op.leaf_name().unwrap_or_default();
        leaves.insert(name, tensor);
    }
    let by_ref: HashMap<&str, &Tensor> = leaves.iter().map(|(k, v)| (*k, v)).collect();
    let outs = eval::eval_borrowed(region.graph(), &by_ref, sizes, Precision::default())?;
    for (i, (_, t)) in outs.iter().enumerate() {
        device.write(buffers[reads.len() + i], &t.to_bytes())?;
    }
    Ok(())
}

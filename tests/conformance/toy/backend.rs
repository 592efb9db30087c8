//! What the toy device has kernels for: loops by rows, which also sum products one after another, over weights in panels of eight
//! rows. Everything else is left to the interpreter, or decomposed.

use astrai_codegen::archetype::{self, Limits};
use astrai_codegen::cpu::{Cpu, Isa};
use astrai_codegen::kernel_ir::expr::Stmt;
use astrai_codegen::kernel_ir::loops::loops;
use astrai_codegen::kernel_ir::print::{Dialect, Printer, dim, element, symbol};
use astrai_ir::backend::Root;
use astrai_ir::kernel::{Entry, Grid, UNNAMED};
use astrai_ir::ops::Op;
use astrai_ir::region::{LoopsForm, Matched, Piece};
use astrai_ir::{Backend, DType, Dim, Form, Graph, IrError, Kernel, Layout, NodeId, Region, Target};

/// Panels of eight rows, bf16 as single numbers; no kernels but loops and dots.
const LIMITS: Limits = Limits {
    head: 0,
    row: 1 << 14,
    experts: 0,
    codes: false,
    pages: false,
    panels: Some([(8, 1), (8, 1)]),
    without: &["grouped", "outer", "attention", "attention_grad", "loss", "route", "sample"],
};

/// Bytes of which every address of the toy is a multiple.
pub const ALIGNMENT: u64 = 512;

/// The toy's backend.
#[derive(Debug)]
pub struct Toy {
    target: Target,
}

impl Toy {
    pub fn new() -> Toy {
        let target = Target {
            name: "toy".into(),
            kind: "toy".into(),
            isa: "toy".into(),
            units: 3,
            flops: vec![(DType::F32, 1e9)],
            bandwidth: 1e9,
            launch: 1e-5,
            memory: 1 << 30,
            vector_bytes: 4,
            registers: 4,
            integer_dots: false,
            matrix_unit: false,
            shared_memory: 0,
            warp: 1,
            stack: 1 << 16,
            links: vec![],
        };
        Toy { target }
    }
}

impl Backend for Toy {
    fn target(&self) -> &Target {
        &self.target
    }

    fn native(&self, op: &Op) -> bool {
        matches!(op, Op::RmsNorm(_) | Op::Softmax(_) | Op::Rope(_) | Op::GatedAct(_))
    }

    fn root(&self, g: &Graph, id: NodeId) -> Option<Root> {
        archetype::root(g, id, &LIMITS)
    }

    fn loops(&self, op: &Op) -> bool {
        archetype::loops::computes(op)
    }

    fn accumulates(&self, _: &Graph, _: NodeId) -> bool {
        false
    }

    fn layouts(&self, g: &Graph, id: NodeId) -> Vec<(NodeId, Layout)> {
        archetype::layouts(g, id, &LIMITS)
    }

    fn matched(&self, piece: &Piece) -> Result<Matched, IrError> {
        let matched = archetype::matched(piece, &LIMITS)?;
        let form = match matched.form {
            Form::Loops(LoopsForm::ScatterAdd(_) | LoopsForm::StoreRows(_)) => Form::Interpreted,
            Form::Loops(_) => Form::Loops(LoopsForm::Rows),
            form => form,
        };
        Ok(Matched { form, ..matched })
    }

    fn emit(&self, region: &Region) -> Result<Option<Kernel>, String> {
        if !region.form().has_kernel() {
            return Ok(None);
        }
        let l = loops(region, false)?;
        let mut p = Printer::new(Dialect::C, 0);
        let args = "(void *const *bufs, const int64_t *dims, int64_t begin, int64_t end)";
        p.braces(&format!("void {UNNAMED}_rows{args}"), |p| {
            for (i, s) in region.graph().symbols.iter().enumerate() {
                p.line(&format!("const int64_t {} = dims[{i}]; (void){0};", symbol(&s.name)));
            }
            let (reads, writes) = (region.piece.read_types(), region.piece.write_types());
            for (i, t) in reads.iter().enumerate() {
                p.line(&format!("const {0} *r{i} = bufs[{i}]; (void)r{i};", element(t.dtype)));
            }
            for (i, t) in writes.iter().enumerate() {
                p.line(&format!("{0} *w{i} = bufs[{1}]; (void)w{i};", element(t.dtype), reads.len() + i));
            }
            p.statements(&l.before);
            p.braces("for (int64_t row = begin; row < end; row++)", |p| match (l.chunk, l.body.as_slice()) {
                // A result without rows is cut into pieces.
                (Some(n), [Stmt::Loop { var, body }]) => {
                    let (v, total) = (&var.name, dim(&l.rows));
                    let head = format!(
                        "for (int64_t {v} = row * {n}; {v} < {total} && {v} < (row + 1) * {n}; {v}++)"
                    );
                    p.braces(&head, |p| p.statements(body));
                }
                _ => {
                    for (v, divisor, size) in l.leading.iter().filter(|(v, ..)| *v != l.row) {
                        p.line(&format!(
                            "const int64_t {} = row / {} % {};",
                            v.name,
                            dim(divisor),
                            dim(size)
                        ));
                    }
                    p.statements(&l.body);
                }
            });
        });
        let units = l.chunk.map_or(l.rows.clone(), |n| l.rows.ceil_div(&Dim::from(n)));
        let (symbol, grid, shared) = (format!("{UNNAMED}_rows"), Grid::Units(units), Dim::from(0));
        let entries = vec![Entry { symbol, grid, block: 1, shared }];
        let (workspace, rounds, identity) = (Dim::from(0), Dim::from(1), String::new());
        Ok(Some(
            Kernel {
                identity,
                preludes: 0,
                source: p.finish(),
                entries,
                workspace,
                rounds,
                products: Default::default(),
            }
            .named(),
        ))
    }

    fn unit(&self, kernels: &[&Kernel]) -> String {
        // Scalar functions in C are those of any processor.
        let prelude = Cpu::new(Isa::Plain, 1, 0).unit(&[]);
        kernels.iter().fold(prelude, |text, k| text + &k.source)
    }

    fn extension(&self) -> &'static str {
        "c"
    }

    fn alignment(&self) -> u64 {
        ALIGNMENT
    }
}

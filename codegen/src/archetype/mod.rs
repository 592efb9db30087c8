//! The archetypes: one file each says which nodes its kernels are built around, what they take along, what they must be able to
//! trust of integer data, and what they read. In: graphs, pieces of plans, the limits of a device's kernels. Out: roots while
//! regions are formed, forms when they are. Emission prints forms and decides nothing.

pub mod attention;
pub mod dot;
pub mod grouped;
pub mod loops;
pub mod loss;
pub mod low_rank;
pub mod route;
pub mod sample;

use astrai_ir::backend::Root;
use astrai_ir::ops::Op;
use astrai_ir::region::{Form, Guard, IntegerList, Matched, Piece, Whole};
use astrai_ir::strides::View;
use astrai_ir::{Code, DType, Dim, Graph, IrError, Layout, NodeId, Operand, Type};
use std::collections::HashMap;

/// What the kernels of a family of devices can take; each limit is that of the device's own files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Elements of the widest head that attention's kernels keep.
    pub head: usize,
    /// Longest sum of a dot whose left side is computed a row at a time.
    pub row: usize,
    /// Most experts of a route.
    pub experts: usize,
    /// Rows and neighbours along the sum of a packed panel, for f32 and for bf16; none where weights stay row-major.
    pub panels: Option<[(usize, usize); 2]>,
    /// Whether a dot reads codes of weights. With panels: in panels of as many rows as f32 has, integers of four bits in groups of 32 bits;
    /// without: rows as they lie.
    pub codes: bool,
    /// Whether attention over pages reads codes of eight bits, with a scale for each head of a row.
    pub pages: bool,
    /// Archetypes that have no kernel here, by the names of their forms.
    pub without: &'static [&'static str],
}

impl Limits {
    /// True where the archetype of these forms has kernels.
    pub fn has(&self, form: &str) -> bool {
        !self.without.contains(&form)
    }

    /// Layout of a packed weight of this type.
    fn panels(&self, dtype: DType) -> Option<Layout> {
        let (rows, group) = self.panels?[usize::from(dtype == DType::BF16)];
        Some(Layout::Panels { rows, group })
    }

    /// Layouts of codes and of their scales; instructions that multiply integers take words of 32 bits.
    fn code_panels(&self, code: Code, integers: bool) -> Option<[Layout; 2]> {
        let (rows, group) = self.panels.filter(|_| self.codes)?[0];
        let words = if code.per_element() == 2 || integers { 4 } else { group };
        Some([Layout::Panels { rows, group: words }, Layout::Panels { rows, group }])
    }
}

/// Kernels around one kind of operator. Functions that a file does not give answer nothing.
struct Archetype {
    /// True for the operators whose nodes it answers for.
    of: fn(&Op) -> bool,
    /// What the kernel around a node takes along; none where nothing is built around one, or arguments come from memory.
    root: Option<fn(&Graph, NodeId, &Limits) -> Root>,
    /// The layouts in which the kernel around a node would read values.
    layouts: fn(&Graph, NodeId, &Limits) -> Vec<(NodeId, Layout)>,
    /// The form of a piece that it computes whole.
    form: fn(&Piece, &Limits) -> Option<Form>,
    /// The bound that a node's integers must keep, where they lie in a buffer.
    guard: fn(&Piece, NodeId) -> Option<Guard>,
    /// Bytes of operands of which only a part is read.
    touched: fn(&Piece, &Form) -> HashMap<Operand, Dim>,
}

impl Archetype {
    const NONE: Archetype = Archetype {
        of: |_| false,
        root: None,
        layouts: |_, _, _| vec![],
        form: |_, _| None,
        guard: |_, _| None,
        touched: |_, _| HashMap::new(),
    };
}

/// In the order in which they are asked for the form of a piece.
static ARCHETYPES: [Archetype; 8] = [
    dot::ARCHETYPE,
    grouped::ARCHETYPE,
    low_rank::ARCHETYPE,
    route::ARCHETYPE,
    sample::ARCHETYPE,
    attention::ARCHETYPE,
    loss::ARCHETYPE,
    loops::ARCHETYPE,
];

fn of(op: &Op) -> Option<&'static Archetype> {
    ARCHETYPES.iter().find(|a| (a.of)(op))
}

/// True for composites that stay whole: kernels are built around them, or loops compute them.
pub fn native(op: &Op) -> bool {
    loops::computes(op) || of(op).is_some_and(|a| a.root.is_some())
}

/// What the kernel around a node takes along; `None` for nodes that loops compute, or that have no kernel and take their
/// arguments from memory.
pub fn root(g: &Graph, id: NodeId, limits: &Limits) -> Option<Root> {
    Some(of(&g.node(id).op)?.root?(g, id, limits))
}

/// The layouts in which the kernel around a node would read values.
pub fn layouts(g: &Graph, id: NodeId, limits: &Limits) -> Vec<(NodeId, Layout)> {
    of(&g.node(id).op).map(|a| (a.layouts)(g, id, limits)).unwrap_or_default()
}

/// The form of a piece: that of the first archetype that computes all of it.
pub fn matched(piece: &Piece, limits: &Limits) -> Result<Matched, IrError> {
    let form = ARCHETYPES.iter().find_map(|a| (a.form)(piece, limits).filter(|f| limits.has(f.name())));
    Ok(with(piece, form.unwrap_or(Form::Interpreted)))
}

/// A piece with this form, and what follows from the operators in it.
pub fn with(piece: &Piece, form: Form) -> Matched {
    let g = &piece.graph;
    let guards = g.ids().find_map(|id| (of(&g.node(id).op)?.guard)(piece, id)).into_iter().collect();
    let types = |n: &astrai_ir::Node| n.args.iter().map(|a| g.ty(*a)).collect::<Vec<&Type>>();
    let flops = g.nodes().iter().fold(Dim::from(0), |sum, n| &sum + &n.op.flops(&types(n), &n.types));
    Matched { guards, bytes: bytes(piece, &form), flops, form }
}

/// Bytes read and written once each; of a gathered table only the rows that are picked, of a state only the rows that are stored,
/// of pages only what the sequences may hold, of grouped matrices no more than there are rows.
fn bytes(piece: &Piece, form: &Form) -> Dim {
    let g = &piece.graph;
    let users = g.users();
    let touched: HashMap<Operand, Dim> = ARCHETYPES.iter().flat_map(|a| (a.touched)(piece, form)).collect();
    let mut sum = Dim::from(0);
    for (i, read) in piece.reads.iter().enumerate() {
        let mut most: Option<Dim> = None;
        let all = || touched.get(&Operand(i)).cloned().unwrap_or_else(|| g.ty(read.leaf).bytes());
        for &u in &users[read.leaf.index()] {
            let used = match (&g.node(u).op, g.node(u).args.as_slice()) {
                (Op::Gather(_), [x, ..]) if *x == read.leaf => g.ty(u).bytes(),
                (Op::Store(_), [state, _, _]) if *state == read.leaf => continue,
                _ => all(),
            };
            most = Some(most.map_or(used.clone(), |m| m.at_least(&used)));
        }
        sum = &sum + &most.unwrap_or_default();
    }
    let written = |id: NodeId| match (&g.node(id).op, g.node(id).args.as_slice()) {
        (Op::Store(_), [_, _, value]) => g.ty(*value).bytes(),
        _ => g.ty(id).bytes(),
    };
    g.outputs().iter().fold(sum, |s, (_, id)| &s + &written(*id))
}

/// The whole buffer of integers below the views of `id`.
fn integers(piece: &Piece, id: NodeId) -> Option<IntegerList> {
    let id = piece.graph.below_views(id);
    Some(IntegerList { at: piece.operand(id)?, count: piece.graph.ty(id).elements() })
}

/// A view whose elements lie as the value's own do, as the buffer that is read whole.
fn whole(piece: &Piece, view: Option<View>) -> Option<Whole> {
    let view = view.filter(View::is_dense)?;
    Some((piece.operand(view.base)?, view.dtype))
}

/// Which result of the operator each output is, through what rounds it.
fn results(g: &Graph) -> Vec<(u32, DType)> {
    fn part(g: &Graph, id: NodeId) -> u32 {
        let node = g.node(id);
        match (&node.op, node.args.first()) {
            (Op::Part(p), _) => p.index,
            (Op::Cast(_), Some(a)) => part(g, *a),
            _ => 0,
        }
    }
    g.outputs().iter().map(|(_, id)| (part(g, *id), g.ty(*id).dtype)).collect()
}

/// What has to be in memory for an argument that is read as it lies.
fn memory(g: &Graph, id: NodeId) -> astrai_ir::backend::Takes {
    use astrai_ir::backend::Takes;
    g.below_free(id).map_or(Takes::Nothing, Takes::Memory)
}

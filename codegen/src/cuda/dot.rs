//! Products of matrices. In: a region around a dot, a dot of rows in groups, or sums of outer products by groups. Out: a phase that
//! computes the left side's rows where they are an expression, and one whose blocks take tiles of the result.

use super::program::Program;
use super::rows::digits;
use crate::kernel_ir::expr::{Expr, Stmt, reduces};
use crate::kernel_ir::index::{Index, Var};
use crate::kernel_ir::loops::row_of;
use crate::kernel_ir::lower::{Lower, narrow};
use crate::kernel_ir::print::{Printer, dim};
use astrai_ir::ops::Op;
use astrai_ir::plan::bound;
use astrai_ir::region::{DotCodes, DotForm, GroupedForm, OuterForm, Side};
use astrai_ir::{Code, DType, Dim, Graph, Kernel, NodeId, Region};

pub(super) const VALUES: &str = include_str!("bodies/values.cu");
pub(super) const TILE: &str = concat!(include_str!("bodies/tile.cu"), "\n", include_str!("bodies/tensor.cu"));

/// A tile of the result: its rows and columns, and of these as many as a thread has sums of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    pub rows: usize,
    columns: usize,
    mine: [usize; 2],
}

/// From the tile whose threads read least from shared memory to the one that makes most blocks.
const TILES: [Tile; 3] = [
    Tile { rows: 128, columns: 128, mine: [8, 8] },
    Tile { rows: 64, columns: 64, mine: [8, 4] },
    Tile { rows: 32, columns: 32, mine: [4, 2] },
];
/// The largest of a right side of codes: their widening is for as many rows, and the sums of a step fit beside those of all.
const CODED: Tile = Tile { rows: 128, columns: 64, mine: [8, 4] };
/// Registers of a thread: two blocks of the largest tile share a multiprocessor, four of the others.
pub(super) const REGISTERS: u32 = 128;
/// Most rows for which a block takes all of them, and no tile.
const FEW_ROWS: usize = 16;
/// Columns of the right side that it takes then by tensor cores; half as many where there were fewer blocks than multiprocessors.
const FEW_COLUMNS: usize = 16;
/// Elements of a thread of a left side that is computed first, where blocks share a row.
const PART: usize = 4;

impl Tile {
    /// The first tile of which three quarters of so many processors get one, else the smallest; of these many results, rows and columns. `coded`:
    /// tensor cores multiply by codes.
    pub fn pick(coded: bool, [batch, rows, columns]: [u64; 3], processors: u32) -> Tile {
        let tiles = [if coded { CODED } else { TILES[0] }, TILES[1], TILES[2]];
        let of = |t: &&Tile| {
            let tiles = batch * rows.div_ceil(t.rows as u64) * columns.div_ceil(t.columns as u64);
            // A tile that is more than half empty computes for nothing.
            4 * tiles >= 3 * u64::from(processors)
                && rows * 2 > t.rows as u64
                && columns * 2 > t.columns as u64
        };
        tiles.iter().find(of).copied().unwrap_or(tiles[2])
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        (self.rows / self.mine[0] * (self.columns / self.mine[1])) as u32
    }

    /// Tiles along the columns.
    pub fn across(&self, columns: &Dim) -> Dim {
        columns.ceil_div(&Dim::from(self.columns))
    }

    /// Tiles along the rows.
    pub fn down(&self, rows: &Dim) -> Dim {
        rows.ceil_div(&Dim::from(self.rows))
    }

    /// The shared memory of a block, as `shared`, behind the operands `left` and `right`.
    pub fn room(&self, p: &mut Printer) {
        let floats =
            format!("product_floats<decltype(left), decltype(right)>({}, {})", self.rows, self.columns);
        p.line(&format!("__shared__ quad room[{floats} / 4];"));
        p.line("float *const shared = (float *)room;");
    }

    /// The sums of a tile, from these operands and ranges, C++ expressions.
    pub fn sums(
        &self,
        sides: [&str; 2],
        [row0, rows]: [&str; 2],
        columns: &str,
        [k, end]: [&str; 2],
    ) -> String {
        let (Tile { rows: m, columns: n, mine: [mine_m, mine_n] }, [left, right]) = (self, sides);
        format!(
            "product_sums<{m}, {n}, {mine_m}, {mine_n}>({left}, {right}, {row0}, {rows}, across * {n}, {columns}, {k}, \
             {end}, shared, store);"
        )
    }
}

/// A side of a dot as C++: its type, and its value where the sum and the first row or column begin.
pub(super) struct Operand {
    ty: String,
    at: String,
    line: String,
}

impl Operand {
    /// Elements of this type from the pointer `from` on; `free` and `along` are the steps, `number` how many neighbours there are
    /// in memory, `steps` what the first element's place is a sum of multiples of.
    pub fn new(dtype: DType, from: &str, [free, along]: [&Dim; 2], number: &Dim, steps: &[&Dim]) -> Operand {
        let runs_along = along.is_one();
        let line = if runs_along { free } else { along };
        let come = |n: &usize| {
            let mut all = [line, number].into_iter().chain(steps.iter().copied());
            all.all(|d| d.div_exact(&Dim::from(*n)).is_some())
        };
        let ways: &[usize] = if dtype == DType::BF16 { &[8, 4] } else { &[4] };
        let together = ways.iter().copied().find(come).unwrap_or(1);
        let ty = format!("side<{}, {runs_along}, {together}>", element(dtype));
        Operand { ty, at: from.into(), line: dim(line) }
    }

    /// The side of a region's dot with sums of this length; `size` is its number of rows or columns, further steps as above.
    fn of(s: &Side, size: &Dim, k: &Dim, steps: &[&Dim]) -> Operand {
        let number = if s.along.is_one() { k } else { size };
        let steps: Vec<&Dim> = steps.iter().copied().chain([&s.offset]).collect();
        let from = format!("r{} + {}", s.at.0, dim(&s.offset));
        Operand::new(s.dtype, &from, [&s.free, &s.along], number, &steps)
    }

    /// A right side `[n, k]` that is stored as codes, from the first row on.
    fn coded(right: &Side, of: &DotCodes, k: usize) -> Result<Operand, String> {
        if of.rounded.is_some() {
            return Err("rows are not rounded to integers here".into());
        }
        let code = match of.code {
            Code::Int8 => "int8_code",
            Code::Int4 => "int4_code",
            Code::Fp8 => "fp8_code",
            Code::Fp4 => "fp4_code",
        };
        let offsets = of.offsets.map_or("nullptr".into(), |at| format!("r{}", at.0));
        let ty = format!("coded_side<{code}, {}, {}, {}>", element(of.dtype), of.group, of.offsets.is_some());
        let at = format!("r{}, r{}, {offsets}", right.at.0, of.scales.0);
        Ok(Operand { ty, at, line: k.to_string() })
    }

    /// Declares it.
    pub fn declare(&self, p: &mut Printer, name: &str) {
        p.line(&format!("const {} {name} = {{{}, (index_t)({})}};", self.ty, self.at, self.line));
    }
}

/// The type of a buffer's elements in the templates.
pub(super) fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16_of",
        DType::F16 => "f16_of",
        DType::I8 => "i8_of",
        DType::F8E4M3 => "f8_of",
        _ => "f32_of",
    }
}

/// The largest value of a size, at most that of an index.
fn most(g: &Graph, d: &Dim) -> u64 {
    bound(&g.symbols, d).unwrap_or(u64::MAX >> 32)
}

/// True where tensor cores multiply a left side of this type by codes.
fn by_codes(codes: &Option<DotCodes>, left: DType) -> bool {
    left == DType::BF16 && codes.as_ref().is_some_and(|c| c.group.is_multiple_of(32))
}

/// The kernel of a region around a dot.
pub(super) fn kernel(region: &Region, f: &DotForm, name: &str, processors: u32) -> Result<Kernel, String> {
    let g = region.graph();
    let one = Dim::from(1);
    let batch = f.batch.as_ref().map_or(&one, |b| &b.count);
    let x = g.node(f.node).args[0];
    let rows = (f.left.is_none()).then(|| Rows { x, count: f.m.clone(), length: f.k.clone() });
    let narrow = f.left.as_ref().map(|l| l.dtype).or(rows.as_ref().map(|r| r.dtype(region)));
    let sizes = [most(g, batch), most(g, &f.m), most(g, &f.n)];
    let tile = Tile::pick(by_codes(&f.codes, narrow.unwrap_or(DType::F32)), sizes, processors);
    // A step of decode has few rows in a program that takes many.
    let few = f.batch.is_none() && f.right.along.is_one() && f.m.size().is_none_or(|m| m <= FEW_ROWS);
    let few = few && f.left.as_ref().is_none_or(|l| l.along.is_one());
    let mut program = Program::new(region, name, tile.threads(), REGISTERS)
        .workspace(rows.as_ref().map_or(Dim::from(0), |r| r.bytes(region)));
    program.text(VALUES);
    program.text(TILE);
    if let Some(rows) = &rows {
        rows.phase(&mut program, region)?;
    }
    let steps: Vec<&Dim> = f.batch.iter().flat_map(|b| [&b.left, &b.right]).collect();
    let left = match (&f.left, &rows) {
        (Some(s), _) => Operand::of(s, &f.m, &f.k, &steps),
        (None, Some(rows)) => rows.operand(region),
        (None, None) => return Err("a dot without a left side".into()),
    };
    let right = match &f.codes {
        Some(codes) => Operand::coded(&f.right, codes, f.k.size().ok_or("rows of codes are not counted")?)?,
        None => Operand::of(&f.right, &f.n, &f.k, &steps),
    };
    let store = store(region, f.node)?;
    let (m, n, k) = (dim(&f.m), dim(&f.n), dim(&f.k));
    let (down, across) = (tile.down(&f.m), tile.across(&f.n));
    let units = &(&down * &across) * batch;
    // Fewer columns to a block where wide ones would leave multiprocessors without one.
    let idle = most(g, &f.n) < FEW_COLUMNS as u64 * u64::from(processors);
    let wide = if idle { FEW_COLUMNS / 2 } else { FEW_COLUMNS };
    // None where there are no rows.
    let runs = &f.n.ceil_div(&Dim::from(wide)) * &f.m.at_most(&one);
    program.entry(&if few { units.at_least(&runs) } else { units.clone() }, 0, |p| {
        left.declare(p, "left");
        right.declare(p, "right");
        tile.room(p);
        store.prepare(p);
        if few {
            let taken = (FEW_ROWS as u64).min(most(g, &f.m)).max(1);
            p.braces(&format!("if ({m} <= {taken})"), |p| {
                store.print(p, "tile_row", "tile_column");
                let sides = "decltype(left), decltype(right)";
                p.line(&format!("const int wide = few_columns<{wide}, {sides}>({m});"));
                p.line(&format!("for (index_t unit = blockIdx.x; unit * wide < {n}; unit += gridDim.x)"));
                p.line(&format!(
                    "    few_sums<{taken}, {wide}>(left, right, {m}, unit, {n}, {k}, shared, store);"
                ));
                p.line("return;");
            });
        }
        p.braces(
            &format!("for (index_t unit = blockIdx.x; unit < {}; unit += gridDim.x)", dim(&units)),
            |p| {
                p.line(&format!(
                    "const index_t down = unit % {0}, across = unit / {0} % {1};",
                    dim(&down),
                    dim(&across)
                ));
                let mut sides = ["left".to_string(), "right".to_string()];
                let mut row = "tile_row".to_string();
                if let Some(b) = &f.batch {
                    p.line(&format!("const index_t batch = unit / {};", dim(&(&down * &across))));
                    sides = [
                        format!("left.moved(batch * {})", dim(&b.left)),
                        format!("right.moved(batch * {})", dim(&b.right)),
                    ];
                    row = format!("batch * {m} + tile_row");
                }
                store.print(p, &row, "tile_column");
                let row0 = format!("down * {}", tile.rows);
                p.line(&tile.sums(sides.each_ref().map(String::as_str), [&row0, &m], &n, ["0", &k]));
            },
        );
    });
    Ok(program.finish())
}

/// The kernel of a region around a dot of rows in groups.
pub(super) fn grouped(
    region: &Region,
    f: &GroupedForm,
    name: &str,
    processors: u32,
) -> Result<Kernel, String> {
    let g = region.graph();
    let (n, k) = (Dim::from(f.n), Dim::from(f.k));
    let rows = Rows { x: g.node(f.node).args[0], count: f.rows.clone(), length: k.clone() };
    let a_group = most(g, &f.rows).div_ceil(f.groups.max(1) as u64);
    let coded = by_codes(&f.codes, rows.dtype(region));
    let tile = Tile::pick(coded, [f.groups as u64, a_group, f.n as u64], processors);
    let mut program = Program::new(region, name, tile.threads(), REGISTERS).workspace(rows.bytes(region));
    program.text(VALUES);
    program.text(TILE);
    rows.phase(&mut program, region)?;
    let right = match &f.codes {
        Some(codes) => Operand::coded(&f.right, codes, f.k)?,
        None => Operand::of(&f.right, &n, &k, &[&f.group]),
    };
    let left = rows.operand(region);
    let store = store(region, f.node)?;
    let across = tile.across(&n);
    // A group has the tiles from offsets[e] / rows + e on: enough, and known without sums.
    let slots = &whole(&f.rows, tile.rows) + &Dim::from(f.groups);
    let units = &slots * &across;
    program.entry(&units, 0, |p| {
        left.declare(p, "left");
        right.declare(p, "right");
        tile.room(p);
        p.line(&format!("const int32_t *const offsets = r{};", f.offsets.0));
        store.prepare(p);
        p.braces(
            &format!("for (index_t unit = blockIdx.x; unit < {}; unit += gridDim.x)", dim(&units)),
            |p| {
                p.line(&format!("const index_t slot = unit % {0}, across = unit / {0};", dim(&slots)));
                p.line(&format!(
                    "const index_t group = slot_of(offsets, {}, slot, {});",
                    f.groups, tile.rows
                ));
                p.line("const index_t begin = offsets[group], end = offsets[group + 1];");
                p.line(&format!(
                    "const index_t row0 = begin + (slot - begin / {0} - group) * {0};",
                    tile.rows
                ));
                p.line("if (row0 >= end) continue;");
                store.print(p, "tile_row", "tile_column");
                let right = format!("right.moved(group * {})", dim(&f.group));
                p.line(&tile.sums(["left", &right], ["row0", "end"], &dim(&n), ["0", &dim(&k)]));
            },
        );
    });
    Ok(program.finish())
}

/// The kernel of a region around sums of outer products by groups of rows.
pub(super) fn outer(region: &Region, f: &OuterForm, name: &str, processors: u32) -> Result<Kernel, String> {
    let [m, n] = f.size.map(Dim::from);
    let tile = Tile::pick(false, [f.groups, f.size[0], f.size[1]].map(|n| n as u64), processors);
    let mut program = Program::new(region, name, tile.threads(), REGISTERS);
    program.text(VALUES);
    program.text(TILE);
    // Sums begin and end at any row.
    let any = Dim::from(1);
    let [left, right] =
        [(&f.sides[0], &m), (&f.sides[1], &n)].map(|(s, size)| Operand::of(s, size, &any, &[]));
    let store = store(region, f.node)?;
    let (down, across) = (tile.down(&m), tile.across(&n));
    let units = &(&down * &across) * &Dim::from(f.groups);
    program.entry(&units, 0, |p| {
        left.declare(p, "left");
        right.declare(p, "right");
        tile.room(p);
        p.line(&format!("const int32_t *const offsets = r{};", f.offsets.0));
        store.prepare(p);
        p.braces(
            &format!("for (index_t unit = blockIdx.x; unit < {}; unit += gridDim.x)", dim(&units)),
            |p| {
                p.line(&format!(
                    "const index_t down = unit % {0}, across = unit / {0} % {1};",
                    dim(&down),
                    dim(&across)
                ));
                p.line(&format!("const index_t group = unit / {};", dim(&(&down * &across))));
                store.print(p, &format!("group * {} + tile_row", dim(&m)), "tile_column");
                let row0 = format!("down * {}", tile.rows);
                let range = ["offsets[group]", "offsets[group + 1]"];
                p.line(&tile.sums(["left", "right"], [&row0, &dim(&m)], &dim(&n), range));
            },
        );
    });
    Ok(program.finish())
}

/// How many whole runs of `by` there may be: a bound where the number is no size.
pub(super) fn whole(d: &Dim, by: usize) -> Dim {
    match d.size() {
        Some(n) => Dim::from(n / by),
        None => d.ceil_div(&Dim::from(by)),
    }
}

/// A left side that is an expression: its rows are computed first, into the workspace.
struct Rows {
    x: NodeId,
    count: Dim,
    length: Dim,
}

impl Rows {
    /// f32, but bf16 where the numbers are bf16 values.
    fn dtype(&self, region: &Region) -> DType {
        if is_widened(region.graph(), self.x) { DType::BF16 } else { DType::F32 }
    }

    fn bytes(&self, region: &Region) -> Dim {
        &(&self.count * &self.length) * &Dim::from(self.dtype(region).bytes())
    }

    fn pointer(&self, region: &Region) -> String {
        let ty = if self.dtype(region) == DType::BF16 { "bf16" } else { "float" };
        format!("({ty} *)workspace")
    }

    fn operand(&self, region: &Region) -> Operand {
        let from = self.pointer(region);
        Operand::new(self.dtype(region), &from, [&self.length, &Dim::from(1)], &self.length, &[])
    }

    /// The phase whose blocks compute a row each.
    fn phase(&self, program: &mut Program, region: &Region) -> Result<(), String> {
        let shape = &region.graph().ty(self.x).shape;
        let (row, leading, at) = row_of(&shape[..shape.len().saturating_sub(1)]);
        let (dtype, to) = (self.dtype(region), region.piece.write_types().len());
        let mut lower = Lower::new(region);
        lower.open();
        for s in lower.segments(self.x) {
            let (var, positions) = lower.positions(&s);
            lower.open();
            for p in positions {
                let mut at = at.clone();
                at.push(p.clone());
                let value = lower.value(self.x, &at)?;
                lower.push(Stmt::Store { buf: to, at: p, dtype, value });
            }
            let body = lower.close();
            lower.push(Stmt::Loop { var, body });
        }
        let (body, before) = (lower.close(), lower.close());
        // Rows without statistics are shared by blocks, so that a step of one row keeps more than one busy.
        let alone = |s: &Stmt| matches!(s, Stmt::Loop { body, .. } if !reduces(body));
        let parts = match self.length.size().filter(|_| body.iter().all(alone)) {
            Some(n) => n.div_ceil(program.threads() * PART),
            None => 1,
        };
        let units = &self.count * &Dim::from(parts);
        program.entry(&units, 0, |p| {
            p.statements(&before);
            let head = format!("for (index_t unit = blockIdx.x; unit < {}; unit += gridDim.x)", dim(&units));
            p.braces(&head, |p| {
                p.line(&format!("const index_t row = unit / {parts}, part = unit % {parts}; (void)part;"));
                let pointer = self.pointer(region);
                p.line(&format!("auto *const w{to} = {pointer} + row * (int64_t){};", dim(&self.length)));
                digits(p, &row, &leading);
                if parts == 1 {
                    return p.statements(&body);
                }
                for s in &body {
                    let Stmt::Loop { var, body } = s else { continue };
                    let (v, n) = (&var.name, dim(&var.extent));
                    let head = format!(
                        "for (index_t {v} = part * BLOCK + threadIdx.x; {v} < {n}; {v} += {parts} * BLOCK)"
                    );
                    p.braces(&head, |p| p.alone(|p| p.statements(body)));
                }
            });
        });
        Ok(())
    }
}

/// True for f32 values that are bf16 values.
fn is_widened(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    match &node.op {
        Op::Cast(_) => g.ty(node.args[0]).dtype == DType::BF16,
        op if op.is_view() => is_widened(g, node.args[0]),
        _ => false,
    }
}

/// What follows a sum: the statements of an element of the result.
pub(super) struct Store {
    before: Vec<Stmt>,
    row: Var,
    leading: Vec<(Var, Dim, Dim)>,
    body: Vec<Stmt>,
}

/// The epilogue of the sums of a node.
fn store(region: &Region, node: NodeId) -> Result<Store, String> {
    let g = region.graph();
    let free = match &g.node(node).op {
        Op::Dot(d) => d.batch.len() + d.left_free(g.ty(g.node(node).args[0]).rank()).len(),
        Op::GroupedDot(_) | Op::GroupedOuter(_) => 1,
        _ => return Err("a dot region without a dot".into()),
    };
    let (lead, columns) = g.ty(node).shape.split_at(free);
    let mut lower = Lower::new(region);
    let (row, leading, mut at) = row_of(lead);
    let column = Var { name: "column".into(), extent: Dim::product(columns), depth: 1 };
    lower.open();
    lower.give(node, narrow(g.ty(node).dtype, Expr::Local("sum".into(), DType::F32)));
    at.extend(Index::var(&column).unravel(columns));
    let (_, root) = g.outputs()[0];
    let value = lower.value(root, &at)?;
    let ty = g.ty(root);
    lower.push(Stmt::Store { buf: 0, at: Index::linear(&at, &ty.shape), dtype: ty.dtype, value });
    let (body, before) = (lower.close(), lower.close());
    Ok(Store { before, row, leading, body })
}

impl Store {
    /// What is computed once.
    fn prepare(&self, p: &mut Printer) {
        p.statements(&self.before);
    }

    /// The function `store` of `tile_row` and `tile_column`, of which the result's row and column are these expressions.
    fn print(&self, p: &mut Printer, row: &str, column: &str) {
        p.line("const auto store = [&](index_t tile_row, index_t tile_column, float sum) {");
        p.line(&format!("    const index_t row = {row}, column = {column}; (void)row, (void)column;"));
        digits(p, &self.row, &self.leading);
        p.alone(|p| p.statements(&self.body));
        p.line("};");
    }
}

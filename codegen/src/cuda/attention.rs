//! Attention. In: a form. Out: a phase whose blocks take some queries' heads that share keys, and a split of these; where there are
//! several splits, a phase that joins them.

use super::dot::{TILE, VALUES, element, whole};
use super::program::Program;
use crate::kernel_ir::print::{Printer, dim};
use astrai_ir::plan::bound;
use astrai_ir::region::{AttentionForm, AttentionGradForm, Heads, Whole};
use astrai_ir::{DType, Dim, Kernel, Region, Target};
use std::fmt::Write;

const HEADS: &str = include_str!("bodies/heads.cu");
const FORWARD: &str = include_str!("bodies/attention.cu");
const TENSOR: &str = include_str!("bodies/attention_tensor.cu");
const BACKWARD: &str = include_str!("bodies/attention_grad.cu");

/// Threads of a block.
const THREADS: usize = 128;
/// Registers of a thread, with which two blocks share a multiprocessor.
const REGISTERS: u32 = 255;
/// Keys of a tile, unless the threads of a row are more.
const KEYS: usize = 64;
/// Elements of a head that are staged at a time.
const DEPTH: usize = 64;
/// Rows of a tile times elements of the wider head: what the sums of a thread and the queries in shared memory allow.
const TILE_ELEMENTS: usize = 10_240;
/// The same of the gradient, whose sums are those of keys and of values; most rows of each.
const GRADIENT_ELEMENTS: usize = 5_120;
const MOST_ROWS: [usize; 2] = [64, 32];
/// The widest heads whose sums fit a thread's registers where tensor cores make the products; keys of a tile then.
const TENSOR_WIDE: usize = 128;
const TENSOR_KEYS: usize = 64;
/// Fewest keys that a split is worth, and most splits.
const SPLIT: (usize, usize) = (64, 64);

/// Constants of a kernel, as C++.
#[derive(Default)]
struct Constants(String);

impl Constants {
    fn int(&mut self, name: &str, value: usize) {
        let _ = writeln!(self.0, "constexpr int {name} = {value};");
    }

    fn real(&mut self, name: &str, value: f64) {
        let _ = writeln!(self.0, "constexpr float {name} = {:?}f;", value as f32);
    }

    /// A buffer's type of elements, and whether four of a head come at once.
    fn heads(&mut self, name: &str, heads: &Heads, size: usize) {
        let four = Dim::from(4);
        let whole = [&heads.offset, &heads.row, &heads.head].iter().all(|d| d.div_exact(&four).is_some());
        let lower = name.to_lowercase();
        let _ = writeln!(self.0, "typedef {} {lower}_of;", element(heads.dtype));
        self.int(&format!("{name}_FOUR"), usize::from(whole && size.is_multiple_of(4)));
    }
}

/// A `heads_at` as C++.
fn heads_at(h: &Heads) -> String {
    format!("{{r{} + {}, (index_t){}, (index_t){}}}", h.at.0, dim(&h.offset), dim(&h.row), dim(&h.head))
}

/// A buffer that may not be there, as a pointer.
fn pointer(read: Option<usize>) -> String {
    read.map_or("nullptr".into(), |i| format!("r{i}"))
}

/// How a block works on a tile of so many rows.
struct Rows {
    rows: usize,
    down: usize,
}

impl Rows {
    /// At most so many elements of heads of this width, no more rows than these.
    fn of(elements: usize, wide: usize, most: usize) -> Rows {
        let fit = (elements / wide.max(1)).clamp(8, MOST_ROWS[0]);
        let rows = (1 << fit.ilog2()).min(most.next_power_of_two());
        Rows { rows, down: rows.min(8) }
    }

    fn across(&self) -> usize {
        THREADS / self.down
    }

    fn keys(&self) -> usize {
        KEYS.max(self.across())
    }

    /// The constants that forward and backward share; floats of shared memory of one stage.
    fn define(&self, c: &mut Constants, staged: usize) -> usize {
        let (across, keys) = (self.across(), self.keys());
        // As many lines as the stage of keys has room for.
        let depth = DEPTH;
        let stage = keys * (depth + 4);
        let lines = (stage / staged).clamp(1, keys);
        let stage = stage.max(lines * staged).next_multiple_of(4);
        for (name, value) in [
            ("ROWS", self.rows),
            ("DOWN", self.down),
            ("ACROSS", across),
            ("MINE", self.rows / self.down),
            ("KEYS", keys),
            ("KEYS_MINE", keys / across),
            ("DEPTH", depth),
            ("K_LINE", depth + 4),
            ("P_LINE", keys + 16),
            ("STAGE", stage),
            ("V_KEYS", lines),
        ] {
            c.int(name, value);
        }
        stage
    }
}

/// The kernel of attention.
pub(super) fn forward(region: &Region, f: &AttentionForm, name: &str, target: &Target) -> Kernel {
    let processors = target.units;
    let [heads, kv_heads, d, dv] = f.sizes;
    let most = |d: &Dim| bound(&region.graph().symbols, d).unwrap_or(u64::MAX >> 32);
    let group = heads / kv_heads;
    // A sequence of a decoding step has one query.
    let decodes = f.pages.is_some() && most(&f.tokens) <= 2 * most(&f.sequences);
    let tile = Rows::of(TILE_ELEMENTS, d.max(dv), if decodes { group } else { MOST_ROWS[0] });
    let parts = group.div_ceil(tile.rows);
    let part_heads = group.div_ceil(parts);
    let queries = tile.rows / part_heads;
    let slots = &whole(&f.tokens, queries) + &f.sequences;
    let keys = f.pages.zip(f.op.page).map_or(0, |((_, width, _), page)| width * page);
    // How many splits there are is known when it runs: as many as the slots of the run leave multiprocessors for.
    let (wanted, splits) = (2 * processors as usize, keys.div_ceil(SPLIT.0).clamp(1, SPLIT.1));
    let (d_up, dv_up, part) = (d.next_multiple_of(8), dv.next_multiple_of(4), dv + 2);
    let mut c = Constants::default();
    let stage = tile.define(&mut c, dv_up);
    for (name, value) in [
        ("HEADS", heads),
        ("KV_HEADS", kv_heads),
        ("GROUP", group),
        ("D", d),
        ("DV", dv),
        ("D_UP", d_up),
        ("DV_UP", dv_up),
        ("QUERIES", queries),
        ("PART_HEADS", part_heads),
        ("HEAD_PARTS", parts),
        ("V_MINE", dv.div_ceil(tile.across())),
        ("Q_LINE", d_up + 4),
        ("PART", part),
        ("UNITS", wanted),
        ("MOST_SPLITS", splits),
        ("CAUSAL", usize::from(f.op.causal)),
        ("WINDOW", f.op.window.unwrap_or(0)),
        ("PAGE", f.op.page.unwrap_or(0)),
        ("TABLE_PAGES", f.pages.map_or(0, |p| p.1)),
        ("CODES", usize::from(f.codes.is_some())),
    ] {
        c.int(name, value);
    }
    c.real("SCALE", f.op.scale.0);
    c.real("SOFTCAP", f.op.softcap.map_or(0.0, |x| x.0));
    for ((name, size), h) in [("Q", d), ("K", d), ("V", dv)].into_iter().zip(&f.qkv) {
        c.heads(name, h, size);
    }
    let out = f.results.iter().position(|r| r.0 == 0);
    let _ = writeln!(c.0, "typedef {} sink_of;", element(f.sinks.map_or(DType::F32, |s: Whole| s.1)));
    let _ = writeln!(c.0, "typedef {} o_of;", element(out.map_or(DType::F32, |at| f.results[at].1)));
    let rows = &f.tokens * &Dim::from(heads);
    // Rows that are split are at most those of the units that a device wants, rounded up.
    let split_rows = Dim::from(2 * wanted * tile.rows).at_most(&(&rows * &Dim::from(splits)));
    let workspace = if splits > 1 { &split_rows * &Dim::from(part * size_of::<f32>()) } else { Dim::from(0) };
    let mut program = Program::new(region, name, THREADS as u32, REGISTERS).workspace(workspace);
    [VALUES, TILE, HEADS, &c.0, FORWARD].into_iter().for_each(|text| program.text(text));
    let tensor = by_tensor_cores(f, target);
    // A line of shared memory has an odd number of pieces of 16 bytes where these cannot be swizzled.
    let line = |size: usize| size / 8 + usize::from(!(size / 8).is_power_of_two());
    // Codes wait as they are, each line with a scale.
    let codes = if f.codes.is_some() { (d + dv) / 4 + 2 } else { 0 };
    let tensor_floats = TENSOR_KEYS * ((2 * line(d) + line(dv)) * 4 + codes);
    if tensor {
        program.text(&format!("constexpr int TENSOR_FLOATS = {tensor_floats};\n{TENSOR}"));
    }
    let input = |p: &mut Printer| {
        let lse = f.results.iter().position(|r| r.0 == 1).map_or("nullptr".into(), |i| format!("w{i}"));
        let [q, k, v] = f.qkv.each_ref().map(heads_at);
        let scales = f.codes.as_ref().map(|(_, scales)| scales.each_ref().map(heads_at).join(", "));
        let scales = scales.unwrap_or("{nullptr, 0, 0}, {nullptr, 0, 0}".into());
        let (tables, lens) = (pointer(f.pages.map(|p| p.0.0)), pointer(f.pages.map(|p| p.2.0)));
        let (sinks, o) = (pointer(f.sinks.map(|s| s.0.0)), format!("w{}", out.unwrap_or(0)));
        let (starts, sequences) = (f.starts.0, dim(&f.sequences));
        p.line(&format!(
            "const attention_in in = {{{q}, {k}, {v}, {scales}, r{starts}, (index_t){sequences}, {tables}, {lens}, {sinks}, {o}, {lse}}};"
        ));
    };
    let units = &slots * &Dim::from(kv_heads * parts);
    let grid = if splits > 1 { units.at_least(&Dim::from(wanted)) } else { units.clone() };
    let floats = if tensor {
        tensor_floats
    } else {
        tile.rows * (d_up + 4) + stage + tile.rows * (tile.keys() + 16) + 3 * tile.rows + tile.keys()
    };
    let unit = if tensor { "attention_tensor_unit" } else { "attention_unit" };
    let count = |p: &mut Printer| p.line(&format!("const int splits = attention_splits({});", dim(&slots)));
    program.entry(&grid, floats * size_of::<f32>(), |p| {
        input(p);
        count(p);
        p.line("DYNAMIC_SHARED(shared);");
        let part = if splits > 1 { "(float *)workspace" } else { "nullptr" };
        let all = dim(&units);
        p.braces(
            &format!("for (index_t unit = blockIdx.x; unit < {all} * splits; unit += gridDim.x)"),
            |p| {
                p.line(&format!("{unit}(in, unit, {}, splits, {part}, shared);", dim(&slots)));
            },
        );
    });
    if splits > 1 {
        program.entry(&rows.at_most(&Dim::from(4 * wanted)), 0, |p| {
            input(p);
            count(p);
            p.line("if (splits == 1) return;");
            p.braces(
                &format!("for (index_t row = blockIdx.x; row < {}; row += gridDim.x)", dim(&rows)),
                |p| {
                    p.line("attention_join(in, row, splits, (const float *)workspace);");
                },
            );
        });
    }
    program.finish()
}

/// True where tensor cores make the products: of bf16 heads whose neighbours in memory come eight at once, or codes that come sixteen at once.
fn by_tensor_cores(f: &AttentionForm, target: &Target) -> bool {
    let whole = |h: &Heads, n: usize| {
        [&h.offset, &h.row, &h.head].iter().all(|d| d.div_exact(&Dim::from(n)).is_some())
    };
    let [q, k, v] = &f.qkv;
    let narrow = |h: &Heads| h.dtype == DType::BF16 && whole(h, 8);
    let coded = |h: &Heads| matches!(h.dtype, DType::I8 | DType::F8E4M3) && whole(h, 16);
    let held = [k, v].iter().all(|h| if f.codes.is_some() { coded(h) } else { narrow(h) });
    let fits = |size: &usize| size.is_multiple_of(16) && *size <= TENSOR_WIDE;
    target.matrix_unit && narrow(q) && held && f.sizes[2..].iter().all(fits)
}

/// The kernel of attention's gradient.
pub(super) fn backward(region: &Region, f: &AttentionGradForm, name: &str) -> Kernel {
    let [heads, kv_heads, d, dv] = f.sizes;
    let group = heads / kv_heads;
    let tile = Rows::of(GRADIENT_ELEMENTS, d.max(dv), MOST_ROWS[1]);
    let parts = group.div_ceil(tile.rows);
    let part_heads = group.div_ceil(parts);
    let queries = tile.rows / part_heads;
    let (d_up, dv_up) = (d.next_multiple_of(8), dv.next_multiple_of(8));
    let mut c = Constants::default();
    let stage = tile.define(&mut c, d_up.max(dv_up));
    for (name, value) in [
        ("HEADS", heads),
        ("KV_HEADS", kv_heads),
        ("GROUP", group),
        ("D", d),
        ("DV", dv),
        ("D_UP", d_up),
        ("DV_UP", dv_up),
        ("QUERIES", queries),
        ("PART_HEADS", part_heads),
        ("HEAD_PARTS", parts),
        ("D_MINE", d.div_ceil(tile.across())),
        ("V_MINE", dv.div_ceil(tile.across())),
        ("Q_LINE", d_up + 4),
        ("G_LINE", dv_up + 4),
        ("CAUSAL", usize::from(f.op.causal)),
        ("WINDOW", f.op.window.unwrap_or(0)),
    ] {
        c.int(name, value);
    }
    c.real("SCALE", f.op.scale.0);
    c.real("SOFTCAP", f.op.softcap.map_or(0.0, |x| x.0));
    for ((name, size), h) in [("Q", d), ("K", d), ("V", dv), ("O", dv), ("G", dv)].into_iter().zip(&f.heads) {
        c.heads(name, h, size);
    }
    let _ = writeln!(c.0, "typedef {} sink_of;", element(f.sinks.map_or(DType::F32, |s: Whole| s.1)));
    let result = |which: u32| f.results.iter().position(|r| r.0 == which);
    for (which, name) in ["dq_of", "dk_of", "dv_of", "dsink_of"].into_iter().enumerate() {
        let dtype = result(which as u32).map_or(DType::F32, |at| f.results[at].1);
        let _ = writeln!(c.0, "typedef {} {name};", element(dtype));
    }
    let written = |which: u32| result(which).map_or("nullptr".into(), |at| format!("w{at}"));
    let rows = &f.tokens * &Dim::from(heads);
    let mut program =
        Program::new(region, name, THREADS as u32, REGISTERS).workspace(&rows * &Dim::from(size_of::<f32>()));
    [VALUES, TILE, HEADS, &c.0, BACKWARD].into_iter().for_each(|text| program.text(text));
    let units = |p: &mut Printer, units: &Dim, call: &str| {
        let all: Vec<String> = f.heads.iter().map(heads_at).collect();
        let sizes = format!("(index_t){}, (index_t){}", dim(&f.tokens), dim(&f.sequences));
        p.line(&format!(
            "const gradient_in in = {{{}, r{}, r{}, {sizes}, (float *)workspace}};",
            all.join(", "),
            f.lse.0,
            f.starts.0
        ));
        let head = format!("for (index_t unit = blockIdx.x; unit < {}; unit += gridDim.x)", dim(units));
        p.braces(&head, |p| p.line(call));
    };
    let warps = rows.ceil_div(&Dim::from(THREADS / super::program::WARP));
    program.entry(&warps, 0, |p| units(p, &warps, "gradient_delta(in, unit);"));
    let keys = tile.keys();
    let floats = tile.rows * (d_up + dv_up + 8 + 2 * (keys + 16)) + stage + 2 * keys;
    let shared = floats * size_of::<f32>();
    let slots = |run: usize| &whole(&f.tokens, run) + &f.sequences;
    if result(0).is_some() {
        let slots = slots(queries);
        let all = &slots * &Dim::from(kv_heads * parts);
        program.entry(&all, shared, |p| {
            p.line("DYNAMIC_SHARED(shared);");
            units(p, &all, &format!("gradient_queries(in, unit, {}, {}, shared);", dim(&slots), written(0)));
        });
    }
    if result(1).is_some() || result(2).is_some() {
        let slots = slots(tile.rows);
        let all = &slots * &Dim::from(kv_heads);
        program.entry(&all, shared, |p| {
            p.line("DYNAMIC_SHARED(shared);");
            units(p, &all, &format!("gradient_keys(in, unit, {}, {}, shared);", written(1), written(2)));
        });
    }
    if let (Some(_), Some((sinks, _))) = (result(3), f.sinks) {
        let all = Dim::from(heads);
        program.entry(&all, 0, |p| {
            units(p, &all, &format!("gradient_sink(in, (int)unit, r{}, {});", sinks.0, written(3)));
        });
    }
    program.finish()
}

//! Cross-entropy of a linear layer, or its gradient. In: a form. Out: rounds of some tokens each: a product that makes their logits, a
//! phase that turns these into losses and their own gradient, and two products that take it to the hidden states and the weight.

use super::dot::{Operand, REGISTERS, TILE, Tile, VALUES};
use super::program::Program;
use crate::kernel_ir::print::{Printer, dim};
use astrai_ir::region::LossForm;
use astrai_ir::{DType, Dim, Kernel, Region};

const LOSS: &str = include_str!("bodies/loss.cu");
/// Logits that exist at once, 256 MiB of them.
const LOGITS: usize = 64 << 20;
/// Fewest and most tokens of a round; whole tiles of rows.
const CHUNK: (usize, usize) = (128, 4096);

/// Most tokens whose logits exist at once.
fn chunk(f: &LossForm) -> usize {
    let rows = (LOGITS / f.size[0]).clamp(CHUNK.0, CHUNK.1) / CHUNK.0 * CHUNK.0;
    rows.min(f.tokens.1.max(1))
}

/// The kernel.
pub(super) fn kernel(region: &Region, f: &LossForm, name: &str, processors: u32) -> Kernel {
    let (chunk, [vocab, width]) = (chunk(f), f.size.map(Dim::from));
    let tile = Tile::pick(false, [1, chunk as u64, f.size[0] as u64], processors);
    let line = Dim::from(f.size[0].next_multiple_of(4));
    let rounds = f.tokens.0.ceil_div(&Dim::from(chunk)).at_least(&Dim::from(1));
    let rounds = if f.tokens.1 <= chunk { Dim::from(1) } else { rounds };
    let first = if rounds.is_one() { "0".to_string() } else { format!("(index_t)round * {chunk}") };
    let logits = &Dim::from(chunk * size_of::<f32>()) * &line;
    let mut program = Program::new(region, name, tile.threads(), REGISTERS).workspace(logits).rounds(rounds);
    let narrow = f.gradient && f.dtype == DType::BF16;
    let (smoothing, cap) = (f.op.label_smoothing.0 as f32, f.op.softcap.map_or(0.0, |c| c.0 as f32));
    let constants = format!(
        "constexpr int VOCAB = {}, NARROW = {}, STATISTICS = {};\nconstexpr float SMOOTHING = {smoothing:?}f, SOFTCAP = {cap:?}f;\n",
        f.size[0],
        u8::from(narrow),
        u8::from(f.op.statistics)
    );
    [VALUES, TILE, &constants, LOSS].into_iter().for_each(|text| program.text(text));
    let written = |which: u32| f.results.iter().position(|r| r.0 == which);
    let one = Dim::from(1);
    let some = Dim::from(chunk).at_most(&f.tokens.0);
    let begin = |p: &mut Printer| {
        p.line(&format!("const index_t first = {first}, left_over = {} - first;", dim(&f.tokens.0)));
        p.line(&format!("const index_t tokens = left_over < {chunk} ? left_over : {chunk};"));
        p.line("float *const logits = (float *)workspace;");
    };
    // The tiles of a product of these rows, columns and terms.
    let product = |p: &mut Printer, sides: [Operand; 2], sizes: [&str; 3], across: &Dim, store: &str| {
        let [rows, columns, sum] = sizes;
        let [left, right] = &sides;
        left.declare(p, "left");
        right.declare(p, "right");
        tile.room(p);
        p.line(&format!("const auto store = [&](index_t row, index_t column, float sum) {{ {store} }};"));
        p.line(&format!("const index_t tiles = ({rows} + {} - 1) / {};", tile.rows, tile.rows));
        let units = format!("tiles * {}", dim(across));
        p.braces(&format!("for (index_t unit = blockIdx.x; unit < {units}; unit += gridDim.x)"), |p| {
            p.line("const index_t down = unit % tiles, across = unit / tiles;");
            let row0 = format!("down * {}", tile.rows);
            p.line(&tile.sums(["left", "right"], [&row0, rows], columns, ["0", sum]));
        });
    };
    let (hidden, weight) = (f.hidden, f.weight);
    let from = |at: astrai_ir::Operand| format!("r{}", at.0);
    let hidden_from = format!("{} + first * (int64_t){}", from(hidden.0), dim(&width));
    let (vocab_text, width_text) = (dim(&vocab), dim(&width));
    // Logits' gradients, bf16 in the lines that the logits had.
    let (slopes, slope_line) =
        if narrow { (DType::BF16, &line * &Dim::from(2)) } else { (DType::F32, line.clone()) };
    let slopes_from = if narrow { "(const bf16 *)logits" } else { "logits" };
    let blocks = |rows: &Dim, columns: &Dim| &tile.down(rows) * &tile.across(columns);
    program.entry(&blocks(&some, &vocab), 0, |p| {
        begin(p);
        let left = Operand::new(hidden.1, &hidden_from, [&width, &one], &width, &[]);
        let right = Operand::new(weight.1, &from(weight.0), [&width, &one], &width, &[]);
        let store = format!("logits[row * {} + column] = loss_capped(sum);", dim(&line));
        product(p, [left, right], ["tokens", &vocab_text, &width_text], &tile.across(&vocab), &store);
    });
    program.entry(&some, 0, |p| {
        begin(p);
        p.braces("for (index_t row = blockIdx.x; row < tokens; row += gridDim.x)", |p| {
            let of_row =
                |buffer: Option<String>| buffer.map_or("nullptr".into(), |b| format!("{b} + first + row"));
            let slopes = (0..4).map(|i| of_row(f.cotangents.get(i).map(|at| from(*at))));
            p.line(&format!("const float *const slopes[4] = {{{}}};", slopes.collect::<Vec<_>>().join(", ")));
            let results = (2..8).map(|which| of_row(written(which).map(|i| format!("w{i}"))));
            p.line(&format!("float *const results[6] = {{{}}};", results.collect::<Vec<_>>().join(", ")));
            let target = format!("r{}[first + row]", f.targets.0);
            p.line(&format!("loss_row(logits + row * {}, {target}, slopes, results);", dim(&line)));
        });
    });
    if let Some(to) = written(0).filter(|_| f.gradient) {
        program.entry(&blocks(&some, &width), 0, |p| {
            begin(p);
            let left = Operand::new(slopes, slopes_from, [&slope_line, &one], &vocab, &[]);
            let right = Operand::new(weight.1, &from(weight.0), [&one, &width], &width, &[]);
            let store = format!("w{to}[(first + row) * {width_text} + column] = sum;");
            product(p, [left, right], ["tokens", &width_text, &vocab_text], &tile.across(&width), &store);
        });
    }
    if let Some(to) = written(1).filter(|_| f.gradient) {
        program.entry(&blocks(&vocab, &width), 0, |p| {
            begin(p);
            let left = Operand::new(slopes, slopes_from, [&one, &slope_line], &vocab, &[]);
            let right = Operand::new(hidden.1, &hidden_from, [&one, &width], &width, &[]);
            let at = format!("w{to}[row * {width_text} + column]");
            let store = format!("{at} = first == 0 ? sum : {at} + sum;");
            product(p, [left, right], [&vocab_text, &width_text, "tokens"], &tile.across(&width), &store);
        });
    }
    program.finish()
}

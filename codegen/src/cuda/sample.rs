//! Tokens drawn from rows of logits. In: a form. Out: a phase that finds the largest logit of each block of a row, one that adds up the
//! weights of the blocks, and one that draws, a row a block of threads.

use super::program::Program;
use crate::kernel_ir::print::{Printer, dim};
use astrai_ir::ops::Drawing;
use astrai_ir::region::SampleForm;
use astrai_ir::{Dim, Kernel, Region};

const SAMPLE: &str = include_str!("bodies/sample.cu");
/// Threads of a block.
const THREADS: usize = 256;
/// Registers of a thread at most: three blocks share a multiprocessor; of 64 the draw spills for some architectures.
const REGISTERS: u32 = 80;
/// Blocks of a row that are looked at together.
const TOGETHER: usize = THREADS / Drawing::LANES;

/// The kernel.
pub(super) fn kernel(region: &Region, f: &SampleForm, name: &str) -> Kernel {
    let blocks = f.vocabulary.div_ceil(Drawing::BLOCK);
    let parts = blocks.div_ceil(TOGETHER);
    let bytes = blocks * (size_of::<u64>() + size_of::<f32>());
    let mut text = String::new();
    let sizes = [
        ("VOCABULARY", f.vocabulary),
        ("LOGITS", Drawing::BLOCK),
        ("LANES", Drawing::LANES),
        ("BLOCKS", blocks),
        ("PARTS", parts),
        ("DRAWS", Drawing::DRAWS),
        ("REALS", Drawing::REALS),
        ("INTEGERS", Drawing::INTEGERS),
    ];
    sizes.iter().for_each(|(key, value)| text += &format!("constexpr int {key} = {value};\n"));
    let log2_e = std::f32::consts::LOG2_E;
    let numbers = [
        ("STEPS", Drawing::STEPS),
        ("ROUND", Drawing::ROUND),
        ("LEAST", Drawing::LEAST),
        ("LOG2_E", log2_e),
        ("LN_2", Drawing::LN_2[0]),
        ("LN_2_REST", Drawing::LN_2[1]),
    ];
    numbers.iter().for_each(|(key, value)| text += &format!("constexpr float {key} = {value:?}f;\n"));
    let terms: Vec<String> = Drawing::EXP.iter().map(|c| format!("{c:?}f")).collect();
    text += &format!("#define EXP_TERMS {}\n", terms.join(", "));
    let mut program =
        Program::new(region, name, THREADS as u32, REGISTERS).workspace(&f.rows * &Dim::from(bytes));
    [text.as_str(), SAMPLE].into_iter().for_each(|text| program.text(text));
    let rows = dim(&f.rows);
    let [reals, integers] = f.drawings.map(|at| format!("r{}", at.0));
    // The place of a row: sums come before maxima, for their alignment.
    let begin = |p: &mut Printer| {
        p.line(&format!("int64_t *const sums = (int64_t *)workspace + row * {blocks};"));
        p.line(&format!(
            "float *const maxima = (float *)((int64_t *)workspace + {rows} * (index_t){blocks}) + row * {blocks};"
        ));
        p.line(&format!("const float *const logits = r{} + row * VOCABULARY;", f.logits.0));
        p.line(&format!("const float *const reals = {reals} + row * REALS;"));
        p.line(&format!("const int32_t *const integers = {integers} + row * INTEGERS;"));
    };
    let each_part = &f.rows * &Dim::from(parts);
    for call in
        ["sample_maxima(logits, part, maxima)", "sample_sums(logits, part, reals, integers, maxima, sums)"]
    {
        program.entry(&each_part, 0, |p| {
            let units = format!("{rows} * (index_t)PARTS");
            p.braces(&format!("for (index_t unit = blockIdx.x; unit < {units}; unit += gridDim.x)"), |p| {
                p.line("const index_t row = unit / PARTS;");
                p.line("const int part = (int)(unit % PARTS);");
                begin(p);
                p.line(&format!("{call};"));
            });
        });
    }
    program.entry(&f.rows, 0, |p| {
        p.braces(&format!("for (index_t row = blockIdx.x; row < {rows}; row += gridDim.x)"), |p| {
            begin(p);
            p.line("const int token = sample_row(logits, reals, integers, maxima, sums);");
            p.line("if (threadIdx.x == 0) w0[row] = token;");
        });
    });
    program.finish()
}

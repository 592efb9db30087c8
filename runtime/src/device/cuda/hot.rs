//! What PTX says of a kernel's speed without a GPU. In: PTX as NVRTC writes it. Out: the instructions of its hot loop by class.

use std::collections::{BTreeMap, HashMap};

/// Classes of instructions by the first part of their name. Those of memory go by the second, and arithmetic by the type.
const CLASSES: [(&str, &[&str]); 8] = [
    ("tensor", &["mma", "wgmma"]),
    ("special", &["ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh", "div", "rem"]),
    ("convert", &["cvt", "cvta"]),
    ("move", &["mov", "selp"]),
    ("predicate", &["setp", "set"]),
    ("warp", &["shfl", "vote", "match", "activemask", "redux", "elect"]),
    ("barrier", &["bar", "barrier", "membar", "fence", "mbarrier"]),
    ("branch", &["bra", "brx", "call", "ret", "exit"]),
];

/// A stretch of instructions that a branch at its end leads back to the first of.
#[derive(Clone, Copy)]
struct Loop {
    first: usize,
    last: usize,
}

impl Loop {
    fn holds(&self, other: &Loop) -> bool {
        self.first <= other.first && other.last <= self.last && self.len() > other.len()
    }

    fn len(&self) -> usize {
        self.last - self.first
    }
}

/// Instructions by class of the hot loop of an entry: of the loops in which no other lies one that computes, not one that copies; of those
/// the one in most others, and of those the longest. A function without loops counts whole; nothing where there is no such entry.
pub fn hot_loop(ptx: &str, entry: &str) -> BTreeMap<&'static str, usize> {
    let Some(code) = instructions(ptx, entry) else { return BTreeMap::new() };
    let loops = loops(&code);
    let depth = |l: &Loop| loops.iter().filter(|o| o.holds(l)).count();
    let innermost = loops.iter().filter(|l| !loops.iter().any(|o| l.holds(o)));
    let computes = |l: &Loop| {
        code[l.first..=l.last].iter().any(|line| !is_label(line) && matches!(class(line), "tensor" | "float"))
    };
    let hot = innermost.max_by_key(|l| (computes(l), depth(l), l.len()));
    let body = hot.map_or(&code[..], |l| &code[l.first..=l.last]);
    let mut counts = BTreeMap::new();
    for line in body.iter().filter(|line| !is_label(line)) {
        *counts.entry(class(line)).or_insert(0) += 1;
    }
    counts
}

/// Labels and instructions of an entry, in order.
fn instructions<'p>(ptx: &'p str, entry: &str) -> Option<Vec<&'p str>> {
    let head = ptx.split(".entry ").skip(1).find(|text| {
        text.strip_prefix(entry).is_some_and(|rest| rest.starts_with(|c: char| !c.is_alphanumeric()))
    })?;
    let body = head.split_once('{')?.1;
    // Assembly that a program gives itself may stand several to a line, in braces of its own; the entry's ends a line.
    let lines = body.lines().take_while(|line| !line.starts_with('}'));
    let parts = lines.flat_map(|line| line.split("//").next().unwrap_or_default().split(';'));
    let parts = parts.map(|part| part.trim().trim_matches(['{', '}']).trim());
    Some(parts.filter(|part| !part.is_empty() && !part.starts_with('.')).collect())
}

fn is_label(line: &str) -> bool {
    line.ends_with(':')
}

fn loops(code: &[&str]) -> Vec<Loop> {
    let labels = code.iter().enumerate().filter_map(|(i, line)| Some((line.strip_suffix(':')?, i)));
    let labels: HashMap<&str, usize> = labels.collect();
    // A loop ends with the last branch to its label.
    let mut found: BTreeMap<usize, usize> = BTreeMap::new();
    for (i, line) in code.iter().enumerate().filter(|(_, line)| name(line).starts_with("bra")) {
        let target = line.split_whitespace().last().and_then(|label| labels.get(label));
        found.extend(target.filter(|first| **first <= i).map(|first| (*first, i)));
    }
    found.into_iter().map(|(first, last)| Loop { first, last }).collect()
}

/// Name of an instruction, without its guard.
fn name(line: &str) -> &str {
    line.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default()
}

fn class(line: &str) -> &'static str {
    let name = name(line);
    let mut parts = name.split('.');
    let first = parts.next().unwrap_or_default();
    let has = |part: &str| name.split('.').any(|p| p == part || p.split("::").next() == Some(part));
    match first {
        "atom" | "red" => "atomic",
        "ldmatrix" | "stmatrix" | "movmatrix" => "shared",
        // A copy into shared memory counts where it comes from.
        "cp" => "global",
        "ld" | "st" | "ldu" | "prefetch" => {
            let spaces =
                [("shared", "shared"), ("local", "local"), ("param", "parameter"), ("const", "parameter")];
            spaces.into_iter().find(|(part, _)| has(part)).map_or("global", |(_, class)| class)
        }
        _ => match CLASSES.iter().find(|(_, names)| names.contains(&first)) {
            Some((class, _)) => class,
            None if ["f32", "f64", "f16", "f16x2", "bf16", "bf16x2"].iter().any(|t| has(t)) => "float",
            None => "integer",
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_the_deepest_loops_one_that_computes_is_hot() {
        let ptx = "
.visible .entry k_phase1(
)
{
	ret;
}
.visible .entry k_phase0(
	.param .u64 k_phase0_param_0
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<4>;
	ld.param.u64 	%rd1, [k_phase0_param_0];
$L__BB0_1:
	mov.u32 	%r1, 0;
$L__BB0_2:
	ld.global.nc.v4.f32 	{%f1, %f2, %f3, %f4}, [%rd1];
	// begin inline asm
	{ cvt.f32.bf16 %f5, %rs1; ex2.approx.ftz.f32 %f6, %f5; }
	// end inline asm
	fma.rn.f32 	%f7, %f1, %f2, %f7;
	st.shared.f32 	[%r9], %f7;
	bar.sync 	0;
	add.s32 	%r1, %r1, 1;
	setp.lt.s32 	%p1, %r1, 9;
	@%p1 bra 	$L__BB0_2;
$L__BB0_3:
	ld.global.nc.v4.u32 	{%r11, %r12, %r13, %r14}, [%rd2];
	st.shared.v4.u32 	[%r15], {%r11, %r12, %r13, %r14};
	add.s32 	%r16, %r16, 1;
	add.s32 	%r17, %r17, 16;
	add.s32 	%r18, %r18, 16;
	add.s32 	%r19, %r19, 16;
	add.s32 	%r20, %r20, 16;
	setp.lt.s32 	%p3, %r16, 9;
	@%p3 bra 	$L__BB0_3;
	bra.uni 	$L__BB0_1;
$L__BB0_5:
	add.s32 	%r3, %r3, 1;
	@%p2 bra 	$L__BB0_5;
	ret;
}
";
        let hot = hot_loop(ptx, "k_phase0");
        let all =
            ["global", "convert", "special", "float", "shared", "barrier", "integer", "predicate", "branch"];
        assert_eq!(hot, all.into_iter().map(|class| (class, 1)).collect());
        assert_eq!(hot_loop(ptx, "k_phase1"), BTreeMap::from([("branch", 1)]));
        assert!(hot_loop(ptx, "k_phase").is_empty());
    }
}

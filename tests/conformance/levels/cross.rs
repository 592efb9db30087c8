//! The kernels' C through clang, for x86-64 with fewer and more vectors and for aarch64: every kernel of training and of paged
//! decoding is taken, and where the result can be run here (aarch64 in QEMU's user mode) its logits and gradients are the
//! reference's. Zig's wheel brings clang with headers and a C library for all of them; it and QEMU are used where they are.

use super::CASES;
use crate::cases::case;
use crate::driver::checks_everything;
use crate::levels::image::{Image, inputs, source};
use astrai_builders::{Cache, Logits, Loss, Program};
use astrai_codegen::cpu::{Cpu, Isa, isa::FLAGS};
use astrai_engine::batch::RaggedBatch;
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::model::{Model, plan, plan_gradient, plan_within, served_fidelity};
use astrai_ir::{DType, Kernel};
use astrai_runtime::device::cpu::host_levels;
use astrai_runtime::device::null::Null;
use astrai_runtime::weights::Checkpoint;
use astrai_runtime::{Compiled, Device, Dump};
use astrai_train::engine::{Plan, Recipe};
use astrai_train::settings::Settings;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What clang compiles for, by Zig's names, and the level with which the result runs here.
const TARGETS: [(Isa, &str, &str); 6] = [
    (Isa::Plain, "x86_64-linux-musl", "x86_64"),
    (Isa::Avx2, "x86_64-linux-musl", "x86_64_v3"),
    (Isa::Avx512, "x86_64-linux-musl", "x86_64_v4"),
    (Isa::Avx512Bf16, "x86_64-linux-musl", "x86_64_v4+avx512bf16"),
    (Isa::Amx, "x86_64-linux-musl", "x86_64_v4+amx_tile+amx_bf16"),
    (Isa::Neon, "aarch64-linux-musl", "generic"),
];

/// Zig's compiler, as `scripts/setup-cache.sh` leaves it.
fn zig() -> Option<PathBuf> {
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join(".cache/zig");
    let versions = std::fs::read_dir(cache).into_iter().flatten().flatten();
    versions.map(|v| v.path().join("ziglang/zig")).filter(|p| p.is_file()).max()
}

/// What runs an executable of this level here: nothing beside it, QEMU, or `None`.
fn starter(isa: Isa) -> Option<Option<PathBuf>> {
    if host_levels().contains(&isa) {
        return Some(None);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = |name: &str| std::env::split_paths(&path).map(|f| f.join(name)).find(|p| p.is_file());
    let qemu = || found("qemu-aarch64-static").or_else(|| found("qemu-aarch64"));
    if isa == Isa::Neon { qemu().map(Some) } else { None }
}

/// The programs of one model in one type: first those that are run.
struct Programs {
    name: String,
    model: Model,
    storage: DType,
    all: Vec<Compiled>,
}

fn programs(name: &str, path: &Path, storage: DType) -> Programs {
    let machine = Machine::new(Kind::Null, 1).unwrap();
    let model = Model::open(path, false).unwrap();
    let (batch, seq, _) = golden_ids(path);
    let full = Program { logits: Logits::All, loss: Loss::Mean, ..Program::full(batch as u64, seq as u64) };
    let cache = Cache { page: 16, pages: 40, table: 8, windows: None };
    let paged = Program::paged(24, 4, cache);
    let recipe = Recipe { storage, ..Settings::of_sizes(batch as u64, seq as u64).recipe() };
    let Plan { grad, update, score, .. } =
        Plan::new(&model.config, &recipe, machine.backend(), Dump::None).unwrap();
    let all = vec![
        plan(&model.config, &full, storage, &machine).unwrap(),
        plan_gradient(&model.config, &full, storage, &machine).unwrap(),
        plan_within(&model.config, &paged, storage, &machine, served_fidelity(&model.config)).unwrap(),
        grad,
        update,
        score,
    ];
    Programs { name: format!("{name}-{storage}"), model, storage, all }
}

/// A processor on which nothing runs.
fn null() -> Null {
    Null::new(Box::new(Cpu::new(Isa::Plain, 1, 1 << 34)))
}

/// Sequences of a golden case: how many, how long, their ids.
fn golden_ids(path: &Path) -> (usize, usize, Vec<i64>) {
    let golden = Checkpoint::open(&path.join("golden.safetensors")).unwrap();
    let ids = golden.get("input_ids").unwrap();
    (ids.shape()[0], ids.shape()[1], ids.to_i64().unwrap())
}

/// An executable of a unit for a target.
fn build(zig: &Path, name: &str, text: &str, (isa, triple, cpu): (Isa, &str, &str)) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cross");
    std::fs::create_dir_all(&folder).unwrap();
    let [unit, object, exe] =
        ["c", "o", "exe"].map(|end| folder.join(format!("{name}-{}.{end}", isa.name())));
    std::fs::write(&unit, text).unwrap();
    let cc = |args: &[&str], from: &Path, to: &Path| {
        let mut run = Command::new(zig);
        run.args(["cc", "-target", triple]).args(args).arg("-o").arg(to).arg(from);
        for cache in ["ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"] {
            run.env(cache, folder.join("cache"));
        }
        let out = run.output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{to:?}:\n{}", said.lines().take(20).collect::<Vec<_>>().join("\n"));
    };
    // Zig's own names for processors are in the place of the flags that choose instructions.
    let cpu = format!("-mcpu={cpu}");
    let flags = FLAGS.iter().filter(|f| !["-O3", "-shared"].contains(f)).copied();
    // The optimiser takes three quarters of the time: two levels show what it makes of the kernels.
    let optimised = isa == Isa::Neon || Some(&isa) == host_levels().last();
    let level = if optimised { "-O1" } else { "-O0" };
    // Zig instruments what it does not optimise, for a runtime that is not linked.
    let own = ["-c", level, "-fno-sanitize=undefined", "-fno-stack-protector", &cpu];
    let flags: Vec<&str> = own.into_iter().chain(flags).collect();
    cc(&flags, &unit, &object);
    // Zig's own C library would be compiled first; the runner needs none.
    cc(&["-static", "-nostdlib"], &object, &exe);
    exe
}

impl Programs {
    /// All kernels, each once.
    fn kernels(&self) -> Vec<&Kernel> {
        let mut all: Vec<&Kernel> = self.all.iter().flat_map(|p| p.kernels.iter().flatten()).collect();
        all.sort_by(|a, b| a.identity.cmp(&b.identity));
        all.dedup_by(|a, b| a.identity == b.identity);
        all
    }

    /// Results of a program by an executable; `None` where some region has no kernel.
    fn results(
        &self,
        p: &Compiled,
        exe: &Path,
        by: Option<&Path>,
        path: &Path,
    ) -> Option<Vec<(String, Vec<f32>)>> {
        let (_, seq, ids) = golden_ids(path);
        let rows: Vec<&[i64]> = ids.chunks(seq).collect();
        let batch = RaggedBatch::new(&rows, self.model.config.vocab_size).unwrap();
        let image = Image::new(p, &null(), self.model.source(), &batch.inputs(&inputs(p)))?;
        let kernels = self.kernels();
        let number = |region: usize| {
            let name = &p.kernels[region].as_ref().unwrap().identity;
            kernels.iter().position(|k| k.identity == *name).unwrap()
        };
        let mut run = Command::new(by.unwrap_or(exe));
        run.args(by.map(|_| exe)).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = run.spawn().unwrap();
        let (mut to, bytes) = (child.stdin.take().unwrap(), image.bytes(&number));
        let out = std::thread::scope(|s| {
            s.spawn(move || _ = to.write_all(&bytes));
            child.wait_with_output().unwrap()
        });
        assert!(out.status.success(), "{exe:?}: {}", out.status);
        Some(image.results(&out.stdout))
    }

    /// Logits, loss and gradients against the reference's; of experts in bf16, whose choice flips on rounding, only that
    /// most of them are near.
    fn hold(&self, exe: &Path, by: Option<&Path>, path: &Path) {
        let golden = Checkpoint::open(&path.join("golden.safetensors")).unwrap();
        let want = |name: &str, count: usize| {
            let mut want = vec![0.0; count];
            golden.get(name).unwrap().to_f32(&mut want).unwrap();
            want
        };
        let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
        let tag = |name: &str| format!("{}: {name}", exe.file_name().unwrap_or_default().display());
        for p in &self.all[..2] {
            let results = self.results(p, exe, by, path);
            let Some(results) = results else {
                assert!(self.storage == DType::BF16, "{exe:?}: a region has no kernel");
                continue;
            };
            for (name, got) in results.iter().filter(|(n, _)| n == "logits" || n == "loss") {
                let want = want(name, got.len());
                let off =
                    norm(&mut got.iter().zip(&want).map(|(a, b)| a - b)) / norm(&mut want.iter().copied());
                let flips = self.storage == DType::BF16 && name == "logits" && !path.ends_with("llama");
                let allowed = match self.storage {
                    DType::F32 => 1e-5,
                    _ if flips => 0.3,
                    _ => 3e-2,
                };
                println!("{} off by {off:.1e}", tag(name));
                assert!(off <= allowed, "{} off by {off}", tag(name));
            }
            if self.storage == DType::F32 {
                self.hold_gradients(p, &results, &want);
            }
        }
    }

    fn hold_gradients(
        &self,
        p: &Compiled,
        results: &[(String, Vec<f32>)],
        want: &dyn Fn(&str, usize) -> Vec<f32>,
    ) {
        for w in &p.plan.weights {
            let Some((_, all)) = results.iter().find(|(n, _)| *n == format!("grad.{}", w.weight.name)) else {
                continue;
            };
            let rows = w.weight.rows();
            let width = all.len() / rows.iter().map(|r| r.rows).sum::<usize>();
            let mut first = 0;
            for part in rows {
                let got = &all[first * width..(first + part.rows) * width];
                first += part.rows;
                let want = want(&format!("grad.{}", part.name), got.len());
                let top = want.iter().fold(0f32, |m, x| m.max(x.abs()));
                let worst = got.iter().zip(&want).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(
                    worst <= 1e-4 * top,
                    "{}: gradient of {} off by {worst} of {top}",
                    self.name,
                    part.name
                );
            }
        }
    }
}

#[test]
fn clang_takes_every_kernel_for_every_target_and_its_numbers_are_right() {
    let Some(zig) = zig() else {
        println!("skipped: no Zig in .cache/zig; scripts/setup-cache.sh fetches it");
        return;
    };
    // One model has most forms; the others are of continuous integration, for they take a minute and a half.
    let cases = if checks_everything() { &CASES[..] } else { &CASES[..1] };
    for name in cases {
        let Some(path) = case(name) else { continue };
        for storage in [DType::F32, DType::BF16] {
            let programs = programs(name, &path, storage);
            let (name, unit) = (&programs.name, source(null().backend(), &programs.kernels()));
            for some in TARGETS.chunks(2) {
                let built: Vec<PathBuf> = std::thread::scope(|s| {
                    let jobs: Vec<_> =
                        some.iter().map(|t| s.spawn(|| build(&zig, name, &unit, *t))).collect();
                    jobs.into_iter().map(|j| j.join().unwrap()).collect()
                });
                for ((isa, ..), exe) in some.iter().zip(built) {
                    match starter(*isa) {
                        Some(by) => programs.hold(&exe, by.as_deref(), &path),
                        None => println!("compiled, not run here: {name} for {}", isa.name()),
                    }
                }
            }
        }
    }
}

//! A fuzzer of everything that reads what others wrote: one target a reader, inputs that are mutations of sound ones, the same
//! for the same seed. Targets run in processes of their own with bounded memory, so that a panic, a signal, a wait or a growth is
//! found whatever it does to the process, and the next input is tried. `cargo test` gives each target some; for hours:
//!
//! ```text
//! cargo test --release --test fuzz -- --seconds 3600 --seed 7 tokenizer template
//! cargo test --release --test fuzz -- --soak 1800 --kills 1000
//! ```
//!
//! Guided by coverage, where the compiler puts counters of edges into the crates of this repository: inputs that meet new ones are
//! kept, and mutated in turn. What runs in other processes is not counted: templates, and the server of requests.
//!
//! ```text
//! RUSTC_WORKSPACE_WRAPPER=tests/fuzz/instrument cargo test --features coverage --test fuzz -- --coverage --seconds 3600
//! ```

#[expect(dead_code)]
#[path = "../command/answers/fixture.rs"]
mod answers;
mod data;
mod estimates;
#[path = "../command/train/fixture.rs"]
#[expect(dead_code)]
mod fixture;
mod gguf;
mod guide;
mod mutate;
#[path = "../quick/mod.rs"]
mod quick;
mod server;
mod serving;
mod soak;
mod structured;
mod targets;

use guide::Guide;
use mutate::Draws;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use targets::{TARGETS, Target};

/// Names the target, to the process that is to run it.
const CHILD: &str = "ASTRAI_FUZZ_TARGET";

/// Tells that process that coverage guides it.
const GUIDED: &str = "ASTRAI_FUZZ_GUIDED";

/// An input may take so long.
const LONGEST: Duration = Duration::from_secs(5);

/// Bytes by which a target's address space may grow.
const GROWTH: u64 = 1 << 30;

/// Failures of a target after which it is left.
const ENOUGH: usize = 10;

/// How long each target runs.
#[derive(Clone, Copy)]
enum Length {
    /// So many times the inputs that a target gets in an ordinary run of the tests.
    Times(u64),
    Seconds(u64),
}

fn main() -> ExitCode {
    astrai_serve::template::sandbox();
    if let Ok(name) = std::env::var(CHILD) {
        run_inputs(&name);
        return ExitCode::SUCCESS;
    }
    let (mut length, mut seed, mut names) = (Length::Times(1), 1, vec![]);
    let (mut soaking, mut kills, mut guided) = (None, 0, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|n| n.parse().ok());
        match arg.as_str() {
            "--seconds" => length = number().map_or(length, Length::Seconds),
            "--times" => length = number().map_or(length, Length::Times),
            "--soak" => soaking = number(),
            "--kills" => kills = number().unwrap_or(kills),
            "--coverage" if cfg!(feature = "coverage") => guided = true,
            "--coverage" => {
                eprintln!(
                    "--coverage: this build has no counters; the top of tests/fuzz/main.rs says how to build some"
                );
                return ExitCode::FAILURE;
            }
            "--seed" => seed = number().unwrap_or(seed),
            // What the test harness of other binaries understands.
            flag if flag.starts_with('-') => {}
            name => names.push(name.to_string()),
        }
    }
    if let Some(seconds) = soaking {
        let folder = folder("soak");
        let _absent = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder for the soak");
        soak::soak(&folder, seed, seconds, kills);
        return ExitCode::SUCCESS;
    }
    let mut failed = 0;
    for target in TARGETS.iter().filter(|t| names.is_empty() || names.iter().any(|n| n == t.name)) {
        failed += fuzz(target, seed, length, guided);
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The folder of a target's files, among the build's.
fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz").join(name)
}

/// Runs a target; gives the number of inputs on which it failed.
fn fuzz(target: &Target, seed: u64, length: Length, guided: bool) -> usize {
    let since = Instant::now();
    let (folder, mut next, mut failed) = (folder(target.name), 0, 0);
    let _absent = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder for the target");
    let until = match length {
        Length::Times(n) => n * target.inputs,
        Length::Seconds(_) => u64::MAX,
    };
    let mut counts = [0; 2];
    while next < until && failed < ENOUGH {
        let deadline = match length {
            Length::Seconds(n) => Some(since + Duration::from_secs(n)),
            Length::Times(_) => None,
        };
        let run = Run { target, folder: &folder, seed, guided };
        let (at, why, [tried, accepted]) = watch(&run, next..until, deadline);
        counts = [counts[0] + tried, counts[1] + accepted];
        let Some(why) = why else { break };
        failed += 1;
        let input = folder.join(format!("{seed}-{at}"));
        match guided {
            true => fs::rename(folder.join("input"), &input),
            false => fs::write(&input, (target.input)(&mut draws(seed, target, at))),
        }
        .expect("the input is written");
        println!("{}: input {at} of seed {seed}: {why}: {}", target.name, input.display());
        next = at + 1;
    }
    let seconds = since.elapsed().as_secs_f64();
    let [tried, accepted] = counts;
    let kept = fs::read_dir(folder.join("corpus")).map_or(0, Iterator::count);
    let kept = if guided { format!(" {kept} kept,") } else { String::new() };
    println!("{}: {tried} inputs, {accepted} accepted,{kept} {failed} failures, {seconds:.1} s", target.name);
    failed
}

/// What is fuzzed and where.
struct Run<'a> {
    target: &'a Target,
    folder: &'a Path,
    seed: u64,
    guided: bool,
}

/// Runs inputs in a process until one fails or all are done: the last input, what went wrong, inputs tried and accepted.
fn watch(
    run: &Run,
    inputs: std::ops::Range<u64>,
    deadline: Option<Instant>,
) -> (u64, Option<String>, [u64; 2]) {
    let Run { target, folder, seed, guided } = *run;
    let (state, said) = (folder.join("state"), folder.join("said"));
    fs::write(&state, [0; 24]).expect("the state is written");
    let read = |at: u64| {
        let mut bytes = [0; 8];
        let got = File::open(&state).and_then(|f| f.read_exact_at(&mut bytes, 8 * at));
        got.map_or(0, |()| u64::from_le_bytes(bytes))
    };
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args([seed, inputs.start, inputs.end].map(|n| n.to_string()))
        .env(CHILD, target.name)
        .envs(guided.then_some((GUIDED, "1")))
        .stdout(Stdio::null())
        .stderr(File::create(&said).expect("a file for what it says"))
        .spawn()
        .expect("a process for the target");
    let counts = || [read(1).saturating_sub(inputs.start), read(2)];
    let (mut last, mut since) = (0, Instant::now());
    let end = |child: &mut Child| {
        let _gone = child.kill();
        let _status = child.wait();
    };
    loop {
        thread::sleep(Duration::from_millis(20));
        if let Some(status) = child.try_wait().expect("the process is ours") {
            let said = fs::read_to_string(&said).unwrap_or_default();
            let line = said.lines().find(|l| !l.is_empty()).unwrap_or("");
            let why = match (status.success(), status.signal()) {
                (true, _) => return (read(0), None, counts()),
                (false, Some(signal)) => format!("signal {signal}: {line}"),
                (false, None) => said.lines().take(3).collect::<Vec<_>>().join(" "),
            };
            return (read(0), Some(why), counts());
        }
        if deadline.is_some_and(|d| Instant::now() > d) {
            end(&mut child);
            return (read(0), None, counts());
        }
        if read(1) != last {
            (last, since) = (read(1), Instant::now());
        } else if since.elapsed() > LONGEST * target.patience {
            end(&mut child);
            let seconds = (LONGEST * target.patience).as_secs();
            return (read(0), Some(format!("takes more than {seconds} s")), counts());
        }
    }
}

fn draws(seed: u64, target: &Target, input: u64) -> Draws {
    let name = target.name.bytes().fold(seed, |h, b| h.wrapping_mul(0x100_0000_01b3) ^ u64::from(b));
    Draws::new(name ^ input.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The life of a process that runs inputs. Its state: the input at work, inputs done, inputs accepted.
fn run_inputs(name: &str) {
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target");
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|n| n.parse().ok()).collect();
    let [seed, first, end] = numbers[..] else { panic!("seed, first, end") };
    let folder = folder(name);
    let state = File::options().write(true).open(folder.join("state")).expect("the state");
    let put = |at: u64, n: u64| state.write_all_at(&n.to_le_bytes(), 8 * at).expect("the state is written");
    let work = folder.join("work");
    fs::create_dir_all(&work).expect("a folder to work in");
    let mut run = (target.run)(&work);
    let pages = fs::read_to_string("/proc/self/statm").expect("the size of this process");
    let pages: u64 = pages.split(' ').next().and_then(|n| n.parse().ok()).expect("a number of pages");
    let most = pages * 4096 + GROWTH;
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the limit is read for the call alone.
    unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) };
    let mut accepted = 0;
    let mut guide = std::env::var_os(GUIDED).map(|_| Guide::of(&folder));
    put(1, first);
    for at in first..end {
        put(0, at);
        let mut draws = draws(seed, target, at);
        let input = match &mut guide {
            Some(guide) => guide.next(target, &mut draws),
            None => (target.input)(&mut draws),
        };
        let done = run(&input);
        if let Some(guide) = &mut guide {
            guide.learn(at, input);
        }
        match done {
            Ok(()) => accepted += 1,
            Err(line) => {
                let plain = !line.contains('\n') && line.chars().count() < 4000;
                assert!(plain, "more than a line: {line:.300?}");
            }
        }
        put(2, accepted);
        put(1, at + 1);
    }
}

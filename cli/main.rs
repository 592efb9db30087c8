//! The `astrai` program: parses the command, runs it, and says in one line what went wrong.

use astrai::allocations::Counted;
use astrai::failure::Failure;
use astrai::{
    bench, chat, compile, data, devices, estimate, eval, export, generate, models, preprocess, quantize,
    quickstart, run, serve, train, verify,
};
use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// A compiler for language models: a model's config.json becomes one graph that is planned, costed, trained and run.
///
/// New here? `astrai quickstart` trains a small model in two minutes and shows each step.
#[derive(Parser)]
#[command(name = "astrai", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Models(models::Models),
    Devices(devices::Devices),
    Compile(compile::Compile),
    Estimate(Box<estimate::Estimate>),
    Run(run::Run),
    Preprocess(preprocess::Preprocess),
    Data(data::Data),
    Train(Box<train::Train>),
    Eval(Box<eval::Eval>),
    #[command(visible_alias = "import")]
    Export(export::Export),
    Quantize(quantize::Quantize),
    Generate(Box<generate::Generate>),
    Chat(Box<chat::Chat>),
    Serve(Box<serve::Serve>),
    Verify(verify::Verify),
    Bench(Box<bench::Bench>),
    Quickstart(quickstart::Quickstart),
}

/// Exit code of a command line that cannot be read.
const MISUSED: u8 = 2;

/// Stack that threads get which ask for none.
const STACK: usize = 2 << 20;

fn main() -> ExitCode {
    astrai_serve::template::sandbox();
    if std::env::var("RUST_MIN_STACK")
        .is_ok_and(|bytes| bytes.parse().is_ok_and(|bytes: usize| bytes < STACK))
    {
        // SAFETY: there is no other thread yet. With less than usual the threads of the engine would overflow.
        unsafe { std::env::remove_var("RUST_MIN_STACK") };
    }
    // Where the handler is refused, a write beyond `ulimit -f` ends the process, as it does by default.
    let _without = astrai_train::signals::survive_file_limit();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Help and versions are no errors, and go where they are asked for.
        Err(e) if !e.use_stderr() || e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            e.exit()
        }
        Err(e) => {
            astrai::failure::say_misused(&e);
            return ExitCode::from(MISUSED);
        }
    };
    let mut out = std::io::stdout().lock();
    let done = match cli.command {
        Command::Models(c) => c.run(&mut out),
        Command::Devices(c) => c.run(&mut out),
        Command::Compile(c) => c.run(&mut out),
        Command::Estimate(c) => c.run(&mut out),
        Command::Run(c) => c.run(&mut out),
        Command::Preprocess(c) => c.run(&mut out),
        Command::Data(c) => c.run(&mut out),
        Command::Train(c) => c.run(&mut out),
        Command::Eval(c) => c.run(&mut out),
        Command::Export(c) => c.run(&mut out),
        Command::Quantize(c) => c.run(&mut out),
        Command::Generate(c) => c.run(&mut out),
        Command::Chat(c) => c.run(&mut out),
        Command::Serve(c) => c.run(&mut out),
        Command::Verify(c) => c.run(&mut out),
        Command::Bench(c) => c.run(&mut out),
        Command::Quickstart(c) => c.run(&mut out),
    };
    match done {
        Ok(code) => code,
        Err(Failure::Closed) => ExitCode::SUCCESS,
        Err(Failure::Message(line)) => {
            astrai::failure::say(&line);
            ExitCode::FAILURE
        }
    }
}

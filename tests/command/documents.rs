//! The documents are true where a program can tell: every command of README, `docs/`, `bench/` and `examples/` runs as it stands there, in
//! the page's order, in a temporary folder with links to the repository's files; flags, files and links that a page names exist. A
//! block that is not run says why.
//!
//! Blocks of commands begin with ```` ```sh ````. `not-run=WHY` behind it: long work, a server, a download; only the flags are looked at.
//! `needs=PROGRAM`: run where there is such a program.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Most lines of the README.
const LINES: usize = 180;

/// What may stand behind a fence beside `sh`: nothing in such blocks is a command.
const OTHER: [&str; 6] = ["text", "json", "toml", "rust", "c", "python"];

/// A fenced block.
struct Block {
    /// Line of the page.
    line: usize,
    /// What stands behind the fence.
    info: String,
    text: String,
}

struct Page {
    /// Path below the root.
    name: String,
    blocks: Vec<Block>,
    /// The page without its blocks.
    prose: String,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn pages() -> Vec<Page> {
    let mut names = vec!["README.md".to_string()];
    for folder in ["docs", "bench", "examples"] {
        let Ok(entries) = fs::read_dir(root().join(folder)) else { continue };
        let files = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
        names.extend(files.filter(|f| f.ends_with(".md")).map(|f| format!("{folder}/{f}")));
    }
    names.sort();
    names.into_iter().map(read).collect()
}

fn read(name: String) -> Page {
    let text = fs::read_to_string(root().join(&name)).unwrap();
    let (mut blocks, mut prose, mut open) = (Vec::<Block>::new(), String::new(), false);
    for (i, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), open) {
            (Some(info), false) => {
                blocks.push(Block { line: i + 1, info: info.trim().to_string(), text: String::new() });
                open = true;
            }
            (Some(_), true) => open = false,
            (None, true) => blocks.last_mut().unwrap().text += &format!("{line}\n"),
            (None, false) => prose += &format!("{line}\n"),
        }
    }
    assert!(!open, "{name}: the last block does not end");
    Page { name, blocks, prose }
}

/// True where the shell finds a program.
fn found(program: &str) -> bool {
    let command = format!("command -v {program}");
    Command::new("sh").args(["-c", &command]).output().is_ok_and(|o| o.status.success())
}

/// What keeps a block from being run, if anything does.
fn kept(block: &Block) -> Option<String> {
    let word = block.info.strip_prefix("sh").unwrap().trim();
    match word.split_once('=') {
        None if word.is_empty() => None,
        Some(("not-run", why)) if !why.is_empty() => Some(why.to_string()),
        Some(("needs", program)) => (!found(program)).then(|| format!("no {program}")),
        _ => panic!("line {}: `sh {word}` is not known", block.line),
    }
}

/// A folder with links to what the repository holds, so that commands find it and write beside it.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(root()).unwrap().map(|e| e.unwrap()) {
        let name = entry.file_name().into_string().unwrap();
        if name != "target" && !name.starts_with('.') {
            std::os::unix::fs::symlink(entry.path(), dir.path().join(name)).unwrap();
        }
    }
    dir
}

/// A folder in which the shell finds the program that was built as `astrai`.
fn bin() -> PathBuf {
    let bin = Path::new(env!("CARGO_TARGET_TMPDIR")).join("documents");
    fs::create_dir_all(&bin).unwrap();
    let link = bin.join("astrai");
    let _absent = fs::remove_file(&link);
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_astrai"), link).unwrap();
    bin
}

/// Runs a script in the folder, `astrai` being the program that was built.
fn run(page: &str, script: &str, folder: &Path, bin: &Path) {
    let rest = crate::quick::path();
    let path =
        std::env::join_paths([bin.to_path_buf()].into_iter().chain(std::env::split_paths(&rest))).unwrap();
    let out = Command::new("sh")
        .args(["-e", "-u", "-x", "-c", script])
        .current_dir(folder)
        .env("PATH", path)
        .env_remove("ASTRAI_API_KEY")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let heard = String::from_utf8_lossy(&out.stderr).into_owned();
    let last: Vec<&str> = heard.lines().rev().take(12).collect();
    assert!(out.status.success(), "{page}: {}", last.into_iter().rev().collect::<Vec<_>>().join("\n"));
}

/// The commands of a page that are run, as one script; those that are not go to `left`, by what keeps them.
fn script(page: &Page, left: &mut BTreeMap<String, Vec<String>>) -> String {
    let mut script = String::new();
    for block in page.blocks.iter().filter(|b| b.info == "sh" || b.info.starts_with("sh ")) {
        match kept(block) {
            None => script += &block.text,
            Some(why) => left.entry(why).or_default().push(format!("{}:{}", page.name, block.line)),
        }
    }
    script
}

#[test]
fn every_command_of_the_documents_runs() {
    let bin = bin();
    let mut left = BTreeMap::new();
    let scripts: Vec<(String, String)> = pages()
        .iter()
        .map(|p| (p.name.clone(), script(p, &mut left)))
        .filter(|(_, s)| !s.is_empty())
        .collect();
    let timed = |(page, script): &(String, String)| {
        let start = Instant::now();
        run(page, script, folder().path(), &bin);
        println!("{page}: {} lines, {:.1} s", script.lines().count(), start.elapsed().as_secs_f64());
    };
    // The first page, the README, builds most of the kernels that the others use; those run side by side.
    let (first, others) = scripts.split_first().unwrap();
    timed(first);
    std::thread::scope(|threads| others.iter().for_each(|page| drop(threads.spawn(|| timed(page)))));
    let lines: usize = scripts.iter().map(|(_, s)| s.lines().count()).sum();
    println!("{lines} lines of commands ran");
    for (why, blocks) in &left {
        println!("{} blocks not run, {why}: {}", blocks.len(), blocks.join(", "));
    }
    assert!(lines >= 40, "the documents' commands were not found");
}

/// Flags of a command by its help.
fn flags(command: &str) -> BTreeSet<String> {
    let out = Command::new(env!("CARGO_BIN_EXE_astrai")).args([command, "--help"]).output().unwrap();
    assert!(out.status.success(), "there is no `astrai {command}`");
    let help = String::from_utf8(out.stdout).unwrap();
    words(&help).filter(|w| w.starts_with("--")).map(str::to_string).collect()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || "-_".contains(c))).filter(|w| !w.is_empty())
}

/// Command lines of `astrai` that stand in code, in a block or between backticks.
fn told(page: &Page) -> Vec<String> {
    let mut found: Vec<String> = spans(&page.prose).into_iter().map(str::to_string).collect();
    for block in page.blocks.iter().filter(|b| b.info.starts_with("sh")) {
        found.extend(block.text.split(['\n', '|', ';', '&']).map(|l| l.trim().to_string()));
    }
    found.retain(|l| l.starts_with("astrai "));
    found
}

/// What stands between backticks.
fn spans(prose: &str) -> Vec<&str> {
    prose.split('`').skip(1).step_by(2).collect()
}

#[test]
fn documents_name_only_commands_and_flags_that_exist() {
    let mut known = BTreeMap::<String, BTreeSet<String>>::new();
    let pages = pages();
    for page in &pages {
        for line in told(page) {
            // What stands in quotes is a text, not a flag.
            let line: String = line.split('\'').step_by(2).collect();
            let mut words = words(&line).skip(1);
            let Some(command) = words.next().filter(|w| w.chars().all(|c| c.is_ascii_lowercase())) else {
                continue;
            };
            let has = known.entry(command.to_string()).or_insert_with(|| flags(command));
            let wrong: Vec<&str> = words.filter(|w| w.starts_with("--") && !has.contains(*w)).collect();
            assert!(wrong.is_empty(), "{}: `{line}`: {wrong:?}", page.name);
        }
    }
    assert!(known.len() >= 9, "{:?}", known.keys());
    // A flag by itself is one of some command's, or of the script's that measures.
    let script = fs::read_to_string(root().join("bench/run.py")).unwrap();
    let any: BTreeSet<&str> = known.values().flatten().map(String::as_str).chain(words(&script)).collect();
    for page in &pages {
        for flag in spans(&page.prose).into_iter().filter_map(|s| words(s).next()) {
            assert!(!flag.starts_with("--") || any.contains(flag), "{}: there is no {flag}", page.name);
        }
    }
}

#[test]
fn documents_name_only_files_that_exist() {
    for page in pages() {
        let at = root().join(&page.name);
        for target in page.prose.split("](").skip(1).filter_map(|t| t.split(')').next()) {
            let file = target.split('#').next().unwrap();
            let there = file.is_empty() || file.contains("://") || at.parent().unwrap().join(file).exists();
            assert!(there, "{}: a link to {target}", page.name);
        }
        // Files that the page tells its reader to write.
        let own: Vec<&str> = page.blocks.iter().filter_map(|b| b.info.strip_prefix("rust ")).collect();
        for span in spans(&page.prose) {
            let folder = span.split_once('/').map_or("", |(folder, _)| folder);
            let path = span.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
            if path && !folder.is_empty() && root().join(folder).is_dir() && !own.contains(&span) {
                assert!(root().join(span).exists(), "{}: there is no {span}", page.name);
            }
        }
    }
}

#[test]
fn blocks_say_what_they_are_and_the_readme_is_short() {
    for page in pages() {
        for block in &page.blocks {
            let kind = block.info.split(' ').next().unwrap();
            assert!(kind == "sh" || OTHER.contains(&kind), "{}:{}: `{}`", page.name, block.line, block.info);
        }
    }
    let lines = fs::read_to_string(root().join("README.md")).unwrap().lines().count();
    assert!(lines <= LINES, "README.md has {lines} lines, at most {LINES}");
    let readme: PathBuf = root().join("README.md");
    let text = fs::read_to_string(readme).unwrap();
    for page in pages().iter().filter(|p| p.name.starts_with("docs/")) {
        assert!(text.contains(&format!("]({})", page.name)), "the README does not lead to {}", page.name);
    }
}

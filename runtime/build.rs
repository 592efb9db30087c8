//! A sum over the sources that say how weights lie in memory: what one build has kept on disk, another build does not read.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::{fs, io};

fn files(folder: &Path, all: &mut BTreeSet<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { files(&path, all)? } else { _ = all.insert(path) }
    }
    Ok(())
}

fn main() -> io::Result<()> {
    let (mut all, mut sum) = (BTreeSet::new(), DefaultHasher::new());
    for folder in ["src", "../ir/src", "../builders/src"] {
        println!("cargo::rerun-if-changed={folder}");
        files(Path::new(folder), &mut all)?;
    }
    for file in all {
        sum.write(&fs::read(file)?);
    }
    println!("cargo::rustc-env=ASTRAI_SOURCES={:016x}", sum.finish());
    Ok(())
}

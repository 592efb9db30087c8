//! A disk that fails: the power goes after any operation, one operation fails, or the room runs out at any byte. After each,
//! the run must find a whole checkpoint, and go on.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::*;
use astrai_files::{Disk, DiskFile, System};

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Operations beyond this number, and half of the last write, do not happen.
    Power(usize),
    /// This operation fails, later ones work.
    Once(usize),
    /// Writes beyond this many bytes find no room.
    Room(usize),
}

struct State {
    fault: Fault,
    operations: usize,
    bytes: usize,
    /// Files with content that only the system's memory has.
    volatile: BTreeSet<PathBuf>,
}

#[derive(Clone)]
struct Faulty(Arc<Mutex<State>>);

struct FaultyFile {
    path: PathBuf,
    file: File,
    disk: Faulty,
}

impl Faulty {
    fn new(fault: Fault) -> Faulty {
        Faulty(Arc::new(Mutex::new(State { fault, operations: 0, bytes: 0, volatile: BTreeSet::new() })))
    }

    fn act(&self) -> io::Result<std::sync::MutexGuard<'_, State>> {
        let mut state = self.0.lock().expect("one thread");
        let number = state.operations;
        state.operations += 1;
        match state.fault {
            Fault::Power(last) if number >= last => Err(io::Error::other("no power")),
            Fault::Once(this) if number == this => Err(io::Error::from(ErrorKind::PermissionDenied)),
            _ => Ok(state),
        }
    }

    /// What the disk holds when the power comes back: content that was never made durable is lost.
    fn lose_memory(&self) {
        for path in &self.0.lock().expect("one thread").volatile {
            if let Ok(file) = File::options().write(true).open(path) {
                file.set_len(0).expect("cut");
            }
        }
    }
}

impl Disk for Faulty {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.act().map(drop)?;
        System.create_folder(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.act()?.volatile.insert(path.to_path_buf());
        Ok(Box::new(FaultyFile {
            path: path.to_path_buf(),
            file: File::create_new(path)?,
            disk: self.clone(),
        }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.act()?;
        let moved = |path: PathBuf| match path.strip_prefix(from) {
            Ok(rest) if rest.as_os_str().is_empty() => to.to_path_buf(),
            Ok(rest) => to.join(rest),
            Err(_) => path,
        };
        state.volatile = std::mem::take(&mut state.volatile).into_iter().map(moved).collect();
        System.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.act().map(drop)?;
        System.remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        if let Err(e) = self.act() {
            // The power goes half-way: one file is gone already.
            if let (Some(Ok(entry)), Fault::Power(_)) =
                (fs::read_dir(path)?.next(), self.0.lock().expect("one thread").fault)
            {
                fs::remove_file(entry.path())?;
            }
            return Err(e);
        }
        System.remove_folder(path)
    }

    fn sync_folder(&self, _: &Path) -> io::Result<()> {
        self.act().map(drop)
    }

    fn free(&self, _: &Path) -> io::Result<Option<u64>> {
        self.act().map(|_| None)
    }
}

impl DiskFile for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut state = match self.disk.act() {
            Ok(state) => state,
            Err(e) => {
                self.file.write_all(&bytes[..bytes.len() / 2])?;
                return Err(e);
            }
        };
        state.volatile.insert(self.path.clone());
        state.bytes += bytes.len();
        match state.fault {
            Fault::Room(room) if state.bytes > room => {
                let fits = bytes.len() - (state.bytes - room).min(bytes.len());
                self.file.write_all(&bytes[..fits])?;
                Err(io::Error::from(ErrorKind::StorageFull))
            }
            _ => self.file.write_all(bytes),
        }
    }

    fn sync(&mut self) -> io::Result<()> {
        self.disk.act()?.volatile.remove(&self.path);
        Ok(())
    }
}

/// Resumes on a disk without faults: a whole checkpoint of one of `steps`, nothing unfinished, and the next save works.
fn assert_goes_on(out: &Path, steps: &[u64]) -> u64 {
    let resumed = RunFolder::resume(out).expect("a sound checkpoint");
    let checkpoint = resumed.checkpoint.expect("a checkpoint");
    let step = checkpoint.step();
    assert!(steps.contains(&step), "{step} is none of {steps:?}");
    assert!(resumed.notes.is_empty(), "{:?}", resumed.notes);
    assert_whole(&checkpoint, step);
    resumed.folder.save(step + 10, &mut toy(step + 10), 1).expect("saved");
    let name = folder_name(step + 10);
    assert_eq!(names(out), ["latest".to_string(), name.clone()]);
    assert_eq!(fs::read_to_string(out.join("latest")).expect("latest").trim_end(), name);
    step
}

#[test]
fn power_may_go_at_any_operation() {
    let (mut found, mut last) = (BTreeSet::new(), 0);
    for operations in 0.. {
        let out = run(&[5, 10]);
        let disk = Faulty::new(Fault::Power(operations));
        let folder = RunFolder::hold(out.path(), Box::new(disk.clone())).expect("held");
        let done = folder.save(20, &mut toy(20), 1).is_ok_and(|saved| saved.notes.is_empty());
        drop(folder);
        disk.lose_memory();
        found.insert(assert_goes_on(out.path(), &[10, 20]));
        last = operations;
        if done {
            break;
        }
    }
    // Six files are created, written and made durable, besides folders and names.
    assert!(last > 24, "{last} operations");
    assert_eq!(found.into_iter().collect::<Vec<_>>(), [10, 20]);
}

#[test]
fn power_may_go_in_the_first_save() {
    for operations in 0..40 {
        let out = run(&[]);
        let disk = Faulty::new(Fault::Power(operations));
        let folder = RunFolder::hold(out.path(), Box::new(disk.clone())).expect("held");
        let _interrupted = folder.save(20, &mut toy(20), 1);
        drop(folder);
        disk.lose_memory();
        let resumed = RunFolder::resume(out.path()).expect("sound or nothing");
        if let Some(checkpoint) = resumed.checkpoint {
            assert_whole(&checkpoint, 20);
        }
    }
}

#[test]
fn any_operation_may_fail() {
    for operation in 0.. {
        let out = run(&[5, 10]);
        let disk = Faulty::new(Fault::Once(operation));
        let folder = RunFolder::hold(out.path(), Box::new(disk.clone())).expect("held");
        match folder.save(20, &mut toy(20), 1) {
            Ok(saved) if saved.notes.is_empty() => break,
            // What could not be asked, or removed, harms nothing.
            Ok(saved) => assert_eq!(saved.notes.len(), 1, "{:?}", saved.notes),
            Err(e) => {
                let line = e.to_string();
                assert!(line.contains("cannot ") && line.contains("permission denied"), "{line}");
                let unfinished = names(out.path()).iter().filter(|name| name.starts_with(".tmp")).count();
                assert_eq!(unfinished, 0, "operation {operation}: {line}");
            }
        }
        // The run goes on and saves later.
        folder.save(25, &mut toy(25), 2).expect("saved");
        drop(folder);
        assert_eq!(assert_goes_on(out.path(), &[25]), 25);
    }
}

#[test]
fn room_may_run_out_at_any_byte() {
    let out = run(&[10]);
    let mut failures = 0;
    for room in (0..).step_by(97) {
        let disk = Faulty::new(Fault::Room(room));
        let folder = RunFolder::resume_on(out.path(), Box::new(disk)).expect("resumed").folder;
        match folder.save(20, &mut toy(20), 0) {
            Ok(_) => break,
            Err(e) => {
                let line = e.to_string();
                assert!(line.contains("cannot ") || line.contains("the disk is full"), "{line}");
                // `latest` alone may have failed, after the checkpoint was published.
                let published = names(out.path()).contains(&"step_000020".to_string());
                assert!(published || line.contains(" bytes"), "{line}");
                assert!(names(out.path()).iter().all(|name| !name.starts_with(".tmp")));
                assert_whole(&open(&out.path().join("step_000010")).expect("sound"), 10);
                if published {
                    break;
                }
            }
        }
        failures += 1;
    }
    assert!(failures > 20, "{failures}");
    assert_eq!(assert_goes_on(out.path(), &[20]), 20);
}

#[test]
fn a_full_disk_is_known_before_anything_is_written() {
    struct Small;
    impl Disk for Small {
        fn create_folder(&self, path: &Path) -> io::Result<()> {
            System.create_folder(path)
        }
        fn create(&self, _: &Path) -> io::Result<Box<dyn DiskFile>> {
            panic!("nothing is to be written")
        }
        fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
            System.rename(from, to)
        }
        fn remove_file(&self, path: &Path) -> io::Result<()> {
            System.remove_file(path)
        }
        fn remove_folder(&self, path: &Path) -> io::Result<()> {
            System.remove_folder(path)
        }
        fn sync_folder(&self, path: &Path) -> io::Result<()> {
            System.sync_folder(path)
        }
        fn free(&self, _: &Path) -> io::Result<Option<u64>> {
            Ok(Some(100))
        }
    }
    let out = run(&[10]);
    let folder = RunFolder::resume_on(out.path(), Box::new(Small)).expect("resumed").folder;
    let error = folder.save(20, &mut toy(20), 0).expect_err("no room");
    assert!(matches!(error, FileError::Full { free: 100, needed, .. } if needed > 1000));
    let line = error.to_string();
    assert!(line.contains("step_000020: the disk is full: ") && line.contains(" 100 are free"), "{line}");
    assert_eq!(names(out.path()), ["latest", "step_000010"]);
    let free = System.free(out.path()).expect("asked").expect("known");
    assert!(free > 0);
}

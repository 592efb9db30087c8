//! The system's C compiler as a script that optimises little. In: the caller's `PATH`. Out: a folder whose `cc` takes a third of the
//! time. What users' flags make of the kernels, the golden models hold.

use astrai_runtime::device::cpu::Compiler;
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The folder; `None` where there is no `cc`.
pub fn folder() -> Option<&'static Path> {
    static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
    MADE.get_or_init(make).as_deref()
}

/// `PATH` with the folder in front.
pub fn path() -> OsString {
    let rest = std::env::var_os("PATH").unwrap_or_default();
    let folders = folder().map(Path::to_path_buf).into_iter().chain(std::env::split_paths(&rest));
    std::env::join_paths(folders).unwrap()
}

fn make() -> Option<PathBuf> {
    let path: Vec<_> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
    let identity = Compiler::find(&path)?.identity().replace(|c: char| !c.is_alphanumeric(), "-");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("quick").join(identity);
    let script = folder.join("cc");
    if !script.exists() {
        let real = path.iter().map(|p| p.join("cc")).find(|p| p.exists())?;
        std::fs::create_dir_all(&folder).unwrap();
        // Whole at once: another test may look for it meanwhile.
        let new = tempfile::NamedTempFile::new_in(&folder).unwrap().into_temp_path();
        std::fs::write(&new, format!("#!/bin/sh\nexec {} \"$@\" -Og\n", real.display())).unwrap();
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).unwrap();
        new.persist(&script).unwrap();
    }
    Some(folder)
}

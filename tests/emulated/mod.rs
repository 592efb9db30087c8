//! The emulated CUDA driver, for tests on machines without a GPU. In: the driver that was built beside the tests, NVRTC of the test cache. Out:
//! where both lie. Without one of them tests say that they were skipped; in CI that is a failure.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Options with which NVRTC takes half the time; with `mid` it takes a third, but its programs are executed for three times as long. Tables of
/// kernels in `conformance::cuda`, and the commands of one model, hold what users' options make of kernels.
pub const QUICK: &str = "--Ofast-compile=min";

/// Where driver and compiler lie.
pub struct Emulated {
    /// A folder in which the loader finds `libcuda.so.1`.
    pub folder: PathBuf,
    /// The file of NVRTC.
    pub nvrtc: PathBuf,
}

/// Whether this run checks everything: continuous integration does, a run at somebody's desk leaves out what repeats a check elsewhere.
pub fn checks_everything() -> bool {
    std::env::var_os("CI").is_some_and(|ci| ci == "true")
}

/// Both, or a word about what is missing.
pub fn emulated() -> Option<&'static Emulated> {
    static FOUND: OnceLock<Result<Emulated, String>> = OnceLock::new();
    match FOUND.get_or_init(find) {
        Ok(found) => Some(found),
        Err(why) => {
            assert!(!checks_everything(), "{why}");
            println!("skipped: {why}");
            None
        }
    }
}

fn find() -> Result<Emulated, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let nvrtc = astrai_runtime::device::cuda::Nvrtc::find(&[root.join(".cache/nvrtc")]);
    let nvrtc = nvrtc.ok_or("no NVRTC in .cache/nvrtc; scripts/setup-cache.sh puts it there")?;
    let deps =
        std::env::current_exe().ok().and_then(|p| p.parent().map(Path::to_path_buf)).unwrap_or_default();
    let beside = [deps.clone(), deps.join("..")].map(|p| p.join("libastrai_ptx.so"));
    let built = beside.into_iter().find(|p| p.is_file()).ok_or("the emulated CUDA driver was not built")?;
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    std::fs::create_dir_all(&folder).map_err(|e| e.to_string())?;
    // A machine that has a GPU finds its own driver under the first name otherwise.
    for name in ["libcuda.so", "libcuda.so.1"] {
        let (link, own) = (folder.join(name), folder.join(format!("{name}-{}", std::process::id())));
        // Whole at once: other tests may load it meanwhile.
        let linked = std::os::unix::fs::symlink(&built, &own).and_then(|()| std::fs::rename(&own, link));
        linked.map_err(|e| e.to_string())?;
    }
    Ok(Emulated { folder, nvrtc })
}

//! NVRTC for tests of this crate and of kernels: CUDA C++ to PTX. The library is found below `.cache/nvrtc`, where
//! `scripts/setup-cache.sh` puts it, or in the folder that `ASTRAI_NVRTC` names.

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

fn library() -> Option<&'static Library> {
    static FOUND: OnceLock<Option<Library>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/nvrtc");
            let named = std::env::var_os("ASTRAI_NVRTC").map(PathBuf::from);
            let mut files = vec![];
            [Some(cache), named].iter().flatten().for_each(|folder| search(folder, 6, &mut files));
            files.sort();
            let one = |name: &str| files.iter().rfind(|p| p.to_string_lossy().contains(name));
            // SAFETY: NVIDIA's libraries, whose initialisers only register tables.
            let open = |p: &PathBuf| unsafe { Library::open(Some(p), RTLD_NOW | RTLD_GLOBAL) }.ok();
            // The compiler looks for its second half by name: it must be there before.
            std::mem::forget(one("libnvrtc-builtins.so").and_then(open));
            one("libnvrtc.so").and_then(open)
        })
        .as_ref()
}

fn search(folder: &Path, deep: usize, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && deep > 0 {
            search(&path, deep - 1, found);
        } else if path.to_string_lossy().contains("libnvrtc") {
            found.push(path);
        }
    }
}

/// PTX of a program; none where there is no NVRTC.
///
/// # Errors
/// What the compiler says.
pub fn ptx(source: &str, options: &[&str]) -> Option<Result<String, String>> {
    let library = library()?;
    Some(compile(library, source, options))
}

fn compile(library: &Library, source: &str, options: &[&str]) -> Result<String, String> {
    fn symbol<T: Copy>(l: &Library, name: &str) -> Result<T, String> {
        // SAFETY: the types are those of NVRTC's header.
        let s: Symbol<T> = unsafe { l.get(name.as_bytes()) }.map_err(|e| e.to_string())?;
        Ok(*s)
    }
    let create: Create = symbol(library, "nvrtcCreateProgram")?;
    let run: Compile = symbol(library, "nvrtcCompileProgram")?;
    let destroy: Destroy = symbol(library, "nvrtcDestroyProgram")?;
    let text = |size: &str, get: &str, p: Program| -> Result<String, String> {
        let (size, get): (Size, Text) = (symbol(library, size)?, symbol(library, get)?);
        let mut n = 0;
        // SAFETY: the program is alive and the place is valid.
        unsafe { size(p, &mut n) };
        let mut bytes = vec![0u8; n];
        // SAFETY: the buffer has the size that the library named.
        unsafe { get(p, bytes.as_mut_ptr().cast()) };
        Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_string())
    };
    let c = |s: &str| CString::new(s).map_err(|e| e.to_string());
    let (source, none) = (c(source)?, std::ptr::null());
    let options = options.iter().map(|o| c(o)).collect::<Result<Vec<_>, _>>()?;
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let mut p = std::ptr::null_mut();
    // SAFETY: strings outlive the program, which is destroyed below.
    let made = unsafe { create(&mut p, source.as_ptr(), c"kernel.cu".as_ptr(), 0, none, none) };
    if made != 0 {
        return Err(format!("NVRTC's error {made}"));
    }
    // SAFETY: as above.
    let compiled = unsafe { run(p, pointers.len() as c_int, pointers.as_ptr()) };
    let out = if compiled == 0 {
        text("nvrtcGetPTXSize", "nvrtcGetPTX", p)
    } else {
        Err(text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", p)?)
    };
    // SAFETY: made above, destroyed once.
    unsafe { destroy(&mut p) };
    out
}

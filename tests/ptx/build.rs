//! Names the shared library as the driver is named, so that a program that has loaded it by its path finds it by that name, too.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}

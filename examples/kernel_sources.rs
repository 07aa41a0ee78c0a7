//! Writes every CUDA source and header that the crate compiles into a folder, and the compiler's options into
//! `options.txt`, for compilers and other tools to read.
//!
//! `cargo run --example kernel_sources -- target/gpu/sources`; `tests/gpu/compile_kernels.py` compiles them from there.

use std::path::PathBuf;
use std::{env, fs, io};

use isoshard::ops::cuda_programs;
use isoshard::tensor::cuda;

fn main() -> io::Result<()> {
    let Some(dir) = env::args_os().nth(1).map(PathBuf::from) else {
        return Err(io::Error::other("usage: kernel_sources FOLDER; name the folder to write to"));
    };
    fs::create_dir_all(&dir)?;
    for (name, text) in cuda::headers() {
        fs::write(dir.join(name), text)?;
    }
    fs::write(dir.join("options.txt"), cuda::OPTIONS.join("\n"))?;
    let programs = cuda_programs();
    for (name, text) in &programs {
        fs::write(dir.join(name), text)?;
    }
    println!("{} sources and {} headers", programs.len(), cuda::headers().len());
    Ok(())
}

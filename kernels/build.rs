//! Lists the CUDA sources in `cuda/`, which `src/cuda/mod.rs` embeds.

use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=cuda");
    let variable = |name| env::var(name).expect("Cargo sets it for a build script");
    let folder = Path::new(&variable("CARGO_MANIFEST_DIR")).join("cuda");
    let read = fs::read_dir(&folder).expect("the package has the sources");
    let mut paths: Vec<_> = read.map(|entry| entry.expect("a folder can be read").path()).collect();
    paths.sort();
    let list = |extension: &str| {
        let files = paths.iter().filter(|path| path.extension().is_some_and(|e| e == extension));
        let rows = files.map(|path| {
            let name = path.file_name().expect("a file has a name");
            format!("    ({name:?}, include_str!({path:?})),\n")
        });
        rows.collect::<String>()
    };
    let sources = format!(
        "const HEADERS: &[(&str, &str)] = &[\n{}];\nconst FILES: &[(&str, &str)] = &[\n{}];\n",
        list("cuh"),
        list("cu"),
    );
    fs::write(Path::new(&variable("OUT_DIR")).join("sources.rs"), sources)
        .expect("the folder can be written");
}

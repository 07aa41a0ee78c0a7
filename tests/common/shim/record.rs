//! Records launches into a folder, for `tests/ptx` to repeat them on the compiler's code: entry, grid, arguments, and
//! the device's memory before and after.

use std::fs;
use std::io::Write;
use std::path::Path;

use isoshard::tensor::cuda::{self, Grid};
use serde_json::json;

use super::memory::Memory;
use super::program::Function;

/// Live blocks of device memory: the address, the size, and the bytes up to the last one that is not poison.
pub type MemoryImage = Vec<(u64, usize, Vec<u8>)>;

/// Writes every source, every header and the compiler's options, which a launch's record names.
pub fn sources(dir: &Path) -> std::io::Result<()> {
    fs::create_dir_all(dir)?;
    fs::write(dir.join("options.txt"), cuda::OPTIONS.join("\n"))?;
    for (name, text) in cuda::headers() {
        fs::write(dir.join(name), text)?;
    }
    isoshard::ops::cuda_programs().iter().try_for_each(|(name, text)| fs::write(dir.join(name), text))
}

/// Writes one launch: a line of JSON, then the blocks' bytes before and after. `uploads` are ranges that the host has
/// written: bytes that look like poison there are integers such as -1.
pub fn launch(
    dir: &Path,
    nth: u64,
    (function, grid): (&Function, Grid),
    arguments: &[Vec<u128>],
    before: &MemoryImage,
    uploads: &[(u64, usize)],
    memory: &Memory,
) -> std::io::Result<()> {
    let after = memory.image();
    let hex = |(words, bytes): (&Vec<u128>, usize)| {
        let all: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        all[..bytes].iter().map(|b| format!("{b:02x}")).collect::<String>()
    };
    let blocks = |image: &MemoryImage| {
        image.iter().map(|(at, bytes, data)| json!([at, bytes, data.len()])).collect::<Vec<_>>()
    };
    let head = json!({
        "program": function.program(), "entry": function.name(), "blocks": grid.blocks, "threads": grid.threads,
        "shared": grid.shared_bytes, "before": blocks(before), "after": blocks(&after),
        "uploads": uploads, "arguments": arguments.iter().zip(function.parameters()).map(hex).collect::<Vec<_>>(),
    });
    let mut file = fs::File::create(dir.join(format!("{nth:06}-{}.launch", function.name())))?;
    writeln!(file, "{head}")?;
    before.iter().chain(&after).try_for_each(|(_, _, data)| file.write_all(data))
}

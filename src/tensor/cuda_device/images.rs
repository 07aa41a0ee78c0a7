//! The files of compiled kernels: their names, which identify everything that an image depends on, and their checksums.
//!
//! A packed image has the name [`image_name`], and any compiler may have made it. In the cache each compiler has a file of
//! its own: [`name_of_compiler`].

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use super::driver::KernelProgram;
use crate::files::write_whole;

/// Returns the name of an image's file, with a hash of 128 bits of everything that the image depends on but the compiler.
pub fn image_name(program: &KernelProgram, capability: (u32, u32)) -> String {
    let half = |salt: u8| {
        let version = env!("CARGO_PKG_VERSION");
        hash_of(&(salt, version, capability, program.source, program.headers, program.options))
    };
    format!("{}-{:016x}{:016x}", program.name, half(0), half(1))
}

/// Returns the name of an image's file in the cache, with a hash of the compiler and its version.
pub fn name_of_compiler(image_name: &str, compiler: &str) -> String {
    format!("{image_name}-{:016x}", hash_of(compiler))
}

fn hash_of(what: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

/// Returns the files of a folder that have this image's name, packed or of any compiler.
pub fn of_any_compiler(dir: &Path, image_name: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(dir).into_iter().flatten().flatten().map(|file| file.path());
    let is_image = |file: &PathBuf| {
        let name = file.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with(image_name) && !name.contains('.'))
    };
    let mut found: Vec<PathBuf> = files.filter(is_image).collect();
    found.sort();
    found
}

/// Writes an image into a folder under the name that machines with any compiler look for.
#[cfg(any(test, feature = "cuda"))]
pub fn pack(
    dir: &Path,
    program: &KernelProgram,
    capability: (u32, u32),
    image: &[u8],
) -> std::io::Result<()> {
    write(&dir.join(image_name(program, capability)), image)
}

const MAGIC: &[u8; 8] = b"isocuda1";

fn checksum(image: &[u8]) -> [u8; 8] {
    hash_of(image).to_le_bytes()
}

/// Returns the image in a file, or `None` if the file is missing, truncated or changed.
pub fn read(file: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(file).ok()?;
    let image = bytes.strip_prefix(MAGIC)?;
    let (sum, image) = image.split_at_checked(8)?;
    (sum == checksum(image)).then(|| image.to_vec())
}

/// Writes a file completely or not at all.
pub fn write(file: &Path, image: &[u8]) -> std::io::Result<()> {
    write_whole(file, &[MAGIC, &checksum(image), image])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_not_whole_are_not_read() {
        let dir = std::env::temp_dir().join(format!("isoshard-cache-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let file = dir.join("kernel");
        assert_eq!(read(&file), None);
        write(&file, b"an image").unwrap();
        assert_eq!(read(&file).unwrap(), b"an image");
        let whole = fs::read(&file).unwrap();
        for cut in 0..whole.len() {
            fs::write(&file, &whole[..cut]).unwrap();
            assert_eq!(read(&file), None, "{cut} bytes");
        }
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            fs::write(&file, &changed).unwrap();
            assert_eq!(read(&file), None, "byte {at}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}

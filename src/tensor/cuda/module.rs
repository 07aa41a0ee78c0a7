//! A cache of compiled kernels, in memory and on disk.
//!
//! A source is compiled at its first use in a process, unless the cache on disk has an image of the same text,
//! headers, options, compiler and architecture. Threads and processes that want the same kernel at the same time wait
//! for the first one to compile it. Images that were compiled elsewhere, in a folder that `ISOSHARD_IMAGES` names, are
//! used instead of compiling.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::device::{CudaDevice, Modules};
use super::driver::KernelProgram;
use super::handle::Handle;
use super::lock::lock;
use super::sources::{self, KernelSource};
use crate::error::{Error, Result};

impl Modules {
    /// Returns the module of a source, which is identified by its name.
    ///
    /// # Errors
    /// Returns an error if the source does not compile or load, which is a bug of this crate, or if there is no
    /// compiler.
    pub fn find(&self, device: &CudaDevice, source: KernelSource) -> Result<Handle> {
        let cell = lock(&self.0).entry(source.name).or_default().clone();
        cell.get_or_init(|| load(device, source)).clone()
    }
}

fn load(device: &CudaDevice, source: KernelSource) -> Result<Handle> {
    let name = source.name;
    let text = source
        .text()
        .ok_or_else(|| Error::unsupported("cuda", format!("there is no kernels/{name}.cu"), "", ""))?;
    let program =
        KernelProgram { name, source: &text, headers: sources::headers(), options: sources::OPTIONS };
    let properties = device.driver.properties();
    let of_compiler = image_name(&program, &properties.compiler, properties.capability);
    let file = cache_dir().map(|dir| dir.join(of_compiler));
    if !file.as_deref().is_some_and(Path::exists)
        && let Some(module) = packed(device, &program)
    {
        return Ok(module);
    }
    let image = match &file {
        None => compile(device, &program)?,
        Some(file) => {
            let _lock = Lock::take(file);
            match read(file) {
                // A file that does not load is damaged or was written for another machine: it is made again.
                Some(image) => match device.driver.load(name, &image) {
                    Ok(module) => return Ok(module),
                    Err(_) => compile_into(device, &program, file)?,
                },
                None => compile_into(device, &program, file)?,
            }
        }
    };
    device.driver.load(name, &image).map_err(|e| device.error(format!("kernels/{name}.cu"), &e))
}

/// Loads the image of a program in the folder that `ISOSHARD_IMAGES` names. Returns `None` if it has none that loads.
fn packed(device: &CudaDevice, program: &KernelProgram) -> Option<Handle> {
    let dir = PathBuf::from(std::env::var_os("ISOSHARD_IMAGES").filter(|set| !set.is_empty())?);
    let file = dir.join(image_name(program, ANY_COMPILER, device.driver.properties().capability));
    device.driver.load(program.name, &read(&file)?).ok()
}

/// Writes an image into a folder under the name that [`packed`] looks for.
#[cfg(feature = "cuda")]
pub(super) fn pack(
    dir: &Path,
    program: &KernelProgram,
    capability: (u32, u32),
    image: &[u8],
) -> std::io::Result<()> {
    write(&dir.join(image_name(program, ANY_COMPILER, capability)), image)
}

fn compile(device: &CudaDevice, program: &KernelProgram) -> Result<Vec<u8>> {
    device.driver.compile(program).map_err(|log| Error::Device {
        verb: format!("kernels/{}.cu", program.name),
        device: device.name().to_string(),
        reason: log,
    })
}

fn compile_into(device: &CudaDevice, program: &KernelProgram, file: &Path) -> Result<Vec<u8>> {
    let image = compile(device, program)?;
    // A cache that cannot be written costs time and nothing else.
    let _ = write(file, &image);
    Ok(image)
}

/// Returns the folder of compiled kernels: `ISOSHARD_CACHE` (no cache if empty), else one in the user's cache folder.
fn cache_dir() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let dir = match std::env::var_os("ISOSHARD_CACHE") {
        Some(set) if set.is_empty() => return None,
        Some(set) => PathBuf::from(set),
        None => from("XDG_CACHE_HOME").or_else(|| Some(from("HOME")?.join(".cache")))?.join("isoshard"),
    };
    fs::create_dir_all(&dir).ok().map(|()| dir)
}

/// The compiler in the names of images that machines with other compilers use.
const ANY_COMPILER: &str = "";

/// Returns the name of an image's file, with a hash of everything that the image depends on, of 128 bits.
fn image_name(program: &KernelProgram, compiler: &str, capability: (u32, u32)) -> String {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        let version = env!("CARGO_PKG_VERSION");
        (salt, version, compiler, capability, program.source, program.headers, program.options)
            .hash(&mut hasher);
        hasher.finish()
    };
    format!("{}-{:016x}{:016x}", program.name, half(0), half(1))
}

const MAGIC: &[u8; 8] = b"isocuda1";

fn checksum(image: &[u8]) -> [u8; 8] {
    let mut hasher = DefaultHasher::new();
    image.hash(&mut hasher);
    hasher.finish().to_le_bytes()
}

/// Returns the image in a file, or `None` if the file is missing, truncated or changed.
fn read(file: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(file).ok()?;
    let image = bytes.strip_prefix(MAGIC)?;
    let (sum, image) = image.split_at_checked(8)?;
    (sum == checksum(image)).then(|| image.to_vec())
}

/// Writes a file completely or not at all.
fn write(file: &Path, image: &[u8]) -> std::io::Result<()> {
    let half_made = file.with_extension(format!("{}.part", std::process::id()));
    let mut out = File::create(&half_made)?;
    let written = out
        .write_all(MAGIC)
        .and_then(|()| out.write_all(&checksum(image)))
        .and_then(|()| out.write_all(image));
    written.and_then(|()| fs::rename(&half_made, file)).inspect_err(|_| drop(fs::remove_file(&half_made)))
}

/// A file lock, held while an image is looked up or made, so that processes do not compile twice. They may if it
/// fails.
struct Lock(Option<File>);

impl Lock {
    fn take(file: &Path) -> Lock {
        let lock = File::create(file.with_extension("lock")).ok();
        Lock(lock.filter(|f| f.lock().is_ok()))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Some(file) = &self.0 {
            let _ = file.unlock();
        }
    }
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

//! A cache of compiled kernels, in memory and on disk.
//!
//! A source is compiled at its first use in a process, unless the cache on disk has an image of the same text,
//! headers, options, compiler and architecture. Threads and processes that want the same kernel at the same time wait
//! for the first one to compile it. Images that were compiled elsewhere, in a folder that `ISOSHARD_IMAGES` names, are
//! used instead of compiling.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::device::{CudaDevice, Modules};
use super::driver::KernelProgram;
use super::handle::Handle;
use super::images::{ANY_COMPILER, image_name, read, write};
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

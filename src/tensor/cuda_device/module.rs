//! A cache of compiled kernels, in memory and on disk.
//!
//! A source is compiled at its first use in a process, unless the cache on disk has an image of the same text,
//! headers, options, compiler and architecture. Threads and processes that want the same kernel at the same time wait
//! for the first one to compile it. Images that were compiled elsewhere, in a folder that `ISOSHARD_IMAGES` names, go
//! first, and need no compiler: it is loaded at the first kernel that has none. On a machine without a compiler the cache's
//! images of any compiler are used.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::devices::{self, CudaDevice, ModulePlace, Modules};
use super::driver::KernelProgram;
use super::handle::Handle;
use super::images::{image_name, name_of_compiler, of_any_compiler, read, write};
use super::sources::{self, KernelSource};
use crate::base::lock;
use crate::error::{Error, Result};

/// Loads the modules of several sources of CUDA device `index` on all cores of this machine, and compiles those that no
/// cache has. Without it, a source is compiled when its first kernel is launched, one after the other.
///
/// ```
/// use isoshard::tensor::cuda;
///
/// if cuda::is_available() {
///     cuda::compile_ahead(0, &["fill".into(), "copy".into()])?;
/// }
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns the error of the first source that does not compile or load, once all others are done, or an error if there is
/// no such device.
pub fn compile_ahead(index: usize, sources: &[KernelSource]) -> Result<()> {
    let device = &*devices::open(index)?;
    let find = |source| device.modules.find(device, source).map(drop);
    find_all(device, sources, thread::available_parallelism().map_or(1, usize::from), &find)
}

/// Calls `find` with each of `sources`, on up to `threads` threads.
fn find_all(
    device: &CudaDevice,
    sources: &[KernelSource],
    threads: usize,
    find: &(dyn Fn(KernelSource) -> Result<()> + Sync),
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let find_some = || {
        let bound = device.driver.bind().map_err(|e| device.error("compile_ahead", &e));
        let mut failed = None;
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(&source) = sources.get(at) else { return failed };
            let found = bound.clone().and_then(|()| find(source));
            failed = failed.or(found.err().map(|error| (at, error)));
        }
    };
    let failed = thread::scope(|scope| {
        let start = |_| thread::Builder::new().spawn_scoped(scope, find_some).ok();
        let running: Vec<_> = (0..threads.min(sources.len())).filter_map(start).collect();
        // The system may have no thread left.
        let own = if running.is_empty() { find_some() } else { None };
        let ended = running.into_iter().map(|thread| thread.join().expect("the driver does not panic"));
        ended.flatten().chain(own).min_by_key(|(at, _)| *at)
    });
    failed.map_or(Ok(()), |(_, error)| Err(error))
}

impl Modules {
    /// Returns the module of a source, which is identified by its name.
    ///
    /// # Errors
    /// Refuses a name that another source has. Returns an error if the source does not compile or load, which is a bug of
    /// this crate, or if there is no compiler.
    pub fn find(&self, device: &CudaDevice, source: KernelSource) -> Result<Handle> {
        let load = || load(device, source, cache_dir().as_deref(), packed_dir().as_deref());
        self.place(source)?.get_or_init(load).clone()
    }

    /// Returns the place of a source's module.
    fn place(&self, source: KernelSource) -> Result<ModulePlace> {
        let mut modules = lock(&self.0);
        let (first, place) = modules.entry(source.name).or_insert_with(|| (source, ModulePlace::default()));
        if first.is_same(&source) { Ok(place.clone()) } else { Err(source.refuse_name()) }
    }
}

/// Loads a source's image: from the folder `packed`, else from the folder `cache`, else compiled into `cache`.
fn load(
    device: &CudaDevice,
    source: KernelSource,
    cache: Option<&Path>,
    packed: Option<&Path>,
) -> Result<Handle> {
    let name = source.name;
    let text = source
        .text()
        .ok_or_else(|| Error::unsupported("cuda", format!("there is no kernels/cuda/{name}.cu"), "", ""))?;
    let program =
        KernelProgram { name, source: &text, headers: sources::headers(), options: sources::OPTIONS };
    let image_name = image_name(&program, device.driver.properties().capability);
    let mut damaged = Vec::new();
    if let Some(dir) = packed
        && let Some(module) = load_file(device, name, &dir.join(&image_name), &mut damaged)
    {
        return Ok(module);
    }
    let compiler = match device.driver.compiler() {
        Ok(compiler) => compiler,
        Err(missing) => {
            let files = cache.map(|dir| of_any_compiler(dir, &image_name)).unwrap_or_default();
            let mut modules = files.iter().filter_map(|file| load_file(device, name, file, &mut damaged));
            let found = modules.next();
            return found.ok_or_else(|| no_image(device, &image_name, (packed, cache), &damaged, &missing));
        }
    };
    let image = match cache.map(|dir| dir.join(name_of_compiler(&image_name, &compiler))) {
        None => compile(device, &program)?,
        Some(file) => {
            let _lock = Lock::take(&file);
            // A file that does not load is damaged or was written for another machine: it is made again.
            match load_file(device, name, &file, &mut damaged) {
                Some(module) => return Ok(module),
                None => compile_into(device, &program, &file)?,
            }
        }
    };
    device.driver.load(name, &image).map_err(|e| device.error(format!("kernels/cuda/{name}.cu"), &e))
}

/// Loads the image in a file. Returns `None` if the file is missing, or adds to `damaged` why its image does not load.
fn load_file(device: &CudaDevice, name: &str, file: &Path, damaged: &mut Vec<String>) -> Option<Handle> {
    let why = match read(file) {
        Some(image) => match device.driver.load(name, &image) {
            Ok(module) => return Some(module),
            Err(error) => format!("does not load: {error}"),
        },
        None if !file.exists() => return None,
        None => "is truncated or changed".into(),
    };
    damaged.push(format!("{} {why}", file.display()));
    None
}

/// Returns the error of a kernel that is in no folder, on a machine without a compiler.
fn no_image(
    device: &CudaDevice,
    image_name: &str,
    (packed, cache): (Option<&Path>, Option<&Path>),
    damaged: &[String],
    missing: &str,
) -> Error {
    let name = image_name.rsplit_once('-').map_or(image_name, |(name, _)| name);
    let folder = |dir: Option<&Path>, variable: &str| match dir {
        Some(dir) => format!("{} ({variable})", dir.display()),
        None => format!("{variable}, which names no folder"),
    };
    let (packed, cache) = (folder(packed, "ISOSHARD_IMAGES"), folder(cache, "ISOSHARD_CACHE"));
    let damaged: String = damaged.iter().map(|file| format!("; {file}")).collect();
    Error::Device {
        verb: format!("kernels/cuda/{name}.cu"),
        device: device.name().to_string(),
        reason: format!("no image {image_name} in {packed}, or in {cache}{damaged}; {missing}"),
    }
}

fn compile(device: &CudaDevice, program: &KernelProgram) -> Result<Vec<u8>> {
    device.driver.compile(program).map_err(|log| Error::Device {
        verb: format!("kernels/cuda/{}.cu", program.name),
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

/// Returns the folder of images that were compiled elsewhere, `ISOSHARD_IMAGES`.
fn packed_dir() -> Option<PathBuf> {
    Some(PathBuf::from(std::env::var_os("ISOSHARD_IMAGES").filter(|set| !set.is_empty())?))
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

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::sync::{Arc, Mutex};

    use super::super::driver::{CopyDirection, DeviceProperties, Driver, Grid};
    use super::super::handle::{Address, DriverError, DriverResult};
    use super::super::images::pack;
    use super::super::memory::MemoryCounters;
    use super::*;

    /// A driver that compiles every program to `compiled`, loads what does not begin with `bad`, and has no memory.
    #[derive(Debug)]
    struct Loader {
        properties: DeviceProperties,
        compiler: std::result::Result<String, String>,
        /// The programs compiled and loaded, in order.
        done: Mutex<Vec<String>>,
    }

    impl Loader {
        fn device(capability: (u32, u32)) -> (CudaDevice, Arc<Loader>) {
            Loader::with_compiler(capability, Ok("nvrtc 99.9".into()))
        }

        fn with_compiler(
            capability: (u32, u32),
            compiler: std::result::Result<String, String>,
        ) -> (CudaDevice, Arc<Loader>) {
            let properties = DeviceProperties {
                name: "loader".into(),
                capability,
                multiprocessors: 1,
                shared_bytes: 0,
                total_bytes: 0,
            };
            let driver = Arc::new(Loader { properties, compiler, done: Mutex::default() });
            let (modules, counters) = (Modules::default(), MemoryCounters::new(0));
            (
                CudaDevice { index: 0, driver: driver.clone(), modules, counters, pools: Mutex::default() },
                driver,
            )
        }

        fn note(&self, text: String) {
            lock(&self.done).push(text);
        }

        fn refuse<T>() -> DriverResult<T> {
            Err(DriverError { call: "loader", code: "has no memory".into(), out_of_memory: false })
        }
    }

    // SAFETY: it has no memory.
    unsafe impl Driver for Loader {
        fn properties(&self) -> &DeviceProperties {
            &self.properties
        }
        fn compiler(&self) -> std::result::Result<String, String> {
            self.compiler.clone()
        }
        fn compile(&self, program: &KernelProgram) -> std::result::Result<Vec<u8>, String> {
            self.note(format!("compiles {}", program.name));
            if program.source.contains("wrong") {
                return Err("an error".into());
            }
            Ok(b"compiled".to_vec())
        }
        fn load(&self, name: &str, image: &[u8]) -> DriverResult<Handle> {
            if image.starts_with(b"bad") {
                return Loader::refuse();
            }
            self.note(format!("loads {name}: {}", String::from_utf8_lossy(image)));
            Ok(1)
        }
        fn bind(&self) -> DriverResult<()> {
            Ok(())
        }
        fn memory(&self) -> DriverResult<(usize, usize)> {
            Loader::refuse()
        }
        fn alloc(&self, _: usize) -> DriverResult<Address> {
            Loader::refuse()
        }
        unsafe fn free(&self, _: Address) -> DriverResult<()> {
            Loader::refuse()
        }
        fn alloc_host(&self, _: usize) -> DriverResult<*mut u8> {
            Loader::refuse()
        }
        unsafe fn free_host(&self, _: *mut u8) -> DriverResult<()> {
            Loader::refuse()
        }
        fn stream(&self) -> DriverResult<Handle> {
            Loader::refuse()
        }
        fn drop_stream(&self, _: Handle) {}
        fn synchronize(&self, _: Handle) -> DriverResult<()> {
            Loader::refuse()
        }
        fn event(&self) -> DriverResult<Handle> {
            Loader::refuse()
        }
        fn drop_event(&self, _: Handle) {}
        fn record(&self, _: Handle, _: Handle) -> DriverResult<()> {
            Loader::refuse()
        }
        fn wait(&self, _: Handle, _: Handle) -> DriverResult<()> {
            Loader::refuse()
        }
        fn is_done(&self, _: Handle) -> DriverResult<bool> {
            Loader::refuse()
        }
        unsafe fn copy(&self, _: CopyDirection, _: u64, _: u64, _: usize, _: Handle) -> DriverResult<()> {
            Loader::refuse()
        }
        unsafe fn fill(&self, _: Address, _: u8, _: usize, _: Handle) -> DriverResult<()> {
            Loader::refuse()
        }
        fn function(&self, _: Handle, _: &str) -> DriverResult<Handle> {
            Loader::refuse()
        }
        fn parameters(&self, _: Handle) -> Option<Vec<usize>> {
            None
        }
        unsafe fn launch(&self, _: Handle, _: Grid, _: &mut [*mut c_void], _: Handle) -> DriverResult<()> {
            Loader::refuse()
        }
    }

    /// A kernel of ours would run with another one's arguments.
    #[test]
    fn a_name_belongs_to_its_first_source() {
        let modules = Modules::default();
        let other = KernelSource { name: "fill", parts: &["// another text"] };
        assert!(modules.place(other).is_ok());
        let want = "kernel: another source has this name; got fill; give the source another name";
        assert_eq!(modules.place("fill".into()).unwrap_err().to_string(), want);
        assert!(modules.place(other).is_ok() && modules.place("copy".into()).is_ok());
    }

    #[test]
    fn sources_are_compiled_ahead_once_each_on_several_threads() {
        const NAMES: [&str; 5] = ["one", "two", "three", "four", "five"];
        for threads in [1, 3, 8] {
            let (device, driver) = Loader::device((9, 0));
            let find = |source| -> Result<()> {
                device.modules.place(source)?.get_or_init(|| load(&device, source, None, None)).clone()?;
                Ok(())
            };
            let sources = NAMES.map(|name| KernelSource { name, parts: &["right"] });
            find_all(&device, &sources, threads, &find).unwrap();
            let mut done = std::mem::take(&mut *lock(&driver.done));
            done.sort();
            let mut want =
                NAMES.map(|name| [format!("compiles {name}"), format!("loads {name}: compiled")]).concat();
            want.sort();
            assert_eq!(done, want);
            // They are there already; a wrong one does not keep the others from being compiled.
            let wrong = KernelSource { name: "wrong", parts: &["wrong"] };
            let later = KernelSource { name: "later", parts: &["right"] };
            let said =
                find_all(&device, &[sources[0], wrong, later], threads, &find).unwrap_err().to_string();
            assert!(said.contains("kernels/cuda/wrong.cu") && said.contains("an error"), "{said}");
            let done = std::mem::take(&mut *lock(&driver.done));
            assert!(done.contains(&"loads later: compiled".to_string()) && done.len() == 3, "{done:?}");
        }
    }

    /// Two folders, and images in them; removed at the end.
    struct Folders {
        dir: PathBuf,
        packed: PathBuf,
        cache: PathBuf,
    }

    impl Folders {
        fn new(test: &str) -> Folders {
            let dir = std::env::temp_dir().join(format!("isoshard-{test}-{}", std::process::id()));
            let (packed, cache) = (dir.join("packed"), dir.join("cache"));
            fs::create_dir_all(&packed).unwrap();
            fs::create_dir_all(&cache).unwrap();
            Folders { dir, packed, cache }
        }

        fn pack(&self, name: &'static str, capability: (u32, u32), image: &[u8]) -> PathBuf {
            let source = KernelSource::from(name).text().expect("a source of ours");
            let (headers, options) = (sources::headers(), sources::OPTIONS);
            let program = KernelProgram { name, source: &source, headers, options };
            pack(&self.packed, &program, capability, image).unwrap();
            self.packed.join(image_name(&program, capability))
        }
    }

    impl Drop for Folders {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }

    #[test]
    fn a_packed_image_is_found_by_its_name_and_goes_first() {
        let folders = Folders::new("packed");
        folders.pack("fill", (9, 0), b"packed for 90");
        folders.pack("fill", (12, 0), b"packed for 120");
        folders.pack("copy", (9, 0), b"bad");
        let done = |capability, name: &'static str, cache: Option<&Path>, packed: Option<&Path>| {
            let (device, driver) = Loader::device(capability);
            load(&device, name.into(), cache, packed).expect("a module");
            std::mem::take(&mut *lock(&driver.done)).join(", ")
        };
        let (here, there) = (Some(&*folders.cache), Some(&*folders.packed));
        assert_eq!(done((9, 0), "fill", here, there), "loads fill: packed for 90");
        assert_eq!(done((12, 0), "fill", None, there), "loads fill: packed for 120");
        assert!(fs::read_dir(&folders.cache).unwrap().next().is_none(), "nothing was compiled or copied");
        // Neither another architecture's nor another program's nor one that does not load.
        assert_eq!(done((8, 0), "fill", None, there), "compiles fill, loads fill: compiled");
        assert_eq!(done((9, 0), "flip", None, there), "compiles flip, loads flip: compiled");
        assert_eq!(done((9, 0), "copy", None, there), "compiles copy, loads copy: compiled");
        assert_eq!(done((9, 0), "fill", here, None), "compiles fill, loads fill: compiled");
        assert_eq!(done((9, 0), "fill", here, None), "loads fill: compiled");
        assert_eq!(done((9, 0), "fill", here, there), "loads fill: packed for 90");
        // A packed image that is cut short is compiled, here found in the cache.
        let whole = folders.pack("fill", (9, 0), b"packed for 90");
        fs::write(&whole, &fs::read(&whole).unwrap()[..20]).unwrap();
        assert_eq!(done((9, 0), "fill", here, there), "loads fill: compiled");
    }

    #[test]
    fn a_machine_without_a_compiler_uses_the_images_that_are_there() {
        let folders = Folders::new("no-compiler");
        let (here, there) = (Some(&*folders.cache), Some(&*folders.packed));
        folders.pack("fill", (9, 0), b"packed for 90");
        // The cache has what an earlier compiler made, and a file that it locked.
        let (earlier, _) = Loader::device((9, 0));
        load(&earlier, "flip".into(), here, None).expect("a module");
        let find = |name: &'static str, cache: Option<&Path>, packed: Option<&Path>| {
            let (device, driver) = Loader::with_compiler((9, 0), Err("libcompiler.so is not found".into()));
            let found = load(&device, name.into(), cache, packed).map_err(|e| e.to_string());
            found.map(|_| std::mem::take(&mut *lock(&driver.done)).join(", "))
        };
        assert_eq!(find("fill", here, there), Ok("loads fill: packed for 90".into()));
        assert_eq!(find("flip", here, there), Ok("loads flip: compiled".into()));
        // The error names the kernel, the folders, the files that are there and do not load, and the library.
        let said = find("copy", here, there).unwrap_err();
        let (first, rest) = said.split_once(" no image copy-").expect("it names the image");
        assert_eq!(first, "kernels/cuda/copy.cu: cuda:0 failed; got");
        let (packed, cache) = (folders.packed.display(), folders.cache.display());
        let want = format!(
            " in {packed} (ISOSHARD_IMAGES), or in {cache} (ISOSHARD_CACHE); libcompiler.so is not found"
        );
        assert_eq!(rest.split_at(32).1, want);
        let bad = folders.pack("copy", (9, 0), b"bad");
        let said = find("copy", None, there).unwrap_err();
        let want =
            format!("or in ISOSHARD_CACHE, which names no folder; {} does not load: loader", bad.display());
        assert!(said.contains(&want), "{said}");
        fs::write(&bad, b"isocuda1").unwrap();
        let said = find("copy", here, there).unwrap_err();
        assert!(said.contains(&format!("{} is truncated or changed; lib", bad.display())), "{said}");
        assert!(
            find("fill", here, None)
                .unwrap_err()
                .contains("in ISOSHARD_IMAGES, which names no folder, or in")
        );
    }
}

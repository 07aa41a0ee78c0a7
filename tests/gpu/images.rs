//! Images that are packed for machines without a compiler: those of each kind of source are compiled as `pack.sh` does, and
//! found again by a device that has no compiler; an image that is truncated is refused by name, or compiled again.
//!
//! Needs NVRTC and no device. A driver without memory stands for the device.
#![cfg(feature = "cuda")]

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use isoshard::tensor::cuda::{
    self, Address, CopyDirection, DeviceProperties, Driver, DriverError, DriverResult, Grid, Handle,
    KernelProgram, KernelSource, nvidia,
};

use super::nvrtc::{CHOSEN, has_nvrtc};

const TEST: &str = "images::packed_images_need_no_compiler";
/// Says that the stand-in has a compiler.
const COMPILER: &str = "ISOSHARD_TEST_COMPILER";
/// The number of the stand-in, which no machine's GPU has.
const INDEX: usize = 77;

/// A device of compute capability 9.0 that loads machine code.
#[derive(Debug)]
struct StandIn {
    properties: DeviceProperties,
    has_compiler: bool,
}

fn none<T>() -> DriverResult<T> {
    Err(DriverError { call: "stand-in", code: "it only loads images".into(), out_of_memory: false })
}

// SAFETY: it has no memory.
unsafe impl Driver for StandIn {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }
    fn compiler(&self) -> Result<String, String> {
        if self.has_compiler { nvidia::compiler_version() } else { Err("libnvrtc.so is not found".into()) }
    }
    fn compile(&self, program: &KernelProgram) -> Result<Vec<u8>, String> {
        println!("compiled {}", program.name);
        nvidia::compile(program, self.properties.capability)
    }
    fn load(&self, name: &str, image: &[u8]) -> DriverResult<Handle> {
        if !image.starts_with(b"\x7fELF") {
            return none();
        }
        println!("loaded {name}");
        Ok(1)
    }
    fn bind(&self) -> DriverResult<()> {
        Ok(())
    }
    fn memory(&self) -> DriverResult<(usize, usize)> {
        none()
    }
    fn alloc(&self, _: usize) -> DriverResult<Address> {
        none()
    }
    unsafe fn free(&self, _: Address) -> DriverResult<()> {
        none()
    }
    fn alloc_host(&self, _: usize) -> DriverResult<*mut u8> {
        none()
    }
    unsafe fn free_host(&self, _: *mut u8) -> DriverResult<()> {
        none()
    }
    fn stream(&self) -> DriverResult<Handle> {
        none()
    }
    fn drop_stream(&self, _: Handle) {}
    fn synchronize(&self, _: Handle) -> DriverResult<()> {
        none()
    }
    fn event(&self) -> DriverResult<Handle> {
        none()
    }
    fn drop_event(&self, _: Handle) {}
    fn record(&self, _: Handle, _: Handle) -> DriverResult<()> {
        none()
    }
    fn wait(&self, _: Handle, _: Handle) -> DriverResult<()> {
        none()
    }
    fn is_done(&self, _: Handle) -> DriverResult<bool> {
        none()
    }
    unsafe fn copy(&self, _: CopyDirection, _: u64, _: u64, _: usize, _: Handle) -> DriverResult<()> {
        none()
    }
    unsafe fn fill(&self, _: Address, _: u8, _: usize, _: Handle) -> DriverResult<()> {
        none()
    }
    fn function(&self, _: Handle, _: &str) -> DriverResult<Handle> {
        none()
    }
    fn parameters(&self, _: Handle) -> Option<Vec<usize>> {
        None
    }
    unsafe fn launch(&self, _: Handle, _: Grid, _: &mut [*mut c_void], _: Handle) -> DriverResult<()> {
        none()
    }
}

/// Loads the chosen sources on the stand-in, and prints the error if one is not there.
fn load_chosen() {
    let properties = DeviceProperties {
        name: "stand-in".into(),
        capability: (9, 0),
        multiprocessors: 1,
        shared_bytes: 0,
        total_bytes: 0,
    };
    let has_compiler = std::env::var_os(COMPILER).is_some();
    cuda::install(INDEX, Arc::new(StandIn { properties, has_compiler })).unwrap();
    let source = |file: &str| {
        let text = isoshard::ops::cuda_programs().into_iter().find(|(name, _)| name == file).unwrap().1;
        let (name, text): (&str, &str) = (file.strip_suffix(".cu").unwrap().to_string().leak(), text.leak());
        KernelSource { name, parts: vec![text].leak() }
    };
    let sources = CHOSEN.map(source);
    println!(
        "{}",
        cuda::compile_ahead(INDEX, &sources).map_or_else(|e| e.to_string(), |()| "all there".into())
    );
}

#[test]
fn packed_images_need_no_compiler() {
    if std::env::var_os(super::CHILD).is_some() {
        return load_chosen();
    }
    if !has_nvrtc(TEST) {
        return;
    }
    let dir = std::env::temp_dir().join(format!("isoshard-pack-{}", std::process::id()));
    let (packed, cache) = (dir.join("packed"), dir.join("cache"));
    std::fs::create_dir_all(&packed).unwrap();
    let run = |test: &str, set: &[(&str, &str)]| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]).envs(set.iter().copied());
        let out = command.output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.status.success(), "{said}{}", String::from_utf8_lossy(&out.stderr));
        said
    };
    let text = |path: &Path| path.to_str().expect("a plain path").to_string();
    // As pack.sh does.
    let said = run(
        "nvrtc::images_for_machines_with_a_gpu",
        &[
            ("ISOSHARD_PACK", &text(&packed)),
            ("ISOSHARD_ARCHITECTURES", "90"),
            ("ISOSHARD_SOURCES", &CHOSEN.join(" ")),
        ],
    );
    assert!(said.contains(&format!("{} images", CHOSEN.len())), "{said}");
    let (packed_text, cache_text) = (text(&packed), text(&cache));
    let load = |images: &str, cache: &str, compiler: &[(&str, &str)]| {
        let set = [(super::CHILD, TEST), ("ISOSHARD_IMAGES", images), ("ISOSHARD_CACHE", cache)];
        let said = run(TEST, &[&set, compiler].concat());
        let count = |word: &str| said.lines().filter(|line| line.contains(word)).count();
        (count("loaded "), count("compiled "), said)
    };
    let (loaded, compiled, said) = load(&packed_text, "", &[]);
    assert_eq!((loaded, compiled), (CHOSEN.len(), 0), "{said}");
    assert!(said.contains("all there"), "{said}");
    // With a compiler there is no other order, and nothing is compiled.
    let (loaded, compiled, said) = load(&packed_text, &cache_text, &[(COMPILER, "1")]);
    assert_eq!((loaded, compiled), (CHOSEN.len(), 0), "{said}");
    // Without the images the kernel, the folders and the library are named.
    let (loaded, _, said) = load("", &cache_text, &[]);
    assert_eq!(loaded, 0, "{said}");
    let want = format!(
        "ISOSHARD_IMAGES, which names no folder, or in {cache_text} (ISOSHARD_CACHE); libnvrtc.so is not found"
    );
    assert!(
        said.contains(&format!("kernels/cuda/gelu.cu: cuda:{INDEX} failed; got no image gelu-")),
        "{said}"
    );
    assert!(said.contains(&want), "{said}");
    // One that is cut short is refused by name, and compiled again if there is a compiler.
    let sum = std::fs::read_dir(&packed).unwrap().map(|file| file.unwrap().path());
    let sum: PathBuf = sum.into_iter().find(|path| text(path).contains("/sum_bf16-")).expect("it was packed");
    let whole = std::fs::read(&sum).unwrap();
    std::fs::write(&sum, &whole[..whole.len() / 2]).unwrap();
    let (loaded, compiled, said) = load(&packed_text, "", &[]);
    assert_eq!((loaded, compiled), (CHOSEN.len() - 1, 0), "{said}");
    assert!(
        said.contains("kernels/cuda/sum_bf16.cu: ") && said.contains(&format!("{} is truncated", text(&sum))),
        "{said}"
    );
    let (loaded, compiled, said) = load(&packed_text, &cache_text, &[(COMPILER, "1")]);
    assert_eq!((loaded, compiled), (CHOSEN.len(), 1), "{said}");
    assert!(said.contains("compiled sum_bf16"), "{said}");
    // The cache has it now, and a machine that has lost its compiler finds it there.
    let (loaded, compiled, said) = load(&packed_text, &cache_text, &[]);
    assert_eq!((loaded, compiled), (CHOSEN.len(), 0), "{said}");
    std::fs::remove_dir_all(&dir).unwrap();
}

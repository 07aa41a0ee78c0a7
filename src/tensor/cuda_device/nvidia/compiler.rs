//! NVRTC: compiles sources to machine code for one architecture. Needs the library, but no device.

use std::ffi::{CString, c_char};
use std::path::Path;
use std::{fmt, ptr};

use cudarc::nvrtc::{result, sys};

use crate::tensor::cuda::KernelProgram;
use crate::tensor::cuda_device::images;

/// Returns the compiler's name and version, e.g. `nvrtc 13.0`.
///
/// # Errors
/// Returns an error if the library is not installed.
///
/// ```
/// use isoshard::tensor::cuda::nvidia::compiler_version;
///
/// match compiler_version() {
///     Ok(version) => assert!(version.starts_with("nvrtc ")),
///     Err(reason) => assert!(reason.contains("libnvrtc")),
/// }
/// ```
pub fn compiler_version() -> Result<String, String> {
    // SAFETY: the function only looks up the library.
    if !unsafe { sys::is_culib_present() } {
        return Err("NVRTC, the library that compiles kernels, is not found (libnvrtc.so)".into());
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are valid.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().map_err(|e| format!("{e:?}"))?;
    // The library stays open from its first call on.
    builtins::load();
    Ok(format!("nvrtc {major}.{minor}"))
}

/// Compiles a program for devices of a compute capability, e.g. `(9, 0)`: to machine code, or for a device that is
/// newer than the compiler to PTX text for the newest architecture before it, which the driver compiles when it is
/// loaded. The text names the rounding of every operation, so results have the same bits.
///
/// # Errors
/// Returns the compiler's log if the program does not compile, or a line that says that the library is missing.
///
/// ```
/// use isoshard::tensor::cuda::{self, KernelProgram, nvidia};
///
/// if nvidia::compiler_version().is_ok() {
///     let source = "extern \"C\" __global__ void one(int* x) { *x = 1; }";
///     let program = KernelProgram { name: "one", source, headers: cuda::headers(), options: cuda::OPTIONS };
///     assert!(!nvidia::compile(&program, (9, 0))?.is_empty());
/// }
/// # Ok::<(), String>(())
/// ```
pub fn compile(program: &KernelProgram, (major, minor): (u32, u32)) -> Result<Vec<u8>, String> {
    compiler_version()?;
    let text = |s: &str| CString::new(s).map_err(|_| "a zero byte in a source".to_string());
    let (source, name) = (text(program.source)?, text(&format!("{}.cu", program.name))?);
    let pairs: Vec<(CString, CString)> =
        program.headers.iter().map(|(n, t)| Ok((text(n)?, text(t)?))).collect::<Result<_, String>>()?;
    let names: Vec<*const c_char> = pairs.iter().map(|(n, _)| n.as_ptr()).collect();
    let texts: Vec<*const c_char> = pairs.iter().map(|(_, t)| t.as_ptr()).collect();
    let mut made = NvrtcProgram(ptr::null_mut());
    // SAFETY: the strings outlive the call, and there are as many names as texts.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &mut made.0,
            source.as_ptr(),
            name.as_ptr(),
            pairs.len() as i32,
            texts.as_ptr(),
            names.as_ptr(),
        )
    };
    created.result().map_err(|e| format!("{e:?}"))?;
    let target = CompileTarget::choose(10 * major + minor, &supported()?);
    let architecture = format!("--gpu-architecture={target}");
    let options: Vec<&str> = program.options.iter().copied().chain([architecture.as_str()]).collect();
    // SAFETY: the program was created above, and is destroyed when it is dropped.
    unsafe { result::compile_program(made.0, &options) }
        .map_err(|e| made.log().unwrap_or(format!("{e:?}")))?;
    match target {
        CompileTarget::Machine(_) => made.machine_code(),
        CompileTarget::Text(_) => made.text(),
    }
}

/// Compiles a program for devices of a compute capability into a folder. If `ISOSHARD_IMAGES` names the folder, such
/// devices load the image instead of compiling, with any compiler.
///
/// # Errors
/// Returns the errors of [`compile`], or the reason for which the image cannot be written.
///
/// ```
/// use isoshard::tensor::cuda::{self, KernelProgram, nvidia};
///
/// if nvidia::compiler_version().is_ok() {
///     let dir = std::env::temp_dir().join(format!("images-{}", std::process::id()));
///     std::fs::create_dir_all(&dir).unwrap();
///     let source = "extern \"C\" __global__ void one(int* x) { *x = 1; }";
///     let program = KernelProgram { name: "one", source, headers: cuda::headers(), options: cuda::OPTIONS };
///     nvidia::compile_into(&dir, &program, (9, 0))?;
///     assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
///     std::fs::remove_dir_all(&dir).unwrap();
/// }
/// # Ok::<(), String>(())
/// ```
pub fn compile_into(dir: &Path, program: &KernelProgram, capability: (u32, u32)) -> Result<(), String> {
    let image = compile(program, capability)?;
    images::pack(dir, program, capability, &image).map_err(|e| format!("{}: {e}", dir.display()))
}

/// Returns the architectures that NVRTC compiles for, ascending, e.g. 90 for `sm_90`.
fn supported() -> Result<Vec<u32>, String> {
    let mut len = 0;
    // SAFETY: the pointer is valid.
    unsafe { sys::nvrtcGetNumSupportedArchs(&mut len) }.result().map_err(|e| format!("{e:?}"))?;
    let mut found = vec![0; len.max(0) as usize];
    // SAFETY: the buffer has the length that was asked for.
    unsafe { sys::nvrtcGetSupportedArchs(found.as_mut_ptr()) }.result().map_err(|e| format!("{e:?}"))?;
    let mut found: Vec<u32> = found.into_iter().map(|a| a as u32).collect();
    found.sort_unstable();
    Ok(found)
}

/// The architecture that a program is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CompileTarget {
    Machine(u32),
    Text(u32),
}

impl CompileTarget {
    /// Chooses the device's own architecture if the compiler has it, else the newest one before it as text. A device
    /// that is older than all of them stays, and the compiler refuses it by name.
    fn choose(device: u32, supported: &[u32]) -> CompileTarget {
        let older = supported.iter().rev().find(|&&a| a < device);
        match older {
            Some(&older) if !supported.contains(&device) => CompileTarget::Text(older),
            _ => CompileTarget::Machine(device),
        }
    }
}

impl fmt::Display for CompileTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CompileTarget::Machine(architecture) => write!(f, "sm_{architecture}"),
            CompileTarget::Text(architecture) => write!(f, "compute_{architecture}"),
        }
    }
}

/// NVRTC opens a second library, libnvrtc-builtins, by its bare name, which is found only if its folder is searched.
mod builtins {
    use std::path::{Path, PathBuf};
    use std::sync::Once;

    /// Opens the builtins beside NVRTC, once per process, so that NVRTC finds them under their name. If there are none,
    /// NVRTC looks for them itself.
    pub fn load() {
        static DONE: Once = Once::new();
        DONE.call_once(|| {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
            for path in maps.lines().filter_map(nvrtc_in).flat_map(|nvrtc| beside(&nvrtc)) {
                // SAFETY: NVIDIA's library, which NVRTC would open itself; its initialisers have no preconditions.
                if let Ok(library) = unsafe { libloading::Library::new(path) } {
                    // It stays open for NVRTC.
                    std::mem::forget(library);
                    return;
                }
            }
        });
    }

    /// Returns the file of NVRTC in a line of the process's memory map.
    fn nvrtc_in(line: &str) -> Option<PathBuf> {
        let path = Path::new(line.get(line.find('/')?..)?);
        path.file_name()?.to_str()?.starts_with("libnvrtc.so").then(|| path.to_path_buf())
    }

    fn beside(nvrtc: &Path) -> Vec<PathBuf> {
        let folder = nvrtc.parent().and_then(|dir| std::fs::read_dir(dir).ok());
        let files = folder.into_iter().flatten().flatten().map(|file| file.path());
        let is_builtins = |file: &PathBuf| {
            let name = file.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with("libnvrtc-builtins.so"))
        };
        files.filter(is_builtins).collect()
    }
}

/// A program that NVRTC has created.
struct NvrtcProgram(sys::nvrtcProgram);

impl NvrtcProgram {
    fn log(&self) -> Option<String> {
        // SAFETY: the program is alive.
        let log = unsafe { result::get_program_log(self.0) }.ok()?;
        let bytes: Vec<u8> = log.into_iter().map(|c| c as u8).take_while(|&c| c != 0).collect();
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn machine_code(&self) -> Result<Vec<u8>, String> {
        let mut size = 0;
        // SAFETY: the program is alive; it was compiled for an actual architecture, so there is machine code.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &mut size) }.result().map_err(|e| format!("{e:?}"))?;
        let mut code = vec![0u8; size];
        // SAFETY: the buffer has the size that was asked for.
        unsafe { sys::nvrtcGetCUBIN(self.0, code.as_mut_ptr().cast()) }
            .result()
            .map_err(|e| format!("{e:?}"))?;
        Ok(code)
    }

    /// Returns the PTX text with the zero byte at its end that the driver asks for.
    fn text(&self) -> Result<Vec<u8>, String> {
        let mut size = 0;
        // SAFETY: the program is alive and compiled.
        unsafe { sys::nvrtcGetPTXSize(self.0, &mut size) }.result().map_err(|e| format!("{e:?}"))?;
        let mut text = vec![0u8; size];
        // SAFETY: the buffer has the size that was asked for.
        unsafe { sys::nvrtcGetPTX(self.0, text.as_mut_ptr().cast()) }
            .result()
            .map_err(|e| format!("{e:?}"))?;
        Ok(text)
    }
}

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: created by the function that made this value, and destroyed once.
            let _ = unsafe { result::destroy_program(self.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::CompileTarget::{self, Machine, Text};

    #[test]
    fn devices_newer_than_the_compiler_get_text() {
        let known = [75, 80, 86, 90, 100, 120];
        for (device, target) in [
            (90, Machine(90)),
            (75, Machine(75)),
            (70, Machine(70)),
            (87, Text(86)),
            (130, Text(120)),
            (101, Text(100)),
        ] {
            assert_eq!(CompileTarget::choose(device, &known), target, "{device}");
        }
        assert_eq!((Text(90).to_string(), Machine(120).to_string()), ("compute_90".into(), "sm_120".into()));
    }
}

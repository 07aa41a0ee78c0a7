//! NVRTC: compiles sources to machine code for one architecture. Needs the library, but no device.

use std::ffi::{CString, c_char};
use std::ptr;

use cudarc::nvrtc::{result, sys};

use crate::tensor::cuda::KernelProgram;

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
    Ok(format!("nvrtc {major}.{minor}"))
}

/// Compiles a program to machine code for devices of a compute capability, e.g. `(9, 0)`.
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
    let architecture = format!("--gpu-architecture=sm_{major}{minor}");
    let options: Vec<&str> = program.options.iter().copied().chain([architecture.as_str()]).collect();
    // SAFETY: the program was created above, and is destroyed when it is dropped.
    unsafe { result::compile_program(made.0, &options) }
        .map_err(|e| made.log().unwrap_or(format!("{e:?}")))?;
    made.machine_code()
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
}

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: created by the function that made this value, and destroyed once.
            let _ = unsafe { result::destroy_program(self.0) };
        }
    }
}

//! Compiles embedded kernels as the crate does: with NVRTC, through the crate's driver, with its options.
//! `tests/gpu/compile_kernels.py` compiles all of them, with the same compiler and options, for two architectures.
//!
//! Needs the library, and no device. The test is skipped, with a message, if NVRTC is not found;
//! `ISOSHARD_REQUIRE_NVRTC=1` makes that a failure.
#![cfg(feature = "cuda")]

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

use isoshard::tensor::cuda::{self, KernelProgram, nvidia};

/// Hopper.
const CAPABILITY: (u32, u32) = (9, 0);

/// A source of each kind, which `images.rs` packs: a formula, one with a constant, a reduction, rows, a product, and one
/// dtype per file.
pub const CHOSEN: [&str; 6] =
    ["gelu.cu", "pow_scalar.cu", "sum_bf16.cu", "layer_norm_f32.cu", "matmul_bf16.cu", "cast_f16.cu"];

#[test]
fn the_compilers_own_words_reach_the_caller() {
    if !has_nvrtc("the_compilers_own_words_reach_the_caller") {
        return;
    }
    let outcome = compile("wrong.cu", "#include \"iso.cuh\"\nKERNEL(wrong_f32, 32, (f32* y)) { y = z; }\n");
    let log = outcome.unwrap_err();
    assert!(log.contains("wrong.cu(2)") && log.contains("\"z\" is undefined"), "{log}");
    let outcome = compile("wrong.cu", "#include <vector>\n");
    assert!(outcome.unwrap_err().contains("vector"), "no header but ours");
}

#[test]
fn a_device_newer_than_the_compiler_gets_text() {
    if !has_nvrtc("a_device_newer_than_the_compiler_gets_text") {
        return;
    }
    let source = "#include \"iso.cuh\"\nKERNEL(f, 32, (f32* y)) { *y = y[1] * y[2] + y[3]; }\n";
    let program = KernelProgram { name: "f", source, headers: cuda::headers(), options: cuda::OPTIONS };
    let text = String::from_utf8(nvidia::compile(&program, (99, 0)).unwrap()).unwrap();
    assert!(text.ends_with('\0') && text.contains(".target sm_"), "{text}");
    // The driver's compiler would be free to contract operations without a rounding.
    assert!(text.contains("mul.rn.f32") && text.contains("add.rn.f32"), "{text}");
}

/// NVRTC alone in a folder of links, as after `ln -s`: its own second library is not in a folder that is searched.
#[test]
fn the_compilers_second_library_is_found_beside_it() {
    const TEST: &str = "nvrtc::the_compilers_second_library_is_found_beside_it";
    if !has_nvrtc(TEST) {
        return;
    }
    let source = "#include \"iso.cuh\"\nKERNEL(f, 32, (f32* y)) { *y = 0; }\n";
    if std::env::var_os(super::CHILD).is_some() {
        compile("f.cu", source).unwrap();
        return;
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let nvrtc = maps.lines().find(|l| l.contains("/libnvrtc.so")).unwrap();
    let dir = std::env::temp_dir().join(format!("isoshard-nvrtc-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let link = dir.join("libnvrtc.so");
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(&nvrtc[nvrtc.find('/').unwrap()..], link).unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", TEST, "--nocapture"]).env(super::CHILD, TEST).env("LD_LIBRARY_PATH", &dir);
    let out = command.output().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// Compiles every source into the folder `ISOSHARD_PACK` for the architectures `ISOSHARD_ARCHITECTURES`; `pack.sh`
/// asks for it, and without a folder there is nothing to do. `ISOSHARD_SOURCES` names some sources instead of all.
#[test]
fn images_for_machines_with_a_gpu() {
    let Some(dir) = std::env::var_os("ISOSHARD_PACK").map(std::path::PathBuf::from) else { return };
    let chosen = std::env::var("ISOSHARD_SOURCES").ok();
    let mut sources = isoshard::ops::cuda_programs();
    let is_chosen = |file: &str| chosen.as_deref().is_none_or(|c| c.split(' ').any(|c| c == file));
    sources.retain(|(file, _)| is_chosen(file));
    let capability =
        |name: &str| name.parse::<u32>().map(|n| (n / 10, n % 10)).expect("an architecture such as 90");
    let architectures = std::env::var("ISOSHARD_ARCHITECTURES").expect("set with ISOSHARD_PACK");
    let architectures: Vec<(u32, u32)> = architectures.split(' ').map(capability).collect();
    let tasks: Vec<_> = sources.iter().flat_map(|s| architectures.iter().map(move |&a| (s, a))).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|threads| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            threads.spawn(|| {
                while let Some(((file, source), capability)) = tasks.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let name = file.strip_suffix(".cu").unwrap_or(file);
                    let (headers, options) = (cuda::headers(), cuda::OPTIONS);
                    let program = KernelProgram { name, source, headers, options };
                    nvidia::compile_into(&dir, &program, *capability)
                        .unwrap_or_else(|e| panic!("{file}: {e}"));
                }
            });
        }
    });
    println!("{} images", tasks.len());
}

/// Returns the machine code, or the compiler's log.
fn compile(file: &str, source: &str) -> Result<Vec<u8>, String> {
    let name = file.strip_suffix(".cu").unwrap_or(file);
    let program = KernelProgram { name, source, headers: cuda::headers(), options: cuda::OPTIONS };
    nvidia::compile(&program, CAPABILITY)
}

pub fn has_nvrtc(test: &str) -> bool {
    let missing = nvidia::compiler_version().err();
    if let Some(reason) = &missing {
        assert!(std::env::var_os("ISOSHARD_REQUIRE_NVRTC").is_none(), "{reason}");
        // Written directly to standard error, because the test harness hides the output of tests that pass.
        let _ = writeln!(std::io::stderr(), "SKIPPED (no NVRTC): {test}: {reason}");
    }
    missing.is_none()
}

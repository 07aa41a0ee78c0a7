//! The code that NVIDIA's compiler makes for Hopper, run by an interpreter (`tests/ptx`): launches are recorded on the
//! shim, with the CPU's bits, and repeated on the compiler's PTX, which has to leave the same bits. The interpreter
//! refuses addresses that are not aligned or outside of memory, values that nothing has written, barriers that some
//! threads miss, races in shared memory, and asynchronous copies that are used before they are waited for.
//!
//! Needs a C++ compiler, and Python with numpy and NVRTC (`tests/ptx/run --install`); without them tests are skipped,
//! with a message. `ISO_SHIM_RECORD=/some/folder cargo test --test suite cuda_reduce:: -- --test-threads=1`, then
//! `tests/ptx/run /some/folder`, repeats the launches of other tests.

mod catalog;
mod index;
mod random;
mod rows;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::common::ordinary;
use crate::common::shim::{self, Order, Settings, Streams};
use crate::cuda_reduce::compare;
use crate::cuda_rows::{self, Moved};
use crate::{cuda_attention, cuda_attention_fast};
use isoshard::ops::{Add, Bits, Dropout, Gelu, LayerNorm, Matmul, RmsNorm, Softmax, Sum, Unkeyed};
use isoshard::rng::Draw;
use isoshard::tensor::{DType, Device, Dims};

const FLOATS: [DType; 2] = [DType::F32, DType::BF16];

#[test]
fn pointwise_operators_sums_and_random_numbers() {
    check("elements", &[], |device| {
        for dtype in FLOATS {
            let x = |shape: &[usize]| ordinary(dtype, &shape.into(), shape.len() as u64);
            compare(&Add, device, &[x(&[3, 37]), x(&[3, 37])]);
            compare(&Gelu, device, &[x(&[1000])]);
            compare(&Sum { dims: Dims::from_slice(&[0]), keep: false }, device, &[x(&[70, 33])]);
            compare(&Sum { dims: Dims::from_slice(&[1]), keep: false }, device, &[x(&[3, 3000])]);
            let draw = Draw { seed: 5, number: 9 };
            compare(&Dropout { p: Bits(0.4), draw: Unkeyed(draw) }, device, &[x(&[501])]);
        }
    });
}

#[test]
fn softmax_and_norms() {
    check("rows", &[], |device| {
        for dtype in FLOATS {
            for cols in [70, 3000] {
                let (x, w) = (ordinary(dtype, &[3, cols].into(), 1), ordinary(dtype, &[cols].into(), 2));
                let eps = Bits(1e-5);
                compare(&Softmax { dim: 1 }, device, std::slice::from_ref(&x));
                compare(&RmsNorm { eps }, device, &[x.clone(), w.clone()]);
                compare(&LayerNorm { eps, weight: true, bias: false }, device, &[x, w]);
            }
        }
    });
}

/// Rows by packs, and the same rows from addresses that allow none. A damaged load or store of 16 bytes is noticed.
#[test]
fn rows_by_packs() {
    let plants = [("load", "softmax_packed_f32"), ("store", "softmax_packed_bf16")];
    check("packs", &plants, |device| {
        for dtype in FLOATS {
            cuda_rows::softmaxes(device, dtype, [9, 24], Moved::Together);
            cuda_rows::softmaxes(device, dtype, [1, 768], Moved::Together);
            cuda_rows::norms(device, dtype, [3, 96], Moved::Together);
            cuda_rows::reductions(device, dtype, [2, 768], Moved::Together);
            cuda_rows::losses(device, dtype, [3, 40], Moved::Together);
        }
        // A row of a block, in shared memory.
        let x = ordinary(DType::BF16, &[1, 4101].into(), 1);
        compare(&Softmax { dim: 1 }, device, &[x]);
    });
    check("packs-of-other-sizes", &[], |device| {
        for dtype in [DType::F64, DType::F16] {
            cuda_rows::softmaxes(device, dtype, [9, 24], Moved::Together);
            cuda_rows::reductions(device, dtype, [1, 320], Moved::Together);
        }
    });
}

#[test]
fn products() {
    check("products", &[("barrier", "_f32")], |device| {
        for dtype in FLOATS {
            for [m, k, n] in [[130, 70, 66], [3, 97, 33], [1, 40, 130]] {
                let (a, b) = (ordinary(dtype, &[m, k].into(), 1), ordinary(dtype, &[k, n].into(), 2));
                compare(&Matmul::new("m k, k n -> m n").unwrap(), device, &[a, b]);
            }
        }
    });
}

/// Whole vectors are stored at once, and operands are loaded in fours along the contraction, and then along their outer
/// dims: a damaged load or store of four registers would not be noticed if it were not run.
#[test]
fn products_of_whole_vectors() {
    for (name, product, outer_last) in
        [("along", "m k, n k -> m n", false), ("outer", "k m, k n -> m n", true)]
    {
        check(name, &[("load", "_f32"), ("store", "_f32")], move |device| {
            for dtype in FLOATS {
                for [m, k, n] in [[64, 96, 64], [132, 64, 128]] {
                    let shape = |n: usize| if outer_last { [k, n] } else { [n, k] };
                    let (a, b) = (ordinary(dtype, &shape(m).into(), 1), ordinary(dtype, &shape(n).into(), 2));
                    compare(&Matmul::new(product).unwrap(), device, &[a, b]);
                }
            }
        });
    }
    check("vectors", &[("load", "_f32"), ("barrier", "_f32")], |device| {
        for dtype in FLOATS {
            let (a, b) = (ordinary(dtype, &[130, 64].into(), 1), ordinary(dtype, &[64, 128].into(), 2));
            compare(&Matmul::new("m k, k n -> m n").unwrap(), device, &[a, b]);
        }
    });
}

#[test]
fn exact_attention() {
    check("attention", &[], |device| {
        for dtype in FLOATS {
            for (queries, keys, d) in [(37, 37, 16), (70, 130, 40)] {
                cuda_attention::one_case(device, dtype, [queries, keys, d], 0.3);
            }
        }
    });
}

/// Keys beyond the last query have no tiles in the backward pass.
#[test]
fn fast_attention() {
    check("fast", &[("barrier", "fast32"), ("wait", "fast32")], |device| {
        for (queries, keys, d, p) in
            [(70, 70, 16, 0.0), (130, 130, 64, 0.2), (16, 200, 32, 0.0), (65, 65, 128, 0.0)]
        {
            cuda_attention_fast::one_case(device, DType::BF16, [queries, keys, d], p);
        }
    });
}

/// Integers that look like NaNs, and memory that was not written, are no equal results.
#[test]
fn only_numbers_that_were_written_are_equal_as_nans() {
    let Some(script) = interpreter() else { return };
    let out = Command::new(script).arg("--self-test").output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// Returns the interpreter, or `None`, with a message, if something that it needs is missing.
fn interpreter() -> Option<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ptx/run");
    let ready = Command::new(&script).arg("--ready").output();
    if ready.as_ref().is_ok_and(|out| out.status.success()) {
        return Some(script);
    }
    let reason = ready.map_or_else(|e| e.to_string(), |out| String::from_utf8_lossy(&out.stdout).into());
    skip(&format!("no interpreter of PTX: {}", reason.trim()));
    None
}

/// Records the launches of `run` and repeats them; then, for each mistake in `plants`, repeats those of the entries with
/// that name on code that has it, which the interpreter has to notice.
fn check(name: &str, plants: &[(&str, &str)], run: impl FnOnce(Device) + Send + 'static) {
    check_some(name, usize::MAX, plants, run);
}

/// Does the same with at most `most` launches of an entry with one grid. Returns the names of the sources that ran, or
/// `None` without an interpreter.
fn check_some(
    name: &str,
    most: usize,
    plants: &[(&str, &str)],
    run: impl FnOnce(Device) + Send + 'static,
) -> Option<BTreeSet<String>> {
    let script = interpreter()?;
    let settings =
        Settings { order: Order::Ascending, streams: Streams::Eager, total_bytes: 1 << 30, checks: false };
    let Some((device, shim)) = shim::own_device(settings) else {
        skip("no C++ compiler");
        return None;
    };
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ptx-{name}-{}", std::process::id()));
    shim.record_into(Some(dir.clone()));
    std::thread::spawn(move || run(device)).join().unwrap();
    shim.record_into(None);
    // Each of them takes two cores.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let repeat = |plant: Option<&(&str, &str)>| {
        let mut command = Command::new(&script);
        command.arg(&dir);
        if plant.is_none() && most < usize::MAX {
            command.args(["--most", &most.to_string()]);
        }
        if let Some((plant, only)) = plant {
            command.args(["--plant", plant, &format!("--only={only}"), "--most", "1"]);
        }
        let out = command.output().unwrap();
        let said = [out.stdout, out.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        println!("{name} {plant:?}: {said}");
        assert!(out.status.success(), "{name}, {plant:?}: {said}");
    };
    repeat(None);
    plants.iter().for_each(|plant| repeat(Some(plant)));
    let files = std::fs::read_dir(&dir).unwrap().map(|file| file.unwrap().path());
    let ran = files.filter(|file| file.extension().is_some_and(|e| e == "launch")).map(|file| {
        let mut head = String::new();
        BufReader::new(File::open(file).unwrap()).read_line(&mut head).unwrap();
        let head: serde_json::Value = serde_json::from_str(&head).unwrap();
        head["program"].as_str().expect("a name").to_string()
    });
    let ran = ran.collect();
    std::fs::remove_dir_all(&dir).unwrap();
    Some(ran)
}

fn skip(reason: &str) {
    // Written directly to standard error, because the test harness hides the output of tests that pass.
    let _ = writeln!(std::io::stderr(), "SKIPPED ({reason})");
}

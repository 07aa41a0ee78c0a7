//! Tests of the device: its memory, its errors, its cache of compiled kernels, and the waits between ranks that share
//! it.
//!
//! Parts that need a real device are skipped, with a message, if there is none; the rest then runs on the shim.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use isoshard::Error;
use isoshard::comm::nccl::Library;
use isoshard::comm::{Spmd, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::placement::{Layout, Mesh};
use isoshard::rng::{Draw, Generator};
use isoshard::tensor::cuda::{self, Gpu};
use isoshard::tensor::{DType, Device, Tensor};

#[path = "gpu/images.rs"]
mod images;
#[path = "gpu/nvrtc.rs"]
mod nvrtc;
#[path = "common/shim.rs"]
#[allow(dead_code, reason = "the suite uses the rest")]
mod shim;

const MIB: usize = 1 << 20;
/// Names the test that a child process runs, and its folder of compiled kernels.
const CHILD: &str = "ISOSHARD_TEST_CHILD";

/// Held by every test, because limits, settings and counts belong to the process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the device, real or the shim; `None`, counted as skipped, if there is neither.
fn device() -> Option<Device> {
    shim::device()
}

/// Small integers computed from the index.
fn ints(dtype: DType, shape: &[usize]) -> Tensor {
    let values = (0..shape.iter().product()).map(|i: usize| (i * 5 % 7) as f64).collect();
    Tensor::from_vec::<f64>(values, shape).unwrap().cast(dtype).unwrap()
}

/// Returns true on a real device; else reports that the test is skipped.
fn is_real(test: &str) -> bool {
    let real = shim::device().is_some() && shim::shim().is_none();
    if !real {
        // Written directly to standard error, because the test harness hides the output of tests that pass.
        let _ = writeln!(std::io::stderr(), "SKIPPED (no CUDA device): {test}");
    }
    real
}

#[test]
fn values_come_back_as_they_went() {
    let (_alone, Some(device)) = (alone(), device()) else { return };
    for dtype in DType::ALL {
        for shape in [vec![], vec![0], vec![1], vec![3, 0, 2], vec![7, 13], vec![300_007]] {
            let x = ints(dtype, &shape);
            let there = x.to_device(device).unwrap();
            assert_eq!((there.device(), there.shape(), there.dtype()), (device, x.shape(), dtype));
            let back = there.to_device(Device::Cpu).unwrap();
            assert_eq!(back.as_bytes().unwrap(), x.as_bytes().unwrap(), "{dtype}{shape:?}");
        }
    }
    let x = ints(DType::F32, &[6, 5]);
    let part = x.to_device(device).unwrap().narrow(0, 1, 4).unwrap().transpose(0, 1).unwrap();
    let want = x.narrow(0, 1, 4).unwrap().transpose(0, 1).unwrap();
    assert_eq!(part.to_vec::<f32>().unwrap(), want.to_vec::<f32>().unwrap());
}

#[test]
fn a_required_device_is_not_emulated() {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.args(["--exact", "values_come_back_as_they_went"]);
    // ISO_SHIM hides a device that is there.
    let out =
        command.env("ISOSHARD_REQUIRE_DEVICE", "1").env("ISO_SHIM", "1").output().expect("it runs again");
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(!out.status.success(), "{text}");
    assert!(text.contains("ISOSHARD_REQUIRE_DEVICE=1, and there is no CUDA device: "), "{text}");
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let error = Tensor::zeros_on(Device::Cuda(4711), DType::F32, [3]).unwrap_err().to_string();
    assert!(error.starts_with("cuda: there is no such device"), "{error}");
    assert!(error.contains("cuda:4711") && !error.contains('\n'), "{error}");
}

#[test]
fn what_does_not_fit_is_named_and_the_rest_goes_on() {
    let (_alone, Some(Device::Cuda(index))) = (alone(), device()) else { return };
    let gpu = Gpu::get(index).unwrap();
    let before = cuda::memory_stats(index).unwrap();
    let live = gpu.zeros(DType::F32, [4 * MIB]).unwrap();
    cuda::set_memory_limit(index, before.reserved_bytes + 40 * MIB).unwrap();
    let error = gpu.uninit(DType::F32, [8 * MIB, 2]).unwrap_err();
    let Error::OutOfMemory(fault) = &error else { panic!("{error}") };
    assert_eq!((&*fault.wanted, fault.wanted_bytes), ("f32[8388608, 2]", 64 * MIB));
    assert!(fault.live_bytes >= 16 * MIB && fault.limit_bytes == before.reserved_bytes + 40 * MIB, "{error}");
    for part in ["cuda:0", "f32[8388608, 2]", "live tensors", "kept for reuse"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    // Smaller tensors still fit, many times: blocks are reused.
    for _ in 0..20 {
        let again = gpu.zeros(DType::F32, [2 * MIB]).unwrap();
        assert_eq!(again.narrow(0, 2 * MIB - 1, 1).unwrap().item().unwrap(), 0.0);
    }
    drop(live);
    cuda::set_memory_limit(index, before.limit_bytes).unwrap();
    assert!(gpu.uninit(DType::F32, [8 * MIB, 2]).is_ok());
}

#[test]
fn a_full_card_is_an_error_and_no_end() {
    let (_alone, Some(Device::Cuda(index))) = (alone(), device()) else { return };
    if !is_real("a_full_card_is_an_error_and_no_end") {
        return;
    }
    let gpu = Gpu::get(index).unwrap();
    let mut held = Vec::new();
    let error = loop {
        match gpu.uninit(DType::U8, [4096, MIB]) {
            Ok(x) => held.push(x),
            Err(error) => break error,
        }
        assert!(held.len() < 1000);
    };
    let Error::OutOfMemory(fault) = &error else { panic!("{error}") };
    assert!(fault.live_bytes >= held.len() << 32, "{error}");
    assert!(gpu.zeros(DType::F32, [5]).unwrap().to_vec::<f32>().unwrap() == [0.0; 5], "small ones still fit");
    held.clear();
    assert!(gpu.uninit(DType::U8, [4096, MIB]).is_ok(), "what was given back can be had again");
}

#[test]
fn a_bad_launch_is_named() {
    let (_alone, Some(Device::Cuda(index))) = (alone(), device()) else { return };
    cuda::set_checked(true);
    let gpu = Gpu::get(index).unwrap();
    let mut x = gpu.zeros(DType::I32, [37]).unwrap();
    let fill = gpu.kernel("fill", "fill", DType::I32).unwrap().write(&mut x).arg(37u64).arg([7u64, 0]);
    // SAFETY: the entry's parameters, for the 37 elements of `x`.
    let error = unsafe { fill.run(1, 4096, 0) }.unwrap_err().to_string();
    assert!(error.contains("fill_i32<<<[1, 1, 1], [4096, 1, 1], 0>>>(i32[37]"), "{error}");
    // The launch was refused without other effects.
    let fill = gpu.kernel("fill", "fill", DType::I32).unwrap().write(&mut x).arg(37u64).arg([7u64, 0]);
    // SAFETY: as above.
    unsafe { fill.run(1, 256, 0) }.unwrap();
    assert_eq!(x.to_vec::<i32>().unwrap(), [7; 37]);
    let error = gpu.kernel("fill", "no_such", DType::I32).map(drop).unwrap_err().to_string();
    assert!(error.contains("no_such_i32 of kernels/cuda/fill.cu"), "{error}");
}

#[test]
fn bools_that_a_kernel_wrote_are_zero_or_one() {
    let (_alone, Some(Device::Cuda(index))) = (alone(), device()) else { return };
    let gpu = Gpu::get(index).unwrap();
    let mut x = gpu.zeros(DType::Bool, [37]).unwrap();
    let fill = gpu.kernel("fill", "fill", DType::U8).unwrap().write(&mut x).arg(37u64).arg([7u64, 0]);
    // SAFETY: the entry's parameters, for the 37 bytes of `x`.
    unsafe { fill.run(1, 256, 0) }.unwrap();
    assert_eq!(x.to_device(Device::Cpu).unwrap().as_bytes().unwrap(), [1; 37]);
}

#[test]
fn a_kernel_that_fails_is_named() {
    let (_alone, Some(Device::Cuda(index))) = (alone(), device()) else { return };
    const TEST: &str = "a_kernel_that_fails_is_named";
    if std::env::var(CHILD).is_ok_and(|name| name == TEST) {
        // An invalid address: the device's context is lost with the process.
        cuda::set_checked(true);
        let gpu = Gpu::get(index).unwrap();
        let mut x = gpu.zeros(DType::I32, [37]).unwrap();
        let fill = gpu.kernel("fill", "fill", DType::I32).unwrap();
        let far = fill.write(&mut x).arg(1u64 << 45).arg([7u64, 0]);
        // SAFETY: the entry writes far behind `x` on purpose: the device refuses it, and the process ends.
        println!("{}", unsafe { far.run(65_535, 256, 0) }.unwrap_err());
    } else if is_real(TEST) {
        let out = child(TEST, None);
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(text.contains("fill_i32<<<[65535, 1, 1], [256, 1, 1], 0>>>(i32[37]"), "{text}");
        assert!(text.contains("ILLEGAL_ADDRESS"), "{text}");
    }
}

/// Runs processes one after the other, with images that are complete, truncated and changed; then several at once.
#[test]
fn kernels_are_compiled_once_and_anew_where_the_disk_is_wrong() {
    const TEST: &str = "kernels_are_compiled_once_and_anew_where_the_disk_is_wrong";
    let (_alone, Some(device)) = (alone(), device()) else { return };
    if std::env::var(CHILD).is_ok_and(|name| name == TEST) {
        // Several ranks need the kernel at the same time.
        let outs = spmd(4, move |rank| {
            let x = Tensor::from_vec(vec![-1.5f32, 0.0, 2.5], [3])?.to_device(device)?;
            let mesh = DeviceMesh::new(&rank.on(device), &[("x", 4)])?;
            DTensor::distribute(&mesh, &x, Layout::replicated(1))?.relu()?.local().to_vec::<f32>()
        });
        assert_eq!(outs.unwrap(), vec![[0.0, 0.0, 2.5]; 4]);
        println!("compiled {}", shim::shim().map_or(0, |shim| shim.calls_len("compile")));
        return;
    }
    let counts = shim::shim().is_some();
    let dir = std::env::temp_dir().join(format!("isoshard-images-{}", std::process::id()));
    let compiled = |want: usize, when: &str| {
        let text = String::from_utf8_lossy(&child(TEST, Some(&dir)).stdout).into_owned();
        assert!(!counts || text.contains(&format!("compiled {want}")), "{when}: {text}");
    };
    compiled(1, "an empty folder");
    let image = only_image(&dir);
    let (whole, made) = (std::fs::read(&image).unwrap(), modified(&image));
    compiled(0, "an image that is there");
    assert_eq!(modified(&image), made, "nothing was written");
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for (wrong, when) in [(&whole[..whole.len() / 2], "cut short"), (&flipped, "changed"), (&[], "empty")] {
        std::fs::write(&image, wrong).unwrap();
        compiled(1, when);
        assert!(std::fs::read(&image).unwrap().len() > 64, "{when}: written anew");
        compiled(0, when);
    }
    std::fs::remove_file(&image).unwrap();
    let many: Vec<_> = (0..4)
        .map(|_| {
            let dir = dir.clone();
            std::thread::spawn(move || child(TEST, Some(&dir)))
        })
        .collect();
    let count = |out: Output| -> usize {
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let number = text.split("compiled ").nth(1).and_then(|t| t.split_whitespace().next()?.parse().ok());
        number.unwrap_or_else(|| panic!("{text}"))
    };
    let all: usize = many.into_iter().map(|t| count(t.join().expect("no panic"))).sum();
    assert!(!counts || all == 1, "processes that begin at the same time compile {all} times");
    only_image(&dir);
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Ranks read tensors that others have just put on their streams, and drop them at once: a missing wait, or a block
/// that is reused too early, gives other numbers.
#[test]
fn ranks_that_share_a_device_wait_for_each_other() {
    let (_alone, Some(device)) = (alone(), device()) else { return };
    let real = shim::shim().is_none();
    cuda::set_checked(false);
    let (n, rounds) = if real { (1 << 20, 200) } else { (1 << 7, 6) };
    let settings = [shim::Streams::Late(1), shim::Streams::Late(2), shim::Streams::Late(3)];
    for streams in &settings[..if real { 1 } else { 3 }] {
        if let Some(shim) = shim::shim() {
            shim.set_streams(*streams);
        }
        let found = spmd(4, move |rank| {
            let mesh = DeviceMesh::new(&rank.on(device), &[("a", 2), ("b", 2)])?;
            let draw = |number| Draw { seed: 3, number };
            let mut wrong = 0;
            for round in 0..rounds {
                let x = DTensor::rand(&mesh, DType::F32, [n, 3], "(S0, S0)", draw(round))?;
                let y = x.mul_scalar(2.0)?.redistribute("(R, S0)")?;
                let z = y.add_scalar(1.0)?.redistribute("(S0, R)")?.redistribute("(R, R)")?;
                drop((x, y));
                let cut = z.redistribute("(S1, S0)")?;
                // Sums of columns that are cut have a node per row, too many launches for a million rows.
                let cut = if real { cut.redistribute("(S0, S0)")? } else { cut };
                let sum = cut.sum_all()?.full_tensor()?;
                let whole = DTensor::rand(&mesh, DType::F32, [n, 3], Layout::replicated(2), draw(round))?;
                let want = whole.mul_scalar(2.0)?.add_scalar(1.0)?;
                let differ = z.ne(&want)?.cast(DType::F32)?.sum_all()?.local().item()?;
                wrong += usize::from(differ != 0.0 || sum.item()? != want.sum_all()?.local().item()?);
            }
            Ok(wrong)
        });
        assert_eq!(found.unwrap(), [0; 4], "rounds with wrong numbers");
    }
    if let Some(shim) = shim::shim() {
        shim.set_streams(shim::Streams::Eager);
        shim.check().unwrap();
    }
}

/// A training step puts work on its stream without waiting for any, on one rank and under FSDP.
#[test]
fn a_step_waits_for_nothing_until_a_value_is_read() {
    let (_alone, Some(device)) = (alone(), device()) else { return };
    let Some(shim) = shim::shim() else { return };
    cuda::set_checked(false);
    for text in ["1", "fsdp=2", "tp=2"] {
        let ranks = Mesh::parse(text, 0).unwrap().rank_len();
        let waits = spmd(ranks, move |rank| {
            let mesh = DeviceMesh::parse(&rank.on(device), text)?;
            let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
            let layout = plan.batch_layout(mesh.mesh());
            let mut params = Params::new(&mesh, plan, 1)?;
            let sizes = GptConfig {
                vocabulary: 11,
                block: 5,
                layers: 1,
                heads: 2,
                width: 6,
                dropout: 0.1,
                bias: true,
            };
            let model = Gpt::new(&mut params, sizes)?;
            let (mut optimizer, mut generator) =
                (AdamW::new().betas(0.9, 0.99).decay(0.1), Generator::new(1));
            let tokens = Tensor::from_vec((0..10).collect::<Vec<i64>>(), [2, 5])?;
            let tokens = DTensor::distribute(&mesh, &tokens, layout)?;
            let mut waits = Vec::new();
            for _ in 0..2 {
                mesh.barrier()?;
                let before = shim.calls_len("synchronize");
                let mut loss = model.loss(&Forward::train(&params, &mut generator), &tokens, &tokens)?;
                let mut grads = loss.backward()?;
                let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
                optimizer.step(&mut params, &mut grads, &clip_scale(&norm, 1.0)?, 1e-3)?;
                mesh.barrier()?;
                waits.push(shim.calls_len("synchronize") - before);
                mesh.barrier()?;
                assert!(loss.item()?.is_finite());
            }
            Ok(waits)
        });
        // The generator is compared at its first draw on a mesh of several ranks, so each rank reads all ranks'
        // state.
        let compared = if ranks == 1 { 0 } else { (ranks * ranks) as u64 };
        assert_eq!(waits.unwrap(), vec![[compared, 0]; ranks], "on {text}");
    }
}

/// NCCL takes one rank per GPU, so with one GPU this is its only world.
#[test]
fn nccl_runs_a_world_of_one() {
    const TEST: &str = "nccl_runs_a_world_of_one";
    let _alone = alone();
    if !is_real(TEST) {
        return;
    }
    let library = match Library::load() {
        Ok(library) => library,
        Err(reason) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED (no NCCL): {TEST}: {reason}");
            return;
        }
    };
    let outs = Spmd::new(1).nccl(library).run(|rank| {
        let mesh = DeviceMesh::new(&rank, &[("x", 1)])?;
        let x = DTensor::randn(&mesh, DType::F32, [7, 5], "(S0)", Draw { seed: 1, number: 0 })?;
        mesh.barrier()?;
        Ok((x.local().device(), x.redistribute("(R)")?.sum_all()?.item()?))
    });
    let draw = Draw { seed: 1, number: 0 };
    let alone = spmd(1, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[])?;
        let x = DTensor::randn(&mesh, DType::F32, [7, 5], Layout::replicated(0), draw)?;
        x.sum_all()?.item()
    });
    assert_eq!(outs.unwrap(), [(Device::Cuda(0), alone.unwrap()[0])]);
}

#[test]
fn a_device_says_what_it_is() {
    let (_alone, Some(Device::Cuda(index))) = (alone(), device()) else { return };
    if !is_real("a_device_says_what_it_is") {
        return;
    }
    let (gpu, stats) = (Gpu::get(index).unwrap(), cuda::memory_stats(index).unwrap());
    assert!(cuda::unavailable_reason().is_none() && cuda::devices_len() > index);
    assert!(gpu.multiprocessors() >= 10 && stats.limit_bytes > 1 << 30, "{stats:?}");
}

/// Uses each of NVIDIA's libraries once, in under a minute, and prints their versions and the files that were loaded.
#[test]
fn smoke() {
    let (_alone, Some(device)) = (alone(), device()) else { return };
    let x = ints(DType::F32, &[300, 7]).to_device(device).unwrap();
    let twice = cuda::gemm(
        "smoke",
        &x.reshape([1, 300, 7]).unwrap(),
        &ints(DType::F32, &[1, 7, 5]).to_device(device).unwrap(),
        &[7],
        true,
    );
    let bits = |x: &Tensor| x.to_device(Device::Cpu).unwrap().to_vec::<f32>().unwrap();
    let exact = bits(&twice.unwrap());
    let fast = cuda::gemm(
        "smoke",
        &x.reshape([1, 300, 7]).unwrap(),
        &ints(DType::F32, &[1, 7, 5]).to_device(device).unwrap(),
        &[7],
        false,
    );
    assert_eq!(bits(&fast.unwrap()), exact, "small integers have no rounding");
    #[cfg(feature = "cuda")]
    let compiler = cuda::nvidia::compiler_version();
    #[cfg(not(feature = "cuda"))]
    let compiler = Err::<String, _>("this program was built without the feature cuda".into());
    let nccl = Library::load().map(|_| "loaded".into());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut files: Vec<&str> = maps.lines().filter_map(|l| l.get(l.find('/')?..)).collect();
    files.sort_unstable();
    files.dedup();
    for (library, stem, version) in [
        ("libcuda", "libcuda.", Ok(String::new())),
        ("NVRTC", "libnvrtc", compiler),
        ("cuBLASLt", "libcublas", Ok(String::new())),
        ("NCCL", "libnccl", nccl.map_err(|reason| reason.to_string())),
    ] {
        let is_of = |file: &&&str| file.rsplit('/').next().is_some_and(|name| name.starts_with(stem));
        let of: Vec<&str> = files.iter().filter(is_of).copied().collect();
        match version {
            Ok(_) if of.is_empty() => println!("{library}: not loaded"),
            Ok(version) => println!("{library}: {version} {}", of.join(" ")),
            Err(reason) => println!("{library}: {reason}"),
        }
        // With packed images no NVRTC is needed, and for one GPU no NCCL.
        if is_real("smoke") {
            assert!(library != "libcuda" || !of.is_empty(), "libcuda is not loaded: {files:?}");
            let wrong = |file: &&str| file.contains("/stubs/") || file.contains("/compat/");
            assert!(!of.iter().any(wrong), "{library} is no library to run with: {of:?}");
        }
    }
}

/// Runs one test of this program in a process of its own.
fn child(test: &str, cache: Option<&Path>) -> Output {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.args(["--exact", test, "--nocapture"]).env(CHILD, test);
    if let Some(dir) = cache {
        command.env("ISOSHARD_CACHE", dir).env_remove("ISOSHARD_IMAGES");
    }
    let out = command.output().expect("this program runs again");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    out
}

/// Returns the image in a folder that has one, in addition to lock files and no partial file.
fn only_image(dir: &Path) -> PathBuf {
    let all = std::fs::read_dir(dir).expect("the folder is there").flatten().map(|e| e.path());
    let (locks, images): (Vec<_>, Vec<_>) = all.partition(|p| p.extension().is_some_and(|e| e == "lock"));
    assert!(locks.len() <= 1, "{locks:?}");
    assert_eq!(images.len(), 1, "{images:?}");
    images.into_iter().next().expect("just counted")
}

fn modified(path: &Path) -> std::time::SystemTime {
    std::fs::metadata(path).and_then(|m| m.modified()).expect("the file is there")
}

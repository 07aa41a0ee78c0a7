//! Tests of the code between operators and driver: streams of ranks that share tensors, memory and its limits, and
//! failures of the driver. The driver runs streams as late as their events allow.

use std::sync::Arc;
use std::sync::mpsc;

use crate::common::ordinary;
use crate::common::shim::{self, Order, Settings, Shim, Streams};
use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Params, Plan};
use isoshard::ops::{Add, Mul, Op, eval_whole};
use isoshard::placement::Layout;
use isoshard::rng::Init;
use isoshard::tensor::cuda::{self, Gpu};
use isoshard::tensor::{DType, Device, Tensor};
use isoshard::{Error, Result, optim};

/// Ranks exchange tensors: each reads the other's and drops it while it may still be read, allocates new ones in the
/// freed memory, and overwrites its own.
#[test]
fn tensors_that_ranks_hand_each_other_are_waited_for() {
    for seed in 0..12 {
        let streams = if seed == 0 { Streams::Eager } else { Streams::Late(seed) };
        let Some((device, shim)) = own_device(streams, 64 << 20) else { return };
        let (forth, there) = mpsc::channel::<Tensor>();
        let (back, here) = mpsc::channel::<Tensor>();
        let first = std::thread::spawn(move || -> Result<()> {
            for round in 0..8 {
                let x = ordinary(DType::F32, &[257].into(), round).to_device(device)?;
                let y = one(Add, &[&x, &x])?;
                forth.send(y.clone()).expect("the other rank listens");
                // Frees memory here, and asks for it again at once.
                drop((x, y));
                let noise = ordinary(DType::F32, &[257].into(), round + 100).to_device(device)?;
                let noise = one(Mul, &[&noise, &noise])?;
                let z = here.recv().expect("the other rank answers");
                let got = one(Add, &[&z, &noise])?;
                drop((z, noise));
                assert_eq!(got.to_device(Device::Cpu)?.to_f64_vec(), expected(round), "seed {seed}");
            }
            Ok(())
        });
        let second = std::thread::spawn(move || -> Result<()> {
            for y in there {
                let z = one(Mul, &[&y, &y])?;
                let z = one(Add, &[&z, &y])?;
                drop(y);
                back.send(z).expect("the other rank listens");
            }
            Ok(())
        });
        first.join().unwrap().unwrap();
        second.join().unwrap().unwrap();
        shim.check().unwrap();
        assert_eq!(shim.live(), (0, 0, 0), "blocks, streams and events that nobody gave back");
    }
}

/// Returns the first rank's result of a round, computed on the CPU.
fn expected(round: u64) -> Vec<f64> {
    let x = ordinary(DType::F32, &[257].into(), round);
    let noise = ordinary(DType::F32, &[257].into(), round + 100);
    let y = one(Add, &[&x, &x]).unwrap();
    let z = one(Add, &[&one(Mul, &[&y, &y]).unwrap(), &y]).unwrap();
    one(Add, &[&z, &one(Mul, &[&noise, &noise]).unwrap()]).unwrap().to_f64_vec()
}

/// A thread's last kernels run while the thread ends, after its locals were dropped.
#[test]
fn kernels_that_a_thread_left_behind_run_when_it_ends() {
    let Some((device, shim)) = own_device(Streams::Late(5), 64 << 20) else { return };
    std::thread::spawn(move || {
        let x = ordinary(DType::F32, &[1000].into(), 1).to_device(device).unwrap();
        one(Mul, &[&x, &x]).unwrap().to_device(Device::Cpu).unwrap();
        one(Add, &[&x, &x]).unwrap();
    })
    .join()
    .unwrap();
    shim.check().unwrap();
    assert_eq!(shim.live(), (0, 0, 0), "blocks, streams and events that nobody gave back");
}

/// A thread ends, or needs memory, while another stream still reads a tensor that it had handed over.
#[test]
fn memory_goes_back_only_when_no_stream_uses_it() {
    for (seed, ends) in (0..12).map(|seed| (seed, seed % 2 == 0)) {
        let Some((device, shim)) = own_device(Streams::Late(seed), 36 << 20) else { return };
        let (forth, there) = mpsc::channel::<Tensor>();
        let (done, last) = mpsc::channel::<()>();
        let reader = std::thread::spawn(move || {
            let x = there.recv().unwrap();
            let y = one(Mul, &[&x, &x]).unwrap();
            drop(x);
            done.send(()).unwrap();
            // The product is read after the owner's end.
            there.recv().unwrap_err();
            y.to_device(Device::Cpu).unwrap().to_f64_vec()[7]
        });
        let owner = std::thread::spawn(move || {
            let x = ordinary(DType::F32, &[3 << 20].into(), 1);
            forth.send(x.to_device(device).unwrap()).unwrap();
            last.recv().unwrap();
            if !ends {
                let gpu = Gpu::get(index_of(device)).unwrap();
                // There is no room beside the two tensors, so the first one's memory goes back to the driver.
                let _ = gpu.uninit(DType::F32, [3 << 20]);
            }
            x.to_f64_vec()[7]
        });
        let x = owner.join().unwrap();
        assert_eq!(reader.join().unwrap(), f64::from(x as f32 * x as f32));
        shim.check().unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert_eq!(shim.live(), (0, 0, 0));
    }
}

/// The host waits only when it reads a value.
#[test]
fn an_eager_step_does_not_wait_for_the_device() {
    let Some((device, shim)) = own_device(Streams::Late(3), 64 << 20) else { return };
    std::thread::spawn(move || {
        let x = ordinary(DType::F32, &[1000].into(), 1).to_device(device).unwrap();
        let mut y = x.clone();
        let (waited, launched) = (shim.calls_len("synchronize"), shim.calls_len("launch"));
        for _ in 0..50 {
            y = one(Add, &[&y, &x]).unwrap();
        }
        assert_eq!(shim.calls_len("synchronize"), waited);
        assert_eq!(shim.calls_len("launch"), launched + 50);
        assert_eq!(shim.calls_len("alloc"), 1, "one segment: what comes free is kept for reuse");
        y.to_device(Device::Cpu).unwrap();
        assert!(shim.calls_len("synchronize") > waited);
    })
    .join()
    .unwrap();
}

#[test]
fn memory_that_runs_out_is_an_error_that_says_what_is_held() {
    let Some((device, shim)) = own_device(Streams::Eager, 24 << 20) else { return };
    let index = index_of(device);
    std::thread::spawn(move || {
        let gpu = Gpu::get(index).unwrap();
        let kept = gpu.zeros(DType::F32, [3 << 20]).unwrap();
        let error = gpu.uninit(DType::F32, [3 << 20]).unwrap_err();
        let Error::OutOfMemory(fault) = &error else { panic!("{error}") };
        assert_eq!((fault.wanted.as_str(), fault.wanted_bytes), ("f32[3145728]", 12 << 20));
        assert_eq!(fault.live_bytes, (12 << 20) + 512, "the tensor, and the place for faults");
        drop(kept);
        // Memory kept for reuse is given back if another size needs it.
        let larger = gpu.uninit(DType::F32, [5 << 20]).unwrap();
        drop(larger);
        cuda::set_memory_limit(index, 4 << 20).unwrap();
        assert!(matches!(gpu.uninit(DType::F32, [11 << 19]), Err(Error::OutOfMemory(_))));
        cuda::set_memory_limit(index, 24 << 20).unwrap();
        gpu.uninit(DType::F32, [2 << 20]).unwrap();
    })
    .join()
    .unwrap();
    shim.check().unwrap();
    assert_eq!(shim.live(), (0, 0, 0));
}

/// Every call of the driver that can fail, fails: the error names it, and nothing is leaked.
#[test]
fn a_failing_driver_is_an_error_and_leaks_nothing() {
    const CALLS: [&str; 9] =
        ["bind", "stream", "alloc", "alloc_host", "copy", "fill", "event", "record", "synchronize"];
    for call in CALLS.into_iter().chain(["launch", "load", "function", "compile", "wait"]) {
        for nth in 1..=3 {
            let Some((device, shim)) = own_device(Streams::Eager, 64 << 20) else { return };
            shim.fail_next(call, nth, "CUDA_ERROR_UNKNOWN");
            let before = shim.calls_len(call);
            let run = std::thread::spawn(move || -> Result<Vec<f64>> {
                let x = ordinary(DType::F32, &[33].into(), 1).to_device(device)?;
                let y = one(Add, &[&x, &x])?;
                let z = std::thread::spawn(move || one(Mul, &[&y, &y])).join().expect("no panic")?;
                Ok(z.to_device(Device::Cpu)?.to_f64_vec())
            });
            let done = run.join().expect("no panic");
            let failed = shim.calls_len(call) >= before + nth;
            if let Err(error) = &done {
                assert!(failed && error.to_string().contains("CUDA_ERROR_UNKNOWN"), "{call} {nth}: {error}");
            }
            assert!(done.is_err() || !failed || call != "launch", "a launch that fails is an error");
            assert_eq!(shim.live(), (0, 0, 0), "{call} {nth}: {done:?}");
            shim.check().unwrap_or_else(|e| panic!("{call} {nth}: {e}"));
        }
    }
}

fn own_device(streams: Streams, total_bytes: usize) -> Option<(Device, Arc<Shim>)> {
    let made = shim::own_device(Settings { order: Order::Ascending, streams, total_bytes, checks: false });
    // Waiting for every launch would hide late ones.
    cuda::set_checked(false);
    if made.is_none() {
        eprintln!("SKIPPED (no C++ compiler)");
    }
    made
}

fn index_of(device: Device) -> usize {
    match device {
        Device::Cuda(index) => index,
        Device::Cpu | Device::Meta => panic!("a CUDA device"),
    }
}

fn one(op: impl Op, ins: &[&Tensor]) -> Result<Tensor> {
    let ins: Vec<Tensor> = ins.iter().map(|&x| x.clone()).collect();
    Ok(eval_whole(&op, &ins)?.remove(0))
}

/// A step on many parameters takes one launch per 48 parameters of a dtype, and has the CPU's bits.
#[test]
fn a_step_on_many_parameters_is_one_launch() {
    const PARAMS: usize = 70;
    let Some((device, shim)) = shim::own_device(Settings::default()) else { return };
    let train = move |device: Device, sgd: bool| {
        let shim = shim.clone();
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::new(&rank.on(device), &[("dp", 1)])?;
            let mut params = Params::new(&mesh, Plan::default(), 7)?;
            for k in 0..PARAMS {
                let shape: Vec<usize> = if k % 3 == 0 { vec![k + 1] } else { vec![k % 7 + 1, 40 * k] };
                params.root().param(&format!("p{k}"), shape, Init::Normal { mean: 0.0, std: 1.0 })?;
            }
            let scale = DTensor::full(&mesh, DType::F32, [], Layout::replicated(1), 0.3)?;
            let (mut adam, mut descent) = (
                optim::AdamW::new().betas(0.9, 0.99).decay(0.1),
                optim::Sgd::new().momentum(0.9).nesterov().decay(0.1),
            );
            for step in 0..3 {
                // The forward pass's tensors are dropped before the step, so nothing else holds the parameters.
                let mut grads = {
                    let squares = params.ids().map(|id| params.value(id).mul(params.value(id))?.sum_all());
                    let sums = squares.collect::<Result<Vec<DTensor>>>()?;
                    sums[1..].iter().try_fold(sums[0].clone(), |a, b| a.add(b))?.backward()?
                };
                let before = shim.calls_len("launch");
                match sgd {
                    true => descent.step(&mut params, &mut grads, &scale, 0.01)?,
                    false => adam.step(&mut params, &mut grads, &scale, 0.01)?,
                }
                if device.is_cuda() && step > 0 {
                    assert_eq!(shim.calls_len("launch") - before, 2, "{PARAMS} parameters");
                }
            }
            params.digest()
        };
        spmd(1, run).unwrap_or_else(|e| panic!("{e}"))
    };
    for sgd in [false, true] {
        assert_eq!(train(device, sgd), train(Device::Cpu, sgd));
    }
}

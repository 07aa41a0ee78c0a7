//! Tests of the shim itself: it runs correct CUDA programs correctly, and reports each kind of fault.

use std::ffi::c_void;
use std::sync::Arc;

use crate::common::shim::{Order, Settings, Shim, Streams, with_order};
use isoshard::tensor::cuda::{self, CopyDirection, Driver, DriverError, Grid, Handle, KernelProgram};

const ORDERS: [Order; 6] = [
    Order::Ascending,
    Order::Descending,
    Order::Shuffled(1),
    Order::Shuffled(2),
    Order::Shuffled(3),
    Order::Shuffled(4),
];

const KERNELS: &str = include_str!("../shim/kernels.cu");

#[test]
fn blocks_reduce_through_shuffles_shared_memory_and_barriers() {
    let Some(bench) = Bench::new() else { return };
    for n in [0u32, 1, 2, 31, 32, 33, 100, 1000, 5003] {
        let x: Vec<i32> = (0..n as i32).map(|i| i * i % 1009 - 300).collect();
        let (at, out) = (bench.upload(&x), bench.upload(&[7i32; 3]));
        let middle = out + 4;
        for (order, threads) in ORDERS.into_iter().zip([32, 64, 96, 256, 1024, 32]) {
            for entry in ["sum_by_warps_i32", "sum_by_halves_i32"] {
                let shared = threads as usize * 4;
                let args = [bytes(&at), bytes(&middle), bytes(&n)];
                with_order(order, || bench.launch(entry, [1, 1, 1], [threads, 1, 1], shared, &args)).unwrap();
                let want = [7, x.iter().sum::<i32>(), 7];
                assert_eq!(bench.download::<i32>(out, 3), want, "{entry}, {n} values, {threads}, {order:?}");
            }
        }
    }
}

#[test]
fn parameters_are_found_byte_for_byte() {
    let Some(bench) = Bench::new() else { return };
    let x: Vec<f32> = (0..1000).map(|i| i as f32 * 0.37 - 100.0).collect();
    let y: Vec<f32> = (0..1000).map(|i| 1.0 / (i as f32 + 3.0)).collect();
    let (a, b) = (bench.upload(&x), bench.upload(&y));
    // struct { u8 tag; f32 scale; u64 n; u8 tail; } and a u8, an i64, a bool between.
    let mut by = [0u8; 24];
    by[0] = 9;
    by[4..8].copy_from_slice(bytes(&0.7f32));
    by[8..16].copy_from_slice(bytes(&999u64));
    by[16] = 4;
    let args = [bytes(&a), &[3u8], &by, bytes(&-5i64), &[1u8], bytes(&b)];
    for order in ORDERS {
        let b2 = bench.upload(&y);
        let mut args = args;
        args[5] = bytes(&b2);
        with_order(order, || bench.launch("parameters_f32", [5, 1, 1], [96, 1, 1], 0, &args)).unwrap();
        let want: Vec<f32> = (0..1000)
            .map(|i| if i < 999 { x[i].mul_add(0.7, y[i]) + (9 + 3 + 4 - 5) as f32 } else { y[i] })
            .collect();
        assert_eq!(bench.download::<f32>(b2, 1000), want);
    }
    let function = bench.function("parameters_f32");
    assert_eq!(bench.shim.parameters(function), Some(vec![8, 1, 24, 8, 1, 8]));
    assert_eq!(bench.shim.parameters(bench.function("nothing")), Some(vec![]));
}

#[test]
fn threads_know_their_place() {
    let Some(bench) = Bench::new() else { return };
    let (grid, block) = ([3u32, 2, 2], [5u32, 3, 2]);
    let len = 12 * 30;
    for order in ORDERS {
        let out = bench.upload(&vec![0u32; len * 8]);
        with_order(order, || bench.launch("places", grid, block, 0, &[bytes(&out)])).unwrap();
        let got = bench.download::<u32>(out, len * 8);
        for (i, got) in got.chunks(8).enumerate() {
            let (t, b) = (i as u32 % 30, i as u32 / 30);
            let want = [t % 5, t / 5 % 3, t / 15, b % 3, b / 3 % 2, b / 6, t % 32, 12 * 1000 + 30];
            assert_eq!(got, want, "{i}");
        }
    }
}

#[test]
fn lanes_exchange_what_they_should() {
    let Some(bench) = Bench::new() else { return };
    for order in ORDERS {
        let out = bench.upload(&vec![0u64; 64 * 12]);
        with_order(order, || bench.launch("lanes", [1, 1, 1], [64, 1, 1], 0, &[bytes(&out)])).unwrap();
        let got = bench.download::<u64>(out, 64 * 12);
        for t in 0..64u64 {
            let (lane, warp) = (t % 32, t / 32 * 32);
            let bits = (0..32).filter(|l| (l + warp) % 3 == 0).fold(0u64, |m, l| m | 1 << l);
            let double = |x: u64| (x as f64 + 0.5).to_bits();
            let want = [
                warp + 7,
                warp + lane / 8 * 8 + (lane + 3) % 8,
                if lane >= 5 { t - 5 } else { t },
                if lane % 16 >= 3 { t - 3 } else { t },
                if lane < 25 { t + 7 } else { t },
                if lane % 8 < 6 { t + 2 } else { t },
                t ^ 21,
                double(t ^ 1),
                bits,
                u64::from(warp == 0),
                u64::from(warp == 32),
                if lane < 16 { warp + 15 - lane } else { warp + 47 - lane },
            ];
            assert_eq!(got[t as usize * 12..][..12], want, "thread {t}, {order:?}");
        }
    }
}

#[test]
fn votes_of_a_block_and_atomics_count() {
    let Some(bench) = Bench::new() else { return };
    for order in ORDERS {
        let out = bench.upload(&[0u32, 0, u32::MAX, 0, 0, 0, 0, 9]);
        with_order(order, || bench.launch("votes", [7, 1, 1], [50, 1, 1], 0, &[bytes(&out)])).unwrap();
        // 350 threads; maximum and minimum of 3i + 1; or of 1 << (i % 5); counts of each vote; one CAS wins.
        let got = bench.download::<u32>(out, 8);
        assert_eq!(got[..7], [350, 349 * 3 + 1, 1, 31, 7 * 50 * 17, 7 * 50, 0], "{order:?}");
        assert!(got[7] < 350);
    }
}

/// Each fault: the entry that commits it, a launch, and part of the driver's message.
#[test]
fn what_no_device_could_do_is_an_error_that_says_who_where_and_what() {
    let Some(bench) = Bench::new() else { return };
    let out = bench.upload(&vec![0u32; 4096]);
    let cases: [(&str, u32, usize, &str); 15] = [
        ("barrier_not_reached", 64, 0, "threads 0 to 62 at __syncthreads (kernels.cu:"),
        ("barrier_not_reached", 64, 0, "thread 63 ended"),
        ("other_barriers", 64, 0, "waits at __syncthreads"),
        ("other_kinds", 64, 0, "__syncthreads_or"),
        ("warp_not_reached", 64, 0, "threads 32 to 62 at __syncwarp (kernels.cu:"),
        ("masks_differ", 32, 0, "of mask 0x0000ffff"),
        ("kinds_differ", 32, 0, "__shfl_sync"),
        ("left_out", 32, 0, "thread 16 calls __ballot_sync"),
        ("reads_absent", 40, 0, "thread 32 reads lane 8 by __shfl_down_sync"),
        ("barrier_against_warp", 32, 0, "__syncwarp"),
        ("behind_shared", 32, 64, "4 bytes behind the launch's 64 bytes"),
        ("deep", 32, 0, "more stack than there is"),
        ("large_frame", 32, 0, "more stack than there is"),
        ("small_blocks", 65, 0, "65 threads where it is compiled for 64"),
        ("small_blocks", 0, 0, "no block has [0, 1, 1] threads"),
    ];
    for (entry, threads, shared, says) in cases {
        for order in ORDERS {
            let done =
                with_order(order, || bench.launch(entry, [2, 1, 1], [threads, 1, 1], shared, &[bytes(&out)]));
            let error = done.expect_err(entry).to_string();
            assert!(error.contains(entry), "{error}");
            let named = order == Order::Ascending
                || matches!(entry, "deep" | "large_frame" | "behind_shared" | "small_blocks");
            assert!(!named || error.contains(says), "{entry}: {says:?} is not in {error:?}");
        }
    }
    for (blocks, args_len) in [([0, 1, 1], 1), ([1, 70000, 1], 1), ([1, 1, 1], 0), ([1, 1, 1], 2)] {
        let args = [bytes(&out), bytes(&out)];
        let done = bench.launch("small_blocks", blocks, [1, 1, 1], 0, &args[..args_len]);
        assert!(done.unwrap_err().to_string().contains("CUDA_ERROR_INVALID_VALUE"));
    }
    let done = bench.launch("small_blocks", [1, 1, 1], [1, 1, 1], 228 << 10, &[bytes(&out)]);
    assert!(done.unwrap_err().to_string().contains("shared memory"));
    // The fault has no later effects.
    bench.launch("small_blocks", [2, 1, 1], [64, 1, 1], 0, &[bytes(&out)]).unwrap();
    bench.shim.check().unwrap();
}

/// With checks, undefined behaviour is an error as well, and correct kernels still run.
#[test]
fn checks_find_what_is_undefined() {
    let Some(bench) = Bench::with(Settings { checks: true, ..quiet() }) else { return };
    let out = bench.upload(&[0u32; 64]);
    for (which, says) in [
        (0u32, "uses an address that is not a multiple of 16"),
        (1, "leaves an array at index 32"),
        (2, "shifts by 32"),
        (3, "divides an integer by 0"),
    ] {
        let launch =
            |which: &u32| bench.launch("undefined", [1, 1, 1], [33, 1, 1], 0, &[bytes(&out), bytes(which)]);
        let error = launch(&which).unwrap_err().to_string();
        assert!(
            error.contains("undefined, block (0, 0, 0): thread ") && error.contains("(kernels.cu:"),
            "{error}"
        );
        assert!(error.contains(says), "{says:?} is not in {error:?}");
        launch(&9).unwrap();
    }
}

#[test]
fn a_missing_barrier_shows_under_some_order() {
    let Some(bench) = Bench::new() else { return };
    for (wrong, right, threads) in [
        ("no_syncthreads", "with_syncthreads", 96),
        ("no_syncwarp", "with_syncwarp", 32),
        ("late_reuse", "no_reuse", 64),
    ] {
        let want: Vec<u32> = (0..threads).map(|t| (t + 1) % threads).collect();
        let results = |entry| {
            ORDERS.map(|order| {
                let out = bench.upload(&vec![0u32; threads as usize]);
                with_order(order, || bench.launch(entry, [1, 1, 1], [threads, 1, 1], 0, &[bytes(&out)]))
                    .unwrap();
                bench.download::<u32>(out, threads as usize)
            })
        };
        assert!(results(right).iter().all(|got| *got == want), "{right}");
        let seen = results(wrong).iter().filter(|got| **got != want).count();
        assert!(seen > 0, "{wrong}: no order shows it");
    }
}

/// A block that reads uninitialised shared memory gets poison, and not the values of an earlier block.
#[test]
fn memory_comes_full_of_poison() {
    let Some(bench) = Bench::new() else { return };
    for order in ORDERS {
        let out = bench.upload(&vec![0u32; 4 * 64]);
        let launch = || bench.launch("uninitialised", [4, 1, 1], [32, 1, 1], 128, &[bytes(&out)]);
        with_order(order, launch).unwrap();
        assert!(bench.download::<u32>(out, 4 * 64).iter().all(|&v| v == u32::MAX), "{order:?}");
    }
    let fresh = bench.shim.alloc(1000).unwrap();
    assert!(bench.download::<u8>(fresh, 1000).iter().all(|&b| b == 0xff));
}

#[test]
fn memory_is_watched() {
    let Some(bench) = Bench::with(Settings { total_bytes: 10_000, ..quiet() }) else { return };
    let shim = &bench.shim;
    let text = |e: DriverError| e.to_string();
    let a = shim.alloc(4000).unwrap();
    assert_eq!(shim.memory().unwrap(), (6000, 10_000));
    let refused = shim.alloc(6001).unwrap_err();
    assert!(refused.out_of_memory, "{refused}");
    let b = shim.alloc(6000).unwrap();
    assert_eq!((a % 256, b % 256), (0, 0));
    let host = shim.alloc_host(64).unwrap();
    let copy = |way, to, from, bytes| {
        // SAFETY: the shim refuses addresses outside.
        unsafe { shim.copy(way, to, from, bytes, bench.stream) }
    };
    copy(CopyDirection::Within, a, b + 5999, 1).unwrap();
    copy(CopyDirection::ToDevice, a + 3936, host as u64, 64).unwrap();
    for (way, to, from, bytes) in [
        (CopyDirection::Within, a, b + 5999, 2),
        (CopyDirection::Within, a + 4000, b, 1),
        (CopyDirection::ToDevice, a, b, 8),
        (CopyDirection::ToHost, host as u64 + 1, a, 64),
        (CopyDirection::Within, 0, a, 8),
    ] {
        assert!(text(copy(way, to, from, bytes).unwrap_err()).contains("no live block"), "{way:?}");
    }
    // SAFETY: the shim refuses it.
    let beyond = unsafe { shim.fill(a, 1, 4001, bench.stream) };
    assert!(text(beyond.unwrap_err()).contains("no live block"));
    // SAFETY: `a` was allocated here and is not used any more; the second call is refused.
    let twice = unsafe { (shim.free(a), shim.free(a)) };
    assert!(twice.0.is_ok() && text(twice.1.unwrap_err()).contains("freed twice"));
    assert!(
        text(copy(CopyDirection::Within, b, a, 8).unwrap_err()).contains("no live block"),
        "after it was freed"
    );
    shim.check().unwrap();
    bench.launch("small_blocks", [1, 1, 1], [1, 1, 1], 0, &[bytes(&a)]).unwrap();
    assert!(shim.check().unwrap_err().contains("after the block was freed"));

    let c = shim.alloc(101).unwrap();
    bench.launch("small_blocks", [1, 1, 1], [1, 1, 1], 0, &[bytes(&(c + 101))]).unwrap();
    assert!(text(shim.synchronize(bench.stream).unwrap_err()).contains("0 bytes behind a block of 101"));
    // SAFETY: as above.
    let freed = unsafe { shim.free(c) };
    assert!(text(freed.unwrap_err()).contains("0 bytes behind a block of 101"));
    bench.launch("small_blocks", [1, 1, 1], [1, 1, 1], 0, &[bytes(&(b - 4))]).unwrap();
    assert!(text(shim.synchronize(bench.stream).unwrap_err()).contains("1 bytes before a block of 6000"));
}

#[test]
fn late_streams_show_a_missing_event() {
    let n = 64usize;
    let mut wrong = 0;
    for seed in 0..20 {
        for waits in [true, false] {
            let Some(bench) = Bench::with(Settings { streams: Streams::Late(seed), ..quiet() }) else {
                return;
            };
            let shim = &bench.shim;
            let (first, second) = (bench.stream, shim.stream().unwrap());
            let at = bench.upload(&vec![1u32; n]);
            shim.synchronize(first).unwrap();
            let args = [bytes(&at)];
            bench.launch_on(first, "add_one", [1, 1, 1], [n as u32, 1, 1], 0, &args).unwrap();
            if waits {
                let event = shim.event().unwrap();
                shim.record(event, first).unwrap();
                shim.wait(second, event).unwrap();
                shim.drop_event(event);
            }
            bench.launch_on(second, "double_it", [1, 1, 1], [n as u32, 1, 1], 0, &args).unwrap();
            shim.synchronize(second).unwrap();
            shim.synchronize(first).unwrap();
            let got = bench.download::<u32>(at, n);
            assert!(!waits || got == vec![4; n], "seed {seed}");
            wrong += usize::from(got != vec![4; n]);
        }
    }
    assert!(wrong > 0, "a missing event is never seen");
}

#[test]
fn events_mean_what_they_mean_in_cuda() {
    let Some(bench) = Bench::with(Settings { streams: Streams::Late(5), ..quiet() }) else { return };
    let shim = &bench.shim;
    let (a, b) = (bench.stream, shim.stream().unwrap());
    let at = bench.upload(&[1u32]);
    let event = shim.event().unwrap();
    assert!(shim.is_done(event).unwrap(), "an event never recorded is done");
    shim.wait(b, event).unwrap();
    let run = |stream, entry| bench.launch_on(stream, entry, [1, 1, 1], [1, 1, 1], 0, &[bytes(&at)]).unwrap();
    // The wait is for the first recording, not for the second, which comes after the waiting work.
    run(a, "add_one");
    shim.record(event, a).unwrap();
    shim.wait(b, event).unwrap();
    run(b, "double_it");
    let after = shim.event().unwrap();
    shim.record(after, b).unwrap();
    shim.wait(a, after).unwrap();
    run(a, "add_one");
    shim.record(event, a).unwrap();
    shim.drop_stream(b);
    let asked = (0..100).take_while(|_| !shim.is_done(event).unwrap()).count();
    assert!(asked < 100, "asking lets streams advance");
    assert_eq!(bench.download::<u32>(at, 1), [5]);
    assert!(shim.wait(b, event).is_err() && shim.synchronize(b).is_err(), "the stream was given back");
    shim.drop_event(event);
    shim.drop_event(after);
    assert!(shim.is_done(event).is_err());
    shim.check().unwrap();
    shim.drop_event(event);
    assert!(shim.check().unwrap_err().contains("given back that is not there"));
}

/// The error of a launch is returned by the next call on its stream, as on a device; other streams continue.
#[test]
fn late_errors_come_when_their_stream_is_waited_for() {
    let Some(bench) = Bench::with(Settings { streams: Streams::Late(1), ..quiet() }) else { return };
    let out = bench.upload(&vec![0u32; 64]);
    bench.launch("barrier_not_reached", [1, 1, 1], [64, 1, 1], 0, &[bytes(&out)]).unwrap();
    let error = bench.shim.synchronize(bench.stream).unwrap_err().to_string();
    assert!(error.contains("barrier_not_reached, block (0, 0, 0)"), "{error}");
    bench.shim.synchronize(bench.stream).unwrap();
    let host = bench.shim.alloc_host(4).unwrap();
    // SAFETY: the blocks are alive; the host reads after the stream has finished, and once before on purpose.
    let (early, late) = unsafe {
        bench.shim.copy(CopyDirection::ToHost, host as u64, out, 4, bench.stream).unwrap();
        let early = host.cast::<u32>().read();
        bench.shim.synchronize(bench.stream).unwrap();
        (early, host.cast::<u32>().read())
    };
    assert_eq!((early, late), (u32::MAX, 0), "a copy to the host is late as well");
}

#[test]
fn calls_fail_where_a_test_wants_it() {
    let Some(bench) = Bench::with(quiet()) else { return };
    let shim = &bench.shim;
    shim.fail_next("alloc", 2, "CUDA_ERROR_OUT_OF_MEMORY");
    shim.fail_next("synchronize", 1, "CUDA_ERROR_ILLEGAL_ADDRESS");
    let before = shim.calls_len("alloc");
    assert!(shim.alloc(8).is_ok());
    assert!(shim.alloc(8).is_err_and(|e| e.out_of_memory && e.call == "alloc"));
    assert!(shim.alloc(8).is_ok());
    assert_eq!(shim.calls_len("alloc"), before + 3);
    let failed = shim.synchronize(bench.stream).unwrap_err();
    assert_eq!(failed.to_string(), "synchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS");
    shim.synchronize(bench.stream).unwrap();
}

#[test]
fn sources_are_compiled_once_and_errors_are_the_compilers() {
    let Some(shim) = Shim::new(quiet()) else { return };
    let source = "#include \"iso.cuh\"\nKERNEL(one, 32, (u32* out)) { *out = ONE; }\n";
    let program = |options| KernelProgram { name: "one", source, headers: cuda::headers(), options };
    let log = shim.compile(&program(&[])).unwrap_err();
    assert!(log.contains("one.cu:2") && log.contains("ONE"), "{log}");
    let images: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let made: Vec<_> = (0..4).map(|_| scope.spawn(|| shim.compile(&program(&["-DONE=1"])))).collect();
        made.into_iter().map(|m| m.join().unwrap().unwrap()).collect()
    });
    assert!(images.windows(2).all(|w| w[0] == w[1]));
    let module = shim.load("one", &images[0]).unwrap();
    assert!(shim.function(module, "one").is_ok() && shim.function(module, "two").is_err());
    assert!(shim.load("one", b"no image").is_err());
    let unlisted = shim.load("unlisted", &images[0]).unwrap_err().to_string();
    assert!(unlisted.contains("no unlisted.cu, so pack.sh does not pack it"), "{unlisted}");
}

/// A shim with the test kernels, and a stream.
struct Bench {
    shim: Arc<Shim>,
    stream: Handle,
    module: Handle,
}

fn quiet() -> Settings {
    Settings { order: Order::Ascending, streams: Streams::Eager, total_bytes: 64 << 20, checks: false }
}

fn bytes<T: bytemuck::NoUninit>(value: &T) -> &[u8] {
    bytemuck::bytes_of(value)
}

impl Bench {
    fn new() -> Option<Bench> {
        Bench::with(quiet())
    }

    fn with(settings: Settings) -> Option<Bench> {
        let Some(shim) = Shim::new(settings) else {
            eprintln!("SKIPPED (no C++ compiler)");
            return None;
        };
        shim.bind().unwrap();
        let program = KernelProgram {
            name: "kernels",
            source: KERNELS,
            headers: cuda::headers(),
            options: cuda::OPTIONS,
        };
        let image = shim.compile(&program).unwrap_or_else(|log| panic!("{log}"));
        let (module, stream) = (shim.load("kernels", &image).unwrap(), shim.stream().unwrap());
        Some(Bench { shim, stream, module })
    }

    fn function(&self, name: &str) -> Handle {
        self.shim.function(self.module, name).unwrap()
    }

    fn launch(
        &self,
        name: &str,
        blocks: [u32; 3],
        threads: [u32; 3],
        shared: usize,
        args: &[&[u8]],
    ) -> Result<(), DriverError> {
        self.launch_on(self.stream, name, blocks, threads, shared, args)
    }

    fn launch_on(
        &self,
        stream: Handle,
        name: &str,
        blocks: [u32; 3],
        threads: [u32; 3],
        shared: usize,
        args: &[&[u8]],
    ) -> Result<(), DriverError> {
        let grid = Grid { blocks, threads, shared_bytes: shared as u32 };
        let mut pointers: Vec<*mut c_void> = args.iter().map(|a| a.as_ptr() as *mut c_void).collect();
        // SAFETY: every test passes the entry's arguments, or a number of arguments that is refused.
        unsafe { self.shim.launch(self.function(name), grid, &mut pointers, stream) }
    }

    fn upload<T: bytemuck::NoUninit>(&self, values: &[T]) -> u64 {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let at = self.shim.alloc(bytes.len().max(1)).unwrap();
        let host = self.shim.alloc_host(bytes.len().max(1)).unwrap();
        // SAFETY: both blocks have as many bytes, and neither is freed.
        unsafe {
            host.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            self.shim.copy(CopyDirection::ToDevice, at, host as u64, bytes.len(), self.stream).unwrap();
        }
        at
    }

    fn download<T: bytemuck::Pod>(&self, at: u64, len: usize) -> Vec<T> {
        let mut values = vec![T::zeroed(); len];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        let host = self.shim.alloc_host(bytes.len()).unwrap();
        // SAFETY: both blocks have as many bytes, and the copy is waited for.
        unsafe {
            self.shim.copy(CopyDirection::ToHost, host as u64, at, bytes.len(), self.stream).unwrap();
            self.shim.synchronize(self.stream).unwrap();
            host.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
            self.shim.free_host(host).unwrap();
        }
        values
    }
}

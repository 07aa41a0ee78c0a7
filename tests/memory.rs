//! Training steps in which an allocation of tensor storage fails. The allocator of this program refuses the n-th block
//! that has a tensor's alignment.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use isoshard::comm::{Rank, Spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::rng::Generator;
use isoshard::tensor::Tensor;
use isoshard::{Error, Failure, Result};

/// The alignment of a tensor's block. Nothing else that is allocated as zeros has it.
const ALIGN: usize = 64;

/// The blocks of this alignment that are allocated now.
static LIVE: AtomicIsize = AtomicIsize::new(0);
/// The number of blocks until one is refused; 0 for never.
static UNTIL: AtomicU64 = AtomicU64::new(0);
/// True once a block was refused.
static REFUSED: AtomicBool = AtomicBool::new(false);
/// The refused blocks that were lists of kernels.
static LISTS: AtomicU64 = AtomicU64::new(0);
thread_local! {
    /// True if this thread's next request is refused too: a pool asks again after it has given back what it keeps.
    static AGAIN: Cell<bool> = const { Cell::new(false) };
}

struct Refusing;

// SAFETY: every call goes to the system allocator unchanged, or is refused; counting does not allocate.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, memory: Layout) -> *mut u8 {
        if memory.align() == ALIGN {
            LIVE.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(memory) }
    }

    unsafe fn alloc_zeroed(&self, memory: Layout) -> *mut u8 {
        if memory.align() == ALIGN {
            let left = UNTIL.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
            if left == Ok(1) {
                REFUSED.store(true, Ordering::Relaxed);
                AGAIN.set(true);
                return ptr::null_mut();
            }
            if AGAIN.replace(false) {
                return ptr::null_mut();
            }
            LIVE.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(memory) }
    }

    unsafe fn dealloc(&self, at: *mut u8, memory: Layout) {
        if memory.align() == ALIGN {
            LIVE.fetch_sub(1, Ordering::Relaxed);
        }
        // SAFETY: `at` came from above, so from the system allocator.
        unsafe { System.dealloc(at, memory) }
    }
}

#[global_allocator]
static REFUSING: Refusing = Refusing;

/// Makes a model and takes two steps.
fn train(rank: &Rank, axes: &[(&str, usize)]) -> Result<f64> {
    let mesh = DeviceMesh::new(rank, axes)?;
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 7)?;
    let config =
        GptConfig { vocabulary: 11, block: 6, layers: 1, heads: 2, width: 8, dropout: 0.1, bias: true };
    let model = Gpt::new(&mut params, config)?;
    let (mut optimizer, mut dropout) = (AdamW::new().betas(0.9, 0.99).decay(0.1), Generator::new(3));
    let mut last = 0.0;
    for _ in 0..2 {
        let tokens = Tensor::from_vec((0..24).map(|i| i % 11).collect::<Vec<i64>>(), [4, 6])?;
        let tokens = DTensor::distribute(&mesh, &tokens, layout.clone())?;
        let mut grads = Gradients::default();
        let cx = Forward::train(&params, &mut dropout);
        let mut loss = model.loss(&cx, &tokens, &tokens)?;
        drop(cx);
        loss.backward_into(&mut grads)?;
        last = loss.item()?;
        let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
        let scale = clip_scale(&norm, 1.0)?;
        optimizer.step(&mut params, &mut grads, &scale, 1e-3)?;
    }
    Ok(last)
}

/// Runs the program with the n-th block refused, and returns its result if no block was.
fn run(axes: &'static [(&'static str, usize)], n: u64) -> Option<Vec<f64>> {
    let world = axes.iter().map(|(_, len)| len).product();
    let began = Instant::now();
    UNTIL.store(n, Ordering::Relaxed);
    let spmd = Spmd::new(world).deadline(Duration::from_secs(60)).on_slow(|_| ());
    let ends = spmd.run_each(move |rank| train(&rank, axes)).expect("the world begins");
    UNTIL.store(0, Ordering::Relaxed);
    let refused = REFUSED.swap(false, Ordering::Relaxed);
    assert_eq!(LIVE.load(Ordering::Relaxed), 0, "no block is left after block {n}");
    if !refused {
        return Some(ends.into_iter().map(|end| end.expect("no block was refused")).collect());
    }
    assert!(began.elapsed() < Duration::from_secs(30), "no rank waits for the deadline after block {n}");
    let lacks = |end: &Result<f64, Failure>| match end {
        Err(Failure::Error(Error::OutOfMemory(fault))) => {
            // A tensor's shape, or a list that a kernel needs, with the operator's name.
            let is_named = match fault.wanted.strip_prefix("a list of ") {
                Some(list) => {
                    LISTS.fetch_add(1, Ordering::Relaxed);
                    list.contains(" numbers for ")
                }
                None => fault.wanted.contains('['),
            };
            assert!(is_named && fault.limit_bytes == usize::MAX, "{fault}");
            true
        }
        Err(Failure::Error(error)) => {
            assert!(error.is_echo(), "block {n}: {error}");
            false
        }
        Err(other) => panic!("block {n}: {other}"),
        Ok(_) => false,
    };
    let lacking = ends.iter().filter(|end| lacks(end)).count();
    assert_eq!(lacking, 1, "one rank lacks block {n}: {ends:?}");
    None
}

/// One test, so that no other allocates meanwhile.
#[test]
fn every_block_of_a_training_step_may_be_refused() {
    for axes in [&[("fsdp", 2)][..], &[("dp", 2), ("tp", 2)]] {
        let losses = run(axes, 0).expect("nothing is refused");
        let mut n = 1;
        while run(axes, n).is_none() {
            n += 1;
        }
        let lists = LISTS.swap(0, Ordering::Relaxed);
        println!("{axes:?}: {} blocks, of which {lists} are lists of kernels", n - 1);
        assert!(n > 100 && lists > 0, "{n}, {lists}");
        assert_eq!(run(axes, 0), Some(losses), "later runs are as before");
    }
}

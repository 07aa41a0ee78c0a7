//! Several threads per kernel: a large kernel is cut into parts, which they compute at the same time.
//!
//! A part computes some elements of the result, or some rows or heads. No sum is cut in another place than its tree
//! allows, so any number of threads gives the same bits. A thread starts its helpers with the first kernel that is
//! large enough, and keeps them. Helpers wait a few microseconds for the next kernel, then sleep.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use crate::isa::caches::{Caches, with_caches};
use crate::isa::simd::{Isa, with_isa};
use crate::memory::{
    PoolStats, is_caught, pool_stats, resume_of_helper, set_memory_limit, trim_pool, with_caught,
};
use crate::threads::parts::Cut;

/// The most threads that [`given_threads`] believes.
pub const MOST_THREADS: usize = 1024;
/// The least work of a part, in nanoseconds: a helper that sleeps needs about as long to wake.
const MIN_NANOS: usize = if cfg!(miri) { 100 } else { 20_000 };
/// The number of parts per thread, so that a thread whose core is busy elsewhere leaves parts to the others.
const PARTS_PER_THREAD: usize = 4;
/// The time for which a thread waits for others before it sleeps: with a shorter one, small models train more slowly
/// (`benches/results/2026-11-27-xeon.md`).
const SPIN: Duration = Duration::from_micros(200);

thread_local! {
    /// The number that [`with_threads`] has set, if any.
    static THREADS: Cell<Option<usize>> = const { Cell::new(None) };
    /// True while this thread computes a part.
    static IN_PART: Cell<bool> = const { Cell::new(false) };
    static TEAM: RefCell<Option<ThreadTeam>> = const { RefCell::new(None) };
}

/// Returns the number of threads that `ISOSHARD_THREADS` gives, or `None` if it is not set.
///
/// # Errors
/// Returns the value if it is not a number from 1 to [`MOST_THREADS`].
pub fn given_threads() -> Result<Option<usize>, String> {
    std::env::var_os("ISOSHARD_THREADS").map(|given| parsed(&given.to_string_lossy())).transpose()
}

fn parsed(given: &str) -> Result<usize, String> {
    let number = given.trim().parse().ok().filter(|n| (1..=MOST_THREADS).contains(n));
    number.ok_or_else(|| given.into())
}

/// Returns the number that [`with_threads`] has set, if this thread is inside it.
pub fn chosen_threads() -> Option<usize> {
    THREADS.get()
}

/// Returns the number of threads that a kernel of this thread may use.
pub(crate) fn allowed() -> usize {
    static DEFAULT: OnceLock<usize> = OnceLock::new();
    if IN_PART.get() {
        return 1;
    }
    // `Spmd` reports a value that is no number.
    THREADS.get().unwrap_or_else(|| *DEFAULT.get_or_init(|| given_threads().ok().flatten().unwrap_or(1)))
}

/// Runs `f`, in which each large kernel of this thread uses up to `n` threads. Outside it uses as many as
/// [`given_threads`] says, or one. Any number of threads gives the same bits.
///
/// ```
/// use isoshard_kernels::{Product, Stack, with_threads};
/// let (a, b) = ([0.1f32; 64 * 9], [3.0f32; 9 * 64]);
/// let (a, b) = (Stack { data: &a, strides: [0, 9, 1] }, Stack { data: &b, strides: [0, 64, 1] });
/// let product = || {
///     let mut c = [0.0; 64 * 64];
///     f32::products([1, 64, 9, 64], a, b, &[9], &mut c);
///     c
/// };
/// assert_eq!(with_threads(4, product), product());
/// ```
///
/// # Panics
/// Panics if `n` is 0.
pub fn with_threads<R>(n: usize, f: impl FnOnce() -> R) -> R {
    struct RestoreThreads(Option<usize>);
    impl Drop for RestoreThreads {
        fn drop(&mut self) {
            THREADS.set(self.0);
        }
    }
    assert!(n > 0, "with_threads: needs one thread or more");
    let _restore = RestoreThreads(THREADS.replace(Some(n)));
    f()
}

/// Returns the number of parts that are worth a thread each.
pub(crate) fn worth(nanos: usize) -> usize {
    nanos / SMALLEST_PART.get()
}

thread_local! {
    static SMALLEST_PART: Cell<usize> = const { Cell::new(MIN_NANOS) };
}

/// Cuts kernels of this thread into parts of this many nanoseconds or more from now on, so that tests need no large ones.
///
/// # Panics
/// Panics if `nanos` is 0.
pub fn set_smallest_part(nanos: usize) {
    assert!(nanos > 0, "a part takes some time");
    SMALLEST_PART.set(nanos);
}

/// Calls `f` on parts of `0..len` and of `out`, which is written, on the threads that this one may use. `nanos` is about
/// the time that one thread needs for everything; if it is short, there is one part.
pub fn for_each_part<S: Cut>(len: usize, nanos: usize, out: S, f: impl Fn(Range<usize>, S) + Sync) {
    call_with_parts(len, nanos, out, &f);
}

/// [`for_each_part`], compiled once per type of what is written.
fn call_with_parts<S: Cut>(len: usize, nanos: usize, out: S, f: &(dyn Fn(Range<usize>, S) + Sync)) {
    let worthwhile = worth(nanos).min(len);
    let threads = if worthwhile > 1 { allowed() } else { 1 };
    if threads == 1 {
        return f(0..len, out);
    }
    let parts = worthwhile.min(threads.saturating_mul(PARTS_PER_THREAD));
    let (mut list, mut rest) = (Vec::with_capacity(parts), out);
    for i in 0..parts {
        // No product overflows, since neither is longer than memory.
        let (start, end) =
            (len / parts * i + (len % parts).min(i), len / parts * (i + 1) + (len % parts).min(i + 1));
        let (head, tail) = rest.cut(end - start);
        list.push(Mutex::new(Some((start..end, head))));
        rest = tail;
    }
    run_parts(threads, parts, &|i| {
        let part = list[i].lock().unwrap_or_else(PoisonError::into_inner).take();
        let (range, out) = part.expect("each part is computed once");
        f(range, out);
    });
}

/// Calls `f` with `0..parts` on up to `threads` threads, this one included, and returns when all calls have ended.
///
/// # Panics
/// Panics if a call does, once all calls that have begun have ended.
pub(crate) fn run_parts(threads: usize, parts: usize, f: &(dyn Fn(usize) + Sync)) {
    if threads <= 1 || parts <= 1 || IN_PART.get() {
        return (0..parts).for_each(f);
    }
    let helpers = threads.min(parts) - 1;
    // The thread is ending, or a destructor runs in the middle of a call: it computes alone.
    let alone = TEAM.try_with(|team| match team.try_borrow_mut() {
        Ok(mut team) => {
            team.get_or_insert_with(ThreadTeam::new).run(helpers, parts, f);
            false
        }
        Err(_) => true,
    });
    if alone.unwrap_or(true) {
        (0..parts).for_each(f);
    }
}

/// A thread's helpers.
struct ThreadTeam {
    desk: Arc<TeamDesk>,
    helpers_len: usize,
}

/// The place at which a thread and its helpers meet.
#[derive(Default)]
struct TeamDesk {
    state: Mutex<DeskState>,
    /// Signals a new task, or the end.
    wake: Condvar,
    /// Signals that the last helper has left a task.
    left: Condvar,
    /// The number of tasks so far.
    task_number: AtomicUsize,
    /// The next part of the task.
    next: AtomicUsize,
    /// The number of helpers that work on the task.
    busy: AtomicUsize,
}

#[derive(Default)]
struct DeskState {
    task: Option<TeamTask>,
    /// The number of helpers that may still join the task.
    seats: usize,
    ended: bool,
    /// The first panic of a part.
    panic: Option<Box<dyn Any + Send>>,
}

/// A kernel whose parts are computed.
#[derive(Clone, Copy)]
struct TeamTask {
    f: *const (dyn Fn(usize) + Sync),
    parts: usize,
    isa: Isa,
    caches: Caches,
    /// True if an allocation of the kernel without room is an error.
    is_caught: bool,
    /// The most bytes of tensors that each thread may take.
    limit_bytes: usize,
}

// SAFETY: the function is `Sync`, and `ThreadTeam::run` keeps it alive until no helper can call it.
unsafe impl Send for TeamTask {}

impl TeamDesk {
    fn state(&self) -> MutexGuard<'_, DeskState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Computes parts until none is left. It does not unwind: a panic is kept for the caller.
    ///
    /// # Safety
    /// The task's function lives.
    unsafe fn work(&self, task: TeamTask) {
        // SAFETY: the caller's promise.
        let f = unsafe { &*task.f };
        let parts = || {
            loop {
                let i = self.next.fetch_add(1, Ordering::Relaxed);
                if i >= task.parts {
                    return;
                }
                f(i);
            }
        };
        let in_part = IN_PART.replace(true);
        let ended = catch_unwind(AssertUnwindSafe(parts));
        IN_PART.set(in_part);
        if let Err(panic) = ended {
            self.next.store(task.parts, Ordering::Relaxed);
            match &mut self.state().panic {
                first @ None => *first = Some(panic),
                // Dropping a panic's value may panic again, and the caller would leave while helpers call its function.
                Some(_) => std::mem::forget(panic),
            }
        }
    }

    /// The life of a helper.
    fn help(&self) {
        let mut seen = 0;
        loop {
            spin_until(|| self.task_number.load(Ordering::Acquire) != seen);
            let mut state = self.state();
            let task = loop {
                if state.ended {
                    return;
                }
                let number = self.task_number.load(Ordering::Relaxed);
                if number != seen {
                    seen = number;
                    if let Some(task) = state.task.filter(|_| state.seats > 0) {
                        state.seats -= 1;
                        self.busy.fetch_add(1, Ordering::Relaxed);
                        break task;
                    }
                }
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            let work = || {
                // SAFETY: `run` waits until this helper is no longer busy.
                with_caught(task.is_caught, || unsafe { self.work(task) })
            };
            with_isa(task.isa, || with_caches(task.caches, || within(task.limit_bytes, work)));
            let _state = self.state();
            if self.busy.fetch_sub(1, Ordering::Release) == 1 {
                self.left.notify_one();
            }
        }
    }
}

impl ThreadTeam {
    fn new() -> ThreadTeam {
        ThreadTeam { desk: Arc::default(), helpers_len: 0 }
    }

    fn run(&mut self, helpers: usize, parts: usize, f: &(dyn Fn(usize) + Sync)) {
        while self.helpers_len < helpers {
            let desk = self.desk.clone();
            // If the system has no thread left, the others compute all parts.
            if Builder::new().name("isoshard helper".into()).spawn(move || desk.help()).is_err() {
                break;
            }
            self.helpers_len += 1;
        }
        let desk = &*self.desk;
        // SAFETY: only the lifetime changes. Helpers get `f` from the desk alone, while they count as busy. Nothing from here
        // to the end of this function unwinds, which withdraws the task and waits until no helper is busy.
        let f: *const (dyn Fn(usize) + Sync) =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(f) };
        let task = TeamTask {
            f,
            parts,
            isa: Isa::current(),
            caches: Caches::current(),
            is_caught: is_caught(),
            limit_bytes: limit_of_each(helpers + 1),
        };
        {
            let mut state = desk.state();
            desk.next.store(0, Ordering::Relaxed);
            (state.task, state.seats) = (Some(task), helpers);
            desk.task_number.fetch_add(1, Ordering::Release);
        }
        if helpers == 1 && self.helpers_len == 1 {
            desk.wake.notify_one()
        } else {
            desk.wake.notify_all()
        }
        // SAFETY: `f` lives until this function returns.
        unsafe { desk.work(task) };
        desk.state().task = None;
        spin_until(|| desk.busy.load(Ordering::Acquire) == 0);
        let mut state = desk.state();
        while desk.busy.load(Ordering::Acquire) > 0 {
            state = desk.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let panic = state.panic.take();
        drop(state);
        if let Some(panic) = panic {
            resume_of_helper(panic);
        }
    }
}

impl Drop for ThreadTeam {
    fn drop(&mut self) {
        self.desk.state().ended = true;
        self.desk.task_number.fetch_add(1, Ordering::Release);
        self.desk.wake.notify_all();
    }
}

/// Returns the most bytes that each of `threads`, this one included, may take for this thread's kernel: equal parts of what
/// its limit leaves.
fn limit_of_each(threads: usize) -> usize {
    let PoolStats { live_bytes, free_bytes, limit_bytes, .. } = pool_stats();
    if limit_bytes == usize::MAX {
        return usize::MAX;
    }
    let left = limit_bytes.saturating_sub(live_bytes);
    if free_bytes <= left / 2 {
        return (left - free_bytes) / threads;
    }
    // Only this thread can give back the blocks that it keeps.
    trim_pool();
    left / threads
}

/// Runs `f`, in which this helper's tensors may take `limit_bytes`. With a limit the helper keeps no blocks afterwards,
/// which would count for no thread.
fn within(limit_bytes: usize, f: impl FnOnce()) {
    if limit_bytes == usize::MAX {
        return f();
    }
    trim_pool();
    set_memory_limit(limit_bytes);
    f();
    set_memory_limit(usize::MAX);
    trim_pool();
}

/// Waits a short time for `done`. Other threads that are ready to run get the core meanwhile.
fn spin_until(done: impl Fn() -> bool) {
    let mut began = None;
    loop {
        for _ in 0..32 {
            if done() {
                return;
            }
            std::hint::spin_loop();
        }
        if began.get_or_insert_with(Instant::now).elapsed() > SPIN {
            return;
        }
        thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::resume_unwind;

    use super::*;
    use crate::threads::parts::RowsMut;

    #[test]
    fn parts_cover_everything_once_on_any_number_of_threads() {
        for threads in [1, 2, 3, 5] {
            for (len, nanos) in [(0, 0), (1, 1 << 30), (7, 1 << 30), (1000, 100_000), (1000, 10)] {
                let (mut one, mut two) = (vec![0u32; len], vec![0u32; 3 * len]);
                let rows = RowsMut { data: &mut two, len: 3 };
                with_threads(threads, || {
                    for_each_part(len, nanos, (&mut one[..], rows), |at, (one, two)| {
                        assert_eq!((one.len(), two.data.len()), (at.len(), 3 * at.len()));
                        one.iter_mut().zip(at.clone()).for_each(|(x, i)| *x += 1 + i as u32);
                        two.data.iter_mut().zip(3 * at.start..).for_each(|(x, i)| *x += 1 + i as u32);
                    });
                });
                assert!(one.iter().chain(&two).zip((1..=len).chain(1..)).all(|(x, i)| *x as usize == i));
            }
        }
    }

    #[test]
    fn a_panic_of_a_part_is_the_callers_and_the_helpers_stay() {
        for at in [0, 11] {
            let run = || with_threads(3, || run_parts(3, 12, &|i| assert_ne!(i, at, "part {at}")));
            let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("a part panicked");
            assert!(panic.downcast::<String>().unwrap().contains("part"));
        }
        let sum = AtomicUsize::new(0);
        run_parts(3, 100, &|i| _ = sum.fetch_add(i, Ordering::Relaxed));
        assert_eq!(sum.into_inner(), 4950);
    }

    /// A panic's value may panic as well when it is dropped. The caller still waits for all helpers, which call its function.
    #[test]
    fn the_caller_waits_for_all_parts_also_if_panics_panic() {
        use std::panic::panic_any;
        use std::sync::Barrier;
        use std::sync::atomic::AtomicBool;

        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                if !thread::panicking() {
                    panic!("dropped");
                }
            }
        }
        // All that a part uses outlives the call, also if it does not wait.
        static ALL: Barrier = Barrier::new(3);
        static PANICKED: AtomicBool = AtomicBool::new(false);
        static ENDED: AtomicBool = AtomicBool::new(false);
        fn part(_: usize) {
            ALL.wait();
            if thread::current().name() != Some("isoshard helper") {
                thread::sleep(Duration::from_millis(100));
                panic_any(Bomb);
            }
            if !PANICKED.swap(true, Ordering::Relaxed) {
                panic_any(Bomb);
            }
            thread::sleep(Duration::from_millis(500));
            ENDED.store(true, Ordering::Relaxed);
        }
        let ended = catch_unwind(|| run_parts(3, 3, &part));
        assert!(ENDED.load(Ordering::Relaxed), "a helper still calls the function");
        let panic = ended.expect_err("two parts panicked");
        assert!(panic.is::<Bomb>(), "the first panic is the caller's");
        std::mem::forget(panic);
    }

    /// Each part takes more than half of the room, or less.
    #[test]
    fn helpers_share_the_callers_limit_and_a_part_without_room_is_its_error() {
        use std::sync::Barrier;

        use crate::memory::{KernelList, catch, fault_of};
        let run = |bytes: usize| {
            set_memory_limit(1 << 20);
            let both = Barrier::new(2);
            let parts = || {
                run_parts(2, 2, &|_| {
                    both.wait();
                    let taken = catch_unwind(AssertUnwindSafe(|| KernelList::<u8>::new().resize(bytes)));
                    both.wait();
                    taken.unwrap_or_else(|payload| resume_unwind(payload));
                });
            };
            let ended =
                catch(|| with_threads(2, parts)).map_err(|payload| fault_of(payload).expect("a fault"));
            set_memory_limit(usize::MAX);
            assert_eq!(pool_stats().live_bytes, 0);
            ended
        };
        let ended = thread::spawn(move || [run(400_000), run(600_000), run(400_000)]).join();
        let [less, more, again] = ended.expect("no panic");
        assert!(less.is_ok() && again.is_ok(), "{less:?}, {again:?}");
        let fault = more.unwrap_err();
        assert_eq!((&*fault.wanted, fault.wanted_bytes), ("a list of 600000 numbers", 600_000));
        assert_eq!(fault.limit_bytes, 1 << 20, "the caller's limit");
    }

    #[test]
    fn parts_within_parts_run_in_turn_with_the_callers_choices() {
        let count = AtomicUsize::new(0);
        let small = Caches { first: 4096, second: 8192, third: 8192 };
        with_isa(Isa::Baseline, || {
            with_caches(small, || {
                run_parts(4, 16, &|_| {
                    assert_eq!((allowed(), Isa::current(), Caches::current()), (1, Isa::Baseline, small));
                    run_parts(4, 10, &|_| _ = count.fetch_add(1, Ordering::Relaxed));
                });
            });
        });
        assert_eq!(count.into_inner(), 160);
    }

    #[test]
    fn a_number_of_threads_is_bounded() {
        assert_eq!((parsed("1"), parsed(" 16 ")), (Ok(1), Ok(16)));
        for bad in ["", "0", "-1", "two", "1025", "99999999999999999999"] {
            assert_eq!(parsed(bad), Err(bad.into()));
        }
        assert_eq!(THREADS.get(), None);
    }
}

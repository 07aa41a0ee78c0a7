//! A CUDA device for tests on machines without one: a driver that compiles the embedded kernels with the system's C++
//! compiler, runs them on the CPU, and is stricter than a device.
//!
//! [`device`] gives `Device::Cuda(0)`: a real one if there is one, else this. Kernels run in an [`Order`] that shows
//! missing barriers, and streams ([`Streams`]) as late as events allow, which shows missing waits. Fresh memory is
//! filled with NaNs and has guards around it. Environment variables set defaults: `ISO_SHIM=1` takes the shim even if
//! there is a device, `ISOSHARD_REQUIRE_DEVICE=1` makes it a failure that there is none, `ISO_SHIM_ORDER` is
//! `descending` or `shuffled:7`, `ISO_SHIM_STREAMS` is `late:7`, `ISO_SHIM_CHECKS=1` turns checks on, and
//! `ISO_SHIM_RECORD` is a folder for [records](Shim::record_into) of all launches.
//!
//! With [`Settings::checks`] kernels report addresses that are not aligned for their type, indices outside of arrays,
//! shifts by too much and divisions by 0; compiling then takes twice as long.
//!
//! Missing: reads out of bounds are only seen by the poison that they return; writes out of bounds only near the ends
//! of a block that [`Driver::alloc`] returned.

// Modules by path, so that other programs can include this file by path.
#[path = "shim/compiler.rs"]
mod compiler;
#[path = "shim/driver.rs"]
mod driver;
#[path = "shim/memory.rs"]
mod memory;
#[path = "shim/program.rs"]
mod program;
#[path = "shim/queue.rs"]
mod queue;
#[path = "shim/record.rs"]
mod record;

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use isoshard::tensor::Device;
use isoshard::tensor::cuda::{self, CopyDirection, DeviceProperties, DriverError, DriverResult, Handle};
use isoshard::testing::values::mix;

use compiler::Compiler;
use memory::Memory;
use program::{Function, LoadedProgram};
use queue::{Policy, Queue, Task};

/// The order in which a block's threads run between barriers, and a grid's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Ascending,
    Descending,
    /// Another order for each seed, block and barrier.
    Shuffled(u64),
}

/// The time at which work on a stream runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streams {
    /// At once, on the calling thread.
    Eager,
    /// When something waits for it. Streams advance in an order drawn from the seed, as far as events allow.
    Late(u64),
}

/// The options of a shim.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub order: Order,
    pub streams: Streams,
    pub total_bytes: usize,
    /// True if kernels are compiled with checks of every access.
    pub checks: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        let seed = |text: &str, word: &str| text.strip_prefix(word)?.trim_start_matches(':').parse().ok();
        let set = |name: &str| std::env::var(name).unwrap_or_default().to_ascii_lowercase();
        let (order, streams) = (set("ISO_SHIM_ORDER"), set("ISO_SHIM_STREAMS"));
        Settings {
            order: match seed(&order, "shuffled") {
                Some(seed) => Order::Shuffled(seed),
                None if order == "descending" => Order::Descending,
                None => Order::Ascending,
            },
            streams: seed(&streams, "late").map_or(Streams::Eager, Streams::Late),
            total_bytes: 1 << 30,
            checks: std::env::var_os("ISO_SHIM_CHECKS").is_some(),
        }
    }
}

/// Returns the CUDA device of this test process, which the first call installs; `None`, with a message, if there is
/// no C++ compiler.
///
/// # Panics
/// Panics if `ISOSHARD_REQUIRE_DEVICE=1` and there is no real device: on a machine whose driver does not start, tests
/// would otherwise pass on the shim.
pub fn device() -> Option<Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let real = || std::env::var_os("ISO_SHIM").is_none() && cuda::is_available();
    let found = *DEVICE.get_or_init(|| match real() {
        true => Some(Device::Cuda(0)),
        false if std::env::var_os("ISOSHARD_REQUIRE_DEVICE").is_some_and(|set| set == "1") => {
            let reason = cuda::unavailable_reason().unwrap_or_else(|| "ISO_SHIM asks for the shim".into());
            panic!("ISOSHARD_REQUIRE_DEVICE=1, and there is no CUDA device: {reason}")
        }
        false => install(0, Settings::default()).map(|shim| {
            SHIM.set(shim).expect("set once");
            Device::Cuda(0)
        }),
    });
    if found.is_none() {
        // Written directly to standard error, because the test harness hides the output of tests that pass.
        let _ = writeln!(std::io::stderr(), "SKIPPED (no C++ compiler)");
    }
    found
}

/// Returns the shim behind [`device`], or `None` if that is a real device.
pub fn shim() -> Option<&'static Arc<Shim>> {
    device().and_then(|_| SHIM.get())
}

/// Returns a device for one test, under the next free number.
pub fn own_device(settings: Settings) -> Option<(Device, Arc<Shim>)> {
    static NEXT: AtomicUsize = AtomicUsize::new(64);
    // First, because it asks for a real device, and takes this one for it.
    device()?;
    let index = NEXT.fetch_add(1, Ordering::Relaxed);
    install(index, settings).map(|shim| (Device::Cuda(index), shim))
}

/// Runs `f` with this order for all launches of the thread, on any shim.
pub fn with_order<T>(order: Order, f: impl FnOnce() -> T) -> T {
    struct Reset(Option<Order>);
    impl Drop for Reset {
        fn drop(&mut self) {
            ORDER.set(self.0);
        }
    }
    let _reset = Reset(ORDER.replace(Some(order)));
    f()
}

static SHIM: OnceLock<Arc<Shim>> = OnceLock::new();
thread_local!(static ORDER: Cell<Option<Order>> = const { Cell::new(None) });

fn install(index: usize, settings: Settings) -> Option<Arc<Shim>> {
    let shim = Shim::new(settings)?;
    cuda::install(index, shim.clone()).expect("the number is free");
    if settings.streams != Streams::Eager {
        // Waiting for every launch would hide late ones.
        cuda::set_checked(false);
    }
    Some(shim)
}

/// An emulated device.
#[derive(Debug)]
pub struct Shim {
    properties: DeviceProperties,
    compiler: Compiler,
    late: AtomicBool,
    order: Order,
    launches: AtomicU64,
    memory: Mutex<Memory>,
    queue: Mutex<Queue>,
    programs: Mutex<Vec<LoadedProgram>>,
    functions: Mutex<Vec<Function>>,
    calls: Mutex<HashMap<&'static str, Calls>>,
    /// The folder for records of launches.
    record: Mutex<Option<PathBuf>>,
    /// Ranges that the host has written while launches were recorded, and that look like poison in part.
    uploads: Mutex<Vec<(u64, usize)>>,
    /// Misuse by a call that cannot return an error; the next call that waits for a stream returns it.
    blamed: Mutex<Option<String>>,
}

/// The calls of one of the driver's functions.
#[derive(Debug, Default)]
struct Calls {
    len: u64,
    /// The numbers of calls that are to fail, and their codes.
    fail: Vec<(u64, String)>,
}

impl Shim {
    /// Returns an empty device that is not installed, or `None` without a C++ compiler.
    pub fn new(settings: Settings) -> Option<Arc<Shim>> {
        let compiler = Compiler::find(settings.checks)?;
        let properties = DeviceProperties {
            name: "shim".into(),
            capability: (9, 0),
            multiprocessors: 3,
            shared_bytes: 227 << 10,
            total_bytes: settings.total_bytes,
        };
        let shim = Shim {
            properties,
            compiler,
            late: AtomicBool::new(false),
            order: settings.order,
            launches: AtomicU64::new(0),
            memory: Mutex::default(),
            queue: Mutex::new(Queue::new(0)),
            programs: Mutex::default(),
            functions: Mutex::default(),
            calls: Mutex::default(),
            record: Mutex::default(),
            uploads: Mutex::default(),
            blamed: Mutex::default(),
        };
        shim.set_streams(settings.streams);
        shim.record_into(std::env::var_os("ISO_SHIM_RECORD").map(PathBuf::from));
        Some(Arc::new(shim))
    }

    /// Sets when later work runs; waiting work runs now.
    pub fn set_streams(&self, streams: Streams) {
        let mut queue = lock(&self.queue);
        self.drain(&mut queue);
        if let Streams::Late(seed) = streams {
            queue.reseed(seed);
        }
        self.late.store(streams != Streams::Eager, Ordering::Relaxed);
    }

    /// Records later launches in a folder, beside the sources. Blocks may be in use by one thread only.
    pub fn record_into(&self, dir: Option<PathBuf>) {
        dir.iter().for_each(|dir| record::sources(dir).expect("the folder can be written"));
        *lock(&self.record) = dir;
    }

    /// Makes the `nth` call from now of this function of the trait (1: the next) fail with this code.
    pub fn fail_next(&self, call: &'static str, nth: u64, code: &str) {
        let mut calls = lock(&self.calls);
        let calls = calls.entry(call).or_default();
        calls.fail.push((calls.len + nth, code.into()));
    }

    /// Returns the number of calls of a function of the trait.
    pub fn calls_len(&self, call: &'static str) -> u64 {
        lock(&self.calls).get(call).map_or(0, |c| c.len)
    }

    /// Returns the numbers of live blocks, streams and events.
    pub fn live(&self) -> (usize, usize, usize) {
        let (streams, events) = lock(&self.queue).live();
        (lock(&self.memory).blocks_len(), streams, events)
    }

    /// Runs all work, then checks every guard and all freed memory.
    ///
    /// # Errors
    /// Returns a description of the memory that was written and must not be.
    pub fn check(&self) -> Result<(), String> {
        self.drain(&mut lock(&self.queue));
        lock(&self.blamed).take().map_or(Ok(()), Err)?;
        lock(&self.memory).check(true)
    }

    /// Counts a call, and fails it if a test wants that.
    fn enter(&self, call: &'static str) -> DriverResult<()> {
        let mut calls = lock(&self.calls);
        let calls = calls.entry(call).or_default();
        calls.len += 1;
        let at = calls.fail.iter().position(|(nth, _)| *nth == calls.len);
        match at.map(|at| calls.fail.swap_remove(at).1) {
            Some(code) => Err(DriverError { call, out_of_memory: code.contains("OUT_OF_MEMORY"), code }),
            None => Ok(()),
        }
    }

    /// Puts a task on a stream, or runs it if streams are eager.
    fn put(&self, call: &'static str, stream: Handle, task: Task) -> DriverResult<()> {
        let mut queue = lock(&self.queue);
        if !queue.knows_stream(stream) {
            return Err(refusal(call, "CUDA_ERROR_INVALID_HANDLE", "there is no such stream"));
        }
        if let Some(failed) = queue.take_failure(stream) {
            return Err(failed);
        }
        if self.late.load(Ordering::Relaxed) {
            queue.put(stream, task);
            return Ok(());
        }
        drop(queue);
        self.perform(task)
    }

    /// Advances streams until `stream` is empty.
    fn finish(&self, queue: &mut Queue, stream: Handle) {
        let policy = if queue.below(2) == 0 { Policy::Needed } else { Policy::Any };
        while !queue.is_empty(stream) {
            let next = queue.next(stream, policy);
            self.step(queue, next);
        }
    }

    /// Runs all waiting tasks.
    fn drain(&self, queue: &mut Queue) {
        while let Some(next) = queue.next_of_any() {
            self.step(queue, next);
        }
    }

    fn step(&self, queue: &mut Queue, (stream, task): (Handle, Task)) {
        match task {
            Task::Record(recording) => queue.happened(recording),
            Task::Wait(_) => {}
            task => {
                if let Err(e) = self.perform(task) {
                    queue.fail(stream, e);
                }
            }
        }
    }

    fn perform(&self, task: Task) -> DriverResult<()> {
        match task {
            Task::Launch { function, grid, mut arguments, order } => {
                let recorded = lock(&self.record).clone();
                let before = recorded.as_ref().map(|_| (lock(&self.memory).image(), arguments.clone()));
                let mut pointers: Vec<*mut c_void> =
                    arguments.iter_mut().map(|a| a.as_mut_ptr().cast()).collect();
                // SAFETY: the promise of the caller that launched it; the grid was checked then.
                let done = unsafe { function.run(grid, &mut pointers, order) };
                if let (Some(dir), Some((before, arguments))) = (&recorded, before) {
                    static NTH: AtomicU64 = AtomicU64::new(0);
                    let nth = NTH.fetch_add(1, Ordering::Relaxed);
                    let uploads = lock(&self.uploads).clone();
                    record::launch(
                        dir,
                        nth,
                        (&function, grid),
                        &arguments,
                        &before,
                        &uploads,
                        &lock(&self.memory),
                    )
                    .expect("the folder can be written");
                }
                done.map_err(|why| refusal("launch", "CUDA_ERROR_LAUNCH_FAILED", &why))
            }
            Task::Copy { direction, to, from, bytes } => {
                let (to_host, from_host) =
                    (direction == CopyDirection::ToHost, direction == CopyDirection::ToDevice);
                self.holds("copy", to, bytes, to_host)?;
                self.holds("copy", from, bytes, from_host)?;
                // SAFETY: both ranges are in live blocks; overlapping ranges are allowed.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
                if direction == CopyDirection::ToDevice && lock(&self.record).is_some() {
                    // SAFETY: as above; nothing else writes there now.
                    let data = unsafe { std::slice::from_raw_parts(to as *const u8, bytes) };
                    if data.chunks_exact(4).any(|word| word == [0xff; 4]) {
                        lock(&self.uploads).push((to, bytes));
                    }
                }
                Ok(())
            }
            Task::Fill { at, byte, bytes } => {
                self.holds("fill", at, bytes, false)?;
                // SAFETY: the range is in a live block.
                unsafe { (at as *mut u8).write_bytes(byte, bytes) };
                Ok(())
            }
            Task::Record(_) | Task::Wait(_) => Ok(()),
        }
    }

    fn holds(&self, call: &'static str, at: u64, bytes: usize, host: bool) -> DriverResult<()> {
        let held = lock(&self.memory).holds(at, bytes, host);
        held.map_err(|why| refusal(call, "CUDA_ERROR_ILLEGAL_ADDRESS", &why))
    }

    /// Runs all work before a block is freed. A device may wait as well, but need not, so work that still uses the
    /// block is misuse.
    fn retire(&self, call: &str, block: u64) {
        let bytes = lock(&self.memory).bytes_of(block);
        let mut queue = lock(&self.queue);
        if queue.uses(block, bytes) {
            self.blame(format!("{call}: work that uses the block at {block:#x} has not run"));
        }
        self.drain(&mut queue);
    }

    fn blame(&self, what: String) {
        lock(&self.blamed).get_or_insert(what);
    }
}

fn refusal(call: &'static str, code: &str, why: &str) -> DriverError {
    DriverError { call, code: format!("{code}: {why}"), out_of_memory: false }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! A device whose streams are threads: work on a stream runs at some later time, as on a GPU. Another driver provides
//! memory and kernels.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use isoshard::tensor::Device;
use isoshard::tensor::cuda::{
    self, Address, CopyDirection, DeviceProperties, Driver, DriverError, DriverResult, Grid, Handle,
    KernelProgram,
};

use crate::shim::{Settings, Shim, Streams};

/// The most devices.
pub const DEVICES: usize = 5;

/// Work on a stream.
type Job = Box<dyn FnOnce() + Send>;

/// Returns the first of [`DEVICES`] devices, or `None`, with a message, if there is no C++ compiler.
pub fn devices() -> Option<[Device; DEVICES]> {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    let installed = *INSTALLED.get_or_init(|| {
        cuda::set_checked(false);
        (0..DEVICES).all(|index| match Threaded::new() {
            Some(driver) => cuda::install(FIRST + index, Arc::new(driver)).map(|()| true).unwrap(),
            None => false,
        })
    });
    if !installed {
        eprintln!("SKIPPED (no C++ compiler)");
        return None;
    }
    Some(std::array::from_fn(|i| Device::Cuda(FIRST + i)))
}

/// Numbers after those that a real driver may use.
const FIRST: usize = 16;

/// Puts work on a stream of any device.
pub fn put(stream: Handle, job: impl FnOnce() + Send + 'static) {
    let streams = lock(streams());
    // A destroyed stream does nothing.
    if let Some(jobs) = streams.get(&stream) {
        let _ = jobs.send(Box::new(job));
    }
}

/// All streams, with handles that are unique over the devices.
fn streams() -> &'static Mutex<HashMap<Handle, Sender<Job>>> {
    static STREAMS: OnceLock<Mutex<HashMap<Handle, Sender<Job>>>> = OnceLock::new();
    STREAMS.get_or_init(Mutex::default)
}

fn handle() -> Handle {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

#[derive(Debug)]
struct Threaded {
    inner: Arc<Shim>,
    /// The inner driver's stream, on which everything runs at once.
    at_once: Handle,
    events: Mutex<HashMap<Handle, Arc<Event>>>,
    streams: Mutex<Vec<Handle>>,
}

/// The number of recordings that were put on a stream, and of those that have happened.
#[derive(Debug, Default)]
struct Event {
    counts: Mutex<(u64, u64)>,
    wake: Condvar,
}

impl Event {
    fn happen(&self, recording: u64) {
        let mut counts = lock(&self.counts);
        counts.1 = counts.1.max(recording);
        self.wake.notify_all();
    }

    fn wait(&self, recording: u64) {
        let mut counts = lock(&self.counts);
        while counts.1 < recording {
            counts = self.wake.wait(counts).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Threaded {
    fn new() -> Option<Threaded> {
        let inner = Shim::new(Settings { streams: Streams::Eager, ..Settings::default() })?;
        let at_once = inner.stream().unwrap();
        Some(Threaded { inner, at_once, events: Mutex::default(), streams: Mutex::default() })
    }

    fn find(&self, event: Handle) -> Arc<Event> {
        lock(&self.events)[&event].clone()
    }

    /// Waits for the device, as the driver does before it frees memory.
    fn wait_for_all(&self) -> DriverResult<()> {
        let streams = lock(&self.streams).clone();
        streams.into_iter().try_for_each(|stream| self.synchronize(stream))
    }

    /// Puts work on a stream that the inner driver does at once.
    fn later(&self, stream: Handle, job: impl FnOnce(&Shim, Handle) -> DriverResult<()> + Send + 'static) {
        let (inner, at_once) = (self.inner.clone(), self.at_once);
        put(stream, move || job(&inner, at_once).expect("what is put on a stream can be done"));
    }
}

/// Delays a stream now and then, so that code with a missing wait is too early.
fn dawdle() {
    static STEPS: AtomicU64 = AtomicU64::new(0);
    let step = STEPS.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    if step.is_multiple_of(5) {
        thread::sleep(Duration::from_micros(step % 300));
    }
}

// SAFETY: memory and work are the inner driver's; streams keep their order.
unsafe impl Driver for Threaded {
    fn properties(&self) -> &DeviceProperties {
        self.inner.properties()
    }
    fn bind(&self) -> DriverResult<()> {
        self.inner.bind()
    }
    fn memory(&self) -> DriverResult<(usize, usize)> {
        self.inner.memory()
    }
    fn alloc(&self, bytes: usize) -> DriverResult<Address> {
        self.inner.alloc(bytes)
    }
    unsafe fn free(&self, block: Address) -> DriverResult<()> {
        self.wait_for_all()?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.free(block) }
    }
    fn alloc_host(&self, bytes: usize) -> DriverResult<*mut u8> {
        self.inner.alloc_host(bytes)
    }
    unsafe fn free_host(&self, block: *mut u8) -> DriverResult<()> {
        self.wait_for_all()?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.free_host(block) }
    }
    fn stream(&self) -> DriverResult<Handle> {
        let (jobs, waiting) = channel::<Job>();
        let stream = handle();
        lock(streams()).insert(stream, jobs);
        lock(&self.streams).push(stream);
        thread::Builder::new()
            .name(format!("stream {stream}"))
            .stack_size(8 << 20)
            .spawn(move || {
                for job in waiting {
                    dawdle();
                    job();
                }
            })
            .map_err(|e| DriverError { call: "stream", code: e.to_string(), out_of_memory: false })?;
        Ok(stream)
    }
    fn drop_stream(&self, stream: Handle) {
        lock(streams()).remove(&stream);
        lock(&self.streams).retain(|&s| s != stream);
    }
    fn synchronize(&self, stream: Handle) -> DriverResult<()> {
        let (done, end) = channel();
        put(stream, move || {
            let _ = done.send(());
        });
        let _ = end.recv();
        Ok(())
    }
    fn event(&self) -> DriverResult<Handle> {
        let event = handle();
        lock(&self.events).insert(event, Arc::default());
        Ok(event)
    }
    fn drop_event(&self, event: Handle) {
        lock(&self.events).remove(&event);
    }
    fn record(&self, event: Handle, stream: Handle) -> DriverResult<()> {
        let event = self.find(event);
        let recording = {
            let mut counts = lock(&event.counts);
            counts.0 += 1;
            counts.0
        };
        put(stream, move || event.happen(recording));
        Ok(())
    }
    fn wait(&self, stream: Handle, event: Handle) -> DriverResult<()> {
        let event = self.find(event);
        let recording = lock(&event.counts).0;
        put(stream, move || event.wait(recording));
        Ok(())
    }
    fn is_done(&self, event: Handle) -> DriverResult<bool> {
        let event = self.find(event);
        let counts = lock(&event.counts);
        Ok(counts.1 == counts.0)
    }
    unsafe fn copy(
        &self,
        direction: CopyDirection,
        to: u64,
        from: u64,
        bytes: usize,
        stream: Handle,
    ) -> DriverResult<()> {
        // SAFETY: the caller's promise holds until the stream has done it.
        self.later(stream, move |inner, at_once| unsafe { inner.copy(direction, to, from, bytes, at_once) });
        Ok(())
    }
    unsafe fn fill(&self, at: Address, byte: u8, bytes: usize, stream: Handle) -> DriverResult<()> {
        // SAFETY: as above.
        self.later(stream, move |inner, at_once| unsafe { inner.fill(at, byte, bytes, at_once) });
        Ok(())
    }
    fn compiler(&self) -> Result<String, String> {
        self.inner.compiler()
    }
    fn compile(&self, program: &KernelProgram) -> Result<Vec<u8>, String> {
        self.inner.compile(program)
    }
    fn load(&self, name: &str, image: &[u8]) -> DriverResult<Handle> {
        self.inner.load(name, image)
    }
    fn function(&self, module: Handle, name: &str) -> DriverResult<Handle> {
        self.inner.function(module, name)
    }
    fn parameters(&self, function: Handle) -> Option<Vec<usize>> {
        self.inner.parameters(function)
    }
    unsafe fn launch(
        &self,
        function: Handle,
        grid: Grid,
        arguments: &mut [*mut c_void],
        stream: Handle,
    ) -> DriverResult<()> {
        let sizes = self.inner.parameters(function).expect("the shim can tell");
        let mut values: Vec<Vec<u64>> = Vec::new();
        for (&argument, &size) in arguments.iter().zip(&sizes) {
            let mut value = vec![0u64; size.div_ceil(8)];
            // SAFETY: the argument has this size, by the caller's promise.
            unsafe {
                std::ptr::copy_nonoverlapping(argument.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), size)
            };
            values.push(value);
        }
        self.later(stream, move |inner, at_once| {
            let mut pointers: Vec<*mut c_void> =
                values.iter_mut().map(|v| v.as_mut_ptr().cast::<c_void>()).collect();
            // SAFETY: the same arguments; the memory that they point to is allocated until the stream has done this.
            unsafe { inner.launch(function, grid, &mut pointers, at_once) }
        });
        Ok(())
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

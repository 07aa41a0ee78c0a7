//! What a CUDA device must offer, and nothing more: memory, streams, events, modules and launches.
//!
//! The driver proper is the NVIDIA library's (feature `cuda`). Tests bring another, which compiles the same sources for
//! the CPU and runs them there, so that everything above this trait is exercised on a machine without a GPU.

use std::ffi::c_void;
use std::fmt;

use super::blas::Blas;
use super::handle::{Address, DriverResult, Handle};

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Its name.
    pub name: String,
    /// The compiler that makes its images, with its version: images of another are made anew.
    pub compiler: String,
    /// The compute capability, e.g. (9, 0).
    pub capability: (u32, u32),
    /// The number of multiprocessors.
    pub multiprocessors: u32,
    /// The most dynamic shared memory a block may have, in bytes.
    pub shared_bytes: usize,
    /// All of its memory, in bytes.
    pub total_bytes: usize,
}

/// A source to compile: what the crate embeds.
#[derive(Clone, Copy, Debug)]
pub struct KernelProgram<'a> {
    /// The file's name without its ending, e.g. `softmax`.
    pub name: &'a str,
    /// Its text.
    pub source: &'a str,
    /// The headers it may include, by name.
    pub headers: &'a [(&'a str, &'a str)],
    /// The compiler's options.
    pub options: &'a [&'a str],
}

/// A launch's extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y, z.
    pub blocks: [u32; 3],
    /// Threads of a block in x, y, z.
    pub threads: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

/// What stands on either side of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From pinned host memory to the device.
    ToDevice,
    /// From the device to pinned host memory.
    ToHost,
    /// Within the device.
    Within,
}

/// One device's driver. All calls may come from any thread; work on a stream runs in the order it was put there.
///
/// # Safety
/// An implementation hands out memory that is there, and does with it what the calls say.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// What the device is.
    fn properties(&self) -> &DeviceProperties;
    /// Makes the device the calling thread's. Called once by each thread before anything else.
    fn bind(&self) -> DriverResult<()>;
    /// (free, total) bytes of the device's memory.
    fn memory(&self) -> DriverResult<(usize, usize)>;
    /// A block of device memory, aligned to 256 bytes.
    fn alloc(&self, bytes: usize) -> DriverResult<Address>;
    /// Gives a block back. Waits for the device where the driver does.
    ///
    /// # Safety
    /// The block came from [`Driver::alloc`], and nothing uses it afterwards.
    unsafe fn free(&self, block: Address) -> DriverResult<()>;
    /// A block of pinned host memory, aligned to 256 bytes.
    fn alloc_host(&self, bytes: usize) -> DriverResult<*mut u8>;
    /// Gives one back.
    ///
    /// # Safety
    /// As [`Driver::free`].
    unsafe fn free_host(&self, block: *mut u8) -> DriverResult<()>;
    /// A new stream, which waits for no other.
    fn stream(&self) -> DriverResult<Handle>;
    /// Gives a stream back; what is on it still runs.
    fn drop_stream(&self, stream: Handle);
    /// Waits until all on the stream is done.
    fn synchronize(&self, stream: Handle) -> DriverResult<()>;
    /// A new event, recorded nowhere.
    fn event(&self) -> DriverResult<Handle>;
    /// Gives an event back.
    fn drop_event(&self, event: Handle);
    /// Puts an event on a stream: it happens when all before it is done.
    fn record(&self, event: Handle, stream: Handle) -> DriverResult<()>;
    /// What is put on the stream from now on waits for the event's last recording.
    fn wait(&self, stream: Handle, event: Handle) -> DriverResult<()>;
    /// True once the event has happened.
    fn is_done(&self, event: Handle) -> DriverResult<bool>;
    /// Copies bytes, on a stream.
    ///
    /// # Safety
    /// Both ranges are allocated until the copy is done.
    unsafe fn copy(
        &self,
        direction: CopyDirection,
        to: u64,
        from: u64,
        bytes: usize,
        stream: Handle,
    ) -> DriverResult<()>;
    /// Sets bytes, on a stream.
    ///
    /// # Safety
    /// The range is allocated until it is done.
    unsafe fn fill(&self, at: Address, byte: u8, bytes: usize, stream: Handle) -> DriverResult<()>;
    /// Compiles a source for this device: an image that [`Driver::load`] takes. On failure the compiler's log.
    fn compile(&self, program: &KernelProgram) -> std::result::Result<Vec<u8>, String>;
    /// Loads an image.
    fn load(&self, name: &str, image: &[u8]) -> DriverResult<Handle>;
    /// Finds an entry of a module, which may then use as much dynamic shared memory as the device has.
    fn function(&self, module: Handle, name: &str) -> DriverResult<Handle>;
    /// The sizes of an entry's parameters in bytes, where the driver can tell.
    fn parameters(&self, function: Handle) -> Option<Vec<usize>>;
    /// Starts a kernel on a stream.
    ///
    /// # Safety
    /// `arguments` are as many and as large as the entry's parameters, and what they point to is allocated until the
    /// kernel is done.
    unsafe fn launch(
        &self,
        function: Handle,
        grid: Grid,
        arguments: &mut [*mut c_void],
        stream: Handle,
    ) -> DriverResult<()>;
    /// The vendor's library of matrix products, if it is there.
    fn blas(&self) -> Option<&dyn Blas> {
        None
    }
}

//! The interface to a CUDA device: memory, streams, events, modules and launches.
//!
//! NVIDIA's library implements it (feature `cuda`). Tests bring another implementation, which compiles the same
//! sources for the CPU and runs them there, so that everything above this trait is tested on a machine without a GPU.

use std::ffi::c_void;
use std::fmt;

use super::blas::Blas;
use super::handle::{Address, DriverResult, Handle};

/// The name and limits of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// The device's name.
    pub name: String,
    /// The compute capability, e.g. (9, 0).
    pub capability: (u32, u32),
    /// The number of multiprocessors.
    pub multiprocessors: u32,
    /// The largest dynamic shared memory of a block, in bytes.
    pub shared_bytes: usize,
    /// The device's memory, in bytes.
    pub total_bytes: usize,
}

/// A kernel source with all that a compiler needs.
#[derive(Clone, Copy, Debug)]
pub struct KernelProgram<'a> {
    /// The file's name without its ending, e.g. `softmax`.
    pub name: &'a str,
    /// The source text.
    pub source: &'a str,
    /// The headers that the source may include, by name.
    pub headers: &'a [(&'a str, &'a str)],
    /// The compiler's options.
    pub options: &'a [&'a str],
}

/// The extents of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// The blocks in x, y and z.
    pub blocks: [u32; 3],
    /// The threads of a block in x, y and z.
    pub threads: [u32; 3],
    /// The dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

/// The source and the target of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From pinned host memory to the device.
    ToDevice,
    /// From the device to pinned host memory.
    ToHost,
    /// Within the device.
    Within,
}

/// One device's driver. Any thread may call it. Work on a stream runs in the order in which it was put there.
///
/// # Safety
/// An implementation returns memory that is allocated, and does with it only what its methods document.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// Returns the device's name and limits.
    fn properties(&self) -> &DeviceProperties;
    /// Makes the device current on the calling thread. Each thread calls this once, before any other method.
    fn bind(&self) -> DriverResult<()>;
    /// Returns the (free, total) bytes of the device's memory.
    fn memory(&self) -> DriverResult<(usize, usize)>;
    /// Allocates device memory, aligned to 256 bytes.
    fn alloc(&self, bytes: usize) -> DriverResult<Address>;
    /// Frees device memory. May wait for the device.
    ///
    /// # Safety
    /// The block came from [`Driver::alloc`], and nothing uses it afterwards.
    unsafe fn free(&self, block: Address) -> DriverResult<()>;
    /// Allocates pinned host memory, aligned to 256 bytes.
    fn alloc_host(&self, bytes: usize) -> DriverResult<*mut u8>;
    /// Frees pinned host memory.
    ///
    /// # Safety
    /// As [`Driver::free`].
    unsafe fn free_host(&self, block: *mut u8) -> DriverResult<()>;
    /// Creates a stream that waits for no other stream.
    fn stream(&self) -> DriverResult<Handle>;
    /// Destroys a stream. Work that is on it still runs.
    fn drop_stream(&self, stream: Handle);
    /// Waits until all work on the stream is done.
    fn synchronize(&self, stream: Handle) -> DriverResult<()>;
    /// Creates an event that is not recorded yet.
    fn event(&self) -> DriverResult<Handle>;
    /// Destroys an event.
    fn drop_event(&self, event: Handle);
    /// Records an event on a stream: the event happens when all earlier work of the stream is done.
    fn record(&self, event: Handle, stream: Handle) -> DriverResult<()>;
    /// Makes later work on the stream wait for the event's last recording.
    fn wait(&self, stream: Handle, event: Handle) -> DriverResult<()>;
    /// Returns true once the event has happened.
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
    /// Returns the name and version of the compiler that [`Driver::compile`] calls, or the reason for which there is
    /// none. The cache keeps the images of each compiler apart. It is asked at the first kernel without a packed image.
    fn compiler(&self) -> std::result::Result<String, String>;
    /// Compiles a source for this device and returns the image that [`Driver::load`] takes, or the compiler's log if
    /// it fails.
    fn compile(&self, program: &KernelProgram) -> std::result::Result<Vec<u8>, String>;
    /// Loads an image as a module.
    fn load(&self, name: &str, image: &[u8]) -> DriverResult<Handle>;
    /// Returns an entry of a module, which may then use all of the device's dynamic shared memory.
    fn function(&self, module: Handle, name: &str) -> DriverResult<Handle>;
    /// Returns the sizes of an entry's parameters in bytes, if the driver can tell them.
    fn parameters(&self, function: Handle) -> Option<Vec<usize>>;
    /// Starts a kernel on a stream.
    ///
    /// # Safety
    /// `arguments` match the entry's parameters in number and size, and all memory that they point to stays allocated
    /// until the kernel is done.
    unsafe fn launch(
        &self,
        function: Handle,
        grid: Grid,
        arguments: &mut [*mut c_void],
        stream: Handle,
    ) -> DriverResult<()>;
    /// Returns the vendor's library of matrix products, if it is installed.
    fn blas(&self) -> Option<&dyn Blas> {
        None
    }
}

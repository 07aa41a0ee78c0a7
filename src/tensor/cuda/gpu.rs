//! A thread's handle of a device.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustc_hash::FxHashMap;

use crate::base::lock;
use crate::error::{Error, MemoryFault, Result};
use crate::tensor::cuda_device::devices;
use crate::tensor::cuda_device::driver::DeviceProperties;
use crate::tensor::cuda_device::handle::{DriverResult, Handle};
use crate::tensor::cuda_device::memory::{DeviceMemoryStats, StreamBlock};
use crate::tensor::cuda_device::sources::KernelSource;
use crate::tensor::cuda_device::stream::{DeviceBlock, DeviceStream};
use crate::tensor::result_places::take_place;
use crate::tensor::storage::Buffer;
use crate::tensor::{DType, Device, Shape, Tensor};

/// The calling thread's handle of a device: its stream, and the kernels that it has used. Clones share both. A handle
/// cannot leave its thread.
///
/// ```
/// use isoshard::tensor::{DType, cuda::{self, Gpu}};
///
/// if cuda::is_available() {
///     let gpu = Gpu::get(0)?;
///     let x = gpu.zeros(DType::F32, [2, 3])?;
///     gpu.synchronize()?;
///     assert_eq!((x.device(), x.to_vec::<f32>()?), (gpu.device(), vec![0.0; 6]));
/// }
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone)]
pub struct Gpu(pub(super) Rc<GpuState>);

pub(super) struct GpuState {
    stream: Arc<DeviceStream>,
    pub(super) kernels: RefCell<FxHashMap<EntryKey, Rc<KernelEntry>>>,
}

/// The file, stem and dtype of an entry.
type EntryKey = (&'static str, &'static str, DType);

/// An entry of a module, ready to be launched.
pub(super) struct KernelEntry {
    pub source: KernelSource,
    pub name: String,
    pub function: Handle,
    pub parameters: Option<Vec<usize>>,
}

impl Gpu {
    /// Returns this thread's handle of the device of this number. The first call opens the device and creates the
    /// stream.
    ///
    /// # Errors
    /// Returns an error if there is no such device, with the reason, or if the driver fails.
    ///
    /// ```
    /// use isoshard::tensor::cuda::{self, Gpu};
    ///
    /// match Gpu::get(0) {
    ///     Ok(gpu) => println!("{} multiprocessors", gpu.multiprocessors()),
    ///     Err(e) => assert!(!cuda::is_available() && e.to_string().contains("there is no such device")),
    /// }
    /// ```
    pub fn get(index: usize) -> Result<Gpu> {
        thread_local!(static HERE: RefCell<FxHashMap<usize, Gpu>> = RefCell::default());
        if let Some(gpu) = HERE.with_borrow(|here| here.get(&index).cloned()) {
            return Ok(gpu);
        }
        let device = devices::open(index)?;
        let stream = DeviceStream::new(device)?;
        stream.device.register_pool(&stream.pool);
        let gpu = Gpu(Rc::new(GpuState { stream, kernels: RefCell::default() }));
        HERE.with_borrow_mut(|here| here.insert(index, gpu.clone()));
        Ok(gpu)
    }

    /// Returns this thread's handle of the device that holds `x`.
    ///
    /// # Errors
    /// Refuses a tensor that is on no CUDA device.
    ///
    /// ```
    /// use isoshard::tensor::{DType, Tensor, cuda::Gpu};
    ///
    /// let x = Tensor::zeros(DType::F32, [2]);
    /// assert!(Gpu::of(&x).is_err());
    /// ```
    pub fn of(x: &Tensor) -> Result<Gpu> {
        match x.device() {
            Device::Cuda(index) => Gpu::get(index),
            Device::Cpu | Device::Meta => {
                Err(Error::invalid("cuda", "the tensor is on no CUDA device", x.notation(), ""))
            }
        }
    }

    /// Returns the device's number.
    pub(crate) fn index(&self) -> usize {
        self.stream().device.index
    }

    /// Returns the device.
    pub fn device(&self) -> Device {
        Device::Cuda(self.index())
    }

    /// Returns the number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.properties().multiprocessors
    }

    /// Returns the dynamic shared memory of a block, in bytes, less the static memory that row kernels declare.
    pub(super) fn shared_bytes(&self) -> usize {
        const THEIR_OWN: usize = 4 << 10;
        self.properties().shared_bytes.saturating_sub(THEIR_OWN)
    }

    /// Waits until the device has done all work of this thread.
    ///
    /// # Errors
    /// Returns the fault that a kernel has reported, or the driver's failure.
    pub fn synchronize(&self) -> Result<()> {
        self.stream().synchronize("synchronize")
    }

    /// Allocates a contiguous tensor with arbitrary contents (bools are false), for a kernel to overwrite.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`] if memory does not suffice after all that was kept for reuse went back to the
    /// driver.
    pub fn uninit(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        let mut out = self.uninit_bools(dtype, shape.into())?;
        if dtype == DType::Bool {
            self.fill_bytes(&mut out, 0)?;
        }
        Ok(out)
    }

    /// Allocates as [`Gpu::uninit`] does, but leaves bools without a valid value until a kernel has written every
    /// element.
    pub(super) fn uninit_bools(&self, dtype: DType, shape: Shape) -> Result<Tensor> {
        if let Some(place) = take_place(Device::Cuda(self.index()), dtype, &shape) {
            return Ok(Tensor::in_place(place, dtype, shape));
        }
        let bytes = shape.checked_bytes("tensor", dtype)?;
        let block = self.block(bytes).map_err(|e| match e.out_of_memory {
            true => self.memory_fault(dtype, &shape, bytes),
            false => self.stream().device.error("alloc", &e),
        })?;
        let buffer = Buffer::on_device(DeviceBlock::new(self.stream().clone(), block), bytes);
        Ok(Tensor::from_buffer(buffer, dtype, shape))
    }

    /// Allocates a contiguous tensor of zeros (false).
    ///
    /// # Errors
    /// Returns the errors of [`Gpu::uninit`].
    pub fn zeros(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        let mut out = self.uninit(dtype, shape)?;
        self.fill_bytes(&mut out, 0)?;
        Ok(out)
    }

    /// Returns the device's properties, as the driver gives them.
    pub(crate) fn properties(&self) -> &DeviceProperties {
        self.stream().device.driver.properties()
    }

    pub(super) fn stream(&self) -> &Arc<DeviceStream> {
        &self.0.stream
    }

    fn fill_bytes(&self, x: &mut Tensor, byte: u8) -> Result<()> {
        let (stream, bytes) = (self.stream(), x.len_bytes());
        let Some(at) = x.device_address().filter(|_| bytes > 0) else { return Ok(()) };
        // SAFETY: the tensor has as many bytes, and its block is kept in stream order.
        let done = unsafe { stream.device.driver.fill(at, byte, bytes, stream.handle) };
        stream.note_work();
        done.map_err(|e| stream.device.error("fill", &e))
    }

    fn block(&self, bytes: usize) -> DriverResult<StreamBlock> {
        let stream = self.stream();
        let (device, driver) = (&stream.device, &stream.device.driver);
        let mut pool = lock(&stream.pool);
        let mut taken = pool.take(&device.memory(), bytes);
        if taken.as_ref().is_err_and(|e| e.out_of_memory) {
            pool.clear(&device.memory());
            drop(pool);
            device.clear_pools();
            taken = lock(&stream.pool).take(&device.memory(), bytes);
        }
        let mut block = taken?;
        for event in block.pending.drain(..) {
            let waits = driver.wait(stream.handle, event);
            driver.drop_event(event);
            // Another stream that writes to the block has to wait for these events as well.
            stream.note_work();
            waits?;
        }
        Ok(block)
    }

    fn memory_fault(&self, dtype: DType, shape: &Shape, bytes: usize) -> Error {
        let stats = self.stream().device.counters.stats();
        Error::OutOfMemory(Box::new(MemoryFault {
            device: self.device().to_string(),
            wanted: format!("{dtype}{shape}"),
            wanted_bytes: bytes,
            live_bytes: stats.live_bytes,
            kept_bytes: stats.reserved_bytes.saturating_sub(stats.live_bytes),
            limit_bytes: stats.limit_bytes,
        }))
    }
}

impl DeviceBlock {
    /// Returns true on the thread whose stream owns the block: only its kernels may write to the block.
    pub(crate) fn is_on_own_thread(&self) -> bool {
        Gpu::get(self.owner().device.index).is_ok_and(|gpu| Arc::ptr_eq(gpu.stream(), self.owner()))
    }
}

/// Returns the live and reserved bytes of a device, with their peaks, over all threads of this process.
///
/// # Errors
/// Returns an error if there is no such device.
///
/// ```
/// use isoshard::tensor::{DType, cuda};
///
/// if cuda::is_available() {
///     let _x = cuda::Gpu::get(0)?.zeros(DType::F32, [1024])?;
///     assert!(cuda::memory_stats(0)?.live_bytes >= 4096);
/// }
/// # Ok::<(), isoshard::Error>(())
/// ```
pub fn memory_stats(index: usize) -> Result<DeviceMemoryStats> {
    Ok(devices::open(index)?.counters.stats())
}

/// Resets the peaks of [`memory_stats`] to the bytes that are live and reserved now.
///
/// # Errors
/// Returns an error if there is no such device.
///
/// ```
/// use isoshard::tensor::cuda;
///
/// if cuda::is_available() {
///     cuda::reset_memory_peaks(0)?;
///     let stats = cuda::memory_stats(0)?;
///     assert!(stats.peak_live_bytes >= stats.live_bytes);
/// }
/// # Ok::<(), isoshard::Error>(())
/// ```
pub fn reset_memory_peaks(index: usize) -> Result<()> {
    devices::open(index)?.counters.reset_peaks();
    Ok(())
}

/// Limits the bytes that this process reserves from the device's driver. Memory that is kept for reuse beyond the
/// limit is given back.
///
/// # Errors
/// Returns an error if there is no such device.
///
/// ```
/// use isoshard::tensor::cuda;
///
/// if cuda::is_available() {
///     cuda::set_memory_limit(0, 4 << 30)?;
///     assert_eq!(cuda::memory_stats(0)?.limit_bytes, 4 << 30);
/// }
/// # Ok::<(), isoshard::Error>(())
/// ```
pub fn set_memory_limit(index: usize, bytes: usize) -> Result<()> {
    let device = devices::open(index)?;
    device.counters.set_limit(bytes);
    if device.counters.stats().reserved_bytes > bytes {
        device.clear_pools();
    }
    Ok(())
}

static CHECKED: AtomicBool = AtomicBool::new(cfg!(debug_assertions));

/// Makes every launch of this process wait for its kernel, so that a kernel that fails is named. Costs all overlap of
/// host and device. On by default in builds with debug assertions.
///
/// ```
/// isoshard::tensor::cuda::set_checked(false);
/// ```
pub fn set_checked(checked: bool) {
    CHECKED.store(checked, Ordering::Relaxed);
}

pub(super) fn is_checked() -> bool {
    CHECKED.load(Ordering::Relaxed)
}

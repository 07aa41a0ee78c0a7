//! The calling thread's end of a device.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustc_hash::FxHashMap;

use super::device;
use super::driver::DeviceProperties;
use super::handle::{DriverResult, Handle};
use super::lock::lock;
use super::memory::{Block, MemoryStats};
use super::stream::{DeviceBlock, Stream};
use crate::error::{Error, MemoryFault, Result};
use crate::tensor::storage::Buffer;
use crate::tensor::{DType, Device, Shape, Tensor};

/// The calling thread's end of a device: its stream and the kernels it has used. Cloning shares it; it stays on its thread.
#[derive(Clone)]
pub struct Gpu(pub(super) Rc<Inner>);

pub(super) struct Inner {
    stream: Arc<Stream>,
    pub(super) kernels: RefCell<FxHashMap<Entry, Rc<Kernel>>>,
}

/// File, stem and dtype.
type Entry = (&'static str, &'static str, DType);

/// An entry of a module.
pub(super) struct Kernel {
    pub name: String,
    pub function: Handle,
    pub parameters: Option<Vec<usize>>,
}

impl Gpu {
    /// This thread's end of the device of this number; the first call opens the device and makes the stream.
    ///
    /// # Errors
    /// A device that is not there, by the reason; the driver's failures.
    pub fn get(index: usize) -> Result<Gpu> {
        thread_local!(static HERE: RefCell<FxHashMap<usize, Gpu>> = RefCell::default());
        if let Some(gpu) = HERE.with_borrow(|here| here.get(&index).cloned()) {
            return Ok(gpu);
        }
        let device = device::open(index)?;
        let stream = Stream::new(device)?;
        stream.device.know(&stream.pool);
        let gpu = Gpu(Rc::new(Inner { stream, kernels: RefCell::default() }));
        HERE.with_borrow_mut(|here| here.insert(index, gpu.clone()));
        Ok(gpu)
    }

    /// This thread's end of the device that holds `x`.
    ///
    /// # Errors
    /// Refuses a tensor that lies on none.
    pub fn of(x: &Tensor) -> Result<Gpu> {
        match x.device() {
            Device::Cuda(index) => Gpu::get(index),
            Device::Cpu | Device::Meta => {
                Err(Error::invalid("cuda", "the tensor lies on no CUDA device", x.to_string(), ""))
            }
        }
    }

    /// The device's number.
    pub fn index(&self) -> usize {
        self.stream().device.index
    }

    /// The device.
    pub fn device(&self) -> Device {
        Device::Cuda(self.index())
    }

    /// The number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.properties().multiprocessors
    }

    /// The dynamic shared memory of a block, in bytes, beside what kernels of rows have for themselves.
    pub(super) fn shared_bytes(&self) -> usize {
        const THEIR_OWN: usize = 4 << 10;
        self.properties().shared_bytes.saturating_sub(THEIR_OWN)
    }

    /// Waits until all that this thread has put on the device is done.
    ///
    /// # Errors
    /// What a kernel has reported, and the driver's failures.
    pub fn synchronize(&self) -> Result<()> {
        self.stream().synchronize("synchronize")
    }

    /// A new contiguous tensor with arbitrary contents (of bools: false), to be overwritten.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], after everything kept for reuse was given back.
    pub fn uninit(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        let mut out = self.unset(dtype, shape.into())?;
        if dtype == DType::Bool {
            self.fill_bytes(&mut out, 0)?;
        }
        Ok(out)
    }

    /// As [`Gpu::uninit`], where bools may be none until a kernel has written every element.
    pub(super) fn unset(&self, dtype: DType, shape: Shape) -> Result<Tensor> {
        let numel = shape.checked_numel("tensor")?;
        let bytes = numel.checked_mul(dtype.size_bytes()).filter(|&n| n <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| {
            Error::invalid("tensor", "no memory has addresses for it", format!("{dtype}{shape}"), "")
        })?;
        let block = self.block(bytes).map_err(|e| match e.out_of_memory {
            true => self.memory_fault(dtype, &shape, bytes),
            false => self.stream().device.error("alloc", &e),
        })?;
        let buffer = Buffer::on_device(DeviceBlock::new(self.stream().clone(), block), bytes);
        Ok(Tensor::from_buffer(buffer, dtype, shape))
    }

    /// A new contiguous tensor of zeros (false).
    ///
    /// # Errors
    /// As [`Gpu::uninit`].
    pub fn zeros(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        let mut out = self.uninit(dtype, shape)?;
        self.fill_bytes(&mut out, 0)?;
        Ok(out)
    }

    /// The device's properties, as the driver gives them.
    pub(crate) fn properties(&self) -> &DeviceProperties {
        self.stream().device.driver.properties()
    }

    pub(super) fn stream(&self) -> &Arc<Stream> {
        &self.0.stream
    }

    fn fill_bytes(&self, x: &mut Tensor, byte: u8) -> Result<()> {
        let (stream, bytes) = (self.stream(), x.len_bytes());
        let Some(at) = x.device_address().filter(|_| bytes > 0) else { return Ok(()) };
        // SAFETY: the tensor is as large, and its block is kept in stream order.
        let done = unsafe { stream.device.driver.fill(at, byte, bytes, stream.handle) };
        stream.worked();
        done.map_err(|e| stream.device.error("fill", &e))
    }

    fn block(&self, bytes: usize) -> DriverResult<Block> {
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
            // Whoever writes to the block on another stream has to wait as well.
            stream.worked();
            waits?;
        }
        Ok(block)
    }

    fn memory_fault(&self, dtype: DType, shape: &Shape, bytes: usize) -> Error {
        let stats = self.stream().device.ledger.stats();
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
    /// True on the thread whose stream the block belongs to: its kernels may write there.
    pub(crate) fn is_at_home(&self) -> bool {
        Gpu::get(self.home().device.index).is_ok_and(|gpu| Arc::ptr_eq(gpu.stream(), self.home()))
    }
}

/// What the device's memory holds.
///
/// # Errors
/// A device that is not there.
pub fn memory_stats(index: usize) -> Result<MemoryStats> {
    Ok(device::open(index)?.ledger.stats())
}

/// Counts the peaks of [`memory_stats`] from what the device's memory holds now.
///
/// # Errors
/// A device that is not there.
pub fn reset_memory_peaks(index: usize) -> Result<()> {
    device::open(index)?.ledger.reset_peaks();
    Ok(())
}

/// Sets what may be taken from the device's driver at most, in bytes. What is kept for reuse beyond it is given back.
///
/// # Errors
/// A device that is not there.
pub fn set_memory_limit(index: usize, bytes: usize) -> Result<()> {
    let device = device::open(index)?;
    device.ledger.set_limit(bytes);
    if device.ledger.stats().reserved_bytes > bytes {
        device.clear_pools();
    }
    Ok(())
}

static CHECKED: AtomicBool = AtomicBool::new(cfg!(debug_assertions));

/// Has every launch of this process wait for its kernel and name it where it fails, which costs all overlap. On from the
/// beginning where debug assertions are.
pub fn set_checked(checked: bool) {
    CHECKED.store(checked, Ordering::Relaxed);
}

pub(super) fn is_checked() -> bool {
    CHECKED.load(Ordering::Relaxed)
}

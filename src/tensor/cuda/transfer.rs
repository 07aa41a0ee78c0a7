//! Copies between host and device, through the stream's pinned buffers.

use std::sync::Arc;

use super::gpu::Gpu;
use crate::base::lock;
use crate::error::Result;
use crate::tensor::cuda_device::driver::CopyDirection;
use crate::tensor::cuda_device::stream::DeviceStream;
use crate::tensor::{DType, Tensor};

/// The most bytes that one buffer takes.
const PIECE_BYTES: usize = 32 << 20;

/// Copies a contiguous CPU tensor to the device.
///
/// # Errors
/// Returns an error if the device is out of memory or the driver fails.
pub(crate) fn upload(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let mut out = gpu.uninit(x.dtype(), x.shape().clone())?;
    let at = out.device_address().expect("made on a device");
    // SAFETY: the tensor is fresh and has as many bytes, and its block is kept in stream order.
    unsafe { to_device(gpu.stream(), at, x.as_bytes()?) }?;
    debug_assert!(out.is_unique());
    Ok(out)
}

/// Copies a contiguous device tensor to the CPU, and waits for the device.
///
/// # Errors
/// Returns the fault that a kernel has reported, or the driver's failure.
pub(crate) fn download(x: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(x)?;
    let mut out = Tensor::uninit(x.dtype(), x.shape().clone());
    let block = x.device_block().expect("on a device");
    block.read_by(gpu.stream()).map_err(|e| gpu.stream().device.error("to_host", &e))?;
    // SAFETY: the block of `x` holds the bytes, and `x` outlives the call.
    unsafe { to_host(gpu.stream(), out.bytes_mut(), x.device_address().expect("on a device")) }?;
    if x.dtype() == DType::Bool {
        // A program's own kernel may have written any byte, and Rust knows two bools.
        out.bytes_mut().iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
    }
    Ok(out)
}

/// Copies `from` to the device address `to`, in stream order. `from` may change as soon as this returns.
///
/// # Safety
/// `to` has room for the bytes until the stream has done the copy.
unsafe fn to_device(stream: &Arc<DeviceStream>, to: u64, from: &[u8]) -> Result<()> {
    let device = &stream.device;
    let fail = |e| device.error("to_device", &e);
    for (k, piece) in from.chunks(PIECE_BYTES).enumerate() {
        let (host, size) = lock(&stream.pinned).take(&*device.driver, piece.len()).map_err(fail)?;
        // SAFETY: the buffer holds at least the piece, and nothing else uses it.
        unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), host, piece.len()) };
        let at = to + (k * PIECE_BYTES) as u64;
        // SAFETY: the caller's promise for the device memory; the buffer is kept until the event.
        let copied = unsafe {
            device.driver.copy(CopyDirection::ToDevice, at, host as u64, piece.len(), stream.handle)
        };
        stream.note_work();
        // Waits here for a copy that no event follows.
        let event = copied.and_then(|()| device.mark(stream.handle));
        if event.is_err() {
            let _ = device.driver.synchronize(stream.handle);
        }
        let mut pinned = lock(&stream.pinned);
        pinned.put(host, size, event.as_ref().ok().copied());
        event.map_err(fail)?;
        pinned.trim(&*device.driver);
    }
    Ok(())
}

/// Copies from the device address `from`, and waits until the copy is done.
///
/// # Safety
/// `from` holds the bytes until this returns.
unsafe fn to_host(stream: &Arc<DeviceStream>, to: &mut [u8], from: u64) -> Result<()> {
    let device = &stream.device;
    let fail = |e| device.error("to_host", &e);
    for (k, piece) in to.chunks_mut(PIECE_BYTES).enumerate() {
        let (host, size) = lock(&stream.pinned).take(&*device.driver, piece.len()).map_err(fail)?;
        let at = from + (k * PIECE_BYTES) as u64;
        // SAFETY: the caller's promise for the device memory; the buffer is put back after the stream is done.
        let copied =
            unsafe { device.driver.copy(CopyDirection::ToHost, host as u64, at, piece.len(), stream.handle) };
        let done = copied.map_err(fail).and_then(|()| stream.synchronize("to_host"));
        if done.is_ok() {
            // SAFETY: the buffer holds the piece, and the copy into it is done.
            unsafe { std::ptr::copy_nonoverlapping(host, piece.as_mut_ptr(), piece.len()) };
        }
        lock(&stream.pinned).put(host, size, None);
        done?;
    }
    lock(&stream.pinned).trim(&*device.driver);
    Ok(())
}

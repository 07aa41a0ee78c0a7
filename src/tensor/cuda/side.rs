//! Streams that belong to no thread, for transfers between threads that run while kernels do.

use std::sync::Arc;

use super::gpu::Gpu;
use crate::error::{Error, Result};
use crate::tensor::cuda_device::driver::Driver;
use crate::tensor::cuda_device::handle::{Address, DriverError, DriverResult, Handle};
use crate::tensor::cuda_device::stream::{DeviceStream, StreamPoison};
use crate::tensor::{Device, Tensor};

/// A stream that belongs to no thread. The tensors that it reads and writes stay allocated until it has done so.
#[derive(Clone, Debug)]
pub(crate) struct SideStream(Arc<DeviceStream>);

/// A recorded point in a side stream's work.
#[derive(Debug)]
pub(crate) struct StreamMark {
    event: Handle,
    stream: Arc<DeviceStream>,
}

impl SideStream {
    /// Creates a stream on the device of `gpu`.
    pub fn new(gpu: &Gpu) -> Result<SideStream> {
        Ok(SideStream(DeviceStream::new(gpu.stream().device.clone())?))
    }

    /// Returns the stream's name at its driver.
    pub fn handle(&self) -> Handle {
        self.0.handle
    }

    /// Returns the device's driver.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.0.device.driver
    }

    /// Makes later work here wait for all work that the calling thread has put on the device.
    pub fn wait_for_thread(&self, gpu: &Gpu) -> Result<()> {
        self.0.wait_for(gpu.stream()).map_err(|e| self.error("wait", &e))
    }

    /// Returns the address of a contiguous tensor of this device that this stream reads or writes next.
    pub fn use_tensor(&self, x: &Tensor) -> Result<Address> {
        let block = x.device_block().filter(|b| b.owner().device.index == self.0.device.index);
        let Some((block, at)) = block.zip(x.device_address()).filter(|_| x.is_contiguous()) else {
            let given =
                format!("{} on {}, the stream's device is {}", x.notation(), x.device(), self.device());
            return Err(Error::invalid("transfer", "the tensor is not contiguous on the device", given, ""));
        };
        block.read_by(&self.0).map_err(|e| self.error("wait", &e))?;
        Ok(at)
    }

    /// Records the point behind all work that was put here so far.
    pub fn mark(&self) -> Result<StreamMark> {
        self.0.note_work();
        let driver = self.driver();
        let event = driver.event().map_err(|e| self.error("event", &e))?;
        let mark = StreamMark { event, stream: self.0.clone() };
        driver.record(event, self.0.handle).map_err(|e| self.error("event", &e))?;
        Ok(mark)
    }

    fn device(&self) -> Device {
        self.0.device.name()
    }

    fn error(&self, verb: &str, error: &DriverError) -> Error {
        self.0.device.error(verb, error)
    }
}

impl StreamMark {
    /// Returns true once all work before the mark is done.
    pub fn is_done(&self) -> DriverResult<bool> {
        self.stream.device.driver.is_done(self.event)
    }

    /// Makes later work of the calling thread wait for the mark.
    pub fn make_thread_wait(&self, gpu: &Gpu) -> Result<()> {
        let stream = gpu.stream();
        let waits = self.stream.device.driver.wait(stream.handle, self.event);
        stream.note_work();
        waits.map_err(|e| self.stream.device.error("wait", &e))
    }
}

impl Drop for StreamMark {
    fn drop(&mut self) {
        self.stream.device.driver.drop_event(self.event);
    }
}

/// A thread's stream, kept by an engine that may have to poison its values.
#[derive(Clone, Debug)]
pub(crate) struct PoisonHandle(Arc<DeviceStream>);

impl PoisonHandle {
    pub fn of(gpu: &Gpu) -> PoisonHandle {
        PoisonHandle(gpu.stream().clone())
    }

    pub fn is_of(&self, gpu: &Gpu) -> bool {
        Arc::ptr_eq(&self.0, gpu.stream())
    }

    /// Makes reading a value of the stream return this error, or with `None` lets values be read again.
    pub fn poison(&self, why: Option<Arc<StreamPoison>>) {
        self.0.poison(why);
    }
}

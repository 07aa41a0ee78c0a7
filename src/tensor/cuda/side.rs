//! A second stream beside a thread's own, for what runs while its kernels do: transfers to other threads and processes.

use std::sync::Arc;

use super::driver::Driver;
use super::gpu::Gpu;
use super::handle::{Address, DriverError, DriverResult, Handle};
use super::stream::{Spoilt, Stream};
use crate::error::{Error, Result};
use crate::tensor::{Device, Tensor};

/// A stream on a device that belongs to no thread. What it reads and writes is kept until it has done so.
#[derive(Clone, Debug)]
pub(crate) struct Side(Arc<Stream>);

/// A point on a side stream.
#[derive(Debug)]
pub(crate) struct Mark {
    event: Handle,
    stream: Arc<Stream>,
}

impl Side {
    /// A new stream on the device of `gpu`.
    pub fn new(gpu: &Gpu) -> Result<Side> {
        Ok(Side(Stream::new(gpu.stream().device.clone())?))
    }

    /// The stream, as its driver names it.
    pub fn handle(&self) -> Handle {
        self.0.handle
    }

    /// The device's driver.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.0.device.driver
    }

    /// What is put here from now on waits for all that the calling thread has put on the device.
    pub fn follow(&self, gpu: &Gpu) -> Result<()> {
        self.0.wait_for(gpu.stream()).map_err(|e| self.error("wait", &e))
    }

    /// The first element of a contiguous tensor of this device that is read or written here next.
    pub fn uses(&self, x: &Tensor) -> Result<Address> {
        let block = x.device_block().filter(|b| b.home().device.index == self.0.device.index);
        let Some((block, at)) = block.zip(x.device_address()).filter(|_| x.is_contiguous()) else {
            let given =
                format!("{} on {}, the stream's device is {}", x.notation(), x.device(), self.device());
            return Err(Error::invalid("transfer", "the tensor is not contiguous on the device", given, ""));
        };
        block.read_by(&self.0).map_err(|e| self.error("wait", &e))?;
        Ok(at)
    }

    /// Notes what has been put here, so far.
    pub fn mark(&self) -> Result<Mark> {
        self.0.worked();
        let driver = self.driver();
        let event = driver.event().map_err(|e| self.error("event", &e))?;
        let mark = Mark { event, stream: self.0.clone() };
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

impl Mark {
    /// True once all before it is done.
    pub fn is_done(&self) -> DriverResult<bool> {
        self.stream.device.driver.is_done(self.event)
    }

    /// What the calling thread puts on the device from now on waits for the mark.
    pub fn hold(&self, gpu: &Gpu) -> Result<()> {
        let stream = gpu.stream();
        let waits = self.stream.device.driver.wait(stream.handle, self.event);
        stream.worked();
        waits.map_err(|e| self.stream.device.error("wait", &e))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.stream.device.driver.drop_event(self.event);
    }
}

/// A thread's stream, for whoever has to tell it that what lies on it is not to be read.
#[derive(Clone, Debug)]
pub(crate) struct Spoiler(Arc<Stream>);

impl Spoiler {
    pub fn of(gpu: &Gpu) -> Spoiler {
        Spoiler(gpu.stream().clone())
    }

    pub fn is_of(&self, gpu: &Gpu) -> bool {
        Arc::ptr_eq(&self.0, gpu.stream())
    }

    /// From now on reading a value gives an error, or none any more.
    pub fn spoil(&self, why: Option<Arc<Spoilt>>) {
        self.0.spoil(why);
    }
}

//! Streams: each runs one thread's work in program order, and owns the memory of the thread's tensors.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::devices::CudaDevice;
use super::driver::CopyDirection;
use super::fault::{self, FAULT_BYTES};
use super::handle::{Address, DriverResult, Handle};
use super::memory::{StreamBlock, StreamPool};
use super::pinned::Pinned;
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Result};
use crate::tensor::Device;

/// A thread's stream on a device. A tensor's memory returns to its stream when the tensor is dropped, on any thread,
/// and a stream lives as long as any of its tensors.
pub(crate) struct DeviceStream {
    pub(in crate::tensor) device: Arc<CudaDevice>,
    pub(in crate::tensor) handle: Handle,
    /// A number that is unique in this process.
    id: u64,
    /// The number of times that work was put on the stream.
    work: AtomicU64,
    /// By stream, the amount of its work that this stream waits for already.
    waited: Mutex<HashMap<u64, u64>>,
    /// Shared with the device, which clears it if memory is short.
    pub(in crate::tensor) pool: Arc<Mutex<StreamPool>>,
    pub(in crate::tensor) pinned: Mutex<Pinned>,
    /// The memory to which kernels report faults.
    pub(in crate::tensor) fault: StreamBlock,
    /// The error that reading a value of the stream returns, if a transfer into its memory was given up.
    poison_state: Mutex<Option<Arc<StreamPoison>>>,
}

impl DeviceStream {
    pub(in crate::tensor) fn new(device: Arc<CudaDevice>) -> Result<Arc<DeviceStream>> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let fail = |e| device.error("stream", &e);
        device.driver.bind().map_err(fail)?;
        let handle = device.driver.stream().map_err(fail)?;
        let mut stream = DeviceStream {
            handle,
            id: MADE.fetch_add(1, Ordering::Relaxed),
            work: AtomicU64::new(1),
            waited: Mutex::default(),
            pool: Arc::new(Mutex::new(StreamPool::of(handle))),
            pinned: Mutex::default(),
            fault: StreamBlock::none(),
            poison_state: Mutex::default(),
            device: device.clone(),
        };
        // An error from here on drops the stream, which frees everything.
        stream.fault = lock(&stream.pool).take(&device.memory(), FAULT_BYTES).map_err(fail)?;
        // SAFETY: the block was allocated just now, with this size.
        unsafe { device.driver.fill(stream.fault.at, 0, FAULT_BYTES, stream.handle) }.map_err(fail)?;
        Ok(Arc::new(stream))
    }

    /// Returns the stream's device.
    pub(crate) fn device(&self) -> Device {
        self.device.name()
    }

    /// Counts work that was put on this stream.
    pub(in crate::tensor) fn note_work(&self) {
        self.work.fetch_add(1, Ordering::Release);
    }

    /// Makes later work on this stream wait for all work that is on `other` now.
    pub(in crate::tensor) fn wait_for(&self, other: &DeviceStream) -> DriverResult<()> {
        if self.id == other.id {
            return Ok(());
        }
        let there = other.work.load(Ordering::Acquire);
        if lock(&self.waited).get(&other.id).is_some_and(|&seen| seen >= there) {
            return Ok(());
        }
        let driver = &self.device.driver;
        let event = self.device.mark(other.handle)?;
        let waits = driver.wait(self.handle, event);
        driver.drop_event(event);
        waits?;
        self.note_work();
        lock(&self.waited).insert(other.id, there);
        Ok(())
    }

    /// Makes reading a value of the stream return an error, or with `None` lets values be read again. A transfer that
    /// was given up leaves arbitrary values behind.
    pub(in crate::tensor) fn poison(&self, why: Option<Arc<StreamPoison>>) {
        *lock(&self.poison_state) = why;
    }

    /// Waits until all work on the stream is done, then returns the error that a kernel or a transfer has reported,
    /// if any.
    pub(in crate::tensor) fn synchronize(&self, verb: &str) -> Result<()> {
        let driver = &self.device.driver;
        let fail = |e| self.device.error(verb, &e);
        let (host, kept) = lock(&self.pinned).take(&**driver, FAULT_BYTES).map_err(fail)?;
        // SAFETY: both blocks hold the bytes and are kept until the stream is synchronised below.
        let copied = unsafe {
            driver.copy(CopyDirection::ToHost, host as u64, self.fault.at, FAULT_BYTES, self.handle)
        };
        let done = copied.and_then(|()| driver.synchronize(self.handle));
        let mut bytes = [0; FAULT_BYTES];
        if done.is_ok() {
            // SAFETY: the block holds the bytes, and the copy into it is done.
            unsafe { std::ptr::copy_nonoverlapping(host, bytes.as_mut_ptr(), FAULT_BYTES) };
        }
        lock(&self.pinned).put(host, kept, None);
        done.map_err(fail)?;
        if let Some(poison_state) = &*lock(&self.poison_state) {
            poison_state.reported.store(true, Ordering::Relaxed);
            return Err(poison_state.error.clone());
        }
        match fault::read(bytes) {
            None => Ok(()),
            Some(error) => {
                // SAFETY: the stream's own block.
                unsafe { driver.fill(self.fault.at, 0, FAULT_BYTES, self.handle) }.map_err(fail)?;
                Err(error)
            }
        }
    }

    /// Takes back a block. It is reused only after the work that the streams of `users` have for it now.
    fn take_back(&self, mut block: StreamBlock, users: &[Arc<DeviceStream>]) {
        let driver = &self.device.driver;
        for user in users {
            match self.device.mark(user.handle) {
                Ok(event) => block.pending.push(event),
                // Without an event, the user is waited for here; if that fails as well, the block is never reused.
                Err(_) if driver.synchronize(user.handle).is_ok() => {}
                Err(_) => return,
            }
        }
        lock(&self.pool).put(&self.device.memory(), block);
    }
}

impl Drop for DeviceStream {
    fn drop(&mut self) {
        let driver = &self.device.driver;
        // Work may still use the pinned buffers; the pool waits for the work that uses its blocks.
        let _ = driver.synchronize(self.handle);
        let fault = std::mem::replace(&mut self.fault, StreamBlock::none());
        let mut pool = lock(&self.pool);
        pool.put(&self.device.memory(), fault);
        pool.clear(&self.device.memory());
        drop(pool);
        unpoisoned(self.pinned.get_mut()).clear(&**driver);
        driver.drop_stream(self.handle);
    }
}

impl fmt::Debug for DeviceStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {} of {}", self.id, self.device.name())
    }
}

/// The error that reading a value returns once transfers into a stream's memory were given up.
#[derive(Debug)]
pub(crate) struct StreamPoison {
    pub error: Error,
    /// True once reading a value has returned the error.
    pub reported: AtomicBool,
}

/// A tensor's memory on a device.
#[derive(Debug)]
pub(crate) struct DeviceBlock {
    owner: Arc<DeviceStream>,
    block: StreamBlock,
    /// The other streams that have read the block.
    users: Mutex<Vec<Arc<DeviceStream>>>,
}

impl DeviceBlock {
    pub(in crate::tensor) fn new(owner: Arc<DeviceStream>, block: StreamBlock) -> DeviceBlock {
        DeviceBlock { owner, block, users: Mutex::default() }
    }

    pub(crate) fn address(&self) -> Address {
        self.block.at
    }

    pub(crate) fn owner(&self) -> &Arc<DeviceStream> {
        &self.owner
    }

    /// Makes later work of `reader` wait until the block is written, and counts `reader` among the block's users.
    pub(in crate::tensor) fn read_by(&self, reader: &Arc<DeviceStream>) -> DriverResult<()> {
        if Arc::ptr_eq(&self.owner, reader) {
            return Ok(());
        }
        reader.wait_for(&self.owner)?;
        let mut users = lock(&self.users);
        if !users.iter().any(|u| Arc::ptr_eq(u, reader)) {
            users.push(reader.clone());
        }
        Ok(())
    }

    /// Makes later work of the block's own stream wait for all users. Nothing else may hold the block any more.
    pub(in crate::tensor) fn write_by_owner(&self) -> DriverResult<()> {
        let users = std::mem::take(&mut *lock(&self.users));
        users.iter().try_for_each(|user| self.owner.wait_for(user))
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        let users = std::mem::take(unpoisoned(self.users.get_mut()));
        self.owner.take_back(std::mem::replace(&mut self.block, StreamBlock::none()), &users);
    }
}

//! The process's CUDA devices: each opened once, at its first use.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use super::driver::Driver;
use super::handle::{DriverError, DriverResult, Handle};
use super::lock::lock;
use super::memory::{DeviceMemory, MemoryCounters, StreamPool};
use crate::error::{Error, Result};
use crate::tensor::Device;

/// One device, shared by all threads that use it.
#[derive(Debug)]
pub(crate) struct CudaDevice {
    pub index: usize,
    pub driver: Arc<dyn Driver>,
    pub modules: Modules,
    pub counters: MemoryCounters,
    /// The memory that its streams keep for reuse.
    pools: Mutex<Vec<Weak<Mutex<StreamPool>>>>,
}

/// A device's modules by name, each loaded by whoever wants it first.
#[derive(Debug, Default)]
pub(crate) struct Modules(pub Mutex<HashMap<&'static str, Arc<OnceLock<Result<Handle>>>>>);

/// Makes `driver` the CUDA device of this number in this process. For tests, which bring a driver that needs no GPU.
///
/// # Errors
/// Refuses a number that is in use.
pub fn install(index: usize, driver: Arc<dyn Driver>) -> Result<()> {
    let mut devices = opened();
    if devices.contains_key(&index) {
        let given = Device::Cuda(index).to_string();
        return Err(Error::invalid(
            "install",
            "the device is in use",
            given,
            "install it before its first use",
        ));
    }
    devices.insert(index, CudaDevice::over(index, driver));
    Ok(())
}

/// The number of CUDA devices: those of NVIDIA's driver, or those that were installed; 0 where there is none.
pub fn devices_len() -> usize {
    let installed = opened().keys().max().map_or(0, |&most| most + 1);
    installed.max(found().as_ref().map_or(0, |&n| n))
}

/// True where there is a CUDA device.
pub fn is_available() -> bool {
    devices_len() > 0
}

/// Why there is none, in one line; none where there is one.
pub fn unavailable_reason() -> Option<String> {
    (devices_len() == 0).then(|| found().as_ref().err().cloned().unwrap_or_else(|| "no CUDA device".into()))
}

/// The device of this number, opened at its first use.
pub(super) fn open(index: usize) -> Result<Arc<CudaDevice>> {
    let mut devices = opened();
    if let Some(device) = devices.get(&index) {
        return Ok(device.clone());
    }
    let driver = driver_of(index).map_err(|reason| {
        let given = Device::Cuda(index).to_string();
        Error::unsupported("cuda", format!("there is no such device: {reason}"), given, "use Device::Cpu")
    })?;
    let device = CudaDevice::over(index, driver);
    devices.insert(index, device.clone());
    Ok(device)
}

impl CudaDevice {
    fn over(index: usize, driver: Arc<dyn Driver>) -> Arc<CudaDevice> {
        let (modules, counters) = (Modules::default(), MemoryCounters::new(driver.properties().total_bytes));
        Arc::new(CudaDevice { index, driver, modules, counters, pools: Mutex::default() })
    }

    /// The error that the driver's refusal is, while `verb` was done.
    pub fn error(&self, verb: impl Into<String>, error: &DriverError) -> Error {
        Error::Device { verb: verb.into(), device: self.name().to_string(), reason: error.to_string() }
    }

    /// Its memory, as pools take and give it.
    pub fn memory(&self) -> DeviceMemory<'_> {
        DeviceMemory { driver: &*self.driver, counters: &self.counters }
    }

    /// Counts a stream's pool among those that keep memory.
    pub fn register_pool(&self, pool: &Arc<Mutex<StreamPool>>) {
        let mut pools = lock(&self.pools);
        pools.retain(|s| s.strong_count() > 0);
        pools.push(Arc::downgrade(pool));
    }

    /// Gives back to the driver what any stream keeps for reuse.
    pub fn clear_pools(&self) {
        let pools: Vec<Arc<Mutex<StreamPool>>> = lock(&self.pools).iter().filter_map(Weak::upgrade).collect();
        for pool in pools {
            lock(&pool).clear(&self.memory());
        }
    }

    /// A new event at the end of what is on the stream now.
    pub fn mark(&self, stream: Handle) -> DriverResult<Handle> {
        let event = self.driver.event()?;
        match self.driver.record(event, stream) {
            Ok(()) => Ok(event),
            Err(e) => {
                self.driver.drop_event(event);
                Err(e)
            }
        }
    }

    pub fn name(&self) -> Device {
        Device::Cuda(self.index)
    }
}

type Devices = HashMap<usize, Arc<CudaDevice>>;

/// The devices that have been opened.
fn opened() -> MutexGuard<'static, Devices> {
    static DEVICES: OnceLock<Mutex<Devices>> = OnceLock::new();
    lock(DEVICES.get_or_init(Mutex::default))
}

/// How many devices NVIDIA's driver has, or why none; looked for once.
fn found() -> &'static Result<usize, String> {
    static FOUND: OnceLock<Result<usize, String>> = OnceLock::new();
    FOUND.get_or_init(count)
}

fn driver_of(index: usize) -> Result<Arc<dyn Driver>, String> {
    match found() {
        Ok(n) if index < *n => nvidia(index),
        Ok(n) => Err(format!("there are {n}")),
        Err(reason) => Err(reason.clone()),
    }
}

#[cfg(feature = "cuda")]
fn count() -> Result<usize, String> {
    super::nvidia::devices_len()
}

#[cfg(feature = "cuda")]
fn nvidia(index: usize) -> Result<Arc<dyn Driver>, String> {
    super::nvidia::open(index)
}

#[cfg(not(feature = "cuda"))]
fn count() -> Result<usize, String> {
    Err("this program was built without the feature cuda".into())
}

#[cfg(not(feature = "cuda"))]
fn nvidia(_: usize) -> Result<Arc<dyn Driver>, String> {
    count().map(|_| unreachable!("no devices are counted without the feature"))
}

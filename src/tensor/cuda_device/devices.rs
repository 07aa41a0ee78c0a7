//! The CUDA devices of this process. Each is opened once, at its first use.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use super::driver::Driver;
use super::handle::{DriverError, DriverResult, Handle};
use super::memory::{DeviceMemory, MemoryCounters, StreamPool};
use super::sources::KernelSource;
use crate::base::lock;
use crate::error::{Error, Result};
use crate::tensor::Device;

/// A device, shared by all threads that use it.
#[derive(Debug)]
pub(crate) struct CudaDevice {
    pub index: usize,
    pub driver: Arc<dyn Driver>,
    pub modules: Modules,
    pub counters: MemoryCounters,
    /// The memory that the device's streams keep for reuse.
    pub(in crate::tensor) pools: Mutex<Vec<Weak<Mutex<StreamPool>>>>,
}

/// A device's modules by name. The first thread that asks for a module loads it.
#[derive(Debug, Default)]
pub(crate) struct Modules(pub Mutex<HashMap<&'static str, (KernelSource, ModulePlace)>>);

/// The place of a module, which the first thread that asks for it fills.
pub(crate) type ModulePlace = Arc<OnceLock<Result<Handle>>>;

/// Makes `driver` the CUDA device of this number in this process. Tests install a driver that needs no GPU.
///
/// # Errors
/// Refuses a number that is in use.
pub fn install(index: usize, driver: Arc<dyn Driver>) -> Result<()> {
    let mut devices = open_devices();
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

/// Returns the number of CUDA devices: those of NVIDIA's driver or those that were [installed](install), else 0.
///
/// ```
/// use isoshard::tensor::cuda;
///
/// println!("{} GPUs", cuda::devices_len());
/// assert_eq!(cuda::devices_len() > 0, cuda::is_available());
/// ```
pub fn devices_len() -> usize {
    let installed = open_devices().keys().max().map_or(0, |&most| most + 1);
    installed.max(nvidia_devices_len().as_ref().map_or(0, |&n| n))
}

/// Returns true if there is a CUDA device.
///
/// ```
/// use isoshard::tensor::{Device, cuda};
///
/// let device = if cuda::is_available() { Device::Cuda(0) } else { Device::Cpu };
/// # let _ = device;
/// ```
pub fn is_available() -> bool {
    devices_len() > 0
}

/// Returns the reason, in one line, for which there is no CUDA device, or `None` if there is one.
///
/// ```
/// use isoshard::tensor::cuda;
///
/// match cuda::unavailable_reason() {
///     None => assert!(cuda::is_available()),
///     Some(reason) => println!("running on the CPU: {reason}"),
/// }
/// ```
pub fn unavailable_reason() -> Option<String> {
    (devices_len() == 0)
        .then(|| nvidia_devices_len().as_ref().err().cloned().unwrap_or_else(|| "no CUDA device".into()))
}

/// Returns the device of this number, and opens it at its first use.
pub(in crate::tensor) fn open(index: usize) -> Result<Arc<CudaDevice>> {
    let mut devices = open_devices();
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

    /// Turns a driver's failure into an error of `verb`, the work that failed.
    pub fn error(&self, verb: impl Into<String>, error: &DriverError) -> Error {
        Error::Device { verb: verb.into(), device: self.name().to_string(), reason: error.to_string() }
    }

    /// Returns the driver and the counters through which pools allocate.
    pub fn memory(&self) -> DeviceMemory<'_> {
        DeviceMemory { driver: &*self.driver, counters: &self.counters }
    }

    /// Registers a stream's pool, so that [`CudaDevice::clear_pools`] finds it.
    pub fn register_pool(&self, pool: &Arc<Mutex<StreamPool>>) {
        let mut pools = lock(&self.pools);
        pools.retain(|s| s.strong_count() > 0);
        pools.push(Arc::downgrade(pool));
    }

    /// Returns to the driver all memory that streams keep for reuse.
    pub fn clear_pools(&self) {
        let pools: Vec<Arc<Mutex<StreamPool>>> = lock(&self.pools).iter().filter_map(Weak::upgrade).collect();
        for pool in pools {
            lock(&pool).clear(&self.memory());
        }
    }

    /// Returns a new event that is recorded behind all work that is on the stream now.
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
fn open_devices() -> MutexGuard<'static, Devices> {
    static DEVICES: OnceLock<Mutex<Devices>> = OnceLock::new();
    lock(DEVICES.get_or_init(Mutex::default))
}

/// Returns the number of devices that NVIDIA's driver has, or the reason for which it has none. Looked up once.
fn nvidia_devices_len() -> &'static Result<usize, String> {
    static FOUND: OnceLock<Result<usize, String>> = OnceLock::new();
    FOUND.get_or_init(count_devices)
}

fn driver_of(index: usize) -> Result<Arc<dyn Driver>, String> {
    match nvidia_devices_len() {
        Ok(n) if index < *n => nvidia(index),
        Ok(n) => Err(format!("there are {n}")),
        Err(reason) => Err(reason.clone()),
    }
}

#[cfg(feature = "cuda")]
fn count_devices() -> Result<usize, String> {
    super::nvidia::devices_len()
}

#[cfg(feature = "cuda")]
fn nvidia(index: usize) -> Result<Arc<dyn Driver>, String> {
    super::nvidia::open(index)
}

#[cfg(not(feature = "cuda"))]
fn count_devices() -> Result<usize, String> {
    Err("this program was built without the feature cuda".into())
}

#[cfg(not(feature = "cuda"))]
fn nvidia(_: usize) -> Result<Arc<dyn Driver>, String> {
    count_devices().map(|_| unreachable!("no devices are counted without the feature"))
}

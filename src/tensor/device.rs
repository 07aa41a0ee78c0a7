//! The device that holds a tensor's elements.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The device that holds a tensor's elements. It is written `cpu`, `cuda:1` or `meta`.
///
/// ```
/// use isoshard::tensor::Device;
/// let device: Device = "cuda".parse()?;
/// assert_eq!((device, device.to_string()), (Device::Cuda(0), "cuda:0".to_string()));
/// assert!("gpu".parse::<Device>().is_err());
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// The CPU's memory.
    #[default]
    Cpu,
    /// The CUDA device with this number, in the driver's order.
    Cuda(usize),
    /// No device: the tensor has a shape and no elements (see [`meta`](super::meta)).
    Meta,
}

impl Device {
    /// Returns true for a CUDA device.
    ///
    /// ```
    /// use isoshard::tensor::Device;
    /// assert!(Device::Cuda(3).is_cuda() && !Device::Meta.is_cuda());
    /// ```
    pub fn is_cuda(self) -> bool {
        matches!(self, Device::Cuda(_))
    }
}

/// `cpu`, `cuda:1`, `meta`.
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
            Device::Meta => f.write_str("meta"),
        }
    }
}

/// `cpu`, `cuda` (the first one), `cuda:1`, `meta`.
impl FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Device> {
        let index = text.strip_prefix("cuda").map(|rest| match rest.strip_prefix(':') {
            Some(number) => number.parse().ok(),
            None => rest.is_empty().then_some(0),
        });
        match (text, index.flatten()) {
            ("cpu", _) => Ok(Device::Cpu),
            ("meta", _) => Ok(Device::Meta),
            (_, Some(index)) => Ok(Device::Cuda(index)),
            _ => Err(Error::invalid("device", "no such device", text, "write cpu, cuda, cuda:1 or meta")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for device in [Device::Cpu, Device::Meta, Device::Cuda(0), Device::Cuda(13)] {
            assert_eq!(device.to_string().parse::<Device>().unwrap(), device);
        }
        assert_eq!("cuda".parse::<Device>().unwrap(), Device::Cuda(0));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda1", "cpu:0"] {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
    }
}

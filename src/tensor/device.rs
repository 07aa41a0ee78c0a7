//! Where a tensor's memory is.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// A tensor's device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// The processor's memory.
    #[default]
    Cpu,
    /// The CUDA device of this number, as the driver counts them.
    Cuda(usize),
    /// Nowhere: tensors that have shapes and no elements ([`meta`](super::meta)).
    Meta,
}

impl Device {
    /// True for a CUDA device.
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

//! Memory that does not suffice, as a value.

use std::fmt;

/// The state of a device's memory when a tensor or list did not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryFault {
    /// The device, e.g. `cuda:0`.
    pub device: String,
    /// The tensor that did not fit, e.g. `f32[64, 128]`.
    pub wanted: String,
    /// Its size in bytes.
    pub wanted_bytes: usize,
    /// Bytes of live tensors on the device, of all ranks; in the CPU's memory those of this rank's thread.
    pub live_bytes: usize,
    /// Bytes that the ranks keep for reuse.
    pub kept_bytes: usize,
    /// The limit that was reached: the one that was set, or the device's size. `usize::MAX` for the CPU's memory
    /// without a limit, which the system refused.
    pub limit_bytes: usize,
}

impl MemoryFault {
    /// Returns the fault with the name of the kernel, which may be empty, unless an inner kernel has named itself.
    pub fn in_kernel(mut self, verb: &str) -> MemoryFault {
        if !verb.is_empty() && !self.wanted.contains(" for ") {
            self.wanted.push_str(" for ");
            self.wanted.push_str(verb);
        }
        self
    }
}

impl fmt::Display for MemoryFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryFault { device, wanted, wanted_bytes, live_bytes, kept_bytes, limit_bytes } = self;
        write!(
            f,
            "memory: {device} has no room; got {wanted} of {wanted_bytes} bytes, {live_bytes} bytes of live tensors, \
             {kept_bytes} bytes kept for reuse, "
        )?;
        match *limit_bytes {
            usize::MAX => write!(f, "no limit but the system's")?,
            limit_bytes => write!(f, "{limit_bytes} bytes in all")?,
        }
        write!(f, "; keep fewer tensors, or shard them further")
    }
}

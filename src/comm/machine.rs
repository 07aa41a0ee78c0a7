//! A model of one rank's processor: how long an operator's work takes.
//!
//! A call takes the longer of two times: its operations at the processor's rate, and its bytes at the memory's rate
//! (the roofline model: Williams, Waterman & Patterson, CACM 52, 2009). Together with the
//! [`Network`](super::Network) this decides between plans that give the same bits, and never changes a result.
//!
//! Missing: kernels that reach a part of these rates only, and the overlap of communication and computation.

use std::fmt;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::network::{Cost, PICO};
use crate::error::{Error, Result};
use crate::files::write_whole;
use crate::tensor::{DType, open_regular};

/// The rates of one rank's processor and memory, equal on all ranks.
///
/// ```
/// use isoshard::{comm::Machine, tensor::DType};
/// let gpu = Machine { half_flops_per_s: 1e15, bytes_per_s: 3e12, ..Machine::default() };
/// // A large product is limited by its operations, a sum of two tensors by its bytes.
/// assert_eq!(gpu.time(DType::BF16, 2 * 4096 * 4096 * 4096, 3 * 2 * 4096 * 4096).to_string(), "137.439 us");
/// assert_eq!(gpu.time(DType::BF16, 4096 * 4096, 3 * 2 * 4096 * 4096).to_string(), "33.554 us");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Operations per second on f64.
    pub f64_flops_per_s: f64,
    /// Operations per second on f32, integers and booleans.
    pub f32_flops_per_s: f64,
    /// Operations per second on f16 and bf16.
    pub half_flops_per_s: f64,
    /// Bytes that the memory reads or writes per second.
    pub bytes_per_s: f64,
    /// The bytes that the redistributed operands and the results of one call may take on a rank. A plan that needs
    /// more is chosen only if every plan does. `None` sets no limit.
    pub call_memory_bytes: Option<u64>,
}

/// The largest file that [`Machine::load`] reads.
const FILE_BYTES: u64 = 64 << 10;

impl Machine {
    /// Returns the time of `flops` operations on elements of `dtype` that read and write `bytes` bytes.
    ///
    /// ```
    /// use isoshard::{comm::Machine, tensor::DType};
    /// let machine = Machine { f32_flops_per_s: 1e9, bytes_per_s: 1e9, ..Machine::default() };
    /// assert_eq!(machine.time(DType::F32, 3_000, 1_000).seconds(), 3e-6);
    /// assert_eq!(machine.time(DType::F32, 1_000, 5_000).seconds(), 5e-6);
    /// ```
    pub fn time(&self, dtype: DType, flops: u64, bytes: u64) -> Cost {
        let rate = match dtype {
            DType::F64 => self.f64_flops_per_s,
            DType::F16 | DType::BF16 => self.half_flops_per_s,
            _ => self.f32_flops_per_s,
        };
        let seconds = (flops as f64 / rate).max(bytes as f64 / self.bytes_per_s);
        Cost::of_picoseconds(seconds * PICO)
    }

    /// Reads a machine that [`Machine::save`] wrote.
    ///
    /// ```
    /// use isoshard::comm::Machine;
    /// let file = std::env::temp_dir().join(format!("machine-{}.json", std::process::id()));
    /// let machine = Machine { bytes_per_s: 5e10, ..Machine::default() };
    /// machine.save(&file)?;
    /// assert_eq!(Machine::load(&file)?, machine);
    /// std::fs::remove_file(&file)?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the file cannot be read. Refuses a file above 64 KiB, text of another form, and rates that
    /// are not positive numbers.
    pub fn load(file: impl AsRef<Path>) -> Result<Machine> {
        let file = file.as_ref();
        let refuse = |rule: &str, given: String| {
            Error::invalid("machine", rule, format!("{given} in {}", file.display()), "save it again")
        };
        let mut text = String::new();
        open_regular(file)?.take(FILE_BYTES + 1).read_to_string(&mut text)?;
        if text.len() as u64 > FILE_BYTES {
            return Err(refuse("a file has at most 64 KiB", "more".into()));
        }
        let machine: Machine = serde_json::from_str(&text)
            .map_err(|e| refuse("wants the JSON that Machine::save writes", e.to_string()))?;
        machine.checked()
    }

    /// Writes the machine as JSON; others see the file whole or not at all.
    ///
    /// ```
    /// use isoshard::comm::Machine;
    /// let file = std::env::temp_dir().join(format!("rates-{}.json", std::process::id()));
    /// Machine::default().save(&file)?;
    /// assert!(std::fs::read_to_string(&file)?.contains("\"bytes_per_s\""));
    /// std::fs::remove_file(&file)?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses rates that are not finite numbers above 0. Returns an error if the file cannot be written.
    pub fn save(&self, file: impl AsRef<Path>) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.clone().checked()?)
            .map_err(|e| Error::other(e.to_string()))?;
        Ok(write_whole(file.as_ref(), &[text.as_bytes(), b"\n"])?)
    }

    /// Refuses rates that are not positive numbers.
    pub(super) fn checked(self) -> Result<Machine> {
        match self.rates().into_iter().find(|rate| !rate.is_finite() || *rate <= 0.0) {
            None => Ok(self),
            Some(rate) => {
                let rule = "a rate is a finite number above 0";
                Err(Error::invalid("machine", rule, format!("{rate} in {self:?}"), ""))
            }
        }
    }

    /// Returns the lower of both rates for each kind, and the lower limit.
    pub(super) fn slower(&self, other: &Machine) -> Machine {
        let limits = self.call_memory_bytes.into_iter().chain(other.call_memory_bytes);
        Machine {
            f64_flops_per_s: self.f64_flops_per_s.min(other.f64_flops_per_s),
            f32_flops_per_s: self.f32_flops_per_s.min(other.f32_flops_per_s),
            half_flops_per_s: self.half_flops_per_s.min(other.half_flops_per_s),
            bytes_per_s: self.bytes_per_s.min(other.bytes_per_s),
            call_memory_bytes: limits.min(),
        }
    }

    /// Returns the rates and the limit as numbers that ranks exchange; no limit is infinity.
    pub(super) fn to_words(&self) -> [f64; 5] {
        let [a, b, c, d] = self.rates();
        [a, b, c, d, self.call_memory_bytes.map_or(f64::INFINITY, |limit| limit as f64)]
    }

    /// Reads what [`Machine::to_words`] wrote on another rank.
    pub(super) fn of_words(words: &[f64]) -> Result<Machine> {
        let [f64_flops_per_s, f32_flops_per_s, half_flops_per_s, bytes_per_s, limit] = words[..] else {
            return Err(Error::invalid("machine", "wants five numbers", format!("{words:?}"), ""));
        };
        let call_memory_bytes = limit.is_finite().then_some(limit as u64);
        let machine =
            Machine { f64_flops_per_s, f32_flops_per_s, half_flops_per_s, bytes_per_s, call_memory_bytes };
        machine.checked()
    }

    fn rates(&self) -> [f64; 4] {
        [self.f64_flops_per_s, self.f32_flops_per_s, self.half_flops_per_s, self.bytes_per_s]
    }
}

/// About one core of a server's CPU: 20 GFLOP/s of f64, 40 of f32 and of half precision, 16.384 GB/s of memory, which
/// is twice the default network's rate.
impl Default for Machine {
    fn default() -> Machine {
        Machine {
            f64_flops_per_s: 20e9,
            f32_flops_per_s: 40e9,
            half_flops_per_s: 40e9,
            bytes_per_s: 16.384e9,
            call_memory_bytes: None,
        }
    }
}

/// Writes `40 GFLOP/s (f64 20, half 40), 16.4 GB/s`.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [f64s, f32s, halves, bytes] = self.rates().map(|rate| rate * 1e-9);
        write!(f, "{f32s:.0} GFLOP/s (f64 {f64s:.0}, half {halves:.0}), {bytes:.1} GB/s")?;
        match self.call_memory_bytes {
            Some(limit) => write!(f, ", {limit} bytes per call"),
            None => Ok(()),
        }
    }
}

//! Launches of the row kernels in `kernels/cuda/rows.cuh`.

use super::gpu::Gpu;
use super::launch::KernelLaunch;
use super::packs::{has_packed_leaves, is_aligned};
use super::reduce::wide;
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

/// The rows of a contiguous tensor along its last dim, for which kernels are launched.
pub(crate) struct RowLaunch {
    rows: usize,
    len: usize,
    depth: u32,
    dtype: DType,
}

/// The entries of one operator: two keep rows in registers, by single elements of leaves or by packs of 16 bytes, and one
/// takes longer rows.
#[derive(Clone, Copy)]
pub(crate) struct RowEntries {
    pub file: &'static str,
    pub short: &'static str,
    pub packed: &'static str,
    pub long: &'static str,
}

macro_rules! entries {
    ($file:literal) => {
        RowEntries {
            file: $file,
            short: $file,
            packed: concat!($file, "_packed"),
            long: concat!($file, "_long"),
        }
    };
}
pub(crate) use entries;

/// The longest row that registers hold.
const LONGEST_IN_REGISTERS: usize = 4096;

impl RowLaunch {
    /// Takes the rows of `x`, which has a last dim and elements.
    ///
    /// # Errors
    /// Refuses rows that are too long or too many for a kernel.
    pub fn of(verb: &str, x: &Tensor) -> Result<RowLaunch> {
        let len = *x.shape().last().expect("operators over rows refuse a tensor without dims");
        let rows = x.numel() / len;
        let depth = (0..32).find(|&d| len.div_ceil(1 << d) <= 32);
        match depth {
            // A warp of a long row folds at most 2^8 times eight leaves.
            Some(depth) if rows <= i32::MAX as usize && depth <= 16 => {
                Ok(RowLaunch { rows, len, depth, dtype: x.dtype() })
            }
            _ => {
                let remedy = "split it";
                Err(Error::unsupported(verb, "rows of more than 2^21 elements", x.notation(), remedy))
            }
        }
    }

    /// Returns a launch of the entry for these rows, to which the caller adds its own arguments. `operands` are those
    /// with the length of a row, also the ones that the kernel writes.
    pub fn kernel<'a, 't>(
        &self,
        gpu: &'a Gpu,
        entries: RowEntries,
        operands: impl IntoIterator<Item = &'t Tensor>,
    ) -> Result<KernelLaunch<'a>> {
        let packed =
            has_packed_leaves(self.len, self.depth, self.dtype) && operands.into_iter().all(is_aligned);
        let stem = match packed {
            _ if self.len > LONGEST_IN_REGISTERS => entries.long,
            true => entries.packed,
            false => entries.short,
        };
        gpu.kernel(entries.file, stem, self.dtype)
    }

    /// Runs a launch that has its own arguments. The kernel reads `operands` tensors more than once: their rows are
    /// kept in shared memory if they fit.
    pub fn run(&self, gpu: &Gpu, launch: KernelLaunch, operands: usize) -> Result<()> {
        let launch = launch.arg(self.rows as u64).arg(self.len as u32).arg(self.depth);
        if self.len > LONGEST_IN_REGISTERS {
            // A row begins at its own address modulo 16.
            let row = (self.len * self.dtype.size_bytes() + 16).next_multiple_of(16);
            let held = (gpu.shared_bytes() / row).min(operands);
            return launch.arg(held as u32).start(self.rows as u32, 1024, held * row);
        }
        let team = self.depth.saturating_sub(3);
        let warps = 8.max(1 << team);
        let rows_per_block = if self.depth < 3 { 8 << (3 - self.depth) } else { warps >> team };
        launch.start(self.rows.div_ceil(rows_per_block) as u32, 32 * warps as u32, 0)
    }
}

/// Allocates a statistic of `x`'s rows: the last dim is 1, the dtype the one that sums are kept in.
pub(crate) fn statistic(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let mut shape = x.shape().clone();
    *shape.last_mut().expect("operators over rows refuse a tensor without dims") = 1;
    if x.numel() == 0 { gpu.zeros(wide(x.dtype()), shape) } else { gpu.uninit(wide(x.dtype()), shape) }
}

//! CUDA kernels that read and write rows by index: `kernels/cuda/index_rows.cu`, the counterpart of `rows.rs`.

use super::cuda::{HeldRange, THREADS, blocks};
use super::rows::rows_in_place;
use crate::error::Result;
use crate::tensor::cuda::Gpu;
use crate::tensor::cuda::fault::Fault;
use crate::tensor::{DType, Shape, Tensor};

/// Reads rows of `table` `[batch, rows, width]` by `index` into shape `out`. Rows that the rank does not store, and
/// entries of -1 if they may be `dropped`, become -0.
///
/// # Errors
/// Returns an error if the device has no memory left or a launch fails. The kernel records an index out of range.
pub(in crate::ops) fn read_rows(
    table: &Tensor,
    index: &Tensor,
    rows: HeldRange,
    (dropped, fault): (bool, &'static Fault),
    out: &Shape,
) -> Result<Tensor> {
    let (table, index) = (rows_in_place(table)?, index.contiguous()?);
    let mut y = Gpu::of(&table)?.uninit(table.dtype(), out.clone())?;
    let (batch, held) = (table.shape()[0], table.shape()[1]);
    let (strides, each) = ([table.strides()[0], table.strides()[1], 0], index.numel() / batch.max(1));
    let copy = IndexedCopy { rows: &table, index: &index, held, range: rows, strides, each, choices: 1 };
    copy.run(["read", "packed_read"], (dropped, fault), &mut y)?;
    Ok(y)
}

/// Writes the rows of `x` `[batch, tokens, choices, width]` to their slots in shape `out`; slots without a row are -0.
///
/// # Errors
/// Returns the errors of [`read_rows`].
pub(in crate::ops) fn write_rows(
    x: &Tensor,
    slot: &Tensor,
    slots: HeldRange,
    fault: &'static Fault,
    out: &Shape,
) -> Result<Tensor> {
    let (x, slot) = (rows_in_place(x)?, slot.contiguous()?);
    let mut y = Tensor::full_on(x.device(), x.dtype(), out.clone(), -0.0)?;
    let (choices, each) = (x.shape()[2], x.shape()[1] * x.shape()[2]);
    let strides = [x.strides()[0], x.strides()[1], x.strides()[2]];
    let held = out[out.len() - 2];
    let copy = IndexedCopy { rows: &x, index: &slot, held, range: slots, strides, each, choices };
    copy.run(["write", "packed_write"], (true, fault), &mut y)?;
    Ok(y)
}

/// Launches a kernel that records slots out of the range of `n`, and equal slots of one batch entry. A batch entry has
/// `each` rows.
///
/// # Errors
/// Returns an error if the device has no memory left or the launch fails.
pub(in crate::ops) fn expect_distinct(
    slot: &Tensor,
    each: usize,
    n: usize,
    [range, equal]: [&'static Fault; 2],
) -> Result<()> {
    let (gpu, slot) = (Gpu::of(slot)?, slot.contiguous()?);
    let all = slot.numel();
    if all == 0 {
        return Ok(());
    }
    let mut taken = gpu.zeros(DType::I32, [all / each, n])?;
    let launch = gpu.kernel("index_rows", "distinct", DType::I64)?.read(&slot).write(&mut taken);
    let launch = launch.arg(all as u64).arg(each as u64).arg(n as u64);
    launch.arg(range.code).arg(equal.code).may_report(&[range, equal]).start(blocks(all), THREADS, 0)
}

/// A copy of rows by index.
struct IndexedCopy<'a> {
    rows: &'a Tensor,
    index: &'a Tensor,
    /// The rows of the table, or of the result, that the rank stores.
    held: usize,
    range: HeldRange,
    /// The strides of `rows` in elements: per batch entry, per row that is read or token, per choice.
    strides: [usize; 3],
    /// The number of entries per batch entry.
    each: usize,
    /// The number of entries per token.
    choices: usize,
}

impl IndexedCopy<'_> {
    /// Runs one of the kernels `stems`: for single elements, and for 16 bytes per thread.
    fn run(
        &self,
        stems: [&'static str; 2],
        (dropped, fault): (bool, &'static Fault),
        out: &mut Tensor,
    ) -> Result<()> {
        let (dtype, width) = (self.rows.dtype(), *self.rows.shape().last().expect("rows have a width"));
        if self.index.numel() * width == 0 || out.numel() == 0 {
            return Ok(());
        }
        let lanes = 16 / dtype.size_bytes();
        let aligned = |t: &Tensor| t.device_address().is_some_and(|at| at.is_multiple_of(16));
        let fits = self.strides.iter().chain([&width]).all(|n| n.is_multiple_of(lanes));
        let packed = fits && aligned(self.rows) && aligned(out);
        let lanes = if packed { lanes } else { 1 };
        let (all, gpu) = (self.index.numel() * (width / lanes), Gpu::of(self.rows)?);
        let launch = gpu.kernel("index_rows", stems[usize::from(packed)], dtype)?;
        let launch = launch.read(self.rows).read(self.index).write(out);
        let [batch, row, choice] = self.strides.map(|s| (s / lanes) as u64);
        let launch = launch.arg(all as u64).arg((width / lanes) as u64);
        let launch = launch.arg(self.each as u64).arg(self.choices as u64).arg(batch).arg(row).arg(choice);
        let HeldRange { n, start } = self.range;
        let launch = launch.arg(self.held as u64).arg(n as u64).arg(start as u64);
        launch.arg(u32::from(dropped)).arg(fault.code).may_report(&[fault]).start(blocks(all), THREADS, 0)
    }
}

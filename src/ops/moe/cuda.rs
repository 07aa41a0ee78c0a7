//! CUDA kernels that number the tokens of each expert, and that move rows by slot.

use super::cpu::SlotRange;
use crate::error::{Error, Result};
use crate::tensor::cuda::Gpu;
use crate::tensor::cuda::fault::FaultCode;
use crate::tensor::{DType, Shape, Tensor};

const THREADS: u32 = 256;
/// The maximum number of blocks; the kernels loop over further elements.
const BLOCKS: usize = 1 << 20;

/// Returns the slots and counts of [`ExpertSlots`](crate::ops::ExpertSlots); `counts` is the counts' shape.
///
/// # Errors
/// Returns an error if the device has no memory left or a launch fails. The kernel records an expert out of range.
pub(super) fn expert_slots(
    expert: &Tensor,
    experts: usize,
    capacity: Option<usize>,
    counts: &Shape,
) -> Result<(Tensor, Tensor)> {
    let gpu = Gpu::of(expert)?;
    let expert = expert.contiguous()?;
    let mut slots = gpu.uninit(DType::I64, expert.shape().clone())?;
    let mut counts = gpu.zeros(DType::I64, counts.clone())?;
    let (all, lists) = (expert.numel(), counts.numel());
    if all == 0 {
        return Ok((slots, counts));
    }
    let each = expert.shape().iter().rev().take(2).product::<usize>();
    if lists >= 1 << 31 || each >= 1 << 31 {
        let given = format!("{} and {experts} experts", expert.notation());
        let rule = "2^31 assignments or counts in one kernel";
        return Err(Error::unsupported("expert_slots", rule, given, "split the batch"));
    }
    if lists > 0 {
        // One block per batch entry and expert.
        let launch = gpu.kernel("expert_slots", "positions", DType::I64)?.read(&expert);
        let launch = launch.write(&mut slots).write(&mut counts).arg(each as u64).arg(experts as u32);
        launch.run(lists as u32, THREADS, 0)?;
    }
    let launch =
        gpu.kernel("expert_slots", "slots", DType::I64)?.read(&expert).read(&counts).write(&mut slots);
    let launch = launch.arg(all as u64).arg(each as u64).arg(experts as u64);
    let launch = launch.arg(capacity.map_or(-1, |c| c as i64)).arg(FaultCode::ExpertSlots as u32);
    launch.faults().run(blocks(all), THREADS, 0)?;
    Ok((slots, counts))
}

/// Computes what [`cpu::permute`](super::cpu::permute) computes.
///
/// # Errors
/// Returns an error if the device has no memory left or a launch fails. The kernel records a slot out of range.
pub(super) fn permute(x: &Tensor, slot: &Tensor, slots: SlotRange, out: &Shape) -> Result<Tensor> {
    let (x, slot) = (rows_in_place(x)?, slot.contiguous()?);
    let mut y = Tensor::full_on(x.device(), x.dtype(), out.clone(), -0.0)?;
    let (choices, each) = (x.shape()[2], x.shape()[1] * x.shape()[2]);
    let strides = [x.strides()[0], x.strides()[1], x.strides()[2]];
    let code = FaultCode::PermuteTokens;
    TokenRowCopy { rows: &x, slot: &slot, slots, strides, each, choices }.run("permute", code, &mut y)?;
    Ok(y)
}

/// Computes what [`cpu::unpermute`](super::cpu::unpermute) computes.
///
/// # Errors
/// Returns the errors of [`permute`].
pub(super) fn unpermute(y: &Tensor, slot: &Tensor, slots: SlotRange, out: &Shape) -> Result<Tensor> {
    let (y, slot) = (rows_in_place(y)?, slot.contiguous()?);
    let mut x = Gpu::of(&y)?.uninit(y.dtype(), out.clone())?;
    let each = slot.shape().iter().rev().take(2).product::<usize>();
    let strides = [y.strides()[0], y.strides()[1], 0];
    let code = FaultCode::UnpermuteTokens;
    TokenRowCopy { rows: &y, slot: &slot, slots, strides, each, choices: 1 }.run(
        "unpermute",
        code,
        &mut x,
    )?;
    Ok(x)
}

/// A copy of rows to or from slots.
struct TokenRowCopy<'a> {
    rows: &'a Tensor,
    slot: &'a Tensor,
    slots: SlotRange,
    /// The strides of `rows` in elements: per batch entry, per token (of a permutation) or slot, per choice.
    strides: [usize; 3],
    /// The number of assignments per batch entry.
    each: usize,
    /// The number of assignments per token.
    choices: usize,
}

impl TokenRowCopy<'_> {
    fn run(&self, stem: &'static str, code: FaultCode, out: &mut Tensor) -> Result<()> {
        let (dtype, width) = (self.rows.dtype(), *self.rows.shape().last().expect("rows have a width"));
        if self.slot.numel() * width == 0 || out.numel() == 0 {
            return Ok(());
        }
        let lanes = 16 / dtype.size_bytes();
        let aligned = |t: &Tensor| t.device_address().is_some_and(|at| at.is_multiple_of(16));
        let fits = self.strides.iter().chain([&width]).all(|n| n.is_multiple_of(lanes));
        let packed = fits && aligned(self.rows) && aligned(out);
        let lanes = if packed { lanes } else { 1 };
        let stem = match (packed, stem) {
            (true, "permute") => "packed_permute",
            (true, _) => "packed_unpermute",
            (false, stem) => stem,
        };
        let all = self.slot.numel() * (width / lanes);
        let gpu = Gpu::of(self.rows)?;
        let launch = gpu.kernel("permute_tokens", stem, dtype)?.read(self.rows).read(self.slot).write(out);
        let [batch, row, choice] = self.strides.map(|s| (s / lanes) as u64);
        let launch = launch.arg(all as u64).arg((width / lanes) as u64);
        let launch = launch.arg(self.each as u64).arg(self.choices as u64).arg(batch).arg(row).arg(choice);
        let SlotRange { all: slots, start, held } = self.slots;
        let launch = launch.arg(held as u64).arg(slots as u64).arg(start as u64).arg(code as u32);
        launch.faults().run(blocks(all), THREADS, 0)
    }
}

/// Returns the tensor if the elements along its last dim are adjacent, else a contiguous copy.
fn rows_in_place(x: &Tensor) -> Result<Tensor> {
    let last = x.shape().len() - 1;
    if x.strides()[last] == 1 || x.shape()[last] == 1 { Ok(x.clone()) } else { x.to_owned_copy() }
}

fn blocks(threads: usize) -> u32 {
    threads.div_ceil(THREADS as usize).min(BLOCKS) as u32
}

//! CUDA kernels that number the tokens of each expert.

use crate::error::{Error, Result};
use crate::tensor::cuda::Gpu;
use crate::tensor::cuda::fault::Fault;
use crate::tensor::{DType, Shape, Tensor};

static EXPERT: Fault = Fault::index(450, "expert_slots");

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
        launch.start(lists as u32, THREADS, 0)?;
    }
    let launch =
        gpu.kernel("expert_slots", "slots", DType::I64)?.read(&expert).read(&counts).write(&mut slots);
    let launch = launch.arg(all as u64).arg(each as u64).arg(experts as u64);
    let launch = launch.arg(capacity.map_or(-1, |c| c as i64)).arg(EXPERT.code);
    launch.may_report(&[&EXPERT]).start(blocks(all), THREADS, 0)?;
    Ok((slots, counts))
}

fn blocks(threads: usize) -> u32 {
    threads.div_ceil(THREADS as usize).min(BLOCKS) as u32
}

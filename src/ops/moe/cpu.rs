//! The CPU kernel that numbers the tokens of each expert.

use crate::error::Result;
use crate::ops::index::segments::checked_index;
use crate::tensor::Tensor;

/// Returns the slots of one batch entry's assignments, and adds up `counts` per expert. `capacity` is the number of
/// slots per expert; without one, experts have as many as they need.
pub(super) fn number_slots(
    expert: &[i64],
    capacity: Option<usize>,
    slots: &mut [i64],
    counts: &mut [i64],
) -> Result<()> {
    let experts = counts.len();
    for &e in expert {
        counts[checked_index("expert_slots", e, experts, 0)?] += 1;
    }
    let mut start = 0;
    let mut next: Vec<i64> = Vec::with_capacity(experts);
    for (e, &count) in counts.iter().enumerate() {
        next.push(capacity.map_or(start, |c| (e * c) as i64));
        start += count;
    }
    for (slot, &e) in slots.iter_mut().zip(expert) {
        let (e, next) = (e as usize, &mut next[e as usize]);
        let kept = capacity.is_none_or(|c| *next < ((e + 1) * c) as i64);
        *slot = if kept { *next } else { -1 };
        *next += i64::from(kept);
    }
    Ok(())
}

/// Returns the tensor with `dims` dims: adds a leading dim of extent 1 if it has one less.
pub(super) fn with_batch(x: &Tensor, dims: usize) -> Result<Tensor> {
    if x.shape().len() == dims { Ok(x.clone()) } else { x.unsqueeze(0) }
}

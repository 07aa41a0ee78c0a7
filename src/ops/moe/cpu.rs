//! CPU kernels that number the tokens of each expert, and that move rows by slot.

use crate::error::{Error, Result};
use crate::ops::index::embedding::minus_zero;
use crate::ops::index::segments::checked_index;
use crate::tensor::{Shape, Tensor, cpu::as_elements_mut, for_dtype};

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

/// The slots whose rows a rank stores.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotRange {
    /// The global number of slots.
    pub all: usize,
    /// The first slot whose row the rank stores.
    pub start: usize,
    /// The number of slots whose rows the rank stores.
    pub held: usize,
}

impl SlotRange {
    /// Returns the position of a slot's row among those that the rank stores, or `None` if the rank does not store it,
    /// or if the assignment was dropped (-1).
    fn place(&self, verb: &str, slot: i64) -> Result<Option<usize>> {
        if slot == -1 {
            return Ok(None);
        }
        let slot = usize::try_from(slot).ok().filter(|&s| s < self.all).ok_or_else(|| {
            let given = format!("slot {slot} of {}", self.all);
            Error::invalid(verb, "a slot is out of range", given, "slots are -1 (dropped) or start at 0")
        })?;
        Ok(slot.checked_sub(self.start).filter(|&p| p < self.held))
    }
}

/// Copies the rows of `x` `[batch, tokens, choices, width]`, of any strides, to their slots. Slots without a row are
/// -0.
pub(super) fn permute(x: &Tensor, slot: &Tensor, slots: SlotRange, out: &Shape) -> Result<Tensor> {
    let x = rows_in_place(x)?;
    let &[batch, tokens, choices, width] = &x.shape()[..] else { unreachable!("four dims") };
    let mut y = Tensor::uninit(x.dtype(), out.clone());
    if y.numel() == 0 {
        return Ok(y);
    }
    let strides = x.strides().to_vec();
    for_dtype!(any x.dtype(), T => {
        let (x, slot) = (x.data::<T>()?, slot.as_slice::<i64>()?);
        let y = as_elements_mut::<T>(y.bytes_mut());
        let mut filled = vec![false; batch * slots.held];
        for (i, &s) in slot.iter().enumerate() {
            let (b, t, k) = (i / choices / tokens, i / choices % tokens, i % choices);
            if let Some(place) = slots.place("permute_tokens", s)? {
                let place = b * slots.held + place;
                if std::mem::replace(&mut filled[place], true) {
                    let given = format!("slot {s} of batch entry {b}");
                    let rule = "two rows have the same slot";
                    return Err(Error::invalid("permute_tokens", rule, given, "give each row a slot of its own"));
                }
                let from = b * strides[0] + t * strides[1] + k * strides[2];
                y[place * width..][..width].copy_from_slice(&x[from..][..width]);
            }
        }
        for (row, _) in y.chunks_exact_mut(width).zip(filled).filter(|(_, filled)| !filled) {
            row.fill(minus_zero());
        }
    });
    Ok(y)
}

/// Copies the rows of `y` `[batch, slots, width]` that `slot` names, into shape `out`. Rows of dropped assignments, and
/// rows that another rank stores, are -0.
pub(super) fn unpermute(y: &Tensor, slot: &Tensor, slots: SlotRange, out: &Shape) -> Result<Tensor> {
    let y = rows_in_place(y)?;
    let (batch, width) = (y.shape()[0], y.shape()[2]);
    let mut x = Tensor::uninit(y.dtype(), out.clone());
    if x.numel() == 0 {
        return Ok(x);
    }
    let each = slot.numel() / batch;
    let (per_batch, per_slot) = (y.strides()[0], y.strides()[1]);
    for_dtype!(any y.dtype(), T => {
        let (y, slot) = (y.data::<T>()?, slot.as_slice::<i64>()?);
        let x = as_elements_mut::<T>(x.bytes_mut());
        for (i, (row, &s)) in x.chunks_exact_mut(width).zip(slot).enumerate() {
            match slots.place("unpermute_tokens", s)? {
                Some(place) => {
                    row.copy_from_slice(&y[i / each * per_batch + place * per_slot..][..width]);
                }
                None => row.fill(minus_zero()),
            }
        }
    });
    Ok(x)
}

/// Returns the tensor if the elements along its last dim are adjacent, else a contiguous copy.
fn rows_in_place(x: &Tensor) -> Result<Tensor> {
    let last = x.shape().len() - 1;
    if x.strides()[last] == 1 || x.shape()[last] == 1 { Ok(x.clone()) } else { x.to_owned_copy() }
}

/// Returns the tensor with `dims` dims: adds a leading dim of extent 1 if it has one less.
pub(super) fn with_batch(x: &Tensor, dims: usize) -> Result<Tensor> {
    if x.shape().len() == dims { Ok(x.clone()) } else { x.unsqueeze(0) }
}

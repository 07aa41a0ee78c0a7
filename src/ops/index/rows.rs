//! CPU kernels that read and write rows by index: `embedding`, `unpermute_tokens` and `permute_tokens`.

use super::cuda::HeldRange;
use crate::error::{Error, Result};
use crate::tensor::cpu::{RowsMut, as_elements_mut, for_each_part};
use crate::tensor::{Element, KernelList, Shape, Tensor, for_dtype};

/// Returns -0, which leaves every sum's bits unchanged. A rank contributes it for elements that another rank stores.
pub(in crate::ops) fn minus_zero<T: Element>() -> T {
    T::from_f64(-0.0)
}

/// Returns the place of each slot among those that the rank stores. It is not below their number if the rank does not
/// store the slot, or if the row was dropped (-1).
///
/// # Errors
/// Returns an error that begins with `verb` if a slot is out of range.
pub(in crate::ops) fn slot_places(verb: &str, slot: &[i64], slots: HeldRange) -> Result<KernelList<usize>> {
    let place = |&s: &i64| match usize::try_from(s) {
        Ok(s) if s < slots.n => Ok(s.wrapping_sub(slots.start)),
        _ if s == -1 => Ok(usize::MAX),
        _ => {
            let (given, rule) = (format!("slot {s} of {}", slots.n), "a slot is out of range");
            Err(Error::invalid(verb, rule, given, "slots are -1 (dropped) or start at 0"))
        }
    };
    let mut places = KernelList::zeros(verb, slot.len())?;
    for (to, slot) in places.iter_mut().zip(slot) {
        *to = place(slot)?;
    }
    Ok(places)
}

/// Refuses equal slots of one batch entry, and slots that are out of the range of `n`. A batch entry has `each` rows.
///
/// # Errors
/// Returns an error that begins with `verb` if there are such.
pub(in crate::ops) fn expect_distinct(verb: &str, slot: &[i64], each: usize, n: usize) -> Result<()> {
    let places = slot_places(verb, slot, HeldRange { n, start: 0 })?;
    let mut taken = KernelList::<u64>::zeros(verb, n.div_ceil(64))?;
    for (b, of_entry) in places.chunks_exact(each.max(1)).enumerate() {
        taken.fill(0);
        for &s in of_entry.iter().filter(|&&s| s < n) {
            let (word, bit) = (&mut taken[s / 64], 1 << (s % 64));
            if *word & bit != 0 {
                let (given, rule) = (format!("slot {s} of batch entry {b}"), "two rows have the same slot");
                return Err(Error::invalid(verb, rule, given, "give each row a slot of its own"));
            }
            *word |= bit;
        }
    }
    Ok(())
}

/// Reads rows of `table` `[batch, rows, width]`, of any strides, into shape `out`. Each batch entry has an equal part of
/// `places`; a place that the table does not have gives a row of -0.
pub(in crate::ops) fn read_rows(table: &Tensor, places: &[usize], out: &Shape) -> Result<Tensor> {
    let table = rows_in_place(table)?;
    let &[batch, held, width] = &table.shape()[..] else { unreachable!("three dims") };
    let (by_batch, by_row) = (table.strides()[0], table.strides()[1]);
    let mut y = Tensor::uninit(table.dtype(), out.clone());
    if y.numel() == 0 {
        return Ok(y);
    }
    let each = places.len() / batch;
    for_dtype!(any table.dtype(), T => {
        let table = table.data::<T>()?;
        let rows = RowsMut { data: as_elements_mut::<T>(y.bytes_mut()), len: width };
        for_each_part(batch * each, batch * each * width, rows, |at, rows| {
            for (i, row) in at.zip(rows.data.chunks_exact_mut(width)) {
                let (b, place) = (i / each, places[i]);
                match place < held {
                    true => row.copy_from_slice(&table[b * by_batch + place * by_row..][..width]),
                    false => row.fill(minus_zero()),
                }
            }
        });
    });
    Ok(y)
}

/// Writes the rows of `x` `[batch, tokens, choices, width]`, of any strides, to their places in shape `out`, whose last
/// two extents are the number of places and the width. No place of a batch entry occurs twice; one without a row is -0.
pub(in crate::ops) fn write_rows(x: &Tensor, places: &[usize], out: &Shape) -> Result<Tensor> {
    let x = rows_in_place(x)?;
    let &[batch, tokens, choices, width] = &x.shape()[..] else { unreachable!("four dims") };
    let (held, mut y) = (out[out.len() - 2], Tensor::uninit(x.dtype(), out.clone()));
    if y.numel() == 0 {
        return Ok(y);
    }
    let strides = x.strides().to_vec();
    let mut filled = KernelList::<u8>::zeros("permute_tokens", batch * held)?;
    for_dtype!(any x.dtype(), T => {
        let (x, y) = (x.data::<T>()?, as_elements_mut::<T>(y.bytes_mut()));
        for (i, &place) in places.iter().enumerate().filter(|&(_, &place)| place < held) {
            let (b, t, k) = (i / choices / tokens, i / choices % tokens, i % choices);
            let (from, place) = (b * strides[0] + t * strides[1] + k * strides[2], b * held + place);
            filled[place] = 1;
            y[place * width..][..width].copy_from_slice(&x[from..][..width]);
        }
        for (row, _) in y.chunks_exact_mut(width).zip(&*filled).filter(|&(_, &filled)| filled == 0) {
            row.fill(minus_zero());
        }
    });
    Ok(y)
}

/// Returns the tensor if the elements along its last dim are adjacent, else a contiguous copy.
pub(super) fn rows_in_place(x: &Tensor) -> Result<Tensor> {
    let last = x.shape().len() - 1;
    if x.strides()[last] == 1 || x.shape()[last] == 1 { Ok(x.clone()) } else { x.to_owned_copy() }
}

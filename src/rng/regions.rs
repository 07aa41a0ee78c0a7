//! Distributions and orders in the storage of a region, on any device.

use super::Draw;
use super::cuda;
use super::distribution::Distribution;
use super::index_ranges::{IndexRanges, Indices};
use super::permutation::Permutation;
use super::random_element::RandomElement;
use crate::error::{Error, Result};
use crate::placement::Region;
use crate::tensor::{Device, Shape, Tensor, for_dtype};

impl Distribution {
    /// Writes the values of these elements of a tensor: `at` is the global linear (row-major) index of `out[0]`, on
    /// which the others follow, or [`IndexRanges`].
    ///
    /// Communicates nothing; any cut of the tensor gets the same values.
    ///
    /// # Errors
    /// As [`Distribution::check`].
    pub fn fill<T: RandomElement>(&self, draw: Draw, at: impl Indices, out: &mut [T]) -> Result<()> {
        self.check(T::DTYPE)?;
        T::fill(*self, draw, at.ranges(), out);
        Ok(())
    }

    /// Writes the values of the elements that `region` holds of a tensor of shape `global` into `out`, its local
    /// storage: those of the whole, however it is cut.
    ///
    /// # Errors
    /// As [`Distribution::check`]; refuses an `out` of another length than the region's.
    pub fn fill_region<T: RandomElement>(
        &self,
        draw: Draw,
        global: &Shape,
        region: &Region,
        out: &mut [T],
    ) -> Result<()> {
        self.check(T::DTYPE)?;
        expect_storage(self.name(), region, out.len())?;
        IndexRanges::of(region, global, |at, here| {
            T::fill(*self, draw, at, &mut out[here]);
            Ok(())
        })
    }

    /// Writes the values of the elements that `region` holds of a tensor of shape `global` into `local`, its storage on any
    /// device: in place where nobody shares it. The values are the same by bits on every device.
    ///
    /// # Errors
    /// As [`Distribution::fill_region`], of the tensor's dtype; a device without room.
    pub fn fill_tensor(&self, draw: Draw, global: &Shape, region: &Region, local: &mut Tensor) -> Result<()> {
        if local.device() == Device::Cpu {
            return for_dtype!(any local.dtype(), T => {
                self.fill_region::<T>(draw, global, region, local.make_mut()?)
            });
        }
        self.check(local.dtype())?;
        expect_storage(self.name(), region, local.numel())?;
        if local.device() == Device::Meta {
            return Ok(());
        }
        unshare(local)?;
        cuda::fill(*self, draw, global, region, local)
    }
}

impl Permutation {
    /// Writes what stands at the indices that `region` holds, of a tensor `[len]`, into `local`, its i64 storage on any
    /// device: in place where nobody shares it.
    ///
    /// # Errors
    /// Refuses a `local` of another dtype or length, and a region that leaves the permutation; a device without room.
    pub fn fill_tensor(&self, region: &Region, local: &mut Tensor) -> Result<()> {
        expect_storage("permutation", region, local.numel())?;
        let global = Shape::from([self.len() as usize]);
        if local.device() != Device::Cpu {
            let end = region.boxes.last().map_or(0, |b| b.start[0] + b.len[0]);
            self.check(0, end as u64)?;
            return if local.is_meta() { Ok(()) } else { cuda::order(self, region, local) };
        }
        let out: &mut [u64] = bytemuck::cast_slice_mut(local.make_mut::<i64>()?);
        let mut done = Ok(());
        region.runs(&global, |start, at, len| {
            let run = self.fill(start, &mut out[at..at + len]);
            done = std::mem::replace(&mut done, Ok(())).and(run);
        });
        done
    }
}

/// Makes storage on a device writable: another where somebody shares it.
pub(super) fn unshare(local: &mut Tensor) -> Result<()> {
    if !local.is_unique() {
        *local = Tensor::uninit_on(local.device(), local.dtype(), local.shape())?;
    }
    Ok(())
}

/// Refuses, in the name of `verb`, local storage of another length than the region's.
pub(super) fn expect_storage(verb: &str, region: &Region, len: usize) -> Result<()> {
    if region.numel() == len {
        return Ok(());
    }
    let given = format!("{len} elements for {}", region.local);
    Err(Error::invalid(verb, "the storage is not the region's", given, ""))
}

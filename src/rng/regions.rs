//! Fills of a region's storage, on any device.

use super::Draw;
use super::counter::index_ranges::{IndexRanges, Indices};
use super::cuda;
use super::distributions::distribution::Distribution;
use super::distributions::random_element::RandomElement;
use super::permutation::Permutation;
use crate::error::{Error, Result};
use crate::placement::Region;
use crate::tensor::{Device, Shape, Tensor, for_dtype};

impl Distribution {
    /// Writes the values of these elements of a tensor: `at` is the global linear (row-major) index of `out[0]`, with the others
    /// following, or [`IndexRanges`]. A part has the whole's values.
    ///
    /// ```
    /// use isoshard::rng::{Distribution, Generator};
    /// let draw = Generator::new(0).next_draw();
    /// let (mut whole, mut part) = ([0.0f32; 9], [0.0f32; 3]);
    /// Distribution::STANDARD.fill(draw, 0, &mut whole)?;
    /// Distribution::STANDARD.fill(draw, 6, &mut part)?;
    /// assert_eq!(part, whole[6..]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Distribution::check`].
    pub fn fill<T: RandomElement>(&self, draw: Draw, at: impl Indices, out: &mut [T]) -> Result<()> {
        self.check(T::DTYPE)?;
        T::fill(*self, draw, at.ranges(), out);
        Ok(())
    }

    /// Writes the values of a region of a tensor of shape `global` to `out`, the region's local storage.
    ///
    /// # Errors
    /// Returns the errors of [`Distribution::check`]. Refuses an `out` of another length than the region's.
    pub(crate) fn fill_region<T: RandomElement>(
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

    /// Writes the values of a region of a tensor of shape `global` to `local`, the region's storage on any device, in place if
    /// the storage is not shared. Every device gives the same bits.
    ///
    /// ```
    /// use isoshard::{placement::Region, rng::{Distribution, Generator}, tensor::{DType, Tensor}};
    /// let mut x = Tensor::zeros(DType::I64, [6]);
    /// let (shape, draw) = (x.shape().clone(), Generator::new(0).next_draw());
    /// Distribution::UniformInt { low: 1, high: 7 }.fill_tensor(draw, &shape, &Region::whole(&shape), &mut x)?;
    /// assert!(x.to_vec::<i64>()?.iter().all(|die| (1..7).contains(die)));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Distribution::check`] for the tensor's dtype, or [`Error::OutOfMemory`]. Refuses a `local` of
    /// another length than the region's.
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
    /// Writes the values at the indices of `region`, a region of a tensor `[len]`, to `local`, its i64 storage on any device, in
    /// place if the storage is not shared.
    ///
    /// ```
    /// use isoshard::{placement::Region, rng::{Generator, Permutation}, tensor::{DType, Tensor}};
    /// let order = Permutation::new(Generator::new(3).next_draw(), 4);
    /// let mut x = Tensor::zeros(DType::I64, [4]);
    /// order.fill_tensor(&Region::whole(&[4].into()), &mut x)?;
    /// assert_eq!(x.to_vec::<i64>()?[2], order.at(2)? as i64);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
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

/// Makes storage on a device writable: replaces it if it is shared.
pub(super) fn unshare(local: &mut Tensor) -> Result<()> {
    if !local.is_unique() {
        *local = Tensor::uninit_on(local.device(), local.dtype(), local.shape())?;
    }
    Ok(())
}

/// Returns an error of `verb` if the storage has another length than the region.
pub(super) fn expect_storage(verb: &str, region: &Region, len: usize) -> Result<()> {
    if region.numel() == len {
        return Ok(());
    }
    let given = format!("{len} elements for {}", region.local);
    Err(Error::invalid(verb, "the storage is not the region's", given, ""))
}

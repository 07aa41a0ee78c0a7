//! A region as an argument of kernels, and the number of threads that fill it.

use bytemuck::NoUninit;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::placement::{IndexBox, Region};
use crate::rng::Draw;
use crate::tensor::Shape;
use crate::tensor::cuda::{Gpu, KernelLaunch};

pub(super) const THREADS: u32 = 256;
/// The largest number of thread blocks per multiprocessor, about four times as many as run there at once.
const BLOCKS: u32 = 32;
/// The largest number of dims of a box, without its contiguous run.
const DIMS: usize = 7;

/// `struct Place` of `kernels/cuda/random.cuh`: a box whose elements are contiguous in local storage.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, NoUninit)]
pub(crate) struct Place {
    first: u64,
    offset: u64,
    run: u64,
    runs: u64,
    units: u64,
    magic: u32,
    shift: u32,
    whole: u32,
    dims: u32,
    len: [u64; DIMS],
    stride: [u64; DIMS],
}

/// `struct Draw` of `kernels/cuda/philox.cuh`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
pub(crate) struct DrawArg {
    key: [u32; 2],
    high: u64,
}

impl From<Draw> for DrawArg {
    fn from(draw: Draw) -> DrawArg {
        DrawArg { key: draw.key(), high: draw.counter_high(0) }
    }
}

impl Place {
    /// Returns the boxes of a region of a tensor of shape `global`, for kernels with `per` elements per thread: one box, unless
    /// the region is ragged over several dims.
    pub fn all(region: &Region, global: &Shape, per: u64) -> Result<SmallVec<[Place; 1]>> {
        let strides = global.strides();
        region.boxes.iter().map(|block| Place::of(block, &strides, per)).collect()
    }

    fn of(block: &IndexBox, strides: &[usize], per: u64) -> Result<Place> {
        let first: usize = block.start.iter().zip(strides).map(|(i, s)| i * s).sum();
        // Dims longer than 1, outermost first; dims that are contiguous with each other in the whole are merged.
        let mut dims: SmallVec<[(u64, u64); DIMS + 1]> = SmallVec::new();
        for (&len, &stride) in block.len.iter().zip(strides).filter(|(len, _)| **len != 1) {
            let (len, stride) = (len as u64, stride as u64);
            match dims.last_mut() {
                Some(last) if last.1 == len * stride => *last = (last.0 * len, stride),
                _ => dims.push((len, stride)),
            }
        }
        let whole = dims.last().is_some_and(|d| d.1 == 1);
        let run = if whole { dims.pop().map_or(1, |d| d.0) } else { 1 };
        if dims.len() > DIMS {
            let given = format!("a box of {} dims that do not join", dims.len());
            return Err(Error::unsupported(
                "random",
                "a kernel takes seven dims and a run",
                given,
                "reshape it",
            ));
        }
        let runs = dims.iter().map(|d| d.0).product();
        let (mut len, mut stride) = ([1; DIMS], [0; DIMS]);
        for (d, &(n, s)) in dims.iter().enumerate() {
            (len[d], stride[d]) = (n, s);
        }
        let common = dims.iter().fold(first as u64, |all, d| all | d.1) | if runs > 1 { run } else { 0 };
        let whole = common.is_multiple_of(per);
        // A run with any start touches one more block.
        let units = if whole { run.div_ceil(per) } else { (run + 2 * per - 2) / per };
        let (magic, shift) = magic_of(units);
        let (first, offset, dims) = (first as u64, block.offset as u64, dims.len() as u32);
        Ok(Place {
            first,
            offset,
            run,
            runs,
            units,
            magic,
            shift,
            whole: u32::from(whole),
            dims,
            len,
            stride,
        })
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> u64 {
        self.run * self.runs
    }

    /// Returns the number of threads with work.
    pub fn units(&self) -> u64 {
        self.units * self.runs
    }
}

/// Returns the multiplier and the shift of a division by `units` of numbers below 2^31; zeros if `units` is too large.
fn magic_of(units: u64) -> (u32, u32) {
    if units >= 1 << 31 {
        return (0, 0);
    }
    let shift = units.next_power_of_two().trailing_zeros();
    (((((1u64 << shift) - units) << 32) / units + 1) as u32, shift)
}

/// Runs a kernel with one thread per unit.
pub(crate) fn run_over(launch: KernelLaunch<'_>, gpu: &Gpu, units: u64) -> Result<()> {
    let wanted = units.div_ceil(u64::from(THREADS));
    launch.start(wanted.min(u64::from(gpu.multiprocessors() * BLOCKS)) as u32, THREADS, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::{Mesh, Spec};

    /// The definition: every element by itself.
    fn indices(place: &Place) -> Vec<(u64, u64)> {
        let index = |i: u64| {
            let (mut run, mut at) = (i / place.run, place.first + i % place.run);
            for d in (0..place.dims as usize).rev() {
                at += run % place.len[d] * place.stride[d];
                run /= place.len[d];
            }
            (at, place.offset + i)
        };
        (0..place.numel()).map(index).collect()
    }

    #[test]
    fn places_are_the_region() {
        let mesh = Mesh::parse("a=2,b=3", 0).unwrap();
        for spec in [
            "f32[5, 3]@(a:R, b:R)",
            "f32[5, 12]@(a:S0, b:R)",
            "f32[5, 12]@(a:S1, b:S0)",
            "f32[4, 6, 8]@(a:S2, b:S1)",
            "f32[3, 5, 7]@(a:S2, b:R)",
            "f32[]@(a:R, b:R)",
            "f32[1, 1, 9]@(a:S2, b:S2)",
            "f32[5, 3, 7]@(a:RS(0..3; 32, 73), b:R)",
            "f32[4, 5, 3]@(a:RS(0..2; 7, 13), b:R)",
            "f32[0, 4]@(a:S1, b:R)",
        ] {
            let spec = Spec::parse(spec, &mesh).unwrap();
            for a in 0..2 {
                for b in 0..3 {
                    let region = spec.region_at(&[a, b]);
                    let (mut want, mut got) = (Vec::new(), Vec::new());
                    region.runs(&spec.shape, |start, at, len| {
                        want.extend((0..len as u64).map(|i| (start + i, at as u64 + i)));
                    });
                    for place in Place::all(&region, &spec.shape, 4).unwrap() {
                        let all = indices(&place);
                        let begins = all.chunks(place.run as usize).all(|run| run[0].0 % 4 == 0);
                        assert_eq!(
                            place.whole == 1,
                            begins && (place.runs == 1 || place.run % 4 == 0),
                            "{spec}"
                        );
                        got.extend(all);
                    }
                    assert_eq!(got, want, "{spec}");
                }
            }
        }
    }

    #[test]
    fn divisions_are_exact() {
        for units in (1..70).chain([641, 6_700_417, (1 << 30) + 1, (1 << 31) - 1]) {
            let (magic, shift) = magic_of(units);
            let edges = (0..40).flat_map(|k| [k * units, (k + 1) * units - 1, (1 << 31) - 1 - k]);
            for n in edges.filter(|n| n >> 31 == 0) {
                let high = (n * u64::from(magic)) >> 32;
                assert_eq!((high + n) >> shift, n / units, "{n} / {units}");
                assert!((high + n) >> 32 == 0);
            }
        }
        assert_eq!(magic_of(1 << 31), (0, 0));
    }
}

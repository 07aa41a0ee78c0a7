//! CPU kernels of sequences and bands.

use super::index_formula::{DiagonalBand, IndexSequence};
use crate::placement::Region;
use crate::tensor::cpu::{Isa, Kernel, as_elements_mut, dispatch};
use crate::tensor::{DType, Element, Shape, Tensor, for_dtype};

/// Writes the elements of `region` of a sequence to `out`, the region's storage in f64 or i64.
pub(super) fn sequence(out: &mut Tensor, global: &Shape, region: &Region, numbers: IndexSequence) {
    if out.dtype() == DType::F64 {
        let out = as_elements_mut::<f64>(out.bytes_mut());
        return region.runs(global, |first, at, len| {
            dispatch(SequenceLoop { out: &mut out[at..at + len], first, numbers });
        });
    }
    let (start, step) = (numbers.start as i64, numbers.step as i64);
    let out = as_elements_mut::<i64>(out.bytes_mut());
    region.runs(global, |first, at, len| {
        for (x, i) in out[at..at + len].iter_mut().zip(first..) {
            *x = start.wrapping_add((i as i64).wrapping_mul(step));
        }
    });
}

/// The loop over one run of a sequence of floats.
struct SequenceLoop<'a> {
    out: &'a mut [f64],
    first: u64,
    numbers: IndexSequence,
}

impl Kernel for SequenceLoop<'_> {
    type Out = ();
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) {
        let IndexSequence { start, step, end, last, turn } = self.numbers;
        for (x, i) in self.out.iter_mut().zip(self.first..) {
            let (from, left) = (i as i64 as f64, last as i64 - i as i64);
            *x = if i < turn { start + from * step } else { end - left as f64 * step };
        }
    }
}

/// Writes `inside` or `outside` to the elements of `region`, whose storage is `out`.
pub(super) fn band(
    out: &mut Tensor,
    global: &Shape,
    region: &Region,
    band: DiagonalBand,
    [inside, outside]: [f64; 2],
) {
    for_dtype!(any out.dtype(), T => {
        let (inside, outside) = (<T as Element>::from_f64(inside), <T as Element>::from_f64(outside));
        let out = as_elements_mut::<T>(out.bytes_mut());
        band_pieces(global, region, band, &mut |at, within| {
            out[at].fill(if within { inside } else { outside });
        });
    });
}

/// Copies the elements of `region` that are in the band from `x` to `out`, both the region's storage, and writes +0 to
/// the others.
pub(super) fn keep_band<T: Element>(
    x: &[T],
    out: &mut [T],
    global: &Shape,
    region: &Region,
    band: DiagonalBand,
) {
    band_pieces(global, region, band, &mut |at, within| {
        let out = &mut out[at.clone()];
        if within { out.copy_from_slice(&x[at]) } else { out.fill(T::from_f64(0.0)) }
    });
}

/// Calls `f(range of local storage, true if the range is in the band)` for ranges that cover the region.
fn band_pieces(
    global: &Shape,
    region: &Region,
    band: DiagonalBand,
    f: &mut dyn FnMut(std::ops::Range<usize>, bool),
) {
    let [.., rows, columns] = global[..] else { return };
    region.runs(global, |first, at, len| {
        let (mut first, mut at, end) = (first as usize, at, at + len);
        while at < end {
            let (row, column) = (first / columns % rows, first % columns);
            let len = (columns - column).min(end - at);
            let (from, to) = band.columns_of(row, columns);
            let cut = |edge: usize| edge.clamp(column, column + len) - column + at;
            for (range, within) in
                [(at..cut(from), false), (cut(from)..cut(to), true), (cut(to)..at + len, false)]
            {
                if !range.is_empty() {
                    f(range, within);
                }
            }
            (first, at) = (first + len, at + len);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::{Mesh, Spec};

    #[test]
    fn bands_are_their_definition_in_every_region() {
        let mesh = Mesh::parse("a=2,b=3", 0).unwrap();
        for spec in [
            "[2, 5, 4]@(a:S2, b:S1)",
            "[7, 3]@(a:S0, b:R)",
            "[4, 5]@(a:RS(0..2; 7, 13), b:R)",
            "[0, 3]@(a:S1, b:R)",
        ] {
            let spec = Spec::parse(&format!("i64{spec}"), &mesh).unwrap();
            for (rank, band) in (0..6).flat_map(|rank| {
                let bands =
                    [(i64::MIN, 0), (1, i64::MAX), (-1, 1), (2, 1), (0, 0), (i64::MIN, i64::MAX), (-9, -8)];
                bands.map(|(low, high)| (rank, DiagonalBand { low, high }))
            }) {
                let region = spec.region_at(&[rank / 3, rank % 3]);
                let mut out = Tensor::uninit(DType::I64, region.local.clone());
                super::band(&mut out, &spec.shape, &region, band, [5.0, -1.0]);
                let out = out.to_vec::<i64>().unwrap();
                let x: Vec<i64> = (0..out.len() as i64).map(|i| i + 1).collect();
                let mut kept = vec![-7i64; x.len()];
                keep_band(&x, &mut kept, &spec.shape, &region, band);
                let mut seen = 0;
                region.runs(&spec.shape, |first, at, len| {
                    for k in 0..len {
                        let (e, columns) = (first as usize + k, spec.shape[spec.shape.len() - 1]);
                        let rows = spec.shape[spec.shape.len() - 2];
                        let within = band.contains(e / columns % rows, e % columns);
                        assert_eq!(out[at + k], if within { 5 } else { -1 }, "{band} {e}");
                        assert_eq!(kept[at + k], if within { x[at + k] } else { 0 }, "{band} {e}");
                        seen += 1;
                    }
                });
                assert_eq!(seen, out.len());
            }
        }
    }
}

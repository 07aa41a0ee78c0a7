//! The reduction of several members' contributions, by one tree over the member indices.
//!
//! The range `[a, b)` of members is split at `a + ceil((b - a) / 2)`: the tree that DESIGN lays over global extents.
//! Each element is folded by itself, so a chunk of the result has the bits of the whole.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::tensor::cpu::{Num, as_elements_mut};
use crate::tensor::{DType, Element, Float, ReduceOp, Tensor};

/// The elements folded at a time where several levels of the tree need room: all of it stays in the first caches.
const BLOCK: usize = 1024;

/// The reduction of `parts`, contiguous tensors of one dtype and shape, at least one of them.
pub(crate) fn fold(op: ReduceOp, parts: &[Tensor]) -> Tensor {
    if let [only] = parts {
        return only.clone();
    }
    let mut out = Tensor::stale(parts[0].dtype(), parts[0].shape());
    fold_range(op, parts.iter(), 0..parts[0].numel(), out.bytes_mut());
    out
}

/// Writes the elements `range` (flat) of the reduction of `parts` to `out`, which holds just them.
pub(crate) fn fold_range<'a>(
    op: ReduceOp,
    parts: impl Iterator<Item = &'a Tensor>,
    range: Range<usize>,
    out: &mut [u8],
) {
    let parts: Vec<&Tensor> = parts.collect();
    match parts[0].dtype() {
        DType::F32 => fold_floats::<f32>(op, &parts, range, out),
        DType::F64 => fold_floats::<f64>(op, &parts, range, out),
        DType::F16 if op == ReduceOp::Sum => {
            sum_f16(&slices(&parts, range), as_elements_mut(out));
        }
        DType::F16 => fold_floats::<f16>(op, &parts, range, out),
        DType::BF16 if op == ReduceOp::Sum => {
            fold_slices(&slices(&parts, range), as_elements_mut(out), add_bf16);
        }
        DType::BF16 => fold_floats::<bf16>(op, &parts, range, out),
        DType::I64 => fold_ints::<i64>(op, &parts, range, out, i64::wrapping_add),
        DType::I32 => fold_ints::<i32>(op, &parts, range, out, i32::wrapping_add),
        DType::U8 => fold_ints::<u8>(op, &parts, range, out, u8::wrapping_add),
        DType::Bool => {
            let bytes = |t: &&'a Tensor| &t.as_bytes().expect("contributions are contiguous")[range.clone()];
            let parts: Vec<&[u8]> = parts.iter().map(bytes).collect();
            match op {
                ReduceOp::Min => fold_slices(&parts, out, |a, b| a & b),
                ReduceOp::Sum | ReduceOp::Max => fold_slices(&parts, out, |a, b| a | b),
            }
        }
    }
}

fn fold_floats<T: Float<Acc: Num>>(op: ReduceOp, parts: &[&Tensor], range: Range<usize>, out: &mut [u8]) {
    let (parts, out) = (slices::<T>(parts, range), as_elements_mut::<T>(out));
    match op {
        ReduceOp::Sum => fold_slices(&parts, out, |a, b| T::narrow(a.widen() + b.widen())),
        ReduceOp::Max => fold_slices(&parts, out, ReduceOp::larger::<T>),
        ReduceOp::Min => fold_slices(&parts, out, ReduceOp::smaller::<T>),
    }
}

fn fold_ints<T: Element + Ord>(
    op: ReduceOp,
    parts: &[&Tensor],
    range: Range<usize>,
    out: &mut [u8],
    add: impl Fn(T, T) -> T + Copy,
) {
    let (parts, out) = (slices::<T>(parts, range), as_elements_mut::<T>(out));
    match op {
        ReduceOp::Sum => fold_slices(&parts, out, add),
        ReduceOp::Max => fold_slices(&parts, out, T::max),
        ReduceOp::Min => fold_slices(&parts, out, T::min),
    }
}

fn slices<'a, T: Element>(parts: &[&'a Tensor], range: Range<usize>) -> Vec<&'a [T]> {
    parts
        .iter()
        .map(|t| &t.as_slice::<T>().expect("contributions are contiguous and of one dtype")[range.clone()])
        .collect()
}

/// The tree over `parts`, all as long as `out`. Up to four members need no room in between.
fn fold_slices<T: Copy + Default>(parts: &[&[T]], out: &mut [T], f: impl Fn(T, T) -> T + Copy) {
    let n = out.len();
    match *parts {
        [a] => out.copy_from_slice(a),
        [a, b] => out.iter_mut().zip(a.iter().zip(b)).for_each(|(o, (&a, &b))| *o = f(a, b)),
        [a, b, c] => {
            let (a, b, c) = (&a[..n], &b[..n], &c[..n]);
            (0..n).for_each(|i| out[i] = f(f(a[i], b[i]), c[i]));
        }
        [a, b, c, d] => {
            let (a, b, c, d) = (&a[..n], &b[..n], &c[..n], &d[..n]);
            (0..n).for_each(|i| out[i] = f(f(a[i], b[i]), f(c[i], d[i])));
        }
        _ => {
            let levels = parts.len().next_power_of_two().trailing_zeros() as usize;
            let mut room = vec![T::default(); levels * BLOCK.min(n)];
            for start in (0..n).step_by(BLOCK) {
                let end = (start + BLOCK).min(n);
                fold_block(parts, start..end, &mut out[start..end], &mut room, f);
            }
        }
    }
}

fn fold_block<T: Copy>(
    parts: &[&[T]],
    at: Range<usize>,
    out: &mut [T],
    room: &mut [T],
    f: impl Fn(T, T) -> T + Copy,
) {
    match *parts {
        [a] => out.copy_from_slice(&a[at]),
        [a, b] => {
            let pairs = a[at.clone()].iter().zip(&b[at]);
            out.iter_mut().zip(pairs).for_each(|(o, (&a, &b))| *o = f(a, b));
        }
        _ => {
            let (left, right) = parts.split_at(parts.len().div_ceil(2));
            fold_block(left, at.clone(), out, room, f);
            let (here, below) = room.split_at_mut(out.len());
            fold_block(right, at, here, below, f);
            out.iter_mut().zip(&*here).for_each(|(o, &x)| *o = f(*o, x));
        }
    }
}

/// The sum in f32, rounded once, as [`Float::narrow`] rounds; without branches, so that loops over it vectorise.
#[inline(always)]
fn add_bf16(a: bf16, b: bf16) -> bf16 {
    let widen = |x: bf16| f32::from_bits(u32::from(x.to_bits()) << 16);
    let sum = widen(a) + widen(b);
    let bits = sum.to_bits();
    let even = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if sum.is_nan() { quiet } else { even } as u16)
}

/// The tree of f16 sums, converted by whole slices: the machine's own conversion is looked for at every call.
fn sum_f16(parts: &[&[f16]], out: &mut [f16]) {
    let levels = parts.len().next_power_of_two().trailing_zeros() as usize;
    let mut room = vec![0.0; (levels + 1) * BLOCK.min(out.len())];
    for start in (0..out.len()).step_by(BLOCK) {
        let end = (start + BLOCK).min(out.len());
        let (sum, room) = room.split_at_mut(end - start);
        sum_f16_block(parts, start..end, sum, &mut out[start..end], room);
        out[start..end].convert_from_f32_slice(sum);
    }
}

/// Writes the sum to `out`, exact f16 values but for the last addition; `half` is where others are rounded.
fn sum_f16_block(parts: &[&[f16]], at: Range<usize>, out: &mut [f32], half: &mut [f16], room: &mut [f32]) {
    if let [only] = *parts {
        return only[at].convert_to_f32_slice(out);
    }
    let (left, right) = parts.split_at(parts.len().div_ceil(2));
    let (here, below) = room.split_at_mut(out.len());
    for (side, sum) in [(left, &mut *out), (right, &mut *here)] {
        sum_f16_block(side, at.clone(), sum, half, below);
        if side.len() > 1 {
            half.convert_from_f32_slice(sum);
            half.convert_to_f32_slice(sum);
        }
    }
    out.iter_mut().zip(&*here).for_each(|(o, &x)| *o += x);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Shape;

    /// The tree by its definition, on whole tensors.
    fn tree(op: ReduceOp, parts: &[Tensor]) -> Tensor {
        if let [only] = parts {
            return only.clone();
        }
        let (left, right) = parts.split_at(parts.len().div_ceil(2));
        let mut acc = tree(op, left);
        op.fold(&mut acc, &tree(op, right)).unwrap();
        acc
    }

    fn sample(dtype: DType, member: usize, shape: &Shape) -> Tensor {
        let value = |i: usize| match (i * 7919 + member * 104_729) % 23 {
            0 if dtype.is_float() => f64::NAN,
            k => (k as f64 - 11.0) * 1.1f64.powi((i % 97) as i32),
        };
        crate::tensor::for_dtype!(any dtype, T => {
            Tensor::from_vec((0..shape.numel()).map(|i| T::from_f64(value(i))).collect(), shape).unwrap()
        })
    }

    #[test]
    fn equals_the_definition_by_bits() {
        for members in [1, 2, 3, 4, 5, 7, 8, 13] {
            for dtype in DType::ALL {
                for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
                    for n in [0, 1, 5, BLOCK - 1, 2 * BLOCK + 3] {
                        let shape = Shape::from([n]);
                        let parts: Vec<Tensor> = (0..members).map(|m| sample(dtype, m, &shape)).collect();
                        let (got, want) = (fold(op, &parts), tree(op, &parts));
                        assert_eq!(got.shape(), want.shape());
                        let same = got.as_bytes().unwrap() == want.as_bytes().unwrap();
                        assert!(same, "{op} of {members} x {dtype}[{n}]");
                    }
                }
            }
        }
    }

    #[test]
    fn bf16_sums_round_as_ever() {
        let patterns: Vec<bf16> = (0..=u16::MAX).step_by(251).map(bf16::from_bits).collect();
        for &a in &patterns {
            for &b in &patterns {
                let want = bf16::from_f32(a.to_f32() + b.to_f32());
                let got = add_bf16(a, b);
                assert!(
                    got.to_bits() == want.to_bits() || (a.is_nan() && b.is_nan() && got.is_nan()),
                    "{a} {b}"
                );
            }
        }
    }

    #[test]
    fn a_chunk_has_the_bits_of_the_whole() {
        let shape = Shape::from([101]);
        let parts: Vec<Tensor> = (0..6).map(|m| sample(DType::F32, m, &shape)).collect();
        let whole = fold(ReduceOp::Sum, &parts);
        let mut chunk = Tensor::zeros(DType::F32, [30]);
        fold_range(ReduceOp::Sum, parts.iter(), 37..67, chunk.bytes_mut());
        assert_eq!(chunk.as_bytes().unwrap(), &whole.as_bytes().unwrap()[37 * 4..67 * 4]);
    }
}

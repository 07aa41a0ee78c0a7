//! Reductions over any dims, in the order of the summation tree.

use isoshard_kernels::{Reducible, Reduction};

use super::as_elements_mut;
use super::cast::cast;
use crate::error::{Error, Result};
use crate::tensor::{DType, Element, ReduceOp, Shape, Tensor};

/// Reduces `x` over `dims`, which remain as dims of extent 1 if `keep_dims`.
///
/// f16 and bf16 are reduced in f32 and rounded once; integers wrap. The maximum and minimum follow
/// [`Num::max`](super::Num::max) and [`Num::min`](super::Num::min): the result is the canonical NaN if any element is
/// NaN, and 0 is larger than -0. Over no elements the result is the lowest value for a maximum, the highest for a
/// minimum, and 0 for a sum.
///
/// ```
/// use isoshard::tensor::{ReduceOp, Tensor, cpu};
/// let x = Tensor::from_vec(vec![1i32, 2, 3, 4, 5, 6], [2, 3])?;
/// assert_eq!(cpu::reduce("sum", &x, &[0], ReduceOp::Sum, false)?.to_vec::<i32>()?, [5, 7, 9]);
/// assert_eq!(cpu::reduce("max", &x, &[1], ReduceOp::Max, true)?.shape()[..], [2, 1]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns an error that names `verb` if a dim does not exist or is named twice, or for a sum of bools.
pub fn reduce(verb: &str, x: &Tensor, dims: &[usize], op: ReduceOp, keep_dims: bool) -> Result<Tensor> {
    match x.dtype() {
        DType::Bool if op != ReduceOp::Sum => {
            cast(&reduce(verb, &cast(x, DType::U8)?, dims, op, keep_dims)?, DType::Bool)
        }
        from => cast(&reduce_wide(verb, x, dims, op, keep_dims)?, from),
    }
}

/// Reduces like [`reduce`], but the result of f16 and bf16 is f32.
///
/// # Errors
/// Returns the errors of [`reduce`].
pub(crate) fn reduce_wide(
    verb: &str,
    x: &Tensor,
    dims: &[usize],
    op: ReduceOp,
    keep_dims: bool,
) -> Result<Tensor> {
    if x.dtype().is_half() {
        return reduce_wide(verb, &cast(x, DType::F32)?, dims, op, keep_dims);
    }
    let (dims, kept) = reduced_dims(verb, x, dims)?;
    let out = match x.dtype() {
        DType::Bool => {
            return Err(Error::invalid(verb, "bool has no arithmetic", x.notation(), "cast it first"));
        }
        _ if dims.is_empty() => x.packed_copy(),
        DType::F64 => reduce_as(x, &dims, &kept, of_op::<f64>(op))?,
        DType::I64 => reduce_as(x, &dims, &kept, of_op::<i64>(op))?,
        DType::I32 => reduce_as(x, &dims, &kept, of_op::<i32>(op))?,
        DType::U8 => reduce_as(x, &dims, &kept, of_op::<u8>(op))?,
        DType::F32 | DType::F16 | DType::BF16 => reduce_as(x, &dims, &kept, of_op::<f32>(op))?,
    };
    if keep_dims {
        return Ok(out);
    }
    out.reshape((0..x.shape().len()).filter(|d| !dims.contains(d)).map(|d| x.shape()[d]).collect::<Shape>())
}

/// Returns the sums of the squares of f32 over at least one dim; the dims stay with extent 1. They are in f64, so that nothing
/// overflows or underflows and each square is exact, and follow the tree.
///
/// # Errors
/// Returns an error for another dtype, and if a dim does not exist or is named twice.
pub(crate) fn sum_of_squares(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    x.data::<f32>()?;
    let (dims, kept) = reduced_dims("sum_of_squares", x, dims)?;
    assert!(!dims.is_empty(), "squares of single elements are no sums");
    reduce_as(x, &dims, &kept, isoshard_kernels::sum_of_squares)
}

/// Returns the kernel of a reduction.
fn of_op<T: Reducible>(op: ReduceOp) -> fn(&Reduction, &[T], &mut [T]) {
    match op {
        ReduceOp::Sum => T::reduce_sum,
        ReduceOp::Max => T::reduce_max,
        ReduceOp::Min => T::reduce_min,
    }
}

/// Reduces in one type; the result has the shape `kept`.
fn reduce_as<T: Element, E: Element>(
    x: &Tensor,
    dims: &[usize],
    kept: &Shape,
    run: fn(&Reduction, &[E], &mut [T]),
) -> Result<Tensor> {
    let Some(reduction) = Reduction::new(x.shape(), x.strides(), dims) else {
        return reduce_as(&x.packed_copy(), dims, kept, run);
    };
    let mut out = Tensor::uninit(T::DTYPE, kept.clone());
    run(&reduction, x.data::<E>()?, as_elements_mut(out.bytes_mut()));
    Ok(out)
}

/// Returns the dims in ascending order, and the shape of `x` with extent 1 at each of them.
fn reduced_dims(verb: &str, x: &Tensor, dims: &[usize]) -> Result<(Vec<usize>, Shape)> {
    let mut dims = dims.to_vec();
    dims.sort_unstable();
    if dims.windows(2).any(|w| w[0] == w[1]) || dims.last().is_some_and(|&d| d >= x.shape().len()) {
        let given = format!("dims {dims:?} of {}", x.notation());
        return Err(Error::invalid(verb, "wants dims of the tensor, each once", given, ""));
    }
    let kept = x.shape().iter().enumerate().map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect();
    Ok((dims, kept))
}

#[cfg(test)]
mod tests {
    use isoshard_kernels::merges;

    use super::*;
    use crate::tensor::LEAF;
    use crate::tensor::cpu::{Isa, with_isa};

    fn noise(shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        let value = |i: usize| ((i * 7919 + 13) % 10_007) as f32 * 0.001_37 - 6.5;
        Tensor::from_vec((0..shape.numel()).map(value).collect(), shape).unwrap()
    }

    fn bits(x: &Tensor) -> Vec<u32> {
        x.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect()
    }

    fn sum(x: &Tensor, dims: &[usize]) -> Tensor {
        reduce("sum", x, dims, ReduceOp::Sum, false).unwrap()
    }

    /// Returns the sum over two dims, from the lists of [`merges`].
    fn sum_dims_by_lists(x: &ndarray::ArrayViewD<f32>, outer: usize, inner: usize) -> f32 {
        let mut stack: Vec<f32> = Vec::new();
        let (outer_list, inner_list) = (merges(outer, 1), merges(inner, LEAF));
        for i in 0..outer {
            for j in 0..inner {
                stack.push(x[[i, j]]);
                let last = if j + 1 == inner { outer_list[i] } else { 0 };
                for _ in 0..inner_list[j] + last {
                    let top = stack.pop().unwrap();
                    *stack.last_mut().unwrap() += top;
                }
            }
        }
        stack[0]
    }

    #[test]
    fn one_tree_whatever_the_layout_and_instruction_set() {
        for (m, n) in [(1, 1), (3, 5), (33, 70), (100, 31), (7, 1025), (257, 64), (64, 257), (1, 300)] {
            let x = noise([m, n]);
            let view = x.to_ndarray_view::<f32>().unwrap();
            let all = sum_dims_by_lists(&view, m, n);
            let rows: Vec<u32> = (0..m)
                .map(|i| sum_dims_by_lists(&view.slice(ndarray::s![i..=i, ..]).into_dyn(), 1, n).to_bits())
                .collect();
            let transposed = x.transpose(0, 1).unwrap();
            let wide = noise([m, n, 3]).narrow(2, 0, 1).unwrap();
            let wide_sum = sum(&wide.to_owned_copy().unwrap(), &[0]);
            for &isa in Isa::available() {
                with_isa(isa, || {
                    assert_eq!(sum(&x, &[0, 1]).item().unwrap() as f32, all, "{m} {n} {isa:?}");
                    assert_eq!(bits(&sum(&x, &[1])), rows, "{m} {n} {isa:?}");
                    assert_eq!(
                        bits(&sum(&transposed.contiguous().unwrap(), &[0])),
                        rows,
                        "columns, {m} {n} {isa:?}"
                    );
                    assert_eq!(bits(&sum(&transposed, &[0])), rows, "a view, {m} {n} {isa:?}");
                    assert_eq!(bits(&sum(&wide, &[0])), bits(&wide_sum));
                });
            }
        }
    }

    #[test]
    fn parts_of_power_of_two_join_to_the_whole() {
        for dims in [&[0usize][..], &[0, 1], &[0, 2], &[0, 1, 2]] {
            let x = noise([8, 37, 5]);
            let parts: Vec<Tensor> = (0..4).map(|r| sum(&x.narrow(0, 2 * r, 2).unwrap(), dims)).collect();
            let join = |a: &Tensor, b: &Tensor| super::super::map2::<f32, _>(a, b, |x, y| x + y).unwrap();
            let joint = join(&join(&parts[0], &parts[1]), &join(&parts[2], &parts[3]));
            assert_eq!(bits(&joint), bits(&sum(&x, dims)), "{dims:?}");
        }
    }

    #[test]
    fn against_f64_with_every_choice_of_dims() {
        let x = noise([4, 3, 1, 7]);
        let x = x.permute(&[1, 0, 2, 3]).unwrap();
        let array = x.to_ndarray::<f32>().unwrap().mapv(f64::from);
        for set in 0..16usize {
            let dims: Vec<usize> = (0..4).filter(|d| set >> d & 1 == 1).collect();
            for (op, start) in [(ReduceOp::Sum, 0.0), (ReduceOp::Max, f64::MIN), (ReduceOp::Min, f64::MAX)] {
                let mut want = array.clone();
                for &d in dims.iter().rev() {
                    want = want.fold_axis(ndarray::Axis(d), start, |a, b| match op {
                        ReduceOp::Sum => a + b,
                        ReduceOp::Max => a.max(*b),
                        ReduceOp::Min => a.min(*b),
                    });
                }
                let got = reduce("r", &x, &dims, op, false).unwrap();
                assert_eq!(&got.shape()[..], want.shape());
                for (g, w) in got.to_f64_vec().iter().zip(want.iter()) {
                    assert!((g - w).abs() < 1e-4, "{dims:?} {op}: {g} {w}");
                }
                let kept = reduce("r", &x, &dims, op, true).unwrap();
                assert_eq!((kept.shape().len(), kept.numel()), (4, got.numel()));
            }
        }
    }

    #[test]
    fn extremes_have_the_same_bits_in_any_order() {
        fn odd(i: usize) -> f32 {
            match i % 7 {
                0 => 0.0,
                1 => -0.0,
                3 if i.is_multiple_of(5) => f32::from_bits(0xffc0_0042),
                _ => -1.0,
            }
        }
        for n in [1, 2, 5, 31, 33, 100] {
            for of in [odd as fn(usize) -> f32, |i| if i % 2 == 0 { -0.0 } else { 0.0 }, |_| -0.0] {
                let x = Tensor::from_vec((0..3 * n).map(of).collect::<Vec<f32>>(), [3, n]).unwrap();
                let back = Tensor::from_vec((0..3 * n).rev().map(of).collect::<Vec<f32>>(), [3, n]).unwrap();
                for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
                    let [x, back] = [&x, &back].map(|t| cast(t, dtype).unwrap());
                    for op in [ReduceOp::Max, ReduceOp::Min] {
                        let all = |t: &Tensor, dims: &[usize]| {
                            reduce("m", t, dims, op, false).unwrap().as_bytes().unwrap().to_vec()
                        };
                        let want = all(&x, &[0, 1]);
                        for &isa in Isa::available() {
                            with_isa(isa, || assert_eq!(all(&x, &[0, 1]), want, "{n} {op} {dtype} {isa:?}"));
                        }
                        assert_eq!(all(&back, &[0, 1]), want, "backwards, {n} {op} {dtype}");
                        let transposed = x.transpose(0, 1).unwrap();
                        assert_eq!(all(&transposed, &[0, 1]), want, "transposed, {n} {op} {dtype}");
                        let rows = reduce("m", &transposed.contiguous().unwrap(), &[0], op, false).unwrap();
                        assert_eq!(all(&rows, &[0]), want, "by columns, {n} {op} {dtype}");
                    }
                }
            }
        }
    }

    #[test]
    fn empty_dtypes_and_refusals() {
        let empty = Tensor::zeros(DType::F32, [2, 0, 3]);
        assert_eq!(sum(&empty, &[1]).to_vec::<f32>().unwrap(), [0.0; 6]);
        assert_eq!(sum(&empty, &[0]).numel(), 0);
        let max = reduce("max", &empty, &[1], ReduceOp::Max, false).unwrap();
        assert_eq!(max.to_vec::<f32>().unwrap(), [f32::NEG_INFINITY; 6]);
        let ints = Tensor::from_vec(vec![200u8, 100, 3, 4], [2, 2]).unwrap();
        assert_eq!(sum(&ints, &[1]).to_vec::<u8>().unwrap(), [44, 7], "integers wrap");
        let bools = Tensor::from_vec(vec![true, false, true, true], [2, 2]).unwrap();
        assert_eq!(
            reduce("all", &bools, &[1], ReduceOp::Min, false).unwrap().to_vec::<bool>().unwrap(),
            [false, true]
        );
        assert!(reduce("sum", &bools, &[1], ReduceOp::Sum, false).is_err());
        assert!(reduce("sum", &ints, &[0, 0], ReduceOp::Sum, false).is_err());
        assert!(reduce("sum", &ints, &[2], ReduceOp::Sum, false).is_err());
        let halves = Tensor::full(DType::BF16, [1000], 1.0);
        assert_eq!(sum(&halves, &[0]).item().unwrap(), 1000.0, "accumulated in f32");
        assert_eq!(reduce_wide("sum", &halves, &[0], ReduceOp::Sum, false).unwrap().dtype(), DType::F32);
    }
}

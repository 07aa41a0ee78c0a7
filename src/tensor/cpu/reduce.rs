//! Reductions over any dims, in the order of the [summation tree](super::tree).

use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;

use super::cast::cast;
use super::extremes::{RowElement, RowReducer, join2, join4};
use super::leaves::RowStarts;
use super::real::Num;
use super::reducer::{MaxReducer, MinReducer, Reducer, SquareSumReducer, SumReducer};
use super::row_terms::RowTerm;
use super::simd::{Isa, Kernel, dispatch};
use super::threads::{allowed, for_each_part};
use super::tree::{RowTree, merge_list};
use super::{StridedRows, as_elements_mut};
use crate::error::{Error, Result};
use crate::tensor::{DType, Dims, KernelList, LEAF, ReduceOp, Shape, Tensor, for_dtype};

/// Evaluates `$body` with `$T` as the Rust type of a dtype other than bool.
macro_rules! for_num {
    ($verb:expr, $x:expr, $T:ident => $body:expr) => {
        match $x.dtype() {
            DType::I64 => {
                type $T = i64;
                $body
            }
            DType::I32 => {
                type $T = i32;
                $body
            }
            DType::U8 => {
                type $T = u8;
                $body
            }
            DType::Bool => {
                Err(Error::invalid($verb, "bool has no arithmetic", $x.notation(), "cast it first"))
            }
            float => for_dtype!(float $verb, float, $T => $body),
        }
    };
}

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
/// ```
/// use isoshard::tensor::{DType, ReduceOp, Tensor, cpu};
/// let x = Tensor::full(DType::BF16, [1001], 1.0);
/// assert_eq!(cpu::reduce_wide("sum", &x, &[0], ReduceOp::Sum, false)?.item()?, 1001.0);
/// assert_eq!(cpu::reduce("sum", &x, &[0], ReduceOp::Sum, false)?.item()?, 1000.0); // rounded to bf16
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns the errors of [`reduce`].
pub fn reduce_wide(verb: &str, x: &Tensor, dims: &[usize], op: ReduceOp, keep_dims: bool) -> Result<Tensor> {
    if x.dtype().is_half() {
        return reduce_wide(verb, &cast(x, DType::F32)?, dims, op, keep_dims);
    }
    let (dims, kept) = reduced_dims(verb, x, dims)?;
    let out = for_num!(verb, x, T => Ok(match op {
        ReduceOp::Sum => reduce_as::<<T as super::real::Widen>::Wide, SumReducer>(x, &dims, &kept),
        ReduceOp::Max => reduce_as::<<T as super::real::Widen>::Wide, MaxReducer>(x, &dims, &kept),
        ReduceOp::Min => reduce_as::<<T as super::real::Widen>::Wide, MinReducer>(x, &dims, &kept),
    }))?;
    if keep_dims {
        return Ok(out);
    }
    out.reshape((0..x.shape().len()).filter(|d| !dims.contains(d)).map(|d| x.shape()[d]).collect::<Shape>())
}

/// Returns the sums of the squares of f32 over at least one dim; the dims stay with extent 1. They are in f64, so that nothing
/// overflows or underflows and each square is exact, and follow the [tree](super::tree).
///
/// # Errors
/// Returns an error for another dtype, and if a dim does not exist or is named twice.
pub(crate) fn sum_of_squares(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    x.data::<f32>()?;
    let (dims, kept) = reduced_dims("sum_of_squares", x, dims)?;
    assert!(!dims.is_empty(), "squares of single elements are no sums");
    Ok(reduce_as::<f64, SquareSumReducer>(x, &dims, &kept))
}

/// Reduces in one type; the result has the shape `kept`.
fn reduce_as<T: Num + Pod, F: RowReducer<T>>(x: &Tensor, dims: &[usize], kept: &Shape) -> Tensor {
    let mut out = Tensor::uninit(T::DTYPE, kept.clone());
    let plan = plan_reduction(x, dims, kept);
    let out_data = as_elements_mut::<T>(out.bytes_mut());
    match plan {
        ReductionPlan::Copy => return x.packed_copy(),
        ReductionPlan::Empty => out_data.fill(F::EMPTY),
        ReductionPlan::Fold { x, reduced, columns, by_columns } => {
            let input = ReductionInput {
                data: x.data::<RowElement<T, F>>().expect("the dtype was matched"),
                reduced,
            };
            let (input, columns) = (&input, &columns);
            // The loops read several elements per nanosecond.
            let nanos = x.numel() / 4;
            if by_columns {
                for_each_part(out_data.len(), nanos, out_data, |at, out| {
                    dispatch(ByColumns { input, columns, at, out, fold: PhantomData::<F> });
                });
            } else if out_data.len() < allowed() && input.reduced.outer.steps.len() > 1 {
                for (i, out) in out_data.iter_mut().enumerate() {
                    *out = fold_by_parts::<T, F>(input, columns.offset(i), nanos);
                }
            } else {
                for_each_part(out_data.len(), nanos, out_data, |at, out| {
                    dispatch(ByRows { input, columns, at, out, fold: PhantomData::<F> });
                });
            }
        }
    }
    out
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

/// The loops that a reduction runs, for any type.
#[expect(clippy::large_enum_variant, reason = "a reduction makes one, on the stack")]
enum ReductionPlan {
    /// No dim is reduced.
    Copy,
    /// No elements are reduced, or the result has none.
    Empty,
    /// Each element of the result, whose position in `x` is in `columns`, is folded over `reduced`.
    Fold { x: Tensor, reduced: ReducedDims, columns: StridedRows<1>, by_columns: bool },
}

/// Chooses the loops for a reduction of `x` over `dims`, which are sorted; the result has the shape `kept`.
fn plan_reduction(x: &Tensor, dims: &[usize], kept: &Shape) -> ReductionPlan {
    let Some((&inner, outer)) = dims.split_last() else {
        return ReductionPlan::Copy;
    };
    if kept.numel() == 0 || dims.iter().any(|&d| x.shape()[d] == 0) {
        return ReductionPlan::Empty;
    }
    let strides: Dims = (0..kept.len()).map(|d| if dims.contains(&d) { 0 } else { x.strides()[d] }).collect();
    let columns = StridedRows::new(kept, [&strides]);
    let (inner_len, inner_stride) = (x.shape()[inner], x.strides()[inner]);
    let long = inner_len > 1;
    let by_columns = columns.row_stride(0) == 1 && columns.row_len() > 1 && !(long && inner_stride == 1);
    if !by_columns && long && inner_stride != 1 {
        // A contiguous copy can be folded by rows or by columns.
        return plan_reduction(&x.packed_copy(), dims, kept);
    }
    let outer = OuterDims::new(outer.iter().map(|&d| (x.shape()[d], x.strides()[d])).collect());
    ReductionPlan::Fold {
        x: x.clone(),
        reduced: ReducedDims { outer, inner_len, inner_stride },
        columns,
        by_columns,
    }
}

/// The elements of the tensor and the dims that are reduced.
struct ReductionInput<'a, E> {
    data: &'a [E],
    reduced: ReducedDims,
}

/// The reduced dims.
struct ReducedDims {
    outer: OuterDims,
    inner_len: usize,
    inner_stride: usize,
}

/// The reduced dims except the innermost one.
struct OuterDims {
    /// The offset of each index, and the number of joins after it.
    steps: KernelList<[usize; 2]>,
    /// The largest number of unfinished nodes.
    depth: usize,
}

impl OuterDims {
    fn new(dims: Vec<(usize, usize)>) -> OuterDims {
        let mut steps = KernelList::new();
        steps.push([0, 0]);
        let mut depth = 1;
        for (len, stride) in dims {
            let list = merge_list(len, 1);
            depth += stack_height(&list);
            let mut finer = KernelList::new();
            finer.resize(steps.len().saturating_mul(len));
            for (finer, &[offset, joins]) in finer.chunks_exact_mut(len.max(1)).zip(&*steps) {
                for (i, (step, &m)) in finer.iter_mut().zip(&*list).enumerate() {
                    let last = if i + 1 == len { joins } else { 0 };
                    *step = [offset + i * stride, usize::from(m) + last];
                }
            }
            steps = finer;
        }
        OuterDims { steps, depth }
    }
}

/// Returns the largest height of the stack under a list of [`merges`].
fn stack_height(joins: &[u8]) -> usize {
    let heights = joins.iter().scan(0, |height, &m| {
        *height += 1;
        let tall = *height;
        *height -= m as usize;
        Some(tall)
    });
    heights.max().unwrap_or(0)
}

/// The loop for contiguous rows: it folds each row, and the outer dims join the rows' values.
struct ByRows<'a, T: Num, F: RowReducer<T>> {
    input: &'a ReductionInput<'a, RowElement<T, F>>,
    columns: &'a StridedRows<1>,
    /// The results that are computed.
    at: Range<usize>,
    out: &'a mut [T],
    fold: PhantomData<F>,
}

impl<T: Num, F: RowReducer<T>> Kernel for ByRows<'_, T, F> {
    type Out = ();
    /// The reducers have their own vectors.
    const WIDEST: Isa = Isa::Baseline;
    #[inline(always)]
    fn run(self) {
        let ByRows { input, columns, at, out, .. } = self;
        let steps = &input.reduced.outer.steps[..];
        let mut tree = RowTree::<T>::new(input.reduced.inner_len);
        let mut stack = vec![T::ZERO; input.reduced.outer.depth];
        let (stride, first) = (columns.row_stride(0), at.start);
        columns.each_chunk_of(at, usize::MAX, &mut |&[base], start, len, o| {
            let out = &mut out[o - first..][..len];
            if let [_] = steps {
                let starts = RowStarts::Strided { first: base + start * stride, stride };
                F::fold_at(&mut tree, input.data, starts, out);
                return out.iter_mut().for_each(|node| *node = F::finish(*node));
            }
            for (i, out) in out.iter_mut().enumerate() {
                let base = base + (start + i) * stride;
                let (mut nodes, mut top) = ([T::ZERO; ROWS], 0);
                for steps in steps.chunks(ROWS) {
                    let nodes = &mut nodes[..steps.len()];
                    F::fold_at(
                        &mut tree,
                        input.data,
                        RowStarts::Listed { first: base, offsets: steps },
                        nodes,
                    );
                    let joins = steps.iter().map(|&[_, joins]| joins);
                    join_nodes::<T, F>(nodes.iter().copied().zip(joins), &mut stack, &mut top);
                }
                *out = F::finish(stack[0]);
            }
        });
    }
}

/// The number of rows whose nodes are computed before they are joined.
const ROWS: usize = 64;

/// Joins nodes, each with the number of joins after it, on a stack with room for those that are unfinished; there are
/// `top` of them.
#[inline(always)]
fn join_nodes<T: Num, F: Reducer<T>>(
    nodes: impl Iterator<Item = (T, usize)>,
    stack: &mut [T],
    top: &mut usize,
) {
    for (mut node, joins) in nodes {
        for _ in 0..joins {
            *top -= 1;
            node = F::join(stack[*top], node);
        }
        stack[*top] = node;
        *top += 1;
    }
}

/// Computes one result, whose elements begin at `base`: the rows' values in parts, then their sum.
fn fold_by_parts<T: Num + Pod, F: RowReducer<T>>(
    input: &ReductionInput<'_, RowElement<T, F>>,
    base: usize,
    nanos: usize,
) -> T {
    let steps = &input.reduced.outer.steps;
    let mut nodes = KernelList::<T>::new();
    nodes.resize(steps.len());
    for_each_part(steps.len(), nanos, &mut nodes[..], |at, nodes| {
        let (mut tree, steps) = (RowTree::<T>::new(input.reduced.inner_len), &steps[at]);
        F::fold_at(&mut tree, input.data, RowStarts::Listed { first: base, offsets: steps }, nodes);
    });
    let nodes = nodes.iter().zip(&**steps).map(|(&node, &[_, joins])| (node, joins));
    let mut stack = vec![T::ZERO; input.reduced.outer.depth];
    join_nodes::<T, F>(nodes, &mut stack, &mut 0);
    F::finish(stack[0])
}

/// The loop for contiguous columns: it joins whole rows, on a stack of blocks of columns.
struct ByColumns<'a, T: Num, F: RowReducer<T>> {
    input: &'a ReductionInput<'a, RowElement<T, F>>,
    columns: &'a StridedRows<1>,
    /// The results that are computed.
    at: Range<usize>,
    out: &'a mut [T],
    fold: PhantomData<F>,
}

/// The largest number of columns in a block.
const MAX_BLOCK: usize = 1024;

impl<T: Num, F: RowReducer<T>> Kernel for ByColumns<'_, T, F> {
    type Out = ();
    /// The loops are bound by memory.
    const WIDEST: Isa = Isa::Baseline;
    #[inline(always)]
    fn run(self) {
        let ByColumns { input, columns, at, out, .. } = self;
        let steps = &input.reduced.outer.steps[..];
        let joins = merge_list(input.reduced.inner_len, LEAF);
        let (block, first) = (columns.row_len().min(MAX_BLOCK), at.start);
        let mut stack = vec![T::ZERO; (input.reduced.outer.depth + stack_height(&joins)) * block];
        columns.each_chunk_of(at, block, &mut |&[base], start, width, o| {
            let mut top = 0;
            for &[offset, outer_joins] in steps {
                let data = &input.data[base + start + offset..];
                fold_rows::<T, F>(input, data, &joins, outer_joins, (&mut stack, &mut top), (width, block));
            }
            let out = &mut out[o - first..][..width];
            out.iter_mut().zip(&stack[..width]).for_each(|(o, &node)| *o = F::finish(node));
        });
    }
}

/// Pushes the rows of one outer index, up to four at once.
#[inline(always)]
fn fold_rows<T: Num, F: RowReducer<T>>(
    input: &ReductionInput<'_, RowElement<T, F>>,
    data: &[RowElement<T, F>],
    joins: &[u8],
    outer_joins: usize,
    (stack, top): (&mut [T], &mut usize),
    (width, block): (usize, usize),
) {
    let row = |i: usize| &data[i * input.reduced.inner_stride..][..width];
    let mut i = 0;
    if const { F::ANY_ORDER } {
        let node = &mut stack[..width];
        if *top == 0 {
            node.fill(F::EMPTY);
            *top = 1;
        }
        while i + 4 <= joins.len() {
            join4::<T, F, true>(node, [row(i), row(i + 1), row(i + 2), row(i + 3)]);
            i += 4;
        }
        for i in i..joins.len() {
            node.iter_mut().zip(row(i)).for_each(|(n, &a)| *n = F::join(*n, F::Term::of(a)));
        }
        return;
    }
    while i < joins.len() {
        let taken = match &joins[i..] {
            [0, 1, 0, m, ..] if *m >= 2 => 4,
            [0, m, ..] if *m >= 1 => 2,
            _ => 1,
        };
        let done = [0, 0, 1, 1, 2][taken];
        let last = i + taken == joins.len();
        let left = usize::from(joins[i + taken - 1]) - done + if last { outer_joins } else { 0 };
        // If the rows' node is joined with the topmost entry next, it is added to that entry directly.
        let into = left > 0;
        let slot = if into { *top - 1 } else { *top };
        let node = &mut stack[slot * block..][..width];
        match (taken, into) {
            (4, true) => join4::<T, F, true>(node, [row(i), row(i + 1), row(i + 2), row(i + 3)]),
            (4, false) => join4::<T, F, false>(node, [row(i), row(i + 1), row(i + 2), row(i + 3)]),
            (2, true) => join2::<T, F, true>(node, row(i), row(i + 1)),
            (2, false) => join2::<T, F, false>(node, row(i), row(i + 1)),
            (_, true) => node.iter_mut().zip(row(i)).for_each(|(n, &a)| *n = F::join(*n, F::Term::of(a))),
            (_, false) => node.iter_mut().zip(row(i)).for_each(|(n, &a)| *n = F::Term::of(a)),
        }
        *top = slot + 1;
        for _ in 1..left {
            let (below, above) = stack.split_at_mut((*top - 1) * block);
            let below = &mut below[(*top - 2) * block..][..width];
            below.iter_mut().zip(above.iter()).for_each(|(a, &b)| *a = F::join(*a, b));
            *top -= 1;
        }
        i += taken;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::cpu::{Isa, merges, with_isa};

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

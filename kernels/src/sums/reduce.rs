//! Reductions of strided tensors over any dims, in the order of the [summation tree](super::tree).

use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;

use super::extremes::{RowElement, RowReducer, join2, join4};
use super::leaves::RowStarts;
use super::reducer::{MaxReducer, MinReducer, Reducer, SquareSumReducer, SumReducer};
use super::row_terms::RowTerm;
use super::tree::{RowTree, merge_list};
use crate::Dims;
use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::loops::strided_rows::StridedRows;
use crate::memory::KernelList;
use crate::num::real::Num;
use crate::summation::LEAF;
use crate::threads::team::{allowed, for_each_part};

/// The loops of a reduction of a tensor of some shape and strides over some of its dims.
#[derive(Debug)]
pub struct Reduction {
    loops: ReductionLoops,
}

#[derive(Debug)]
enum ReductionLoops {
    /// No elements are reduced, or the result has none.
    Empty,
    /// Each element of the result, whose position in the tensor is in `columns`, is folded over `reduced`.
    Fold { reduced: ReducedDims, columns: Box<StridedRows<1>>, by_columns: bool, numel: usize },
}

impl Reduction {
    /// Chooses the loops for a reduction over `dims`, which ascend, at least one. `None` if only a contiguous copy can be
    /// reduced, by rows or by columns.
    pub fn new(shape: &[usize], strides: &[usize], dims: &[usize]) -> Option<Reduction> {
        let (&inner, outer) = dims.split_last().expect("at least one dim is reduced");
        let kept: Dims = (0..shape.len()).map(|d| if dims.contains(&d) { 1 } else { shape[d] }).collect();
        if shape.contains(&0) {
            return Some(Reduction { loops: ReductionLoops::Empty });
        }
        let kept_strides: Dims =
            (0..shape.len()).map(|d| if dims.contains(&d) { 0 } else { strides[d] }).collect();
        let columns = StridedRows::new(&kept, [&kept_strides]);
        let (inner_len, inner_stride) = (shape[inner], strides[inner]);
        let long = inner_len > 1;
        let by_columns = columns.row_stride(0) == 1 && columns.row_len() > 1 && !(long && inner_stride == 1);
        if !by_columns && long && inner_stride != 1 {
            return None;
        }
        let outer = OuterDims::new(outer.iter().map(|&d| (shape[d], strides[d])).collect());
        let reduced = ReducedDims { outer, inner_len, inner_stride };
        let (columns, numel) = (Box::new(columns), shape.iter().product());
        Some(Reduction { loops: ReductionLoops::Fold { reduced, columns, by_columns, numel } })
    }

    fn run<T: Num + Pod, F: RowReducer<T>>(&self, data: &[RowElement<T, F>], out: &mut [T]) {
        let ReductionLoops::Fold { reduced, columns, by_columns, numel } = &self.loops else {
            return out.fill(F::EMPTY);
        };
        let (input, columns) = (&ReductionInput { data, reduced }, &**columns);
        // The loops read several elements per nanosecond.
        let nanos = numel / 4;
        if *by_columns {
            for_each_part(out.len(), nanos, out, |at, out| {
                dispatch(ByColumns { input, columns, at, out, fold: PhantomData::<F> });
            });
        } else if out.len() < allowed() && input.reduced.outer.steps.len() > 1 {
            for (i, out) in out.iter_mut().enumerate() {
                *out = fold_by_parts::<T, F>(input, columns.offset(i), nanos);
            }
        } else {
            for_each_part(out.len(), nanos, out, |at, out| {
                dispatch(ByRows { input, columns, at, out, fold: PhantomData::<F> });
            });
        }
    }
}

/// A number type whose tensors are reduced: f32, f64, i64, i32 or u8.
///
/// ```
/// use isoshard_kernels::{Reducible, Reduction};
/// let rows = Reduction::new(&[2, 3], &[3, 1], &[1]).expect("rows are contiguous");
/// let mut out = [0.0f32; 2];
/// f32::reduce_sum(&rows, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], &mut out);
/// assert_eq!(out, [3.0, 12.0]);
/// ```
pub trait Reducible: Num {
    /// Writes the sums; integers wrap.
    fn reduce_sum(reduction: &Reduction, data: &[Self], out: &mut [Self]);
    /// Writes the largest elements, by the rules of [`Num::max`].
    fn reduce_max(reduction: &Reduction, data: &[Self], out: &mut [Self]);
    /// Writes the smallest elements, by the rules of [`Num::min`].
    fn reduce_min(reduction: &Reduction, data: &[Self], out: &mut [Self]);
}

macro_rules! reduce {
    ($($t:ty)*) => {$(
        impl Reducible for $t {
            fn reduce_sum(reduction: &Reduction, data: &[$t], out: &mut [$t]) {
                reduction.run::<$t, SumReducer>(data, out);
            }

            fn reduce_max(reduction: &Reduction, data: &[$t], out: &mut [$t]) {
                reduction.run::<$t, MaxReducer>(data, out);
            }

            fn reduce_min(reduction: &Reduction, data: &[$t], out: &mut [$t]) {
                reduction.run::<$t, MinReducer>(data, out);
            }
        }
    )*};
}
reduce!(f32 f64 i64 i32 u8);

/// Writes the sums of the squares of f32 in f64, so that nothing overflows or underflows and each square is exact.
pub fn sum_of_squares(reduction: &Reduction, data: &[f32], out: &mut [f64]) {
    reduction.run::<f64, SquareSumReducer>(data, out);
}

/// The elements of the tensor and the dims that are reduced.
struct ReductionInput<'a, E> {
    data: &'a [E],
    reduced: &'a ReducedDims,
}

/// The reduced dims.
#[derive(Debug)]
struct ReducedDims {
    outer: OuterDims,
    inner_len: usize,
    inner_stride: usize,
}

/// The reduced dims except the innermost one.
#[derive(Debug)]
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

//! `scatter`, `scatter_max` and `scatter_min`: write elements along a dim by index.

use smallvec::smallvec;

use super::lines::{DimLines, LineIndex};
use super::scatter_cuda;
use super::segments::expect_indices;
use crate::error::{Error, Result};
use crate::ops::record::work::elements;
use crate::ops::{
    Add, Algebra, AxisPlacement, BitwiseOr, Cast, Compare, CompareKind, Div, FloatTest, FloatTestKind,
    Gather, Input, LastWrite, Mask, MeshAxis, Meta, Metas, Op, Row, Sample, ScatterAdd, Tensors, Vjp,
    VjpValue, Windows, Work, accumulator, arity, list,
};
use crate::tensor::{DType, Element, ReduceOp, Tensor, for_dtype};

/// Writes elements along a dim by index: `(x, index, src) -> y`, where y is x except that `src[.., k, ..]` is written to
/// index `index[.., k, ..]` for each `k`. Applied by [`DTensor::scatter`](crate::dtensor::DTensor::scatter) and
/// [`DTensor::scatter_reduce`](crate::dtensor::DTensor::scatter_reduce).
///
/// The index is i64; index and src have one shape, whose extents in all dims but `dim` are those of x.
///
/// ```
/// use isoshard::{ops::{Scatter, ScatterRule, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![5.0, 5.0, 5.0], [3])?;
/// let (index, src) = (Tensor::from_vec(vec![1i64, 1], [2])?, Tensor::from_vec(vec![9.0, 2.0], [2])?);
/// let run = |rule| eval_whole(&Scatter { dim: 0, rule }, &[x.clone(), index.clone(), src.clone()]);
/// assert_eq!(run(ScatterRule::Last)?[0].to_f64_vec(), [5.0, 2.0, 5.0]);
/// assert_eq!(run(ScatterRule::Max)?[0].to_f64_vec(), [5.0, 9.0, 5.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scatter {
    /// The dim.
    pub dim: usize,
    /// The element that stays.
    pub rule: ScatterRule,
}

/// The element that stays if [`Scatter`] writes to an index.
///
/// ```
/// use isoshard::ops::{Op, Scatter, ScatterRule};
/// assert_eq!(Scatter { dim: 0, rule: ScatterRule::Min }.name(), "scatter_min");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScatterRule {
    /// The element written last: of several with one destination the one with the largest `k`.
    Last,
    /// The largest of the element of x and those written. A NaN gives the one fixed NaN, and -0 is less than 0.
    Max,
    /// The smallest, by the rules of the largest.
    Min,
}

impl Scatter {
    fn reduction(&self) -> Option<ReduceOp> {
        match self.rule {
            ScatterRule::Last => None,
            ScatterRule::Max => Some(ReduceOp::Max),
            ScatterRule::Min => Some(ReduceOp::Min),
        }
    }
}

impl Op for Scatter {
    fn name(&self) -> &'static str {
        match self.rule {
            ScatterRule::Last => "scatter",
            ScatterRule::Max => "scatter_max",
            ScatterRule::Min => "scatter_min",
        }
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x, index, src] = arity(self.name(), ins)?;
        let bad = |rule: &str| {
            Err(Error::invalid(self.name(), rule, format!("dim {} of {}", self.dim, list(ins)), ""))
        };
        expect_indices(self.name(), index)?;
        let (n, m) = (&x.shape, &index.shape);
        let alike = n.len() == m.len() && (0..n.len()).all(|d| d == self.dim || n[d] == m[d]);
        if *m != src.shape || !alike || self.dim >= n.len() {
            return bad("wants index and source of one shape, with the tensor's extents in other dims");
        }
        if x.dtype != src.dtype {
            return bad("the source has another dtype than the tensor");
        }
        if x.dtype == DType::Bool && self.rule != ScatterRule::Last {
            return bad("bool has no order here");
        }
        Ok(smallvec![x.clone()])
    }

    /// If the dim is sharded, each rank writes to the indices that it stores. Elements are only moved, so all partials
    /// of one kind are accepted; a maximum of equal elements is the element, so a partial maximum may meet replicas. For
    /// the largest and smallest, each rank may also write a part of the source.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let (whole, cut) = (AxisPlacement::R, AxisPlacement::S(self.dim));
        let others = (0..ins[0].shape.len()).filter(|&d| d != self.dim);
        let mut rows: Vec<Row> = others.map(|d| Row::same(AxisPlacement::S(d), 3)).collect();
        rows.push(Row::new([cut, whole, whole], [cut]));
        match self.reduction() {
            None => {
                for row in Algebra::Structural.rows(1) {
                    let part = row.ins[0];
                    rows.push(Row::new([part, whole, part], [part]).exact());
                    if !part.is_sum() {
                        rows.push(Row::new([part, whole, whole], [part]));
                        rows.push(Row::new([whole, whole, part], [part]));
                    }
                }
            }
            Some(op) => {
                let part = AxisPlacement::P(op);
                let mine = [[part, whole, part], [part, whole, whole], [whole, whole, part]];
                let written_in_parts = [[whole, cut, cut], [part, cut, cut]];
                rows.extend(mine.into_iter().chain(written_in_parts).map(|ins| Row::new(ins, [part])));
                // The larger of a minimum and a value is the minimum of the larger ones.
                let other = AxisPlacement::P(if op == ReduceOp::Max { ReduceOp::Min } else { ReduceOp::Max });
                rows.push(Row::new([other, whole, whole], [other]));
            }
        }
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (n, start) = (at.ins[0].global[self.dim], at.ins[0].start(self.dim));
        let index = LineIndex::new(self.name(), &ins[1], self.dim, n)?;
        let held = DimLines::new(ins[0].shape(), self.dim);
        let (len, src) = (ins[1].shape()[self.dim], ins[2].contiguous()?);
        if let Some(op) = self.reduction() {
            // The maximum of an element and itself is the element, or the one fixed NaN.
            let x = ins[0].contiguous()?;
            op.fold(&mut ins[0], &x)?;
        }
        let x = &mut ins[0];
        match (self.rule, x.dtype()) {
            (ScatterRule::Last, dtype) => for_dtype!(any dtype, T => {
                write_rows(x.make_mut::<T>()?, src.as_slice()?, &index, (start, held, len), |_, y| y)?;
            }),
            (rule, DType::I64) => extrema::<i64>(x, &src, &index, (start, held, len), pick(rule))?,
            (rule, DType::I32) => extrema::<i32>(x, &src, &index, (start, held, len), pick(rule))?,
            (rule, DType::U8) => extrema::<u8>(x, &src, &index, (start, held, len), pick(rule))?,
            (rule, dtype) => for_dtype!(float self.name(), dtype, T => {
                let larger = rule == ScatterRule::Max;
                let pick = if larger { ReduceOp::larger::<T> } else { ReduceOp::smaller::<T> };
                extrema::<T>(x, &src, &index, (start, held, len), pick)
            })?,
        }
        Ok(smallvec![ins[0].clone()])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let place = (at.ins[0].global[self.dim], at.ins[0].start(self.dim));
        let [x, index, src] = ins else { unreachable!("infer has counted the operands") };
        Ok(smallvec![match self.reduction() {
            None => scatter_cuda::scatter(x, index, src, self.dim, place)?,
            Some(op) => scatter_cuda::scatter_extremum(x, index, src, self.dim, place, op)?,
        }])
    }

    /// A comparison per element of the source, for the largest and smallest.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(if self.reduction().is_some() { elements(&ins[2]) } else { 0 }, ins, outs)
    }

    /// The gradient of an element that was overwritten is 0. Equal extremes share the gradient equally, and so do NaNs, as
    /// in [`MaxOrMin`](crate::ops::MaxOrMin).
    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(1, "an index has no derivative");
        let (dim, dtype) = (self.dim, g.input_meta(0).dtype);
        if !dtype.is_float() {
            g.none(0, "integers have no derivative");
            g.none(2, "integers have no derivative");
            return Ok(());
        }
        let (x, index, src, y, dy) = (g.input(0), g.input(1), g.input(2), g.output(0), g.grad(0));
        if self.rule == ScatterRule::Last {
            let at_src = g.apply(Gather { dim }, &[dy, index])?;
            if g.needs(0) {
                let never = g.apply(Compare { kind: CompareKind::Ne }, &[index, index])?;
                let zeros = g.apply(Mask { on: true }, &[never, at_src])?;
                let dx = g.apply(self.clone(), &[dy, index, zeros])?;
                g.set(0, dx);
            }
            if g.needs(2) {
                let stays = g.apply(LastWrite { dim, extent: g.input_meta(0).shape[dim] }, &[index])?;
                let dsrc = g.apply(Mask { on: true }, &[stays, at_src])?;
                g.set(2, dsrc);
            }
            return Ok(());
        }
        let extent = g.input_meta(0).shape[dim];
        // f16 and bf16 cannot count as many equal elements as there may be.
        let wide = accumulator(dtype);
        let cast = |g: &mut Vjp, value: VjpValue, dtype| {
            if g.meta(value).dtype == dtype { Ok(value) } else { g.apply(Cast { dtype }, &[value]) }
        };
        // A NaN equals nothing; its destination is NaN.
        let chosen = |g: &mut Vjp, x: VjpValue, y: VjpValue| -> Result<(VjpValue, VjpValue)> {
            let equal = g.apply(Compare { kind: CompareKind::Eq }, &[x, y])?;
            let nan = g.apply(FloatTest { kind: FloatTestKind::Nan }, &[x])?;
            let chosen = g.apply(BitwiseOr, &[equal, nan])?;
            Ok((chosen, g.apply(Cast { dtype: wide }, &[chosen])?))
        };
        let y_at_src = g.apply(Gather { dim }, &[y, index])?;
        let (from_x, ones_x) = chosen(g, x, y)?;
        let (from_src, ones_src) = chosen(g, src, y_at_src)?;
        let count = g.apply(ScatterAdd { dim, extent }, &[index, ones_src])?;
        let count = g.apply(Add, &[ones_x, count])?;
        let dy = cast(g, dy, wide)?;
        let share = g.apply(Div, &[dy, count])?;
        let share = cast(g, share, dtype)?;
        if g.needs(0) {
            let dx = g.apply(Mask { on: true }, &[from_x, share])?;
            g.set(0, dx);
        }
        if g.needs(2) {
            let share = g.apply(Gather { dim }, &[share, index])?;
            let dsrc = g.apply(Mask { on: true }, &[from_src, share])?;
            g.set(2, dsrc);
        }
        Ok(())
    }
}

/// Returns the larger or the smaller of two integers, by a rule that is not [`ScatterRule::Last`].
fn pick<T: Ord + Copy>(rule: ScatterRule) -> fn(T, T) -> T {
    if rule == ScatterRule::Max { std::cmp::max } else { std::cmp::min }
}

fn extrema<T: Element>(
    x: &mut Tensor,
    src: &Tensor,
    index: &LineIndex,
    place: (usize, DimLines, usize),
    pick: fn(T, T) -> T,
) -> Result<()> {
    write_rows(x.make_mut::<T>()?, src.as_slice()?, index, place, pick)
}

/// Sets `x` at each destination to `meet` of itself and the element of `src`, in the order of `src`. This rank stores
/// the rows `held` from row `start` on; `len` is the number of rows of `src` per block.
pub(super) fn write_rows<T: Element>(
    x: &mut [T],
    src: &[T],
    index: &LineIndex,
    (start, held, len): (usize, DimLines, usize),
    meet: impl Fn(T, T) -> T,
) -> Result<()> {
    let inner = held.inner;
    if x.is_empty() || src.is_empty() {
        return Ok(());
    }
    let blocks = x.chunks_exact_mut(held.len * inner).zip(src.chunks_exact(len * inner));
    for ((x, src), index_block) in blocks.zip(index.entries()?.chunks_exact(len * inner / index.width)) {
        if inner == 1 {
            for (&y, &i) in src.iter().zip(index_block) {
                if let Some(x) = x.get_mut((i as usize).wrapping_sub(start)) {
                    *x = meet(*x, y);
                }
            }
            continue;
        }
        let rows = src.chunks_exact(inner).zip(index_block.chunks_exact(inner / index.width));
        for (src, index) in rows {
            for (columns, &i) in (0..).step_by(index_width(src, index)).zip(index) {
                let place = (i as usize).wrapping_sub(start);
                if place >= held.len {
                    continue;
                }
                let src = &src[columns..][..index_width(src, index)];
                let x = &mut x[place * inner + columns..][..src.len()];
                x.iter_mut().zip(src).for_each(|(x, &y)| *x = meet(*x, y));
            }
        }
    }
    Ok(())
}

/// Returns the number of elements of a row of the source that share an entry of its index.
fn index_width<T>(src: &[T], index: &[i64]) -> usize {
    src.len() / index.len()
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let scatter = |dim, rule, x: &[usize], src: &[usize]| {
        let ins = [Input::ints(x), Input::index(src, x[dim]), Input::ints(src)];
        Sample::new(Scatter { dim, rule }, ins)
    };
    vec![
        scatter(1, ScatterRule::Last, &[5, 3], &[5, 7]),
        scatter(0, ScatterRule::Last, &[7, 2], &[3, 2]),
        scatter(1, ScatterRule::Last, &[2, 5, 1], &[2, 0, 1]),
        scatter(1, ScatterRule::Max, &[5, 3], &[5, 7]).not_smooth(),
        scatter(0, ScatterRule::Max, &[3, 2], &[5, 2]).not_smooth(),
        scatter(1, ScatterRule::Min, &[3, 7], &[3, 5]).not_smooth(),
    ]
}

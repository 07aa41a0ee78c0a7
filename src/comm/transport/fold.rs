//! Folds of the members' contributions, in a given order.
//!
//! Elements are folded independently, so a chunk of the result has the bits of the whole.

use std::ops::Range;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use smallvec::SmallVec;

use crate::comm::calls::{Call, Route};
use crate::error::{Error, Result};
use crate::tensor::cpu::{Num, as_elements_mut};
use crate::tensor::{DType, Element, Float, FoldOrder, FoldStep, ReduceOp, Shape, Tensor, cuda, stacked};

/// The elements folded at a time, so that the whole stack stays in the first caches.
const BLOCK: usize = 1024;
/// The elements on the stack; folds of many members take fewer elements at a time.
const STACK: usize = 4 * BLOCK;

/// A reduction of tensors that the members of a group contribute, in a given order.
///
/// ```
/// use isoshard::comm::Reduce;
/// use isoshard::tensor::{ReduceOp, Shape};
///
/// // ((a + b) + (c + d)), each of shape [3].
/// let sum = Reduce::halving(ReduceOp::Sum, 4, Shape::from([3]));
/// assert_eq!((sum.op, sum.shape), (ReduceOp::Sum, Shape::from([3])));
/// ```
#[derive(Clone, Debug)]
pub struct Reduce {
    /// The operation that folds two elements into one.
    pub op: ReduceOp,
    /// The order in which the parts are folded.
    pub order: Arc<FoldOrder>,
    /// The shape of each part, and of each result.
    pub shape: Shape,
}

impl Reduce {
    /// Returns the reduction of one part per member, whose order halves the range of members again and again.
    ///
    /// ```
    /// use isoshard::comm::Reduce;
    /// use isoshard::tensor::ReduceOp;
    ///
    /// let max = Reduce::halving(ReduceOp::Max, 3, [2, 2].into());
    /// assert_eq!(max.order.nodes(), [1, 1, 1]);
    /// ```
    pub fn halving(op: ReduceOp, members: usize, shape: Shape) -> Reduce {
        Reduce { op, order: Arc::new(FoldOrder::halving(members)), shape }
    }

    /// Returns the shape of the tensor that `member` contributes: its parts stacked along a new first dim, unless
    /// there is exactly one.
    pub(crate) fn part_shape(&self, member: usize) -> Shape {
        stacked(self.order.nodes()[member], &self.shape)
    }

    /// Checks that the reduction fits `call`, which member `me` of `members` makes.
    ///
    /// # Errors
    /// Refuses, in the call's name, an order of another number of members, a list of another length, and tensors and
    /// shapes that are not the reduction's.
    pub(crate) fn check(&self, call: &Call<'_>, me: usize, members: usize) -> Result<()> {
        let refuse = |rule, given| Err(Error::invalid(call.name, rule, given, ""));
        let nodes = self.order.nodes();
        if nodes.len() != members {
            let given = format!("an order of {} members in a group of {members}", nodes.len());
            return refuse("the reduction's order is another group's", given);
        }
        let (sent, own) = if call.route == Route::AllToAll { (members, me) } else { (1, 0) };
        if (call.outgoing.len(), call.incoming.len()) != (sent, members) {
            let given = format!("{} tensors and {} shapes", call.outgoing.len(), call.incoming.len());
            return refuse("a reduction sends a tensor and expects a shape per member", given);
        }
        if let Some(at) = (0..members).find(|&at| !self.is_part(at, &call.incoming[at])) {
            let given = format!("{} of member {at}, not {}", call.incoming[at], self.part_shape(at));
            return refuse("a member's part has another shape than the reduction's", given);
        }
        let fits = |x: &Tensor| x.dtype() == call.dtype && x.is_contiguous();
        if !(call.outgoing[own].shape() == &call.incoming[me] && call.outgoing.iter().all(fits)) {
            let given = format!("{} for {}{}", call.outgoing[own].notation(), call.dtype, call.incoming[me]);
            return refuse("the tensors sent are not the reduction's, or not contiguous", given);
        }
        Ok(())
    }

    /// Returns true if `shape` is [`Reduce::part_shape`] of the member.
    fn is_part(&self, member: usize, shape: &Shape) -> bool {
        match self.order.nodes()[member] {
            1 => *shape == self.shape,
            n => shape.first() == Some(&n) && shape[1..] == self.shape[..],
        }
    }

    /// Returns the result, from one contiguous tensor per member, all of one dtype.
    pub(crate) fn fold(&self, parts: &[Tensor]) -> Result<Tensor> {
        fold(self, parts)
    }

    /// Returns the shape of the result: the results stacked along a new first dim, unless there is exactly one.
    /// [`Reduce::part_shape`] has an example.
    pub(crate) fn out_shape(&self) -> Shape {
        stacked(self.order.outs_len(), &self.shape)
    }
}

/// Returns the reduction of `parts`, one contiguous tensor per member, with the shapes that [`Reduce::part_shape`]
/// gives.
///
/// # Errors
/// Refuses other parts.
pub(crate) fn fold(reduce: &Reduce, parts: &[Tensor]) -> Result<Tensor> {
    let is_part = |(member, x): (usize, &Tensor)| {
        x.dtype() == parts[0].dtype() && x.is_contiguous() && reduce.is_part(member, x.shape())
    };
    if parts.len() != reduce.order.nodes().len() || parts.is_empty() || !parts.iter().enumerate().all(is_part)
    {
        let given: Vec<String> = parts.iter().map(Tensor::notation).collect();
        let rule = "the parts are not those of the reduction's order and shape";
        return Err(Error::invalid("fold", rule, format!("{} for {}", given.join(", "), reduce.shape), ""));
    }
    fold_into(reduce, &|member| &parts[member], Tensor::try_uninit)
}

/// Folds as [`fold`] does; `of` returns the tensor of a member. `room` allocates the result, a contiguous CPU tensor
/// that nothing else holds.
pub(crate) fn fold_into<'a>(
    reduce: &Reduce,
    of: &dyn Fn(usize) -> &'a Tensor,
    room: impl FnOnce(DType, Shape) -> Result<Tensor>,
) -> Result<Tensor> {
    let (dtype, device) = (of(0).dtype(), of(0).device());
    let shape = reduce.out_shape();
    if shape.numel() == 0 {
        return Tensor::zeros_on(device, dtype, shape);
    }
    if let (1, &[FoldStep::Push { operand: member, .. }]) = (reduce.order.nodes().len(), reduce.order.steps())
    {
        return Ok(of(member).clone());
    }
    let members = 0..reduce.order.nodes().len();
    if members.clone().any(|member| of(member).is_meta()) {
        return Tensor::without_elements(dtype, shape);
    }
    if device.is_cuda() {
        let parts: Vec<Tensor> = members.map(|member| of(member).clone()).collect();
        return cuda::fold(reduce.op, &reduce.order, &reduce.shape, &parts);
    }
    let mut out = room(dtype, shape)?;
    let row = reduce.shape.numel() * dtype.size_bytes();
    let rows = out.bytes_mut().chunks_exact_mut(row).collect();
    fold_range(reduce, of, 0..reduce.shape.numel(), rows);
    Ok(out)
}

/// The memory of each result, or of a chunk of it.
pub(crate) type ResultBytes<'a> = SmallVec<[&'a mut [u8]; 2]>;

/// Folds the elements `range` of every member's parts into `outs`, one slice per result with exactly these elements.
pub(crate) fn fold_range<'a>(
    reduce: &Reduce,
    of: &dyn Fn(usize) -> &'a Tensor,
    range: Range<usize>,
    outs: ResultBytes<'_>,
) {
    let job = FoldJob { reduce, of, range };
    let op = reduce.op;
    match of(0).dtype() {
        DType::F32 => job.floats::<f32>(outs),
        DType::F64 => job.floats::<f64>(outs),
        DType::F16 if op == ReduceOp::Sum => job.run::<f16, _>(&SumF16, outs),
        DType::F16 => job.floats::<f16>(outs),
        DType::BF16 if op == ReduceOp::Sum => job.run::<bf16, _>(&ElementwiseRule(add_bf16), outs),
        DType::BF16 => job.floats::<bf16>(outs),
        DType::I64 => job.ints::<i64>(outs, i64::wrapping_add),
        DType::I32 => job.ints::<i32>(outs, i32::wrapping_add),
        DType::U8 => job.ints::<u8>(outs, u8::wrapping_add),
        DType::Bool => match op {
            ReduceOp::Min => job.run::<bool, _>(&ElementwiseRule(|a: bool, b: bool| a & b), outs),
            ReduceOp::Sum | ReduceOp::Max => {
                job.run::<bool, _>(&ElementwiseRule(|a: bool, b: bool| a | b), outs)
            }
        },
    }
}

struct FoldJob<'a, 'f> {
    reduce: &'f Reduce,
    of: &'f dyn Fn(usize) -> &'a Tensor,
    range: Range<usize>,
}

impl<'a> FoldJob<'a, '_> {
    fn floats<T: Float<Acc: Num>>(&self, outs: ResultBytes<'_>) {
        match self.reduce.op {
            ReduceOp::Sum => {
                self.run::<T, _>(&ElementwiseRule(|a: T, b: T| T::narrow(a.widen() + b.widen())), outs)
            }
            ReduceOp::Max => self.run::<T, _>(&ElementwiseRule(ReduceOp::larger::<T>), outs),
            ReduceOp::Min => self.run::<T, _>(&ElementwiseRule(ReduceOp::smaller::<T>), outs),
        }
    }

    fn ints<T: Element + Ord>(&self, outs: ResultBytes<'_>, add: impl Fn(T, T) -> T + Copy) {
        match self.reduce.op {
            ReduceOp::Sum => self.run::<T, _>(&ElementwiseRule(add), outs),
            ReduceOp::Max => self.run::<T, _>(&ElementwiseRule(T::max), outs),
            ReduceOp::Min => self.run::<T, _>(&ElementwiseRule(T::min), outs),
        }
    }

    /// Compiled once per type; the rule's loops are behind virtual calls, one per block.
    fn run<T: Element, W: Copy + Default>(&self, rule: &dyn FoldRule<T, W>, outs: ResultBytes<'_>) {
        let mut outs: Outs<'_, T> = outs.into_iter().map(as_elements_mut::<T>).collect();
        let each = self.reduce.shape.numel();
        let of = |member: usize, node: usize| -> &'a [T] {
            let all =
                (self.of)(member).as_slice::<T>().expect("contributions are contiguous and of one dtype");
            &all[node * each..][..each][self.range.clone()]
        };
        let ops = fuse(self.reduce.order.steps(), of);
        if let ([FusedStep::Pair(a, b)], [out]) = (&ops[..], &mut outs[..])
            && rule.pair(a, b, out)
        {
            return;
        }
        self.run_blocks(rule, &ops, outs);
    }

    /// Separate from `run`, so that the fold of two members does not need the large stack frame.
    #[inline(never)]
    fn run_blocks<T: Element, W: Copy + Default>(
        &self,
        rule: &dyn FoldRule<T, W>,
        ops: &[FusedStep<T>],
        mut outs: Outs<'_, T>,
    ) {
        let n = self.range.len();
        let entries = self.reduce.order.depth() + 1;
        let block = BLOCK.min(STACK / entries).max(1).min(n);
        let mut stack: SmallVec<[W; STACK]> = SmallVec::new();
        stack.resize(entries * block, W::default());
        for start in (0..n).step_by(block) {
            let at = start..(start + block).min(n);
            fold_block(rule, ops, at.clone(), block, &mut stack);
            for (out, entry) in outs.iter_mut().zip(stack.chunks_exact(block)) {
                rule.store(&entry[..at.len()], &mut out[at.clone()]);
            }
        }
    }
}

/// The elements of each result.
type Outs<'a, T> = SmallVec<[&'a mut [T]; 2]>;

/// Steps of a fold, in which common pairs of steps are fused so that a part is read in place.
enum FusedStep<'a, T> {
    Push(&'a [T]),
    Empty,
    Pair(&'a [T], &'a [T]),
    Into(&'a [T]),
    Join,
}

fn fuse<'a, T>(steps: &[FoldStep], of: impl Fn(usize, usize) -> &'a [T]) -> SmallVec<[FusedStep<'a, T>; 16]> {
    let mut ops = SmallVec::new();
    for step in steps {
        match *step {
            FoldStep::Push { operand: member, node } => ops.push(FusedStep::Push(of(member, node))),
            FoldStep::Empty => ops.push(FusedStep::Empty),
            FoldStep::Join => match ops[..] {
                [.., FusedStep::Push(a), FusedStep::Push(b)] => {
                    ops.truncate(ops.len() - 2);
                    ops.push(FusedStep::Pair(a, b));
                }
                [.., FusedStep::Push(b)] => {
                    ops.pop();
                    ops.push(FusedStep::Into(b));
                }
                _ => ops.push(FusedStep::Join),
            },
        }
    }
    ops
}

/// Runs the steps on the elements `at`; entry k of the stack begins at `k * block`.
fn fold_block<T, W: Copy + Default>(
    rule: &dyn FoldRule<T, W>,
    ops: &[FusedStep<T>],
    at: Range<usize>,
    block: usize,
    stack: &mut [W],
) {
    let n = at.len();
    let mut top = 0;
    for op in ops {
        let (below, above) = stack.split_at_mut(top * block);
        match op {
            FusedStep::Push(a) => {
                rule.load(&a[at.clone()], &mut above[..n]);
                top += 1;
            }
            FusedStep::Empty => {
                above[..n].fill(W::default());
                top += 1;
            }
            FusedStep::Pair(a, b) => {
                let (here, room) = above.split_at_mut(block);
                rule.load(&a[at.clone()], &mut here[..n]);
                rule.join_part(&mut here[..n], &b[at.clone()], &mut room[..n]);
                top += 1;
            }
            FusedStep::Into(b) => {
                let here = &mut below[(top - 1) * block..][..n];
                rule.join_part(here, &b[at.clone()], &mut above[..n]);
            }
            FusedStep::Join => {
                let (left, right) = below.split_at_mut((top - 1) * block);
                rule.join(&mut left[(top - 2) * block..][..n], &right[..n]);
                top -= 1;
            }
        }
    }
}

/// The operation of a fold on slices, in a type that may be wider than that of the parts.
trait FoldRule<T, W> {
    fn load(&self, from: &[T], to: &mut [W]);
    fn join(&self, left: &mut [W], right: &[W]);
    /// Joins as [`FoldRule::join`] does with a part that is not loaded yet; `room` is memory to load it into.
    fn join_part(&self, left: &mut [W], right: &[T], room: &mut [W]);
    fn store(&self, from: &[W], to: &mut [T]);
    /// Folds two parts in one pass, and returns false if the rule cannot.
    fn pair(&self, a: &[T], b: &[T], out: &mut [T]) -> bool;
}

/// A fold element by element, in the parts' own type.
struct ElementwiseRule<F>(F);

impl<T: Copy, F: Fn(T, T) -> T> FoldRule<T, T> for ElementwiseRule<F> {
    fn load(&self, from: &[T], to: &mut [T]) {
        to.copy_from_slice(from);
    }
    fn join(&self, left: &mut [T], right: &[T]) {
        left.iter_mut().zip(right).for_each(|(a, &b)| *a = (self.0)(*a, b));
    }
    fn join_part(&self, left: &mut [T], right: &[T], _: &mut [T]) {
        self.join(left, right);
    }
    fn store(&self, from: &[T], to: &mut [T]) {
        to.copy_from_slice(from);
    }
    fn pair(&self, a: &[T], b: &[T], out: &mut [T]) -> bool {
        out.iter_mut().zip(a.iter().zip(b)).for_each(|(o, (&a, &b))| *o = (self.0)(a, b));
        true
    }
}

/// Sums of f16 in f32, rounded after each addition. Whole slices are converted, because each conversion call detects
/// the CPU's features anew.
struct SumF16;

impl FoldRule<f16, f32> for SumF16 {
    fn load(&self, from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
    fn join(&self, left: &mut [f32], right: &[f32]) {
        let mut half = [f16::ZERO; BLOCK];
        left.iter_mut().zip(right).for_each(|(a, b)| *a += b);
        half[..left.len()].convert_from_f32_slice(left);
        half[..left.len()].convert_to_f32_slice(left);
    }
    fn join_part(&self, left: &mut [f32], right: &[f16], room: &mut [f32]) {
        self.load(right, room);
        self.join(left, room);
    }
    fn store(&self, from: &[f32], to: &mut [f16]) {
        to.convert_from_f32_slice(from);
    }
    fn pair(&self, _: &[f16], _: &[f16], _: &mut [f16]) -> bool {
        false
    }
}

/// Adds in f32 and rounds once, as [`Float::narrow`] does; without branches, so that loops over it vectorise.
#[inline(always)]
fn add_bf16(a: bf16, b: bf16) -> bf16 {
    let widen = |x: bf16| f32::from_bits(u32::from(x.to_bits()) << 16);
    let sum = widen(a) + widen(b);
    let bits = sum.to_bits();
    let even = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if sum.is_nan() { quiet } else { even } as u16)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::tensor::FoldOrder;

    /// Folds whole tensors by the definition of the halving tree.
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
                        let reduce = Reduce::halving(op, members, shape);
                        let (got, want) = (fold(&reduce, &parts).unwrap(), tree(op, &parts));
                        assert_eq!(got.shape(), want.shape());
                        // The bits of a NaN that results from two NaNs are not specified.
                        let same =
                            |(g, w): (f64, f64)| g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan());
                        let mut pairs = got.to_f64_vec().into_iter().zip(want.to_f64_vec());
                        assert!(pairs.all(same), "{op} of {members} x {dtype}[{n}]");
                    }
                }
            }
        }
    }

    #[test]
    fn members_with_several_parts_and_several_results() {
        let push = |member, node| FoldStep::Push { operand: member, node };
        // Members with 2, 0 and 1 parts of three elements; (b0 + c) stays separate from b1.
        let order = FoldOrder::new(vec![2, 0, 1], vec![push(0, 0), push(2, 0), FoldStep::Join, push(0, 1)]);
        let reduce = Reduce { op: ReduceOp::Sum, order: Arc::new(order), shape: [3].into() };
        let shapes: Vec<Shape> = (0..3).map(|m| reduce.part_shape(m)).collect();
        assert_eq!(shapes, [Shape::from([2, 3]), [0, 3].into(), [3].into()]);
        let part = |v: Vec<f32>, s: &Shape| Tensor::from_vec(v, s).unwrap();
        let parts = [
            part(vec![1.0, 2.0, 3.0, 10.0, 20.0, 30.0], &shapes[0]),
            part(vec![], &shapes[1]),
            part(vec![0.5; 3], &shapes[2]),
        ];
        let sum = fold(&reduce, &parts).unwrap();
        assert_eq!(
            (sum.shape().clone(), sum.to_f64_vec()),
            ([2, 3].into(), vec![1.5, 2.5, 3.5, 10.0, 20.0, 30.0])
        );
        let no_parts = Reduce { order: Arc::new(FoldOrder::new(vec![0, 0], vec![])), ..reduce.clone() };
        let none = fold(&no_parts, &[parts[1].clone(), parts[1].clone()]).unwrap();
        assert_eq!(*none.shape(), [0, 3].into());
        let empty = Reduce { order: Arc::new(FoldOrder::new(vec![0, 0], vec![FoldStep::Empty])), ..reduce };
        assert_eq!(fold(&empty, &[none.clone(), none]).unwrap().to_f64_vec(), [0.0; 3]);
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
        let reduce = Reduce::halving(ReduceOp::Sum, 6, shape);
        let whole = fold(&reduce, &parts).unwrap();
        let mut chunk = Tensor::zeros(DType::F32, [30]);
        fold_range(&reduce, &|m| &parts[m], 37..67, [chunk.bytes_mut()].into_iter().collect());
        assert_eq!(chunk.as_bytes().unwrap(), &whole.as_bytes().unwrap()[37 * 4..67 * 4]);
    }
}

//! All-reduces of large tensors over engines without shared memory: a reduce-scatter of the flat elements, then an all-gather.
//! They receive the bytes of a ring and have the bits of one fold.

use std::ops::Range;

use super::group::Group;
use super::pending::Pending;
use crate::comm::transport::Reduce;
use crate::error::Result;
use crate::tensor::{DType, Shape, Tensor};

/// An all-reduce takes two calls if that saves at least this many received bytes per rank.
const TWO_PHASE_BYTES: u64 = 64 << 10;

/// A reduction in flight. If it takes two calls, the second starts when its owner says so, or waits.
pub(crate) struct PhasedReduce(ReducePhase);

enum ReducePhase {
    /// No call is left to start.
    Last(Pending<Tensor>),
    /// The reduce-scatter of an all-reduce is in flight.
    Scattering { group: Group, reduce: Reduce, mine: Pending<Tensor> },
}

impl Group {
    /// Starts an all-reduce by a given tree: members may bring several parts or none.
    pub(crate) fn all_reduce_in_phases(&self, x: &Tensor, reduce: Reduce) -> PhasedReduce {
        if !self.takes_two_phases(&reduce, x.dtype()) {
            return self.start_all_reduce(x, reduce).into();
        }
        let mine = self.scatter_flat(x, &reduce).unwrap_or_else(|e| Pending::ready(Err(e)));
        PhasedReduce(ReducePhase::Scattering { group: self.clone(), reduce, mine })
    }

    fn takes_two_phases(&self, reduce: &Reduce, dtype: DType) -> bool {
        let bytes = dtype.bytes_of(reduce.out_shape().numel());
        // A rank receives n - 1 times the tensor in one phase, 2 (n - 1) / n times it in two. With two members the
        // bytes are equal, but two phases still divide the folding.
        let times = ((self.len() - 1) * self.len().saturating_sub(2) / self.len()).max(1);
        let spared = bytes.saturating_mul(times as u64);
        spared >= TWO_PHASE_BYTES && self.len() > 1 && !self.inner.channel.reduces_well()
    }

    /// Starts the reduce-scatter: each member reduces a chunk of the flat elements.
    fn scatter_flat(&self, x: &Tensor, reduce: &Reduce) -> Result<Pending<Tensor>> {
        let each = reduce.shape.numel();
        let flat = x.reshape([reduce.order.nodes()[self.index()], each])?;
        let of = |i: usize| Reduce { shape: [chunk(each, self.len(), i).len()].into(), ..reduce.clone() };
        let part = |i: usize| {
            let chunk = chunk(each, self.len(), i);
            flat.narrow(1, chunk.start, chunk.len())?.reshape(of(i).part_shape(self.index()))
        };
        let parts = (0..self.len()).map(part).collect::<Result<Vec<Tensor>>>()?;
        Ok(self.reduce_scatter_with(parts, of(self.index())))
    }

    /// Waits for the reduce-scatter, and starts the all-gather.
    fn gather_flat(&self, reduce: &Reduce, mine: Pending<Tensor>) -> Result<Pending<Tensor>> {
        let (each, outs, members) = (reduce.shape.numel(), reduce.order.outs_len(), self.len());
        let mine = mine.wait()?.reshape([outs, chunk(each, members, self.index()).len()])?;
        let shape = |i: usize| Shape::from([outs, chunk(each, members, i).len()]);
        let shapes: Vec<Shape> = (0..members).map(shape).collect();
        let (device, dtype, out_shape) = (mine.device(), mine.dtype(), reduce.out_shape());
        let join = move |chunks: Vec<Tensor>| {
            let mut out = Tensor::uninit_on(device, dtype, [outs, each])?;
            for (i, part) in chunks.iter().enumerate() {
                let start = chunk(each, members, i).start;
                part.copy_block(&mut out, part.shape(), (0, part.strides()), (start, &[each, 1]))?;
            }
            out.reshape(out_shape)
        };
        Ok(self.all_gather_async(&mine, &shapes).map(join))
    }
}

/// Returns the elements that a member reduces of `each`.
fn chunk(each: usize, members: usize, member: usize) -> Range<usize> {
    let len = each.div_ceil(members);
    (member * len).min(each)..((member + 1) * len).min(each)
}

impl PhasedReduce {
    /// Returns true if a call has not started.
    pub fn has_next(&self) -> bool {
        matches!(self.0, ReducePhase::Scattering { .. })
    }

    /// Waits for the first of two calls, and starts the second. All members do this between the same calls. An error is
    /// returned by [`PhasedReduce::wait`].
    pub fn advance(&mut self) {
        let nothing = ReducePhase::Last(Pending::ready(Ok(Tensor::default())));
        self.0 = match std::mem::replace(&mut self.0, nothing) {
            ReducePhase::Scattering { group, reduce, mine } => {
                let gathered = group.gather_flat(&reduce, mine);
                ReducePhase::Last(gathered.unwrap_or_else(|e| Pending::ready(Err(e))))
            }
            last => last,
        };
    }

    /// Starts the second call, if there is one, and waits for the last.
    pub fn wait(self) -> Result<Tensor> {
        self.without_later_calls().wait()
    }

    /// Returns the reduction when no call is left to start: one that takes two calls is complete.
    pub fn without_later_calls(mut self) -> Pending<Tensor> {
        let is_complete = self.has_next();
        self.advance();
        match self.0 {
            ReducePhase::Last(call) if is_complete => Pending::ready(call.wait()),
            ReducePhase::Last(call) => call,
            ReducePhase::Scattering { .. } => unreachable!("the second call was started"),
        }
    }
}

impl From<Pending<Tensor>> for PhasedReduce {
    fn from(call: Pending<Tensor>) -> PhasedReduce {
        PhasedReduce(ReducePhase::Last(call))
    }
}

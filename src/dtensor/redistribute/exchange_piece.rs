//! The pieces that ranks of one mesh exchange, and the axes along which they communicate.

use smallvec::SmallVec;

use crate::dtensor::mesh::copied_bytes::note_copied;
use crate::error::Result;
use crate::placement::{Layout, Overlap, Placement, Region};
use crate::tensor::{Dims, Shape, Tensor};

/// The elements that one rank's part has in common with another's.
#[derive(Debug)]
pub(in crate::dtensor) struct ExchangePiece {
    overlaps: SmallVec<[Overlap; 1]>,
    /// The box inside the sender's part, if the piece is one box: then a view is sent. Otherwise the elements are
    /// packed.
    view: Option<(Dims, Dims)>,
    /// True if the piece is all of the sender's part. Its storage is packed already: both ascend with the global
    /// index.
    whole: bool,
}

/// Returns the axes along which ranks communicate to get from `cur` to `mid`: those of `cur` whose split, together
/// with every split outside it, is not also the outermost of `mid`.
pub(in crate::dtensor) fn communicating_axes(cur: &Layout, mid: &Layout, ndim: usize) -> Dims {
    let mut axes = Dims::new();
    for d in 0..ndim {
        let mut new = mid.splitters(d);
        axes.extend(cur.splitters(d).skip_while(|&a| new.next() == Some(a) && cur.axis(a) == mid.axis(a)));
    }
    // A ragged split over several dims depends on every split outside it of each of them.
    for a in 0..cur.ndim() {
        let dims = match cur.axis(a) {
            Placement::RaggedShard { dims, .. } => 0..*dims,
            Placement::Replicate | Placement::Shard(_) | Placement::Partial(_) => 0..0,
        };
        let outside = |d: usize| cur.splitters(d).take_while(|&b| b != a);
        if dims.into_iter().any(|d| outside(d).any(|b| axes.contains(&b))) {
            axes.push(a);
        }
    }
    axes.sort_unstable();
    axes.dedup();
    axes
}

/// Returns true if the move from `cur` to `to` only undoes splits along `axes`, so that all ranks along them receive
/// the same.
pub(in crate::dtensor) fn is_gather(cur: &Layout, to: &Layout, axes: &[usize]) -> bool {
    let new_cut = |a: usize| to.axis(a) != cur.axis(a) && !to.axis(a).is_replicate();
    axes.iter().all(|&a| to.axis(a).is_replicate()) && !(0..to.ndim()).any(new_cut)
}

impl ExchangePiece {
    /// Returns the elements that both regions hold.
    pub fn new(sender: &Region, receiver: &Region) -> ExchangePiece {
        let overlaps: SmallVec<[Overlap; 1]> = sender.intersect(receiver).into_iter().collect();
        let plain =
            sender.boxes.len() == 1 && overlaps.len() == 1 && sender.local[..] == sender.boxes[0].len[..];
        let view = plain.then(|| {
            let o = &overlaps[0];
            let start = sender
                .local
                .strides()
                .iter()
                .zip(sender.local.iter())
                .map(|(s, n)| o.a_offset / s % n)
                .collect();
            (start, o.len.clone())
        });
        let whole = overlaps.iter().map(Overlap::numel).sum::<usize>() == sender.numel();
        ExchangePiece { overlaps, view, whole }
    }

    pub fn numel(&self) -> usize {
        self.overlaps.iter().map(Overlap::numel).sum()
    }

    /// Returns the position in the receiver's part of a piece that is all of the sender's part, and whose elements lie there
    /// one after the other in the same order; `None` for any other piece.
    pub fn run_in_receiver(&self) -> Option<usize> {
        // Both ascend with the global index, so that elements without gaps between them have one order.
        if self.whole { self.run(|o| (o.b_offset, &o.b_strides)) } else { None }
    }

    /// Returns the position in the sender's part of a piece whose elements lie there one after the other, in the order in
    /// which they are sent; `None` for any other piece.
    pub fn run_in_sender(&self) -> Option<usize> {
        self.run(|o| (o.a_offset, &o.a_strides))
    }

    /// Returns the position of elements that lie one after the other, given the place of each box.
    fn run(&self, place: impl Fn(&Overlap) -> (usize, &Dims)) -> Option<usize> {
        let last = |o: &Overlap| {
            let (offset, strides) = place(o);
            offset + o.len.iter().zip(strides).map(|(len, stride)| (len - 1) * stride).sum::<usize>()
        };
        let start = self.overlaps.iter().map(|o| place(o).0).min()?;
        let end = self.overlaps.iter().map(last).max()? + 1;
        (end - start == self.numel()).then_some(start)
    }

    /// Returns the shape in which the piece is sent.
    pub fn shape(&self) -> Shape {
        match &self.view {
            Some((_, len)) => len.clone().into(),
            None => [self.numel()].into(),
        }
    }

    /// Returns the piece of `local`: a view if it is one box, otherwise packed.
    pub fn cut(&self, local: &Tensor) -> Result<Tensor> {
        if let Some((start, len)) = &self.view {
            let mut cut_dims = (0..len.len()).filter(|&d| len[d] != local.shape()[d]);
            return cut_dims.try_fold(local.clone(), |t, d| t.narrow(d, start[d], len[d]));
        }
        let local = packed(local)?;
        if self.whole {
            return local.reshape(self.shape());
        }
        let mut out = Tensor::uninit_on(local.device(), local.dtype(), self.shape())?;
        note_copied(out.len_bytes());
        let mut at = 0;
        for o in &self.overlaps {
            let strides = Shape::from(o.len.clone()).strides();
            local.copy_block(&mut out, &o.len, (o.a_offset, &o.a_strides), (at, &strides))?;
            at += o.len.iter().product::<usize>();
        }
        Ok(out)
    }

    /// Returns the piece of each of `nodes` tensors, stacked unless there is one, as it is sent.
    pub fn cut_nodes(&self, local: &Tensor, nodes: usize) -> Result<Tensor> {
        if nodes == 1 {
            return self.cut(local);
        }
        let cuts: Vec<Tensor> = (0..nodes).map(|i| self.cut(&local.select(0, i)?)).collect::<Result<_>>()?;
        note_copied(nodes * self.numel() * local.dtype().size_bytes());
        Tensor::stack(&cuts, &self.shape(), local.dtype(), local.device())
    }

    /// Writes a piece that [`ExchangePiece::cut`] made into the receiver's part, which begins at element `start` of
    /// `out`.
    pub fn paste(&self, part: &Tensor, out: &mut Tensor, start: usize) -> Result<()> {
        note_copied(part.len_bytes());
        let mut at = 0;
        for o in &self.overlaps {
            let packed = Shape::from(o.len.clone()).strides();
            let strides = if self.view.is_some() { part.strides() } else { &packed };
            part.copy_block(out, &o.len, (at, strides), (start + o.b_offset, &o.b_strides))?;
            at += o.len.iter().product::<usize>();
        }
        Ok(())
    }
}

/// Returns a contiguous tensor of the same elements.
pub(in crate::dtensor) fn packed(x: &Tensor) -> Result<Tensor> {
    note_copied(if x.is_contiguous() { 0 } else { x.len_bytes() });
    x.contiguous()
}

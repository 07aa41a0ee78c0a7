//! The pieces that ranks of two meshes exchange: the elements that one rank's shard has in common with another's.

use smallvec::SmallVec;

use crate::error::Result;
use crate::placement::{Overlap, Region};
use crate::tensor::{Dims, Shape, Tensor};

/// Elements of a sender's shard that belong to a receiver's shard.
///
/// A piece that is one box of a box-shaped shard is sent as a view, and so is a contiguous run of a shard's storage;
/// every other piece is packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BridgePiece {
    /// The common boxes, ascending in the global index, and so in both shards.
    overlaps: SmallVec<[Overlap; 1]>,
    form: PieceForm,
}

/// The form in which a piece is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PieceForm {
    /// The start of the box in the sender's shard, which is one box stored row-major.
    Box(Dims),
    /// The start of the run in the sender's storage.
    Run(usize),
    Spread,
}

impl BridgePiece {
    /// Returns the elements that both regions hold, or `None` if there are none.
    pub fn new(sender: &Region, receiver: &Region) -> Option<BridgePiece> {
        let overlaps = sender.intersect(receiver);
        (!overlaps.is_empty()).then(|| BridgePiece::of(overlaps, is_box(sender).then_some(&sender.local)))
    }

    /// Chooses the form in which these overlaps are sent; `part` is the sender's shape if its shard is one box.
    fn of(overlaps: SmallVec<[Overlap; 1]>, part: Option<&Shape>) -> BridgePiece {
        let form = match (part, &overlaps[..]) {
            (Some(part), [o]) => {
                let place = |(stride, n): (&usize, &usize)| o.a_offset / stride % n;
                PieceForm::Box(part.strides().iter().zip(part.iter()).map(place).collect())
            }
            (_, overlaps) if is_run(overlaps) => PieceForm::Run(overlaps[0].a_offset),
            _ => PieceForm::Spread,
        };
        BridgePiece { overlaps, form }
    }

    pub fn numel(&self) -> usize {
        self.overlaps.iter().map(Overlap::numel).sum()
    }

    /// Returns the shape in which the piece is sent alone.
    pub fn shape(&self) -> Shape {
        match (&self.form, &self.overlaps[..]) {
            (PieceForm::Box(_), [o]) => o.len.clone().into(),
            _ => [self.numel()].into(),
        }
    }

    /// Returns the piece of the sender's shard, to be sent alone.
    pub fn cut(&self, part: &Tensor) -> Result<Tensor> {
        match self.form {
            PieceForm::Box(_) => self.view(part),
            PieceForm::Run(at) => part.reshape([part.numel()])?.narrow(0, at, self.numel()),
            PieceForm::Spread => {
                let mut packed = Tensor::uninit_on(part.device(), part.dtype(), self.shape())?;
                self.pack(part, &mut packed, 0)?;
                Ok(packed)
            }
        }
    }

    /// Packs the piece of the sender's shard into `out`, from element `at` on.
    pub fn pack(&self, part: &Tensor, out: &mut Tensor, mut at: usize) -> Result<()> {
        self.each(part, |from, o, place| {
            let packed = Shape::from(o.len.clone()).strides();
            from.copy_block(out, &o.len, place, (at, &packed))?;
            at += o.numel();
            Ok(())
        })
    }

    /// Copies the piece from the sender's shard into the receiver's, if both are on one rank.
    pub fn copy(&self, part: &Tensor, out: &mut Tensor) -> Result<()> {
        self.each(part, |from, o, place| from.copy_block(out, &o.len, place, (o.b_offset, &o.b_strides)))
    }

    /// Writes a piece that was sent alone into the receiver's shard.
    pub fn paste(&self, received: &Tensor, out: &mut Tensor) -> Result<()> {
        match (&self.form, &self.overlaps[..]) {
            (PieceForm::Box(_), [o]) => {
                received.copy_block(out, &o.len, (0, received.strides()), (o.b_offset, &o.b_strides))
            }
            _ => self.unpack(&received.contiguous()?, 0, out),
        }
    }

    /// Writes a packed piece, from element `at` on, into the receiver's shard.
    pub fn unpack(&self, received: &Tensor, mut at: usize, out: &mut Tensor) -> Result<()> {
        for o in &self.overlaps {
            let packed = Shape::from(o.len.clone()).strides();
            received.copy_block(out, &o.len, (at, &packed), (o.b_offset, &o.b_strides))?;
            at += o.numel();
        }
        Ok(())
    }

    /// Splits the piece into its first `len` elements (fewer if a row of a box would be split) and the rest, or
    /// returns `None` if one of the two would be empty. `part` is the shape of the sender's shard if that is one box.
    pub fn split(&self, len: usize, part: Option<&Shape>) -> Option<(BridgePiece, BridgePiece)> {
        let (mut head, mut tail, mut room) = (SmallVec::new(), SmallVec::new(), len);
        for o in &self.overlaps {
            let n = o.numel();
            if !tail.is_empty() {
                tail.push(o.clone());
            } else if n <= room {
                room -= n;
                head.push(o.clone());
            } else {
                let (first, second) = rows(o, room);
                head.extend(first);
                tail.push(second);
            }
        }
        (!head.is_empty() && !tail.is_empty())
            .then(|| (BridgePiece::of(head, part), BridgePiece::of(tail, part)))
    }

    /// Returns true if the piece is all of a shard that sender and receiver store in the same way.
    pub fn is_all_of(&self, sender: &Region, receiver: &Region) -> bool {
        sender.local == receiver.local && self.numel() == sender.numel() && self.numel() == receiver.numel()
    }

    /// Returns the box as a view of the sender's shard.
    fn view(&self, part: &Tensor) -> Result<Tensor> {
        let (PieceForm::Box(start), [o]) = (&self.form, &self.overlaps[..]) else {
            unreachable!("called for boxes")
        };
        (0..start.len()).try_fold(part.clone(), |t, d| t.narrow(d, start[d], o.len[d]))
    }

    /// Calls `f` with a tensor, and with each overlap and its offset and strides in that tensor.
    fn each(
        &self,
        part: &Tensor,
        mut f: impl FnMut(&Tensor, &Overlap, (usize, &[usize])) -> Result<()>,
    ) -> Result<()> {
        if let PieceForm::Box(_) = self.form {
            let view = self.view(part)?;
            return f(&view, &self.overlaps[0], (0, view.strides()));
        }
        let part = part.contiguous()?;
        self.overlaps.iter().try_for_each(|o| f(&part, o, (o.a_offset, &o.a_strides)))
    }
}

/// Returns true if a region is one box, stored row-major.
pub(super) fn is_box(region: &Region) -> bool {
    matches!(&region.boxes[..], [b] if b.len[..] == region.local[..])
}

/// Returns the first rows of an overlap, with at most `room` elements, and the rest.
fn rows(o: &Overlap, room: usize) -> (Option<Overlap>, Overlap) {
    let d = o.len.iter().position(|&n| n > 1).unwrap_or(0);
    let k = o.len.get(d).map_or(0, |&n| room / (o.numel() / n));
    if k == 0 {
        return (None, o.clone());
    }
    let (mut first, mut second) = (o.clone(), o.clone());
    first.len[d] = k;
    second.len[d] -= k;
    second.start[d] += k;
    second.a_offset += k * o.a_strides[d];
    second.b_offset += k * o.b_strides[d];
    (Some(first), second)
}

/// Returns true if the elements are contiguous in the sender's storage.
fn is_run(overlaps: &[Overlap]) -> bool {
    let mut next = overlaps[0].a_offset;
    overlaps.iter().all(|o| {
        let begins = std::mem::replace(&mut next, o.a_offset + o.numel()) == o.a_offset;
        let packed = Shape::from(o.len.clone()).strides();
        begins && (0..o.len.len()).all(|d| o.len[d] == 1 || o.a_strides[d] == packed[d])
    })
}

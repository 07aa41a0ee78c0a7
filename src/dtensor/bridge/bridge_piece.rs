//! What one rank's part of a tensor has in common with another's, and how it travels.

use smallvec::SmallVec;

use crate::error::Result;
use crate::placement::{Overlap, Region};
use crate::tensor::{Dims, Shape, Tensor};

/// Elements of a giver's part that belong into a taker's.
///
/// A box of a part that is one is given as a view of it, a run of its storage as a view of that; all else is packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BridgePiece {
    /// Ascending in the global index, and so in both parts.
    overlaps: SmallVec<[Overlap; 1]>,
    form: Form,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Form {
    /// Where the box starts in the giver's part, which is one box stored row-major.
    Box(Dims),
    /// Where the run starts in the giver's storage.
    Run(usize),
    Spread,
}

impl BridgePiece {
    /// What both hold; none where that is nothing.
    pub fn new(giver: &Region, taker: &Region) -> Option<BridgePiece> {
        let overlaps = giver.intersect(taker);
        (!overlaps.is_empty()).then(|| BridgePiece::of(overlaps, is_box(giver).then_some(&giver.local)))
    }

    fn of(overlaps: SmallVec<[Overlap; 1]>, part: Option<&Shape>) -> BridgePiece {
        let form = match (part, &overlaps[..]) {
            (Some(part), [o]) => {
                let place = |(stride, n): (&usize, &usize)| o.a_offset / stride % n;
                Form::Box(part.strides().iter().zip(part.iter()).map(place).collect())
            }
            (_, overlaps) if is_run(overlaps) => Form::Run(overlaps[0].a_offset),
            _ => Form::Spread,
        };
        BridgePiece { overlaps, form }
    }

    pub fn numel(&self) -> usize {
        self.overlaps.iter().map(Overlap::numel).sum()
    }

    /// The shape in which it travels alone.
    pub fn shape(&self) -> Shape {
        match (&self.form, &self.overlaps[..]) {
            (Form::Box(_), [o]) => o.len.clone().into(),
            _ => [self.numel()].into(),
        }
    }

    /// The piece of the giver's part, to travel alone.
    pub fn cut(&self, part: &Tensor) -> Result<Tensor> {
        match self.form {
            Form::Box(_) => self.view(part),
            Form::Run(at) => part.reshape([part.numel()])?.narrow(0, at, self.numel()),
            Form::Spread => {
                let mut packed = Tensor::uninit_on(part.device(), part.dtype(), self.shape())?;
                self.pack(part, &mut packed, 0)?;
                Ok(packed)
            }
        }
    }

    /// Packs the piece of the giver's part into `out`, from element `at` on.
    pub fn pack(&self, part: &Tensor, out: &mut Tensor, mut at: usize) -> Result<()> {
        self.each(part, |from, o, place| {
            let packed = Shape::from(o.len.clone()).strides();
            from.copy_block(out, &o.len, place, (at, &packed))?;
            at += o.numel();
            Ok(())
        })
    }

    /// Writes the giver's part's piece into the taker's part at once, where both are one rank's.
    pub fn copy(&self, part: &Tensor, out: &mut Tensor) -> Result<()> {
        self.each(part, |from, o, place| from.copy_block(out, &o.len, place, (o.b_offset, &o.b_strides)))
    }

    /// Writes what came alone into the taker's part.
    pub fn paste(&self, came: &Tensor, out: &mut Tensor) -> Result<()> {
        match (&self.form, &self.overlaps[..]) {
            (Form::Box(_), [o]) => {
                came.copy_block(out, &o.len, (0, came.strides()), (o.b_offset, &o.b_strides))
            }
            _ => self.unpack(&came.contiguous()?, 0, out),
        }
    }

    /// Writes what came packed, from element `at` on, into the taker's part.
    pub fn unpack(&self, came: &Tensor, mut at: usize, out: &mut Tensor) -> Result<()> {
        for o in &self.overlaps {
            let packed = Shape::from(o.len.clone()).strides();
            came.copy_block(out, &o.len, (at, &packed), (o.b_offset, &o.b_strides))?;
            at += o.numel();
        }
        Ok(())
    }

    /// The first `len` elements, or as many fewer as make whole rows of a box, and the rest; `part` is the shape of the
    /// giver's part where it is one box. None where a side would be empty.
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

    /// True where it is all of a part that is stored alike on both sides.
    pub fn is_all_of(&self, giver: &Region, taker: &Region) -> bool {
        giver.local == taker.local && self.numel() == giver.numel() && self.numel() == taker.numel()
    }

    fn view(&self, part: &Tensor) -> Result<Tensor> {
        let (Form::Box(start), [o]) = (&self.form, &self.overlaps[..]) else {
            unreachable!("asked of boxes")
        };
        (0..start.len()).try_fold(part.clone(), |t, d| t.narrow(d, start[d], o.len[d]))
    }

    /// Calls `f` with a tensor, and with each overlap and its place therein.
    fn each(
        &self,
        part: &Tensor,
        mut f: impl FnMut(&Tensor, &Overlap, (usize, &[usize])) -> Result<()>,
    ) -> Result<()> {
        if let Form::Box(_) = self.form {
            let view = self.view(part)?;
            return f(&view, &self.overlaps[0], (0, view.strides()));
        }
        let part = part.contiguous()?;
        self.overlaps.iter().try_for_each(|o| f(&part, o, (o.a_offset, &o.a_strides)))
    }
}

/// True where a region is one box, stored row-major.
pub(super) fn is_box(region: &Region) -> bool {
    matches!(&region.boxes[..], [b] if b.len[..] == region.local[..])
}

/// The first rows of an overlap, of at most `room` elements, and the rest.
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

/// True where the elements follow on one another in the giver's storage.
fn is_run(overlaps: &[Overlap]) -> bool {
    let mut next = overlaps[0].a_offset;
    overlaps.iter().all(|o| {
        let begins = std::mem::replace(&mut next, o.a_offset + o.numel()) == o.a_offset;
        let packed = Shape::from(o.len.clone()).strides();
        begins && (0..o.len.len()).all(|d| o.len[d] == 1 || o.a_strides[d] == packed[d])
    })
}

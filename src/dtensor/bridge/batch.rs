//! Tensors that travel in one exchange.

use std::collections::BTreeMap;

use super::bridge_piece::BridgePiece;
use super::transfer::Transfer;
use crate::comm::{Group, Pending};
use crate::error::Result;
use crate::tensor::{DType, Device, Shape, Tensor};

/// From this size on a tensor travels by itself, as views of what is there; smaller ones of one dtype are packed together.
const ALONE_BYTES: usize = 1 << 20;

/// Tensors of one dtype that travel in one exchange.
pub(super) struct Batch {
    dtype: DType,
    is_alone: bool,
    /// Which of the planned ones they are. Below they are numbered by their places here.
    pub tensors: Vec<usize>,
    /// By member, what of which tensors goes there; those without are absent.
    pub give: Members,
    /// By member, what of which tensors comes from there.
    pub take: Members,
}

type Members = BTreeMap<usize, Vec<(usize, BridgePiece)>>;

impl Batch {
    /// The batch that this transfer travels in.
    pub fn of<'a>(batches: &'a mut Vec<Batch>, transfer: &Transfer) -> &'a mut Batch {
        let Transfer { dtype, ref shape, .. } = *transfer;
        let is_alone = shape.numel() * dtype.size_bytes() >= ALONE_BYTES;
        let fits = |b: &Batch| !is_alone && !b.is_alone && b.dtype == dtype;
        let at = batches.iter().position(fits).unwrap_or_else(|| {
            let (give, take) = (Members::new(), Members::new());
            batches.push(Batch { dtype, is_alone, tensors: Vec::new(), give, take });
            batches.len() - 1
        });
        &mut batches[at]
    }

    /// Starts the exchange. `locals` are this rank's parts of all planned tensors, if it has any.
    pub fn start(&self, group: &Group, device: Device, locals: &[Tensor]) -> Result<Pending<Vec<Tensor>>> {
        let mut parts = vec![Tensor::zeros_on(device, self.dtype, [0])?; group.len()];
        for (&member, pieces) in &self.give {
            parts[member] = match &pieces[..] {
                [(k, piece)] => piece.cut(&locals[self.tensors[*k]])?,
                pieces => self.pack(pieces, device, locals)?,
            };
        }
        let mut shapes = vec![Shape::from([0]); group.len()];
        self.take.iter().for_each(|(&member, pieces)| shapes[member] = shape(pieces));
        Ok(group.all_to_all_async(parts, &shapes))
    }

    pub fn sent_bytes(&self) -> u64 {
        self.bytes(&self.give)
    }

    pub fn received_bytes(&self) -> u64 {
        self.bytes(&self.take)
    }

    fn pack(&self, pieces: &[(usize, BridgePiece)], device: Device, locals: &[Tensor]) -> Result<Tensor> {
        let mut packed = Tensor::uninit_on(device, self.dtype, shape(pieces))?;
        let mut at = 0;
        for (k, piece) in pieces {
            piece.pack(&locals[self.tensors[*k]], &mut packed, at)?;
            at += piece.numel();
        }
        Ok(packed)
    }

    fn bytes(&self, members: &Members) -> u64 {
        let elements: usize = members.values().flatten().map(|(_, piece)| piece.numel()).sum();
        (elements * self.dtype.size_bytes()) as u64
    }
}

/// In what shape pieces travel: one as it is, several one after the other.
fn shape(pieces: &[(usize, BridgePiece)]) -> Shape {
    match pieces {
        [(_, piece)] => piece.shape(),
        _ => [pieces.iter().map(|(_, piece)| piece.numel()).sum::<usize>()].into(),
    }
}

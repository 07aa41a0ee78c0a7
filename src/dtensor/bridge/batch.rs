//! Batches: tensors that share one exchange.

use std::collections::BTreeMap;

use super::bridge_piece::BridgePiece;
use super::transfer::Transfer;
use crate::comm::{Group, Pending};
use crate::error::Result;
use crate::tensor::{DType, Device, Shape, Tensor};

/// The size from which a tensor has an exchange of its own, as views of its storage; smaller tensors of one dtype are
/// packed together.
const ALONE_BYTES: usize = 1 << 20;

/// Tensors of one dtype that share one exchange.
pub(super) struct Batch {
    dtype: DType,
    is_alone: bool,
    /// The indices of the tensors among the planned ones. Elsewhere in a batch, a tensor is numbered by its position
    /// here.
    pub tensors: Vec<usize>,
    /// Per receiving member, the pieces of tensors that go there; members without any are absent.
    pub give: Members,
    /// Per sending member, the pieces of tensors that come from there.
    pub take: Members,
}

/// Per member of the group: pieces, each with the index of its tensor in the batch.
type Members = BTreeMap<usize, Vec<(usize, BridgePiece)>>;

impl Batch {
    /// Returns the batch to which this transfer belongs, creating it if necessary.
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

    /// Starts the exchange. `locals` are this rank's shards of all planned tensors, if it has any.
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

    /// Packs the pieces for one member, one after the other.
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

/// Returns the shape in which pieces are sent: a single piece keeps its own, several are packed one after the other.
fn shape(pieces: &[(usize, BridgePiece)]) -> Shape {
    match pieces {
        [(_, piece)] => piece.shape(),
        _ => [pieces.iter().map(|(_, piece)| piece.numel()).sum::<usize>()].into(),
    }
}

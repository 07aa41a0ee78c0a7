//! Several moves that are started at once, and share calls.

use std::rc::Rc;

use super::dtensor::DTensor;
use crate::comm::Lineage;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::plan::explain::note_moves;
use crate::dtensor::redistribute::{self, InFlight, Move, shard_places, sharing, start_sharing};
use crate::error::Result;
use crate::tensor::Tensor;

/// A tensor of this rank, and the metadata before and after its move.
pub(in crate::dtensor) struct TensorMove {
    pub local: Tensor,
    pub from: Rc<TensorMeta>,
    pub to: Rc<TensorMeta>,
    pub lineage: Lineage,
}

impl DTensor {
    /// Runs a move of this tensor. Its calls carry the tensor's lineage.
    pub(in crate::dtensor) fn run_move(&self, m: &Rc<Move>) -> Result<Tensor> {
        let _lineage = self.lineage.enter();
        m.run(&self.mesh, self.resident()?)
    }

    /// Starts a move of this tensor. All its calls carry the tensor's lineage, whenever they start.
    pub(in crate::dtensor) fn start_move(&self, m: &Rc<Move>) -> Result<InFlight> {
        let _lineage = self.lineage.enter();
        m.start(&self.mesh, self.resident()?)
    }
}

/// Starts moves that the program asks for, and returns them in their order. Tensors of one dtype that are gathered along
/// the same axes share a call.
pub(in crate::dtensor) fn start_moves(mesh: &DeviceMesh, of: Vec<TensorMove>) -> Result<Vec<InFlight>> {
    let planned = |x: &TensorMove| Ok((redistribute::find(mesh, &x.from, &x.to)?, x.local.clone()));
    let moves: Vec<(Rc<Move>, Tensor)> = of.iter().map(planned).collect::<Result<_>>()?;
    let mut started: Vec<Option<InFlight>> = moves.iter().map(|_| None).collect();
    for group in sharing(&moves) {
        let noted: Vec<_> = group.iter().map(|&i| (&*moves[i].0, &*of[i].from, &*of[i].to)).collect();
        note_moves(mesh, &noted);
        let _lineage = Lineage::of_all(group.iter().map(|&i| of[i].lineage)).enter();
        let in_flight = start_sharing(mesh, group.iter().map(|&i| moves[i].clone()).collect())?;
        group.into_iter().zip(in_flight).for_each(|(i, in_flight)| started[i] = Some(in_flight));
    }
    Ok(started.into_iter().flatten().collect())
}

/// Returns places for the local tensors of moves, so that gathers that share a call send them as they lie in memory. Each has
/// the number of its move, and the dtype of the metadata before it.
pub(in crate::dtensor) fn gather_places(
    mesh: &DeviceMesh,
    of: Vec<TensorMove>,
) -> Result<Vec<(usize, Tensor)>> {
    let planned = |x: TensorMove| Ok((redistribute::find(mesh, &x.from, &x.to)?, x.local));
    shard_places(mesh.device(), &of.into_iter().map(planned).collect::<Result<Vec<_>>>()?)
}

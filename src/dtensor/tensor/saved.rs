//! Values that derivatives read: kept by the tape, gathered again, or computed again.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use smallvec::SmallVec;

use super::dtensor::DTensor;
use crate::comm::ModulePath;
use crate::dtensor::mesh::counted_list::CountedList;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::reduction::Reduction;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::redistribute::InFlight;
use crate::ops::Op;
use crate::tensor::Tensor;

/// A value that the derivative reads.
#[derive(Clone)]
pub(in crate::dtensor) enum Saved {
    Kept(DTensor),
    Again(Origin),
}

/// The way in which a derivative gets a value that the tape does not keep.
#[derive(Clone)]
pub(in crate::dtensor) enum Origin {
    Gathered(Rc<GatheredFrom>),
    Computed(Rc<ComputedFrom>),
}

/// The call that computes a tensor again ([`DeviceMesh::recompute_cheap`]).
pub(in crate::dtensor) struct ComputedFrom {
    pub op: Arc<dyn Op>,
    pub ins: SmallVec<[Saved; 3]>,
    /// The number of the call's result.
    pub out: usize,
    pub mesh: DeviceMesh,
    /// The module and the mode in which it was computed first.
    pub path: ModulePath,
    pub reduction: Reduction,
    /// The number of recomputed calls that lead to this value: 1 if all operands are kept.
    pub depth: usize,
}

/// The shards from which the backward pass gathers a tensor again.
pub(in crate::dtensor) struct GatheredFrom {
    pub shard: DTensor,
    /// The module that gathered it first.
    pub path: ModulePath,
    pub meta: Rc<TensorMeta>,
    pub in_flight: RefCell<Option<InFlight>>,
    pub held: RefCell<HeldGather>,
    /// The tensors of the unit that ran before this one in the forward pass: their gathers start when this tensor is
    /// read.
    pub earlier: UnitGathers,
    /// The tensors of its own unit, which share its gather unless that was started ahead.
    pub unit: UnitGathers,
    /// The number of the backward pass that read it last.
    pub read_in: Cell<u64>,
}

/// The tensors of a unit that are gathered again in the backward pass, in one call if none is started ahead.
#[derive(Clone, Default)]
pub(crate) struct UnitGathers(pub(in crate::dtensor) Rc<UnitGatherList>);

/// The list of a unit's tensors, which those of the unit after it share.
#[derive(Default)]
pub(in crate::dtensor) struct UnitGatherList {
    pub all: RefCell<CountedList<Weak<GatheredFrom>>>,
    /// The number of the backward pass that last started the gathers of all, and how many there were.
    pub started: Cell<(u64, usize)>,
}

/// A gathered tensor that has not been dropped since the forward pass, so that the backward pass need not gather it.
#[derive(Default)]
pub(in crate::dtensor) enum HeldGather {
    #[default]
    Dropped,
    /// The forward pass holds it.
    ByForward(Tensor),
    /// The forward pass has ended; the first use drops it.
    ForFirstUse(Tensor),
}

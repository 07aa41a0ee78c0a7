//! The buffers in which the gradients of a unit are computed: one per unit and call, of equal shards, as they are sent.
//!
//! The first backward pass of a unit copies its gradients side by side, and keeps their positions here. Later passes offer
//! these positions to the derivatives ([`with_places`]), so that gradients are sent from where they were computed. If another
//! set of gradients arrives, or gradients of several nodes each, they are copied.
//!
//! A buffer holds one value per parameter. In exact mode a rank may bring several nodes of the reduction tree; then each
//! part of the buffer that is sent to a rank has one row per node, with that node of all tensors.

use std::cell::RefCell;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::base::BoundedCache;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::mesh_caches::{CachePlace, MeshCache};
use crate::dtensor::redistribute::GradientBuffer;
use crate::dtensor::tensor::tape::GradientUnit;
use crate::error::Result;
use crate::tensor::{DType, Shape, Tensor, with_places};

/// The buffers of all units of a mesh, and the leaves whose gradients arrived, by the unit's number.
#[derive(Default)]
pub(in crate::dtensor) struct UnitBuffers {
    buffers: RefCell<BoundedCache<u64, Vec<UnitBuffer>>>,
    arrived: RefCell<BoundedCache<u64, ArrivedLeaves>>,
}

impl MeshCache for UnitBuffers {
    const PLACE: CachePlace = CachePlace::UnitBuffers;
}

/// The numbers of the leaves of a unit whose gradients arrived in a backward pass. Ranks agree on them.
struct ArrivedLeaves {
    pass: u64,
    leaves: FxHashSet<usize>,
}

/// A buffer in which gradients of a unit were sent.
struct UnitBuffer {
    len: usize,
    dtype: DType,
    /// In the order of their positions: the leaf's number in its unit, the position and the shape of its gradient.
    places: Vec<(usize, usize, Shape)>,
    leaves: FxHashSet<usize>,
}

/// The places of the gradients of this backward pass that have not been computed.
#[derive(Default)]
pub(in crate::dtensor) struct GradientPlaces {
    /// By the numbers of the unit and of the leaf.
    free: FxHashMap<(u64, usize), Tensor>,
    /// The buffers that this pass has made, by the unit's number and their first leaf's.
    made: Vec<(u64, usize)>,
}

impl UnitBuffers {
    /// Keeps the positions of gradients that are sent together, for later passes. `leaves` are the numbers of their leaves.
    pub fn keep(&self, unit: GradientUnit, buffer: &GradientBuffer, leaves: &[usize], locals: &[Tensor]) {
        let place = |&(i, start): &(usize, usize)| (leaves[i], start, locals[i].shape().clone());
        let places: Vec<_> = buffer.places.iter().map(place).collect();
        let (len, dtype) = (buffer.len, locals[0].dtype());
        let mut all = self.buffers.borrow_mut();
        let own = all.get_or_insert_with(unit.number(), Vec::new);
        let is_same = |other: &UnitBuffer| (other.len, other.dtype, &other.places) == (len, dtype, &places);
        if !own.iter().any(is_same) {
            let leaves: FxHashSet<usize> = leaves.iter().copied().collect();
            // Several uses of one leaf have no places: the leaf's gradient is their sum.
            if leaves.len() < places.len() {
                return;
            }
            own.retain(|other| other.leaves.is_disjoint(&leaves));
            own.push(UnitBuffer { len, dtype, places, leaves });
        }
    }

    /// Notes leaves of a unit whose gradients have arrived in the mesh's backward pass.
    pub fn note_arrived(&self, mesh: &DeviceMesh, unit: GradientUnit, leaves: Vec<usize>) {
        let pass = mesh.0.backward_pass.get();
        let mut all = self.arrived.borrow_mut();
        let known =
            all.get_or_insert_with(unit.number(), || ArrivedLeaves { pass, leaves: FxHashSet::default() });
        if known.pass != pass {
            *known = ArrivedLeaves { pass, leaves: FxHashSet::default() };
        }
        known.leaves.extend(leaves);
    }

    /// Returns true if these leaves of a unit are all whose gradients arrived in the last backward pass that had some.
    pub fn are_all(
        &self,
        mesh: &DeviceMesh,
        unit: GradientUnit,
        leaves_len: usize,
        mut leaves: impl Iterator<Item = usize>,
    ) -> bool {
        let all = self.arrived.borrow();
        let known = all.get(&unit.number()).filter(|known| known.pass != mesh.0.backward_pass.get());
        known.is_some_and(|known| {
            known.leaves.len() == leaves_len && leaves.all(|leaf| known.leaves.contains(&leaf))
        })
    }
}

impl GradientPlaces {
    /// Runs a derivative that completes gradients of the given leaves, each named by its unit and its number there. It
    /// computes them in their places, if they have some.
    ///
    /// # Errors
    /// Returns the errors of `f`.
    pub fn offer<T>(
        &mut self,
        mesh: &DeviceMesh,
        leaves: &[(GradientUnit, usize)],
        f: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let (mut keys, mut places) = (Vec::new(), Vec::new());
        for (unit, leaf) in leaves {
            self.make(mesh, *unit, *leaf)?;
            let key = (unit.number(), *leaf);
            if let Some(place) = self.free.remove(&key) {
                keys.push(key);
                places.push(place);
            }
        }
        if places.is_empty() {
            return f();
        }
        let (result, left) = with_places(places, f);
        self.free.extend(keys.into_iter().zip(left).filter_map(|(key, place)| Some((key, place?))));
        result
    }

    /// Makes the buffer of a leaf's gradient, once in a pass.
    fn make(&mut self, mesh: &DeviceMesh, unit: GradientUnit, leaf: usize) -> Result<()> {
        let all = mesh.cache::<UnitBuffers>().buffers.borrow();
        let holds = |buffer: &&UnitBuffer| buffer.leaves.contains(&leaf);
        let buffer = all.get(&unit.number()).and_then(|buffers| buffers.iter().find(holds));
        if let Some(UnitBuffer { len, dtype, places, .. }) = buffer {
            let key = (unit.number(), places[0].0);
            if self.made.contains(&key) {
                return Ok(());
            }
            self.made.push(key);
            let parts: Vec<_> = places.iter().map(|(_, start, shape)| (*start, shape.clone())).collect();
            let parts = Tensor::uninit_on(mesh.device(), *dtype, [*len])?.cut(&parts)?;
            let keys = places.iter().map(|(leaf, ..)| (unit.number(), *leaf));
            self.free.extend(keys.zip(parts));
        }
        Ok(())
    }

    /// Frees the places in the buffers of gradients that are sent, which are those of the given leaves of a unit.
    pub fn end(&mut self, mesh: &DeviceMesh, unit: GradientUnit, leaves: &[usize]) {
        if self.free.is_empty() {
            return;
        }
        let all = mesh.cache::<UnitBuffers>().buffers.borrow();
        for UnitBuffer { places, leaves: own, .. } in all.get(&unit.number()).into_iter().flatten() {
            if leaves.iter().any(|leaf| own.contains(leaf)) {
                places.iter().for_each(|(leaf, ..)| drop(self.free.remove(&(unit.number(), *leaf))));
            }
        }
    }
}

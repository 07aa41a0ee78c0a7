//! Facts that a mesh computes once and looks up afterwards: tensor metadata, and the nodes of reduction trees. Both are
//! bounded, so that a program whose shapes change at every call does not fill the memory.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::device_mesh::DeviceMesh;
use super::tensor_meta::TensorMeta;
use crate::base::BoundedCache;
use crate::error::Result;
use crate::placement::{Layout, ReductionTree, Spec};
use crate::tensor::{DType, Shape};

/// The number of entries at which a table is cleaned.
const ENTRIES_LEN: usize = 8192;

/// The metadata of a mesh. Numbers are given once: an entry that nothing uses is removed, and equal metadata gets a new
/// number later.
pub(in crate::dtensor) struct InternedMeta {
    entries: RefCell<FxHashMap<Spec, Rc<TensorMeta>>>,
    next: Cell<u32>,
    /// The number of entries at which those that nothing uses are removed.
    limit: Cell<usize>,
}

impl Default for InternedMeta {
    fn default() -> InternedMeta {
        InternedMeta { entries: RefCell::default(), next: Cell::new(0), limit: Cell::new(ENTRIES_LEN) }
    }
}

/// The largest numbers of nodes per rank, by reduction tree.
#[derive(Default)]
pub(in crate::dtensor) struct NodeCounts(RefCell<BoundedCache<ReductionTree, Option<usize>>>);

impl InternedMeta {
    fn intern(&self, spec: Spec) -> Result<Rc<TensorMeta>> {
        if let Some(f) = self.entries.borrow().get(&spec) {
            return Ok(f.clone());
        }
        spec.validate("layout")?;
        let mut entries = self.entries.borrow_mut();
        if entries.len() >= self.limit.get() {
            // Tensors and cached plans, which are bounded too, keep theirs.
            entries.retain(|_, f| Rc::strong_count(f) > 1);
            self.limit.set((2 * entries.len()).max(ENTRIES_LEN));
        }
        let new = TensorMeta::new(self.next.get(), spec.clone());
        self.next
            .set(self.next.get().checked_add(1).expect("a program has fewer than 2^32 kinds of tensors"));
        entries.insert(spec, new.clone());
        Ok(new)
    }
}

impl DeviceMesh {
    /// Returns the interned metadata of a tensor on this mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let meta = |layout: &str| mesh.meta(DType::F32, &[4].into(), &layout.parse()?);
    ///     assert!(std::rc::Rc::ptr_eq(&meta("(S0)")?, &meta("(S0)")?));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit mesh, dtype or shape.
    pub fn meta(&self, dtype: DType, shape: &Shape, layout: &Layout) -> Result<Rc<TensorMeta>> {
        let (mesh, shape, layout) = (self.0.mesh.clone(), shape.clone(), layout.clone());
        self.intern(Spec { mesh, dtype, shape, layout, tree: None })
    }

    /// Returns the metadata of the same tensor replicated on all ranks. It is remembered: each backward pass begins with it.
    pub(in crate::dtensor) fn replicated(&self, of: &Rc<TensorMeta>) -> Result<Rc<TensorMeta>> {
        if of.layout().is_replicated() {
            return Ok(of.clone());
        }
        if let Some(known) = of.replicated.borrow().upgrade() {
            return Ok(known);
        }
        let meta = self.meta(of.dtype(), of.shape(), &Layout::replicated(of.layout().ndim()))?;
        *of.replicated.borrow_mut() = Rc::downgrade(&meta);
        Ok(meta)
    }

    /// Returns the interned metadata for a spec, which may have a reduction tree.
    pub(in crate::dtensor) fn intern(&self, spec: Spec) -> Result<Rc<TensorMeta>> {
        self.0.meta.intern(spec)
    }

    /// Returns [`ReductionTree::most_nodes`], cached: every row of an operator asks for it when its cost is computed.
    pub(in crate::dtensor) fn most_nodes(&self, tree: &ReductionTree) -> Option<usize> {
        let NodeCounts(known) = &self.0.most_nodes;
        if let Some(&n) = known.borrow().get(tree) {
            return n;
        }
        let n = tree.most_nodes(&self.0.mesh);
        *known.borrow_mut().get_or_insert_with(tree.clone(), || n)
    }
}

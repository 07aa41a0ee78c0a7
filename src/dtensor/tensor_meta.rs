//! The shared facts of a tensor, interned: equal facts have one number on a rank, so that plans are found by number.

use std::hash::{Hash, Hasher};
use std::rc::Rc;

use crate::ops::{Meta, Window};
use crate::placement::{Layout, Spec};
use crate::tensor::{DType, Shape};

/// A [`Spec`] with what follows from it on this rank, computed once.
#[derive(Debug)]
pub struct TensorMeta {
    pub(super) id: u32,
    spec: Spec,
    window: Window,
    stored: Shape,
}

impl TensorMeta {
    pub(super) fn new(id: u32, spec: Spec) -> Rc<TensorMeta> {
        let window = Window { global: spec.shape.clone(), region: spec.region() };
        let stored = match spec.nodes_len_at(spec.mesh.coords()) {
            1 => window.local().clone(),
            n => std::iter::once(n).chain(window.local().iter().copied()).collect(),
        };
        Rc::new(TensorMeta { id, spec, window, stored })
    }

    /// Mesh, dtype, global shape and layout.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The global shape.
    pub fn shape(&self) -> &Shape {
        &self.spec.shape
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.spec.dtype
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.spec.layout
    }

    /// What this rank holds.
    pub fn window(&self) -> &Window {
        &self.window
    }

    /// This rank's shape.
    pub fn local_shape(&self) -> &Shape {
        self.window.local()
    }

    /// The shape of what this rank stores: that of its part, except of a sum in parts of which it has finished another
    /// number of nodes than one; those are stacked.
    pub fn stored_shape(&self) -> &Shape {
        &self.stored
    }

    /// The number of finished nodes stored of a sum in parts; 1 of everything else.
    pub fn nodes_len(&self) -> usize {
        if self.stored.len() == self.local_shape().len() { 1 } else { self.stored[0] }
    }

    /// Dtype and global shape.
    pub fn meta(&self) -> Meta {
        Meta { dtype: self.spec.dtype, shape: self.spec.shape.clone() }
    }
}

/// Interned: the same facts on the same mesh are the same object. Numbers alone would confuse meshes.
impl PartialEq for TensorMeta {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for TensorMeta {}

impl Hash for TensorMeta {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.id.hash(state);
    }
}

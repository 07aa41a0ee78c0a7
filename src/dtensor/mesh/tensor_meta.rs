//! Tensor metadata, interned per rank: equal metadata has one number, by which plans are found.

use std::cell::RefCell;
use std::hash::{Hash, Hasher};
use std::rc::{Rc, Weak};

use crate::ops::{Meta, Window};
use crate::placement::{Layout, Spec};
use crate::tensor::{DType, Shape};

/// A [`Spec`] with what follows from it on this rank, computed once. [`DeviceMesh::meta`](crate::dtensor::DeviceMesh::meta)
/// interns it.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let x = DTensor::zeros(&mesh, DType::F32, [5, 2], "(S0)")?;
///     let meta = mesh.meta(DType::F32, &[5, 2].into(), &"(S0)".parse()?)?;
///     assert_eq!(x.tensor_meta(), &meta);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorMeta {
    pub(in crate::dtensor) id: u32,
    spec: Spec,
    window: Window,
    stored: Shape,
    /// The metadata of the same tensor replicated, once it has been asked for.
    pub(in crate::dtensor) replicated: RefCell<Weak<TensorMeta>>,
}

impl TensorMeta {
    pub(in crate::dtensor) fn new(id: u32, spec: Spec) -> Rc<TensorMeta> {
        let window = Window { global: spec.shape.clone(), region: spec.region() };
        let stored = match spec.nodes_len_at(spec.mesh.coords()) {
            1 => window.local().clone(),
            n => std::iter::once(n).chain(window.local().iter().copied()).collect(),
        };
        Rc::new(TensorMeta { id, spec, window, stored, replicated: RefCell::default() })
    }

    /// Returns true for a sum whose parts ranks store one by one.
    pub(in crate::dtensor) fn has_kept_parts(&self) -> bool {
        self.spec.tree.as_ref().and_then(|tree| tree.groups).is_some_and(|groups| groups.is_kept())
    }

    /// Returns mesh, dtype, global shape and layout.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let meta = mesh.meta(DType::F32, &[5, 2].into(), &"(S0)".parse()?)?;
    ///     assert_eq!(meta.spec().to_string(), "f32[5, 2]@(dp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Returns the global shape.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let meta = mesh.meta(DType::F32, &[5, 2].into(), &"(S0)".parse()?)?;
    ///     assert_eq!(meta.shape().to_vec(), [5, 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn shape(&self) -> &Shape {
        &self.spec.shape
    }

    /// Returns the element type.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let meta = mesh.meta(DType::I32, &[5].into(), &"(S0)".parse()?)?;
    ///     assert_eq!(meta.dtype(), DType::I32);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn dtype(&self) -> DType {
        self.spec.dtype
    }

    /// Returns the layout.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let meta = mesh.meta(DType::F32, &[5].into(), &"(S0)".parse()?)?;
    ///     assert_eq!(meta.layout().to_string(), "(S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn layout(&self) -> &Layout {
        &self.spec.layout
    }

    /// Returns this rank's window: the region of the global tensor that it holds.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let meta = mesh.meta(DType::F32, &[5].into(), &"(S0)".parse()?)?;
    ///     assert_eq!(meta.window().region.start(0), [Some(0), Some(3)][rank.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn window(&self) -> &Window {
        &self.window
    }

    /// Returns the shape of this rank's shard.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let meta = mesh.meta(DType::F32, &[5].into(), &"(S0)".parse()?)?;
    ///     assert_eq!(meta.local_shape().to_vec(), [[3], [2]][rank.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn local_shape(&self) -> &Shape {
        self.window.local()
    }

    /// Returns the shape of the stored tensor: [`TensorMeta::local_shape`], or `[nodes, local shape...]` for a
    /// partial sum if this rank has finished a number of nodes other than one.
    pub(crate) fn stored_shape(&self) -> &Shape {
        &self.stored
    }

    /// Returns the number of finished nodes that this rank stores of a partial sum; 1 for every other tensor.
    pub(crate) fn nodes_len(&self) -> usize {
        if self.stored.len() == self.local_shape().len() { 1 } else { self.stored[0] }
    }

    /// Returns dtype and global shape.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let meta = mesh.meta(DType::F32, &[5].into(), &"(S0)".parse()?)?.meta();
    ///     assert_eq!((meta.dtype, meta.shape.to_vec()), (DType::F32, vec![5]));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn meta(&self) -> Meta {
        Meta { dtype: self.spec.dtype, shape: self.spec.shape.clone() }
    }
}

/// Compares addresses: equal metadata on one mesh is one object. Numbers alone are not unique across meshes.
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

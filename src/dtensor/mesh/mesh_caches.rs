//! Values that rooms above keep with a mesh, one per type.
//!
//! A mesh is below plans, moves and passes, so it cannot name their types. Each type names its place here, and a caller
//! asks by type: `mesh.cache::<CallPlans>()`.

use std::any::Any;
use std::cell::OnceCell;

use super::device_mesh::DeviceMesh;

/// Marks a type: a mesh keeps one value of it, made at the first use.
pub(in crate::dtensor) trait MeshCache: Default + 'static {
    const PLACE: CachePlace;
}

/// The places of a mesh's values.
#[derive(Clone, Copy)]
pub(in crate::dtensor) enum CachePlace {
    /// The plans of operator calls.
    CallPlans,
    /// The redistributions.
    Moves,
    /// The buffers in which units of gradients are sent.
    UnitBuffers,
    /// The tallies that count the work of calls.
    Tallies,
    /// The explanations of plans that are being written.
    Explanations,
    /// The watcher of modules, if a test sets one.
    Watcher,
}

const PLACES: usize = CachePlace::Watcher as usize + 1;

/// A mesh's values, by place.
#[derive(Default)]
pub(in crate::dtensor) struct MeshCaches([OnceCell<Box<dyn Any>>; PLACES]);

impl DeviceMesh {
    /// Returns the mesh's value of a type.
    #[inline]
    pub(in crate::dtensor) fn cache<T: MeshCache>(&self) -> &T {
        let MeshCaches(places) = &self.0.caches;
        let value = places[T::PLACE as usize].get_or_init(|| Box::new(T::default()));
        value.downcast_ref().expect("each type has a place of its own")
    }

    /// Returns the mesh's value of a type, or `None` if nothing has asked for it yet.
    pub(in crate::dtensor) fn known_cache<T: MeshCache>(&self) -> Option<&T> {
        let MeshCaches(places) = &self.0.caches;
        places[T::PLACE as usize].get()?.downcast_ref()
    }
}

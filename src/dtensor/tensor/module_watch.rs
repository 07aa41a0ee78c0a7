//! Results of modules, for tests that look for the first one that differs.

use std::cell::RefCell;
use std::rc::Rc;

use super::dtensor::DTensor;
use crate::comm::{ModulePath, Phase};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::mesh_caches::{CachePlace, MeshCache};
use crate::error::Result;

/// A function that gets the paths and the results of modules.
pub(crate) type ModuleWatcher = dyn Fn(ModulePath, &DTensor) -> Result<()>;

#[derive(Default)]
struct Watcher(RefCell<Option<Rc<ModuleWatcher>>>);

impl MeshCache for Watcher {
    const PLACE: CachePlace = CachePlace::Watcher;
}

impl DeviceMesh {
    /// Passes the results of modules to `watcher` from now on.
    #[cfg(feature = "testing")]
    pub(crate) fn watch_modules(&self, watcher: Rc<ModuleWatcher>) {
        let own: &Watcher = self.cache();
        *own.0.borrow_mut() = Some(watcher);
    }

    /// Passes on the result of the module at `path`, if a test watches and this is the forward pass.
    pub(crate) fn note_module(&self, path: ModulePath, y: &DTensor) -> Result<()> {
        let Some(own) = self.known_cache::<Watcher>().filter(|_| Phase::current() == Phase::Forward) else {
            return Ok(());
        };
        let watcher = own.0.borrow().clone();
        watcher.map_or(Ok(()), |watcher| watcher(path, y))
    }
}

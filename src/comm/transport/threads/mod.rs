//! The thread engine: ranks are threads of one process, and read each other's tensors in place.
//!
//! Each call of a group has a *slot*. Each member puts its tensors into the slot, the last one opens it, and each
//! member takes its results. No second barrier is needed, because tensors are shared and copied before they are
//! written. A rank that waits spins for a moment if there are enough cores, then parks. The last member to leave a
//! slot clears it for a later call, so a program in its steady state allocates nothing here.
//!
//! The files, in an order in which each uses only those before it: `sync` and `spin`; `shared_chunks`, `shared_folds` and
//! `shared_places`, the work that members share; `slot`; `status` of the ranks; `group`; `survivors` and `world` (all groups
//! of a program); `engine`. The engine is written against `sync`, so that `models` can check it under every order in which
//! its threads may run.

mod engine;
mod group;
#[cfg(all(test, any(loom, shuttle)))]
mod models;
mod shared_chunks;
mod shared_folds;
mod shared_places;
mod slot;
mod spin;
mod status;
mod survivors;
mod sync;
mod world;

pub(in crate::comm) use engine::ThreadEngine;
pub(in crate::comm) use spin::Running;
pub(in crate::comm) use world::ThreadWorld;

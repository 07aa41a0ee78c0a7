//! The thread engine: ranks are threads of one process and read each other's tensors in place.
//!
//! A call has a *slot*, one per group and sequence number. Each member puts its part into the slot, the last one opens it,
//! and all take what concerns them. There is no second barrier, because tensors are shared and copied before they are
//! written. A rank that waits spins briefly if there are cores enough, then parks. The last member to leave a slot clears it
//! for a later call, so that a program in its stride takes no memory here.
//!
//! The files, from the ground up: `sync` and `spin`; `shared_folds`; `slot`; `status` (the facts about ranks); `group` (the
//! state that a group's members share); `survivors` and `world` (all groups of a program); `engine`. The engine is written
//! against `sync`, so that `models` can try the orders in which its threads can run.

mod engine;
mod group;
#[cfg(all(test, any(loom, shuttle)))]
mod models;
mod shared_folds;
mod slot;
mod spin;
mod status;
mod survivors;
mod sync;
mod world;

pub(in crate::comm) use engine::ThreadEngine;
pub(in crate::comm) use spin::Running;
pub(in crate::comm) use world::ThreadWorld;

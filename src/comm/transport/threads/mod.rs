//! The thread engine: ranks are threads of one process and read each other's tensors in place.
//!
//! Members meet at a *slot*, one per group and sequence number: each lays down its call, the last one opens the slot,
//! and all take what concerns them. There is no second barrier, because tensors are shared and copied before they are
//! written. Waiting spins briefly where there are cores enough, then parks. The last to leave a slot clears it for a later
//! call, so that a program in its stride takes no memory here.
//!
//! What threads do to each other is written against `sync`, and tried in the orders in which they can run by `models`.

mod engine;
mod hub;
#[cfg(all(test, any(loom, shuttle)))]
mod models;
mod reduction;
mod slot;
mod spin;
mod sync;
mod world;

pub(in crate::comm) use engine::ThreadEngine;
pub(in crate::comm) use spin::Running;
pub(in crate::comm) use world::World;

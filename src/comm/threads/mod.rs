//! The thread engine: ranks are threads of one process and read each other's tensors in place.
//!
//! Members meet at a *slot*, one per group and sequence number: each lays down its call, the last one opens the slot,
//! and all take what concerns them. There is no second barrier, because tensors are shared and copied before they are
//! written. Waiting spins briefly where there are cores enough, then parks.

mod engine;
mod hub;
mod reduction;
mod slot;
mod world;

pub(super) use engine::ThreadEngine;
pub(super) use world::{Running, World};

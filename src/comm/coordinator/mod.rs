//! Communication between ranks in addition to their data: how they meet, which calls they make, which rank failed.
//!
//! NCCL and MPI neither compare calls nor name a failed rank. A world over them therefore has one *coordinator*, in
//! rank 0's process. Each rank has a [`Client`], which sends messages to the coordinator without waiting and receives
//! notices. The coordinator compares the calls of a group's members and sends the first fault to all ranks. Ranks
//! that are threads of one process share it; other processes reach it over the TCP connections by which they met
//! (`rendezvous`).
//!
//! A connection must prove that it knows the job's secret (`auth`), and all input is bounded before it is used:
//! frames (`frame`), connections without proof (`admission`), and the memory that a rank may occupy (`store`, and the
//! call table of `diagnostics`).
//!
//! Missing: encryption. A machine that loses its network without closing connections is noticed only at the next
//! call's deadline.

mod admission;
mod auth;
mod client;
mod connection;
mod frame;
#[cfg(test)]
mod fuzz;
mod inbox;
mod message;
mod rendezvous;
mod server;
mod store;
#[cfg(test)]
mod tests;

pub(super) use client::Client;
pub(super) use message::{FirstFault, Message};
pub(super) use rendezvous::Rendezvous;
#[cfg(feature = "mpi")]
pub(super) use rendezvous::RendezvousPoint;

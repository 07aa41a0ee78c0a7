//! Everything that ranks tell each other beside their data: where they meet, what they brought to a call, and who failed.
//!
//! Engines whose transport compares nothing and names nobody (NCCL, MPI) have one *coordinator* a world, in rank 0's process. Each
//! rank has a [`Client`]: it sends messages there, which never wait, and reads notices. The coordinator compares what the members of a
//! call brought and tells everyone the first fault. Ranks that are threads of one process share it; other processes reach it by TCP,
//! over the connections they met by (`rendezvous`).
//!
//! Nobody is heard who does not know the job's secret (`auth`), and nothing is believed before it is bounded: frames (`frame`),
//! strangers (`door`), what a rank makes the coordinator keep (`store`, and the call table of `diagnostics`).
//!
//! Missing: encryption; a machine that vanishes without a word is noticed at the next call's deadline only.

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

//! What ranks tell each other beside their data: where they meet, what they brought to a call, and who failed.
//!
//! Engines whose transport compares nothing and names nobody (NCCL, MPI) have one *coordinator* a world, in rank 0's process. Each
//! rank has a [`Client`]: it sends notes there, which never wait, and gets news from there. The coordinator compares what the
//! members of a call brought and tells everyone the first fault. Ranks that are threads of one process share the coordinator; other
//! processes reach it by TCP, over the connections they met by.
//!
//! A frame is its length (4 bytes) and its bytes; all numbers are little-endian.

mod auth;
mod client;
mod connection;
mod door;
mod frame;
#[cfg(test)]
mod fuzz;
mod message;
mod notices;
mod rendezvous;
mod server;
mod store;
#[cfg(test)]
mod tests;

pub(super) use client::Client;
pub(super) use message::{FirstFault, Message};
#[cfg(feature = "mpi")]
pub(super) use rendezvous::MeetingPlace;
pub(super) use rendezvous::Rendezvous;

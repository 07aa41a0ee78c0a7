//! Faults injected into ranks that are threads, fifty random times each: the reports of all ranks, within the
//! deadline.
//!
//! Programs are random sequences of collectives on random groups; one rank deviates at a random call. Seeds are fixed
//! and printed, so that a failure can be repeated.

mod blame;
mod busy;
mod calls;
mod check;
mod edges;
mod ends;
mod flight;
mod lineage;
mod order;
mod program;
mod survive;
mod texts;
mod two_threads;

//! Injected faults on ranks that are threads: what every rank reports, within the deadline, fifty random times each.
//!
//! Programs are random sequences of collectives on random groups; one rank deviates at a random call. Seeds are fixed and
//! printed, so that a failure can be had again.

mod calls;
mod check;
mod ends;
mod flight;
mod order;
mod program;
mod survive;
mod texts;

//! Records calls, so that errors can say which rank made which call, which ranks wait for each other, and which call each rank
//! completed last.

mod announced_work;
mod announcer;
mod call_table;
pub mod flight;
mod recorder;
mod table_group;
mod wait_graph;
mod world_recorders;

pub(super) use announced_work::{AnnouncedWork, time_left};
pub(super) use call_table::{CallTable, ProtocolViolation};
pub(super) use recorder::{GroupId, RecordedCall, Recorder};
pub(super) use wait_graph::Blame;
pub(super) use world_recorders::{FlightSettings, WorldRecorders};

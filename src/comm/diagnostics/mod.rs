//! The facts about calls that errors are made of: who came to which, who waits for whom, and what each rank did last.

mod call_table;
pub mod flight;
mod recorder;
mod roster;
mod table_group;
mod wait_graph;

pub(super) use call_table::{Breach, CallTable};
pub(super) use recorder::{GroupId, RecordedCall, Recorder};
pub(super) use roster::{FlightSettings, Roster};

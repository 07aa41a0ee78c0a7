//! The connection of a group's members.

use std::time::{Duration, Instant};

use super::group::NcclGroup;
use super::world::NcclWorld;
use super::{Communicator, NcclResult};
use crate::comm::coordinator::Message;
use crate::comm::transport::coordinated::CallNumber;
use crate::error::{Error, Result};

const CONNECT: &CallNumber = &CallNumber::CONNECT;

impl NcclWorld {
    /// Joins the group's communicator. The first member creates its id and sends it to the others.
    pub fn join(&self, group: &NcclGroup) -> Result<()> {
        let state = &group.state;
        let key = format!("id of {}", state.key());
        let id = if state.index == 0 {
            let id = self.nccl.unique_id().map_err(|e| state.broken(CONNECT, e))?;
            self.membership.put(key, id.clone());
            id
        } else {
            let not_opened = || format!("rank {} has not opened the group", state.ranks[0]);
            self.id(&key, group, &not_opened())?
        };
        let comm = self.nccl.join(&id, state.ranks.len(), state.index);
        self.settle(group, Some(comm))
    }

    /// Waits for the communicator's id, which the first member stores.
    fn id(&self, key: &str, group: &NcclGroup, what: &str) -> Result<Vec<u8>> {
        let began = Instant::now();
        let mut time = self.membership.deadline;
        loop {
            if let Some(id) = self.membership.get(key, time) {
                return Ok(id);
            }
            time = self.time_left_to_open(group, what, began.elapsed())?;
        }
    }

    /// Splits the world's communicator into one per `color`; together the groups hold all ranks.
    pub fn split(&self, group: &NcclGroup, world: &NcclGroup, color: usize) -> Result<()> {
        let comm = world.with(|world| self.nccl.split(world, color as u32, group.state.index));
        self.settle(group, comm)
    }

    /// Waits until a started communicator is ready.
    fn settle(&self, group: &NcclGroup, comm: Option<NcclResult<Communicator>>) -> Result<()> {
        match comm {
            Some(Ok(comm)) => group.set(comm),
            Some(Err(e)) => return Err(group.state.broken(CONNECT, e)),
            None => return Err(group.state.given_up(CONNECT, CONNECT.name)),
        }
        self.ready(group, CONNECT, |waited| self.time_left_to_open(group, "not connected", waited))
    }

    /// Returns the time for which to wait on for the members to connect, after a wait of `waited`.
    fn time_left_to_open(&self, group: &NcclGroup, what: &str, waited: Duration) -> Result<Duration> {
        let time = (!self.membership.is_given_up()).then(|| group.state.late_to_open(waited)).flatten();
        time.ok_or_else(|| self.not_within_deadline(group, what))
    }

    /// Returns the error of a group that was not connected within the deadline.
    fn not_within_deadline(&self, group: &NcclGroup, what: &str) -> Error {
        if !self.membership.is_given_up() {
            let reason = format!("{what} within {:.1} s", self.membership.deadline.as_secs_f64());
            self.membership.tell(Message::Broken { id: group.state.call_id(CONNECT), reason });
        }
        group.state.given_up(CONNECT, CONNECT.name)
    }
}

//! A channel of an engine that has a coordinator: the checks of a call, before its transport starts it.

use std::fmt;

use super::failed_call::FailedCall;
use super::group_member::GroupMember;
use crate::comm::calls::Call;
use crate::comm::transport::engine::{check_lists, check_places, start_folding};
use crate::comm::transport::member_place::MemberPlace;
use crate::comm::transport::{Channel, Reduce, Request};
use crate::error::Result;
use crate::tensor::Tensor;

/// One member's end of a group, over a transport.
#[derive(Debug)]
pub(in crate::comm::transport) struct CoordinatedChannel<T>(pub T);

/// The calls of one member, as a transport makes them.
pub(in crate::comm::transport) trait MemberTransport:
    fmt::Debug + Send + Sync
{
    fn member(&self) -> &GroupMember;

    /// Refuses tensors that the transport does not move.
    fn check(&self, call: &Call<'_>) -> Result<()>;

    /// Starts a call. The parts of a gather arrive in the tensors `into`, if there are some.
    fn begin(&self, call: &Call<'_>, into: Option<Vec<Tensor>>) -> Result<Box<dyn Request>>;
}

impl<T: MemberTransport> CoordinatedChannel<T> {
    fn place(&self) -> MemberPlace {
        let member = self.0.member();
        MemberPlace { index: member.index, members: member.ranks.len() }
    }

    fn begin(&self, call: &Call<'_>, into: Option<Vec<Tensor>>) -> Result<Box<dyn Request>> {
        self.0.begin(call, into).or_else(|e| FailedCall::keep(&self.0.member().membership, e))
    }
}

impl<T: MemberTransport> Channel for CoordinatedChannel<T> {
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.0.check(&call)?;
        check_lists(&call, self.place())?;
        self.begin(&call, None)
    }

    fn gather_into(&self, call: Call<'_>, mut into: Vec<Tensor>) -> Result<Box<dyn Request>> {
        self.0.check(&call)?;
        check_places(&call, Some(self.place()), &mut into)?;
        self.begin(&call, Some(into))
    }

    fn all_reduce(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        start_folding(self, reduce, call, self.place())
    }

    fn reduce_scatter(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        start_folding(self, reduce, call, self.place())
    }
}

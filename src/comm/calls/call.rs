//! A collective call as one member makes it.

use std::fmt;

use super::group_name::NAME_BYTES;
use super::lineage::Lineage;
use super::operator::current_operator;
use super::route::Route;
use super::signature::{CallSignature, ShapesView, SignatureView};
use crate::tensor::{DType, Device, ReduceOp, Shape, Tensor};

/// A collective call as one member makes it: what an [`Engine`](crate::comm::Engine) gets. It borrows its lists; an
/// engine copies what it needs while the call is in flight.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The collective's name, e.g. `all_reduce`.
    pub name: &'static str,
    /// The members that send and those that receive.
    pub route: Route,
    /// The reduction that follows the exchange, if any.
    pub op: Option<ReduceOp>,
    /// The dtype of all tensors sent and received.
    pub dtype: DType,
    /// The tensors that this member sends, all on one device: one tensor per member under [`Route::AllToAll`],
    /// otherwise one or none.
    pub outgoing: &'a [Tensor],
    /// The shapes of [`Request::wait`](crate::comm::Request::wait)'s result; under [`Route::Send`], the shape that is
    /// sent.
    pub incoming: &'a [Shape],
    /// The lineage of the tensors, if they are distributed ones. Members compare it.
    pub lineage: Lineage,
}

impl<'a> Call<'a> {
    /// Returns true if this call, made by member `me`, fits `other`, made by member `at`.
    ///
    /// Except for all-to-all the relation is transitive among senders, so comparing with one member is comparing with
    /// all.
    pub(crate) fn agrees(&self, me: usize, other: &Call<'_>, at: usize) -> bool {
        self.signature().agrees(me, &other.signature(), at)
    }

    /// Returns the device of the tensors that this member sends, if it sends any.
    ///
    /// ```
    /// use isoshard::comm::{Call, Lineage, Route};
    /// use isoshard::tensor::{DType, Device, Tensor};
    /// let x = [Tensor::zeros(DType::F32, [3])];
    /// let call = Call { name: "send", route: Route::Send { to: 1 }, op: None, dtype: DType::F32, outgoing: &x,
    /// incoming: &[], lineage: Lineage::NONE };
    /// assert_eq!(call.device(), Some(Device::Cpu));
    /// ```
    pub fn device(&self) -> Option<Device> {
        self.outgoing.first().map(Tensor::device)
    }

    /// Returns the bytes that member `me` of `members` sends to others, at most `u64::MAX`: a dry run's tensors may
    /// have more. A broadcast counts once per receiver.
    pub(in crate::comm) fn sent_bytes(&self, me: usize, members: usize) -> u64 {
        let sent = |i: usize| self.outgoing.get(i).map_or(0, |x| self.dtype.bytes_of(x.numel()));
        match self.route {
            Route::Gather | Route::Broadcast { .. } => sent(0).saturating_mul(members as u64 - 1),
            Route::AllToAll => (0..members).filter(|&i| i != me).map(sent).fold(0, u64::saturating_add),
            Route::Send { .. } => sent(0),
            Route::Recv { .. } | Route::Barrier => 0,
        }
    }

    /// Returns the bytes that member `me` receives from others.
    pub(in crate::comm) fn received_bytes(&self, me: usize) -> u64 {
        let come = |i: usize| self.dtype.bytes_of(self.incoming[i].numel());
        match self.route {
            Route::Gather | Route::AllToAll => {
                (0..self.incoming.len()).filter(|&i| i != me).map(come).fold(0, u64::saturating_add)
            }
            Route::Broadcast { root } if root != me => come(0),
            Route::Recv { .. } => come(0),
            Route::Broadcast { .. } | Route::Send { .. } | Route::Barrier => 0,
        }
    }

    /// Returns what is compared between members and shown in errors, borrowed.
    pub(in crate::comm) fn signature(&self) -> SignatureView<'a> {
        let Call { name, route, op, dtype, outgoing, incoming, lineage } = *self;
        let (sent, expected) = (ShapesView::Tensors(outgoing), ShapesView::Shapes(incoming));
        let subject = lineage.subject();
        SignatureView { name, route, op, dtype, device: self.device(), sent, expected, subject }
    }

    /// Returns the call without its tensors, to be compared in another process or later.
    pub(in crate::comm) fn to_signature(self) -> CallSignature {
        let Call { name, route, op, dtype, outgoing, incoming, lineage } = self;
        // Except for all-to-all, the shapes sent follow from the shapes expected.
        let sent = if route == Route::AllToAll { outgoing } else { &[] };
        CallSignature {
            name: name.into(),
            route,
            op,
            dtype,
            outgoing: sent.iter().map(|x| x.shape().clone()).collect(),
            incoming: incoming.to_vec(),
            operator: current_operator().into(),
            lineage: lineage.hash(),
            made_by: bounded(lineage.name()).into(),
        }
    }
}

/// Returns the longest beginning of a name that readers accept.
fn bounded(name: &str) -> &str {
    let end = (0..=name.len().min(NAME_BYTES)).rfind(|&end| name.is_char_boundary(end));
    &name[..end.unwrap_or(0)]
}

/// Writes the call as errors show it: `all_reduce(sum) f32[1024]`, or with different shapes, `all_gather f32{[2, 3],
/// [1, 3]}`.
impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.signature().fmt(f)
    }
}

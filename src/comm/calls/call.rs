//! A call as one member brings it.

use std::fmt;

use super::operator::current_operator;
use super::route::Route;
use super::signature::{CallSignature, ShapesView, SignatureView};
use crate::tensor::{DType, Device, ReduceOp, Shape, Tensor};

/// A call as one member brings it. It borrows its lists: an engine copies what it keeps while the call is in flight.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The collective's name, e.g. `all_reduce`.
    pub name: &'static str,
    /// The way that its tensors take.
    pub route: Route,
    /// The reduction that follows the exchange.
    pub op: Option<ReduceOp>,
    /// The type of all elements sent and received.
    pub dtype: DType,
    /// The tensors that this member sends: one tensor, or one for each member under [`Route::AllToAll`], or none. All on one device.
    pub outgoing: &'a [Tensor],
    /// The shapes that this member expects: those of [`Request::wait`](crate::comm::Request::wait)'s result, also with [`Route::Send`].
    pub incoming: &'a [Shape],
}

impl<'a> Call<'a> {
    /// True if this call, brought by member `me`, belongs together with `other`, brought by member `at`.
    ///
    /// Among calls that are not all-to-all it is transitive among those who send: comparing with one is comparing with all.
    pub fn agrees(&self, me: usize, other: &Call<'_>, at: usize) -> bool {
        self.signature().agrees(me, &other.signature(), at)
    }

    /// The device of the tensors that this member sends, if it sends any.
    pub fn device(&self) -> Option<Device> {
        self.outgoing.first().map(Tensor::device)
    }

    /// The facts of this call that are compared with those of other members, and shown in errors.
    pub(in crate::comm) fn signature(&self) -> SignatureView<'a> {
        let Call { name, route, op, dtype, outgoing, incoming } = *self;
        let (sent, expected) = (ShapesView::Tensors(outgoing), ShapesView::Shapes(incoming));
        SignatureView { name, route, op, dtype, device: self.device(), sent, expected }
    }

    /// The same without the tensors, for those who compare the call elsewhere or later.
    pub(in crate::comm) fn to_signature(self) -> CallSignature {
        let Call { name, route, op, dtype, outgoing, incoming } = self;
        // What members agree on from what they expect need not be said twice.
        let sent = if route == Route::AllToAll { outgoing } else { &[] };
        CallSignature {
            name: name.into(),
            route,
            op,
            dtype,
            outgoing: sent.iter().map(|x| x.shape().clone()).collect(),
            incoming: incoming.to_vec(),
            operator: current_operator().into(),
        }
    }
}

/// As errors show it: `all_reduce(sum) f32[1024]`, or with shapes that differ, `all_gather f32{[2, 3], [1, 3]}`.
impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.signature().fmt(f)
    }
}

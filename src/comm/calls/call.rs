//! A call as one member brings it, and which calls belong together.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::operator::current_operator;
use crate::tensor::{DType, Device, ReduceOp, Shape, Tensor};

/// A call as one member brings it. It borrows its lists: an engine copies what it keeps while the call is in flight.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The collective's name, e.g. `all_reduce`.
    pub name: &'static str,
    /// Who sends to whom.
    pub route: Route,
    /// The reduction that follows the exchange.
    pub op: Option<ReduceOp>,
    /// The type of all elements sent and received.
    pub dtype: DType,
    /// What this member sends: one tensor, or one for each member under [`Route::AllToAll`], or none. All on one device.
    pub outgoing: &'a [Tensor],
    /// What this member expects: the shapes of [`Request::wait`](crate::comm::Request::wait)'s result, also with [`Route::Send`].
    pub incoming: &'a [Shape],
}

/// Who sends to whom. Members are named by their index in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Route {
    /// Every member's tensor goes to all.
    Gather,
    /// Every member's part i goes to member i.
    AllToAll,
    /// The root's tensor goes to all.
    Broadcast {
        /// The root.
        root: usize,
    },
    /// This member's tensor goes to one.
    Send {
        /// The receiver.
        to: usize,
    },
    /// One member's tensor comes here.
    Recv {
        /// The sender.
        from: usize,
    },
    /// Nothing is sent; all wait for all.
    Barrier,
}

impl<'a> Call<'a> {
    /// True where this call, brought by member `me`, belongs together with `other`, brought by member `at`.
    ///
    /// Among calls that are not all-to-all it is transitive among those who send: comparing with one is comparing with all.
    pub fn agrees(&self, me: usize, other: &Call<'_>, at: usize) -> bool {
        self.facts().agrees(me, &other.facts(), at)
    }

    /// Where the tensors lie that this member sends, if it sends any.
    pub fn device(&self) -> Option<Device> {
        self.outgoing.first().map(Tensor::device)
    }

    pub(in crate::comm) fn facts(&self) -> Facts<'a> {
        let Call { name, route, op, dtype, outgoing, incoming } = *self;
        Facts { name, route, op, dtype, device: self.device(), sent: Sent::Tensors(outgoing), incoming }
    }

    /// What engines compare that cannot hand over the call itself.
    pub(in crate::comm) fn brief(&self) -> Brief {
        let Call { name, route, op, dtype, outgoing, incoming } = *self;
        // What members agree on from what they expect need not be said twice.
        let sent = if route == Route::AllToAll { outgoing } else { &[] };
        let outgoing = sent.iter().map(|x| x.shape().clone()).collect();
        let operator = current_operator().into();
        Brief { name: name.into(), route, op, dtype, outgoing, incoming: incoming.to_vec(), operator }
    }
}

/// A call without its tensors and without their device, which is each rank's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::comm) struct Brief {
    pub name: Cow<'static, str>,
    pub route: Route,
    pub op: Option<ReduceOp>,
    pub dtype: DType,
    /// Under [`Route::AllToAll`] alone.
    pub outgoing: Vec<Shape>,
    pub incoming: Vec<Shape>,
    /// The operator that wants the call; ranks may differ about it, and are told so where they differ otherwise.
    pub operator: Cow<'static, str>,
}

impl Brief {
    pub fn facts(&self) -> Facts<'_> {
        let Brief { ref name, route, op, dtype, ref outgoing, ref incoming, .. } = *self;
        Facts { name, route, op, dtype, device: None, sent: Sent::Shapes(outgoing), incoming }
    }
}

/// What is compared of a call, and shown.
#[derive(Clone, Copy)]
pub(in crate::comm) struct Facts<'a> {
    name: &'a str,
    pub route: Route,
    op: Option<ReduceOp>,
    dtype: DType,
    device: Option<Device>,
    sent: Sent<'a>,
    incoming: &'a [Shape],
}

#[derive(Clone, Copy)]
enum Sent<'a> {
    Tensors(&'a [Tensor]),
    Shapes(&'a [Shape]),
}

impl<'a> Sent<'a> {
    fn len(self) -> usize {
        match self {
            Sent::Tensors(all) => all.len(),
            Sent::Shapes(all) => all.len(),
        }
    }

    fn at(self, i: usize) -> &'a Shape {
        match self {
            Sent::Tensors(all) => all[i].shape(),
            Sent::Shapes(all) => &all[i],
        }
    }
}

impl Facts<'_> {
    /// As [`Call::agrees`].
    pub fn agrees(&self, me: usize, other: &Facts<'_>, at: usize) -> bool {
        if self.dtype != other.dtype || self.op != other.op || self.is_elsewhere(other) {
            return false;
        }
        match (self.route, other.route) {
            (Route::Send { .. }, Route::Recv { .. }) | (Route::Recv { .. }, Route::Send { .. }) => {
                self.incoming == other.incoming
            }
            (Route::AllToAll, Route::AllToAll) => {
                self.name == other.name
                    && self.sent.len() == other.sent.len()
                    && *self.sent.at(at) == other.incoming[me]
                    && *other.sent.at(me) == self.incoming[at]
            }
            (a, b) => a == b && self.name == other.name && self.incoming == other.incoming,
        }
    }

    /// How two that disagree are shown: with their devices where these differ.
    pub fn told_apart(&self, other: &Facts<'_>) -> (String, String) {
        let show = |facts: &Facts<'_>| match facts.device {
            Some(device) if self.is_elsewhere(other) => format!("{facts} on {device}"),
            _ => facts.to_string(),
        };
        (show(self), show(other))
    }

    fn is_elsewhere(&self, other: &Facts<'_>) -> bool {
        self.device.is_some_and(|here| other.device.is_some_and(|there| here != there))
    }
}

/// As errors show it: `all_reduce(sum) f32[1024]`, or with shapes that differ, `all_gather f32{[2, 3], [1, 3]}`.
impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.facts().fmt(f)
    }
}

impl fmt::Display for Facts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        if let Some(op) = self.op {
            write!(f, "({op})")?;
        }
        let sent: Vec<&Shape> = (0..self.sent.len()).map(|i| self.sent.at(i)).collect();
        let expected: Vec<&Shape> = self.incoming.iter().collect();
        match self.route {
            Route::Barrier => Ok(()),
            Route::Broadcast { root } => {
                write!(f, "(root {root}) {}", self.dtype)?;
                write_shapes(f, &expected)
            }
            Route::AllToAll => {
                write!(f, " {}", self.dtype)?;
                write_shapes(f, &sent)?;
                if self.op.is_none() && sent != expected {
                    f.write_str(" for ")?;
                    write_shapes(f, &expected)?;
                }
                Ok(())
            }
            Route::Gather | Route::Send { .. } | Route::Recv { .. } => {
                write!(f, " {}", self.dtype)?;
                write_shapes(f, &expected)
            }
        }
    }
}

/// `[2, 3]` where all agree, else `{[2, 3], [1, 3]}`.
fn write_shapes(f: &mut fmt::Formatter<'_>, shapes: &[&Shape]) -> fmt::Result {
    match shapes {
        [first, rest @ ..] if rest.iter().all(|s| s == first) => write!(f, "{first}"),
        _ => {
            f.write_str("{")?;
            for (i, shape) in shapes.iter().enumerate() {
                write!(f, "{}{shape}", if i > 0 { ", " } else { "" })?;
            }
            f.write_str("}")
        }
    }
}

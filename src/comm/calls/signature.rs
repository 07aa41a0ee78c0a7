//! The facts that are compared of calls, and the rule by which calls belong together.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::route::Route;
use super::shape_list::{ShapeList, write_shapes};
use crate::tensor::{DType, Device, ReduceOp, Shape, Tensor};

/// A call without its tensors and without their device, which is each rank's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::comm) struct CallSignature {
    pub name: Cow<'static, str>,
    pub route: Route,
    pub op: Option<ReduceOp>,
    pub dtype: DType,
    /// Under [`Route::AllToAll`] alone.
    pub outgoing: Vec<Shape>,
    pub incoming: Vec<Shape>,
    /// The operator that wants the call; ranks may differ about it, and are told so if they differ otherwise.
    pub operator: Cow<'static, str>,
}

impl CallSignature {
    pub fn view(&self) -> SignatureView<'_> {
        let CallSignature { ref name, route, op, dtype, ref outgoing, ref incoming, .. } = *self;
        let (sent, expected) = (ShapesView::Shapes(outgoing), ShapesView::Shapes(incoming));
        SignatureView { name, route, op, dtype, device: None, sent, expected }
    }
}

/// The facts that are compared of a call, and shown in errors; borrowed from a call in flight, a [`CallSignature`] or a record.
#[derive(Clone, Copy)]
pub(in crate::comm) struct SignatureView<'a> {
    pub name: &'a str,
    pub route: Route,
    pub op: Option<ReduceOp>,
    pub dtype: DType,
    /// The device of the tensors sent, if it is known.
    pub device: Option<Device>,
    /// Known under [`Route::AllToAll`] alone.
    pub sent: ShapesView<'a>,
    pub expected: ShapesView<'a>,
}

impl SignatureView<'_> {
    /// True if this call, brought by member `me`, belongs together with `other`, brought by member `at`: the one rule for calls
    /// in flight and for calls in records. Shapes of which a record kept only a hash count as equal if they may be.
    ///
    /// Among calls that are not all-to-all it is transitive among those who send: comparing with one is comparing with all.
    pub fn agrees(&self, me: usize, other: &SignatureView<'_>, at: usize) -> bool {
        if self.dtype != other.dtype || self.op != other.op || self.is_on_another_device(other) {
            return false;
        }
        match (self.route, other.route) {
            (Route::Send { .. }, Route::Recv { .. }) | (Route::Recv { .. }, Route::Send { .. }) => {
                self.expected.agrees(other.expected)
            }
            (Route::AllToAll, Route::AllToAll) => {
                self.name == other.name
                    && self.sent.len() == other.sent.len()
                    && may_be_equal(self.sent.at(at), other.expected.at(me))
                    && may_be_equal(other.sent.at(me), self.expected.at(at))
            }
            (a, b) => a == b && self.name == other.name && self.expected.agrees(other.expected),
        }
    }

    /// The texts of two that disagree: with their devices if these differ.
    pub fn describe_both(&self, other: &SignatureView<'_>) -> (String, String) {
        let show = |call: &SignatureView<'_>| match call.device {
            Some(device) if self.is_on_another_device(other) => format!("{call} on {device}"),
            _ => call.to_string(),
        };
        (show(self), show(other))
    }

    fn is_on_another_device(&self, other: &SignatureView<'_>) -> bool {
        self.device.is_some_and(|here| other.device.is_some_and(|there| here != there))
    }
}

fn may_be_equal(a: Option<&[usize]>, b: Option<&[usize]>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a == b,
        _ => true,
    }
}

/// As errors show a call: `all_reduce(sum) f32[1024]`, or with shapes that differ, `all_gather f32{[2, 3], [1, 3]}`.
impl fmt::Display for SignatureView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SignatureView { name, route, op, dtype, sent, expected, .. } = self;
        f.write_str(name)?;
        if let Some(op) = op {
            write!(f, "({op})")?;
        }
        match route {
            Route::Barrier => Ok(()),
            Route::Broadcast { root } => write!(f, "(root {root}) {dtype}{expected}"),
            Route::AllToAll if op.is_none() && !sent.agrees(*expected) => {
                write!(f, " {dtype}{sent} for {expected}")
            }
            Route::AllToAll => write!(f, " {dtype}{sent}"),
            Route::Gather | Route::Send { .. } | Route::Recv { .. } => write!(f, " {dtype}{expected}"),
        }
    }
}

/// A list of shapes, by whoever holds it.
#[derive(Clone, Copy)]
pub(in crate::comm) enum ShapesView<'a> {
    Tensors(&'a [Tensor]),
    Shapes(&'a [Shape]),
    /// All of them, or the first few.
    Recorded(&'a ShapeList),
}

impl<'a> ShapesView<'a> {
    fn len(self) -> usize {
        match self {
            ShapesView::Tensors(all) => all.len(),
            ShapesView::Shapes(all) => all.len(),
            ShapesView::Recorded(list) => list.len(),
        }
    }

    /// The i-th shape, if it is known. A list that is known as a whole has it.
    fn at(self, i: usize) -> Option<&'a [usize]> {
        match self {
            ShapesView::Tensors(all) => Some(all[i].shape()),
            ShapesView::Shapes(all) => Some(&all[i]),
            ShapesView::Recorded(list) => list.at(i),
        }
    }

    /// True if both lists are the same, as far as they are known.
    fn agrees(self, other: ShapesView<'_>) -> bool {
        match (self, other) {
            (ShapesView::Shapes(a), ShapesView::Shapes(b)) => a == b,
            (ShapesView::Recorded(a), ShapesView::Recorded(b)) => a == b,
            (a, b) => a.len() == b.len() && (0..a.len()).all(|i| may_be_equal(a.at(i), b.at(i))),
        }
    }
}

/// `[2, 3]` if all are one shape, else `{[2, 3], [1, 3]}`; `{[2, 3], [1, 3], 100 in all}` if only the first few are known.
impl fmt::Display for ShapesView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShapesView::Tensors(all) => write_shapes(f, all.iter().map(|x| &x.shape()[..]), all.len()),
            ShapesView::Shapes(all) => write_shapes(f, all.iter().map(|shape| &shape[..]), all.len()),
            ShapesView::Recorded(list) => list.fmt(f),
        }
    }
}

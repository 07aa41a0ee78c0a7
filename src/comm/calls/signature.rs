//! The part of a call that members compare, and the rule by which calls fit together.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::route::Route;
use super::shape_list::{ShapeList, write_shapes};
use crate::tensor::{DType, Device, ReduceOp, Shape, Tensor};

/// A call without its tensors and their device (each rank has its own), to be sent to the coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::comm) struct CallSignature {
    pub name: Cow<'static, str>,
    pub route: Route,
    pub op: Option<ReduceOp>,
    pub dtype: DType,
    /// The shapes sent; filled for [`Route::AllToAll`] only.
    pub outgoing: Vec<Shape>,
    pub incoming: Vec<Shape>,
    /// The operator that the call is made for. It is not compared, but errors show it.
    pub operator: Cow<'static, str>,
    /// The hash of the tensors' [`Lineage`](super::Lineage).
    pub lineage: u64,
    /// The name of the tensors' lineage. It is not compared, but errors show it.
    pub made_by: Cow<'static, str>,
}

impl CallSignature {
    pub fn view(&self) -> SignatureView<'_> {
        let CallSignature { ref name, route, op, dtype, ref outgoing, ref incoming, .. } = *self;
        let (sent, expected) = (ShapesView::Shapes(outgoing), ShapesView::Shapes(incoming));
        let subject = Subject { lineage: self.lineage, name: &self.made_by };
        SignatureView { name, route, op, dtype, device: None, sent, expected, subject }
    }
}

/// The part of a call that members compare and errors show, borrowed from a call in flight, a [`CallSignature`] or a
/// record.
#[derive(Clone, Copy)]
pub(in crate::comm) struct SignatureView<'a> {
    pub name: &'a str,
    pub route: Route,
    pub op: Option<ReduceOp>,
    pub dtype: DType,
    /// The device of the tensors sent, if known.
    pub device: Option<Device>,
    /// Known for [`Route::AllToAll`] only.
    pub sent: ShapesView<'a>,
    pub expected: ShapesView<'a>,
    pub subject: Subject<'a>,
}

/// The tensors of a call, by the hash and the name of their lineage.
#[derive(Clone, Copy)]
pub(in crate::comm) struct Subject<'a> {
    pub lineage: u64,
    pub name: &'a str,
}

impl SignatureView<'_> {
    /// Returns true if this call, made by member `me`, fits `other`, made by member `at`. The rule is the same for
    /// calls in flight and calls in records. If a record kept only a hash of some shapes, these count as equal if
    /// they may be.
    ///
    /// Except for all-to-all the relation is transitive among senders, so comparing with one member is comparing with
    /// all.
    pub fn agrees(&self, me: usize, other: &SignatureView<'_>, at: usize) -> bool {
        self.subject.lineage == other.subject.lineage && self.agrees_in_form(me, other, at)
    }

    /// Returns true if the calls fit together, whatever their tensors are.
    pub fn agrees_in_form(&self, me: usize, other: &SignatureView<'_>, at: usize) -> bool {
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

    /// Returns the texts of this call, made by member `me`, and of one that does not fit, made by member `at`, with their
    /// devices if these differ. Calls that fit but for their tensors show these.
    pub fn describe_both(&self, me: usize, other: &SignatureView<'_>, at: usize) -> (String, String) {
        let is_other = self.agrees_in_form(me, other, at);
        let show = |call: &SignatureView<'_>| {
            let tensor = if is_other { format!(" of {}", call.subject) } else { String::new() };
            match call.device {
                Some(device) if self.is_on_another_device(other) => format!("{call}{tensor} on {device}"),
                _ => format!("{call}{tensor}"),
            }
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

/// Writes the call as errors show it: `all_reduce(sum) f32[1024]`, or with different shapes, `all_gather f32{[2, 3],
/// [1, 3]}`.
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

/// Writes `h.1.w (lineage 9f8a04c27d3b1e65)`, or `a plain tensor` without a lineage.
impl fmt::Display for Subject<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lineage {
            0 => f.write_str("a plain tensor"),
            lineage => write!(f, "{} (lineage {lineage:016x})", self.name),
        }
    }
}

/// A borrowed list of shapes.
#[derive(Clone, Copy)]
pub(in crate::comm) enum ShapesView<'a> {
    Tensors(&'a [Tensor]),
    Shapes(&'a [Shape]),
    /// All shapes of the list, or the first few.
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

    /// Returns the i-th shape, if known. Lists other than recorded ones know all.
    fn at(self, i: usize) -> Option<&'a [usize]> {
        match self {
            ShapesView::Tensors(all) => Some(all[i].shape()),
            ShapesView::Shapes(all) => Some(&all[i]),
            ShapesView::Recorded(list) => list.at(i),
        }
    }

    /// Returns true if both lists are equal as far as they are known.
    fn agrees(self, other: ShapesView<'_>) -> bool {
        match (self, other) {
            (ShapesView::Shapes(a), ShapesView::Shapes(b)) => a == b,
            (ShapesView::Recorded(a), ShapesView::Recorded(b)) => a == b,
            (a, b) => a.len() == b.len() && (0..a.len()).all(|i| may_be_equal(a.at(i), b.at(i))),
        }
    }
}

/// Writes `[2, 3]` if all shapes are equal, else `{[2, 3], [1, 3]}`, or `{[2, 3], [1, 3], 100 in all}` if only the
/// first few are known.
impl fmt::Display for ShapesView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShapesView::Tensors(all) => write_shapes(f, all.iter().map(|x| &x.shape()[..]), all.len()),
            ShapesView::Shapes(all) => write_shapes(f, all.iter().map(|shape| &shape[..]), all.len()),
            ShapesView::Recorded(list) => list.fmt(f),
        }
    }
}

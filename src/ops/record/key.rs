//! The comparison of operators, and attributes that are compared by their bits or not at all.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::FxHasher;

use super::Op;

/// Comparison, hashing and copying of operators behind `dyn Op`. Implemented for every operator that is
/// `Clone + Eq + Hash`.
///
/// ```
/// use std::sync::Arc;
/// use isoshard::ops::{LogSoftmax, Op, OpKey, Softmax};
/// let op: Arc<dyn Op> = Softmax { dim: 1 }.to_shared();
/// assert!(op.key_eq(&Softmax { dim: 1 }));
/// assert!(!op.key_eq(&Softmax { dim: 0 }) && !op.key_eq(&LogSoftmax { dim: 1 }));
/// assert_eq!(op.as_any().downcast_ref(), Some(&Softmax { dim: 1 }));
/// ```
pub trait OpKey: Any {
    /// Returns true if the other operator has the same type and equal attributes.
    fn key_eq(&self, other: &dyn Op) -> bool;
    /// Hashes the type and the attributes.
    fn key_hash(&self, state: &mut dyn Hasher);
    /// Returns the operator as `dyn Any`, to be downcast.
    fn as_any(&self) -> &dyn Any;
    /// Returns a copy in an `Arc`.
    fn to_shared(&self) -> Arc<dyn Op>;
}

impl<T: Op + Clone + Eq + Hash> OpKey for T {
    fn key_eq(&self, other: &dyn Op) -> bool {
        other.as_any().downcast_ref::<T>().is_some_and(|o| o == self)
    }

    fn key_hash(&self, mut state: &mut dyn Hasher) {
        self.hash(&mut state);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn to_shared(&self) -> Arc<dyn Op> {
        Arc::new(self.clone())
    }
}

/// An attribute that is not part of the key under which plans are cached, such as a learning rate or a draw number. Any
/// two compare equal and have the same hash.
///
/// Calls that differ only in such attributes share a plan. They do not share a derivative: an operator with an
/// `Unkeyed` attribute writes its derivative once per call. The crate notices the attribute when it hashes the
/// operator, so an attribute that must not be compared has to be an `Unkeyed`, not a field that a hand-written
/// `PartialEq` skips.
///
/// ```
/// use isoshard::ops::Unkeyed;
/// assert_eq!(Unkeyed(0.1), Unkeyed(0.2));
/// assert_eq!(Unkeyed(0.1).0, 0.1);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Unkeyed<T>(pub T);

thread_local! {
    /// True if this thread has compared or hashed an [`Unkeyed`] since the flag was cleared.
    static MET_UNKEYED: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if `op` has an [`Unkeyed`] attribute.
pub(crate) fn has_unkeyed(op: &dyn Op) -> bool {
    MET_UNKEYED.set(false);
    op.key_hash(&mut FxHasher::default());
    op.key_eq(op);
    MET_UNKEYED.get()
}

impl<T> PartialEq for Unkeyed<T> {
    fn eq(&self, _: &Self) -> bool {
        MET_UNKEYED.set(true);
        true
    }
}

impl<T> Eq for Unkeyed<T> {}

impl<T> Hash for Unkeyed<T> {
    fn hash<H: Hasher>(&self, _: &mut H) {
        MET_UNKEYED.set(true);
    }
}

/// A floating-point attribute that is compared and hashed by its bits.
///
/// ```
/// use isoshard::ops::Bits;
/// assert_eq!(Bits(f64::NAN), Bits(f64::NAN));
/// assert_ne!(Bits(0.0), Bits(-0.0));
/// ```
#[derive(Clone, Copy, Default)]
pub struct Bits(pub f64);

impl PartialEq for Bits {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Bits {}

impl Hash for Bits {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

impl fmt::Debug for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

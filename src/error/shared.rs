//! An error that several clones of one [`Error`](super::Error) share.

use std::error::Error as StdError;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// An error behind a shared pointer: clones of an [`Error`](super::Error), one per rank, keep one source.
///
/// It dereferences to the error. Two are equal if they are one error, or if their messages are equal.
///
/// ```
/// use isoshard::Error;
/// let error = Error::io("data", "tokens.bin", std::io::ErrorKind::PermissionDenied.into());
/// let Error::Io { source, .. } = error else { unreachable!() };
/// assert_eq!(source.kind(), std::io::ErrorKind::PermissionDenied);
/// ```
pub struct SharedError<E: ?Sized>(Arc<E>);

impl<E> SharedError<E> {
    /// Returns `error` behind a shared pointer.
    ///
    /// ```
    /// use isoshard::SharedError;
    /// let error = SharedError::new(std::fmt::Error);
    /// assert_eq!(error.clone(), error);
    /// ```
    pub fn new(error: E) -> SharedError<E> {
        SharedError(Arc::new(error))
    }
}

impl From<Box<dyn StdError + Send + Sync>> for SharedError<dyn StdError + Send + Sync> {
    fn from(error: Box<dyn StdError + Send + Sync>) -> Self {
        SharedError(error.into())
    }
}

impl<E: ?Sized> Deref for SharedError<E> {
    type Target = E;

    fn deref(&self) -> &E {
        &self.0
    }
}

impl<E: ?Sized> Clone for SharedError<E> {
    fn clone(&self) -> Self {
        SharedError(self.0.clone())
    }
}

impl<E: ?Sized + fmt::Display> PartialEq for SharedError<E> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.to_string() == other.0.to_string()
    }
}

impl<E: ?Sized + fmt::Display> fmt::Display for SharedError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<E: ?Sized + fmt::Debug> fmt::Debug for SharedError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

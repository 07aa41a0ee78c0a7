//! The window of keys that a query sees.

use std::ops::Range;

/// The keys that the query at position p sees: those at positions `p - before` to `p + after`.
///
/// ```
/// use isoshard_kernels::attention::WindowRule;
/// assert_eq!(WindowRule { before: Some(1), after: Some(0) }.span(5, 9), 4..6);
/// assert_eq!(WindowRule { before: None, after: None }.span(5, 9), 0..9);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowRule {
    /// The number of keys before its own position that a query sees; `None` for all.
    pub before: Option<usize>,
    /// The number of keys after its own position that a query sees; `None` for all.
    pub after: Option<usize>,
}

impl WindowRule {
    /// Returns the keys, of `keys` in all, that the window of the query at `position` contains.
    #[inline]
    pub fn span(&self, position: usize, keys: usize) -> Range<usize> {
        let from = self.before.map_or(0, |n| position.saturating_sub(n).min(keys));
        let to = self.after.map_or(keys, |n| position.saturating_add(n).saturating_add(1).min(keys));
        from..to.max(from)
    }
}

//! Lists that take little code or report that there is no memory.

pub(super) mod short_lists;
pub(super) mod sized_lists;

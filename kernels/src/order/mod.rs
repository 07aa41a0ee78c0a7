//! The order of elements: sorting, and the largest or smallest elements of rows.
//!
//! Elements ascend by value, with -0 equal to 0 and NaN after every number; equal elements by their index. Descending order reverses
//! the values and not the indices.

mod key;
mod row_order;

pub use key::{OrderEntry, OrderKey, Ordered};
pub use row_order::{Order, RowOrder};

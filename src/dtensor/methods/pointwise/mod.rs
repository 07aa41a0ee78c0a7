//! Functions of elements: rows of the table, compositions of them, comparisons, and lists of tensors.

pub(super) mod activations;
pub(super) mod foreach;
pub(super) mod logic;
pub(super) mod table;

//! Calls on operands that are ragged over several dims: the rows that follow from an operator's own, and the boxes over
//! which its kernel runs.

mod boxes;
mod rows;

pub(crate) use boxes::{RaggedBoxes, are_cut_alike, empty_box};
#[cfg(feature = "testing")]
pub(crate) use rows::rows_on_axis;
pub(crate) use rows::{checked_rows, runs_by_boxes};

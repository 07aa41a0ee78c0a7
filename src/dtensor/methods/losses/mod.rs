//! Losses: of classes, of bools, of elements and vectors, and their reductions.

pub(super) mod binary_losses;
pub(super) mod class_losses;
pub(super) mod element_losses;
pub(super) mod loss_reduction;

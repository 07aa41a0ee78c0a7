//! Plans: layouts by path pattern, given outside the model.

pub(super) mod foreign_names;
pub(super) mod pattern;
pub(super) mod rules;

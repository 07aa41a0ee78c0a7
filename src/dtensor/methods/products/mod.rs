//! Products and linear maps, one or several at a time, and products per expert.

pub(super) mod joint_linear;
pub(super) mod linear;
pub(super) mod moe;
pub(super) mod product;

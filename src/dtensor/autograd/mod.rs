//! The backward pass: from a loss over the tape to the gradients of leaf tensors, reduced and in their places.

pub(super) mod backward;
pub(super) mod backward_pass;
pub(super) mod custom_vjp;
pub(super) mod derivative;
pub(super) mod grad;
pub(super) mod gradient_places;
pub(super) mod gradient_queue;
pub(super) mod gradient_sum;
pub(super) mod gradients;
pub(super) mod kept_parts;
pub(super) mod leaf_gradients;
pub(super) mod leaf_path;
pub(super) mod partial_queue;
pub(super) mod reached_nodes;
pub(super) mod recompute;
pub(super) mod regather;
pub(super) mod scopes;
pub(super) mod wanted_gradients;

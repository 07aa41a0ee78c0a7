//! Calls of operators: dispatch by a plan, functions on local tensors, tallies and spans, and what the tape records.

pub(super) mod check_own_code;
pub(super) mod check_results;
pub(super) mod dispatch;
pub(super) mod leaf_dtypes;
pub(super) mod local_map;
pub(super) mod measure;
pub(super) mod offloaded;
pub(super) mod operator_span;
pub(super) mod recompute_cheap;
pub(super) mod record;
pub(super) mod work_tally;

//! Plans of calls: the rows of an operator that are chosen for its operands, their costs, and programs of derivatives.

pub(super) mod call_cost;
pub(super) mod call_plan;
pub(super) mod choose_rows;
pub(super) mod derivative_program;
#[cfg(test)]
pub(super) mod exhaustive_rows;
pub(super) mod explain;
pub(super) mod gradient_needs;
pub(super) mod kernel_runs;
pub(super) mod move_cost;
pub(super) mod node_windows;
pub(super) mod part_runs;
pub(super) mod row_product;
pub(super) mod work_share;

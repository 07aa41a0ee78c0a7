//! Sums and other reductions of rows in the order of the [summation tree](crate::summation).

pub(crate) mod extremes;
pub(crate) mod lanes;
pub(crate) mod leaves;
pub(crate) mod neighbours;
pub(crate) mod reduce;
pub(crate) mod reducer;
pub(crate) mod row_terms;
pub(crate) mod tree;

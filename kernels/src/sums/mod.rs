//! Sums and other reductions of rows in the order of the [summation tree](crate::summation).

pub(crate) mod extremes;
mod first_index;
pub(crate) mod lanes;
pub(crate) mod leaves;
pub(crate) mod neighbours;
mod products;
pub(crate) mod reduce;
pub(crate) mod reducer;
pub(crate) mod row_terms;
mod terms;
pub(crate) mod tree;
pub(crate) mod unordered;

pub use first_index::FirstIndices;
pub use products::Products;
pub use terms::{Term, TermRows, Terms};

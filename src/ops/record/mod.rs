//! The record of an operator: the trait that every operator implements, the types of its methods' arguments and results,
//! and the checks of its contract.

pub(super) mod contract;
mod key;
mod meta;
mod op;
mod program;
mod refusals;
mod row;
mod run;
mod sample;
pub(super) mod signature;
mod view;
pub(super) mod vjp;
mod windows;
pub(super) mod work;

#[cfg(feature = "testing")]
pub(crate) use contract::broken_clause;
pub(crate) use contract::expect_shapes;
pub(crate) use key::has_unkeyed;
pub use key::{Bits, OpKey, Unkeyed};
pub use meta::{Meta, Metas};
pub(crate) use meta::{accumulator, list};
pub use op::{Batched, Op, Statistic, Tensors};
pub use program::{VjpProgram, VjpStep, VjpValue};
pub use refusals::{arity, no_cuda_kernel};
pub use row::{Algebra, AxisPlacement, MeshAxis, RaggedCut, Row};
pub use run::eval_whole;
pub(crate) use run::{infer_results, meta_results, run, run_into};
pub use sample::{Input, InputFill, Sample};
pub use signature::Signature;
pub(in crate::ops) use view::view_methods;
pub use vjp::Vjp;
pub use windows::{Window, Windows};
pub use work::Work;

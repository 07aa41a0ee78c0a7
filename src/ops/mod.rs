//! Operators: one file, one record, every truth about it in it; and a room for those with kernels of their own.
//!
//! An operator is a small value, its attributes, that implements [`Op`]: shapes, sharding [rows](Row), a CPU kernel, a
//! derivative written as an expression over other operators ([`Vjp`]), and [samples](Sample) that feed the tests.
//! Rows speak about one mesh axis; the dispatcher takes their product. A row that is missing is refused or worked
//! around by moving operands, never guessed.
//!
//! A room is a folder: the records, `cpu` and `cuda`, which hold the kernels. Its `mod.rs` is the record of the operator that
//! gives it its name, and `grad.rs` that of the derivative; a room of several operators has a file for each. [`cpu`] and [`cuda`]
//! give kernels to be called by themselves.

mod attention;
mod attributes;
mod cat;
mod catalog;
pub mod cpu;
mod cross_entropy;
pub mod cuda;
mod dropout;
mod expand;
mod index;
mod matmul;
mod meta;
mod norm;
mod pad;
mod permute;
mod pointwise;
mod random;
mod record;
mod reduce;
mod reshape;
mod rotary;
mod row;
mod sample;
mod signature;
mod slice;
mod softmax;
mod split;
mod step;
mod vjp;
mod work;

pub use attention::Attention;
pub use attributes::{
    AttentionGrad, CrossEntropyGrad, EmbeddingGrad, Expand, LayerNormGrad, Pad, ScatterAdd, SoftmaxGrad,
};
pub use cat::Cat;
pub use catalog::{catalog, cuda_programs};
pub use cross_entropy::CrossEntropy;
pub use dropout::Dropout;
pub use index::embedding::Embedding;
pub use index::gather::Gather;
pub use matmul::Matmul;
pub(crate) use meta::list;
pub use meta::{Meta, Metas};
pub use norm::layer_norm::LayerNorm;
pub use norm::rms_norm::RmsNorm;
pub use norm::rms_norm_grad::RmsNormGrad;
pub use permute::Permute;
pub use pointwise::*;
pub(crate) use pointwise::{pointwise_table, signatures};
pub use random::bernoulli::Bernoulli;
pub use random::exponential::Exponential;
pub use random::gamma::Gamma;
pub use random::multinomial::Multinomial;
pub use random::poisson::Poisson;
pub use random::shuffle::Shuffle;
pub use record::{
    Batched, Bits, Op, OpKey, Statistic, Tensors, Unkeyed, Vjp, VjpProgram, VjpStep, VjpValue, Window,
    Windows, eval_whole,
};
pub(crate) use record::{arity, has_unkeyed, meta_results, run};
pub use reduce::argmax::Argmax;
pub use reduce::max::{Extreme, Max};
pub use reduce::min::Min;
pub use reduce::sum::Sum;
pub use reshape::Reshape;
pub use rotary::Rotary;
pub use row::{Algebra, AxisPlacement, MeshAxis, Row};
pub use sample::{Input, InputFill, Sample};
pub use signature::Signature;
pub use slice::Slice;
pub use softmax::Softmax;
pub use softmax::log_softmax::LogSoftmax;
pub use softmax::log_softmax_grad::LogSoftmaxGrad;
pub use softmax::sum_exp::SumExp;
pub use split::Split;
pub use step::adamw::{AdamWStep, each_chunk, expect_step, step_rows};
pub use step::sgd::SgdStep;
pub use work::Work;

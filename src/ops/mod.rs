//! Operators: one file, one record, every truth about it in it.
//!
//! An operator is a small value, its attributes, that implements [`Op`]: shapes, sharding [rows](Row), a CPU kernel, a
//! derivative written as an expression over other operators ([`Vjp`]), and [samples](Sample) that feed the tests.
//! Rows speak about one mesh axis; the dispatcher takes their product. A row that is missing is refused or worked
//! around by moving operands, never guessed.

mod adamw;
mod argmax;
mod attention;
mod attention_grad;
mod bernoulli;
mod cat;
mod catalog;
mod cross_entropy;
mod cross_entropy_grad;
mod dropout;
mod embedding;
mod embedding_grad;
mod expand;
mod exponential;
mod gamma;
mod gather;
mod layer_norm;
mod layer_norm_grad;
mod log_softmax;
mod log_softmax_grad;
mod matmul;
mod max;
mod min;
mod multinomial;
mod pad;
mod permute;
mod pointwise;
mod poisson;
mod random;
mod record;
mod reshape;
mod rms_norm;
mod rms_norm_grad;
mod rotary;
mod row;
mod sample;
mod scatter_add;
mod segments;
mod sgd;
mod shuffle;
mod signature;
mod slice;
mod softmax;
mod softmax_grad;
mod split;
mod sum;
mod sum_exp;
mod vjp;

pub use adamw::{AdamW, each_chunk, expect_step, step_rows};
pub use argmax::Argmax;
pub use attention::Attention;
pub use attention_grad::AttentionGrad;
pub use bernoulli::Bernoulli;
pub use cat::Cat;
pub use catalog::{catalog, cuda_programs};
pub use cross_entropy::CrossEntropy;
pub use cross_entropy_grad::CrossEntropyGrad;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use embedding_grad::EmbeddingGrad;
pub use expand::Expand;
pub use exponential::Exponential;
pub use gamma::Gamma;
pub use gather::Gather;
pub use layer_norm::LayerNorm;
pub use layer_norm_grad::LayerNormGrad;
pub use log_softmax::LogSoftmax;
pub use log_softmax_grad::LogSoftmaxGrad;
pub use matmul::Matmul;
pub use max::Max;
pub use min::Min;
pub use multinomial::Multinomial;
pub use pad::Pad;
pub use permute::Permute;
pub use pointwise::{
    Abs, Add, Cast, Compare, CompareKind, Div, Exp, Gelu, GeluGrad, GeluTanh, GeluTanhGrad, Log, Mask,
    Maximum, Minimum, Mul, Neg, Pointwise, Pow, PowGradBase, PowGradExponent, PowScalar, Relu, ReluGrad,
    Rsqrt, Scale, Select, Shift, Sigmoid, SigmoidGrad, Sign, Silu, SiluGrad, Sqrt, Sub, Tanh, TanhGrad,
    formulas,
};
pub(crate) use pointwise::{pointwise_table, signatures};
pub use poisson::Poisson;
pub use record::{Batched, Bits, Free, Key, Meta, Metas, Op, Tensors, Window, Windows, eval_whole};
pub(crate) use record::{absent, arity, has_free, list, run};
pub use reshape::Reshape;
pub use rms_norm::RmsNorm;
pub use rms_norm_grad::RmsNormGrad;
pub use rotary::Rotary;
pub use row::{Algebra, Axis, Row, Slot};
pub use sample::{Fill, Input, Sample};
pub use scatter_add::ScatterAdd;
pub use sgd::Sgd;
pub use shuffle::Shuffle;
pub use signature::Signature;
pub use slice::Slice;
pub use softmax::Softmax;
pub use softmax_grad::SoftmaxGrad;
pub use split::Split;
pub use sum::Sum;
pub use sum_exp::SumExp;
pub use vjp::{Program, Ref, Step, Vjp};

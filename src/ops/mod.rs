//! Operators: one file, one record, every truth about it in it.
//!
//! An operator is a small value, its attributes, that implements [`Op`]: shapes, sharding [rows](Row), a CPU kernel, a
//! derivative written as an expression over other operators ([`Vjp`]), and [samples](Sample) that feed the tests.
//! Rows speak about one mesh axis; the dispatcher takes their product. A row that is missing is refused or worked
//! around by moving operands, never guessed.

mod cat;
mod catalog;
mod expand;
mod matmul;
mod pad;
mod permute;
mod pointwise;
mod record;
mod reshape;
mod row;
mod sample;
mod signature;
mod slice;
mod split;
mod sum;
mod vjp;

pub use cat::Cat;
pub use catalog::catalog;
pub use expand::Expand;
pub use matmul::Matmul;
pub use pad::Pad;
pub use permute::Permute;
pub use pointwise::Pointwise;
pub use reshape::Reshape;
pub use record::{Bits, Free, Key, Meta, Metas, Op, Tensors, Window, Windows, eval_whole};
pub(crate) use record::{arity, list};
pub use row::{Algebra, Axis, Row, Slot};
pub use sample::{Fill, Input, Sample};
pub use signature::Signature;
pub use slice::Slice;
pub use split::Split;
pub use sum::Sum;
pub use vjp::{Program, Ref, Step, Vjp};

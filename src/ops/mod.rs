//! Operators: one file, one record, every truth about it in it.
//!
//! An operator is a small value, its attributes, that implements [`Op`]: shapes, sharding [rows](Row), a CPU kernel, a
//! derivative written as an expression over other operators ([`Vjp`]), and [samples](Sample) that feed the tests.
//! Rows speak about one mesh axis; the dispatcher takes their product. A row that is missing is refused or worked
//! around by moving operands, never guessed.

mod add;
mod cat;
mod catalog;
mod expand;
mod matmul;
mod mul;
mod neg;
mod pad;
mod permute;
mod pointwise;
mod record;
mod reshape;
mod reuse;
mod row;
mod sample;
mod scale;
mod signature;
mod slice;
mod split;
mod sub;
mod sum;
mod vjp;

pub use add::Add;
pub use cat::Cat;
pub use catalog::catalog;
pub use expand::Expand;
pub use matmul::Matmul;
pub use mul::Mul;
pub use neg::Neg;
pub use pad::Pad;
pub use permute::Permute;
pub use pointwise::Pointwise;
pub use record::{Bits, Free, Key, Meta, Metas, Op, Tensors, Window, Windows, eval_whole};
pub(crate) use record::{arity, list};
pub use reshape::Reshape;
pub use row::{Algebra, Axis, Row, Slot};
pub use sample::{Fill, Input, Sample};
pub use scale::Scale;
pub use signature::Signature;
pub use slice::Slice;
pub use split::Split;
pub use sub::Sub;
pub use sum::Sum;
pub use vjp::{Program, Ref, Step, Vjp};

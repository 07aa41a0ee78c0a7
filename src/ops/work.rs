//! The work of a call: operations and bytes, as a formula of shapes.

use super::meta::Meta;

/// The work of one call of an operator, a function of its attributes and of *global* shapes: [`Op::work`](super::Op::work).
/// It says what the mathematics asks for, not how a kernel goes about it, and no two meshes differ in it.
///
/// - `flops` counts additions, subtractions, products, divisions, square roots, comparisons and choices as 1 each, a fused
///   multiply-add as 2, and every special function and random word as [`Work::SPECIAL`]. Operations on integers and bools count
///   like those on floating numbers; a constant computed once per call counts nothing.
/// - `bytes` counts every operand read once and every result written once. Of an operand that is read by index, only the
///   elements that are read count. A view touches nothing; a copy that an operand's strides force is not counted, since shapes
///   do not tell it.
///
/// A count that exceeds [`u64::MAX`] is that number.
///
/// ```
/// use isoshard::ops::{Matmul, Meta, Op};
/// use isoshard::tensor::DType;
/// let ins = [Meta::new(DType::F32, [64, 128]), Meta::new(DType::F32, [128, 32])];
/// let product = Matmul::for_dims(2, 2)?;
/// let work = product.work(&ins, &product.infer(&ins)?);
/// assert_eq!(work.flops, 2 * 64 * 32 * 128); // 2 m n k
/// assert_eq!(work.bytes, 4 * (64 * 128 + 128 * 32 + 64 * 32));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Work {
    /// Operations on elements.
    pub flops: u64,
    /// Bytes read and written.
    pub bytes: u64,
}

impl Work {
    /// The operations that a special function (exponential, logarithm, hyperbolic tangent, error function, sigmoid, sine) counts
    /// as, which is about the length of their approximations; and a random 32-bit word: Philox makes four by ten rounds of eight
    /// operations.
    pub const SPECIAL: u64 = 20;

    /// No work: a view.
    pub const fn view() -> Work {
        Work { flops: 0, bytes: 0 }
    }

    /// This many operations, which read every operand and write every result.
    pub fn new(flops: u64, ins: &[Meta], outs: &[Meta]) -> Work {
        let bytes = ins.iter().chain(outs).map(len_bytes).fold(0, u64::saturating_add);
        Work { flops, bytes }
    }

    /// Elements that are moved and not computed with.
    pub fn moves(ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(0, ins, outs)
    }

    /// This many operations for each element of the first operand.
    pub fn elementwise(flops_per_element: u64, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(flops_per_element.saturating_mul(elements(&ins[0])), ins, outs)
    }

    /// One operation for every element that is taken into another: a reduction of the first operand to the first result.
    pub fn reduction(ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(elements(&ins[0]).saturating_sub(elements(&outs[0])), ins, outs)
    }

    /// Elements of `from`, as many as the result has, copied to where `index` says: only those are read.
    pub fn by_index(index: &Meta, outs: &[Meta]) -> Work {
        let moved = len_bytes(&outs[0]).saturating_mul(2);
        Work { flops: 0, bytes: moved.saturating_add(len_bytes(index)) }
    }

    /// The same with this many operations more.
    pub fn plus(self, flops: u64) -> Work {
        Work { flops: self.flops.saturating_add(flops), ..self }
    }
}

/// The number of elements of the whole.
pub(super) fn elements(of: &Meta) -> u64 {
    of.shape.iter().map(|&n| n as u64).fold(1, u64::saturating_mul)
}

/// The number of rows along `dim`.
pub(super) fn rows(of: &Meta, dim: usize) -> u64 {
    let others = of.shape.iter().enumerate().filter(|(d, _)| *d != dim);
    others.map(|(_, &n)| n as u64).fold(1, u64::saturating_mul)
}

/// The number of bytes of the whole.
pub(super) fn len_bytes(of: &Meta) -> u64 {
    elements(of).saturating_mul(of.dtype.size_bytes() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn nothing_overflows() {
        let huge = Meta::new(DType::F64, [1 << 63, 1 << 63]);
        let all = std::slice::from_ref(&huge);
        let most = Work { flops: u64::MAX, bytes: u64::MAX };
        assert_eq!(Work::elementwise(3, all, all).plus(1), most);
        assert_eq!(Work::reduction(all, &[Meta::new(DType::F64, [])]).bytes, u64::MAX);
        assert_eq!(Work::by_index(&huge, all), Work { flops: 0, bytes: u64::MAX });
        let empty = Meta::new(DType::F64, [1 << 63, 1 << 63, 0]);
        assert_eq!(Work::elementwise(3, std::slice::from_ref(&empty), &[]), Work::view());
    }
}

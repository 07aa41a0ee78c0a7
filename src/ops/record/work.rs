//! Operations and bytes of a call, as a formula of shapes.

use super::meta::Meta;

/// The work of one call of an operator ([`Op::work`](super::Op::work)), computed from its attributes and *global*
/// shapes. It counts what the definition asks for, not what a kernel does, and is the same on every mesh.
///
/// - `flops` counts 1 for an addition, subtraction, product, division, square root, comparison or selection, 2 for a
///   fused multiply-add, and 20 for a special function or a random word. Integers and bools count like
///   floats. A constant that is computed once per call counts 0.
/// - `bytes` counts each operand read once and each result written once. For an operand that is read by index, only the
///   elements read count. A view counts 0. A copy that strides make necessary is not counted, because shapes do not
///   show it.
///
/// Counts saturate at [`u64::MAX`].
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
    /// The number of operations on elements.
    pub flops: u64,
    /// The number of bytes read and written.
    pub bytes: u64,
}

impl Work {
    /// The count of a special function (exponential, logarithm, hyperbolic tangent, error function, sigmoid, sine),
    /// about the length of its approximation; also of a random 32-bit word, since Philox computes four in ten rounds of
    /// eight operations.
    pub(crate) const SPECIAL: u64 = 20;

    /// Returns the work of a view: none.
    ///
    /// ```
    /// # use isoshard::ops::Work;
    /// assert_eq!(Work::view(), Work { flops: 0, bytes: 0 });
    /// ```
    pub const fn view() -> Work {
        Work { flops: 0, bytes: 0 }
    }

    /// Returns the work of `flops` operations that read every operand and write every result.
    ///
    /// ```
    /// # use isoshard::{ops::{Meta, Work}, tensor::DType};
    /// let x = [Meta::new(DType::F32, [10])];
    /// assert_eq!(Work::new(7, &x, &x), Work { flops: 7, bytes: 80 });
    /// ```
    pub fn new(flops: u64, ins: &[Meta], outs: &[Meta]) -> Work {
        let bytes = ins.iter().chain(outs).map(len_bytes).fold(0, u64::saturating_add);
        Work { flops, bytes }
    }

    /// Returns the work of an operator that moves elements without computing with them.
    ///
    /// ```
    /// # use isoshard::{ops::{Meta, Work}, tensor::DType};
    /// let x = [Meta::new(DType::F32, [10])];
    /// assert_eq!(Work::moves(&x, &x), Work { flops: 0, bytes: 80 });
    /// ```
    pub fn moves(ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(0, ins, outs)
    }

    /// Returns the work of `flops_per_element` operations per element of the first operand.
    ///
    /// ```
    /// # use isoshard::{ops::{Meta, Work}, tensor::DType};
    /// let x = [Meta::new(DType::F32, [10])];
    /// assert_eq!(Work::elementwise(3, &x, &x), Work { flops: 30, bytes: 80 });
    /// ```
    pub fn elementwise(flops_per_element: u64, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(flops_per_element.saturating_mul(elements(&ins[0])), ins, outs)
    }

    /// Returns the work of a reduction of the first operand to the first result: each element of the operand beyond the
    /// first of its group costs one operation.
    ///
    /// ```
    /// # use isoshard::{ops::{Meta, Work}, tensor::DType};
    /// let (x, row_sums) = (Meta::new(DType::F32, [3, 10]), Meta::new(DType::F32, [3]));
    /// assert_eq!(Work::reduction(&[x], &[row_sums]).flops, 3 * 9);
    /// ```
    pub fn reduction(ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(elements(&ins[0]).saturating_sub(elements(&outs[0])), ins, outs)
    }

    /// Returns the work of copying elements by index: reads as many elements as the first result has, and the index.
    pub(crate) fn by_index(index: &Meta, outs: &[Meta]) -> Work {
        let moved = len_bytes(&outs[0]).saturating_mul(2);
        Work { flops: 0, bytes: moved.saturating_add(len_bytes(index)) }
    }

    /// Adds `flops` operations.
    pub(crate) fn plus(self, flops: u64) -> Work {
        Work { flops: self.flops.saturating_add(flops), ..self }
    }
}

/// Returns the number of elements of the global tensor.
pub(in crate::ops) fn elements(of: &Meta) -> u64 {
    of.shape.iter().map(|&n| n as u64).fold(1, u64::saturating_mul)
}

/// Returns the number of rows along `dim`: the product of the other extents.
pub(in crate::ops) fn rows(of: &Meta, dim: usize) -> u64 {
    let others = of.shape.iter().enumerate().filter(|(d, _)| *d != dim);
    others.map(|(_, &n)| n as u64).fold(1, u64::saturating_mul)
}

/// Returns the number of bytes of the global tensor.
pub(in crate::ops) fn len_bytes(of: &Meta) -> u64 {
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

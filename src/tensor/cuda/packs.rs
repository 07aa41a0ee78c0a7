//! Packs: neighbouring elements that a thread of a kernel loads or stores at once (`kernels/cuda/packs.cuh`).

use crate::tensor::{DType, Tensor};

/// Returns the number of elements of a pack; mirrors `PACK_LEN` of `kernels/cuda/packs.cuh`.
pub(crate) fn pack_len(dtype: DType) -> usize {
    16 / dtype.size_bytes().max(2)
}

/// Returns true if all 2^depth leaves of a row of `len` elements consist of packs.
pub(crate) fn has_packed_leaves(len: usize, depth: u32, dtype: DType) -> bool {
    len.is_multiple_of(pack_len(dtype) << depth)
}

/// Returns true if the tensor begins at a multiple of 16 bytes.
pub(crate) fn is_aligned(x: &Tensor) -> bool {
    x.device_address().is_some_and(|at| at.is_multiple_of(16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_are_packs_if_their_length_is_a_multiple() {
        // Rows of 24 leaves of 32, of one leaf of 24, of leaves of 20, and of leaves that differ.
        let cases = [
            (768, 5, [true, true]),
            (24, 0, [true, true]),
            (640, 5, [true, false]),
            (776, 5, [false, false]),
        ];
        for (len, depth, want) in cases {
            assert_eq!([DType::F32, DType::BF16].map(|d| has_packed_leaves(len, depth, d)), want, "{len}");
        }
        assert_eq!([DType::F64, DType::F16, DType::U8, DType::Bool].map(pack_len), [2, 8, 8, 8]);
    }
}

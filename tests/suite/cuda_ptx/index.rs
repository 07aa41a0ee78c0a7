//! Operators on indices in the interpreter of PTX: rows by index and their sums, sorts, and slots of experts.

use std::slice::from_ref;

use isoshard::ops::*;
use isoshard::tensor::DType;

use super::{FLOATS, check};
use crate::common::{ordinary, small_ints};
use crate::cuda_reduce::{compare, indices};

#[test]
fn rows_by_index_and_sums_by_destination() {
    check("by-index", &[], |device| {
        for dtype in FLOATS {
            let x = |shape: &[usize], salt| ordinary(dtype, &shape.into(), salt);
            compare(&Embedding, device, &[x(&[40, 16], 1), indices(&[3, 33], 40, 2)]);
            compare(&EmbeddingGrad { rows: 9 }, device, &[indices(&[300], 9, 3), x(&[300, 3], 4)]);
            compare(&Gather { dim: 1 }, device, &[x(&[5, 3, 4], 5), indices(&[5, 90, 4], 3, 6)]);
            compare(&ScatterAdd { dim: 1, extent: 3 }, device, &[indices(&[5, 70], 3, 7), x(&[5, 70], 8)]);
            let ins = [x(&[7, 3], 9), indices(&[100, 3], 7, 10), x(&[100, 3], 11)];
            for rule in [ScatterRule::Last, ScatterRule::Max] {
                compare(&Scatter { dim: 0, rule }, device, &ins);
            }
        }
        let numbers = [indices(&[200], 5, 12), small_ints(DType::I64, &[200].into(), 13)];
        compare(&ScatterAdd { dim: 0, extent: 5 }, device, &numbers);
        compare(&Bincount { bins: 9 }, device, &[indices(&[700], 9, 14)]);
        compare(&LastWrite { dim: 0, extent: 7 }, device, &[indices(&[100, 3], 7, 15)]);
    });
}

/// A sort counts digits in shared memory, in several blocks.
#[test]
fn sorts() {
    check("sorts", &[("barrier", "-place_i64")], |device| {
        for dtype in [DType::F32, DType::BF16, DType::I64] {
            // A kernel makes keys of the numbers: the interpreter would take one of -1 for memory that was not written.
            let x = match dtype {
                DType::I64 => indices(&[2, 700], 1 << 40, 1),
                _ => small_ints(dtype, &[2, 700].into(), 1),
            };
            compare(&Sort { dim: 1, descending: dtype == DType::F32 }, device, from_ref(&x));
        }
        let x = ordinary(DType::F32, &[5, 40].into(), 2);
        compare(&TopK { dim: 1, k: 3, largest: true }, device, from_ref(&x));
    });
}

/// Slots of -1 are dropped tokens.
#[test]
fn slots_of_experts() {
    check("experts", &[], |device| {
        let expert = Input::index([2, 257, 1], 5).values(DType::F32, 3);
        compare(&ExpertSlots { experts: 5, capacity: Some(40) }, device, &[expert]);
        for dtype in FLOATS {
            let slot = Input::slots([2, 40, 2], 82).values(DType::F32, 5);
            let x = ordinary(dtype, &[2, 40, 2, 8].into(), 1);
            compare(&PermuteTokens { slots: 82 }, device, &[x, slot.clone()]);
            compare(&UnpermuteTokens, device, &[ordinary(dtype, &[2, 82, 5].into(), 2), slot]);
        }
    });
}

//! The samples of a row of the table.

use crate::ops::pointwise::record::Pointwise;
use crate::ops::{Input, InputFill, Meta, Sample};
use crate::tensor::DType;

/// Adds a row's samples: the first fill at four shapes, the others at one, and an i64 sample if the row takes
/// `numbers`. Several operators take turns.
pub(super) fn add_samples<P: Pointwise + Copy>(
    all: &mut Vec<Sample>,
    ops: &[P],
    smooth: &[&[InputFill]],
    not_smooth: &[&[InputFill]],
    rounded: usize,
    class: &str,
) {
    const SHAPES: [&[usize]; 4] = [&[5, 3], &[7], &[], &[0, 3]];
    let mut add = |shape: &[usize], fills: &[InputFill], dtype: DType, smooth: bool| {
        let input = |&fill: &InputFill| Input { meta: Meta::new(dtype, shape), fill };
        let sample = Sample::new(ops[all.len() % ops.len().min(4)], fills.iter().map(input)).rounded(rounded);
        all.push(if smooth { sample } else { sample.not_smooth() });
    };
    let both =
        smooth.iter().map(|fills| (*fills, true)).chain(not_smooth.iter().map(|fills| (*fills, false)));
    for (i, (fills, smooth)) in both.enumerate() {
        let shapes = if i == 0 { &SHAPES[..] } else { &SHAPES[1..2] };
        shapes.iter().for_each(|shape| add(shape, fills, DType::F32, smooth));
    }
    if class == "numbers" {
        add(SHAPES[1], &[InputFill::Index(9); 3][..P::ARITY], DType::I64, false);
    }
}

//! The samples of a row of the table.

use crate::ops::pointwise::record::Pointwise;
use crate::ops::{Input, InputFill, Meta, Op, Sample};
use crate::tensor::DType;

/// Adds a row's samples: the first fill at four shapes, the others at one, and samples of integers and bools if the row
/// takes them. Several operators take turns.
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
        // Integers take whole constants.
        let metas = vec![Meta::new(dtype, shape); P::ARITY];
        let usable: Vec<P> = ops.iter().copied().filter(|op| op.infer(&metas).is_ok()).collect();
        let op = usable[all.len() % usable.len().min(4)];
        let sample = Sample::new(op, fills.iter().map(input)).rounded(rounded);
        all.push(if smooth { sample } else { sample.not_smooth() });
    };
    let both =
        smooth.iter().map(|fills| (*fills, true)).chain(not_smooth.iter().map(|fills| (*fills, false)));
    for (i, (fills, smooth)) in both.enumerate() {
        let shapes = if i == 0 { &SHAPES[..] } else { &SHAPES[1..2] };
        shapes.iter().for_each(|shape| add(shape, fills, DType::F32, smooth));
    }
    let whole = &[InputFill::Index(9); 3][..P::ARITY];
    match class {
        "numbers" if P::ARITY == 1 => add(SHAPES[1], &[InputFill::Ints], DType::I64, false),
        "numbers" | "rare_numbers" => add(SHAPES[1], whole, DType::I64, false),
        "integers" | "bits" => {
            add(SHAPES[0], &[InputFill::Ints, InputFill::Index(9)][..P::ARITY], DType::I64, false);
            add(SHAPES[1], &[InputFill::Ints; 2][..P::ARITY], DType::I32, false);
            add(SHAPES[3], whole, DType::U8, false);
        }
        _ => {}
    }
    if class == "bits" {
        add(SHAPES[0], &[InputFill::Bools; 2][..P::ARITY], DType::Bool, false);
    }
}

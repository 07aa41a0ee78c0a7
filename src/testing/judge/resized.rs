//! Samples at other sizes: none, one, fewer than ranks, a prime above their number.

use std::collections::BTreeSet;

use crate::ops::{Input, InputFill, Meta, Sample};
use crate::tensor::Shape;

const EXTENTS: [usize; 4] = [0, 1, 2, 7];

/// Returns the sample with all dims of one extent changed to another, if the operator takes the shapes.
pub(super) fn resized(sample: &Sample) -> Vec<Sample> {
    let extents: BTreeSet<usize> = sample.ins.iter().flat_map(|i| i.meta.shape.iter().copied()).collect();
    let mut found = Vec::new();
    for from in extents.into_iter().filter(|&n| n > 1) {
        for to in EXTENTS.into_iter().filter(|&n| n != from) {
            let input = |i: &Input| {
                let extents: Vec<usize> =
                    i.meta.shape.iter().map(|&n| if n == from { to } else { n }).collect();
                let fill = match i.fill {
                    InputFill::Index(below) if below == from && to > 0 => InputFill::Index(to),
                    fill => fill,
                };
                Input { meta: Meta::new(i.meta.dtype, Shape::from(extents)), fill }
            };
            let other = Sample { ins: sample.ins.iter().map(input).collect(), ..sample.clone() };
            // Tokens share no slot, which more tokens than slots would.
            let crowded = sample.op.name() == "permute_tokens" && to > from;
            if !crowded && other.op.infer(&other.metas()).is_ok() {
                found.push(other);
            }
        }
    }
    found
}

//! The parts of operands under a node of a reduction tree, and the stored form of several nodes.

use std::rc::Rc;

use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::error::Result;
use crate::ops::{AxisPlacement, Row, Tensors, Window, empty_box};
use crate::placement::{IndexBox, Region, TreeNode};
use crate::tensor::{DType, Device, Dims, Shape, Tensor};

/// Returns the box of a held window under `node`; `placement_of` tells which dim, if any, a row of `dims` shards.
pub(in crate::dtensor) fn window_under(
    held: &Window,
    node: &TreeNode,
    dims: &[Row],
    placement_of: impl Fn(&Row) -> AxisPlacement,
) -> Window {
    let (mut start, mut len): (Dims, Dims) = match held.region.boxes.first() {
        Some(block) => (block.start.clone(), block.len.clone()),
        None => (Dims::from_elem(0, held.global.len()), empty_box(&held.global, &held.region.local)),
    };
    for (j, row) in dims.iter().enumerate() {
        if let Some(d) = placement_of(row).dim() {
            (start[d], len[d]) = (node.start[j], node.len[j]);
        }
    }
    Window { global: held.global.clone(), region: Region::of_box(start, Shape::from(len)) }
}

/// Returns the elements of the box `part` of a rank's `local`, which holds `held`.
pub(in crate::dtensor) fn cut(local: &Tensor, held: &Region, part: &Region) -> Result<Tensor> {
    let Some(want) = part.boxes.first() else {
        return Tensor::zeros_on(local.device(), local.dtype(), part.local.clone());
    };
    let block = containing(held, want);
    if held.local[..] == block.len[..] {
        return (0..want.len.len())
            .try_fold(local.clone(), |t, d| t.narrow(d, want.start[d] - block.start[d], want.len[d]));
    }
    // In a ragged shard over several dims, a box is a run of rows.
    let at = place(block, want);
    let mut out = Tensor::uninit_on(local.device(), local.dtype(), part.local.clone())?;
    local.contiguous()?.copy_block(&mut out, &want.len, (at, &block.strides), (0, &part.local.strides()))?;
    Ok(out)
}

/// Stacks the nodes of the results that `sums` selects, as they are stored.
pub(in crate::dtensor) fn stack(
    results: &[Tensors],
    outs: &[Rc<TensorMeta>],
    device: Device,
    sums: impl Fn(usize) -> bool,
) -> Result<Tensors> {
    let one = |(o, f): (usize, &Rc<TensorMeta>)| {
        if !sums(o) {
            return Ok(Tensor::default());
        }
        let parts: Vec<Tensor> = results.iter().map(|r| r[o].clone()).collect();
        match &parts[..] {
            [only] => only.reshape(f.stored_shape().clone()),
            _ => Tensor::stack(&parts, f.local_shape(), f.spec().stored_dtype(), device),
        }
    };
    outs.iter().enumerate().map(one).collect()
}

/// Casts f16 and bf16 operands to f32, in which their kernels compute: a sum is rounded when it is complete.
pub(in crate::dtensor) fn widened(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.cast(DType::F32),
        _ => Ok(x.clone()),
    }
}

/// Returns the box of a region that contains `want`.
pub(in crate::dtensor) fn containing<'a>(held: &'a Region, want: &IndexBox) -> &'a IndexBox {
    let inside = |b: &&IndexBox| {
        (0..want.len.len())
            .all(|d| b.start[d] <= want.start[d] && want.start[d] + want.len[d] <= b.start[d] + b.len[d])
    };
    held.boxes.iter().find(inside).expect("one of the held boxes contains a node's box")
}

/// Returns the offset of a box in the local storage of the box around it.
pub(in crate::dtensor) fn place(outer: &IndexBox, want: &IndexBox) -> usize {
    let steps = (0..want.start.len()).map(|d| (want.start[d] - outer.start[d]) * outer.strides[d]);
    outer.offset + steps.sum::<usize>()
}

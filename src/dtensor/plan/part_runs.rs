//! Runs of a kernel for a grouped sum: one per part, rounded, and joined in the tree's order.

use std::rc::Rc;

use super::node_windows::{cut, stack, widened, window_under};
use super::row_product::{rounded_parts, tree_rows, whole_tree};
use crate::comm::Reduce;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::error::Result;
use crate::ops::{Meta, Op, Tensors, Windows, expect_shapes, run};
use crate::tensor::{DType, FoldOrder, FoldStep, ReduceOp, Shape, Tensor};

/// The runs of a kernel for the parts of a grouped sum that this rank computes.
pub(in crate::dtensor) struct PartRuns {
    /// The windows of each part.
    parts: Vec<Windows>,
    /// The order in which parts are joined to the nodes that this rank stores.
    order: FoldOrder,
    wire: DType,
}

impl PartRuns {
    /// Returns the runs, or `None` if the operator's result is no sum whose parts are rounded.
    pub fn find(
        mesh: &DeviceMesh,
        op: &dyn Op,
        metas: &[Meta],
        ins: &[Rc<TensorMeta>],
        outs: &[Rc<TensorMeta>],
    ) -> Option<PartRuns> {
        let groups = rounded_parts(mesh, op, metas).filter(|groups| !groups.is_kept())?;
        let out = &outs[0];
        let mesh = mesh.mesh();
        let tree = match &out.spec().tree {
            Some(tree) => (**tree).clone(),
            None => whole_tree(op, metas, 0, mesh.ndim())?.with_groups(groups),
        };
        if tree.extents.contains(&0) {
            return None;
        }
        let nodes = tree.finished_nodes(mesh, mesh.coords()).expect("the plan has checked that it fits");
        let parts: Vec<_> = nodes.iter().flat_map(|node| tree.parts_of(node)).collect();
        let dims = tree_rows(op, metas, 0);
        let windows = |part| Windows {
            ins: (0..ins.len()).map(|i| window_under(ins[i].window(), part, &dims, |r| r.ins[i])).collect(),
            outs: [out.window().clone()].into_iter().collect(),
            exact: true,
        };
        let order = tree.join_order(&parts, &nodes);
        Some(PartRuns { parts: parts.iter().map(windows).collect(), order, wire: groups.wire() })
    }

    /// Returns the result as this rank stores it.
    pub fn run(&self, op: &dyn Op, ins: &[Tensor], at: &Windows, outs: &[Rc<TensorMeta>]) -> Result<Tensors> {
        let wide: Tensors = ins.iter().map(widened).collect::<Result<_>>()?;
        let nodes = join(&self.order, outs[0].local_shape(), |nth| self.part(op, &wide, at, nth))?;
        let stored = outs[0].spec().stored_dtype();
        let nodes: Vec<Tensors> = nodes
            .into_iter()
            .map(|node| Ok([node.cast(stored)?].into_iter().collect()))
            .collect::<Result<_>>()?;
        stack(&nodes, outs, ins[0].device(), |_| true)
    }

    /// Computes one part, and rounds it.
    fn part(&self, op: &dyn Op, ins: &[Tensor], at: &Windows, nth: usize) -> Result<Tensor> {
        let windows = &self.parts[nth];
        let under = ins.iter().zip(&at.ins).zip(&windows.ins);
        let mut locals: Tensors =
            under.map(|((x, held), part)| cut(x, &held.region, &part.region)).collect::<Result<_>>()?;
        let mut found = run(op, &mut locals, windows)?;
        expect_shapes(op, windows, &found)?;
        found.swap_remove(0).cast(self.wire)?.contiguous()
    }
}

/// Joins parts to nodes; `part` returns a part, contiguous.
pub(in crate::dtensor) fn join(
    order: &FoldOrder,
    shape: &Shape,
    part: impl Fn(usize) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let both = Reduce::halving(ReduceOp::Sum, 2, shape.clone());
    let mut nodes: Vec<Tensor> = Vec::with_capacity(order.depth());
    for step in order.steps() {
        let next = match *step {
            FoldStep::Push { operand, .. } => part(operand)?,
            FoldStep::Join => {
                let (right, left) = (nodes.pop(), nodes.pop());
                both.fold(&[left, right].map(|node| node.expect("the order joins what it has pushed")))?
            }
            FoldStep::Empty => unreachable!("a grouped sum has a part"),
        };
        nodes.push(next);
    }
    Ok(nodes)
}

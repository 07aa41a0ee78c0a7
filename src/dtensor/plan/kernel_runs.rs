//! Runs of a kernel per node of a partial sum, or per box of operands that are ragged over several dims.
//!
//! Kernels do not know the reduction tree. If a rank finishes several nodes of the tree, its kernel runs on the part
//! of the operands under each node, and the sums are stacked. If a partial sum of several nodes passes through an
//! operator, the kernel runs on each node.

use std::rc::Rc;

use smallvec::SmallVec;

use super::node_windows::{containing, cut, place, stack, widened, window_under};
use super::part_runs::PartRuns;
use super::row_product::tree_rows;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::error::Result;
use crate::ops::{Meta, Op, RaggedBoxes, Tensors, Windows, expect_shapes, run};
use crate::placement::{Region, TreeNode};
use crate::tensor::{Tensor, short_list, with_places};

/// The runs of a kernel for one call of an operator.
pub(in crate::dtensor) enum KernelRuns {
    /// One run per node that this rank finishes.
    Make { runs: Vec<KernelRun>, made: SmallVec<[bool; 3]> },
    /// One run per node of the operands that are partial sums.
    Pass { parts: usize, passing: SmallVec<[bool; 3]> },
    /// One run per box of this rank's ragged operands.
    Boxes(RaggedBoxes),
    /// One run per part of a grouped sum.
    Grouped(PartRuns),
}

/// One run of a kernel.
pub(in crate::dtensor) struct KernelRun {
    /// The windows of operands and results.
    at: Windows,
    /// Set if one run computes many nodes of the only result: the operator that does.
    many: Option<Box<dyn Op>>,
}

impl KernelRuns {
    /// Returns the runs, or `None` if one run of the kernel suffices. `made` marks the results that are sums over
    /// dims that the call shards.
    pub fn find(
        op: &dyn Op,
        metas: &[Meta],
        ins: &[Rc<TensorMeta>],
        outs: &[Rc<TensorMeta>],
        made: &SmallVec<[bool; 3]>,
        exact: bool,
    ) -> Option<KernelRuns> {
        let Some(k) = made.iter().position(|&m| m) else {
            let passing: SmallVec<[bool; 3]> = short_list(ins.iter().map(|f| f.spec().tree.is_some()));
            let parts = ins.iter().find(|f| f.spec().tree.is_some())?.nodes_len();
            return (parts != 1).then_some(KernelRuns::Pass { parts, passing });
        };
        let spec = outs[k].spec();
        let tree = spec.tree.as_ref().expect("made results have a tree");
        let nodes =
            tree.finished_nodes(&spec.mesh, spec.mesh.coords()).expect("the plan has checked that it fits");
        let dims = tree_rows(op, metas, k);
        let boxes = |node: &TreeNode| Windows {
            ins: (0..ins.len()).map(|i| window_under(ins[i].window(), node, &dims, |r| r.ins[i])).collect(),
            outs: (0..outs.len())
                .map(|o| window_under(outs[o].window(), node, &dims, |r| r.outs[o]))
                .collect(),
            exact,
        };
        let runs: Vec<KernelRun> = match one_run_for(op, &nodes).filter(|_| outs.len() == 1) {
            Some((all, many)) => vec![KernelRun { at: boxes(&all), many: Some(many) }],
            None => nodes.iter().map(|node| KernelRun { at: boxes(node), many: None }).collect(),
        };
        let whole = |c: &KernelRun| {
            let mut windows = c.at.ins.iter().zip(ins).chain(c.at.outs.iter().zip(outs));
            windows.all(|(w, f)| w.region == f.window().region)
        };
        let rounds = (0..outs.len()).any(|o| made[o] && outs[o].spec().stored_dtype() != outs[o].dtype());
        let once = matches!(&runs[..], [only] if only.many.is_none() && whole(only)) && !rounds;
        (!once).then_some(KernelRuns::Make { runs, made: made.clone() })
    }

    /// Returns the results as this rank stores them.
    pub fn run(&self, op: &dyn Op, ins: &[Tensor], at: &Windows, outs: &[Rc<TensorMeta>]) -> Result<Tensors> {
        match self {
            KernelRuns::Make { runs, made } => make(op, runs, made, ins, at, outs),
            KernelRuns::Pass { parts, passing } => pass(op, *parts, passing, ins, at, outs),
            KernelRuns::Grouped(runs) => runs.run(op, ins, at, outs),
            KernelRuns::Boxes(boxes) => {
                let stored = outs.iter().map(|f| (f.dtype(), f.local_shape().clone()));
                boxes.run(ins, stored, |ins, at| {
                    let found = run(op, ins, at)?;
                    expect_shapes(op, at, &found)?;
                    Ok(found)
                })
            }
        }
    }
}

/// Returns one box and one operator for nodes that have the same range of one dim at consecutive indices of the outer
/// dims, if `op` has a variant that computes them all.
fn one_run_for(op: &dyn Op, nodes: &[TreeNode]) -> Option<(TreeNode, Box<dyn Op>)> {
    let [first, .., last] = nodes else { return None };
    let outer = first.len.iter().position(|&n| n > 1).unwrap_or(first.len.len().checked_sub(1)?);
    let mut all = first.clone();
    for d in 0..outer {
        all.len[d] = (last.start[d] + 1).checked_sub(first.start[d])?;
    }
    let alike = |n: &TreeNode| n.len == first.len && n.start[outer..] == first.start[outer..];
    // The nodes ascend: if they are as many as the outer indices of the box, they are exactly these.
    let full = all.len[..outer].iter().product::<usize>() == nodes.len();
    (full && nodes.iter().all(alike)).then(|| op.keep_leading(outer).map(|many| (all, many)))?
}

/// Runs the kernel once per node of the operands that are partial sums.
fn pass(
    op: &dyn Op,
    parts: usize,
    passing: &[bool],
    ins: &[Tensor],
    at: &Windows,
    outs: &[Rc<TensorMeta>],
) -> Result<Tensors> {
    let sums = |o: usize| outs[o].spec().tree.is_some();
    // Without a node, results that are no sums still have to be computed: from zeros.
    let runs = if (0..outs.len()).all(sums) { parts } else { parts.max(1) };
    let mut results: Vec<Tensors> = Vec::with_capacity(runs);
    for part in 0..runs {
        let pick = |(i, x): (usize, &Tensor)| match passing[i] {
            true if part < parts => x.select(0, part),
            true => Tensor::zeros_on(x.device(), x.dtype(), at.ins[i].local().clone()),
            false => Ok(x.clone()),
        };
        let mut locals: Tensors = ins.iter().enumerate().map(pick).collect::<Result<_>>()?;
        let found = run(op, &mut locals, at)?;
        expect_shapes(op, at, &found)?;
        results.push(found);
    }
    let mut all = stack(&results[..parts], outs, ins[0].device(), sums)?;
    for o in (0..outs.len()).filter(|&o| !sums(o)) {
        all[o] = std::mem::take(&mut results[0][o]);
    }
    Ok(all)
}

/// Runs the kernel once per node that this rank finishes.
fn make(
    op: &dyn Op,
    runs: &[KernelRun],
    made: &[bool],
    ins: &[Tensor],
    at: &Windows,
    outs: &[Rc<TensorMeta>],
) -> Result<Tensors> {
    // Places are offered for results: a widened weight is as long as its gradient.
    let (wide, _) = with_places(Vec::new(), || ins.iter().map(widened).collect::<Result<Tensors>>());
    let wide = wide?;
    let mut results: Vec<Tensors> = Vec::with_capacity(runs.len());
    let mut whole: SmallVec<[Option<Tensor>; 3]> = SmallVec::new();
    for (f, made) in outs.iter().zip(made) {
        let room = || Tensor::uninit_on(ins[0].device(), f.dtype(), f.local_shape());
        whole.push((!made).then(room).transpose()?);
    }
    for KernelRun { at: windows, many } in runs {
        let parts = wide.iter().zip(&at.ins).zip(&windows.ins);
        let mut locals: Tensors =
            parts.map(|((x, held), part)| cut(x, &held.region, &part.region)).collect::<Result<_>>()?;
        if let Some(many) = many {
            // One run has computed all nodes of the one result: nothing is left to stack.
            let nodes = run(&**many, &mut locals, windows)?.swap_remove(0);
            return Ok([nodes.reshape(outs[0].stored_shape().clone())?].into_iter().collect());
        }
        let mut found = run(op, &mut locals, windows)?;
        expect_shapes(op, windows, &found)?;
        for (o, whole) in whole.iter_mut().enumerate() {
            if let Some(whole) = whole {
                let part = found[o].cast(whole.dtype())?;
                paste(&part, &windows.outs[o].region, whole, &at.outs[o].region)?;
                found[o] = Tensor::default();
            }
        }
        results.push(found);
    }
    let mut outs = stack(&results, outs, ins[0].device(), |o| made[o])?;
    for (out, whole) in outs.iter_mut().zip(whole) {
        if let Some(whole) = whole {
            *out = whole;
        }
    }
    Ok(outs)
}

/// Writes the elements of `part` into `whole`, which holds `held`.
fn paste(part: &Tensor, from: &Region, whole: &mut Tensor, held: &Region) -> Result<()> {
    let Some(want) = from.boxes.first() else { return Ok(()) };
    let block = containing(held, want);
    part.copy_block(whole, &want.len, (0, part.strides()), (place(block, want), &block.strides))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::{DTensor, DeviceMesh};
    use crate::error::Error;
    use crate::ops::{AxisPlacement, MeshAxis, Metas, Row, Sum, Tensors, Vjp, Work};
    use crate::placement::{Layout, Leaf};

    /// For `x` `[a, b]`: the sum over `a`, and the number of rows, which is no sum. It claims that sums pass through,
    /// which holds for small integers.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct SumAndCount;

    impl Op for SumAndCount {
        fn name(&self) -> &'static str {
            "counted"
        }
        fn infer(&self, ins: &[Meta]) -> Result<Metas> {
            let count = Meta::new(ins[0].dtype, [1]);
            Ok([Meta::new(ins[0].dtype, [ins[0].shape[1]]), count].into_iter().collect())
        }
        fn rows(&self, _: &[Meta], _: MeshAxis) -> Vec<Row> {
            vec![
                Row::new(
                    [AxisPlacement::S(0)],
                    [AxisPlacement::TreeSum(Leaf::Pairs), AxisPlacement::TreeSum(Leaf::Pairs)],
                ),
                Row::new([AxisPlacement::SUM], [AxisPlacement::SUM, AxisPlacement::R]).exact(),
            ]
        }
        fn cuda(&self, _: &mut [Tensor], _: &Windows) -> Result<Tensors> {
            unreachable!("the test's tensors are on the CPU")
        }
        fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
            let sum =
                crate::tensor::cpu::reduce(self.name(), &ins[0], &[0], crate::tensor::ReduceOp::Sum, false)?;
            Ok([sum, Tensor::full(ins[0].dtype(), [1], ins[0].shape()[0] as f64)].into_iter().collect())
        }
        fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
            Work::reduction(ins, outs)
        }
        fn vjp(&self, _: &mut Vjp) -> Result<()> {
            Err(Error::unsupported(self.name(), "has no derivative", "", ""))
        }
    }

    #[test]
    fn sums_that_are_made_and_sums_that_pass() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 3), ("b", 2)])?;
            for rows in [12, 2, 0] {
                let n = rows * 5 * 2;
                let whole = Tensor::from_vec((0..n).map(|i| (i % 5) as f32).collect(), [rows, 5, 2])?;
                let first = Sum { dims: [0].into_iter().collect(), keep: false };
                // Passing along a, with two nodes or none; made along b; both at once.
                for layout in ["(S0, R)", "(R, S1)", "(S0, S1)"] {
                    let x = DTensor::distribute(&mesh, &whole, Layout::replicated(2))?;
                    let x = DTensor::apply_one(&first, &[&x.redistribute(layout)?])?;
                    let outs = DTensor::apply(&SumAndCount, &[&x])?;
                    let want = crate::tensor::cpu::reduce(
                        "sum",
                        &whole,
                        &[0, 1],
                        crate::tensor::ReduceOp::Sum,
                        false,
                    )?;
                    let at = format!("{rows} rows, {layout}");
                    assert_eq!(outs[0].full_tensor()?.to_f64_vec(), want.to_f64_vec(), "{at}");
                    assert_eq!(outs[1].full_tensor()?.to_f64_vec(), [5.0], "{at}");
                }
            }
            Ok(())
        };
        spmd(6, run).unwrap_or_else(|e| panic!("{e}"));
    }
}

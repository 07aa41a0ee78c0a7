//! Gradients whose parts ranks keep from one micro-batch to the next.
//!
//! If a program takes sums in groups, the parts of a leaf's gradient are the same on every mesh. So ranks may add those of
//! several micro-batches, part by part, and join and reduce them once: each sum is then the tree over the parts'
//! sums, with the bits of a single rank. A rank keeps as many tensors of the gradient's shape as it computes parts.

use std::rc::Rc;

use smallvec::SmallVec;

use super::gradient_sum::add_to;
use super::unit_gradients::{WantedGradient, reduce_by_unit};
use crate::comm::Phase;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::plan::call_plan::CallPlan;
use crate::dtensor::plan::grouped_calls::join;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::{CallDerivative, TapeNode, TapeOutput};
use crate::error::{Error, Result};
use crate::ops::{Add, Cast, MeshAxis, Meta, Op, Row, Windows, run};
use crate::placement::{Layout, Placement, ReductionTree, Spec, SumGroups};
use crate::tensor::{DType, Tensor};

/// The sums of the parts of one leaf's gradients: one for each use of the leaf, because meshes may cut them differently.
pub(in crate::dtensor) struct KeptParts {
    /// The parts that this rank has computed, stacked if there are several.
    sums: SmallVec<[DTensor; 1]>,
    /// The number of uses that the current pass has added.
    added: usize,
    leaf: WantedGradient,
}

impl KeptParts {
    pub fn new(leaf: &TapeNode) -> KeptParts {
        KeptParts { sums: SmallVec::new(), added: 0, leaf: WantedGradient::of(leaf) }
    }

    /// Counts the uses of the leaf from the first again.
    pub fn begin_pass(&mut self) {
        self.added = 0;
    }

    /// Adds the parts of the gradient of the pass's next use.
    ///
    /// # Errors
    /// Refuses a gradient that is summed over other extents than that of an earlier pass, or has another layout.
    pub fn add(&mut self, parts: DTensor) -> Result<()> {
        self.added += 1;
        let Some(sum) = self.sums.get_mut(self.added - 1) else {
            self.sums.push(parts);
            return Ok(());
        };
        // All ranks compare alike: the metadata is shared.
        if sum.meta != parts.meta {
            let of = |x: &DTensor| format!("{} over {:?}", x.spec(), tree_of(x).extents);
            return Err(Error::unsupported(
                "backward",
                "gradients that stay unreduced have the same parts and layout in each micro-batch",
                format!("sums {} and {}", of(sum), of(&parts)),
                "give all micro-batches one shape and layout, or reduce each by itself",
            ));
        }
        if sum.local.is_meta() {
            return Ok(());
        }
        let mut both = [std::mem::take(&mut sum.local), parts.local];
        let metas = both.each_ref().map(Meta::of);
        let at = Windows::whole(&metas, &metas[..1]);
        sum.local = run(&Add, &mut both, &at)?.swap_remove(0);
        Ok(())
    }

    /// Returns the mesh on which the parts are.
    pub fn mesh(&self) -> Option<&DeviceMesh> {
        self.sums.first().map(|sum| &sum.mesh)
    }

    /// Adds the sums of other passes.
    pub fn merge(&mut self, other: KeptParts) -> Result<()> {
        self.begin_pass();
        other.sums.into_iter().try_for_each(|sum| self.add(sum))
    }

    /// Joins the parts to nodes: a partial sum for each use, and the form in which the leaf wants it.
    pub fn joined(self, mesh: &DeviceMesh) -> Result<Vec<(DTensor, WantedGradient)>> {
        let _scope = self.leaf.path.enter_in(Phase::Backward);
        let dtype = self.leaf.meta.dtype();
        // The dtype decides what is rounded: f64 is not, so parts do not change to f64 or from it before they are added up.
        let while_summed = |sum: &DTensor| match (sum.dtype(), dtype) {
            (DType::F64, _) => DType::F64,
            (_, DType::F64) => DType::F32,
            _ => dtype,
        };
        let of = |sum: &DTensor| Ok((joined(mesh, sum, while_summed(sum))?, self.leaf.clone()));
        self.sums.iter().map(of).collect()
    }

    /// Joins the parts to nodes, reduces these to the layout that the leaf wants, and adds the gradients of all uses.
    pub fn finish(self, mesh: &DeviceMesh) -> Result<Option<DTensor>> {
        let grads = reduce_by_unit(mesh, self.joined(mesh)?)?;
        grads.into_iter().try_fold(None, |sum, grad| Ok(Some(add_to(sum, grad)?)))
    }
}

/// Joins the parts of a sum to the nodes that ranks store otherwise, or to the sum if no axis splits it.
pub(in crate::dtensor) fn joined(mesh: &DeviceMesh, parts: &DTensor, dtype: DType) -> Result<DTensor> {
    let kept = tree_of(parts);
    let groups = kept.groups.expect("the parts are kept").joined();
    let tree = ReductionTree { groups: Some(groups), ..kept.clone() };
    let coords = mesh.mesh().coords();
    let of = |tree: &ReductionTree| {
        tree.finished_nodes(mesh.mesh(), coords).expect("the plan has checked that it fits")
    };
    let (each, nodes) = (of(kept), of(&tree));
    let order = tree.join_order(&each, &nodes);
    let spec = parts.spec();
    let has_partial = spec.layout.has_partial();
    let rounds = groups.rounds(spec.dtype);
    let to = Spec { dtype, tree: has_partial.then(|| tree.into()), ..spec.clone() };
    let meta = mesh.intern(to)?;
    let stored = meta.spec().stored_dtype();
    if parts.local.is_meta() {
        let local = Tensor::without_elements(stored, meta.stored_shape().clone())?;
        return Ok(DTensor::wrap(mesh, local, meta, parts.lineage));
    }
    let part = |nth: usize| {
        let part = if each.len() == 1 { parts.local.clone() } else { parts.local.select(0, nth)? };
        if rounds { part.cast(groups.wire())?.contiguous() } else { part.contiguous() }
    };
    if kept.extents.contains(&0) && !has_partial {
        let zeros = DTensor::zeros(mesh, dtype, meta.shape(), meta.layout().clone())?;
        return Ok(DTensor { lineage: parts.lineage, ..zeros });
    }
    let nodes = join(&order, meta.local_shape(), part)?;
    let nodes = nodes.iter().map(|node| node.cast(stored)).collect::<Result<Vec<_>>>()?;
    let local = match &nodes[..] {
        [only] => only.clone(),
        _ => Tensor::stack(&nodes, meta.local_shape(), stored, parts.local.device())?,
    };
    Ok(DTensor::wrap(mesh, local, meta, parts.lineage))
}

/// Returns the operands that lead to leaves, as a bit set, and the groups of their gradients, if these are not those of
/// other sums. A pass that leaves gradients unreduced keeps their parts, and so does one after it that adds to `kept` parts.
pub(in crate::dtensor) fn leaf_operands(
    mesh: &DeviceMesh,
    inputs: &[Option<TapeOutput>],
    kept: impl Fn(&TapeNode) -> bool,
) -> Option<(u64, SumGroups)> {
    let groups = mesh.reduction().groups()?;
    let (mut bits, mut keeps) = (0, mesh.kept_groups().is_some());
    for (i, input) in inputs.iter().enumerate().take(64) {
        if let Some(leaf) = input.as_ref().and_then(leaf_of) {
            bits |= 1 << i;
            keeps |= kept(leaf);
        }
    }
    let own = groups.for_gradients();
    let own = if keeps && own.depth() > 0 { own.kept() } else { own };
    (bits != 0 && own != groups).then_some((bits, own))
}

/// Returns the leaf to which a gradient of this value leads, if parts stay parts on the way: through casts and
/// operators that only move elements.
pub(in crate::dtensor) fn leaf_of(output: &TapeOutput) -> Option<&Rc<TapeNode>> {
    let mut at = output;
    while at.node.call.is_some() {
        at = next_to_leaf(&at.node)?.1;
    }
    Some(&at.node)
}

/// Moves the parts of a gradient of this value to the leaf.
pub(in crate::dtensor) fn moved_to_leaf(output: &TapeOutput, mut parts: DTensor) -> Result<DTensor> {
    let mut at = output;
    while let Some((op, input)) = next_to_leaf(&at.node) {
        if !op.as_any().is::<Cast>() {
            let plan = CallPlan::find(&parts.mesh, op, &[&parts.meta])?;
            if plan.moves[0].is_some() {
                // Parts are not reduced on the way: the other axes give way.
                let whole = |p: &Placement| if p.is_partial() { p.clone() } else { Placement::Replicate };
                let layout = Layout::new(parts.layout().placements().iter().map(whole));
                parts = parts.redistribute(layout)?;
            }
            parts = DTensor::apply_one(op, &[&parts])?;
        }
        at = input;
    }
    Ok(parts)
}

/// Returns the only step of a node's derivative and the operand to which it leads, if it is a cast or passes partial sums
/// on by bits, as moves of elements do.
fn next_to_leaf(node: &TapeNode) -> Option<(&dyn Op, &TapeOutput)> {
    let call = node.call.as_ref()?;
    let ([Some(input)], CallDerivative::Program { program, .. }) = (&call.inputs[..], &call.derivative)
    else {
        return None;
    };
    let ([step], [out]) = (&program.steps[..], &node.outs[..]) else { return None };
    // The operator is asked once per program, which belongs to one plan.
    let moves = || {
        *program.passes_sums.get_or_init(|| {
            let rows = step.op.rows(&[out.meta()], MeshAxis::new(1));
            let passes_sums = |row: &Row| row.ins.iter().chain(&row.outs).all(|s| s.is_sum());
            rows.iter().any(|row| row.by_bits && passes_sums(row))
        })
    };
    let reads_it_alone = matches!(step.ins[..], [only] if only.0 as usize + 1 == program.reads.len());
    (reads_it_alone && (step.op.as_any().is::<Cast>() || moves())).then_some((&*step.op, input))
}

fn tree_of(x: &DTensor) -> &ReductionTree {
    x.spec().tree.as_ref().expect("the parts are kept")
}

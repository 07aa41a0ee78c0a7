//! Gradients whose parts ranks keep from one micro-batch to the next.
//!
//! If a program takes sums in groups, the parts of a leaf's gradient are the same on every mesh. So ranks may add those of
//! several micro-batches, part by part, and join and reduce them once: each sum is then the tree over the parts'
//! sums, with the bits of a single rank. A rank keeps as many tensors of the gradient's shape as it computes parts.

use std::rc::Rc;

use smallvec::SmallVec;

use super::gradient_sum::add_to;
use super::leaf_path::LeafPath;
use super::partial_queue::reduce_by_unit;
use crate::comm::Phase;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::plan::part_runs::join;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::TapeNode;
use crate::error::{Error, Result};
use crate::ops::{Add, Meta, Windows, run};
use crate::placement::{ReductionTree, Spec, SumGroups};
use crate::tensor::{DType, Tensor};

/// The sums of the parts of one leaf's gradients: one for each use of the leaf, because meshes may cut them differently.
pub(in crate::dtensor) struct KeptParts {
    /// The parts that this rank has computed, stacked if there are several.
    sums: SmallVec<[DTensor; 1]>,
    /// The number of uses that the current pass has added.
    added: usize,
    leaf: Rc<TapeNode>,
}

impl KeptParts {
    pub fn new(leaf: &Rc<TapeNode>) -> KeptParts {
        KeptParts { sums: SmallVec::new(), added: 0, leaf: leaf.clone() }
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

    /// Joins the parts to nodes: a partial sum for each use of the leaf.
    pub fn joined(self, mesh: &DeviceMesh) -> Result<Vec<(Rc<TapeNode>, DTensor)>> {
        let _scope = self.leaf.path.enter_in(Phase::Backward);
        let dtype = self.leaf.gradient_meta().dtype();
        // The dtype decides what is rounded: f64 is not, so parts do not change to f64 or from it before they are added up.
        let while_summed = |sum: &DTensor| match (sum.dtype(), dtype) {
            (DType::F64, _) => DType::F64,
            (_, DType::F64) => DType::F32,
            _ => dtype,
        };
        let of = |sum: &DTensor| Ok((self.leaf.clone(), joined(mesh, sum, while_summed(sum))?));
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
    paths: &[Option<LeafPath<'_>>],
    kept: impl Fn(&TapeNode) -> bool,
) -> Option<(u64, SumGroups)> {
    let groups = mesh.reduction().groups()?;
    let (mut bits, mut keeps) = (0, mesh.kept_groups().is_some());
    for (i, path) in paths.iter().enumerate().take(64) {
        if let Some(path) = path {
            bits |= 1 << i;
            keeps |= kept(path.leaf());
        }
    }
    let own = groups.for_gradients();
    let own = if keeps && own.depth() > 0 { own.kept() } else { own };
    (bits != 0 && own != groups).then_some((bits, own))
}

fn tree_of(x: &DTensor) -> &ReductionTree {
    x.spec().tree.as_ref().expect("the parts are kept")
}

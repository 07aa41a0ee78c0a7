//! Questions about the nodes behind a result: how many gradients each will get, and which lead to wanted tensors.

use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use crate::dtensor::tensor::tape::{TapeNode, TapeOutput};

/// Sets, on each node behind `roots`, the number of gradients that the pass with this number will add to it. Visits
/// every call once. Nodes with numbers below `first` are behind others that have been counted: their own operands are not
/// counted again.
pub(in crate::dtensor) fn count_gradients<'a>(
    roots: impl IntoIterator<Item = &'a TapeNode>,
    first: u64,
    pass: u64,
) {
    let mut nodes: SmallVec<[&TapeNode; 16]> = SmallVec::new();
    for root in roots {
        if root.id >= first && root.pending_grads.get().0 != pass {
            root.pending_grads.set((pass, 0));
            nodes.push(root);
        }
    }
    while let Some(node) = nodes.pop() {
        for TapeOutput { node, .. } in operands(node) {
            match node.pending_grads.get() {
                (last, count) if last == pass => node.pending_grads.set((pass, count + 1)),
                // Another pass has counted this node since, so this pass waits until it visits the node.
                _ if node.id < first => {}
                _ => {
                    node.pending_grads.set((pass, 1));
                    nodes.push(node);
                }
            }
        }
    }
}

/// Returns the nodes behind `roots`, and these, that have numbers from `first` on and are not `outside`, the oldest
/// first; and the results of other nodes that they read.
pub(in crate::dtensor) fn split_nodes<'a>(
    roots: impl IntoIterator<Item = &'a TapeOutput>,
    is_inside: impl Fn(&TapeNode) -> bool,
) -> (Vec<&'a TapeNode>, Vec<&'a TapeOutput>) {
    let (mut inside, mut outside) = (Vec::new(), Vec::new());
    let mut seen: FxHashSet<(u64, usize)> = FxHashSet::default();
    let mut outputs: Vec<&TapeOutput> = roots.into_iter().collect();
    while let Some(output) = outputs.pop() {
        let TapeOutput { node, out } = output;
        if !is_inside(node) {
            if seen.insert((node.id, *out)) {
                outside.push(output);
            }
        } else if seen.insert((node.id, usize::MAX)) {
            inside.push(&**node);
            outputs.extend(operands(node));
        }
    }
    sort_by_age(&mut inside);
    (inside, outside)
}

/// Sorts nodes, the oldest first.
fn sort_by_age(nodes: &mut [&TapeNode]) {
    nodes.sort_unstable_by_key(|node| node.id);
}

/// Returns the nodes behind `root` that are among `wanted`, or from which one of `wanted` is reached.
pub(in crate::dtensor) fn reaching(root: &TapeNode, wanted: &FxHashSet<u64>) -> FxHashSet<u64> {
    let first = wanted.iter().min().copied().unwrap_or(u64::MAX);
    let (mut nodes, mut seen) = (vec![root], FxHashSet::default());
    let mut next = 0;
    while let Some(&node) = nodes.get(next) {
        next += 1;
        for TapeOutput { node, .. } in operands(node) {
            // A call is younger than the nodes of its operands.
            if node.id >= first && seen.insert(node.id) {
                nodes.push(node);
            }
        }
    }
    sort_by_age(&mut nodes);
    let mut reaching = wanted.clone();
    extend_reaching(&nodes, &mut reaching);
    reaching
}

/// Adds those of `nodes`, the oldest first, from which one of `reaching` is reached.
pub(in crate::dtensor) fn extend_reaching(nodes: &[&TapeNode], reaching: &mut FxHashSet<u64>) {
    for node in nodes {
        if operands(node).any(|input| reaching.contains(&input.node.id)) {
            reaching.insert(node.id);
        }
    }
}

fn operands(node: &TapeNode) -> impl Iterator<Item = &TapeOutput> {
    node.call.iter().flat_map(|call| call.inputs.iter().flatten())
}

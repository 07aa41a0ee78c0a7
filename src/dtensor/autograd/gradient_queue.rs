//! The nodes that a backward pass has reached and not visited yet, with the gradients of their results.

use std::rc::Rc;

use smallvec::SmallVec;

use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::{TapeNode, TapeOutput};

/// The gradients of a node's results. A missing one is zero.
pub(in crate::dtensor) type ResultGradients = SmallVec<[Option<DTensor>; 1]>;

/// The nodes that wait for their visit. Few wait at a time, so a sorted list of their numbers is faster than a heap and a
/// table.
#[derive(Default)]
pub(in crate::dtensor) struct GradientQueue {
    /// The numbers of the nodes, ascending, and their indices in `nodes`.
    order: SmallVec<[(u64, usize); 8]>,
    nodes: SmallVec<[QueuedNode; 2]>,
}

/// A node in the queue.
pub(in crate::dtensor) struct QueuedNode {
    pub node: Rc<TapeNode>,
    pub grads: ResultGradients,
}

impl GradientQueue {
    /// Returns the sum of the gradients of a result that have arrived. Queues its node if it is not queued.
    pub fn sum_of(&mut self, output: &TapeOutput) -> &mut Option<DTensor> {
        let TapeOutput { node, out } = output;
        let index = match self.find(node.id) {
            Ok(at) => self.order[at].1,
            Err(at) => {
                let index = self.nodes.len();
                self.order.insert(at, (node.id, index));
                let mut grads = ResultGradients::new();
                grads.resize_with(node.outs.len(), || None);
                self.nodes.push(QueuedNode { node: node.clone(), grads });
                index
            }
        };
        &mut self.nodes[index].grads[*out]
    }

    /// Returns true if a node waits for its visit.
    pub fn holds(&self, node: &TapeNode) -> bool {
        self.find(node.id).is_ok()
    }

    /// Removes the youngest node.
    pub fn pop_youngest(&mut self) -> Option<QueuedNode> {
        let (_, index) = self.order.pop()?;
        Some(self.take(index))
    }

    /// Removes a node, if it is queued.
    pub fn remove(&mut self, node: &TapeNode) -> Option<QueuedNode> {
        let at = self.find(node.id).ok()?;
        let (_, index) = self.order.remove(at);
        Some(self.take(index))
    }

    /// Removes the node with this index, which has left the order.
    fn take(&mut self, index: usize) -> QueuedNode {
        let last = self.nodes.pop().expect("the order has indices of nodes");
        if index == self.nodes.len() {
            return last;
        }
        let at = self.find(last.node.id).expect("it is queued");
        self.order[at].1 = index;
        std::mem::replace(&mut self.nodes[index], last)
    }

    /// Returns the position of a node in the order, or the one at which it would be.
    fn find(&self, id: u64) -> Result<usize, usize> {
        self.order.binary_search_by_key(&id, |&(id, _)| id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_leave_by_number_or_youngest_first() {
        let nodes: Vec<Rc<TapeNode>> = (0..20).map(|_| TapeNode::new(SmallVec::new(), None)).collect();
        let mut queue = GradientQueue::default();
        for k in [7, 3, 19, 0, 12, 5, 18, 1, 9, 4, 15] {
            queue.order.insert(queue.find(nodes[k].id).unwrap_err(), (nodes[k].id, queue.nodes.len()));
            queue.nodes.push(QueuedNode { node: nodes[k].clone(), grads: ResultGradients::new() });
        }
        let number = |queued: Option<QueuedNode>| queued.map(|queued| queued.node.id - nodes[0].id);
        assert_eq!(number(queue.remove(&nodes[3])), Some(3));
        assert_eq!(number(queue.remove(&nodes[3])), None);
        assert_eq!(number(queue.remove(&nodes[19])), Some(19));
        let rest = std::iter::from_fn(|| number(queue.pop_youngest()));
        assert_eq!(rest.collect::<Vec<_>>(), [18, 15, 12, 9, 7, 5, 4, 1, 0]);
    }
}

//! The order in which partial results of several operands are folded into one.

use super::SplitRule;

/// One step of a [`FoldOrder`], which works on a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FoldStep {
    /// Pushes one of an operand's partial results.
    Push {
        /// The operand's index.
        operand: usize,
        /// The index of the partial result within the operand.
        node: usize,
    },
    /// Pushes an empty sum: zeros.
    Empty,
    /// Replaces the two topmost entries with their sum; the lower entry is the left operand.
    Join,
}

/// A list of steps that folds the partial results of all operands. The entries that remain on the stack, from the
/// bottom up, are the results.
///
/// ```
/// use isoshard::tensor::{FoldOrder, FoldStep};
///
/// /// Adds up one number per operand in this order.
/// fn fold(order: &FoldOrder, x: &[f64]) -> Vec<f64> {
///     let mut stack = Vec::new();
///     for step in order.steps() {
///         let entry = match step {
///             FoldStep::Push { operand, .. } => x[*operand],
///             FoldStep::Empty => 0.0,
///             FoldStep::Join => {
///                 let right = stack.pop().unwrap();
///                 stack.pop().unwrap() + right
///             }
///         };
///         stack.push(entry);
///     }
///     stack
/// }
/// let x = [1e16, 1.0, -1e16, 1.0];
/// assert_eq!(fold(&FoldOrder::halving(4), &x), [(1e16 + 1.0) + (-1e16 + 1.0)]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FoldOrder {
    nodes: Vec<usize>,
    steps: Vec<FoldStep>,
    outs: usize,
    depth: usize,
}

impl FoldOrder {
    /// Returns the order with these steps, if operand `m` has `nodes[m]` partial results.
    ///
    /// # Panics
    /// Panics if a step joins fewer than two entries, or pushes a partial result that no operand has.
    pub fn new(nodes: Vec<usize>, steps: Vec<FoldStep>) -> FoldOrder {
        let (mut outs, mut depth) = (0usize, 0);
        for step in &steps {
            match step {
                FoldStep::Push { operand, node } => {
                    assert!(*node < nodes[*operand], "part {node} of operand {operand}");
                    outs += 1;
                }
                FoldStep::Empty => outs += 1,
                FoldStep::Join => outs = outs.checked_sub(1).filter(|&n| n > 0).expect("two entries to join"),
            }
            depth = depth.max(outs);
        }
        FoldOrder { nodes, steps, outs, depth }
    }

    /// Returns the order for operands with one partial result each: it splits the range of operands by
    /// [`SplitRule::Halves`], as every sum does.
    pub fn halving(operands: usize) -> FoldOrder {
        fn steps(from: usize, to: usize, out: &mut Vec<FoldStep>) {
            if to - from == 1 {
                return out.push(FoldStep::Push { operand: from, node: 0 });
            }
            let mid = SplitRule::Halves.mid(from, to);
            steps(from, mid, out);
            steps(mid, to, out);
            out.push(FoldStep::Join);
        }
        let mut all = Vec::with_capacity(2 * operands);
        steps(0, operands, &mut all);
        FoldOrder::new(vec![1; operands], all)
    }

    /// Returns the number of partial results of each operand.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// Returns the steps.
    pub fn steps(&self) -> &[FoldStep] {
        &self.steps
    }

    /// Returns the number of results, the entries that remain on the stack.
    pub(crate) fn outs_len(&self) -> usize {
        self.outs
    }

    /// Returns the largest number of entries that are on the stack at once.
    pub fn depth(&self) -> usize {
        self.depth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halving_is_left_heavy_and_needs_a_short_stack() {
        let push = |operand| FoldStep::Push { operand, node: 0 };
        let three = FoldOrder::halving(3);
        assert_eq!(three.steps(), [push(0), push(1), FoldStep::Join, push(2), FoldStep::Join]);
        let many = FoldOrder::halving(64);
        assert_eq!((many.outs_len(), many.depth(), many.nodes().len()), (1, 7, 64));
        assert_eq!(FoldOrder::new(vec![0, 2], vec![FoldStep::Push { operand: 1, node: 1 }]).outs_len(), 1);
    }

    #[test]
    #[should_panic(expected = "two entries to join")]
    fn a_join_of_one_is_our_bug() {
        let _ = FoldOrder::new(vec![1], vec![FoldStep::Push { operand: 0, node: 0 }, FoldStep::Join]);
    }
}

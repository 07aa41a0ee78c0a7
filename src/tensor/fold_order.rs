//! The order in which the parts of several operands are folded into one.

use super::SplitRule;

/// One step of a fold, on a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FoldStep {
    /// Part `node` of operand `operand` comes on top.
    Push {
        /// The operand's index.
        operand: usize,
        /// Which of the operand's parts.
        node: usize,
    },
    /// An empty sum comes on top: zeros.
    Empty,
    /// The two topmost entries become one; the lower one is the left operand.
    Join,
}

/// Steps that fold the parts of all operands; what is left on the stack, from the bottom, is the result.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FoldOrder {
    nodes: Vec<usize>,
    steps: Vec<FoldStep>,
    outs: usize,
    depth: usize,
}

impl FoldOrder {
    /// The order of these steps, where operand m has `nodes[m]` parts.
    ///
    /// # Panics
    /// Where a step joins what is not there or names a part that nobody has.
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

    /// One part each, folded by splitting the range of operands as every sum is split, [`SplitRule::Halves`].
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

    /// The number of parts of each operand.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// The steps.
    pub fn steps(&self) -> &[FoldStep] {
        &self.steps
    }

    /// The number of entries that are left.
    pub fn outs_len(&self) -> usize {
        self.outs
    }

    /// The largest number of entries on the stack.
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

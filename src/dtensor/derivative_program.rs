//! Derivative programs as the tape keeps them.

use std::cell::OnceCell;
use std::ops::Deref;

use super::device_mesh::MeshCache;
use crate::ops::{VjpProgram, VjpValue};

/// A derivative program that knows when its values are read for the last time, and remembers how it ran last.
pub(super) struct DerivativeProgram {
    program: VjpProgram,
    /// Per step, a bit per operand, set if no later step reads the value and it is no gradient of the program. Operands
    /// from the 64th on have no bit.
    pub last_reads: Vec<u64>,
    /// True if the only step passes partial sums on by bits, once it has been asked for.
    pub passes_sums: OnceCell<bool>,
    /// The plans of the steps' last calls, which the file that runs programs keeps here.
    pub plans: MeshCache,
}

impl DerivativeProgram {
    pub fn new(program: VjpProgram) -> DerivativeProgram {
        let mut read_later = vec![false; program.values_len];
        program.grads.iter().flatten().for_each(|v| read_later[v.0 as usize] = true);
        let mut last_reads = vec![0; program.steps.len()];
        for (step, last) in program.steps.iter().zip(&mut last_reads).rev() {
            for (i, v) in step.ins.iter().enumerate().rev() {
                if !std::mem::replace(&mut read_later[v.0 as usize], true) && i < 64 {
                    *last |= 1 << i;
                }
            }
        }
        DerivativeProgram { program, last_reads, passes_sums: OnceCell::new(), plans: MeshCache::default() }
    }

    /// Returns true if value `v` is the gradient of an operand, unchanged.
    pub fn is_gradient(&self, v: usize) -> bool {
        self.program.grads.iter().flatten().any(|grad| grad.index() == v)
    }

    /// Returns true if value `v` is the gradient of one of the `operands`, a bit set, and nothing else.
    pub fn is_gradient_of(&self, v: usize, operands: u64) -> bool {
        let is = |grad: &Option<VjpValue>| grad.is_some_and(|grad| grad.0 as usize == v);
        let mut of = self.program.grads.iter().enumerate().filter(|(_, grad)| is(grad)).map(|(i, _)| i);
        let (Some(only), None) = (of.next(), of.next()) else { return false };
        let read = self.program.steps.iter().flat_map(|step| &step.ins).any(|r| r.0 as usize == v);
        only < 64 && operands >> only & 1 == 1 && !read
    }
}

impl Deref for DerivativeProgram {
    type Target = VjpProgram;

    fn deref(&self) -> &VjpProgram {
        &self.program
    }
}

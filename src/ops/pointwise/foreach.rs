//! Operators of the table that compute lists of operands in one launch: see [`Batched`].

use smallvec::smallvec;

use super::table::{Add, AddScalar, Addcdiv, Addcmul, Div, Lerp, Mul, MulScalar, Sub};
use crate::error::Result;
use crate::ops::{Batched, Op, Tensors, Windows};
use crate::tensor::{Tensor, cuda};

/// One of the calls of a batch, with the constants of its formula.
struct FormulaCall<'c> {
    op: &'c dyn Op,
    constants: [f64; 2],
    ins: &'c mut [Tensor],
}

/// Makes the calls whose operands are contiguous and have elements in one launch per 48 calls of one dtype and equal
/// constants, and the others one by one.
fn batch(calls: &mut [FormulaCall], at: &[&Windows], kernels: cuda::ListKernels) -> Result<Vec<Tensors>> {
    let mut outs: Vec<Option<Tensors>> = vec![None; calls.len()];
    let listed = |ins: &[Tensor]| ins[0].numel() > 0 && ins.iter().all(Tensor::is_contiguous);
    let mut start = 0;
    // Neighbours with equal constants go together.
    while start < calls.len() {
        let (op, constants) = (calls[start].op, calls[start].constants);
        let end = (start..calls.len()).find(|&k| !calls[k].op.key_eq(op)).unwrap_or(calls.len());
        let mut places = Vec::with_capacity(end - start);
        let mut some: Vec<&mut [Tensor]> = Vec::with_capacity(end - start);
        for (k, call) in calls.iter_mut().enumerate().take(end).skip(start) {
            if listed(call.ins) {
                places.push(k);
                some.push(call.ins);
            } else {
                outs[k] = Some(call.op.cuda(call.ins, at[k])?);
            }
        }
        if !some.is_empty() {
            let results = cuda::map_list(kernels, &mut some, constants)?;
            places.into_iter().zip(results).for_each(|(k, out)| outs[k] = Some(smallvec![out]));
        }
        start = end;
    }
    Ok(outs.into_iter().map(|out| out.expect("every call is made once")).collect())
}

macro_rules! batched {
    ($($Type:ident($op:pat) = $constants:expr;)*) => {
        $(
            /// Makes one launch for up to 48 calls.
            impl Batched for $Type {
                fn cuda_batch(calls: &mut [(&Self, &mut [Tensor])], at: &[&Windows]) -> Result<Vec<Tensors>> {
                    let constants = |$op: &Self| $constants;
                    let mut calls: Vec<FormulaCall> = calls
                        .iter_mut()
                        .map(|(op, ins)| FormulaCall { op: *op, constants: constants(op), ins })
                        .collect();
                    batch(&mut calls, at, Self::LIST)
                }
            }
        )*

        /// The CUDA sources of this file.
        pub(super) const SOURCES: &[cuda::KernelSource] = &[$($Type::LIST.source),*];
    };
}

batched! {
    Add(_) = [0.0; 2];
    Sub(_) = [0.0; 2];
    Mul(_) = [0.0; 2];
    Div(_) = [0.0; 2];
    AddScalar(op) = [op.by.0, 0.0];
    MulScalar(op) = [op.factor.0, 0.0];
    Lerp(_) = [0.0; 2];
    Addcmul(op) = [op.factor.0, 0.0];
    Addcdiv(op) = [op.factor.0, 0.0];
}

//! Operands of attention as slices and strides.

use isoshard_kernels::attention::{Attention, BroadcastRows, DocumentRows, Heads, ScoreInputs};

use crate::error::Result;
use crate::ops::attention::scores::{ScoreOperands, ScoreRule};
use crate::tensor::cpu::cast;
use crate::tensor::{DType, Element, Tensor};

/// The optional operands of the scores, with contiguous rows and in the dtype of the computation.
pub(super) struct ScoreTensors {
    bias: Option<Tensor>,
    mask: Option<Tensor>,
    documents: Option<[Tensor; 2]>,
}

impl ScoreTensors {
    pub(super) fn of(operands: &ScoreOperands<'_>, dtype: DType) -> Result<ScoreTensors> {
        Ok(ScoreTensors {
            bias: operands
                .bias
                .map(|bias| Ok::<_, crate::Error>(cast(bias, dtype)?.contiguous_rows()))
                .transpose()?,
            mask: operands.mask.map(Tensor::contiguous_rows),
            documents: operands.documents.map(|of| of.map(Tensor::packed)),
        })
    }

    /// Returns the rule and the operands that decide the scores.
    pub(super) fn inputs<T: Attention>(&self, rule: &ScoreRule) -> Result<ScoreInputs<'_, T>> {
        let bias = self.bias.as_ref().map(broadcast_rows).transpose()?;
        let mask = self.mask.as_ref().map(broadcast_rows).transpose()?;
        let documents = match &self.documents {
            Some([q, k]) => Some([document_rows(q)?, document_rows(k)?]),
            None => None,
        };
        Ok(ScoreInputs::new(rule.window(), rule.soft_cap.map(|cap| cap.0), bias, mask, documents))
    }
}

fn broadcast_rows<T: Element>(x: &Tensor) -> Result<BroadcastRows<'_, T>> {
    Ok(BroadcastRows::new(x.data()?, four(x.shape()), four(x.strides())))
}

fn document_rows(x: &Tensor) -> Result<DocumentRows<'_>> {
    Ok(DocumentRows::new(x.data()?, [x.shape()[0], x.shape()[1]]))
}

/// Returns a tensor `[batch, heads, length, d]` as matrices.
pub(super) fn heads<T: Attention>(x: &Tensor) -> Result<Heads<'_, T>> {
    Ok(Heads::new(x.data()?, four(x.shape()), four(x.strides())))
}

/// Returns the numbers of four dims.
pub(super) fn four(of: &[usize]) -> [usize; 4] {
    [of[0], of[1], of[2], of[3]]
}

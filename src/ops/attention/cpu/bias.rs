//! The gradient of the scores' bias: the gradients of the scores, summed over the dims along which the bias repeats.

use isoshard_kernels::attention::{Attention, BiasSum};

use super::operands::ScoreTensors;
use super::{CpuAttention, attention_pass};
use crate::error::Result;
use crate::ops::attention::scores::bias_sum;
use crate::tensor::cpu::cast;
use crate::tensor::{DType, Tensor};

impl CpuAttention<'_> {
    /// Returns the gradient of the bias from the forward pass's operands and results and the gradient `grad` of `o`. A
    /// bias that repeats along the keys shifts all scores of a query, so its gradient is 0.
    ///
    /// # Errors
    /// Returns the errors of [`CpuAttention::forward`]. Refuses a call without a bias.
    pub fn bias_backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        (o, lse): (&Tensor, &Tensor),
        grad: &Tensor,
    ) -> Result<Tensor> {
        self.expect_fit(q, k, v)?;
        let Some(bias) = self.operands.bias else {
            return Err(crate::Error::invalid(self.verb, "has no bias", q.notation(), ""));
        };
        let given = bias_sum([q, k], bias);
        match q.dtype() {
            DType::F32 => self.bias_backward_as::<f32>([q, k, v], (o, lse), grad, &given),
            DType::F64 => self.bias_backward_as::<f64>([q, k, v], (o, lse), grad, &given),
            half => {
                let [q, k, v, o, grad] = [q, k, v, o, grad].map(|x| cast(x, DType::F32));
                let (q, k, v, o, grad) = (q?, k?, v?, o?, grad?);
                cast(&self.bias_backward_as::<f32>([&q, &k, &v], (&o, lse), &grad, &given)?, half)
            }
        }
    }

    fn bias_backward_as<T: Attention>(
        &self,
        [q, k, v]: [&Tensor; 3],
        (o, lse): (&Tensor, &Tensor),
        grad: &Tensor,
        sum: &BiasSum,
    ) -> Result<Tensor> {
        let mut out = Tensor::zeros(T::DTYPE, sum.bias);
        if sum.bias[3] != sum.shape[3] || out.numel() == 0 {
            return Ok(out);
        }
        let (o, grad, lse) = (o.contiguous_rows(), grad.contiguous_rows(), lse.packed());
        let extra = ScoreTensors::of(&self.operands, T::DTYPE)?;
        let (kernel, pass) = (self.kernel::<T>(&extra)?, attention_pass([q, k, v], (&o, &lse), &grad)?);
        T::attention_bias_backward(&kernel, &pass, sum, out.make_mut::<T>()?);
        Ok(out)
    }
}

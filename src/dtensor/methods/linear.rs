//! The product of linear maps.

use crate::dtensor::DTensor;
use crate::error::{Error, Result};

/// Returns `x wᵀ` over the last dim of `x`, for any number of leading dims and for weights `[outputs, inputs]` and
/// `[groups, rows, inputs]`.
pub(crate) fn product_over_last(x: &DTensor, weight: &DTensor) -> Result<DTensor> {
    // The letters that the rows of the weight leave: `k` are the inputs, `n` and `g` the rows and groups.
    let (rows, letters) = match weight.shape().len() {
        3 => ("gn", "abcdefhijlmopqrstuvwxyz"),
        _ => ("n", "abcdefghijlmopqrstuvwxyz"),
    };
    let signature = match (x.shape().len(), rows) {
        (2, "n") => "t k, n k -> t n",
        (3, "n") => "b t k, n k -> b t n",
        (3, "gn") => "b t k, g n k -> b t g n",
        (dims, _) if (1..=letters.len() + 1).contains(&dims) => {
            let leading = &letters[..dims - 1];
            return x.einsum(&format!("{leading}k, {rows}k -> {leading}{rows}"), weight);
        }
        _ => {
            let rule = format!("wants 1 to {} dims", letters.len() + 1);
            return Err(Error::invalid("linear", rule, x.spec().to_string(), "reshape it first"));
        }
    };
    x.einsum(signature, weight)
}

//! The position of the largest element.

use crate::error::{Error, Result};
use crate::tensor::cpu::is_nan;
use crate::tensor::{Dims, Shape, Tensor, for_dtype};

/// The index along `dim` of the first largest element, NaN counting as largest and zeros as equal, as i64.
///
/// # Errors
/// Refuses a dim that is not there or is empty.
pub fn argmax(verb: &str, x: &Tensor, dim: usize, keep_dim: bool) -> Result<Tensor> {
    if x.shape().get(dim).is_none_or(|&n| n == 0) {
        return Err(Error::invalid(
            verb,
            "wants a dim with elements",
            format!("dim {dim} of {}", x.notation()),
            "",
        ));
    }
    let n = x.shape()[dim];
    let mut order: Dims = (0..x.shape().len()).filter(|&d| d != dim).collect();
    let mut shape: Shape = order.iter().map(|&d| x.shape()[d]).collect();
    order.push(dim);
    let rows = x.permute(&order)?.contiguous()?;
    if keep_dim {
        shape = x.shape().iter().enumerate().map(|(d, &n)| if d == dim { 1 } else { n }).collect();
    }
    for_dtype!(any x.dtype(), T => {
        let rows = rows.as_slice::<T>()?;
        Ok(Tensor::build(shape, |out: &mut [i64]| {
            for (row, out) in rows.chunks_exact(n).zip(out) {
                *out = first_largest(row) as i64;
            }
        }))
    })
}

fn first_largest<T: PartialOrd + Copy>(row: &[T]) -> usize {
    let mut best = 0;
    for (i, &x) in row.iter().enumerate() {
        if is_nan(row[best]) {
            return best;
        }
        if x > row[best] || is_nan(x) {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn argmax_is_the_first_and_nan_wins() {
        let x = Tensor::from_vec(vec![1.0f32, 3.0, 3.0, 0.0, f32::NAN, f32::NAN], [2, 3]).unwrap();
        assert_eq!(argmax("argmax", &x, 1, false).unwrap().to_vec::<i64>().unwrap(), [1, 1]);
        assert_eq!(argmax("argmax", &x, 0, true).unwrap().to_vec::<i64>().unwrap(), [0, 1, 1]);
        assert!(argmax("argmax", &Tensor::zeros(DType::F32, [0]), 0, false).is_err());
    }
}

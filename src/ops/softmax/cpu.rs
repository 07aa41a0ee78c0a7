//! CPU kernels of softmax over the last dim, of its logarithm, and of their derivatives.
//!
//! Each row is summed along the [reduction tree](crate::tensor::cpu::RowTree) of its length. f16 and bf16 compute in
//! f32 and round once. A row that has only -inf, or a NaN, gives NaN.

use isoshard_kernels::rows::Softmax;

use crate::error::Result;
use crate::tensor::Tensor;
use crate::tensor::cpu::over_rows_with;

/// Computes `e^x / sum(e^x)` along the last dim.
///
/// ```
/// use isoshard::{ops::cpu::softmax, tensor::Tensor};
/// let y = softmax("softmax", &Tensor::from_vec(vec![2.0, 2.0], [2])?)?;
/// assert_eq!(y.to_f64_vec(), [0.5, 0.5]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses integers and a tensor without dims. The error begins with `verb`.
pub fn softmax(verb: &str, x: &Tensor) -> Result<Tensor> {
    over_rows_with(verb, [x], &f32::softmax, &f64::softmax)
}

/// Computes `x - ln(sum(e^x))` along the last dim.
///
/// ```
/// use isoshard::{ops::cpu::log_softmax, tensor::Tensor};
/// let y = log_softmax("log_softmax", &Tensor::from_vec(vec![7.0], [1, 1])?)?;
/// assert_eq!(y.to_f64_vec(), [0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns the errors of [`softmax`].
pub fn log_softmax(verb: &str, x: &Tensor) -> Result<Tensor> {
    over_rows_with(verb, [x], &f32::log_softmax, &f64::log_softmax)
}

/// Computes the gradient of a softmax's input from the gradient `dy` of its output and the output `y`.
///
/// ```
/// use isoshard::{ops::cpu::softmax_backward, tensor::Tensor};
/// let (dy, y) = (Tensor::from_vec(vec![1.0, 0.0], [2])?, Tensor::from_vec(vec![0.5, 0.5], [2])?);
/// assert_eq!(softmax_backward("softmax_grad", &dy, &y)?.to_f64_vec(), [0.25, -0.25]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns the errors of [`softmax`]; refuses operands whose shapes or dtypes differ.
pub fn softmax_backward(verb: &str, dy: &Tensor, y: &Tensor) -> Result<Tensor> {
    over_rows_with(verb, [dy, y], &f32::softmax_backward, &f64::softmax_backward)
}

/// Computes the gradient of a log-softmax's input from the gradient `dy` of its output and the output `y`.
///
/// # Errors
/// Returns the errors of [`softmax_backward`].
pub(crate) fn log_softmax_backward(verb: &str, dy: &Tensor, y: &Tensor) -> Result<Tensor> {
    over_rows_with(verb, [dy, y], &f32::log_softmax_backward, &f64::log_softmax_backward)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use crate::tensor::cpu::{Isa, cast, with_isa};

    fn rows(m: usize, n: usize) -> Tensor {
        let value = |i: usize| ((i * 7919 + 13) % 1009) as f64 * 0.01 - 5.0;
        Tensor::from_vec((0..m * n).map(value).collect::<Vec<f64>>(), [m, n]).unwrap()
    }

    fn by_definition(x: &[f64]) -> Vec<f64> {
        let sum: f64 = x.iter().map(|x| x.exp()).sum();
        x.iter().map(|x| x.exp() / sum).collect()
    }

    #[test]
    fn against_the_definition_on_every_instruction_set() {
        for (m, n) in [(1, 1), (3, 2), (2, 33), (5, 100), (2, 1024), (3, 0), (0, 4)] {
            let x = rows(m, n);
            let y = softmax("softmax", &x).unwrap();
            let log = log_softmax("log_softmax", &x).unwrap();
            for r in 0..m {
                let row = |t: &Tensor| t.narrow(0, r, 1).unwrap().to_f64_vec();
                for ((got, log), want) in row(&y).iter().zip(row(&log)).zip(by_definition(&row(&x))) {
                    assert!((got - want).abs() < 1e-14 && (log - want.ln()).abs() < 1e-12, "{m} {n}");
                }
            }
            let narrow = cast(&x, DType::F32).unwrap();
            let bits = |isa| {
                with_isa(isa, || {
                    let y = softmax("softmax", &narrow).unwrap();
                    let dx = softmax_backward("softmax", &narrow, &y).unwrap();
                    let log = log_softmax("log_softmax", &narrow).unwrap();
                    [y, dx, log].map(|t| t.as_bytes().unwrap().to_vec())
                })
            };
            assert!(Isa::available().iter().all(|&isa| bits(isa) == bits(Isa::Baseline)), "{m} {n}");
        }
    }

    #[test]
    fn derivatives_by_differences() {
        let (x, dy) = (rows(2, 7), rows(3, 7).narrow(0, 1, 2).unwrap());
        type ForwardAndBackward =
            (fn(&str, &Tensor) -> Result<Tensor>, fn(&str, &Tensor, &Tensor) -> Result<Tensor>);
        let passes: [ForwardAndBackward; 2] =
            [(softmax, softmax_backward), (log_softmax, log_softmax_backward)];
        for (forward, backward) in passes {
            let loss = |x: &Tensor| -> f64 {
                let y = forward("f", x).unwrap().to_f64_vec();
                y.iter().zip(dy.to_f64_vec()).map(|(y, dy)| y * dy).sum()
            };
            let dx = backward("f", &dy, &forward("f", &x).unwrap()).unwrap().to_f64_vec();
            for (i, dx) in dx.iter().enumerate() {
                let nudge = |by: f64| {
                    let mut x = x.to_owned_copy().unwrap();
                    x.make_mut::<f64>().unwrap()[i] += by;
                    loss(&x)
                };
                let want = (nudge(1e-5) - nudge(-1e-5)) / 2e-5;
                assert!((dx - want).abs() < 1e-8, "{i}: {dx} {want}");
            }
        }
    }

    #[test]
    fn extremes_halves_and_refusals() {
        let x = Tensor::from_vec(vec![1e30f32, -1e30, f32::NEG_INFINITY, 0.0], [2, 2]).unwrap();
        assert_eq!(softmax("softmax", &x).unwrap().to_vec::<f32>().unwrap(), [1.0, 0.0, 0.0, 1.0]);
        let half = cast(&rows(2, 5), DType::BF16).unwrap();
        let want = cast(&softmax("s", &cast(&half, DType::F32).unwrap()).unwrap(), DType::BF16).unwrap();
        assert_eq!(softmax("s", &half).unwrap().to_f64_vec(), want.to_f64_vec());
        assert!(softmax("softmax", &Tensor::scalar(1.0f32)).is_err());
        assert!(softmax("softmax", &Tensor::zeros(DType::I32, [2])).is_err());
    }
}

//! Derivatives compared with their definition.

use std::sync::Arc;

use super::expected_panics::quiet_panics_here;
use super::values::{magnitude, ordinary, small_ints, tensor};
use crate::comm::spmd;
use crate::dtensor::{DTensor, DeviceMesh};
use crate::error::{Error, Result};
use crate::placement::Layout;
use crate::tensor::{DType, Tensor};

/// The step of the differences. The central difference then has an error of `h² f'''/6`, about `1e-11 f'''`, and one
/// from rounding two sums, about `2^-52 |f| / h = 3e-11 |f|`.
const STEP: f64 = 1.0 / 131_072.0;
/// The number of elements per input along which the derivative is compared, and of random directions beside them.
const ELEMENTS: usize = 24;
const DIRECTIONS: u64 = 2;

/// Asserts that the gradients of a function are its derivatives: central differences in f64 on one rank.
///
/// `f` computes a tensor of any shape from inputs of these values; the function compared is a fixed weighted sum of its
/// elements. It is compared along single elements (all of a small input, at least 24 of a larger one) and along two
/// random directions. A difference may be `1e-6` times the largest of 1, the input, the derivative and the sum of the
/// weighted elements' absolute values, so third derivatives must stay below about `1e4`.
///
/// ```
/// use isoshard::tensor::Tensor;
/// let x = Tensor::from_vec(vec![0.5f64, -1.0, 2.0], [3])?;
/// isoshard::testing::gradients(&[x], |x| x[0].tanh()?.mul(&x[0]));
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Panics
/// Panics with the first derivatives that are wrong. Panics if an input is not f64, or if `f` fails.
#[track_caller]
pub fn gradients(inputs: &[Tensor], f: impl Fn(&[DTensor]) -> Result<DTensor> + Send + Sync + 'static) {
    let wrong = wrong_gradients(inputs, f).unwrap_or_else(|e| panic!("{e}"));
    assert!(wrong.is_empty(), "{} wrong derivatives:\n{}", wrong.len(), wrong.join("\n"));
}

/// Returns the first wrong derivative by each input, a line each, as [`gradients`] finds them.
///
/// ```
/// use isoshard::{tensor::Tensor, testing::wrong_gradients};
/// let x = Tensor::from_vec(vec![3.0f64], [1])?;
/// // A detached factor is a constant to the gradient, and not to the function.
/// let wrong = wrong_gradients(&[x], |x| x[0].mul(&x[0].detach()))?;
/// assert!(wrong[0].starts_with("the derivative by input 0 along element 0 is"), "{wrong:?}");
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses inputs that are not f64, and returns the error of `f`.
pub fn wrong_gradients(
    inputs: &[Tensor],
    f: impl Fn(&[DTensor]) -> Result<DTensor> + Send + Sync + 'static,
) -> Result<Vec<String>> {
    if let Some(x) = inputs.iter().find(|x| x.dtype() != DType::F64) {
        return Err(Error::invalid("gradients", "inputs are f64", x.notation(), "cast them"));
    }
    let (inputs, f) = (inputs.to_vec(), Arc::new(f));
    let found = spmd(1, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[])?;
        quiet_panics_here();
        compare(&mesh, &inputs, &*f)
    });
    Ok(found?.swap_remove(0))
}

/// A direction: an input, and the change of each of its elements.
struct Direction {
    input: usize,
    name: String,
    change: Vec<f64>,
}

fn compare(
    mesh: &DeviceMesh,
    inputs: &[Tensor],
    f: &dyn Fn(&[DTensor]) -> Result<DTensor>,
) -> Result<Vec<String>> {
    let whole = |x: &Tensor| DTensor::distribute(mesh, x, Layout::replicated(0));
    let leaves = inputs.iter().map(|x| whole(x)?.requires_grad()).collect::<Result<Vec<_>>>()?;
    let mut result = f(&leaves)?;
    // No weight is 0, so that every element of the result counts.
    let ints = small_ints(DType::F64, result.shape(), 9).to_f64_vec();
    let ints: Vec<f64> = ints.into_iter().map(|w| if w < 0.0 { w } else { w + 1.0 }).collect();
    let weights = tensor(DType::F64, &ints, result.shape());
    let gradients = match result.has_history() {
        true => Some(result.backward_from(whole(&weights)?)?),
        false => None,
    };
    let (weights, mut wrong) = (weights.to_f64_vec(), Vec::new());
    for direction in directions(inputs) {
        let x = &inputs[direction.input];
        // A result that does not depend on an input has no gradient of it.
        let gradient = gradients.as_ref().and_then(|all| all.get(&leaves[direction.input]));
        let gradient = gradient.map_or_else(|| vec![0.0; x.numel()], |g| g.local().to_f64_vec());
        let got: f64 = gradient.iter().zip(&direction.change).map(|(g, c)| g * c).sum();
        let weighted = |h: f64| -> Result<(f64, f64)> {
            let moved: Vec<f64> =
                x.to_f64_vec().iter().zip(&direction.change).map(|(x, c)| x + h * c).collect();
            let leaf = |x: &Tensor| whole(x)?.requires_grad(); // a function may differentiate
            let mut inputs = inputs.iter().map(leaf).collect::<Result<Vec<_>>>()?;
            inputs[direction.input] = leaf(&tensor(DType::F64, &moved, x.shape()))?;
            let terms: Vec<f64> =
                f(&inputs)?.full_tensor()?.to_f64_vec().iter().zip(&weights).map(|(y, w)| y * w).collect();
            Ok((terms.iter().sum(), terms.iter().map(|t| t.abs()).sum()))
        };
        let ((up, scale), (down, _)) = (weighted(STEP)?, weighted(-STEP)?);
        let want = (up - down) / (2.0 * STEP);
        let bound = 1e-6 * magnitude(x).max(want.abs()).max(scale);
        let repeated = wrong.last().is_some_and(|(input, _)| *input == direction.input);
        if !repeated && ((got - want).is_nan() || (got - want).abs() > bound) {
            let Direction { input, name, .. } = direction;
            wrong.push((
                input,
                format!("the derivative by input {input} along {name} is {got} instead of {want}"),
            ));
        }
    }
    Ok(wrong.into_iter().map(|(_, line)| line).collect())
}

fn directions(inputs: &[Tensor]) -> impl Iterator<Item = Direction> {
    inputs.iter().enumerate().flat_map(|(input, x)| {
        let (n, shape) = (x.numel(), x.shape().clone());
        let elements = (0..n).step_by((n / ELEMENTS).max(1)).map(move |e| {
            let mut change = vec![0.0; n];
            change[e] = 1.0;
            Direction { input, name: format!("element {e}"), change }
        });
        let random = (0..DIRECTIONS).map(move |k| {
            let change = ordinary(DType::F64, &shape, 100 + k).to_f64_vec();
            let largest = change.iter().fold(1e-300, |m: f64, c| m.max(c.abs()));
            let change = change.iter().map(|c| c / largest).collect();
            Direction { input, name: format!("random direction {k}"), change }
        });
        elements.chain(random)
    })
}

//! Linear maps: a product with a bias and a function of each element.

use isoshard_kernels::{Loops, MatRef, Product};

use super::super::{as_elements_mut, compute};
use crate::error::{Error, Result};
use crate::tensor::{Tensor, for_dtype};

/// Returns `y = f(z)` and `z = x wᵀ + bias` for `x` `[m, k]`, `w` `[n, k]` and a `bias` `[n]`, with any strides. Without
/// `f` the first result is `z`, and there is no second.
///
/// The product follows the reduction tree, as that of [`gemm`](super::gemm). f16 and bf16 compute in f32, and each
/// result is rounded once: `y` is the function of the sum before it is rounded to `z`.
///
/// ```
/// use isoshard::tensor::cpu::{self, Constants, Function, Loops, Real};
/// use isoshard::tensor::Tensor;
///
/// struct Square;
/// impl Function<1> for Square {
///     #[inline(always)]
///     fn at<A: Real>(_: Constants, [x]: [A; 1]) -> A {
///         x * x
///     }
/// }
/// const SQUARE: Loops = Loops::floats::<Square, 1>();
/// let (x, w) = (Tensor::from_vec(vec![1.0f32, 2.0], [1, 2])?, Tensor::from_vec(vec![3.0f32, 4.0], [1, 2])?);
/// let bias = Tensor::from_vec(vec![-1.0f32], [1])?;
/// let (y, z) = cpu::linear("linear", &x, &w, Some(&bias), Some(&SQUARE))?;
/// assert_eq!((y.item()?, z.expect("there is a function").item()?), (100.0, 10.0));
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns an error that names `verb` if the shapes do not fit, if the dtypes differ, are integers, or are not those of
/// `f`.
pub fn linear(
    verb: &str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    f: Option<&Loops>,
) -> Result<(Tensor, Option<Tensor>)> {
    let fits = match (&x.shape()[..], &weight.shape()[..]) {
        ([_, k], [n, wk]) => k == wk && bias.is_none_or(|bias| bias.shape()[..] == [*n]),
        _ => false,
    };
    let given = || {
        let bias = bias.map(|x| format!(", bias {}", x.notation())).unwrap_or_default();
        format!("{}, {}{bias}", x.notation(), weight.notation())
    };
    if !fits || [Some(weight), bias].into_iter().flatten().any(|t| t.dtype() != x.dtype()) {
        let rule = "wants [m, k], [n, k] and a bias [n] of one dtype";
        return Err(Error::invalid(verb, rule, given(), "reshape or cast them first"));
    }
    if !x.dtype().is_float() || f.is_some_and(|f| f.floats.is_none()) {
        return Err(Error::unsupported(verb, "wants floats, and a function of floats", given(), ""));
    }
    let bias = bias.map(Tensor::packed);
    let bias = bias.as_ref();
    for_dtype!(float verb, x.dtype(), E => linear_as::<E>(verb, x, weight, bias, f))
}

/// [`linear`] for element type `E`, with checked shapes.
fn linear_as<E: Product>(
    verb: &str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    f: Option<&Loops>,
) -> Result<(Tensor, Option<Tensor>)> {
    let (m, k, n) = (x.shape()[0], x.shape()[1], weight.shape()[0]);
    let (rows, cols) = (x.strides(), weight.strides());
    let a = MatRef::new(x.data::<E>()?, (m, k), (rows[0], rows[1])).expect("a tensor's matrix");
    let b = MatRef::new(weight.data::<E>()?, (k, n), (cols[1], cols[0])).expect("a tensor's matrix");
    let bias = bias.map(Tensor::as_slice::<E>).transpose()?;
    let mut y = Tensor::uninit(E::DTYPE, [m, n]);
    let result = as_elements_mut::<E>(y.bytes_mut());
    match f.and_then(|f| f.floats.map(|loops| (f, loops))) {
        Some((_, loops)) if E::DTYPE.is_half() => {
            let mut z = Tensor::uninit(E::DTYPE, [m, n]);
            E::linear(a, b, bias, result, Some((loops.half, as_elements_mut::<E>(z.bytes_mut()))));
            Ok((y, Some(z)))
        }
        Some((f, _)) => {
            E::linear(a, b, bias, result, None);
            Ok((compute(verb, f, [0.0; 2], &mut [y.clone()])?, Some(y)))
        }
        None => {
            E::linear(a, b, bias, result, None);
            Ok((y, None))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tensors::tests::noise;
    use super::*;
    use crate::tensor::DType;
    use crate::tensor::cpu::{Constants, Function, Isa, Real, cast, compute, gemm, with_isa, with_threads};

    struct AddTwo;
    impl Function<2> for AddTwo {
        #[inline(always)]
        fn at<A: Real>(_: Constants, [x, y]: [A; 2]) -> A {
            x + y
        }
    }

    struct Swish;
    impl Function<1> for Swish {
        #[inline(always)]
        fn at<A: Real>(_: Constants, [x]: [A; 1]) -> A {
            x * x.sigmoid()
        }
    }

    const SWISH: Loops = Loops::floats::<Swish, 1>();

    /// Halves are compared with f32 operators whose results are rounded once.
    #[test]
    fn steps_have_the_bits_of_separate_ones_before_rounding() {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
            for (m, k, n) in [
                (1, 40, 130),
                (70, 33, 65),
                (40, 7, 1),
                (3, 0, 5),
                (9, 300, 400),
                (10, 1100, 17),
                (2, 64, 9),
                (0, 3, 2),
            ] {
                let of = |x: Tensor| cast(&x, dtype).unwrap();
                let widened = |x: &Tensor| cast(x, wide).unwrap();
                let (x, w, bias) = (of(noise([m, k], 1)), of(noise([n, k], 2)), of(noise([n], 3)));
                let batch = |x: &Tensor| widened(x).unsqueeze(0).unwrap();
                let product = gemm("matmul", &batch(&x), &batch(&w).transpose(1, 2).unwrap(), &[k]).unwrap();
                let product = product.squeeze(0).unwrap();
                let swish = |x: &Tensor| compute("swish", &SWISH, [0.0; 2], &mut [x.clone()]).unwrap();
                let mut terms = [product.clone(), widened(&bias).expand([m, n]).unwrap()];
                let sum = compute("add", &Loops::floats::<AddTwo, 2>(), [0.0; 2], &mut terms).unwrap();
                let transposed =
                    |x: &Tensor| x.transpose(0, 1).unwrap().contiguous().unwrap().transpose(0, 1).unwrap();
                for &isa in Isa::available() {
                    for (x, w) in [(x.clone(), w.clone()), (transposed(&x), transposed(&w))] {
                        let run = |bias, f| {
                            let on = |threads| {
                                with_threads(threads, || linear("linear", &x, &w, bias, f).unwrap())
                            };
                            let [one, three] = with_isa(isa, || [on(1), on(3)]);
                            let bytes = |(y, z): &(Tensor, Option<Tensor>)| {
                                [Some(y), z.as_ref()].map(|t| {
                                    t.map(|t| t.to_f64_vec().iter().map(|x| x.to_bits()).collect::<Vec<_>>())
                                })
                            };
                            assert_eq!(bytes(&one), bytes(&three), "{dtype} {isa:?} {m} {k} {n} on threads");
                            one
                        };
                        let same = |got: &Tensor, want: &Tensor| {
                            let want = of(want.clone());
                            assert_eq!(got.shape(), want.shape());
                            assert_eq!(
                                got.as_bytes().unwrap(),
                                want.as_bytes().unwrap(),
                                "{dtype} {isa:?} {m} {k} {n}"
                            );
                        };
                        let (y, z) = run(Some(&bias), Some(&SWISH));
                        same(&y, &swish(&sum));
                        same(&z.unwrap(), &sum);
                        let (y, z) = run(None, Some(&SWISH));
                        same(&y, &swish(&product));
                        same(&z.unwrap(), &product);
                        let (y, z) = run(Some(&bias), None);
                        same(&y, &sum);
                        assert!(z.is_none());
                    }
                }
            }
        }
    }

    #[test]
    fn operands_that_do_not_fit_are_refused() {
        let (x, w) = (noise([2, 3], 1), noise([4, 3], 2));
        let refused = |x: &Tensor, w: &Tensor, bias: &Tensor| {
            linear("linear", x, w, Some(bias), Some(&SWISH)).unwrap_err().to_string()
        };
        assert_eq!(
            refused(&x, &w, &noise([3], 0)),
            "linear: wants [m, k], [n, k] and a bias [n] of one dtype; got f32[2, 3], f32[4, 3], bias f32[3]; \
             reshape or cast them first"
        );
        assert!(refused(&x, &w, &cast(&noise([4], 0), DType::F64).unwrap()).contains("of one dtype"));
        assert!(refused(&x, &noise([4, 2], 0), &noise([4], 0)).contains("of one dtype"));
        let whole = |shape: &[usize]| Tensor::zeros(DType::I64, shape);
        let refused = refused(&whole(&[2, 3]), &whole(&[4, 3]), &whole(&[4]));
        assert!(refused.starts_with("linear: wants floats, and a function of floats"), "{refused}");
    }
}

//! Products of tensors.

use isoshard_kernels::gemm::contraction_len;
use isoshard_kernels::{Product, Stack};

use super::super::as_elements_mut;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, for_dtype};

/// Returns `a @ b` for `a` of shape `[batch, m, k]` and `b` of shape `[batch, k, n]`, with any strides. The result is
/// contiguous.
///
/// `tree` has the extents of the summed dims, outermost first, whose product is `k`: `&[k]` for one dim. They alone
/// determine the order of summation. If `b` is repeated along the batch (stride 0, or a batch of 1) and the batch of
/// `a` can be merged with its rows, one product is computed. f16 and bf16 are multiplied in f32 and rounded once. If
/// `k` is 0 the result is zeros.
///
/// ```
/// use isoshard::tensor::{Tensor, cpu};
/// let a = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [1, 2, 2])?;
/// let b = Tensor::from_vec(vec![1.0f32, 1.0, 0.0, 1.0], [1, 2, 2])?;
/// assert_eq!(cpu::gemm("matmul", &a, &b, &[2])?.to_vec::<f32>()?, [1.0, 3.0, 3.0, 7.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns an error that names `verb` if an operand does not have three dims, if the shapes do not fit, if the dtypes
/// differ or are integers, or if the product of `tree` is not `k`.
pub fn gemm(verb: &str, a: &Tensor, b: &Tensor, tree: &[usize]) -> Result<Tensor> {
    let fits = match (&a.shape()[..], &b.shape()[..]) {
        ([ab, _, ak], [bb, bk, _]) => (ab, ak) == (bb, bk) && contraction_len(tree) == Some(*ak),
        _ => false,
    };
    if !fits || a.dtype() != b.dtype() {
        return Err(Error::invalid(
            verb,
            "wants [batch, m, k] and [batch, k, n] of one dtype, and extents whose product is k",
            format!("{}, {}, extents {tree:?}", a.notation(), b.notation()),
            "reshape, expand or cast them first",
        ));
    }
    if !a.dtype().is_float() {
        let given = a.notation();
        return Err(Error::unsupported(verb, "integer products are not built", given, "cast to f64 first"));
    }
    for_dtype!(float verb, a.dtype(), E => gemm_as::<E>(a, b, tree))
}

/// [`gemm`] for element type `E`, with checked shapes.
fn gemm_as<E: Product>(a: &Tensor, b: &Tensor, tree: &[usize]) -> Result<Tensor> {
    let (batch, m, k, n) = (a.shape()[0], a.shape()[1], a.shape()[2], b.shape()[2]);
    let mut out = Tensor::uninit(E::DTYPE, [batch, m, n]);
    let c = as_elements_mut::<E>(out.bytes_mut());
    E::products([batch, m, k, n], stack(a)?, stack(b)?, tree, c);
    Ok(out)
}

fn stack<E: Product>(x: &Tensor) -> Result<Stack<'_, E>> {
    let strides = x.strides();
    Ok(Stack { data: x.data()?, strides: [strides[0], strides[1], strides[2]] })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::tensor::cpu::cast;
    use crate::tensor::{DType, Shape};

    /// Returns a tensor of numbers from -5 to 5.
    pub(in super::super) fn noise(shape: impl Into<Shape>, seed: usize) -> Tensor {
        let shape = shape.into();
        let value = |i: usize| ((i * 7919 + seed * 31) % 1009) as f32 * 0.01 - 5.0;
        Tensor::from_vec((0..shape.numel()).map(value).collect(), shape).unwrap()
    }

    fn plain(a: &Tensor, b: &Tensor) -> Tensor {
        gemm("matmul", a, b, &[a.shape()[2]]).unwrap()
    }

    fn naive(a: &Tensor, b: &Tensor) -> Vec<f64> {
        let (m, k, n) = (a.shape()[1], a.shape()[2], b.shape()[2]);
        let (av, bv) = (a.to_f64_vec(), b.to_f64_vec());
        let at = |i: usize| {
            let (batch, r, c) = (i / (m * n), i / n % m, i % n);
            (0..k).map(|j| av[(batch * m + r) * k + j] * bv[(batch * k + j) * n + c]).sum()
        };
        (0..a.shape()[0] * m * n).map(at).collect()
    }

    fn check(a: &Tensor, b: &Tensor) {
        let want = naive(a, b);
        let got = plain(a, b);
        assert_eq!(got.shape()[..], [a.shape()[0], a.shape()[1], b.shape()[2]]);
        for (g, w) in got.to_f64_vec().iter().zip(&want) {
            assert!((g - w).abs() <= 1e-3 + w.abs() * 1e-5, "{a:?} {b:?}: {g} {w}");
        }
        let wide = plain(&cast(a, DType::F64).unwrap(), &cast(b, DType::F64).unwrap());
        for (g, w) in wide.to_f64_vec().iter().zip(&want) {
            assert!((g - w).abs() <= 1e-9 * (1.0 + w.abs()), "{a:?} {b:?}: {g} {w}");
        }
    }

    #[test]
    fn against_the_definition_at_odd_sizes_and_strides() {
        for (batch, m, k, n) in
            [(1, 1, 1, 1), (2, 3, 5, 7), (3, 1, 17, 1), (2, 33, 300, 9), (1, 9, 2, 70), (2, 4, 0, 3)]
        {
            let (a, b) = (noise([batch, m, k], 1), noise([batch, k, n], 2));
            check(&a, &b);
            check(&noise([batch, k, m], 3).transpose(1, 2).unwrap(), &b);
            check(&a, &noise([n, k, batch], 4).permute(&[2, 1, 0]).unwrap());
            let shared = noise([1, k, n], 5).expand([batch, k, n]).unwrap();
            check(&a, &shared);
            check(&noise([m, batch, k], 6).transpose(0, 1).unwrap(), &shared);
            check(&noise([1, m, k], 7).expand([batch, m, k]).unwrap(), &b);
        }
        assert_eq!(plain(&noise([0, 2, 3], 0), &noise([0, 3, 4], 0)).numel(), 0);
    }

    #[test]
    fn slices_have_the_bits_of_the_whole() {
        let (a, b) = (noise([1, 61, 531], 1), noise([1, 531, 77], 2));
        let whole = plain(&a, &b);
        for (r, rows, c, cols) in
            [(0, 1, 0, 1), (5, 1, 0, 77), (0, 61, 76, 1), (7, 30, 3, 41), (60, 1, 76, 1), (0, 9, 0, 17)]
        {
            let part = plain(&a.narrow(1, r, rows).unwrap(), &b.narrow(2, c, cols).unwrap());
            let want = whole.narrow(1, r, rows).unwrap().narrow(2, c, cols).unwrap();
            assert_eq!(part.to_vec::<f32>().unwrap(), want.to_vec::<f32>().unwrap());
        }
    }

    #[test]
    fn halves_round_once_and_integers_are_refused() {
        for (m, k, n) in [(5, 300, 4), (70, 33, 65), (1, 100, 40), (40, 7, 1)] {
            for half in [DType::BF16, DType::F16] {
                let narrow = |x: &Tensor| cast(x, half).unwrap();
                let wide = |x: &Tensor| cast(x, DType::F32).unwrap();
                let (a, b) = (narrow(&noise([1, m, k], 1)), narrow(&noise([1, k, n], 2)));
                let want = narrow(&plain(&wide(&a), &wide(&b))).to_f64_vec();
                assert_eq!(plain(&a, &b).to_f64_vec(), want);
                let transposed =
                    |x: &Tensor| x.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
                assert_eq!(plain(&transposed(&a), &transposed(&b)).to_f64_vec(), want);
                let apart = |x: &Tensor| {
                    let (m, n) = (x.shape()[1], x.shape()[2]);
                    let twice = x.unsqueeze(3).unwrap().expand([1, m, n, 2]).unwrap().contiguous().unwrap();
                    twice.narrow(3, 0, 1).unwrap().squeeze(3).unwrap()
                };
                assert_eq!(plain(&apart(&a), &apart(&b)).to_f64_vec(), want);
            }
        }
        let i = Tensor::zeros(DType::I64, [1, 2, 2]);
        let refused = gemm("matmul", &i, &i, &[2]).unwrap_err().to_string();
        assert_eq!(refused, "matmul: integer products are not built; got i64[1, 2, 2]; cast to f64 first");
        let a = noise([1, 5, 300], 1);
        assert!(gemm("matmul", &a, &a, &[300]).is_err());
        assert!(gemm("matmul", &a, &noise([1, 300, 4], 2), &[10, 3]).is_err());
        // 2^64 indices, whose number wraps to 0.
        let (a, b) = (Tensor::zeros(DType::F32, [1, 2, 0]), Tensor::zeros(DType::F32, [1, 0, 2]));
        assert!(gemm("matmul", &a, &b, &[2; 64]).is_err());
        assert_eq!(gemm("matmul", &a, &b, &[1 << 40, 0, 1 << 40]).unwrap().to_f64_vec(), [0.0; 4]);
    }
}

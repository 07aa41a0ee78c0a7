//! Matrix products, through the `matrixmultiply` crate.
//!
//! Each element of a product is one chain of fused multiply-adds over blocks of 256 along the contraction, the blocks added
//! in order: it depends on its row, its column and the contraction's extent only. Measured: no slice differs.
//! Every product goes through the same two-dimensional call, vectors included, for only that is slice-invariant.
//!
//! Missing: the tree inside the tile loop, under which two halves of a contraction add up to the whole by bits.

use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

use super::cast::cast;
use super::{Real, as_elements_mut};

/// `a @ b` for `a` of shape `[batch, m, k]` and `b` of `[batch, k, n]`, in any strides; the result is contiguous.
///
/// Where `b` is repeated along the batch (stride 0, or a batch of 1) and `a`'s batch runs on into its rows, all is one
/// product. f16 and bf16 are multiplied in f32 and rounded once. No elements along `k` give zeros.
///
/// # Errors
/// Refuses operands that are not three-dimensional, whose shapes do not fit or whose dtypes differ, and integers.
pub fn gemm(verb: &str, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let fits = match (&a.shape()[..], &b.shape()[..]) {
        ([ab, _, ak], [bb, bk, _]) => ab == bb && ak == bk,
        _ => false,
    };
    if !fits || a.dtype() != b.dtype() {
        return Err(Error::invalid(
            verb,
            "wants [batch, m, k] and [batch, k, n] of one dtype",
            format!("{a}, {b}"),
            "reshape, expand or cast them first",
        ));
    }
    match a.dtype() {
        DType::F32 => gemm_as::<f32>(a, b),
        DType::F64 => gemm_as::<f64>(a, b),
        half @ (DType::F16 | DType::BF16) => {
            cast(&gemm_as::<f32>(&cast(a, DType::F32)?, &cast(b, DType::F32)?)?, half)
        }
        _ => Err(Error::unsupported(
            verb,
            "integer products are not built",
            a.to_string(),
            "cast to f64 first",
        )),
    }
}

/// A matrix in some buffer: the elements from its first on, and the strides of rows and columns.
#[derive(Clone, Copy)]
pub struct MatRef<'a, T> {
    /// The buffer from the first element on.
    pub data: &'a [T],
    /// Rows and columns.
    pub shape: (usize, usize),
    /// The steps from row to row and from column to column, in elements.
    pub strides: (usize, usize),
}

/// A matrix to be written: as [`MatRef`]; no two elements may coincide.
pub struct MatMut<'a, T> {
    /// The buffer from the first element on.
    pub data: &'a mut [T],
    /// Rows and columns.
    pub shape: (usize, usize),
    /// The steps from row to row and from column to column, in elements.
    pub strides: (usize, usize),
}

impl<'a, T> MatRef<'a, T> {
    /// The matrix seen the other way round.
    pub fn t(self) -> Self {
        let ((m, n), (rs, cs)) = (self.shape, self.strides);
        MatRef { data: self.data, shape: (n, m), strides: (cs, rs) }
    }

    /// The rows `start..start + len`.
    pub fn rows(self, start: usize, len: usize) -> Self {
        assert!(start + len <= self.shape.0, "rows {start}..{start}+{len} of {:?}", self.shape);
        let at = (start * self.strides.0).min(self.data.len());
        MatRef { data: &self.data[at..], shape: (len, self.shape.1), ..self }
    }

    /// Row `i`, whose elements lie side by side.
    pub fn row(self, i: usize) -> &'a [T] {
        &self.data[(i * self.strides.0).min(self.data.len())..][..self.shape.1]
    }
}

/// An element type that the product kernels take: f32 or f64.
pub trait Gemm: Real {
    /// `c = alpha * a @ b + beta * c`; with `beta` 0, what `c` held does not matter.
    ///
    /// # Panics
    /// If the shapes do not fit, or a matrix leaves its buffer.
    fn product(alpha: Self, a: MatRef<'_, Self>, b: MatRef<'_, Self>, beta: Self, c: MatMut<'_, Self>);
}

macro_rules! product {
    ($($t:ty, $kernel:path;)*) => {$(
        impl Gemm for $t {
            fn product(alpha: $t, a: MatRef<'_, $t>, b: MatRef<'_, $t>, beta: $t, c: MatMut<'_, $t>) {
                let ((m, k), n) = (a.shape, b.shape.1);
                assert!(b.shape.0 == k && c.shape == (m, n), "{:?} {:?} {:?}", a.shape, b.shape, c.shape);
                assert!(inside(a.data, a.shape, a.strides) && inside(b.data, b.shape, b.strides));
                assert!(inside(c.data, c.shape, c.strides) && distinct(c.shape, c.strides));
                if m == 0 || n == 0 {
                    return;
                }
                let step = |s: usize| s as isize;
                // SAFETY: all three matrices lie inside their buffers and `c`'s elements are distinct (asserted
                // above); `c` is borrowed exclusively; with a zero `beta` it is not read.
                unsafe {
                    $kernel(
                        m, k, n, alpha,
                        a.data.as_ptr(), step(a.strides.0), step(a.strides.1),
                        b.data.as_ptr(), step(b.strides.0), step(b.strides.1),
                        beta,
                        c.data.as_mut_ptr(), step(c.strides.0), step(c.strides.1),
                    );
                }
            }
        }
    )*};
}

product! {
    f32, matrixmultiply::sgemm;
    f64, matrixmultiply::dgemm;
}

fn inside<T>(data: &[T], (m, n): (usize, usize), (rs, cs): (usize, usize)) -> bool {
    m == 0 || n == 0 || (m - 1) * rs + (n - 1) * cs < data.len()
}

/// True where one dim's steps leap over the whole of the other.
fn distinct((m, n): (usize, usize), (rs, cs): (usize, usize)) -> bool {
    let leaps = |outer: usize, outer_len: usize, inner: usize, inner_len: usize| {
        (inner > 0 || inner_len <= 1) && (outer_len <= 1 || outer > inner * inner_len.saturating_sub(1))
    };
    m == 0 || n == 0 || leaps(rs, m, cs, n) || leaps(cs, n, rs, m)
}

fn gemm_as<T: Gemm>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (batch, m, k, n) = (a.shape()[0], a.shape()[1], a.shape()[2], b.shape()[2]);
    let mut out = Tensor::stale(T::DTYPE, [batch, m, n]);
    if out.numel() == 0 {
        return Ok(out);
    }
    if k == 0 {
        return Ok(Tensor::zeros(T::DTYPE, [batch, m, n]));
    }
    let (ad, asr) = (a.data::<T>()?, a.strides());
    let (bd, bsr) = (b.data::<T>()?, b.strides());
    let c = as_elements_mut::<T>(out.bytes_mut());
    let one_b = batch == 1 || bsr[0] == 0;
    let runs_on = batch == 1 || m == 1 || asr[0] == m * asr[1];
    let rows = if m == 1 && batch > 1 { asr[0] } else { asr[1] };
    let (products, m) = if one_b && runs_on { (1, batch * m) } else { (batch, m) };
    let row_step = if products == 1 { rows } else { asr[1] };
    for (i, c) in c.chunks_exact_mut(m * n).take(products).enumerate() {
        let a = MatRef { data: &ad[i * asr[0]..], shape: (m, k), strides: (row_step, asr[2]) };
        let b = MatRef { data: &bd[i * bsr[0]..], shape: (k, n), strides: (bsr[1], bsr[2]) };
        T::product(T::ONE, a, b, T::ZERO, MatMut { data: c, shape: (m, n), strides: (n, 1) });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Shape;

    fn noise(shape: impl Into<Shape>, seed: usize) -> Tensor {
        let shape = shape.into();
        let value = |i: usize| ((i * 7919 + seed * 31) % 1009) as f32 * 0.01 - 5.0;
        Tensor::from_vec((0..shape.numel()).map(value).collect(), shape).unwrap()
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
        let got = gemm("matmul", a, b).unwrap();
        assert_eq!(got.shape()[..], [a.shape()[0], a.shape()[1], b.shape()[2]]);
        for (g, w) in got.to_f64_vec().iter().zip(&want) {
            assert!((g - w).abs() <= 1e-3 + w.abs() * 1e-5, "{a} {b}: {g} {w}");
        }
        let wide = gemm("matmul", &cast(a, DType::F64).unwrap(), &cast(b, DType::F64).unwrap()).unwrap();
        for (g, w) in wide.to_f64_vec().iter().zip(&want) {
            assert!((g - w).abs() <= 1e-9 * (1.0 + w.abs()), "{a} {b}: {g} {w}");
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
        assert_eq!(gemm("matmul", &noise([0, 2, 3], 0), &noise([0, 3, 4], 0)).unwrap().numel(), 0);
    }

    #[test]
    fn slices_have_the_bits_of_the_whole() {
        let (a, b) = (noise([1, 61, 531], 1), noise([1, 531, 77], 2));
        let whole = gemm("matmul", &a, &b).unwrap();
        for (r, rows, c, cols) in
            [(0, 1, 0, 1), (5, 1, 0, 77), (0, 61, 76, 1), (7, 30, 3, 41), (60, 1, 76, 1)]
        {
            let part =
                gemm("matmul", &a.narrow(1, r, rows).unwrap(), &b.narrow(2, c, cols).unwrap()).unwrap();
            let want = whole.narrow(1, r, rows).unwrap().narrow(2, c, cols).unwrap();
            assert_eq!(part.to_vec::<f32>().unwrap(), want.to_vec::<f32>().unwrap());
        }
    }

    #[test]
    fn halves_round_once_and_integers_are_refused() {
        let (a, b) = (noise([1, 5, 300], 1), noise([1, 300, 4], 2));
        let half = |x: &Tensor| cast(x, DType::BF16).unwrap();
        let got = gemm("matmul", &half(&a), &half(&b)).unwrap();
        let wide = |x: &Tensor| cast(&half(x), DType::F32).unwrap();
        let want = cast(&gemm("matmul", &wide(&a), &wide(&b)).unwrap(), DType::BF16).unwrap();
        assert_eq!(got.to_f64_vec(), want.to_f64_vec());
        let i = Tensor::zeros(DType::I64, [1, 2, 2]);
        let refused = gemm("matmul", &i, &i).unwrap_err().to_string();
        assert_eq!(refused, "matmul: integer products are not built; got i64[1, 2, 2]; cast to f64 first");
        assert!(gemm("matmul", &a, &a).is_err());
    }
}

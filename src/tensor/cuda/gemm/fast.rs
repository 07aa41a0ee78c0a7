//! Fast products, by the vendor's library, in the library's own order of summation.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Result;
use crate::tensor::cuda::{Gpu, Matrix, Product};
use crate::tensor::{DType, Tensor};

static TF32: AtomicBool = AtomicBool::new(false);

/// Allows or forbids that f32 products in fast mode round their operands to tf32 (10 bits of mantissa), which matrix
/// units multiply several times faster. Off by default; holds for the whole process.
///
/// ```
/// use isoshard::tensor::cuda;
///
/// cuda::set_tf32(true); // products in fast mode may round their operands
/// cuda::set_tf32(false);
/// ```
pub fn set_tf32(on: bool) {
    TF32.store(on, Ordering::Relaxed);
}

/// Computes `out = a @ b` with the driver's library. Returns false, with nothing done, if there is no library or it
/// does not support the product.
pub(super) fn multiply(gpu: &Gpu, a: &Tensor, b: &Tensor, out: &mut Tensor) -> Result<bool> {
    let stream = gpu.stream();
    let (device, driver) = (&stream.device, &stream.device.driver);
    let Some(blas) = driver.blas() else { return Ok(false) };
    let (batch, m, k, n) = (a.shape()[0], a.shape()[1], a.shape()[2], b.shape()[2]);
    if i32::try_from(batch).is_err() {
        // Libraries count products by an int.
        return Ok(false);
    }
    // Read by columns, the row-major result is its transpose, which is the product of `b` transposed and `a`
    // transposed.
    let ((left, b), (right, a)) = (as_matrix_or_copy(b, 2, 1)?, as_matrix_or_copy(a, 2, 1)?);
    let at = out.device_address().expect("made on a device");
    let product = Product {
        dtype: a.dtype(),
        tf32: a.dtype() == DType::F32 && TF32.load(Ordering::Relaxed),
        rows: n,
        cols: m,
        sum: k,
        batch,
        left,
        right,
        out: Matrix { at, transposed: false, step: n, batch_step: m * n },
    };
    let fail = |e| device.error("matmul", &e);
    let Some(bytes) = blas.workspace_bytes(&product).map_err(fail)? else { return Ok(false) };
    let room = (bytes > 0).then(|| gpu.uninit(DType::U8, [bytes])).transpose()?;
    let room = room.as_ref().and_then(Tensor::device_address).unwrap_or(0);
    for x in [&a, &b] {
        x.device_block().map_or(Ok(()), |block| block.read_by(stream)).map_err(fail)?;
    }
    // SAFETY: the operands' views and the fresh result are in blocks that return to their streams, which reuse them
    // after this; so is the workspace, which has the bytes that were asked for.
    let done = unsafe { blas.multiply(&product, room, stream.handle) };
    stream.note_work();
    done.map_err(fail)?;
    Ok(true)
}

/// Returns the operand as a matrix with these dims as rows and columns. Copies it if its strides fit no matrix.
fn as_matrix_or_copy(x: &Tensor, rows: usize, cols: usize) -> Result<(Matrix, Tensor)> {
    match as_matrix(x, rows, cols) {
        Some(matrix) => Ok((matrix, x.clone())),
        None => {
            let x = x.to_owned_copy()?;
            Ok((as_matrix(&x, rows, cols).expect("a contiguous tensor's rows lie one after the other"), x))
        }
    }
}

fn as_matrix(x: &Tensor, rows: usize, cols: usize) -> Option<Matrix> {
    let at = x.device_address()?;
    let batch_step = if x.shape()[0] == 1 { 0 } else { x.strides()[0] };
    // Returns the distance between lines of `slow`, if the elements along `quick` are contiguous and lines do not
    // overlap.
    let lines = |quick: usize, slow: usize| {
        let len = x.shape()[quick];
        let step = if x.shape()[slow] == 1 { len } else { x.strides()[slow] };
        ((len == 1 || x.strides()[quick] == 1) && step >= len.max(1)).then_some(step)
    };
    let straight = lines(rows, cols).map(|step| Matrix { at, transposed: false, step, batch_step });
    straight.or_else(|| lines(cols, rows).map(|step| Matrix { at, transposed: true, step, batch_step }))
}

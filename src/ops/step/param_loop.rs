//! The loop of an optimizer's step on the CPU over the pieces of one parameter.

use crate::error::Result;
use crate::tensor::Tensor;
use crate::tensor::cpu::{Cut, Widen, for_each_part, prefetch_ahead};

/// Overwrites `p` chunk by chunk.with the results of `run`, for an optimizer's step on the CPU. Works in place if `p`
/// is the only owner of its buffer.
///
/// `run` takes the index of the piece's first element, the elements of `p` and of `g`, both converted to the dtype of
/// the arithmetic (f32 for f16 and bf16), and the slice for the new elements of `p`, which are rounded once.
///
/// ```
/// use isoshard::{ops::each_chunk, tensor::Tensor};
/// let mut p = Tensor::from_vec(vec![1.0f32, 2.0], [2])?;
/// let g = Tensor::from_vec(vec![10.0f32, 20.0], [2])?;
/// each_chunk::<f32>(&mut p, &g, |_, p, g, out| {
///     out.iter_mut().zip(p.iter().zip(g)).for_each(|(out, (p, g))| *out = p - 0.5 * g);
/// })?;
/// assert_eq!(p.to_f64_vec(), [-4.0, -8.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns an error if a tensor's dtype is not that of `T`.
pub fn each_chunk<T: Widen>(
    p: &mut Tensor,
    g: &Tensor,
    mut run: impl FnMut(usize, &[T::Wide], &[T::Wide], &mut [T::Wide]),
) -> Result<()> {
    let g = g.contiguous()?;
    overwrite_chunks(p.make_mut::<T>()?, g.as_slice::<T>()?, &mut run);
    Ok(())
}

/// Does the same on the threads that this one may use. Each has a part of `state`, whose elements belong to those of `p`:
/// `run` takes that part first, and the index of the piece's first element in it. The new elements are also rounded to
/// `rounded`, if it is given, while they are in the first-level cache.
pub(super) fn each_chunk_of_part<T: Widen, R: Widen<Wide = T::Wide>, S: Cut>(
    p: &mut Tensor,
    g: &Tensor,
    state: S,
    rounded: Option<&mut [R]>,
    run: impl Fn(&mut S, usize, &[T::Wide], &[T::Wide], &mut [T::Wide]) + Sync,
) -> Result<()> {
    let g = g.contiguous()?;
    let (p, g) = (p.make_mut::<T>()?, g.as_slice::<T>()?);
    for_each_part(p.len(), 2 * p.len(), (p, state, rounded), |part, (p, mut state, mut rounded)| {
        overwrite_chunks(p, &g[part], &mut |at, p, g, out| {
            run(&mut state, at, p, g, out);
            if let Some(rounded) = &mut rounded {
                R::narrow_into(out, &mut rounded[at..][..out.len()]);
            }
        });
    });
    Ok(())
}

/// A function that takes the index of a chunk's first element, the elements of the parameter and of the gradient, and
/// the slice for the new elements of the parameter.
type OverwriteChunk<'a, W> = &'a mut dyn FnMut(usize, &[W], &[W], &mut [W]);

/// Overwrites `p` chunk by chunk.
fn overwrite_chunks<T: Widen>(p: &mut [T], g: &[T], run: OverwriteChunk<'_, T::Wide>) {
    // All buffers together fit in the first-level cache, and few lines are asked for at a time.
    const CHUNK: usize = 256;
    let buffer = || vec![T::Wide::default(); CHUNK];
    let (mut own, mut wide_g, mut wide_out) = (buffer(), buffer(), buffer());
    for start in (0..p.len()).step_by(CHUNK) {
        let now = start..p.len().min(start + CHUNK);
        prefetch_ahead(p, &now);
        prefetch_ahead(g, &now);
        let own = &mut own[..now.len()];
        T::widen_into(&p[now.clone()], own);
        let g = T::load(&g[now.clone()], &mut wide_g);
        T::store(&mut p[now], &mut wide_out, |out| run(start, own, g, out));
    }
}

//! Elementwise loops over up to three tensors of one shape, in any strides, into a new contiguous tensor or in place.
//!
//! The iteration is compiled once per pair of dtypes. The caller supplies the arithmetic: a loop over contiguous chunks
//! in the wide types (f32 for f16 and bf16). A broadcast operand (stride 0) is repeated in a small buffer along rows,
//! and read again for each row across them. Operands whose rows are neither contiguous nor repeated are copied first.

use std::borrow::Cow;
use std::ops::Range;

use smallvec::SmallVec;

use isoshard_kernels::num::real::select;
use isoshard_kernels::{AlignedBuffer, PIECE_BYTES, Streaming, opaque_index, prefetch_line};

use super::{Kernel, StridedRows, Widen, as_elements_mut, dispatch, for_each_part, map_slice};
use crate::error::{Error, Result};
use crate::tensor::{Shape, Tensor};

/// The largest number of operands.
pub const MAX_OPERANDS: usize = 3;

/// A loop over one chunk: it takes a chunk of each operand and the chunk of the result to write, all of one length.
pub type ChunkFn<'a, A, O> = &'a (dyn Fn(&[&[WideOf<A>]], &mut [WideOf<O>]) + Sync);

/// The type that loops use for elements of type `T`.
pub type WideOf<T> = <T as Widen>::Wide;

/// Returns a new tensor whose chunks `run` writes.
///
/// # Errors
/// Returns an error if the operands' dtypes are not `A`'s or if their shapes differ.
pub fn map<A: Widen, O: Widen>(ins: &[&Tensor], run: ChunkFn<A, O>) -> Result<Tensor> {
    map_with::<A, O>(ins, run, false)
}

/// Does the work of [`map`] for a loop of few operations, which waits for memory: a large result is [streamed](Streaming).
///
/// # Errors
/// Returns the errors of [`map`].
pub(super) fn map_cheap<A: Widen, O: Widen>(ins: &[&Tensor], run: ChunkFn<A, O>) -> Result<Tensor> {
    map_with::<A, O>(ins, run, true)
}

fn map_with<A: Widen, O: Widen>(ins: &[&Tensor], run: ChunkFn<A, O>, cheap: bool) -> Result<Tensor> {
    let shape = ins[0].shape();
    if A::NATIVE && O::NATIVE && ins.iter().all(|x| x.shape() == shape && x.is_contiguous()) {
        // The whole tensors are one chunk, so small tensors cost little more than the loop.
        let mut chunks: [&[WideOf<A>]; MAX_OPERANDS] = [&[]; MAX_OPERANDS];
        for (chunk, x) in chunks.iter_mut().zip(ins) {
            *chunk = A::load(&x.data()?[..x.numel()], &mut []);
        }
        let mut out = Tensor::uninit(O::DTYPE, shape);
        let (len, elements) = (out.numel(), as_elements_mut::<O>(out.bytes_mut()));
        let bytes = size_of_val(elements);
        for_each_part(len, len, elements, |at, elements| {
            let mut part: [&[WideOf<A>]; MAX_OPERANDS] = [&[]; MAX_OPERANDS];
            part.iter_mut().zip(&chunks[..ins.len()]).for_each(|(part, chunk)| *part = &chunk[at.clone()]);
            let part = &part[..ins.len()];
            O::store(elements, &mut [], |o| match cheap.then(|| Streaming::of(bytes)).flatten() {
                Some(streaming) => run_streamed(&streaming, part, o, run),
                None => run(part, o),
            });
        });
        return Ok(out);
    }
    let inputs = MapOperands::new(ins[0].shape(), &mut ins.iter().copied().enumerate())?;
    let operands = inputs.operands::<A>()?;
    let mut out = Tensor::uninit(O::DTYPE, ins[0].shape());
    write_chunks::<O, _>(&mut out, &inputs.rows, [operands.iter().all(|x| x.direct), cheap], || {
        let mut operands = operands.clone();
        move |at, start, o| {
            let mut chunks: [&[WideOf<A>]; MAX_OPERANDS] = [&[]; MAX_OPERANDS];
            for x in &mut operands {
                let place = x.place;
                chunks[place] = x.chunk(at, start, o.len());
            }
            run(&chunks[..ins.len()], o);
        }
    });
    Ok(out)
}

/// Runs a loop over whole operands, whose result is larger than the caches.
fn run_streamed<A: Copy, O: Copy + Default>(
    streaming: &Streaming,
    ins: &[&[A]],
    out: &mut [O],
    run: impl Fn(&[&[A]], &mut [O]),
) {
    let piece = |at: Range<usize>, out: &mut [O]| {
        let mut pieces: [&[A]; MAX_OPERANDS] = [&[]; MAX_OPERANDS];
        pieces.iter_mut().zip(ins).for_each(|(piece, x)| *piece = &x[at.clone()]);
        run(&pieces[..ins.len()], out);
    };
    let ahead = |at: usize| ins.iter().for_each(|x| prefetch_line(x.as_ptr().wrapping_add(at)));
    streaming.write(out, piece, ahead);
}

/// Overwrites operand `target_index` with the result. `run` is given a copy of each of its chunks. If another tensor
/// shares the operand's buffer, the operand is copied first.
///
/// # Errors
/// Returns the errors of [`map`].
pub fn map_in_place<A: Widen>(ins: &mut [Tensor], target_index: usize, run: ChunkFn<A, A>) -> Result<()> {
    let len = ins.len();
    let (before, rest) = ins.split_at_mut(target_index);
    let (target, after) = rest.split_first_mut().expect("there is an operand `target_index`");
    let native_match = |x: &Tensor| x.shape() == target.shape() && x.is_contiguous();
    if A::NATIVE && before.iter().chain(&*after).all(native_match) {
        // Contiguous operands, as in `map`.
        let mut whole: [&[A]; MAX_OPERANDS] = [&[]; MAX_OPERANDS];
        for (k, x) in
            before.iter().enumerate().chain(after.iter().enumerate().map(|(k, x)| (target_index + 1 + k, x)))
        {
            whole[k] = &x.data()?[..x.numel()];
        }
        let out = target.make_mut::<A>()?;
        for_each_part(out.len(), out.len(), out, |at, out| {
            let mut copy = AlignedBuffer::new(out.len().min(CHUNK));
            for (i, out) in out.chunks_mut(CHUNK).enumerate() {
                let copy = &mut copy[..out.len()];
                A::widen_into(out, copy);
                let mut chunks: [&[WideOf<A>]; MAX_OPERANDS] = [&[]; MAX_OPERANDS];
                for k in (0..len).filter(|&k| k != target_index) {
                    chunks[k] = A::load(&whole[k][at.start + i * CHUNK..][..out.len()], &mut []);
                }
                chunks[target_index] = copy;
                A::store(out, &mut [], |o| run(&chunks[..len], o));
            }
        });
        return Ok(());
    }
    let after = after.iter().enumerate().map(|(k, x)| (target_index + 1 + k, x));
    let inputs = MapOperands::new(target.shape(), &mut before.iter().enumerate().chain(after))?;
    let operands = inputs.operands::<A>()?;
    overwrite_chunks::<A, _>(target, &inputs.rows, || {
        let mut operands = operands.clone();
        move |at, start, copy, o| {
            let mut chunks: [&[WideOf<A>]; MAX_OPERANDS] = [&[]; MAX_OPERANDS];
            for x in &mut operands {
                let place = x.place;
                chunks[place] = x.chunk(at, start, o.len());
            }
            chunks[target_index] = copy;
            run(&chunks[..len], o);
        }
    })
}

/// Returns, for each element, `yes` if `condition` is `on`, else `no`. The operands are `(condition, yes, no)`, all of
/// one shape, the last two of `T`'s dtype. With `target_index` (1 or 2), that operand is overwritten with the result.
///
/// # Errors
/// Returns the errors of [`map`].
pub fn select_as<T: Widen>(ins: [&mut Tensor; 3], on: bool, target_index: Option<usize>) -> Result<Tensor> {
    let Some(target_index) = target_index else {
        let ins = ins.map(|x| &*x);
        let shape = ins[0].shape();
        let inputs = MapOperands::new(shape, &mut ins.into_iter().enumerate())?;
        let condition = Operand::<bool>::new(&inputs, 0)?;
        let (yes, no) = (Operand::<T>::new(&inputs, 1)?, Operand::<T>::new(&inputs, 2)?);
        let direct = condition.direct && yes.direct && no.direct;
        let mut out = Tensor::uninit(T::DTYPE, shape);
        write_chunks::<T, _>(&mut out, &inputs.rows, [direct, true], || {
            let (mut condition, mut yes, mut no) = (condition.clone(), yes.clone(), no.clone());
            move |at, start, o| {
                let condition = condition.chunk(at, start, o.len());
                let (yes, no) = (yes.chunk(at, start, o.len()), no.chunk(at, start, o.len()));
                dispatch(SelectKernel { condition, on, yes, no, o });
            }
        });
        return Ok(out);
    };
    let [condition, yes, no] = ins;
    let (target, other, other_at) = if target_index == 1 { (yes, no, 2) } else { (no, yes, 1) };
    let inputs = MapOperands::new(target.shape(), &mut [(0, &*condition), (other_at, &*other)].into_iter())?;
    let condition = Operand::<bool>::new(&inputs, 0)?;
    let other = Operand::<T>::new(&inputs, other_at)?;
    overwrite_chunks::<T, _>(target, &inputs.rows, || {
        let (mut condition, mut other) = (condition.clone(), other.clone());
        move |at, start, x, o| {
            let (condition, other) = (condition.chunk(at, start, o.len()), other.chunk(at, start, o.len()));
            let (yes, no) = if target_index == 1 { (x, other) } else { (other, x) };
            dispatch(SelectKernel { condition, on, yes, no, o });
        }
    })?;
    Ok(target.clone())
}

/// Returns `f` of each element of `a`, computed with the widest vectors that the CPU has.
///
/// ```
/// use isoshard::tensor::{Tensor, cpu::map1};
/// let x = Tensor::from_vec(vec![1.0f32, -2.0, 3.0], [3])?;
/// assert_eq!(map1::<f32, bool, _>(&x, |x| x > 0.0)?.to_vec::<bool>()?, [true, false, true]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns an error if the dtype is not `A`'s.
pub fn map1<A: Widen, O: Widen, F>(a: &Tensor, f: F) -> Result<Tensor>
where
    F: Fn(A::Wide) -> O::Wide + Copy + Sync,
{
    map::<A, O>(&[a], &|x, o| map_slice(x[0], o, f))
}

/// Returns `f(a, b)` of each pair of elements, for tests.
#[cfg(test)]
pub fn map2<A: Widen, F>(a: &Tensor, b: &Tensor, f: F) -> Result<Tensor>
where
    F: Fn(A::Wide, A::Wide) -> A::Wide + Copy + Sync,
{
    map::<A, A>(&[a, b], &|x, o| {
        o.iter_mut().zip(x[0].iter().zip(x[1])).for_each(|(o, (&a, &b))| *o = f(a, b))
    })
}

/// The length of chunks that need buffers: all buffers together fit the first-level cache.
const CHUNK: usize = 512;
/// If rows are shorter than this, a contiguous copy costs less than a call per row.
const SHORT_ROW: usize = 32;

/// The operands and their common rows. Operands whose rows are neither contiguous nor repeated are contiguous copies.
struct MapOperands<'a> {
    tensors: SmallVec<[(usize, Cow<'a, Tensor>); MAX_OPERANDS]>,
    /// Positions without an operand have the strides of the contiguous result.
    rows: StridedRows<MAX_OPERANDS>,
}

impl<'a> MapOperands<'a> {
    /// Prepares the operands, each with its position.
    fn new(
        shape: &[usize],
        tensors: &mut dyn Iterator<Item = (usize, &'a Tensor)>,
    ) -> Result<MapOperands<'a>> {
        let mut tensors: SmallVec<[(usize, Cow<'a, Tensor>); MAX_OPERANDS]> =
            tensors.map(|(k, x)| (k, Cow::Borrowed(x))).collect();
        if let Some((_, t)) = tensors.iter().find(|(_, t)| t.shape()[..] != *shape) {
            return Err(Error::invalid(
                "map",
                "the operands' shapes differ",
                format!("{shape:?}, {}", t.shape()),
                "expand them first",
            ));
        }
        let rows = common_rows(shape, &tensors);
        let short = rows.row_len() < SHORT_ROW && rows.row_count() > 1;
        let mut copied = false;
        for (k, x) in &mut tensors {
            if short || rows.row_stride(*k) > 1 {
                (*x, copied) = (Cow::Owned(x.packed()), true);
            }
        }
        Ok(MapOperands { rows: if copied { common_rows(shape, &tensors) } else { rows }, tensors })
    }

    /// Returns all operands, which have one type.
    fn operands<A: Widen>(&self) -> Result<SmallVec<[Operand<'_, A>; MAX_OPERANDS]>> {
        self.tensors.iter().map(|(place, _)| Operand::new(self, *place)).collect()
    }
}

/// Returns the rows of the operands and of a contiguous result.
fn common_rows(shape: &[usize], tensors: &[(usize, Cow<Tensor>)]) -> StridedRows<MAX_OPERANDS> {
    let contiguous = Shape::from(shape).strides();
    let mut strides: [&[usize]; MAX_OPERANDS] = [&contiguous; MAX_OPERANDS];
    tensors.iter().for_each(|(k, x)| strides[*k] = x.strides());
    StridedRows::new(shape, strides)
}

/// One operand, read as chunks of rows in the wide type. Each thread has a clone.
#[derive(Clone)]
struct Operand<'a, T: Widen> {
    place: usize,
    data: &'a [T],
    repeated: bool,
    /// True if the operand is read without a buffer, so that chunks may have any length.
    direct: bool,
    buf: AlignedBuffer<T::Wide>,
    /// The row and the length of the repeated element in the buffer.
    filled: Option<(usize, usize)>,
}

impl<'a, T: Widen> Operand<'a, T> {
    /// Returns the operand at `place`.
    fn new(inputs: &'a MapOperands<'_>, place: usize) -> Result<Operand<'a, T>> {
        let (_, tensor) =
            inputs.tensors.iter().find(|(k, _)| *k == place).expect("there is an operand at the position");
        let repeated = inputs.rows.row_stride(place) == 0;
        let direct = T::NATIVE && !repeated;
        Ok(Operand { place, data: tensor.data()?, repeated, direct, buf: buffer::<T>(direct), filled: None })
    }

    /// Returns a chunk of the row at `at`, widened.
    fn chunk(&mut self, at: &[usize; MAX_OPERANDS], start: usize, len: usize) -> &[T::Wide] {
        let row = at[self.place];
        if !self.repeated {
            return T::load(&self.data[row + start..][..len], &mut self.buf);
        }
        if self.filled.is_none_or(|(filled, until)| filled != row || until < len) {
            self.filled = Some((row, len));
            let mut wide = [T::Wide::default()];
            T::widen_into(&self.data[row..=row], &mut wide);
            self.buf[..len].fill(wide[0]);
        }
        &self.buf[..len]
    }
}

/// Writes every chunk of `out` by a function that each thread makes for itself. Large results of a `cheap` one are streamed.
fn write_chunks<O: Widen, F: FnMut(&[usize; MAX_OPERANDS], usize, &mut [O::Wide])>(
    out: &mut Tensor,
    rows: &StridedRows<MAX_OPERANDS>,
    [direct, cheap]: [bool; 2],
    writer: impl Fn() -> F + Sync,
) {
    let (len, out) = (out.numel(), as_elements_mut::<O>(out.bytes_mut()));
    let bytes = size_of_val(out);
    for_each_part(len, len, out, |at, out| {
        let streaming = (O::NATIVE && cheap).then(|| Streaming::of(bytes)).flatten();
        let chunk = match (direct && O::NATIVE, &streaming) {
            (_, Some(_)) => CHUNK.min(PIECE_BYTES / size_of::<O>()),
            (true, None) => usize::MAX,
            (false, None) => CHUNK,
        };
        let (mut run, mut buf) = (writer(), buffer::<O>(O::NATIVE));
        let mut piece = buffer::<O>(streaming.is_none());
        rows.each_chunk_of(at.clone(), chunk, &mut |row, start, len, o| {
            O::store(&mut out[o - at.start..][..len], &mut buf, |o| match &streaming {
                Some(streaming) => {
                    run(row, start, &mut piece[..len]);
                    streaming.copy(&piece[..len], o, |_| {});
                }
                None => run(row, start, o),
            });
        });
    });
}

/// Overwrites every chunk of `a` by a function that each thread makes for itself, which is given a copy of the chunk.
fn overwrite_chunks<A: Widen, F: FnMut(&[usize; MAX_OPERANDS], usize, &[A::Wide], &mut [A::Wide])>(
    a: &mut Tensor,
    rows: &StridedRows<MAX_OPERANDS>,
    writer: impl Fn() -> F + Sync,
) -> Result<()> {
    let out = a.make_mut::<A>()?;
    for_each_part(out.len(), out.len(), out, |at, out| {
        let (mut copy, mut buf, mut run) = (buffer::<A>(false), buffer::<A>(A::NATIVE), writer());
        rows.each_chunk_of(at.clone(), CHUNK, &mut |row, start, len, o| {
            let (out, copy) = (&mut out[o - at.start..][..len], &mut copy[..len]);
            A::widen_into(out, copy);
            A::store(out, &mut buf, |o| run(row, start, copy, o));
        });
    });
    Ok(())
}

/// Returns a buffer for one chunk, or an empty one if none is needed.
fn buffer<T: Widen>(unneeded: bool) -> AlignedBuffer<T::Wide> {
    AlignedBuffer::new(if unneeded { 0 } else { CHUNK })
}

/// The loop of [`select_as`].
struct SelectKernel<'a, A> {
    condition: &'a [bool],
    on: bool,
    yes: &'a [A],
    no: &'a [A],
    o: &'a mut [A],
}

impl<A: Copy> Kernel for SelectKernel<'_, A> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let both = self.yes.iter().zip(self.no);
        for (o, (&c, (&yes, &no))) in self.o.iter_mut().zip(self.condition.iter().zip(both)) {
            *o = select(c == self.on, yes, no);
        }
    }
    #[inline(always)]
    fn run_small(self) {
        for i in 0..self.o.len() {
            let i = opaque_index(i);
            self.o[i] = select(self.condition[i] == self.on, self.yes[i], self.no[i]);
        }
    }
}

#[cfg(test)]
mod tests {
    use isoshard_kernels::with_streaming_from;

    use super::*;

    /// Loops give the same bits past the caches: of several operands, sizes and dtypes, and with broadcast operands.
    #[test]
    fn loops_give_the_same_bits_past_the_caches() {
        let noise = |shape: Shape| {
            let value = |i: usize| ((i * 7919) % 1009) as f32 - 300.5;
            Tensor::from_vec((0..shape.numel()).map(value).collect::<Vec<_>>(), shape).unwrap()
        };
        for shape in [[1, 1], [3, 5], [7, 701], [40, 64], [1, 4099]] {
            let x = noise(Shape::from(shape));
            let column = noise(Shape::from([shape[0], 1])).expand(shape).unwrap();
            let row = noise(Shape::from([1, shape[1]])).expand(shape).unwrap();
            let sum = |ins: &[&Tensor]| {
                let add = |ins: &[&[f32]], out: &mut [f32]| {
                    for (i, out) in out.iter_mut().enumerate() {
                        *out = ins.iter().map(|x| x[i]).sum();
                    }
                };
                map_cheap::<f32, f32>(ins, &add).unwrap().to_vec::<f32>().unwrap()
            };
            let run = || {
                let sums = [sum(&[&x]), sum(&[&x, &x, &x]), sum(&[&x, &column]), sum(&[&row, &x])];
                let above = |ins: &[&[f32]], out: &mut [bool]| {
                    ins[0].iter().zip(out).for_each(|(&x, out)| *out = x > 100.0);
                };
                (sums, map_cheap::<f32, bool>(&[&x], &above).unwrap().to_vec::<bool>().unwrap())
            };
            let want = run();
            assert_eq!(with_streaming_from(0, run), want, "{shape:?}");
        }
    }
}

//! Walking up to three tensors of equal shape together, in any strides, into a fresh contiguous tensor or in place.
//!
//! The walk is compiled once per pair of dtypes. The arithmetic is the caller's: a loop over contiguous pieces in the wide
//! types (f32 for f16 and bf16), called for one piece after the other. Broadcast inputs (stride 0) are repeated in a small
//! buffer along rows and simply read again across them; inputs whose rows are neither contiguous nor repeated are copied
//! first, in tiles.

use std::borrow::Cow;
use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;

use super::each::each;
use super::real::{Widen, select};
use super::simd::{Kernel, dispatch};
use super::{Nest, as_elements_mut};
use crate::error::{Error, Result};
use crate::tensor::{Shape, Tensor};

/// The most tensors that are walked together.
pub const OPERANDS: usize = 3;

/// A loop over one piece: a piece of each operand and the piece of the result to write, all of one length.
pub type Loop<'a, A, O> = &'a dyn Fn(&[&[Wide<A>]], &mut [Wide<O>]);

/// The type that loops handle elements of type `T` in.
pub type Wide<T> = <T as Widen>::Wide;

/// Has `run` write every piece of a fresh tensor.
///
/// # Errors
/// Refuses operands whose dtypes are not `A`'s, or whose shapes differ.
pub fn map<A: Widen, O: Widen>(ins: &[&Tensor], run: Loop<A, O>) -> Result<Tensor> {
    let shape = ins[0].shape();
    if A::NATIVE && O::NATIVE && ins.iter().all(|x| x.shape() == shape && x.is_contiguous()) {
        // One piece, without a walk: small tensors cost little more than the loop.
        let mut pieces: [&[Wide<A>]; OPERANDS] = [&[]; OPERANDS];
        for (piece, x) in pieces.iter_mut().zip(ins) {
            *piece = A::load(&x.data()?[..x.numel()], &mut []);
        }
        let mut out = Tensor::uninit(O::DTYPE, shape);
        O::store(as_elements_mut(out.bytes_mut()), &mut [], |o| run(&pieces[..ins.len()], o));
        return Ok(out);
    }
    let walk = Walk::new(ins[0].shape(), ins.iter().copied().enumerate())?;
    let mut operands = walk.operands::<A>()?;
    let direct = operands.iter().all(|x| x.direct);
    let mut out = Out::<O>::new(ins[0].shape());
    out.each(&walk.nest, direct, |at, start, o| {
        let mut pieces: [&[Wide<A>]; OPERANDS] = [&[]; OPERANDS];
        for x in &mut operands {
            let place = x.place;
            pieces[place] = x.piece(at, start, o.len());
        }
        run(&pieces[..ins.len()], o);
    });
    Ok(out.tensor)
}

/// Has `run` overwrite every piece of operand `own`, given a copy of it in its place; a buffer that somebody shares is
/// copied first.
///
/// # Errors
/// As [`map`].
pub fn map_over<A: Widen>(ins: &mut [Tensor], own: usize, run: Loop<A, A>) -> Result<()> {
    let len = ins.len();
    let (before, rest) = ins.split_at_mut(own);
    let (target, after) = rest.split_first_mut().expect("`own` is one of the operands");
    let alike = |x: &Tensor| x.shape() == target.shape() && x.is_contiguous();
    if A::NATIVE && before.iter().chain(&*after).all(alike) {
        // Without a walk, as in `map`.
        let mut whole: [&[A]; OPERANDS] = [&[]; OPERANDS];
        for (k, x) in before.iter().enumerate().chain(after.iter().enumerate().map(|(k, x)| (own + 1 + k, x)))
        {
            whole[k] = &x.data()?[..x.numel()];
        }
        let out = target.make_mut::<A>()?;
        let mut copy = Buffer::new(out.len().min(CHUNK));
        for (i, out) in out.chunks_mut(CHUNK).enumerate() {
            let copy = &mut copy[..out.len()];
            A::widen_into(out, copy);
            let mut pieces: [&[Wide<A>]; OPERANDS] = [&[]; OPERANDS];
            for k in (0..len).filter(|&k| k != own) {
                pieces[k] = A::load(&whole[k][i * CHUNK..][..out.len()], &mut []);
            }
            pieces[own] = copy;
            A::store(out, &mut [], |o| run(&pieces[..len], o));
        }
        return Ok(());
    }
    let others = before.iter().enumerate().chain(after.iter().enumerate().map(|(k, x)| (own + 1 + k, x)));
    let walk = Walk::new(target.shape(), others)?;
    let mut operands = walk.operands::<A>()?;
    in_place::<A>(target, &walk.nest, |at, start, copy, o| {
        let mut pieces: [&[Wide<A>]; OPERANDS] = [&[]; OPERANDS];
        for x in &mut operands {
            let place = x.place;
            pieces[place] = x.piece(at, start, o.len());
        }
        pieces[own] = copy;
        run(&pieces[..len], o);
    })
}

/// `yes` where `condition` is `on`, else `no`, element by element and without arithmetic: all of one shape, the choices of
/// `T`'s dtype. With `own`, the operand of that number (1 or 2) is overwritten instead of a fresh tensor.
///
/// # Errors
/// As [`map`].
pub fn choose<T: Widen>(ins: [&mut Tensor; 3], on: bool, own: Option<usize>) -> Result<Tensor> {
    let Some(own) = own else {
        let ins = ins.map(|x| &*x);
        let shape = ins[0].shape();
        let walk = Walk::new(shape, ins.into_iter().enumerate())?;
        let mut condition = Operand::<bool>::new(&walk, 0)?;
        let (mut yes, mut no) = (Operand::<T>::new(&walk, 1)?, Operand::<T>::new(&walk, 2)?);
        let direct = condition.direct && yes.direct && no.direct;
        let mut out = Out::<T>::new(shape);
        out.each(&walk.nest, direct, |at, start, o| {
            let condition = condition.piece(at, start, o.len());
            let (yes, no) = (yes.piece(at, start, o.len()), no.piece(at, start, o.len()));
            dispatch(Choose { condition, on, yes, no, o });
        });
        return Ok(out.tensor);
    };
    let [condition, yes, no] = ins;
    let (target, other, other_at) = if own == 1 { (yes, no, 2) } else { (no, yes, 1) };
    let walk = Walk::new(target.shape(), [(0, &*condition), (other_at, &*other)])?;
    let mut condition = Operand::<bool>::new(&walk, 0)?;
    let mut other = Operand::<T>::new(&walk, other_at)?;
    in_place::<T>(target, &walk.nest, |at, start, x, o| {
        let (condition, other) = (condition.piece(at, start, o.len()), other.piece(at, start, o.len()));
        let (yes, no) = if own == 1 { (x, other) } else { (other, x) };
        dispatch(Choose { condition, on, yes, no, o });
    })?;
    Ok(target.clone())
}

/// `f(a)`, element by element, vectorised.
///
/// # Errors
/// Refuses a tensor whose dtype is not `A`'s.
pub fn map1<A: Widen, O: Widen, F>(a: &Tensor, f: F) -> Result<Tensor>
where
    F: Fn(A::Wide) -> O::Wide + Copy,
{
    map::<A, O>(&[a], &|x, o| each(x[0], o, f))
}

/// `f(a, b)`, element by element, for tests.
#[cfg(test)]
pub fn map2<A: Widen, F>(a: &Tensor, b: &Tensor, f: F) -> Result<Tensor>
where
    F: Fn(A::Wide, A::Wide) -> A::Wide + Copy,
{
    map::<A, A>(&[a, b], &|x, o| {
        o.iter_mut().zip(x[0].iter().zip(x[1])).for_each(|(o, (&a, &b))| *o = f(a, b))
    })
}

/// The length of pieces that go through buffers: all buffers together stay in the nearest cache.
const CHUNK: usize = 512;
/// Rows shorter than this cost more to walk than to copy.
const SHORT: usize = 32;

/// Operands laid out for a common walk; those with awkward strides as contiguous copies.
struct Walk<'a> {
    tensors: SmallVec<[(usize, Cow<'a, Tensor>); OPERANDS]>,
    /// Places without an operand lie as the contiguous result does, which merges dims as the others allow.
    nest: Nest<OPERANDS>,
}

impl<'a> Walk<'a> {
    /// The operands, each with its place.
    fn new(shape: &[usize], tensors: impl IntoIterator<Item = (usize, &'a Tensor)>) -> Result<Walk<'a>> {
        let mut tensors: SmallVec<[(usize, Cow<'a, Tensor>); OPERANDS]> =
            tensors.into_iter().map(|(k, x)| (k, Cow::Borrowed(x))).collect();
        if let Some((_, t)) = tensors.iter().find(|(_, t)| t.shape()[..] != *shape) {
            return Err(Error::invalid(
                "map",
                "the operands' shapes differ",
                format!("{shape:?}, {}", t.shape()),
                "expand them first",
            ));
        }
        let nest = nest(shape, &tensors);
        let short = nest.row_len() < SHORT && nest.rows() > 1;
        let mut copied = false;
        for (k, x) in &mut tensors {
            if short || nest.row_stride(*k) > 1 {
                (*x, copied) = (Cow::Owned(x.packed()), true);
            }
        }
        Ok(Walk { nest: if copied { self::nest(shape, &tensors) } else { nest }, tensors })
    }

    /// All operands, which are of one type.
    fn operands<A: Widen>(&self) -> Result<SmallVec<[Operand<'_, A>; OPERANDS]>> {
        self.tensors.iter().map(|(place, _)| Operand::new(self, *place)).collect()
    }
}

fn nest(shape: &[usize], tensors: &[(usize, Cow<Tensor>)]) -> Nest<OPERANDS> {
    let own = Shape::from(shape).strides();
    let mut strides: [&[usize]; OPERANDS] = [&own; OPERANDS];
    tensors.iter().for_each(|(k, x)| strides[*k] = x.strides());
    Nest::new(shape, strides)
}

/// One input of elements of type `T`, read as pieces of rows in its wide type.
struct Operand<'a, T: Widen> {
    place: usize,
    data: &'a [T],
    repeated: bool,
    /// True if no buffer is needed, whatever the length.
    direct: bool,
    buf: Buffer<T::Wide>,
}

impl<'a, T: Widen> Operand<'a, T> {
    /// The operand at `place`.
    fn new(walk: &'a Walk<'_>, place: usize) -> Result<Operand<'a, T>> {
        let (_, tensor) = walk.tensors.iter().find(|(k, _)| *k == place).expect("every place is taken");
        let repeated = walk.nest.row_stride(place) == 0;
        let direct = T::NATIVE && !repeated;
        Ok(Operand { place, data: tensor.data()?, repeated, direct, buf: buffer::<T>(direct) })
    }

    fn piece(&mut self, at: &[usize; OPERANDS], start: usize, len: usize) -> &[T::Wide] {
        let row = at[self.place];
        if !self.repeated {
            return T::load(&self.data[row + start..][..len], &mut self.buf);
        }
        if start == 0 {
            // The first piece of a row is its longest.
            let mut wide = [T::Wide::default()];
            T::widen_into(&self.data[row..=row], &mut wide);
            self.buf[..len].fill(wide[0]);
        }
        &self.buf[..len]
    }
}

/// The output.
struct Out<O: Widen> {
    tensor: Tensor,
    buf: Buffer<O::Wide>,
}

impl<O: Widen> Out<O> {
    fn new(shape: &[usize]) -> Self {
        Out { tensor: Tensor::uninit(O::DTYPE, shape), buf: buffer::<O>(O::NATIVE) }
    }

    /// Has `run` write every piece, given its rows' offsets and its start in the row.
    fn each(
        &mut self,
        nest: &Nest<OPERANDS>,
        direct: bool,
        mut run: impl FnMut(&[usize; OPERANDS], usize, &mut [O::Wide]),
    ) {
        let chunk = if direct && O::NATIVE { usize::MAX } else { CHUNK };
        let (out, buf) = (as_elements_mut::<O>(self.tensor.bytes_mut()), &mut self.buf);
        nest.each_chunk(chunk, &mut |at, start, len, o| {
            O::store(&mut out[o..o + len], buf, |o| run(at, start, o));
        });
    }
}

/// Has `run` overwrite every piece of `a`, given a copy of it.
fn in_place<A: Widen>(
    a: &mut Tensor,
    nest: &Nest<OPERANDS>,
    mut run: impl FnMut(&[usize; OPERANDS], usize, &[A::Wide], &mut [A::Wide]),
) -> Result<()> {
    let (mut own, mut buf) = (buffer::<A>(false), buffer::<A>(A::NATIVE));
    let out = a.make_mut::<A>()?;
    nest.each_chunk(CHUNK, &mut |at, start, len, o| {
        let (out, own) = (&mut out[o..o + len], &mut own[..len]);
        A::widen_into(out, own);
        A::store(out, &mut buf, |o| run(at, start, own, o));
    });
    Ok(())
}

/// Room for one piece, unless none is needed.
fn buffer<T: Widen>(unneeded: bool) -> Buffer<T::Wide> {
    Buffer::new(if unneeded { 0 } else { CHUNK })
}

/// Elements whose first lies at a cache line's beginning, so that no load of a vector touches two.
struct Buffer<W> {
    all: Vec<W>,
    start: usize,
}

impl<W: Default + Clone> Buffer<W> {
    fn new(len: usize) -> Buffer<W> {
        const LINE_BYTES: usize = 64;
        let padding = if len == 0 { 0 } else { LINE_BYTES / size_of::<W>() };
        let all = vec![W::default(); len + padding];
        let start = all.as_ptr().align_offset(LINE_BYTES).min(padding);
        Buffer { all, start }
    }
}

impl<W> Deref for Buffer<W> {
    type Target = [W];
    fn deref(&self) -> &[W] {
        &self.all[self.start..]
    }
}

impl<W> DerefMut for Buffer<W> {
    fn deref_mut(&mut self) -> &mut [W] {
        &mut self.all[self.start..]
    }
}

struct Choose<'a, A> {
    condition: &'a [bool],
    on: bool,
    yes: &'a [A],
    no: &'a [A],
    o: &'a mut [A],
}

impl<A: Copy> Kernel for Choose<'_, A> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let both = self.yes.iter().zip(self.no);
        for (o, (&c, (&yes, &no))) in self.o.iter_mut().zip(self.condition.iter().zip(both)) {
            *o = select(c == self.on, yes, no);
        }
    }
}

//! Elementwise loops over one, two or three tensors of equal shape, in any strides, into a fresh contiguous tensor or
//! in place.
//!
//! The arithmetic is the caller's: a closure over the wide types (f32 for f16 and bf16), or a [`Map1`], [`Map2`],
//! [`Map3`] with an `#[inline(always)]` body where it is long. Every loop runs under [`dispatch`].
//! Broadcast inputs (stride 0) are repeated in a small buffer along rows and simply read again across them; inputs
//! whose rows are neither contiguous nor repeated are copied first, in tiles.

use std::borrow::Cow;

use super::real::Lane;
use super::simd::{Kernel, dispatch};
use super::{Nest, as_elements_mut};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// A function of one element.
pub trait Map1<A, O>: Copy {
    /// Its value.
    fn at(self, a: A) -> O;
}

/// A function of two elements.
pub trait Map2<A, B, O>: Copy {
    /// Its value.
    fn at(self, a: A, b: B) -> O;
}

/// A function of three elements.
pub trait Map3<A, B, C, O>: Copy {
    /// Its value.
    fn at(self, a: A, b: B, c: C) -> O;
}

/// A closure as a [`Map1`], [`Map2`] or [`Map3`].
#[derive(Clone, Copy)]
pub struct Closure<F>(pub F);

/// `f(a)`, element by element.
///
/// # Errors
/// Refuses a tensor whose dtype is not `A`'s.
pub fn map1<A: Lane, O: Lane, F>(a: &Tensor, f: F) -> Result<Tensor>
where
    F: Fn(A::Wide) -> O::Wide + Copy,
{
    map1_with::<A, O, _>(a, Closure(f))
}

/// `f(a, b)`, element by element.
///
/// # Errors
/// Refuses tensors whose dtypes are not `A`'s and `B`'s, or whose shapes differ.
pub fn map2<A: Lane, B: Lane, O: Lane, F>(a: &Tensor, b: &Tensor, f: F) -> Result<Tensor>
where
    F: Fn(A::Wide, B::Wide) -> O::Wide + Copy,
{
    map2_with::<A, B, O, _>(a, b, Closure(f))
}

/// `f(a, b, c)`, element by element.
///
/// # Errors
/// As [`map2`].
pub fn map3<A: Lane, B: Lane, C: Lane, O: Lane, F>(a: &Tensor, b: &Tensor, c: &Tensor, f: F) -> Result<Tensor>
where
    F: Fn(A::Wide, B::Wide, C::Wide) -> O::Wide + Copy,
{
    map3_with::<A, B, C, O, _>(a, b, c, Closure(f))
}

/// `a = f(a)`: in place where nobody shares `a`'s buffer, else into a fresh one that `a` then owns.
///
/// # Errors
/// As [`map1`].
pub fn map1_mut<A: Lane, F>(a: &mut Tensor, f: F) -> Result<()>
where
    F: Fn(A::Wide) -> A::Wide + Copy,
{
    map1_mut_with::<A, _>(a, Closure(f))
}

/// `a = f(a, b)`, as [`map1_mut`].
///
/// # Errors
/// As [`map2`].
pub fn map2_mut<A: Lane, B: Lane, F>(a: &mut Tensor, b: &Tensor, f: F) -> Result<()>
where
    F: Fn(A::Wide, B::Wide) -> A::Wide + Copy,
{
    map2_mut_with::<A, B, _>(a, b, Closure(f))
}

/// `a = f(a, b, c)`, as [`map1_mut`].
///
/// # Errors
/// As [`map2`].
pub fn map3_mut<A: Lane, B: Lane, C: Lane, F>(a: &mut Tensor, b: &Tensor, c: &Tensor, f: F) -> Result<()>
where
    F: Fn(A::Wide, B::Wide, C::Wide) -> A::Wide + Copy,
{
    map3_mut_with::<A, B, C, _>(a, b, c, Closure(f))
}

/// [`map1`] with a [`Map1`].
pub fn map1_with<A: Lane, O: Lane, M: Map1<A::Wide, O::Wide>>(a: &Tensor, f: M) -> Result<Tensor> {
    walk1::<A, O>(a, &|x, o| dispatch(Run1 { f, x, o }))
}

fn walk1<A: Lane, O: Lane>(a: &Tensor, run: Loop1<A, O>) -> Result<Tensor> {
    let ([a], nest) = lay_out(a.shape(), [a])?;
    let mut x = Operand::<A>::new(&a, nest.row_stride(0))?;
    let mut out = Out::<O>::new(a.shape());
    out.each(&nest, x.direct, |at, start, o| {
        run(x.chunk(at[0], start, o.len()), o);
    });
    Ok(out.tensor)
}

/// [`map2`] with a [`Map2`].
pub fn map2_with<A: Lane, B: Lane, O: Lane, M>(a: &Tensor, b: &Tensor, f: M) -> Result<Tensor>
where
    M: Map2<A::Wide, B::Wide, O::Wide>,
{
    walk2::<A, B, O>(a, b, &|x, y, o| dispatch(Run2 { f, x, y, o }))
}

fn walk2<A: Lane, B: Lane, O: Lane>(a: &Tensor, b: &Tensor, run: Loop2<A, B, O>) -> Result<Tensor> {
    let ([a, b], nest) = lay_out(a.shape(), [a, b])?;
    let mut x = Operand::<A>::new(&a, nest.row_stride(0))?;
    let mut y = Operand::<B>::new(&b, nest.row_stride(1))?;
    let mut out = Out::<O>::new(a.shape());
    out.each(&nest, x.direct && y.direct, |at, start, o| {
        run(x.chunk(at[0], start, o.len()), y.chunk(at[1], start, o.len()), o);
    });
    Ok(out.tensor)
}

/// [`map3`] with a [`Map3`].
pub fn map3_with<A: Lane, B: Lane, C: Lane, O: Lane, M>(
    a: &Tensor,
    b: &Tensor,
    c: &Tensor,
    f: M,
) -> Result<Tensor>
where
    M: Map3<A::Wide, B::Wide, C::Wide, O::Wide>,
{
    walk3::<A, B, C, O>([a, b, c], &|x, y, z, o| dispatch(Run3 { f, x, y, z, o }))
}

fn walk3<A: Lane, B: Lane, C: Lane, O: Lane>(
    [a, b, c]: [&Tensor; 3],
    run: Loop3<A, B, C, O>,
) -> Result<Tensor> {
    let ([a, b, c], nest) = lay_out(a.shape(), [a, b, c])?;
    let mut x = Operand::<A>::new(&a, nest.row_stride(0))?;
    let mut y = Operand::<B>::new(&b, nest.row_stride(1))?;
    let mut z = Operand::<C>::new(&c, nest.row_stride(2))?;
    let mut out = Out::<O>::new(a.shape());
    out.each(&nest, x.direct && y.direct && z.direct, |at, start, o| {
        let (x, y) = (x.chunk(at[0], start, o.len()), y.chunk(at[1], start, o.len()));
        run(x, y, z.chunk(at[2], start, o.len()), o);
    });
    Ok(out.tensor)
}

/// [`map1_mut`] with a [`Map1`].
pub fn map1_mut_with<A: Lane, M: Map1<A::Wide, A::Wide>>(a: &mut Tensor, f: M) -> Result<()> {
    if !a.is_unique() {
        *a = map1_with::<A, A, _>(a, f)?;
        return Ok(());
    }
    overwrite1::<A>(a, &|x, o| dispatch(Run1 { f, x, o }))
}

fn overwrite1<A: Lane>(a: &mut Tensor, run: Loop1<A, A>) -> Result<()> {
    let ([], nest) = lay_out(a.shape(), [])?;
    in_place::<A, 0>(a, &nest, |_, _, x, o| run(x, o))
}

/// [`map2_mut`] with a [`Map2`].
pub fn map2_mut_with<A: Lane, B: Lane, M>(a: &mut Tensor, b: &Tensor, f: M) -> Result<()>
where
    M: Map2<A::Wide, B::Wide, A::Wide>,
{
    if !a.is_unique() {
        *a = map2_with::<A, B, A, _>(a, b, f)?;
        return Ok(());
    }
    overwrite2::<A, B>(a, b, &|x, y, o| dispatch(Run2 { f, x, y, o }))
}

fn overwrite2<A: Lane, B: Lane>(a: &mut Tensor, b: &Tensor, run: Loop2<A, B, A>) -> Result<()> {
    let ([b], nest) = lay_out(a.shape(), [b])?;
    let mut y = Operand::<B>::new(&b, nest.row_stride(0))?;
    in_place::<A, 1>(a, &nest, |at, start, x, o| {
        run(x, y.chunk(at[0], start, o.len()), o);
    })
}

/// [`map3_mut`] with a [`Map3`].
pub fn map3_mut_with<A: Lane, B: Lane, C: Lane, M>(a: &mut Tensor, b: &Tensor, c: &Tensor, f: M) -> Result<()>
where
    M: Map3<A::Wide, B::Wide, C::Wide, A::Wide>,
{
    if !a.is_unique() {
        *a = map3_with::<A, B, C, A, _>(a, b, c, f)?;
        return Ok(());
    }
    overwrite3::<A, B, C>(a, [b, c], &|x, y, z, o| dispatch(Run3 { f, x, y, z, o }))
}

fn overwrite3<A: Lane, B: Lane, C: Lane>(
    a: &mut Tensor,
    [b, c]: [&Tensor; 2],
    run: Loop3<A, B, C, A>,
) -> Result<()> {
    let ([b, c], nest) = lay_out(a.shape(), [b, c])?;
    let mut y = Operand::<B>::new(&b, nest.row_stride(0))?;
    let mut z = Operand::<C>::new(&c, nest.row_stride(1))?;
    in_place::<A, 2>(a, &nest, |at, start, x, o| {
        let (y, z) = (y.chunk(at[0], start, o.len()), z.chunk(at[1], start, o.len()));
        run(x, y, z, o);
    })
}

/// `dst[i] = f(src[i])`, vectorised.
pub fn each<A: Copy, O: Copy>(src: &[A], dst: &mut [O], f: impl Fn(A) -> O + Copy) {
    dispatch(Run1 { f: Closure(f), x: src, o: dst });
}

/// The loop over one piece: all that is compiled for each function. The walk around it is compiled once for each
/// choice of dtypes.
type Loop1<'a, A, O> = &'a dyn Fn(&[Wide<A>], &mut [Wide<O>]);
type Loop2<'a, A, B, O> = &'a dyn Fn(&[Wide<A>], &[Wide<B>], &mut [Wide<O>]);
type Loop3<'a, A, B, C, O> = &'a dyn Fn(&[Wide<A>], &[Wide<B>], &[Wide<C>], &mut [Wide<O>]);
type Wide<T> = <T as Lane>::Wide;

/// What goes through a buffer goes in pieces of this length: all buffers together stay in the nearest cache.
const CHUNK: usize = 512;
/// Rows shorter than this cost more to walk than to copy.
const SHORT: usize = 32;

/// The tensors and their common walk; those with awkward strides as contiguous copies.
fn lay_out<'a, const N: usize>(
    shape: &[usize],
    tensors: [&'a Tensor; N],
) -> Result<([Cow<'a, Tensor>; N], Nest<N>)> {
    if let Some(t) = tensors.iter().find(|t| t.shape()[..] != *shape) {
        return Err(Error::invalid(
            "map",
            "the operands' shapes differ",
            format!("{shape:?}, {}", t.shape()),
            "expand them first",
        ));
    }
    let nest = Nest::new(shape, tensors.map(Tensor::strides));
    let short = nest.row_len() < SHORT && nest.rows() > 1;
    let awkward: [bool; N] = std::array::from_fn(|k| short || nest.row_stride(k) > 1);
    if !awkward.contains(&true) {
        return Ok((tensors.map(Cow::Borrowed), nest));
    }
    let tensors: [Cow<'a, Tensor>; N] = std::array::from_fn(|k| match awkward[k] {
        true => Cow::Owned(tensors[k].packed()),
        false => Cow::Borrowed(tensors[k]),
    });
    let nest = Nest::new(shape, std::array::from_fn(|k| tensors[k].strides()));
    Ok((tensors, nest))
}

/// One input, read as pieces of rows in its wide type.
struct Operand<'a, T: Lane> {
    data: &'a [T],
    repeated: bool,
    /// True where no buffer is needed, whatever the length.
    direct: bool,
    buf: Vec<T::Wide>,
}

impl<'a, T: Lane> Operand<'a, T> {
    fn new(tensor: &'a Tensor, row_stride: usize) -> Result<Self> {
        let repeated = row_stride == 0;
        let direct = T::NATIVE && !repeated;
        Ok(Operand { data: tensor.data()?, repeated, direct, buf: buffer::<T>(direct) })
    }

    fn chunk(&mut self, row: usize, start: usize, len: usize) -> &[T::Wide] {
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
struct Out<O: Lane> {
    tensor: Tensor,
    buf: Vec<O::Wide>,
}

impl<O: Lane> Out<O> {
    fn new(shape: &[usize]) -> Self {
        Out { tensor: Tensor::stale(O::DTYPE, shape), buf: buffer::<O>(O::NATIVE) }
    }

    /// Has `run` write every piece, given its row's offsets and its start in the row.
    fn each<const N: usize>(
        &mut self,
        nest: &Nest<N>,
        direct: bool,
        mut run: impl FnMut([usize; N], usize, &mut [O::Wide]),
    ) {
        let chunk = if direct && O::NATIVE { usize::MAX } else { CHUNK };
        let (out, buf) = (as_elements_mut::<O>(self.tensor.bytes_mut()), &mut self.buf);
        nest.each_chunk(chunk, &mut |at, start, len, o| {
            O::store(&mut out[o..o + len], buf, |o| run(at, start, o));
        });
    }
}

/// Has `run` overwrite every piece of `a`, given a copy of it.
fn in_place<A: Lane, const N: usize>(
    a: &mut Tensor,
    nest: &Nest<N>,
    mut run: impl FnMut([usize; N], usize, &[A::Wide], &mut [A::Wide]),
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
fn buffer<T: Lane>(unneeded: bool) -> Vec<T::Wide> {
    vec![T::Wide::default(); if unneeded { 0 } else { CHUNK }]
}

impl<A, O, F: Fn(A) -> O + Copy> Map1<A, O> for Closure<F> {
    #[inline(always)]
    fn at(self, a: A) -> O {
        (self.0)(a)
    }
}

impl<A, B, O, F: Fn(A, B) -> O + Copy> Map2<A, B, O> for Closure<F> {
    #[inline(always)]
    fn at(self, a: A, b: B) -> O {
        (self.0)(a, b)
    }
}

impl<A, B, C, O, F: Fn(A, B, C) -> O + Copy> Map3<A, B, C, O> for Closure<F> {
    #[inline(always)]
    fn at(self, a: A, b: B, c: C) -> O {
        (self.0)(a, b, c)
    }
}

struct Run1<'a, M, A, O> {
    f: M,
    x: &'a [A],
    o: &'a mut [O],
}

impl<A: Copy, O, M: Map1<A, O>> Kernel for Run1<'_, M, A, O> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (o, &x) in self.o.iter_mut().zip(self.x) {
            *o = self.f.at(x);
        }
    }
}

struct Run2<'a, M, A, B, O> {
    f: M,
    x: &'a [A],
    y: &'a [B],
    o: &'a mut [O],
}

impl<A: Copy, B: Copy, O, M: Map2<A, B, O>> Kernel for Run2<'_, M, A, B, O> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (o, (&x, &y)) in self.o.iter_mut().zip(self.x.iter().zip(self.y)) {
            *o = self.f.at(x, y);
        }
    }
}

struct Run3<'a, M, A, B, C, O> {
    f: M,
    x: &'a [A],
    y: &'a [B],
    z: &'a [C],
    o: &'a mut [O],
}

impl<A: Copy, B: Copy, C: Copy, O, M: Map3<A, B, C, O>> Kernel for Run3<'_, M, A, B, C, O> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (o, ((&x, &y), &z)) in self.o.iter_mut().zip(self.x.iter().zip(self.y).zip(self.z)) {
            *o = self.f.at(x, y, z);
        }
    }
}

//! Rejection, element by element: try k of element `e` reads block `e` of attempts that belong to k, so that nothing
//! depends on the neighbours. First tries are computed many at a time, and so are the few that follow.

use super::Draw;
use super::philox::{self, Blocks};
use super::sample::Sampled;
use crate::tensor::cpu::simd::{Kernel, dispatch};

/// Elements whose first tries are computed together, and those at a range's end and in later tries.
const CHUNK: usize = 32;
const SMALL: usize = 8;

/// A distribution by rejection.
pub(super) trait Method: Copy {
    /// What numbers and parameters are computed in.
    type Wide: Copy + Default;
    /// What a parameter gives once for all tries.
    type Setup: Copy;
    /// The number of tries that there are attempts for.
    const TRIES: u16;

    /// A parameter's setup; 1 is a parameter.
    fn setup(self, param: Self::Wide) -> Self::Setup;
    /// Numbers and whether they are accepted, try `k` of these elements.
    fn attempt<const N: usize>(
        self,
        k: u16,
        setups: &impl Setups<Self::Setup>,
        place: &Place<N>,
        out: &mut [Self::Wide; N],
        accepted: &mut [bool; N],
    );
    /// What is done to accepted numbers.
    fn finish<const N: usize>(
        self,
        _setups: &impl Setups<Self::Setup>,
        _place: &Place<N>,
        _out: &mut [Self::Wide; N],
    ) {
    }
}

/// Which elements are computed together.
pub(super) struct Place<const N: usize> {
    draw: Draw,
    index: [u64; N],
}

impl<const N: usize> Place<N> {
    /// One block each.
    #[inline(always)]
    pub(super) fn blocks(&self, attempt: u16) -> Blocks<N> {
        let (key, high) = (self.draw.key(), self.draw.counter_high(attempt));
        let mut out = Blocks([[0; 2]; N]);
        for (block, &index) in out.0.iter_mut().zip(&self.index) {
            *block = philox::pairs(key, index, high);
        }
        out
    }
}

/// The setups of the elements computed together.
pub(super) trait Setups<S> {
    /// Those of a few of them.
    type Picked: Setups<S>;
    /// That of lane `i`.
    fn at(&self, i: usize) -> S;
    /// Those of these lanes.
    fn pick(&self, lanes: &[usize; SMALL]) -> Self::Picked;
}

/// Where parameters come from.
pub(super) trait Source<M: Method>: Copy {
    /// The setups of elements computed together.
    type Setups<const N: usize>: Setups<M::Setup>;
    /// Those of elements `at..at + len`; lanes beyond have any.
    fn setups<const N: usize>(&self, method: M, at: usize, len: usize) -> Self::Setups<N>;
}

/// One parameter for all, set up.
#[derive(Clone, Copy)]
pub(super) struct Fixed<S>(pub S);

/// A parameter an element.
pub(super) struct Each<'a, T>(pub &'a [T]);

/// Parameters of the elements computed together.
pub(super) struct Lanes<M: Method, const N: usize>(M, [M::Wide; N]);

/// Writes the numbers of the elements from `start` on, by `store` from the type computed in.
pub(super) fn run<M: Method, T>(
    method: M,
    source: impl Source<M>,
    draw: Draw,
    start: u64,
    out: &mut [T],
    store: impl Fn(&[M::Wide], &mut [T]),
) {
    dispatch(Run { method, source, draw, start, out, store });
}

struct Run<'a, M, S, T, F> {
    method: M,
    source: S,
    draw: Draw,
    start: u64,
    out: &'a mut [T],
    store: F,
}

impl<M: Method, S: Source<M>, T, F: Fn(&[M::Wide], &mut [T])> Kernel for Run<'_, M, S, T, F> {
    type Out = ();
    #[inline(always)]
    fn run(mut self) {
        let mut at = 0;
        while at < self.out.len() {
            let left = self.out.len() - at;
            at += if left >= CHUNK { self.chunk::<CHUNK>(at, left) } else { self.chunk::<SMALL>(at, left) };
        }
    }
}

impl<M: Method, S: Source<M>, T, F: Fn(&[M::Wide], &mut [T])> Run<'_, M, S, T, F> {
    #[inline(always)]
    fn chunk<const N: usize>(&mut self, at: usize, left: usize) -> usize {
        let len = left.min(N);
        let setups = self.source.setups::<N>(self.method, at, len);
        let mut place = Place { draw: self.draw, index: [0; N] };
        let first = self.start.wrapping_add(at as u64);
        for (i, index) in place.index.iter_mut().enumerate() {
            *index = first.wrapping_add(i as u64);
        }
        let (mut numbers, mut accepted) = ([M::Wide::default(); N], [false; N]);
        self.method.attempt(0, &setups, &place, &mut numbers, &mut accepted);
        accepted[len..].fill(true);
        if accepted.iter().fold(false, |any, a| any | !a) {
            again(self.method, &setups, &place, &mut numbers, &accepted);
        }
        self.method.finish(&setups, &place, &mut numbers);
        (self.store)(&numbers[..len], &mut self.out[at..at + len]);
        len
    }
}

/// Further tries of those that were not accepted.
#[inline(always)]
fn again<M: Method, P: Setups<M::Setup>, const N: usize>(
    method: M,
    setups: &P,
    place: &Place<N>,
    numbers: &mut [M::Wide; N],
    accepted: &[bool; N],
) {
    let (mut waiting, mut count) = ([0; N], 0);
    for (i, _) in accepted.iter().enumerate().filter(|(_, a)| !**a) {
        waiting[count] = i;
        count += 1;
    }
    for k in 1..M::TRIES {
        let mut left = 0;
        for group in (0..count).step_by(SMALL) {
            let len = SMALL.min(count - group);
            let mut lanes = [waiting[group]; SMALL];
            lanes[..len].copy_from_slice(&waiting[group..group + len]);
            let few = Place { draw: place.draw, index: lanes.map(|lane| place.index[lane]) };
            let (mut tried, mut good) = ([M::Wide::default(); SMALL], [false; SMALL]);
            method.attempt(k, &setups.pick(&lanes), &few, &mut tried, &mut good);
            for (i, &lane) in lanes.iter().enumerate().take(len) {
                numbers[lane] = tried[i];
                if !good[i] {
                    waiting[left] = lane;
                    left += 1;
                }
            }
        }
        count = left;
        if count == 0 {
            return;
        }
    }
}

impl<S: Copy> Setups<S> for Fixed<S> {
    type Picked = Fixed<S>;
    #[inline(always)]
    fn at(&self, _: usize) -> S {
        self.0
    }
    #[inline(always)]
    fn pick(&self, _: &[usize; SMALL]) -> Fixed<S> {
        *self
    }
}

impl<M: Method> Source<M> for Fixed<M::Setup> {
    type Setups<const N: usize> = Fixed<M::Setup>;
    #[inline(always)]
    fn setups<const N: usize>(&self, _: M, _: usize, _: usize) -> Fixed<M::Setup> {
        *self
    }
}

impl<T> Clone for Each<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Each<'_, T> {}

impl<M: Method, const N: usize> Setups<M::Setup> for Lanes<M, N> {
    type Picked = Lanes<M, SMALL>;
    #[inline(always)]
    fn at(&self, i: usize) -> M::Setup {
        self.0.setup(self.1[i])
    }
    #[inline(always)]
    fn pick(&self, lanes: &[usize; SMALL]) -> Lanes<M, SMALL> {
        Lanes(self.0, lanes.map(|lane| self.1[lane]))
    }
}

impl<T: Sampled, M: Method<Wide = T::Wide>> Source<M> for Each<'_, T> {
    type Setups<const N: usize> = Lanes<M, N>;
    #[inline(always)]
    fn setups<const N: usize>(&self, method: M, at: usize, len: usize) -> Lanes<M, N> {
        let mut lanes = [<T::Wide as crate::tensor::Element>::from_f64(1.0); N];
        T::load(&self.0[at..at + len], &mut lanes[..len]);
        Lanes(method, lanes)
    }
}

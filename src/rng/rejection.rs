//! Rejection, element by element: try k of element `e` reads block `e` of attempts that belong to k, so that nothing
//! depends on the neighbours. First tries are computed many at a time, and so are the few that follow.

use super::Draw;
use super::index_ranges::IndexRanges;
use super::philox::{self, Blocks};
use super::sample::PIECE;
use crate::tensor::cpu::simd::{Kernel, dispatch};

/// Elements computed together: loops over them vectorise.
pub(super) const LANES: usize = 32;

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
    fn attempt(
        self,
        k: u16,
        setups: &impl Setups<Self::Setup>,
        place: &Place,
        out: &mut [Self::Wide; LANES],
        accepted: &mut [bool; LANES],
    );
    /// What is done to accepted numbers.
    fn finish(self, _setups: &impl Setups<Self::Setup>, _place: &Place, _out: &mut [Self::Wide; LANES]) {}
}

/// Which elements are computed together.
pub(super) struct Place {
    draw: Draw,
    index: [u64; LANES],
}

impl Place {
    /// One block each.
    #[inline(always)]
    pub(super) fn blocks(&self, attempt: u16) -> Blocks<LANES> {
        let (key, high) = (self.draw.key(), self.draw.counter_high(attempt));
        let mut out = Blocks([[0; 2]; LANES]);
        for (block, &index) in out.0.iter_mut().zip(&self.index) {
            *block = philox::pairs(key, index, high);
        }
        out
    }
}

/// The setups of the elements computed together.
pub(super) trait Setups<S> {
    /// That of lane `i`.
    fn at(&self, i: usize) -> S;
}

/// Where parameters come from.
pub(super) trait Source<M: Method> {
    /// The setups of elements computed together.
    type Setups: Setups<M::Setup>;
    /// Those of these elements of the range.
    fn setups(&self, method: M, elements: &[usize; LANES]) -> Self::Setups;
}

/// One parameter for all, set up.
#[derive(Clone, Copy)]
pub(super) struct Fixed<S>(pub S);

/// A parameter an element.
pub(super) struct Each<'a, T>(pub &'a [T]);

/// Parameters of the elements computed together.
pub(super) struct Lanes<M: Method>(M, [M::Wide; LANES]);

/// Writes the numbers of these elements.
pub(super) fn run<M: Method>(
    method: M,
    source: impl Source<M>,
    draw: Draw,
    at: IndexRanges<'_>,
    out: &mut [M::Wide],
) {
    dispatch(Run { method, source, draw, at, out });
}

struct Run<'a, M: Method, S> {
    method: M,
    source: S,
    draw: Draw,
    at: IndexRanges<'a>,
    out: &'a mut [M::Wide],
}

impl<M: Method, S: Source<M>> Kernel for Run<'_, M, S> {
    type Out = ();
    #[inline(always)]
    fn run(mut self) {
        let mut numbers = [M::Wide::default(); PIECE];
        let (mut waiting, mut index) = ([0; PIECE], [0; PIECE]);
        for at in (0..self.out.len()).step_by(PIECE) {
            let len = PIECE.min(self.out.len() - at);
            for (i, waiting) in waiting.iter_mut().enumerate() {
                *waiting = i;
            }
            self.at.write(&mut index[..len]);
            self.at.advance(len);
            let mut count = len;
            let mut k = 0;
            while count > 0 && k < M::TRIES {
                count = self.tries(k, at, &index, &mut waiting, count, &mut numbers);
                k += 1;
            }
            self.out[at..at + len].copy_from_slice(&numbers[..len]);
        }
    }
}

impl<M: Method, S: Source<M>> Run<'_, M, S> {
    /// Try `k` of the first `count` elements that wait, counted from `at`, where `index` begins; what still waits moves to the front.
    #[inline(always)]
    fn tries(
        &mut self,
        k: u16,
        at: usize,
        index: &[u64; PIECE],
        waiting: &mut [usize; PIECE],
        count: usize,
        numbers: &mut [M::Wide; PIECE],
    ) -> usize {
        let mut left = 0;
        for group in (0..count).step_by(LANES) {
            let len = LANES.min(count - group);
            let mut elements = [at + waiting[group]; LANES];
            for (element, &waiting) in elements.iter_mut().zip(&waiting[group..group + len]) {
                *element = at + waiting;
            }
            let mut place = Place { draw: self.draw, index: [0; LANES] };
            for (place, &element) in place.index.iter_mut().zip(&elements) {
                *place = index[(element - at) % PIECE];
            }
            let setups = self.source.setups(self.method, &elements);
            let (mut tried, mut accepted) = ([M::Wide::default(); LANES], [false; LANES]);
            self.method.attempt(k, &setups, &place, &mut tried, &mut accepted);
            self.method.finish(&setups, &place, &mut tried);
            for (i, &number) in tried.iter().enumerate().take(len) {
                let lane = waiting[group + i];
                numbers[lane % PIECE] = number;
                waiting[left] = lane;
                left += usize::from(!accepted[i]);
            }
        }
        left
    }
}

impl<S: Copy> Setups<S> for Fixed<S> {
    #[inline(always)]
    fn at(&self, _: usize) -> S {
        self.0
    }
}

impl<M: Method> Source<M> for Fixed<M::Setup> {
    type Setups = Fixed<M::Setup>;
    #[inline(always)]
    fn setups(&self, _: M, _: &[usize; LANES]) -> Fixed<M::Setup> {
        *self
    }
}

impl<M: Method> Setups<M::Setup> for Lanes<M> {
    #[inline(always)]
    fn at(&self, i: usize) -> M::Setup {
        self.0.setup(self.1[i])
    }
}

impl<M: Method> Source<M> for Each<'_, M::Wide> {
    type Setups = Lanes<M>;
    #[inline(always)]
    fn setups(&self, method: M, elements: &[usize; LANES]) -> Lanes<M> {
        let mut params = [M::Wide::default(); LANES];
        for (param, &element) in params.iter_mut().zip(elements) {
            *param = self.0[element];
        }
        Lanes(method, params)
    }
}

//! Rejection sampling per element. Attempt k of element `e` reads block `e` of the draw's attempts that belong to k, so an
//! element does not depend on its neighbours. First attempts are vectorised over 32 elements, and so are the few that follow.

use super::sample::PIECE;
use crate::rng::Draw;
use crate::rng::counter::index_ranges::IndexRanges;
use crate::rng::counter::philox::{self, PhiloxBlocks};
use crate::tensor::cpu::{Isa, Kernel, dispatch};

/// Elements per vectorised group.
pub(in crate::rng) const LANES: usize = 32;

/// A distribution that is sampled by rejection.
pub(in crate::rng) trait RejectionMethod: Copy {
    /// The type that numbers and parameters are computed in.
    type Wide: Copy + Default;
    /// Values that are computed once per parameter.
    type Setup: Copy;
    /// The largest number of attempts.
    const ATTEMPTS: u16;
    /// [`Kernel::WIDEST`] of the loop.
    const WIDEST: Isa = Isa::Avx2;

    /// Computes a parameter's setup. 1 must be a valid parameter.
    fn setup(self, param: Self::Wide) -> Self::Setup;
    /// Computes attempt `k` of these elements: numbers, and true for each accepted one.
    fn attempt(
        self,
        k: u16,
        setups: &impl LaneSetups<Self::Setup>,
        lanes: &ElementLanes,
        out: &mut [Self::Wide; LANES],
        accepted: &mut [bool; LANES],
    );
    /// Transforms the numbers of accepted attempts.
    fn finish(
        self,
        _setups: &impl LaneSetups<Self::Setup>,
        _place: &ElementLanes,
        _out: &mut [Self::Wide; LANES],
    ) {
    }
}

/// The elements of one vectorised group.
pub(in crate::rng) struct ElementLanes {
    draw: Draw,
    index: [u64; LANES],
}

impl ElementLanes {
    /// Returns one block per element.
    #[inline(always)]
    pub(in crate::rng) fn blocks(&self, attempt: u16) -> PhiloxBlocks<LANES> {
        let (key, high) = (self.draw.key(), self.draw.counter_high(attempt));
        let mut out = PhiloxBlocks([[0; 2]; LANES]);
        for (block, &index) in out.0.iter_mut().zip(&self.index) {
            *block = philox::pairs(key, index, high);
        }
        out
    }
}

/// The setups of one group.
pub(in crate::rng) trait LaneSetups<S> {
    /// Returns the setup of lane `i`.
    fn at(&self, i: usize) -> S;
}

/// The parameters of a fill.
pub(in crate::rng) trait SetupSource<M: RejectionMethod> {
    /// The setups of one group.
    type Lanes: LaneSetups<M::Setup>;
    /// Returns the setups of these elements of the range.
    fn setups(&self, method: M, elements: &[usize; LANES]) -> Self::Lanes;
}

/// One parameter for all elements.
#[derive(Clone, Copy)]
pub(in crate::rng) struct SharedSetup<S>(pub S);

/// One parameter per element.
pub(in crate::rng) struct PerElement<'a, T>(pub &'a [T]);

/// The parameters of one group.
pub(in crate::rng) struct LaneParams<M: RejectionMethod>(M, [M::Wide; LANES]);

/// Writes the numbers of these elements.
pub(in crate::rng) fn run<M: RejectionMethod>(
    method: M,
    source: impl SetupSource<M>,
    draw: Draw,
    at: IndexRanges<'_>,
    out: &mut [M::Wide],
) {
    dispatch(Run { method, source, draw, at, out });
}

struct Run<'a, M: RejectionMethod, S> {
    method: M,
    source: S,
    draw: Draw,
    at: IndexRanges<'a>,
    out: &'a mut [M::Wide],
}

impl<M: RejectionMethod, S: SetupSource<M>> Kernel for Run<'_, M, S> {
    type Out = ();
    const WIDEST: Isa = M::WIDEST;
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
            while count > 0 && k < M::ATTEMPTS {
                count = self.attempt_group(k, at, &index, &mut waiting, count, &mut numbers);
                k += 1;
            }
            self.out[at..at + len].copy_from_slice(&numbers[..len]);
        }
    }
}

impl<M: RejectionMethod, S: SetupSource<M>> Run<'_, M, S> {
    /// Makes attempt `k` of the first `count` waiting elements, counted from `at`, where `index` begins. Moves those that are
    /// rejected again to the front and returns their number.
    #[inline(always)]
    fn attempt_group(
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
            let mut lanes = ElementLanes { draw: self.draw, index: [0; LANES] };
            for (lanes, &element) in lanes.index.iter_mut().zip(&elements) {
                *lanes = index[(element - at) % PIECE];
            }
            let setups = self.source.setups(self.method, &elements);
            let (mut tried, mut accepted) = ([M::Wide::default(); LANES], [false; LANES]);
            self.method.attempt(k, &setups, &lanes, &mut tried, &mut accepted);
            self.method.finish(&setups, &lanes, &mut tried);
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

impl<S: Copy> LaneSetups<S> for SharedSetup<S> {
    #[inline(always)]
    fn at(&self, _: usize) -> S {
        self.0
    }
}

impl<M: RejectionMethod> SetupSource<M> for SharedSetup<M::Setup> {
    type Lanes = SharedSetup<M::Setup>;
    #[inline(always)]
    fn setups(&self, _: M, _: &[usize; LANES]) -> SharedSetup<M::Setup> {
        *self
    }
}

impl<M: RejectionMethod> LaneSetups<M::Setup> for LaneParams<M> {
    #[inline(always)]
    fn at(&self, i: usize) -> M::Setup {
        self.0.setup(self.1[i])
    }
}

impl<M: RejectionMethod> SetupSource<M> for PerElement<'_, M::Wide> {
    type Lanes = LaneParams<M>;
    #[inline(always)]
    fn setups(&self, method: M, elements: &[usize; LANES]) -> LaneParams<M> {
        let mut params = [M::Wide::default(); LANES];
        for (param, &element) in params.iter_mut().zip(elements) {
            *param = self.0[element];
        }
        LaneParams(method, params)
    }
}

//! The steps of optimizers on pieces of parameters.

use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::loops::formulas::widest_of;
use crate::num::real::Real;

/// A type of the arithmetic of an optimizer's step: f32 or f64.
///
/// ```
/// use isoshard_kernels::loops::{OptimizerStep, SgdLoop};
/// let (mut b, mut out) = ([0.0f64], [0.0]);
/// let (scale, momentum, decay, step, nesterov) = (1.0, 0.5, 0.0, -0.25, false);
/// f64::sgd(SgdLoop { scale, momentum, decay, step, nesterov, p: &[3.0], g: &[4.0], b: &mut b, out: &mut out });
/// assert_eq!((b, out), ([4.0], [2.0]));
/// ```
pub trait OptimizerStep: Real {
    /// Makes a step of AdamW.
    fn adamw(step: AdamWLoop<'_, Self>);
    /// Makes a step of stochastic gradient descent.
    fn sgd(step: SgdLoop<'_, Self>);
}

macro_rules! optimizer_step {
    ($($t:ty)*) => {$(
        impl OptimizerStep for $t {
            fn adamw(step: AdamWLoop<'_, $t>) {
                dispatch(step);
            }

            fn sgd(step: SgdLoop<'_, $t>) {
                dispatch(step);
            }
        }
    )*};
}
optimizer_step!(f32 f64);

/// The numbers of a step of AdamW, in the dtype of the arithmetic.
#[derive(Clone, Copy)]
pub struct AdamWFactors<A> {
    /// The factor of the gradient.
    pub scale: A,
    /// β1, the decay of the running mean of gradients.
    pub beta1: A,
    /// β2, the decay of the running mean of their squares.
    pub beta2: A,
    /// `1 - β1`
    pub rest1: A,
    /// `1 - β2`
    pub rest2: A,
    /// ε, added to the square root.
    pub eps: A,
    /// The factor of the parameter.
    pub keep: A,
    /// The negative learning rate divided by c1.
    pub step: A,
    /// 1 / sqrt(c2).
    pub root: A,
}

/// A step of AdamW on one piece of a parameter.
pub struct AdamWLoop<'a, A> {
    /// The numbers of the step.
    pub factors: AdamWFactors<A>,
    /// The parameter.
    pub p: &'a [A],
    /// The gradient.
    pub g: &'a [A],
    /// The running mean of gradients.
    pub m: &'a mut [A],
    /// The running mean of their squares.
    pub v: &'a mut [A],
    /// The new parameter.
    pub out: &'a mut [A],
}

impl<A: Real> Kernel for AdamWLoop<'_, A> {
    type Out = ();
    const WIDEST: Isa = widest_of::<A>();
    #[inline(always)]
    fn run(self) {
        let r = self.factors;
        let moments = self.m.iter_mut().zip(self.v);
        for (((out, &p), &g), (m, v)) in self.out.iter_mut().zip(self.p).zip(self.g).zip(moments) {
            let g = g * r.scale;
            *m = r.beta1.mul_add(*m, r.rest1 * g);
            *v = r.beta2.mul_add(*v, r.rest2 * (g * g));
            let root = v.sqrt().mul_add(r.root, r.eps);
            *out = r.step.mul_add(*m / root, r.keep * p);
        }
    }
}

/// A step of stochastic gradient descent on one piece of a parameter.
pub struct SgdLoop<'a, A> {
    /// The factor of the gradient.
    pub scale: A,
    /// The decay of the momentum.
    pub momentum: A,
    /// The weight decay.
    pub decay: A,
    /// The negative learning rate.
    pub step: A,
    /// True for Nesterov momentum.
    pub nesterov: bool,
    /// The parameter.
    pub p: &'a [A],
    /// The gradient.
    pub g: &'a [A],
    /// The momentum.
    pub b: &'a mut [A],
    /// The new parameter.
    pub out: &'a mut [A],
}

impl<A: Real> Kernel for SgdLoop<'_, A> {
    type Out = ();
    const WIDEST: Isa = widest_of::<A>();
    #[inline(always)]
    fn run(self) {
        for (((out, &p), &g), b) in self.out.iter_mut().zip(self.p).zip(self.g).zip(self.b) {
            let d = self.scale.mul_add(g, self.decay * p);
            *b = self.momentum.mul_add(*b, d);
            let direction = if self.nesterov { self.momentum.mul_add(*b, d) } else { *b };
            *out = self.step.mul_add(direction, p);
        }
    }
}

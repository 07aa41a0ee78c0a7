//! Kernels of pointwise operators that write the result over an operand nobody else needs.
//!
//! In an eager step most operands are such: their buffer is warm in the cache, and a fresh one is not.

use crate::error::Result;
use crate::tensor::Tensor;
use crate::tensor::cpu::{self, BinaryF, BinaryN, Num, Real, TernaryF, UnaryF};

/// `op(x)` for floating dtypes.
pub(super) fn float_unary(verb: &str, ins: &mut [Tensor], op: impl UnaryF) -> Result<Tensor> {
    cpu::float_unary_mut(verb, &mut ins[0], op)?;
    Ok(ins[0].clone())
}

/// `op(x, y)` for floating dtypes, over `x` or over `y`.
pub(super) fn float_binary(verb: &str, ins: &mut [Tensor], op: impl BinaryF) -> Result<Tensor> {
    let (x, y) = pair(ins);
    if !x.is_unique() && y.is_unique() {
        cpu::float_binary_mut(verb, y, x, Swapped(op))?;
        return Ok(y.clone());
    }
    cpu::float_binary_mut(verb, x, y, op)?;
    Ok(x.clone())
}

/// `op(x, y, z)` for floating dtypes, over `x`.
pub(super) fn float_ternary(verb: &str, ins: &mut [Tensor], op: impl TernaryF) -> Result<Tensor> {
    let (x, rest) = ins.split_first_mut().expect("infer has counted the operands");
    cpu::float_ternary_mut(verb, x, &rest[0], &rest[1], op)?;
    Ok(x.clone())
}

/// `op(x, y)` for every dtype but bool, over `x` or over `y`.
pub(super) fn num_binary(verb: &str, ins: &mut [Tensor], op: impl BinaryN) -> Result<Tensor> {
    let (x, y) = pair(ins);
    if !x.is_unique() && y.is_unique() {
        cpu::num_binary_mut(verb, y, x, Swapped(op))?;
        return Ok(y.clone());
    }
    cpu::num_binary_mut(verb, x, y, op)?;
    Ok(x.clone())
}

fn pair(ins: &mut [Tensor]) -> (&mut Tensor, &mut Tensor) {
    let [x, y] = ins else { unreachable!("infer has counted the operands") };
    (x, y)
}

/// The same function of its operands in the other order.
#[derive(Clone, Copy)]
struct Swapped<U>(U);

impl<U: BinaryF> BinaryF for Swapped<U> {
    #[inline(always)]
    fn apply<A: Real>(self, x: A, y: A) -> A {
        self.0.apply(y, x)
    }
}

impl<U: BinaryN> BinaryN for Swapped<U> {
    #[inline(always)]
    fn apply<A: Num>(self, x: A, y: A) -> A {
        self.0.apply(y, x)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Sub, eval_whole};
    use super::*;

    /// `x - y`, where `whose` says which operands the call owns alone; whether it wrote over one of them.
    fn sub(own_x: bool, own_y: bool) -> (Vec<i32>, Option<usize>) {
        let mut ins =
            [[5, 7, -2], [3, 0, 9]].map(|v| Tensor::from_vec(v.to_vec(), [3]).expect("three elements"));
        let places: Vec<*const i32> = ins.iter().map(|t| t.data::<i32>().expect("i32").as_ptr()).collect();
        let shared = [own_x, own_y].map(|own| !own);
        let _others: Vec<Tensor> =
            ins.iter().zip(shared).filter(|(_, s)| *s).map(|(t, _)| t.clone()).collect();
        let out = num_binary("sub", &mut ins, Sub).expect("legal");
        let place = out.data::<i32>().expect("i32").as_ptr();
        (out.to_vec().expect("i32"), places.iter().position(|&p| p == place))
    }

    #[test]
    fn the_result_lies_over_an_operand_that_nobody_else_holds() {
        let want = vec![2, 7, -11];
        assert_eq!(sub(true, true), (want.clone(), Some(0)));
        assert_eq!(sub(true, false), (want.clone(), Some(0)));
        assert_eq!(sub(false, true), (want.clone(), Some(1)));
        assert_eq!(sub(false, false), (want, None));
    }

    #[test]
    fn one_tensor_as_both_operands_is_left_alone() {
        let x = Tensor::from_vec(vec![1.5f32, -2.0], [2]).expect("two elements");
        let out = eval_whole(&Sub, &[x.clone(), x.clone()]).expect("legal");
        assert_eq!(out[0].to_f64_vec(), [0.0, 0.0]);
        assert_eq!(x.to_f64_vec(), [1.5, -2.0]);
    }
}

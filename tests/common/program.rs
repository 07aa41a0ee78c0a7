//! Random programs as proptest strategies: chains of operators that are exact on small integers by construction.

use std::sync::Arc;

use isoshard::Result;
use isoshard::dtensor::DTensor;
use isoshard::tensor::Shape;
use proptest::collection::vec;
use proptest::prelude::*;

/// A program: each value is a leaf, or the result of an operator on earlier values. The last value is the result.
#[derive(Clone, Debug)]
pub struct Program(pub Vec<Value>);

#[derive(Clone, Debug)]
pub struct Value {
    /// The operator and its operands; `None` for a leaf.
    pub from: Option<(Act, Vec<usize>)>,
    pub shape: Shape,
    /// A bound on every element, and on every sum of some of an element's terms.
    bound: f64,
}

/// An operator.
#[derive(Clone, Debug)]
pub enum Act {
    Add,
    Sub,
    Mul,
    Maximum,
    Minimum,
    Matmul,
    Neg,
    Relu,
    Double,
    Sum { dims: Vec<isize>, keep: bool },
    Max { dims: Vec<isize>, keep: bool },
    Reshape(Shape),
    Permute(Vec<isize>),
    Slice { dim: isize, start: usize, len: usize },
    Cat(isize),
    Flip(isize),
    Roll { dim: isize, by: isize },
    Repeat { dim: isize, times: usize },
    Clamp { min: f64, max: f64 },
    Tril(i64),
}

pub const KINDS: usize = 20;
/// The largest number that programs may reach: with a binary place for halves it fits 24 bits.
const LIMIT: f64 = 4_194_304.0;
/// The largest absolute value in leaf tensors, and in the gradient that a backward pass starts from.
const LEAF: f64 = 3.0;
/// The largest absolute value in a part of that gradient: one part may offset all other parts.
const SEED: f64 = 32.0;

/// Programs of up to six steps; they shrink to few steps on the latest values of small shapes.
pub fn programs() -> impl Strategy<Value = Arc<Program>> {
    let extent = prop_oneof![9 => 1..=6usize, 1 => Just(0usize)];
    // The longest prefix that stays in bounds is the program.
    of_steps(vec(extent, 0..=3), |program| program.largest() <= LIMIT)
}

/// Programs with dims longer than a leaf of the reduction tree, and no bound on their numbers.
pub fn long_programs() -> impl Strategy<Value = Arc<Program>> {
    let extent = prop_oneof![3 => 1..=4usize, 4 => prop::sample::select(vec![33usize, 40, 64, 70])];
    let numel = |p: &Program| p.0.iter().map(|v| v.shape.numel()).max().unwrap_or(0);
    let first = vec(extent, 1..=3).prop_map(|mut shape| {
        while shape.iter().product::<usize>() > 6000 {
            shape.remove(0);
        }
        shape
    });
    of_steps(first, move |program| numel(program) <= 10_000)
}

/// Programs that begin with a leaf of such a shape and satisfy `bounds`.
fn of_steps(
    first: impl Strategy<Value = Vec<usize>>,
    bounds: impl Fn(&Program) -> bool,
) -> impl Strategy<Value = Arc<Program>> {
    let step = (0..KINDS, any::<[u8; 4]>());
    (first, vec(step, 1..=6)).prop_map(move |(first, steps)| {
        let mut program = Program(vec![Value::leaf(Shape::from(first))]);
        for (kind, bits) in steps {
            let mut longer = program.clone();
            longer.grow(kind, bits);
            if !bounds(&longer) {
                break;
            }
            program = longer;
        }
        Arc::new(program)
    })
}

impl Program {
    /// Adds a step that `bits` choose: zeros mean the simplest choice.
    fn grow(&mut self, kind: usize, bits: [u8; 4]) {
        let [which, other, p, q] = bits.map(usize::from);
        let last = self.0.len() - 1;
        let a = if which < 160 { last } else { which % (last + 1) };
        let (shape, n) = (self.0[a].shape.clone(), self.0[a].shape.len());
        let dim = if n == 0 { 0 } else { p % n };
        let some_dims: Vec<isize> = (0..n).filter(|d| p >> d & 1 == 0).map(|d| d as isize).collect();
        let act = match kind {
            0 => Act::Add,
            1 => Act::Sub,
            2 => Act::Mul,
            3 => Act::Maximum,
            4 => Act::Minimum,
            5 if n >= 2 => return self.matmul(a, other, p),
            6 => Act::Neg,
            7 => Act::Relu,
            8 => Act::Double,
            9 => Act::Sum { dims: some_dims, keep: q % 2 == 1 },
            10 if !some_dims.iter().any(|&d| shape[d as usize] == 0) => {
                Act::Max { dims: some_dims, keep: q % 2 == 1 }
            }
            11 => Act::Reshape(reshaped(&shape, p, q)),
            12 => {
                let to = |d: usize| if p % 2 == 0 { n - 1 - d } else { (d + 1) % n };
                Act::Permute((0..n).map(|d| to(d) as isize).collect())
            }
            13 if n > 0 => {
                let start = q % (shape[dim] + 1);
                Act::Slice { dim: dim as isize, start, len: (shape[dim] - start).div_ceil(1 + other % 2) }
            }
            14 if n > 0 => Act::Cat(dim as isize),
            15 if n > 0 => Act::Flip(dim as isize),
            16 if n > 0 => Act::Roll { dim: dim as isize, by: q as isize - 128 },
            17 if n > 0 && shape.numel() <= 512 => Act::Repeat { dim: dim as isize, times: 1 + q % 2 },
            18 => Act::Clamp { min: -1.0 - (p % 4) as f64, max: 1.0 + (q % 4) as f64 },
            19 if n > 1 => Act::Tril(q as i64 % 5 - 2),
            _ => Act::Neg,
        };
        if matches!(act, Act::Cat(_)) {
            let like = |v: &Value| {
                v.shape.len() == n && (0..n).all(|d| d == dim || v.shape[d] == shape[d]) && v.shape[dim] < 16
            };
            let mut wider = shape.to_vec();
            wider[dim] = q % 4;
            let b = self.second(other, like, Shape::from(wider));
            return self.push(act, vec![a, b]);
        }
        if act.kind() > 4 {
            return self.push(act, vec![a]);
        }
        // The other operand may broadcast: bits choose which of its dims are 1, and whether it has the first.
        let mut narrower: Vec<usize> = (0..n).map(|d| if p >> d & 1 == 1 { 1 } else { shape[d] }).collect();
        narrower.drain(..usize::from(p & 0x40 != 0).min(n));
        let fits = |v: &Value| v.shape.broadcast("fit", &shape).is_ok_and(|s| s.numel() <= 1024);
        let b = self.second(other, fits, Shape::from(narrower));
        self.push(act, if q % 2 == 0 { vec![a, b] } else { vec![b, a] });
    }

    fn matmul(&mut self, a: usize, other: usize, p: usize) {
        let shape = self.0[a].shape.clone();
        let (batch, k) = (&shape[..shape.len() - 2], shape[shape.len() - 1]);
        let fits = |v: &Value| {
            let s = &v.shape;
            s.len() >= 2 && s[s.len() - 2] == k && (s.len() == 2 || s[..s.len() - 2] == *batch)
        };
        let mut fresh = if p & 0x40 != 0 { batch.to_vec() } else { Vec::new() };
        fresh.extend([k, [1, 2, 3, 5][p % 4]]);
        let b = self.second(other, fits, Shape::from(fresh));
        self.push(Act::Matmul, vec![a, b]);
    }

    /// Returns an earlier value that `fits`, or a new leaf.
    fn second(&mut self, bits: usize, fits: impl Fn(&Value) -> bool, fresh: Shape) -> usize {
        let there: Vec<usize> = (0..self.0.len()).filter(|&i| fits(&self.0[i])).collect();
        if bits >= 100 && !there.is_empty() {
            return there[bits % there.len()];
        }
        self.0.push(Value::leaf(fresh));
        self.0.len() - 1
    }

    fn push(&mut self, act: Act, ins: Vec<usize>) {
        let of: Vec<&Value> = ins.iter().map(|&i| &self.0[i]).collect();
        let (shape, bound) = (act.shape(&of), act.bound(&of));
        self.0.push(Value { from: Some((act, ins)), shape, bound });
    }

    pub fn acts(&self) -> impl Iterator<Item = &(Act, Vec<usize>)> {
        self.0.iter().filter_map(|v| v.from.as_ref())
    }

    /// False if a maximum over more than two elements may split a gradient among ties, in thirds.
    pub fn has_gradients(&self) -> bool {
        self.acts().all(|(act, ins)| match act {
            Act::Max { dims, .. } => {
                dims.iter().map(|&d| self.0[ins[0]].shape[d as usize]).product::<usize>() <= 2
            }
            _ => true,
        })
    }

    /// A bound on every number in the program and its derivative, in units of the smallest fraction.
    fn largest(&self) -> f64 {
        let mut grads = vec![0.0; self.0.len()];
        *grads.last_mut().expect("a program has a value") = SEED;
        let mut unit = 1.0;
        for (i, value) in self.0.iter().enumerate().rev() {
            let Some((act, ins)) = &value.from else { continue };
            if matches!(act, Act::Maximum | Act::Minimum | Act::Max { .. }) {
                unit *= 2.0;
            }
            for (at, &of) in ins.iter().enumerate() {
                let from = &self.0[of];
                // A repeated element receives the gradients of all its copies.
                let copies = value.shape.numel() as f64 / from.shape.numel().max(1) as f64;
                grads[of] += grads[i]
                    * match act {
                        Act::Mul => self.0[ins[1 - at]].bound * copies.max(1.0),
                        Act::Matmul => self.0[ins[1 - at]].bound * value.shape.numel() as f64,
                        Act::Double => 2.0,
                        Act::Repeat { times, .. } => *times as f64,
                        Act::Add | Act::Sub | Act::Maximum | Act::Minimum => copies.max(1.0),
                        _ => 1.0,
                    };
            }
        }
        let values = self.0.iter().map(|v| v.bound);
        unit * grads.into_iter().chain(values).fold(0.0, f64::max)
    }
}

/// Returns another shape of as many elements: one dim, a dim split in two, or two dims merged.
fn reshaped(shape: &Shape, p: usize, q: usize) -> Shape {
    let n = shape.len();
    let mut new = shape.to_vec();
    match q % 4 {
        1 if n >= 2 => {
            let d = p % (n - 1);
            new[d] *= new.remove(d + 1);
        }
        2 | 3 if n >= 1 => {
            let d = p % n;
            let factor = (1..=new[d]).rev().filter(|f| new[d].is_multiple_of(*f)).nth(q / 4 % 2).unwrap_or(1);
            new[d] /= factor;
            new.insert(d + usize::from(q % 4 == 3), factor);
        }
        _ => new = vec![shape.numel()],
    }
    Shape::from(new)
}

impl Value {
    fn leaf(shape: Shape) -> Value {
        Value { from: None, shape, bound: LEAF }
    }
}

impl Act {
    /// The number of the operator's kind, from 0.
    pub fn kind(&self) -> usize {
        match self {
            Act::Add => 0,
            Act::Sub => 1,
            Act::Mul => 2,
            Act::Maximum => 3,
            Act::Minimum => 4,
            Act::Matmul => 5,
            Act::Neg => 6,
            Act::Relu => 7,
            Act::Double => 8,
            Act::Sum { .. } => 9,
            Act::Max { .. } => 10,
            Act::Reshape(_) => 11,
            Act::Permute(_) => 12,
            Act::Slice { .. } => 13,
            Act::Cat(_) => 14,
            Act::Flip(_) => 15,
            Act::Roll { .. } => 16,
            Act::Repeat { .. } => 17,
            Act::Clamp { .. } => 18,
            Act::Tril(_) => 19,
        }
    }

    pub fn run(&self, xs: &[&DTensor]) -> Result<DTensor> {
        match self {
            Act::Add => xs[0].add(xs[1]),
            Act::Sub => xs[0].sub(xs[1]),
            Act::Mul => xs[0].mul(xs[1]),
            Act::Maximum => xs[0].maximum(xs[1]),
            Act::Minimum => xs[0].minimum(xs[1]),
            Act::Matmul => xs[0].matmul(xs[1]),
            Act::Neg => xs[0].neg(),
            Act::Relu => xs[0].relu(),
            Act::Double => xs[0].mul_scalar(2.0),
            Act::Sum { dims, keep } => xs[0].sum(dims, *keep),
            Act::Max { dims, keep } => xs[0].max(dims, *keep),
            Act::Reshape(shape) => xs[0].reshape(shape.clone()),
            Act::Permute(order) => xs[0].permute(order),
            Act::Slice { dim, start, len } => xs[0].slice(*dim, *start, *len),
            Act::Cat(dim) => DTensor::cat(xs, *dim),
            Act::Flip(dim) => xs[0].flip(&[*dim]),
            Act::Roll { dim, by } => xs[0].roll(*by, *dim),
            Act::Repeat { dim, times } => xs[0].repeat_interleave(*times, *dim),
            Act::Clamp { min, max } => xs[0].clamp(*min, *max),
            Act::Tril(diagonal) => xs[0].tril(*diagonal),
        }
    }

    fn shape(&self, ins: &[&Value]) -> Shape {
        let first = &ins[0].shape;
        let mut shape = first.to_vec();
        match self {
            Act::Matmul => *shape.last_mut().expect("two dims") = *ins[1].shape.last().expect("two dims"),
            Act::Sum { dims, keep } | Act::Max { dims, keep } => {
                for &d in dims.iter().rev() {
                    shape[d as usize] = 1;
                    if !keep {
                        shape.remove(d as usize);
                    }
                }
            }
            Act::Reshape(shape) => return shape.clone(),
            Act::Permute(order) => shape = order.iter().map(|&d| first[d as usize]).collect(),
            Act::Slice { dim, len, .. } => shape[*dim as usize] = *len,
            Act::Cat(dim) => shape[*dim as usize] += ins[1].shape[*dim as usize],
            Act::Repeat { dim, times } => shape[*dim as usize] *= times,
            Act::Neg | Act::Relu | Act::Double | Act::Clamp { .. } | Act::Tril(_) => {}
            Act::Flip(_) | Act::Roll { .. } => {}
            _ => return first.broadcast("program", &ins[1].shape).expect("operands were chosen to fit"),
        }
        Shape::from(shape)
    }

    fn bound(&self, ins: &[&Value]) -> f64 {
        let bounds = ins.iter().map(|v| v.bound);
        match self {
            Act::Add | Act::Sub => bounds.sum(),
            Act::Mul => bounds.product(),
            Act::Matmul => bounds.product::<f64>() * *ins[0].shape.last().expect("two dims") as f64,
            Act::Double => 2.0 * ins[0].bound,
            Act::Sum { dims, .. } => {
                let terms: usize = dims.iter().map(|&d| ins[0].shape[d as usize]).product();
                ins[0].bound * terms.max(1) as f64
            }
            _ => bounds.fold(0.0, f64::max),
        }
    }
}

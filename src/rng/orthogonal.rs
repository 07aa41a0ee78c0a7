//! Random orthogonal matrices: Q of the QR decomposition of a normal matrix.
//!
//! Householder reflections in f64, with one dot product and one update per column and step (Golub and Van Loan, *Matrix
//! Computations*, 5.2.2). Sums use 16 lanes that are added in one fixed order, and products are rounded before they are added,
//! so every CPU and vector width gives the same bits.

use std::cell::OnceCell;
use std::sync::Arc;

use super::Draw;
use super::distributions::fill::{RandomFloat, normal};
use crate::error::Result;
use crate::tensor::cpu::{Isa, Kernel, dispatch};
use crate::tensor::{Element, KernelList};

const LANES: usize = 16;
/// The number of reflections that are applied to a vector while it is in the cache. It changes no bit.
const PANEL: usize = 32;

/// A tensor seen as the matrix `[first extent, product of the others]`, with orthonormal rows or columns times `gain`.
#[derive(Clone, Debug)]
pub(super) struct Orthogonal {
    draw: Draw,
    gain: f64,
    rows: usize,
    columns: usize,
    /// Computed for the first element that is needed, so never on a rank that stores no element.
    vectors: OnceCell<Arc<KernelList<f64>>>,
}

impl Orthogonal {
    /// Creates the matrix of this draw; `global_shape` has two or more dims.
    pub fn new(draw: Draw, global_shape: &[usize], gain: f64) -> Orthogonal {
        let (rows, columns) = (global_shape[0], global_shape[1..].iter().product());
        Orthogonal { draw, gain, rows, columns, vectors: OnceCell::new() }
    }

    /// Writes elements `start..start + out.len()`, which are inside the matrix.
    ///
    /// # Errors
    /// Returns an error if there is no room for the whole matrix.
    pub fn fill<T: RandomFloat>(&self, start: u64, out: &mut [T]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let vectors = match self.vectors.get() {
            Some(vectors) => vectors,
            None => {
                let vectors = Arc::new(self.vectors()?);
                self.vectors.get_or_init(|| vectors)
            }
        };
        let round = |x: f64| T::narrow(Element::from_f64(x));
        let start = start as usize;
        if self.rows < self.columns {
            let from = &vectors[start..start + out.len()];
            out.iter_mut().zip(from).for_each(|(out, &x)| *out = round(x));
        } else {
            for (i, out) in out.iter_mut().enumerate() {
                let (row, column) = ((start + i) / self.columns, (start + i) % self.columns);
                *out = round(vectors[column * self.rows + row]);
            }
        }
        Ok(())
    }

    /// Computes the orthonormal vectors times the gain, one after another: rows of a wide matrix, columns of any other.
    fn vectors(&self) -> Result<KernelList<f64>> {
        let mut vectors = KernelList::zeros("init", self.rows * self.columns)?;
        let (len, count) = (self.rows.max(self.columns), self.rows.min(self.columns));
        if self.rows < self.columns {
            normal(self.draw, 0, &mut vectors);
        } else {
            let mut row = vec![0.0; self.columns];
            for r in 0..self.rows {
                normal(self.draw, (r * self.columns) as u64, &mut row);
                row.iter().enumerate().for_each(|(c, &x)| vectors[c * self.rows + r] = x);
            }
        }
        dispatch(Decompose { vectors: &mut vectors, len, count, gain: self.gain });
        Ok(vectors)
    }
}

/// Replaces `count` vectors of `len` elements each, `len >= count`, by Q of their QR decomposition with a positive
/// diagonal of R, times `gain`.
struct Decompose<'a> {
    vectors: &'a mut [f64],
    len: usize,
    count: usize,
    gain: f64,
}

impl Kernel for Decompose<'_> {
    type Out = ();
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) {
        let Decompose { vectors, len, count, gain } = self;
        let mut steps: Vec<Reflection> = Vec::with_capacity(count);
        for first in (0..count).step_by(PANEL) {
            let end = count.min(first + PANEL);
            for k in first..end {
                let (done, rest) = vectors.split_at_mut((k + 1) * len);
                let mirror = &mut done[k * len + k..];
                let step = Reflection::annihilate(mirror);
                let panel = &mut rest[..(end - k - 1) * len];
                panel.chunks_exact_mut(len).for_each(|x| step.reflect(mirror, &mut x[k..]));
                steps.push(step);
            }
            let (done, rest) = vectors.split_at_mut(end * len);
            for x in rest.chunks_exact_mut(len) {
                (first..end).for_each(|k| steps[k].reflect(&done[k * len + k..(k + 1) * len], &mut x[k..]));
            }
        }
        for first in (0..count).step_by(PANEL).rev() {
            let end = count.min(first + PANEL);
            let (done, rest) = vectors.split_at_mut(end * len);
            for x in rest.chunks_exact_mut(len) {
                (first..end)
                    .rev()
                    .for_each(|k| steps[k].reflect(&done[k * len + k..(k + 1) * len], &mut x[k..]));
            }
            for k in (first..end).rev() {
                let (done, rest) = done.split_at_mut((k + 1) * len);
                let (above, mirror) = done[k * len..].split_at_mut(k);
                rest.chunks_exact_mut(len).for_each(|x| steps[k].reflect(mirror, &mut x[k..]));
                // The reflection of the k-th unit vector.
                above.fill(0.0);
                mirror[0] = 1.0 - steps[k].tau;
                mirror[1..].iter_mut().for_each(|v| *v *= -steps[k].tau);
            }
        }
        for (vector, step) in vectors.chunks_exact_mut(len).zip(&steps) {
            let factor = if step.diagonal < 0.0 { -gain } else { gain };
            vector.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// The reflection 1 - tau v vᵀ. v's first element is 1 and is not stored.
struct Reflection {
    tau: f64,
    /// The first element of the reflected vector: R's diagonal.
    diagonal: f64,
}

impl Reflection {
    /// Returns the reflection that sets all elements of `x` but the first to zero. Writes v over the others.
    #[inline(always)]
    fn annihilate(x: &mut [f64]) -> Reflection {
        let (first, below) = x.split_first_mut().expect("a vector is at least as long as there are vectors");
        let square = dot(below, below);
        if square == 0.0 {
            return Reflection { tau: 0.0, diagonal: *first };
        }
        let norm = (*first * *first + square).sqrt();
        let diagonal = if *first < 0.0 { norm } else { -norm };
        let scale = 1.0 / (*first - diagonal);
        below.iter_mut().for_each(|x| *x *= scale);
        Reflection { tau: (diagonal - *first) / diagonal, diagonal }
    }

    /// Reflects `x`, with v in `mirror`.
    #[inline(always)]
    fn reflect(&self, mirror: &[f64], x: &mut [f64]) {
        let weight = self.tau * (x[0] + dot(&mirror[1..], &x[1..]));
        x[0] -= weight;
        x[1..].iter_mut().zip(&mirror[1..]).for_each(|(x, &v)| *x -= weight * v);
    }
}

/// Returns the sum of products. Lane l adds elements l, l + 16, ...; then halves of the lanes are added.
#[inline(always)]
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut lanes = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            lanes[l] += a[l] * b[l];
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += a * b;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::rng::Init;
    use crate::tensor::cpu::{Isa, with_isa};

    const DRAW: Draw = Draw { seed: 4, number: 1 };

    fn whole(shape: &[usize], gain: f64) -> Vec<f64> {
        let mut out = vec![f64::NAN; shape.iter().product()];
        Init::Orthogonal { gain }.fill(DRAW, shape, 0, &mut out).unwrap();
        out
    }

    #[test]
    fn rows_or_columns_are_orthonormal() {
        for shape in [
            &[1, 1][..],
            &[1, 5],
            &[5, 1],
            &[7, 7],
            &[40, 17],
            &[17, 40],
            &[71, 66],
            &[5, 3, 2, 2],
            &[31, 2, 5],
        ] {
            let (rows, columns) = (shape[0], shape[1..].iter().product::<usize>());
            let q = whole(shape, 1.5);
            let (count, len) = (rows.min(columns), rows.max(columns));
            let at = |vector: usize, i: usize| {
                if rows < columns { q[vector * columns + i] } else { q[i * columns + vector] }
            };
            for a in 0..count {
                for b in 0..count {
                    let dot: f64 = (0..len).map(|i| at(a, i) * at(b, i)).sum();
                    let want = if a == b { 2.25 } else { 0.0 };
                    assert!((dot - want).abs() < 1e-14, "{shape:?}: {a}, {b}: {dot}");
                }
            }
        }
        assert_eq!(whole(&[0, 3], 1.0), [0.0; 0]);
        assert_eq!(whole(&[3, 0], 1.0), [0.0; 0]);
    }

    #[test]
    fn it_is_gram_schmidt_of_the_draw() {
        // Q with a positive diagonal of R is unique: orthogonalise by the definition, and compare.
        for (rows, columns) in [(9, 6), (6, 9), (6, 6)] {
            let mut a = vec![0.0; rows * columns];
            normal(DRAW, 0, &mut a);
            let (count, len) = (rows.min(columns), rows.max(columns));
            let place = |v: usize, i: usize| if rows < columns { v * columns + i } else { i * columns + v };
            for v in 0..count {
                for u in 0..v {
                    let dot: f64 = (0..len).map(|i| a[place(u, i)] * a[place(v, i)]).sum();
                    (0..len).for_each(|i| a[place(v, i)] -= dot * a[place(u, i)]);
                }
                let norm = (0..len).map(|i| a[place(v, i)].powi(2)).sum::<f64>().sqrt();
                (0..len).for_each(|i| a[place(v, i)] /= norm);
            }
            for (got, want) in whole(&[rows, columns], 1.0).iter().zip(&a) {
                assert!((got - want).abs() < 1e-12, "{rows} x {columns}: {got} for {want}");
            }
        }
    }

    #[test]
    fn every_cut_type_and_instruction_set_agrees() {
        for shape in [[13, 37], [37, 13], [70, 65]] {
            let all = || whole(&shape, 1.0);
            let want = with_isa(Isa::Baseline, all);
            for &isa in Isa::available() {
                let got = with_isa(isa, all);
                assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?}");
            }
            let values = Init::Orthogonal { gain: 1.0 }.prepare(DRAW, &shape).unwrap();
            let (mut part, mut halves) = ([0.0f32; 50], [bf16::ZERO; 50]);
            values.fill(111, &mut part).unwrap();
            values.fill(111, &mut halves).unwrap();
            for i in 0..50 {
                assert_eq!(part[i], want[111 + i] as f32);
                assert_eq!(halves[i], bf16::from_f32(part[i]));
            }
        }
    }

    #[test]
    fn signs_are_fair() {
        // Without the signs of R's diagonal, the first element would always be negative. 400 draws: 5 sigma.
        let positive = (0..400).filter(|&number| {
            let mut out = [0.0; 4];
            let draw = Draw { seed: 2, number };
            Init::Orthogonal { gain: 1.0 }.fill(draw, &[2, 2], 0, &mut out).unwrap();
            out[0] > 0.0
        });
        assert!((150..=250).contains(&positive.count()));
    }

    #[test]
    fn refusals() {
        let refused = |gain, shape: &[usize]| {
            Init::Orthogonal { gain }.fill(DRAW, shape, 0, &mut [0.0f32]).unwrap_err().to_string()
        };
        assert_eq!(
            refused(1.0, &[9]),
            "init: an orthogonal matrix has two or more dims, [rows, columns, …]; got [9]; draw a vector from a \
             distribution"
        );
        refused(f64::NAN, &[2, 2]);
    }
}

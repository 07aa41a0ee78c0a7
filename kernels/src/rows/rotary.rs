//! Rotary position embedding: tables of cosines and sines, and rotations of pairs of elements.

use bytemuck::Pod;

use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::loops::formulas::widest_of;
use crate::loops::strided_rows::StridedRows;
use crate::math::exp::exp_f64;
use crate::math::log::ln_f64;
use crate::math::trig::sin_cos_2pi_f64;
use crate::memory::{KernelList, MemoryFault};
use crate::num::real::Real;
use crate::threads::parts::RowsMut;
use crate::threads::team::for_each_part;

/// The angles of a rotation of elements `i` and `i + d/2` of rows of `d`: `position · base^(-2i/d)` radians.
#[derive(Clone, Copy, Debug)]
pub struct RotaryAngles {
    /// The base of the geometric sequence of angles.
    pub base: f64,
    /// The position of the first row.
    pub start: usize,
    /// True to rotate by the negative angle.
    pub inverse: bool,
}

/// An element type of rotary position embedding: f32 or f64.
///
/// ```
/// use isoshard_kernels::rows::Rotary;
/// let (mut cos, mut sin) = ([0.0f64; 2], [0.0; 2]);
/// f64::rotary_tables(&[0, 2], &[0.5], 1.0, [&mut cos, &mut sin]);
/// assert_eq!(format!("{cos:.3?} {sin:.3?}"), "[1.000, 0.540] [0.000, 0.841]"); // of 0 and 1
/// ```
pub trait Rotary: Real {
    /// Rotates rows of twice as many elements as there are pairs. `rows` has the offsets of vectors in `x`, and of their positions
    /// from the first one on, which are below `times`. The results are contiguous.
    ///
    /// # Errors
    /// Returns a fault if there is no room for cosines and sines.
    ///
    /// # Panics
    /// Panics if an element lies outside its slice.
    fn rotate(
        angles: RotaryAngles,
        times_pairs: [usize; 2],
        x: &[Self],
        rows: &StridedRows<2>,
        out: &mut [Self],
    ) -> Result<(), MemoryFault>;

    /// Writes the cosines and the sines of all positions times all angles, times `scale`.
    fn rotary_tables(position: &[i64], angle: &[f64], scale: f64, tables: [&mut [Self]; 2]);

    /// Rotates pairs of elements by tables: the operands are vectors, cosines and sines, and `rows` has the offsets of their rows. Pairs
    /// are neighbours if they are `interleaved`, else elements `i` and `i + pairs`. The angles are negative if the rotation is
    /// `inverse`. The results are contiguous.
    ///
    /// # Panics
    /// Panics if an element lies outside its slice.
    fn rotate_pairs(
        operands: [&[Self]; 3],
        rows: &StridedRows<3>,
        pairs: usize,
        interleaved_inverse: [bool; 2],
        out: &mut [Self],
    );
}

macro_rules! rotary {
    ($($t:ty)*) => {$(
        impl Rotary for $t {
            fn rotate(
                angles: RotaryAngles,
                times_pairs: [usize; 2],
                x: &[$t],
                rows: &StridedRows<2>,
                out: &mut [$t],
            ) -> Result<(), MemoryFault> {
                rotate(&angles, times_pairs, x, rows, out)
            }

            fn rotary_tables(position: &[i64], angle: &[f64], scale: f64, [cos, sin]: [&mut [$t]; 2]) {
                dispatch(FillTables { position, angle, scale, cos, sin });
            }

            fn rotate_pairs(
                operands: [&[$t]; 3],
                rows: &StridedRows<3>,
                pairs: usize,
                interleaved_inverse: [bool; 2],
                out: &mut [$t],
            ) {
                rotate_pairs(operands, rows, pairs, interleaved_inverse, out);
            }
        }
    )*};
}
rotary!(f32 f64);

fn rotate<T: Real + Pod>(
    angles: &RotaryAngles,
    [times, pairs]: [usize; 2],
    x: &[T],
    strided: &StridedRows<2>,
    out: &mut [T],
) -> Result<(), MemoryFault> {
    let mut runs = Vec::with_capacity(strided.row_count());
    strided.each_row(|run| runs.push(*run));
    let (rows, table) = (strided.row_len(), Table::new("rotary", angles, times, pairs)?);
    let steps = [strided.row_stride(0), strided.row_stride(1)];
    let nanos = out.len();
    let out = RowsMut { data: out, len: rows * 2 * pairs };
    for_each_part(runs.len(), nanos, out, |at, out| {
        dispatch(Rotate { x, runs: &runs[at], rows, steps, table: &table, out: out.data });
    });
    Ok(())
}

fn rotate_pairs<T: Real>(
    operands: [&[T]; 3],
    strided: &StridedRows<3>,
    pairs: usize,
    [interleaved, inverse]: [bool; 2],
    out: &mut [T],
) {
    let mut runs = Vec::with_capacity(strided.row_count());
    strided.each_row(|run| runs.push(*run));
    dispatch(RotatePairs {
        operands,
        runs,
        rows: strided.row_len(),
        steps: [0, 1, 2].map(|k| strided.row_stride(k)),
        pairs,
        interleaved,
        sign: T::of(if inverse { -1.0 } else { 1.0 }),
        out,
    });
}

/// Cosines and sines `[time, pairs]`.
struct Table<A> {
    cos: KernelList<A>,
    sin: KernelList<A>,
    pairs: usize,
}

impl<A: Real + Pod> Table<A> {
    fn new(verb: &str, rotation: &RotaryAngles, time: usize, pairs: usize) -> Result<Self, MemoryFault> {
        // Turns per position.
        let ln = ln_f64(rotation.base);
        let turns: Vec<f64> = (0..pairs)
            .map(|i| exp_f64(-(i as f64 / pairs as f64) * ln) * std::f64::consts::FRAC_1_PI * 0.5)
            .collect();
        let zeros = || KernelList::zeros(verb, time * pairs);
        let mut table = Table { cos: zeros()?, sin: zeros()?, pairs };
        if pairs > 0 {
            dispatch(FillTable { table: &mut table, turns: &turns, rotation });
        }
        Ok(table)
    }

    /// Returns the cosines and sines of row `i`.
    #[inline(always)]
    fn row(&self, i: usize) -> (&[A], &[A]) {
        let at = i * self.pairs..(i + 1) * self.pairs;
        (&self.cos[at.clone()], &self.sin[at])
    }
}

/// The kernel that computes the table.
struct FillTable<'a, A> {
    table: &'a mut Table<A>,
    turns: &'a [f64],
    rotation: &'a RotaryAngles,
}

impl<A: Real + Pod> Kernel for FillTable<'_, A> {
    type Out = ();
    const WIDEST: Isa = widest_of::<A>();
    #[inline(always)]
    fn run(self) {
        // Adding 1.5 * 2^52 and subtracting it again rounds to the nearest integer.
        const ROUND: f64 = 6_755_399_441_055_744.0;
        let sign = if self.rotation.inverse { -1.0 } else { 1.0 };
        let pairs = self.table.pairs;
        let rows = self.table.cos.chunks_exact_mut(pairs).zip(self.table.sin.chunks_exact_mut(pairs));
        for (i, (cos, sin)) in rows.enumerate() {
            let position = (self.rotation.start + i) as f64;
            for ((cos, sin), &turn) in cos.iter_mut().zip(sin).zip(self.turns) {
                let high = position * turn;
                let low = position.mul_add(turn, -high);
                let (s, c) = sin_cos_2pi_f64((high - ((high + ROUND) - ROUND)) + low);
                (*cos, *sin) = (A::of(c), A::of(sign * s));
            }
        }
    }
}

/// The kernel that rotates rows.
struct Rotate<'a, T> {
    x: &'a [T],
    /// For each run of rows, the offset in `x` and the position of its first row.
    runs: &'a [[usize; 2]],
    /// The number of rows per run.
    rows: usize,
    /// The steps of offset and position from one row to the next.
    steps: [usize; 2],
    table: &'a Table<T>,
    out: &'a mut [T],
}

impl<T: Real + Pod> Kernel for Rotate<'_, T> {
    type Out = ();
    const WIDEST: Isa = widest_of::<T>();
    #[inline(always)]
    fn run(self) {
        let d = 2 * self.table.pairs;
        for (&[at, position], out) in self.runs.iter().zip(self.out.chunks_exact_mut(self.rows * d)) {
            for (i, out) in out.chunks_exact_mut(d).enumerate() {
                let x = &self.x[at + i * self.steps[0]..][..d];
                rotate_row(x, self.table.row(position + i * self.steps[1]), out);
            }
        }
    }
}

#[inline(always)]
fn rotate_row<A: Real>(x: &[A], (cos, sin): (&[A], &[A]), out: &mut [A]) {
    let pairs = cos.len();
    let ((a, b), (x, y)) = (x.split_at(pairs), out.split_at_mut(pairs));
    let (a, b, sin, x, y) = (&a[..pairs], &b[..pairs], &sin[..pairs], &mut x[..pairs], &mut y[..pairs]);
    for i in 0..pairs {
        x[i] = a[i].mul_add(cos[i], -(b[i] * sin[i]));
        y[i] = b[i].mul_add(cos[i], a[i] * sin[i]);
    }
}

/// The kernel that computes tables for any positions and angles.
struct FillTables<'a, T> {
    position: &'a [i64],
    angle: &'a [f64],
    scale: f64,
    cos: &'a mut [T],
    sin: &'a mut [T],
}

impl<T: Real> Kernel for FillTables<'_, T> {
    type Out = ();
    const WIDEST: Isa = widest_of::<T>();
    #[inline(always)]
    fn run(self) {
        // Adding 1.5 * 2^52 and subtracting it again rounds to the nearest integer.
        const ROUND: f64 = 6_755_399_441_055_744.0;
        let pairs = self.angle.len();
        let rows = self.cos.chunks_exact_mut(pairs).zip(self.sin.chunks_exact_mut(pairs));
        for (&position, (cos, sin)) in self.position.iter().zip(rows) {
            let position = position as f64;
            for ((cos, sin), &angle) in cos.iter_mut().zip(sin).zip(self.angle) {
                let turn = angle * std::f64::consts::FRAC_1_PI * 0.5;
                let high = position * turn;
                let low = position.mul_add(turn, -high);
                let (s, c) = sin_cos_2pi_f64((high - ((high + ROUND) - ROUND)) + low);
                (*cos, *sin) = (T::of(c * self.scale), T::of(s * self.scale));
            }
        }
    }
}

/// The kernel that rotates pairs by tables.
struct RotatePairs<'a, T> {
    /// The vectors, cosines and sines.
    operands: [&'a [T]; 3],
    /// For each run of rows, the offset of its first row in each operand.
    runs: Vec<[usize; 3]>,
    /// The number of rows per run.
    rows: usize,
    /// The steps of the offsets from one row to the next.
    steps: [usize; 3],
    pairs: usize,
    interleaved: bool,
    sign: T,
    out: &'a mut [T],
}

impl<T: Real> Kernel for RotatePairs<'_, T> {
    type Out = ();
    const WIDEST: Isa = widest_of::<T>();
    #[inline(always)]
    fn run(self) {
        let (pairs, sign) = (self.pairs, self.sign);
        for (at, out) in self.runs.iter().zip(self.out.chunks_exact_mut(self.rows * 2 * pairs)) {
            for (i, out) in out.chunks_exact_mut(2 * pairs).enumerate() {
                let x = &self.operands[0][at[0] + i * self.steps[0]..][..2 * pairs];
                let cos = &self.operands[1][at[1] + i * self.steps[1]..][..pairs];
                let sin = &self.operands[2][at[2] + i * self.steps[2]..][..pairs];
                if self.interleaved {
                    let tables = cos.iter().zip(sin);
                    for ((x, y), (&cos, &sin)) in x.chunks_exact(2).zip(out.chunks_exact_mut(2)).zip(tables) {
                        let sin = sin * sign;
                        y[0] = x[0].mul_add(cos, -(x[1] * sin));
                        y[1] = x[1].mul_add(cos, x[0] * sin);
                    }
                } else {
                    let ((a, b), (y, z)) = (x.split_at(pairs), out.split_at_mut(pairs));
                    for i in 0..pairs {
                        let sin = sin[i] * sign;
                        y[i] = a[i].mul_add(cos[i], -(b[i] * sin));
                        z[i] = b[i].mul_add(cos[i], a[i] * sin);
                    }
                }
            }
        }
    }
}

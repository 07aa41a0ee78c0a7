//! `multinomial`: draws categories by their weights, with or without replacement.

use smallvec::smallvec;

use super::cuda;
use crate::error::{Error, Result};
use crate::ops::record::work::elements;
use crate::ops::{
    AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Unkeyed, Vjp, Windows, Work, arity,
};
use crate::rng::{self, Draw, IndexRanges};
use crate::tensor::{DType, Element, KernelList, Tensor, for_dtype};

/// Draws `samples` categories (i64, from 0 to below k) per row of weights: `[.., k] -> [.., samples]`. Applied by
/// [`DTensor::multinomial`](crate::dtensor::DTensor::multinomial) and
/// [`DTensor::categorical`](crate::dtensor::DTensor::categorical).
///
/// Weights are finite and not negative, and each row has a positive one. They need not add up to 1. A category of
/// weight 0 is never drawn. Leading dims may be sharded; the categories are not.
///
/// With replacement, samples are drawn by inversion. Sample `e` (global linear index in the result) uses 64-bit element
/// `e` of the draw; u is its upper 53 bits times 2^-53. The sample is the first category whose cumulative weight, added
/// in f64 from category 0 on, exceeds u times the row's sum.
///
/// Without replacement, samples are drawn by exponential arrival times (P. Efraimidis and P. Spirakis, "Weighted random
/// sampling with a reservoir", 2006). Category `e` (global linear index in the weights) arrives at E / weight, where E
/// is element `e` of [`rng::exponential`] in f64. The first arrivals are the samples, in order of arrival. The order
/// has the same distribution as drawing one category after another from the remaining ones.
///
/// ```
/// use isoshard::ops::{Multinomial, Unkeyed, eval_whole};
/// use isoshard::{rng::Generator, tensor::Tensor};
/// let op = Multinomial { samples: 3, replacement: true, draw: Unkeyed(Generator::new(1).next_draw()) };
/// let weights = Tensor::from_vec(vec![0.0, 5.0, 0.0], [1, 3])?;
/// assert_eq!(eval_whole(&op, &[weights])?[0].to_vec::<i64>()?, [1, 1, 1]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Multinomial {
    /// The number of samples per row.
    pub samples: usize,
    /// True if a category may be drawn more than once.
    pub replacement: bool,
    /// The draw of this call.
    pub draw: Unkeyed<Draw>,
}

impl Op for Multinomial {
    fn name(&self) -> &'static str {
        "multinomial"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [w] = arity(self.name(), ins)?;
        w.dtype.expect_float(self.name())?;
        let Some((&k, batch)) = w.shape.split_last() else {
            return Err(Error::invalid(self.name(), "wants rows of weights, [.., k]", w.to_string(), ""));
        };
        if !self.replacement && self.samples > k {
            return Err(Error::invalid(
                self.name(),
                "without replacement there are no more samples than categories",
                format!("{} samples of {w}", self.samples),
                "draw fewer, or with replacement",
            ));
        }
        let shape: Vec<usize> = batch.iter().copied().chain([self.samples]).collect();
        Ok(smallvec![Meta::new(DType::I64, shape)])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        (0..ins[0].shape.len() - 1).map(|d| Row::same(AxisPlacement::S(d), 1)).collect()
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let weights = ins[0].contiguous()?;
        let out = for_dtype!(float self.name(), weights.dtype(), T => {
            let rows = WeightRows { op: self, weights: weights.as_slice::<T>()?, at };
            if self.replacement { rows.with_replacement() } else { rows.without() }
        })?;
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let [weights, drawn] = [&at.ins[0], &at.outs[0]].map(|w| (&w.global, &w.region));
        Ok(smallvec![cuda::multinomial(self.draw.0, self.replacement, &ins[0], weights, drawn)?])
    }

    /// With replacement: an addition per category; two random words and a binary search per sample. Without: an arrival
    /// time per category, which takes two random words, a logarithm and a division.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        let (categories, drawn) = (elements(&ins[0]), elements(&outs[0]));
        let flops = if self.replacement {
            let halvings = u64::from(ins[0].shape.last().map_or(0, |k| usize::BITS - k.leading_zeros()));
            categories.saturating_add(drawn.saturating_mul(2 * Work::SPECIAL + 1 + halvings))
        } else {
            categories.saturating_mul(3 * Work::SPECIAL + 1)
        };
        Work::new(flops, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "an index has no derivative");
        Ok(())
    }
}

/// A category, and the time at which it comes in a draw without replacement.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Arrival {
    time: f64,
    category: u64,
}

/// Keeps the first `n` arrivals, in their order.
fn keep_first(race: &mut KernelList<Arrival>, n: usize) {
    let earlier = |a: &Arrival, b: &Arrival| a.time.total_cmp(&b.time).then(a.category.cmp(&b.category));
    if n > 0 && n < race.len() {
        race.select_nth_unstable_by(n - 1, earlier);
        race.truncate(n);
    }
    race.sort_unstable_by(earlier);
}

/// The rows of weights that this rank stores.
struct WeightRows<'a, T> {
    op: &'a Multinomial,
    weights: &'a [T],
    at: &'a Windows,
}

impl<T: Element> WeightRows<'_, T> {
    fn with_replacement(&self) -> Result<Tensor> {
        let window = &self.at.outs[0];
        let mut words = KernelList::zeros(self.op.name(), window.region.numel())?;
        IndexRanges::of(&window.region, &window.global, |at, here| {
            rng::bits64(self.op.draw.0, at, &mut words[here]);
            Ok(())
        })?;
        let mut sums = KernelList::<f64>::zeros(self.op.name(), self.categories_len())?;
        self.each_row(|row, weights, out| {
            self.check(row, weights)?;
            let mut sum = 0.0;
            for (below, weight) in sums.iter_mut().zip(weights) {
                sum += weight.to_f64();
                *below = sum;
            }
            if !(sum > 0.0 && sum < f64::INFINITY) {
                return Err(self.refused(
                    "a row's weights have a positive, finite sum",
                    row,
                    format!("{sum}"),
                ));
            }
            let words = &words[row * out.len()..][..out.len()];
            for (out, word) in out.iter_mut().zip(words) {
                // `u` stays below the sum: it is at most (1 - 2^-53) times the sum, which rounds down.
                let u = (word >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0) * sum;
                *out = sums.partition_point(|&below| below <= u) as i64;
            }
            Ok(())
        })
    }

    fn without(&self) -> Result<Tensor> {
        let window = &self.at.ins[0];
        let mut arrivals = KernelList::<f64>::zeros(self.op.name(), self.weights.len())?;
        IndexRanges::of(&window.region, &window.global, |at, here| {
            rng::exponential(self.op.draw.0, at, 1.0, &mut arrivals[here])
        })?;
        let k = self.categories_len();
        let mut race = KernelList::<Arrival>::new();
        self.each_row(|row, weights, out| {
            self.check(row, weights)?;
            race.clear();
            let arrivals = weights.iter().zip(&arrivals[row * k..]).map(|(w, e)| (w.to_f64(), e)).enumerate();
            for (category, (w, e)) in arrivals.filter(|(_, (w, _))| *w > 0.0) {
                race.push(Arrival { time: e / w, category: category as u64 });
            }
            if race.len() < out.len() {
                let rule = "without replacement a row has as many positive weights as samples";
                return Err(self.refused(rule, row, format!("{} for {} samples", race.len(), out.len())));
            }
            keep_first(&mut race, out.len());
            out.iter_mut().zip(&*race).for_each(|(out, arrival)| *out = arrival.category as i64);
            Ok(())
        })
    }

    /// Calls `sample` once per row with the row's local number, its weights and the row of the result to fill.
    fn each_row(&self, mut sample: impl FnMut(usize, &[T], &mut [i64]) -> Result<()>) -> Result<Tensor> {
        let mut out = Tensor::uninit(DType::I64, self.at.outs[0].local());
        let (k, samples) = (self.categories_len(), self.op.samples);
        if out.numel() == 0 {
            return Ok(out);
        }
        for (row, out) in out.make_mut::<i64>()?.chunks_mut(samples).enumerate() {
            sample(row, &self.weights[row * k..][..k], out)?;
        }
        Ok(out)
    }

    fn categories_len(&self) -> usize {
        self.at.ins[0].global.last().copied().unwrap_or(0)
    }

    fn check(&self, row: usize, weights: &[T]) -> Result<()> {
        let sound = |w: &T| (0.0..f64::INFINITY).contains(&w.to_f64());
        if weights.iter().fold(true, |all, w| all & sound(w)) {
            return Ok(());
        }
        let category = weights.iter().position(|w| !sound(w)).unwrap_or(0);
        let given = format!("{} for category {category}", weights[category].to_f64());
        Err(self.refused("weights are finite and not negative", row, given))
    }

    /// Creates an error that names the row by its global number.
    fn refused(&self, rule: &str, row: usize, given: String) -> Error {
        let window = &self.at.ins[0];
        let (at, k) = (row * self.categories_len(), self.categories_len().max(1));
        let mut global = row as u64;
        window.region.runs(&window.global, |start, offset, len| {
            if (offset..offset + len).contains(&at) {
                global = (start + (at - offset) as u64) / k as u64;
            }
        });
        Error::invalid(self.op.name(), rule, format!("{given} in row {global}"), "")
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |shape: &[usize], samples, replacement| {
        let draw = Unkeyed(rng::Generator::new(7).next_draw());
        Sample::new(Multinomial { samples, replacement, draw }, [Input::positive(shape)]).not_smooth()
    };
    vec![
        sample(&[5, 3], 4, true),
        sample(&[7, 5], 3, false),
        sample(&[2, 3, 7], 2, true),
        sample(&[3, 2, 4], 4, false),
        sample(&[5], 2, false),
        sample(&[0, 3], 2, true),
        sample(&[2, 0], 0, false),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    fn draw(weights: &[f32], shape: [usize; 2], samples: usize, replacement: bool) -> Result<Vec<i64>> {
        let op = Multinomial { samples, replacement, draw: Unkeyed(rng::Generator::new(5).next_draw()) };
        let x = Tensor::from_slice(weights, shape)?;
        eval_whole(&op, &[x])?[0].to_vec::<i64>()
    }

    #[test]
    fn categories_come_as_often_as_they_weigh() {
        let weights = [1.0, 0.0, 2.0, 5.0, 0.0];
        // Each share of 40,000 within 4.5 standard deviations (at most 0.0025): once in 10^5 fresh seeds.
        let shares = |drawn: &[i64]| -> Vec<f64> {
            let count = |c: i64| drawn.iter().filter(|&&x| x == c).count() as f64;
            (0..5).map(|c| count(c) / drawn.len() as f64).collect()
        };
        let close = |got: &[f64], want: &[f64]| {
            assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 4.5 * 0.0025), "{got:?} for {want:?}");
        };
        let drawn = draw(&weights, [1, 5], 40_000, true).unwrap();
        close(&shares(&drawn), &[0.125, 0.0, 0.25, 0.625, 0.0]);
        let rows: Vec<f32> = weights.iter().copied().cycle().take(5 * 40_000).collect();
        let drawn = draw(&rows, [40_000, 5], 3, false).unwrap();
        let place = |at: usize| drawn.iter().skip(at).step_by(3).copied().collect::<Vec<_>>();
        close(&shares(&place(0)), &[0.125, 0.0, 0.25, 0.625, 0.0]);
        // The second: 2 after 3 has 5/8 2/3 and after 0 has 1/8 2/7; and so on.
        let second = [5.0 / 24.0 + 2.0 / 48.0, 0.0, 5.0 / 12.0 + 1.0 / 28.0, 5.0 / 56.0 + 10.0 / 48.0, 0.0];
        close(&shares(&place(1)), &second);
        let sorted = |row: &[i64]| {
            let mut row = row.to_vec();
            row.sort_unstable();
            row
        };
        assert!(drawn.chunks(3).all(|row| sorted(row) == [0, 2, 3]), "a category comes once");
    }

    #[test]
    fn refusals_name_row_and_category() {
        let refused = |weights: &[f32], samples, replacement| {
            draw(weights, [2, 3], samples, replacement).unwrap_err().to_string()
        };
        for replacement in [true, false] {
            for (bad, text) in [(-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
                let want = format!(
                    "multinomial: weights are finite and not negative; got {text} for category 1 in row 1"
                );
                assert_eq!(refused(&[1.0, 2.0, 3.0, 1.0, bad, 1.0], 1, replacement), want);
            }
        }
        assert_eq!(
            refused(&[1.0, 2.0, 3.0, 0.0, 0.0, 0.0], 1, true),
            "multinomial: a row's weights have a positive, finite sum; got 0 in row 1"
        );
        assert_eq!(
            refused(&[1.0, 2.0, 3.0, 1.0, 0.0, 0.0], 2, false),
            "multinomial: without replacement a row has as many positive weights as samples; got 1 for 2 samples in row 1"
        );
        assert_eq!(
            refused(&[1.0; 6], 4, false),
            "multinomial: without replacement there are no more samples than categories; got 4 samples of f32[2, 3]; \
             draw fewer, or with replacement"
        );
    }
}

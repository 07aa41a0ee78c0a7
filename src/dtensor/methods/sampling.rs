//! Random numbers that depend on a tensor: with one parameter per element, and dropout.
//!
//! Each element equals that of the fills in [`rng`](crate::rng) with the same draw, parameter and global index, on
//! every layout. Nothing is communicated, except to compare a generator at its first draw on a mesh (16 bytes per
//! rank, [`IntoDraw`]), and as [`DTensor::multinomial`] and [`DTensor::categorical`] say for sharded rows.
//!
//! Wrong shapes, dtypes and layouts are refused on all ranks, before the generator counts a draw. A wrong value (a
//! probability of 1.5) is seen only by the ranks that hold it: they fail, and the other ranks fail at their next
//! collective call.

use crate::dtensor::mesh::into_draw::IntoDraw;
use crate::dtensor::tensor::dtensor::{DTensor, refuse_partial};
use crate::error::Result;
use crate::ops::{Bernoulli, Bits, Dropout, Exponential, Gamma, Multinomial, Op, Poisson, Unkeyed};
use crate::rng::Draw;
use crate::tensor::DType;

/// Sampling with one parameter per element.
impl DTensor {
    /// Returns bools that are true with this tensor's probabilities (to 2^-32), with its shape and layout. No gradient
    /// flows.
    ///
    /// Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Generator, tensor::Tensor};
    /// let coins = |ranks| spmd(ranks, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
    ///     let p = Tensor::from_vec(vec![0.0f32, 0.25, 0.5, 0.75, 1.0], [5])?;
    ///     let p = DTensor::distribute(&mesh, &p, "(S0)")?;
    ///     p.bernoulli(&mut Generator::new(7))?.full_tensor()?.to_vec::<bool>()
    /// });
    /// let drawn = coins(3)?.swap_remove(0);
    /// assert_eq!((drawn[0], drawn[4]), (false, true));
    /// assert_eq!(drawn, coins(1)?[0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes that are not floating-point, `Partial`, generators that differ between ranks, and values outside
    /// `[0, 1]`.
    pub fn bernoulli(&self, from: impl IntoDraw) -> Result<DTensor> {
        self.sample_with(from, |draw| Bernoulli { draw })
    }

    /// Draws `samples` categories in `0..k` per row of weights `[.., k]`, as i64 `[.., samples]`; a category repeats only
    /// with `replacement`. Weights need not add up to 1. No gradient flows. [`Multinomial`] describes the algorithm.
    ///
    /// Communicates nothing if the ranks hold the last dim whole. Otherwise the weights are redistributed to the cheapest
    /// layout in which they do (each rank receives at most the elements that it lacks), and the result has that layout.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Generator, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let weights = Tensor::from_vec(vec![0.0f32, 1.0, 3.0, 0.5, 0.0, 0.5], [2, 3])?;
    ///     let weights = DTensor::distribute(&mesh, &weights, "(S0)")?;
    ///     let drawn = weights.multinomial(2, false, &mut Generator::new(7))?;
    ///     assert_eq!(drawn.spec().to_string(), "i64[2, 2]@(dp:S0)");
    ///     let mut drawn = drawn.full_tensor()?.to_vec::<i64>()?;
    ///     drawn.chunks_mut(2).for_each(|row| row.sort_unstable());
    ///     assert_eq!(drawn, [1, 2, 0, 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes that are not floating-point, a tensor without dims, more samples than categories without
    /// replacement, `Partial`, generators that differ between ranks, weights that are negative or not finite, rows with too
    /// few positive weights, and, in strict mode, weights that would have to be redistributed.
    pub fn multinomial(&self, samples: usize, replacement: bool, from: impl IntoDraw) -> Result<DTensor> {
        self.sample_with(from, |draw| Multinomial { samples, replacement, draw })
    }

    /// Draws one category in `0..k` per row of weights `[.., k]`, as i64 `[..]`: a
    /// [`multinomial`](DTensor::multinomial) of one sample, which also says what is communicated.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Generator, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let weights = Tensor::from_vec(vec![0.0f32, 1.0, 3.0, 0.0], [2, 2])?;
    ///     let weights = DTensor::distribute(&mesh, &weights, "(S0)")?;
    ///     let drawn = weights.categorical(&mut Generator::new(7))?.full_tensor()?;
    ///     assert_eq!(drawn.to_vec::<i64>()?, [1, 0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::multinomial`] refuses.
    pub fn categorical(&self, from: impl IntoDraw) -> Result<DTensor> {
        self.multinomial(1, true, from)?.squeeze(-1)
    }

    /// Draws Poisson numbers with this tensor's rates, as `dtype` (i64, i32 or floating-point), with its shape and layout.
    /// No gradient flows.
    ///
    /// Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Generator, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let rates = DTensor::full(&mesh, DType::F32, [10_000], "(S0)", 3.0)?;
    ///     let counts = rates.poisson(DType::I64, &mut Generator::new(7))?.full_tensor()?.to_vec::<i64>()?;
    ///     assert!((29_000..31_000).contains(&counts.iter().sum::<i64>()));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses rates that are not floating-point, below 0 or above 2^50, other dtypes of the counts, `Partial`, and
    /// generators that differ between ranks.
    pub fn poisson(&self, dtype: DType, from: impl IntoDraw) -> Result<DTensor> {
        self.sample_with(from, |draw| Poisson { dtype, draw })
    }

    /// Draws exponential numbers with this tensor's rates (mean `1 / rate`), with its dtype, shape and layout. The gradient
    /// is that of `E / rate` for an `E` that does not depend on the rate.
    ///
    /// Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Generator, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let rates = DTensor::full(&mesh, DType::F64, [10_000], "(S0)", 4.0)?;
    ///     let waits = rates.exponential(&mut Generator::new(7))?.full_tensor()?.to_vec::<f64>()?;
    ///     assert!((2_400.0..2_600.0).contains(&waits.iter().sum::<f64>()));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes that are not floating-point, `Partial`, generators that differ between ranks, and rates that are not
    /// positive and finite.
    pub fn exponential(&self, from: impl IntoDraw) -> Result<DTensor> {
        self.sample_with(from, |draw| Exponential { draw })
    }

    /// Draws gamma numbers with scale 1 and this tensor's shape parameters (which are the means), with its dtype, shape and
    /// layout. For another scale, multiply. No gradient flows.
    ///
    /// Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Generator, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let shapes = DTensor::full(&mesh, DType::F64, [10_000], "(S0)", 0.5)?;
    ///     let drawn = shapes.gamma(&mut Generator::new(7))?.full_tensor()?.to_vec::<f64>()?;
    ///     assert!((4_600.0..5_400.0).contains(&drawn.iter().sum::<f64>()));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes that are not floating-point, `Partial`, generators that differ between ranks, and shape parameters
    /// that are not positive and finite.
    pub fn gamma(&self, from: impl IntoDraw) -> Result<DTensor> {
        self.sample_with(from, |draw| Gamma { draw })
    }

    /// Applies the operator for a draw, which is taken only if no rank refuses the operand.
    fn sample_with<O: Op>(&self, from: impl IntoDraw, op: impl Fn(Unkeyed<Draw>) -> O) -> Result<DTensor> {
        let any = op(Unkeyed(Draw { seed: 0, number: 0 }));
        refuse_partial(any.name(), &self.meta)?;
        any.infer(&[self.meta.meta()])?;
        let draw = from.into_draw(any.name(), &self.mesh)?;
        DTensor::apply_one(&op(Unkeyed(draw)), &[self])
    }

    /// Zeroes each element with probability `p`, and multiplies the others by `1 / (1 - p)`. The mask is a function
    /// of the draw and the element's global index, so it is equal on every layout. `from` is a `&mut Generator` or a
    /// `Draw`. Communicates nothing, except to compare a generator at its [first draw](IntoDraw) on a mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Generator, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let dropped = |layout: &str| -> isoshard::Result<Vec<f32>> {
    ///         let x = DTensor::full(&mesh, DType::F32, [8], layout, 1.0)?;
    ///         x.dropout(0.5, &mut Generator::new(7))?.full_tensor()?.to_vec()
    ///     };
    ///     assert!(dropped("(S0)")?.iter().all(|v| [0.0, 2.0].contains(v)));
    ///     assert_eq!(dropped("(S0)")?, dropped("(R)")?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `p` outside `[0, 1]`, and generators that differ between ranks.
    pub fn dropout(&self, p: f64, from: impl IntoDraw) -> Result<DTensor> {
        let draw = from.into_draw("dropout", &self.mesh)?;
        DTensor::apply_one(&Dropout { p: Bits(p), draw: Unkeyed(draw) }, &[self])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DeviceMesh;
    use crate::placement::Layout;
    use crate::rng::{Generator, bernoulli, exponential, gamma, poisson};
    use crate::tensor::Tensor;

    #[test]
    fn equal_parameters_give_the_fills_numbers() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 3)])?;
            for text in ["(R)", "(S0)", "(S1)", "(RS(0..2; 0, 20, 15))"] {
                let layout = || text.parse::<Layout>();
                let params = DTensor::full(&mesh, DType::F32, [5, 7], layout()?, 0.5)?;
                let draw = Generator::new(3).next_draw();
                let (mut x, mut n, mut b) = ([0f32; 35], [0i32; 35], [false; 35]);
                exponential(draw, 0, 0.5, &mut x)?;
                assert_eq!(params.exponential(draw)?.full_tensor()?.to_vec::<f32>()?, x);
                gamma(draw, 0, 0.5, 1.0, &mut x)?;
                assert_eq!(params.gamma(draw)?.full_tensor()?.to_vec::<f32>()?, x);
                poisson(draw, 0, 0.5, &mut n)?;
                assert_eq!(params.poisson(DType::I32, draw)?.full_tensor()?.to_vec::<i32>()?, n);
                bernoulli(draw, 0, 0.5, &mut b)?;
                assert_eq!(params.bernoulli(draw)?.full_tensor()?.to_vec::<bool>()?, b);
            }
            Ok(())
        };
        spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn categories_are_one_tensor_in_every_layout() {
        let run = |ranks| {
            let all = spmd(ranks, move |rank| {
                let mesh = DeviceMesh::new(&rank, &[("a", ranks)])?;
                let weights = Tensor::from_vec((0..42).map(|i| (i % 5) as f32 + 0.5).collect(), [3, 2, 7])?;
                let mut found = Vec::new();
                for text in ["(R)", "(S0)", "(S1)", "(S2)"] {
                    let weights = DTensor::distribute(&mesh, &weights, text.parse::<Layout>()?)?;
                    let mut generator = Generator::new(3);
                    for (samples, replacement) in [(9, true), (4, false)] {
                        let drawn = weights.multinomial(samples, replacement, &mut generator)?;
                        found.push((text, drawn.full_tensor()?.to_vec::<i64>()?));
                    }
                    let drawn = weights.categorical(&mut generator)?;
                    assert_eq!((drawn.shape().to_vec(), generator.draws()), (vec![3, 2], 3));
                    found.push((text, drawn.full_tensor()?.to_vec::<i64>()?));
                }
                Ok(found)
            });
            all.unwrap_or_else(|e| panic!("{e}")).swap_remove(0)
        };
        let want = run(1);
        assert!(want.chunks(3).all(|of| of.iter().zip(&want[..3]).all(|(a, b)| a.1 == b.1)));
        assert_eq!((run(2), run(3)), (want.clone(), want));
    }

    #[test]
    fn what_is_refused_does_not_count() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
            let mut g = Generator::new(3);
            let full = |dtype, text: &str| DTensor::full(&mesh, dtype, [4, 3], text.parse::<Layout>()?, 1.0);
            let sums = DTensor::from_local(&mesh, Tensor::zeros(DType::F32, [4, 3]), [4, 3], "(P(sum))")?;
            let (ints, rows) = (full(DType::I64, "(S0)")?, full(DType::F32, "(S0)")?);
            type Method = fn(&DTensor, &mut Generator) -> Result<DTensor>;
            let calls: [(&str, Method); 6] = [
                ("bernoulli", |x, g| x.bernoulli(g)),
                ("multinomial", |x, g| x.multinomial(2, true, g)),
                ("multinomial", |x, g| x.categorical(g)),
                ("poisson", |x, g| x.poisson(DType::I64, g)),
                ("exponential", |x, g| x.exponential(g)),
                ("gamma", |x, g| x.gamma(g)),
            ];
            for (name, call) in calls {
                assert_eq!(
                    call(&sums, &mut g).unwrap_err().to_string(),
                    format!(
                        "{name}: a Partial layout has no values of its own; got f32[4, 3]@(a:P(sum)); redistribute first"
                    )
                );
                let said = call(&ints, &mut g).unwrap_err().to_string();
                assert!(
                    said.starts_with(&format!("{name}: wants floating-point elements; got i64")),
                    "{said}"
                );
            }
            rows.poisson(DType::U8, &mut g).unwrap_err();
            rows.multinomial(4, false, &mut g).unwrap_err();
            assert_eq!(g.draws(), 0);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn values_are_refused_where_they_lie() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
            let p = Tensor::from_vec(vec![0.5f32, 0.5, 0.5, 1.5], [4])?;
            let p = DTensor::distribute(&mesh, &p, "(S0)")?;
            Ok(p.bernoulli(&mut Generator::new(3)).map(drop).map_err(|e| e.to_string()))
        };
        let said = spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
        let refused = "bernoulli: a probability lies in [0, 1]; got 1.5 for element 3".to_string();
        assert_eq!(said, [Ok(()), Err(refused)]);
    }
}

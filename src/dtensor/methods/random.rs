//! Random tensors: each rank draws its own elements, and every layout gives the values that a single rank gives.
//!
//! Numbers come from a `&mut Generator` or a `Draw`. Nothing is communicated, except to compare a generator at its
//! first draw on a mesh ([`IntoDraw`]), and to move rows in [`DTensor::shuffle`].

use crate::comm::Lineage;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::into_draw::IntoDraw;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::tensor::dtensor::{DTensor, refuse_partial};
use crate::dtensor::tensor::lineage::lineage_of_new;
use crate::error::{Error, Result};
use crate::ops::{Shuffle, Unkeyed};
use crate::placement::{IntoLayout, Layout};
use crate::rng::{Distribution, Draw, Init, Permutation};
use crate::tensor::{DType, Shape, Tensor};

/// Creation of random tensors.
impl DTensor {
    /// Creates a tensor drawn from a distribution: each element is a function of the draw and its global index. Each rank
    /// draws its own shard only; communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout};
    /// use isoshard::{rng::{Distribution, Generator}, tensor::DType};
    /// let coins = |ranks| spmd(ranks, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
    ///     let mut generator = Generator::new(7);
    ///     let fair = Distribution::Bernoulli { p: 0.5 };
    ///     let x = DTensor::random(&mesh, DType::Bool, [5, 3], "(S0)", fair, &mut generator)?;
    ///     x.full_tensor()?.to_vec::<bool>()
    /// });
    /// assert_eq!(coins(3)?[0], coins(1)?[0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit, `Partial`, parameters and dtypes that the distribution does not have, and
    /// generators that differ between ranks.
    pub fn random(
        mesh: &DeviceMesh,
        dtype: DType,
        shape: impl Into<Shape>,
        layout: impl IntoLayout,
        distribution: Distribution,
        from: impl IntoDraw,
    ) -> Result<DTensor> {
        Self::filled(
            (mesh, "random"),
            dtype,
            shape.into(),
            &layout.into_layout()?,
            FillSource::RandomElement(distribution),
            from,
        )
    }

    /// Creates a tensor of uniform numbers in `[0, 1)`: [`DTensor::random`] from [`Distribution::UNIT`], which says
    /// where f16 and bf16 differ. Communicates as [`DTensor::random`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Generator, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::rand(&mesh, DType::F32, [5], "(S0)", &mut Generator::new(7))?;
    ///     let whole = DTensor::rand(&mesh, DType::F32, [5], "(R)", &mut Generator::new(7))?;
    ///     assert_eq!(x.full_tensor()?.to_vec::<f32>()?, whole.local().to_vec::<f32>()?);
    ///     assert!(whole.local().to_vec::<f32>()?.iter().all(|v| (0.0..1.0).contains(v)));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::random`] refuses.
    pub fn rand(
        mesh: &DeviceMesh,
        dtype: DType,
        shape: impl Into<Shape>,
        layout: impl IntoLayout,
        from: impl IntoDraw,
    ) -> Result<DTensor> {
        let unit = FillSource::FixedDistribution(Distribution::UNIT);
        Self::filled((mesh, "rand"), dtype, shape.into(), &layout.into_layout()?, unit, from)
    }

    /// Creates a tensor of standard normal numbers: [`DTensor::random`] from [`Distribution::STANDARD`]. Communicates
    /// as [`DTensor::random`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Generator, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::randn(&mesh, DType::F64, [10_000], "(S0)", &mut Generator::new(7))?;
    ///     assert!(x.mean_all()?.item()?.abs() < 0.05);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::random`] refuses.
    pub fn randn(
        mesh: &DeviceMesh,
        dtype: DType,
        shape: impl Into<Shape>,
        layout: impl IntoLayout,
        from: impl IntoDraw,
    ) -> Result<DTensor> {
        let standard = FillSource::FixedDistribution(Distribution::STANDARD);
        Self::filled((mesh, "randn"), dtype, shape.into(), &layout.into_layout()?, standard, from)
    }

    /// Creates the integers `0..len` in random order, as i64: element `i` is [`Permutation::at`]`(i)`. Each rank
    /// computes its own shard only; an element costs about 64 Philox blocks. Communicates nothing, except to compare a
    /// generator at its [first draw](IntoDraw) on a mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Generator};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let order = DTensor::randperm(&mesh, 5, "(S0)", &mut Generator::new(7))?;
    ///     let mut order = order.full_tensor()?.to_vec::<i64>()?;
    ///     order.sort_unstable();
    ///     assert_eq!(order, [0, 1, 2, 3, 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit, `Partial`, and generators that differ between ranks.
    pub fn randperm(
        mesh: &DeviceMesh,
        len: usize,
        layout: impl IntoLayout,
        from: impl IntoDraw,
    ) -> Result<DTensor> {
        Self::filled(
            (mesh, "randperm"),
            DType::I64,
            [len].into(),
            &layout.into_layout()?,
            FillSource::Permutation,
            from,
        )
    }

    /// Creates a tensor of initial values. Each rank computes its own shard only, except for [`Init::Orthogonal`].
    /// Communicates as [`DTensor::random`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::{Layout, Placement}};
    /// use isoshard::{rng::{Draw, Init}, tensor::DType};
    /// spmd(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
    ///     let draw = Draw { seed: 7, number: 0 };
    ///     let init = Init::Normal { mean: 0.0, std: 1.0 };
    ///     let sharded = DTensor::init(&mesh, DType::F32, [5, 2], Layout::new([Placement::Shard(0)]), init, draw)?;
    ///     let whole = DTensor::init(&mesh, DType::F32, [5, 2], Layout::replicated(1), init, draw)?;
    ///     assert_eq!(sharded.full_tensor()?.to_vec::<f32>()?, whole.local().to_vec::<f32>()?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit, `Partial`, dtypes that are not floating-point, an `init` that does not fit the
    /// shape, and generators that differ between ranks.
    pub fn init(
        mesh: &DeviceMesh,
        dtype: DType,
        shape: impl Into<Shape>,
        layout: impl IntoLayout,
        init: Init,
        from: impl IntoDraw,
    ) -> Result<DTensor> {
        Self::filled(
            (mesh, "init"),
            dtype,
            shape.into(),
            &layout.into_layout()?,
            FillSource::Init(init),
            from,
        )
    }

    /// Creates a tensor and fills it, for the method `verb`.
    fn filled(
        (mesh, verb): (&DeviceMesh, &'static str),
        dtype: DType,
        shape: Shape,
        layout: &Layout,
        values: FillSource,
        from: impl IntoDraw,
    ) -> Result<DTensor> {
        let meta = mesh.meta(dtype, &shape, layout)?;
        values.check(verb, &meta)?;
        let draw = from.into_draw(verb, mesh)?;
        let mut local = Tensor::uninit_on(mesh.device(), dtype, meta.local_shape())?;
        values.write(&meta, draw, &mut local).map_err(|e| e.called(verb))?;
        let lineage = values.lineage(verb, &meta, draw);
        Ok(DTensor::wrap(mesh, local, meta, lineage))
    }
}

/// Random tensors with the dtype, shape and layout of an existing one, and new values for it.
impl DTensor {
    /// Creates a tensor drawn from a distribution, with this tensor's dtype, shape and layout. Communicates as
    /// [`DTensor::random`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::{Distribution, Generator}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5], "(S0)")?;
    ///     let y = x.random_like(Distribution::Uniform { low: 2.0, high: 3.0 }, &mut Generator::new(7))?;
    ///     assert_eq!(y.spec(), x.spec());
    ///     assert!(y.local().to_vec::<f32>()?.iter().all(|v| (2.0..3.0).contains(v)));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::random`] refuses.
    pub fn random_like(&self, distribution: Distribution, from: impl IntoDraw) -> Result<DTensor> {
        self.filled_like("random_like", FillSource::RandomElement(distribution), from)
    }

    /// Creates a tensor of uniform numbers in `[0, 1)`, with this tensor's dtype, shape and layout. Communicates as
    /// [`DTensor::random`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Generator, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5], "(S0)")?;
    ///     let noise = x.rand_like(&mut Generator::new(7))?;
    ///     assert_eq!(noise.spec(), x.spec());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::random`] refuses.
    pub fn rand_like(&self, from: impl IntoDraw) -> Result<DTensor> {
        self.filled_like("rand_like", FillSource::FixedDistribution(Distribution::UNIT), from)
    }

    /// Creates a tensor of standard normal numbers, with this tensor's dtype, shape and layout. Communicates as
    /// [`DTensor::random`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Generator, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5], "(S0)")?;
    ///     let (a, b) = (x.randn_like(&mut Generator::new(7))?, x.randn_like(&mut Generator::new(7))?);
    ///     assert_eq!(a.local().to_vec::<f32>()?, b.local().to_vec::<f32>()?); // equal seeds, equal draws
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::random`] refuses.
    pub fn randn_like(&self, from: impl IntoDraw) -> Result<DTensor> {
        self.filled_like("randn_like", FillSource::FixedDistribution(Distribution::STANDARD), from)
    }

    /// Overwrites all elements with new draws, in place unless another tensor shares the buffer. Communicates as
    /// [`DTensor::random`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout};
    /// use isoshard::{rng::{Distribution, Generator}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let mut generator = Generator::new(1);
    ///     let mut noise = DTensor::zeros(&mesh, DType::F32, [5], "(S0)")?;
    ///     noise.fill_random(Distribution::Normal { mean: 3.0, std: 0.0 }, &mut generator)?;
    ///     assert!(noise.local().to_vec::<f32>()?.iter().all(|&x| x == 3.0));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::random`] refuses, and a tensor with a history, which would no longer match its values. The
    /// values then stay as they were.
    pub fn fill_random(&mut self, distribution: Distribution, from: impl IntoDraw) -> Result<()> {
        self.refill("fill_random", FillSource::RandomElement(distribution), from)
    }

    /// Overwrites all elements with initial values, in place unless another tensor shares the buffer. Communicates as
    /// [`DTensor::random`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::{Generator, Init}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let mut x = DTensor::zeros(&mesh, DType::F32, [4], "(S0)")?;
    ///     x.fill_init(Init::Ones, &mut Generator::new(7))?;
    ///     assert_eq!(x.local().to_vec::<f32>()?, [1.0, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::init`] and [`DTensor::fill_random`] refuse.
    pub fn fill_init(&mut self, init: Init, from: impl IntoDraw) -> Result<()> {
        self.refill("fill_init", FillSource::Init(init), from)
    }

    /// Returns the indices along `dim` in random order: index `i` of the result is index [`Permutation::at`]`(i)` of this
    /// tensor, on every mesh. The layout stays the same.
    ///
    /// Communicates nothing if the ranks hold `dim` whole. Otherwise the tensor is redistributed to the cheapest layout in
    /// which they do (each rank receives at most the elements that it lacks), is shuffled, and is redistributed back. The
    /// derivative undoes the order.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Generator, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let rows = Tensor::from_vec(vec![0.0f32, 1.0, 2.0], [3, 1])?;
    ///     let x = DTensor::distribute(&mesh, &rows, "(S0)")?;
    ///     let mut order = x.shuffle(0, &mut Generator::new(5))?.full_tensor()?.to_vec::<f32>()?;
    ///     order.sort_by(f32::total_cmp);
    ///     assert_eq!(order, [0.0, 1.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, generators that differ between ranks, and, in strict mode, a tensor
    /// that would have to be redistributed.
    pub fn shuffle(&self, dim: isize, from: impl IntoDraw) -> Result<DTensor> {
        let dim = self.shape().dim("shuffle", dim)?;
        let draw = from.into_draw("shuffle", &self.mesh)?;
        let op = Shuffle { dim, inverse: false, draw: Unkeyed(draw) };
        DTensor::apply_one(&op, &[self])?.redistribute(self.layout().clone())
    }

    /// Creates a tensor like this one, for the method `verb`.
    fn filled_like(&self, verb: &'static str, values: FillSource, from: impl IntoDraw) -> Result<DTensor> {
        Self::filled((&self.mesh, verb), self.dtype(), self.shape().clone(), self.layout(), values, from)
    }

    /// Overwrites the elements of this tensor, for the method `verb`.
    fn refill(&mut self, verb: &'static str, values: FillSource, from: impl IntoDraw) -> Result<()> {
        if self.has_history() {
            let remedy = "draw a tensor like it, or detach it first";
            let rule = "a tensor with a history cannot be overwritten";
            return Err(Error::invalid(verb, rule, self.spec().to_string(), remedy));
        }
        values.check(verb, &self.meta)?;
        let draw = from.into_draw(verb, &self.mesh)?;
        if !self.local.is_unique() {
            self.local = Tensor::uninit_on(self.mesh.device(), self.dtype(), self.meta.local_shape())?;
        }
        self.lineage = values.lineage(verb, &self.meta, draw);
        values.write(&self.meta, draw, &mut self.local).map_err(|e| e.called(verb))
    }
}

/// The source of the values that fill a tensor.
#[derive(Clone, Copy)]
enum FillSource {
    /// A distribution that the caller has chosen.
    RandomElement(Distribution),
    /// The distribution of the method.
    FixedDistribution(Distribution),
    Init(Init),
    /// The indices of the only dim, in random order.
    Permutation,
}

impl FillSource {
    /// Returns the lineage of the tensor that a draw fills. A tensor of another draw has another one.
    fn lineage(&self, verb: &'static str, meta: &TensorMeta, Draw { seed, number }: Draw) -> Lineage {
        lineage_of_new(verb, meta, &[seed, number])
    }

    /// Refuses what [`FillSource::write`] would refuse, from metadata that all ranks share, before a generator counts a
    /// draw.
    fn check(&self, verb: &str, meta: &TensorMeta) -> Result<()> {
        refuse_partial(verb, meta)?;
        let checked = match self {
            // Parameters are refused in the name of the distribution that the caller has named.
            FillSource::RandomElement(distribution) => return distribution.check(meta.dtype()),
            FillSource::FixedDistribution(distribution) => distribution.check(meta.dtype()),
            FillSource::Init(init) => meta
                .dtype()
                .expect_float(verb)
                .map_err(Error::from)
                .and_then(|()| init.resolve(meta.shape()).map(drop)),
            FillSource::Permutation => Ok(()),
        };
        checked.map_err(|e| e.called(verb))
    }

    /// Writes this rank's shard into `local`, whose buffer no other tensor shares.
    fn write(&self, meta: &TensorMeta, draw: Draw, local: &mut Tensor) -> Result<()> {
        if local.is_meta() {
            return Ok(());
        }
        let (shape, region) = (meta.shape(), &meta.window().region);
        match self {
            FillSource::RandomElement(distribution) | FillSource::FixedDistribution(distribution) => {
                distribution.fill_tensor(draw, shape, region, local)
            }
            FillSource::Init(init) => init.prepare(draw, shape)?.fill_tensor(region, local),
            FillSource::Permutation => Permutation::new(draw, shape[0] as u64).fill_tensor(region, local),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::rng::Generator;

    #[test]
    fn writes_in_place_where_nobody_else_reads() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
            let mut g = Generator::new(3);
            let mut x = DTensor::zeros(&mesh, DType::F32, [5, 2], "(S1)")?;
            let place = |x: &DTensor| x.local().as_slice::<f32>().map(<[f32]>::as_ptr);
            let before = place(&x)?;
            x.fill_random(Distribution::UNIT, &mut g)?;
            assert_eq!(place(&x)?, before);
            let kept = x.clone();
            let values = kept.local().to_vec::<f32>()?;
            x.fill_init(Init::Ones, &mut g)?;
            assert_eq!((kept.local().to_vec::<f32>()?, x.local().to_vec::<f32>()?), (values, vec![1.0; 5]));
            assert_eq!(g.draws(), 2);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn what_is_refused_does_not_count() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
            let mut g = Generator::new(3);
            let rows = || "(S0)".parse::<Layout>();
            let said = |r: Result<DTensor>| r.map(|x| x.spec().to_string()).unwrap_err().to_string();
            assert_eq!(
                said(DTensor::rand(&mesh, DType::F32, [5], "(P(sum))", &mut g)),
                "rand: a Partial layout has no values of its own; got f32[5]@(a:P(sum)); redistribute first"
            );
            let partial = DTensor::from_local(&mesh, Tensor::zeros(DType::F32, [5]), [5], "(P(sum))")?;
            for refused in [
                said(partial.randn_like(&mut g)),
                said(DTensor::init(&mesh, DType::F32, [5], "(P(sum))", Init::Ones, &mut g)),
                said(DTensor::randperm(&mesh, 5, "(P(sum))", &mut g)),
            ] {
                assert!(refused.contains("a Partial layout has no values"), "{refused}");
            }
            // Each method refuses in its own name.
            let wrong = DTensor::zeros(&mesh, DType::I64, [5], rows()?)?;
            for (verb, refused) in [
                ("rand", said(DTensor::rand(&mesh, DType::I64, [5], rows()?, &mut g))),
                ("rand_like", said(wrong.rand_like(&mut g))),
                ("randn_like", said(wrong.randn_like(&mut g))),
                ("random_like", said(partial.random_like(Distribution::UNIT, &mut g))),
                ("init", said(DTensor::init(&mesh, DType::I64, [5], rows()?, Init::Ones, &mut g))),
                ("fill_init", said(wrong.clone().fill_init(Init::Ones, &mut g).map(|()| wrong.clone()))),
                (
                    "fill_random",
                    said(partial.clone().fill_random(Distribution::UNIT, &mut g).map(|()| wrong.clone())),
                ),
            ] {
                assert!(refused.starts_with(&format!("{verb}: ")), "{verb} says: {refused}");
            }
            assert_eq!(
                said(DTensor::randn(&mesh, DType::I64, [5], rows()?, &mut g)),
                "randn: this dtype has no such numbers; got i64; draw floats, and cast"
            );
            assert_eq!(
                said(DTensor::random(&mesh, DType::F16, [5], rows()?, Distribution::Bits, &mut g)),
                "bits: this dtype has no such numbers; got f16; draw integers, or another distribution"
            );
            said(DTensor::init(&mesh, DType::F32, [5], rows()?, Init::KaimingNormal { gain: 1.0 }, &mut g));
            said(DTensor::init(&mesh, DType::I32, [5, 5], rows()?, Init::Zeros, &mut g));
            said(partial.shuffle(1, &mut g));
            let mut leaf = DTensor::zeros(&mesh, DType::F32, [5], rows()?)?.requires_grad()?;
            assert_eq!(
                leaf.fill_random(Distribution::UNIT, &mut g).unwrap_err().to_string(),
                "fill_random: a tensor with a history cannot be overwritten; got f32[5]@(a:S0); draw a tensor like it, or \
                 detach it first"
            );
            assert_eq!(g.draws(), 0);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}

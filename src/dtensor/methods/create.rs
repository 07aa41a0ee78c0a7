//! Tensors made from one value or from global indices: sequences, bands of diagonals, masks, one-hot rows, and a program's own formulas.
//!
//! Every rank computes its own shard; no rank holds the whole, and nothing is communicated.

use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::tensor::dtensor::{DTensor, refuse_partial};
use crate::dtensor::tensor::lineage::{lineage_of_full, lineage_of_new};
use crate::error::{Error, Result};
use crate::ops::{DiagonalBand, IndexSequence, KeepBand, OneHot, band, sequence};
use crate::placement::{IntoLayout, Layout};
use crate::tensor::{DType, Element, Scalar, Shape, Tensor};

/// Creation from a value, and from global indices.
impl DTensor {
    /// Creates a tensor with all elements equal to `value`. Each rank allocates its shard only; communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [3, 2], "(S0)", 0.5)?;
    ///     assert_eq!(x.local().shape()[0], [2, 1][rank.rank()]);
    ///     assert_eq!(x.full_tensor()?.to_vec::<f32>()?, [0.5; 6]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit the shape, and a `Partial` layout.
    pub fn full(
        mesh: &DeviceMesh,
        dtype: DType,
        shape: impl Into<Shape>,
        layout: impl IntoLayout,
        value: impl Into<Scalar>,
    ) -> Result<DTensor> {
        Self::full_of(mesh, dtype, &shape.into(), &layout.into_layout()?, value.into())
    }

    fn full_of(
        mesh: &DeviceMesh,
        dtype: DType,
        shape: &Shape,
        layout: &Layout,
        value: Scalar,
    ) -> Result<DTensor> {
        let meta = mesh.meta(dtype, shape, layout)?;
        refuse_partial("full", &meta)?;
        let lineage = lineage_of_full(&meta, value);
        Ok(Self::wrap(mesh, Tensor::full_on(mesh.device(), dtype, meta.local_shape(), value)?, meta, lineage))
    }

    /// Creates a tensor of zeros. Each rank allocates its shard only; communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::I64, [4], "(S0)")?;
    ///     assert_eq!(x.local().to_vec::<i64>()?, [0, 0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::full`] refuses.
    pub fn zeros(
        mesh: &DeviceMesh,
        dtype: DType,
        shape: impl Into<Shape>,
        layout: impl IntoLayout,
    ) -> Result<DTensor> {
        Self::full(mesh, dtype, shape, layout, 0.0)
    }

    /// Creates a tensor of ones (true for bools). Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::ones(&mesh, DType::Bool, [3], "(S0)")?;
    ///     assert_eq!(x.local().to_vec::<bool>()?, [vec![true, true], vec![true]][rank.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::full`] refuses.
    pub fn ones(
        mesh: &DeviceMesh,
        dtype: DType,
        shape: impl Into<Shape>,
        layout: impl IntoLayout,
    ) -> Result<DTensor> {
        Self::full(mesh, dtype, shape, layout, 1.0)
    }

    /// Creates a tensor of zeros with this tensor's dtype, shape and layout. `Partial` axes become replicated.
    /// Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::ones(&mesh, DType::F32, [5, 3], "(S1)")?;
    ///     assert_eq!(x.zeros_like()?.spec().to_string(), "f32[5, 3]@(dp:S1)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the device has no memory left.
    pub fn zeros_like(&self) -> Result<DTensor> {
        self.full_like(0.0)
    }

    /// Creates a tensor of ones with this tensor's dtype, shape and layout. `Partial` axes become replicated.
    /// Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::I32, [4], "(S0)")?;
    ///     assert_eq!(x.ones_like()?.local().to_vec::<i32>()?, [1, 1]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the device has no memory left.
    pub fn ones_like(&self) -> Result<DTensor> {
        self.full_like(1.0)
    }

    /// Creates a tensor of equal elements with this tensor's dtype, shape and layout. `Partial` axes become replicated.
    /// Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4], "(S0)")?;
    ///     let sum = x.sum_all()?; // P(sum)
    ///     assert_eq!(sum.full_like(7)?.spec().to_string(), "f32[]@(dp:R)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the device has no memory left.
    pub fn full_like(&self, value: impl Into<Scalar>) -> Result<DTensor> {
        Self::full(self.mesh(), self.dtype(), self.shape(), self.layout().reduced(), value)
    }

    /// Creates the numbers `start`, `start + step`, ... below `end` (above `end` for a negative step), of shape
    /// `[ceil((end - start) / step)]`.
    ///
    /// Floats are computed in f64 as `start + i * step` and rounded once; integers are exact. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let time: usize = 5;
    ///     let positions = DTensor::arange(&mesh, DType::I64, 0, time, 1, "(S0)")?;
    ///     assert_eq!(positions.local().to_vec::<i64>()?, [vec![0, 1, 2], vec![3, 4]][rank.rank()]);
    ///     let down = DTensor::arange(&mesh, DType::F32, 1.0, 0.0, -0.25, "(S0)")?;
    ///     assert_eq!(down.full_tensor()?.to_vec::<f32>()?, [1.0, 0.75, 0.5, 0.25]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a step of 0 or away from `end`, numbers that are not finite, integers that the dtype does not have, bools, a
    /// layout that does not fit, and `Partial`.
    pub fn arange(
        mesh: &DeviceMesh,
        dtype: DType,
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        step: impl Into<Scalar>,
        layout: impl IntoLayout,
    ) -> Result<DTensor> {
        let [start, end, step] = [start.into(), end.into(), step.into()].map(Scalar::to_f64);
        let refuse = |rule: &str, remedy: &str| {
            Err(Error::invalid("arange", rule, format!("{start}, {end}, {step} in {dtype}"), remedy))
        };
        if ![start, end, step].iter().all(|x| x.is_finite()) || step == 0.0 || (end - start) / step < 0.0 {
            return refuse("wants finite numbers and a step from start towards end", "");
        }
        let len = ((end - start) / step).ceil();
        if len >= 9e15 {
            return refuse("the sequence has more elements than a tensor can have", "use a larger step");
        }
        expect_sequence("arange", dtype, [start, step, start + (len - 1.0).max(0.0) * step])?;
        let numbers = IndexSequence { start, step, end, last: len as u64, turn: u64::MAX };
        Self::sequence_of("arange", mesh, dtype, len as usize, layout.into_layout()?, numbers)
    }

    /// Creates `len` numbers at equal distances from `start` to `end`, both included.
    ///
    /// Computed in f64 and rounded once: the first half from `start` upwards, the second from `end` downwards, as by
    /// PyTorch, so that both ends are met exactly. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::linspace(&mesh, DType::F32, 0, 1, 5, "(S0)")?;
    ///     assert_eq!(x.full_tensor()?.to_vec::<f32>()?, [0.0, 0.25, 0.5, 0.75, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses ends that are not finite, dtypes that are not floating-point, a layout that does not fit, and `Partial`.
    pub fn linspace(
        mesh: &DeviceMesh,
        dtype: DType,
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        len: usize,
        layout: impl IntoLayout,
    ) -> Result<DTensor> {
        let [start, end] = [start.into(), end.into()].map(Scalar::to_f64);
        dtype.expect_float("linspace")?;
        let steps = len.saturating_sub(1).max(1) as f64;
        // Halves first: the difference of two finite numbers may be infinite. It is the step of two numbers alone, which
        // is multiplied by 0; an infinite one would give NaN.
        let step = ((end / 2.0 - start / 2.0) / steps * 2.0).clamp(f64::MIN, f64::MAX);
        if !start.is_finite() || !end.is_finite() {
            let given = format!("{start} to {end}");
            return Err(Error::invalid("linspace", "the ends are not finite", given, ""));
        }
        let (last, turn) = (len.saturating_sub(1) as u64, if len == 1 { 1 } else { len as u64 / 2 });
        let numbers = IndexSequence { start, step, end, last, turn };
        Self::sequence_of("linspace", mesh, dtype, len, layout.into_layout()?, numbers)
    }

    /// Creates `len` numbers `base^x` for [`DTensor::linspace`]'s `x` from `start` to `end`.
    ///
    /// Computed in f64 and rounded once. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::logspace(&mesh, DType::F32, 0, 3, 4, 10.0, "(S0)")?;
    ///     assert_eq!(x.full_tensor()?.to_vec::<f32>()?, [1.0, 10.0, 100.0, 1000.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::linspace`] refuses.
    pub fn logspace(
        mesh: &DeviceMesh,
        dtype: DType,
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        len: usize,
        base: f64,
        layout: impl IntoLayout,
    ) -> Result<DTensor> {
        dtype.expect_float("logspace")?;
        let exponents = Self::linspace(mesh, DType::F64, start, end, len, layout)?;
        exponents.full_like(base)?.pow(&exponents)?.cast(dtype)
    }

    /// Creates a matrix with ones on the main diagonal and zeros elsewhere. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::eye(&mesh, DType::I32, 2, 3, "(S1)")?;
    ///     assert_eq!(x.local().to_vec::<i32>()?, [vec![1, 0, 0, 1], vec![0, 0]][rank.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit the shape, and `Partial`.
    pub fn eye(
        mesh: &DeviceMesh,
        dtype: DType,
        rows: usize,
        columns: usize,
        layout: impl IntoLayout,
    ) -> Result<DTensor> {
        let diagonal = DiagonalBand { low: 0, high: 0 };
        Self::band_of("eye", mesh, dtype, [rows, columns].into(), diagonal, layout.into_layout()?)
    }

    /// Creates a boolean mask that is true at the diagonals of `band`: where `low <= j - i <= high` for the last two
    /// indices `i` and `j`. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, ops::DiagonalBand};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let window = DiagonalBand { low: -1, high: 0 }; // each query sees its own key and the one before
    ///     let mask = DTensor::band_mask(&mesh, [3, 3], window, "(S0)")?;
    ///     let want = [true, false, false, true, true, false, false, true, true];
    ///     assert_eq!(mask.full_tensor()?.to_vec::<bool>()?, want);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses fewer than two dims, a layout that does not fit the shape, and `Partial`.
    pub fn band_mask(
        mesh: &DeviceMesh,
        shape: impl Into<Shape>,
        band: DiagonalBand,
        layout: impl IntoLayout,
    ) -> Result<DTensor> {
        Self::band_of("band_mask", mesh, DType::Bool, shape.into(), band, layout.into_layout()?)
    }

    /// Creates the mask `[queries, keys]` of causal attention: true if query `i`, which stands at position
    /// `offset + i`, may see key `j`, so `j <= offset + i`.
    ///
    /// [`DTensor::attention`] needs no such tensor; use it to combine masks. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let mask = DTensor::causal_mask(&mesh, 2, 3, 1, "(S0)")?;
    ///     assert_eq!(mask.full_tensor()?.to_vec::<bool>()?, [true, true, false, true, true, true]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit the shape, and `Partial`.
    pub fn causal_mask(
        mesh: &DeviceMesh,
        queries: usize,
        keys: usize,
        offset: usize,
        layout: impl IntoLayout,
    ) -> Result<DTensor> {
        let seen = DiagonalBand::up_to(i64::try_from(offset).unwrap_or(i64::MAX));
        Self::band_of("causal_mask", mesh, DType::Bool, [queries, keys].into(), seen, layout.into_layout()?)
    }

    /// Creates a tensor whose element at global index `i` is `value(i)`. Each rank calls `value` for the elements of its
    /// shard, in ascending order. On a CUDA device the shard is computed on the host and copied.
    ///
    /// `value` must return the same element for an index on every rank. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     // ALiBi's bias: minus the distance of query and key.
    ///     let bias = |i: &[usize]| -(i[0].abs_diff(i[1]) as f32);
    ///     let x = DTensor::from_fn(&mesh, [2, 3], "(S0)", bias)?;
    ///     assert_eq!(x.full_tensor()?.to_vec::<f32>()?, [0.0, -1.0, -2.0, -1.0, 0.0, -1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit the shape, and `Partial`.
    pub fn from_fn<T: Element>(
        mesh: &DeviceMesh,
        shape: impl Into<Shape>,
        layout: impl IntoLayout,
        mut value: impl FnMut(&[usize]) -> T,
    ) -> Result<DTensor> {
        let shape = shape.into();
        let meta = mesh.meta(T::DTYPE, &shape, &layout.into_layout()?)?;
        refuse_partial("from_fn", &meta)?;
        let device = mesh.device();
        let local = if device == crate::tensor::Device::Meta {
            Tensor::uninit_on(device, T::DTYPE, meta.local_shape().clone())?
        } else {
            let mut index: Vec<usize> = vec![0; shape.len()];
            let fill = |out: &mut [T]| {
                meta.window().region.runs(&shape, |first, at, len| {
                    for (x, mut e) in out[at..at + len].iter_mut().zip(first as usize..) {
                        for d in (0..shape.len()).rev() {
                            (index[d], e) = (e % shape[d], e / shape[d]);
                        }
                        *x = value(&index);
                    }
                });
            };
            Tensor::build(meta.local_shape().clone(), fill).to_device(device)?
        };
        let lineage = lineage_of_new("from_fn", &meta, &[]);
        Ok(Self::wrap(mesh, local, meta, lineage))
    }

    /// Returns rows of `classes` elements that are 1 at this tensor's indices and 0 elsewhere: `[..]` (i64) gives
    /// `[.., classes]`.
    ///
    /// Shards of the indices stay; nothing is communicated. PyTorch's `one_hot` always gives i64; here `dtype` says.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let classes = DTensor::arange(&mesh, DType::I64, 2, 0, -1, "(S0)")?; // 2, 1
    ///     let rows = classes.one_hot(3, DType::F32)?;
    ///     assert_eq!(rows.spec().to_string(), "f32[2, 3]@(dp:S0)");
    ///     assert_eq!(rows.full_tensor()?.to_vec::<f32>()?, [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes other than i64, 0 classes, and indices that are not below `classes`.
    pub fn one_hot(&self, classes: usize, dtype: DType) -> Result<DTensor> {
        DTensor::apply_one(&OneHot { classes, dtype }, &[self])
    }

    /// Returns the elements `(i, j)` of the last two dims with `j - i <= diagonal`, and 0 elsewhere: the lower triangle if
    /// `diagonal` is 0. Communicates nothing; partial sums, maxima and minima stay partial.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::ones(&mesh, DType::F32, [3, 3], "(S1)")?.tril(-1)?;
    ///     assert_eq!(x.full_tensor()?.to_vec::<f32>()?, [0., 0., 0., 1., 0., 0., 1., 1., 0.]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses tensors with fewer than two dims.
    pub fn tril(&self, diagonal: i64) -> Result<DTensor> {
        DTensor::apply_one(&KeepBand { band: DiagonalBand::up_to(diagonal) }, &[self])
    }

    /// Returns the elements `(i, j)` of the last two dims with `j - i >= diagonal`, and 0 elsewhere: the upper triangle if
    /// `diagonal` is 0. Communicates nothing; partial sums, maxima and minima stay partial.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::ones(&mesh, DType::I64, [2, 3], "(S0)")?.triu(1)?;
    ///     assert_eq!(x.full_tensor()?.to_vec::<i64>()?, [0, 1, 1, 0, 0, 1]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses tensors with fewer than two dims.
    pub fn triu(&self, diagonal: i64) -> Result<DTensor> {
        DTensor::apply_one(&KeepBand { band: DiagonalBand::from(diagonal) }, &[self])
    }

    fn sequence_of(
        verb: &'static str,
        mesh: &DeviceMesh,
        dtype: DType,
        len: usize,
        layout: Layout,
        numbers: IndexSequence,
    ) -> Result<DTensor> {
        let shape = Shape::from([len]);
        let meta = mesh.meta(dtype, &shape, &layout)?;
        refuse_partial(verb, &meta)?;
        let local = sequence(mesh.device(), dtype, &shape, &meta.window().region, numbers)?;
        let IndexSequence { start, step, end, last, turn } = numbers;
        let lineage =
            lineage_of_new(verb, &meta, &[start.to_bits(), step.to_bits(), end.to_bits(), last, turn]);
        Ok(Self::wrap(mesh, local, meta, lineage))
    }

    fn band_of(
        verb: &'static str,
        mesh: &DeviceMesh,
        dtype: DType,
        shape: Shape,
        diagonals: DiagonalBand,
        layout: Layout,
    ) -> Result<DTensor> {
        if shape.len() < 2 {
            return Err(Error::invalid(verb, "diagonals need two dims", format!("shape {shape}"), ""));
        }
        let meta = mesh.meta(dtype, &shape, &layout)?;
        refuse_partial(verb, &meta)?;
        let local = band(mesh.device(), dtype, &shape, &meta.window().region, diagonals, [1.0, 0.0])?;
        let lineage = lineage_of_new(verb, &meta, &[diagonals.low as u64, diagonals.high as u64]);
        Ok(Self::wrap(mesh, local, meta, lineage))
    }
}

/// Refuses bools, and for an integer dtype numbers that it does not have.
fn expect_sequence(verb: &str, dtype: DType, numbers: [f64; 3]) -> Result<()> {
    let (low, high) = match dtype {
        DType::Bool => {
            return Err(Error::invalid(verb, "there are no sequences of bools", "bool", "cast integers"));
        }
        DType::U8 => (0.0, 255.0),
        DType::I32 => (f64::from(i32::MIN), f64::from(i32::MAX)),
        // An integer beyond may have been rounded to 2^53.
        DType::I64 => (1.0 - 2f64.powi(53), 2f64.powi(53) - 1.0),
        DType::F32 | DType::F64 | DType::F16 | DType::BF16 => return Ok(()),
    };
    let [start, step, last] = numbers;
    if numbers.iter().all(|x| x.fract() == 0.0) && [start, last].iter().all(|x| (low..=high).contains(x)) {
        return Ok(());
    }
    let rule = format!("{dtype} has no such numbers");
    Err(Error::invalid(verb, rule, format!("{start} to {last} by {step}"), "use another dtype"))
}

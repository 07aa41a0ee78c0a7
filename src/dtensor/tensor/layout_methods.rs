//! Methods that change a tensor's layout, but not its values.

use std::rc::Rc;

use super::dtensor::DTensor;
use super::start_moves::{TensorMove, gather_places, start_moves};
use crate::comm::operator_scope_if_none;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::plan::explain::note_move;
use crate::dtensor::redistribute::{self, InFlight, Redistribution};
use crate::error::{Error, Result};
use crate::placement::{IntoLayout, Layout, Spec};
use crate::tensor::{DType, Tensor};

/// Methods that change the layout.
impl DTensor {
    /// Returns the same tensor in another layout. Values do not change, and the derivative is the identity.
    ///
    /// Without `Partial`, each rank receives exactly the elements that it lacks, once, in one collective call. With
    /// `Partial`, the reductions and moves are the cheapest that keep the bits: see [`Redistribution`].
    /// [`DTensor::explain`] tells the calls and bytes without communicating.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec((0..6).map(|i| i as f32).collect(), [3, 2])?, "(S0)")?;
    ///     let y = x.redistribute("(S1)")?; // one all-to-all
    ///     assert_eq!(y.local().to_vec::<f32>()?, [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]][rank.rank()]);
    ///     // Rank 0 lacked element 4, rank 1 elements 1 and 3.
    ///     assert_eq!(mesh.received_bytes(), [4, 8][rank.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit; returns an error if communication fails.
    pub fn redistribute(&self, layout: impl IntoLayout) -> Result<DTensor> {
        self.redistribute_into(layout.into_layout()?)
    }

    fn redistribute_into(&self, layout: Layout) -> Result<DTensor> {
        if layout == *self.layout() {
            return Ok(self.clone());
        }
        self.redistribute_to(&self.mesh.intern(self.meta.spec().with_layout(layout)?)?)
    }

    /// Runs [`DTensor::redistribute`] to the layout of `to`, the metadata of this tensor in another layout.
    pub(in crate::dtensor) fn redistribute_to(&self, to: &Rc<TensorMeta>) -> Result<DTensor> {
        let DTensor { meta, mesh, .. } = self;
        let m = redistribute::find(mesh, meta, to)?;
        let _label = operator_scope_if_none("redistribute");
        note_move(mesh, &m, meta, to);
        let local = match m.communicates() {
            // If it has several calls, it first finishes those that were started before it.
            true => self.start_move(&m)?.finish(mesh)?,
            false => self.run_move(&m)?,
        };
        // The derivative of the identity is the identity.
        Ok(DTensor { history: self.history.clone(), ..DTensor::wrap(mesh, local, to.clone(), self.lineage) })
    }

    /// Returns this tensor with every `Partial` axis reduced to `Replicate`: by an all-reduce, or the tensor itself
    /// if it has no `Partial` axis.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     let sum = x.sum_all()?;
    ///     assert_eq!(sum.layout().to_string(), "(P(sum))"); // each rank has added up its own elements
    ///     let sum = sum.reduce_partial()?;
    ///     assert_eq!((sum.layout().to_string(), sum.local().item()?), ("(R)".to_string(), 6.0));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if communication fails.
    pub fn reduce_partial(&self) -> Result<DTensor> {
        if !self.layout().has_partial() {
            return Ok(self.clone());
        }
        self.redistribute(self.layout().reduced())
    }

    /// Describes in words what [`DTensor::redistribute`] would do on this rank. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::{Layout, short::{R, shard}}, tensor::DType};
    /// let said = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5, 4], Layout::new([shard(0)]))?;
    ///     x.explain(Layout::new([R]))
    /// })?;
    /// assert_eq!(said[0], "all_gather over dp{0, 1}: receives 32 bytes"); // the two rows it lacks
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit.
    pub fn explain(&self, layout: impl IntoLayout) -> Result<String> {
        Ok(self.plan_redistribute(layout)?.to_string())
    }

    /// Returns the plan of [`DTensor::redistribute`] on this rank: its calls, and the bytes that this rank would
    /// receive. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5, 4], "(S0)")?;
    ///     let plan = x.plan_redistribute("(R)")?;
    ///     assert_eq!(plan.collectives().collect::<Vec<_>>(), ["all_gather"]);
    ///     assert_eq!(plan.received_bytes(), [32, 48][rank.rank()]); // the rows that the other rank holds
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit.
    pub fn plan_redistribute(&self, layout: impl IntoLayout) -> Result<Redistribution> {
        let spec = self.meta.spec();
        Redistribution::plan(spec, &spec.with_layout(layout.into_layout()?)?)
    }

    /// Draws which ranks store which elements, as text: see [`Spec::draw`](crate::placement::Spec::draw). Communicates
    /// nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// let pictures = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     Ok(DTensor::zeros(&mesh, DType::F32, [3], "(S0)")?.draw())
    /// })?;
    /// assert_eq!(pictures[0].lines().nth(3), Some("│  0  │ 1 │"));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn draw(&self) -> String {
        self.spec().draw()
    }

    /// Draws which ranks store which elements, as an SVG image: see [`Spec::draw_svg`](crate::placement::Spec::draw_svg).
    /// Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// let images = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     Ok(DTensor::zeros(&mesh, DType::F32, [3], "(S0)")?.draw_svg())
    /// })?;
    /// assert!(images[0].contains("<title>dim 0: 2: rank 1</title>"));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn draw_svg(&self) -> String {
        self.spec().draw_svg()
    }

    /// Starts a redistribution, and returns when its first collective call is in flight. Other work can run before
    /// [`PendingRedistribution::wait`].
    ///
    /// Several redistributions may be in flight, and each rank may wait for them in its own order. If a plan has a
    /// second call ([`DTensor::plan_redistribute`] tells; some moves from `Partial` have one), that call starts when
    /// this redistribution, or a later one with several calls, is waited for: then either all ranks wait for it or
    /// all drop it. A redistribution of a single call may be dropped by some ranks only. Over an engine without
    /// shared memory, a large all-reduce completes before this returns.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     let pending = x.redistribute_async("(R)")?;
    ///     let doubled = x.mul_scalar(2.0)?; // runs while the all-gather is in flight
    ///     assert_eq!(pending.wait()?.local().to_vec::<f32>()?, [1.0, 2.0, 3.0]);
    ///     assert_eq!(doubled.full_tensor()?.to_vec::<f32>()?, [2.0, 4.0, 6.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit; returns an error if communication fails.
    pub fn redistribute_async(&self, layout: impl IntoLayout) -> Result<PendingRedistribution> {
        let layout = layout.into_layout()?;
        if layout == *self.layout() {
            return Ok(PendingRedistribution {
                source: self.clone(),
                meta: self.meta.clone(),
                in_flight: None,
            });
        }
        let meta = self.mesh.intern(self.meta.spec().with_layout(layout)?)?;
        let m = redistribute::find(&self.mesh, &self.meta, &meta)?;
        let _label = operator_scope_if_none("redistribute");
        note_move(&self.mesh, &m, &self.meta, &meta);
        let in_flight = Some(self.start_move(&m)?);
        Ok(PendingRedistribution { source: self.clone(), meta, in_flight })
    }

    /// Starts to redistribute several tensors of one mesh, and returns them in their order. Tensors that are gathered along
    /// the same axes share a call.
    pub(crate) fn redistribute_together(of: Vec<(DTensor, Layout)>) -> Result<Vec<PendingRedistribution>> {
        let Some(mesh) = of.first().map(|(x, _)| x.mesh.clone()) else { return Ok(Vec::new()) };
        let _label = operator_scope_if_none("redistribute");
        let to = |(x, layout): (DTensor, Layout)| Ok((mesh.intern(x.meta.spec().with_layout(layout)?)?, x));
        let of: Vec<(Rc<TensorMeta>, DTensor)> = of.into_iter().map(to).collect::<Result<_>>()?;
        let planned = |(to, x): &(Rc<TensorMeta>, DTensor)| {
            let (from, to) = (x.meta.clone(), to.clone());
            Ok(TensorMove { local: x.resident()?, from, to, lineage: x.lineage })
        };
        let started = start_moves(&mesh, of.iter().map(planned).collect::<Result<_>>()?)?;
        let pending =
            |((meta, source), in_flight)| PendingRedistribution { source, meta, in_flight: Some(in_flight) };
        Ok(of.into_iter().zip(started).map(pending).collect())
    }

    /// Returns tensors of one dtype that are often redistributed together to the given layouts, with the same values and stored
    /// so that [`DTensor::redistribute_together`] copies nothing before its calls, if that is possible. None keeps more memory
    /// than its elements take. Communicates nothing.
    pub(crate) fn stored_together(of: Vec<(DTensor, Layout)>) -> Result<Vec<DTensor>> {
        let moved: Vec<(&DTensor, &Layout)> = of.iter().map(|(x, layout)| (x, layout)).collect();
        let places = match moved.first() {
            Some((first, _)) => DTensor::gather_places(&moved, first.dtype())?,
            None => Vec::new(),
        };
        let stored = |((mut x, _), place): ((DTensor, Layout), Option<Tensor>)| {
            x.local = x.resident()?;
            // A part of a larger tensor would keep all of it in memory.
            let own = |x: &Tensor| Tensor::uninit_on(x.device(), x.dtype(), x.shape().clone());
            let place = match place {
                None if x.local.keeps_more() => Some(own(&x.local)?),
                place => place,
            };
            if let Some(mut place) = place {
                let packed = x.local.shape().strides();
                x.local.copy_block(&mut place, x.local.shape(), (0, x.local.strides()), (0, &packed))?;
                x.local = place;
            }
            Ok(x)
        };
        of.into_iter().zip(places).map(stored).collect()
    }

    /// Returns places for tensors in `dtype`, so that [`DTensor::redistribute_together`] to the given layouts copies nothing
    /// before its calls; `None` for those that it copies or does not move. The contents are arbitrary.
    pub(crate) fn gather_places(of: &[(&DTensor, &Layout)], dtype: DType) -> Result<Vec<Option<Tensor>>> {
        let Some(mesh) = of.first().map(|(x, _)| x.mesh.clone()) else { return Ok(Vec::new()) };
        let (mut moved, mut moves) = (Vec::new(), Vec::new());
        for (i, (x, layout)) in of.iter().enumerate().filter(|(_, (x, layout))| x.layout() != *layout) {
            let from = mesh.intern(Spec { dtype, ..x.spec().clone() })?;
            let to = mesh.intern(from.spec().with_layout((*layout).clone())?)?;
            moves.push(TensorMove { local: x.local.clone(), from, to, lineage: x.lineage });
            moved.push(i);
        }
        let mut places = vec![None; of.len()];
        for (k, place) in gather_places(&mesh, moves)? {
            places[moved[k]] = Some(place);
        }
        Ok(places)
    }

    /// Returns the whole tensor on every rank. Each rank receives the elements that it lacks.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.full_tensor()?.to_vec::<f32>()?, [1.0, 2.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if communication fails.
    pub fn full_tensor(&self) -> Result<Tensor> {
        let _guard = self.mesh.no_grad();
        Ok(self.redistribute(Layout::replicated(self.mesh.mesh().ndim()))?.local)
    }

    /// Returns the only element as f64, the same on every rank: that of [`DTensor::full_tensor`]. Every rank calls it.
    /// Communicates nothing if the tensor is replicated, and one element otherwise.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [6], "(S0)", 0.5)?;
    ///     assert_eq!(x.sum_all()?.item()?, 3.0);
    ///     assert!(x.item().unwrap_err().to_string().starts_with("item: the tensor does not have exactly one element"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a tensor of no or several elements; returns an error if communication fails.
    pub fn item(&self) -> Result<f64> {
        if self.numel() != 1 {
            let rule = "the tensor does not have exactly one element";
            return Err(Error::invalid("item", rule, self.spec().to_string(), "reduce or slice it first"));
        }
        self.full_tensor()?.item()
    }
}

/// A redistribution in flight, from [`DTensor::redistribute_async`]. Dropping it is safe.
#[must_use = "a redistribution's errors are lost unless it is waited for"]
pub struct PendingRedistribution {
    source: DTensor,
    meta: Rc<TensorMeta>,
    in_flight: Option<InFlight>,
}

impl PendingRedistribution {
    /// Waits for the redistribution, and returns the tensor in its new layout.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [4], "(S0)", 1.5)?;
    ///     let y = x.redistribute_async("(R)")?.wait()?;
    ///     assert_eq!(y.spec().to_string(), "f32[4]@(dp:R)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if communication fails.
    pub fn wait(self) -> Result<DTensor> {
        let PendingRedistribution { source, meta, in_flight } = self;
        let Some(in_flight) = in_flight else { return Ok(source) };
        let mesh = source.mesh.clone();
        let local = in_flight.finish(&mesh)?;
        // The derivative of the identity is the identity.
        Ok(DTensor { history: source.history, ..DTensor::wrap(&mesh, local, meta, source.lineage) })
    }
}

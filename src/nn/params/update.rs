//! Updates of parameters in place, for optimizers.

use std::collections::BTreeSet;
use std::rc::Rc;

use crate::dtensor::{DTensor, DTensors, TensorMeta};
use crate::error::{Error, Result};
use crate::nn::params::Params;
use crate::nn::params::param_id::ParamId;
use crate::ops::Batched;

/// One update of a parameter: an optimizer's operator, and its operands after the parameter itself.
#[derive(Debug)]
pub struct Update<O> {
    /// The parameter.
    pub param: ParamId,
    /// The operator.
    pub op: O,
    /// The operator's operands after the parameter: its gradient, then the optimizer's state. Empty once the update is
    /// made.
    pub operands: DTensors,
    /// The operator's results after the new value; `None` until the update is made.
    pub results: Option<DTensors>,
}

impl<O> Update<O> {
    /// Returns an update that [`Params::update`] can make.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan, Update}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     let update = Update::new(w, "an operator", [params.zeros_like(w)?]);
    ///     assert!(update.param == w && update.operands.len() == 1 && update.results.is_none());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn new(param: ParamId, op: O, operands: impl IntoIterator<Item = DTensor>) -> Update<O> {
        Update { param, op, operands: operands.into_iter().collect(), results: None }
    }
}

impl Params {
    /// Makes an optimizer's updates, in place if no other tensor shares a buffer.
    ///
    /// Each operator gets the parameter as its first operand, before [`Update::operands`]. Its first result is the
    /// parameter's new value; the others become [`Update::results`]. If modules compute in f16 or bf16, an operator that
    /// rounds ([`Batched::ROUNDS`]) also writes the values that the next passes compute with, which are kept beside the
    /// stored ones. On a CUDA device all updates take as few launches as the operator needs ([`Batched`]). Communicates
    /// the moves that the operators ask for: none if state and gradient have the parameter's layout.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Params, Plan, Update}};
    /// use isoshard::ops::{Bits, SgdStep, Unkeyed};
    /// use isoshard::{placement::Layout, rng::Init, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let gradient = params.value(w).sum_all()?.backward()?.take(params.value(w)).expect("w was used");
    ///     let scale = DTensor::full(&mesh, DType::F32, [], Layout::replicated(1), 1.0)?;
    ///     let op = SgdStep { momentum: Bits(0.0), weight_decay: Bits(0.0), nesterov: false, lr: Unkeyed(0.25) };
    ///     params.update(&mut [Update::new(w, op, [gradient, params.zeros_like(w)?, scale])])?;
    ///     assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [0.75; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses, before anything changes: another model's parameter, a parameter that is named twice, operands that an
    /// operator refuses, and an operator whose first result has another dtype, shape or layout than the parameter. If a
    /// rank or a device fails, earlier updates are made and have results; the others keep their operands, except that a
    /// kernel which fails halfway may have written to them.
    pub fn update<O: Batched>(&mut self, updates: &mut [Update<O>]) -> Result<()> {
        self.check_plan()?;
        let mut named = vec![false; self.len()];
        for id in updates.iter().map(|u| u.param) {
            self.expect_own("update", id)?;
            if std::mem::replace(&mut named[id.index()], true) {
                let given = self.path(id).to_string();
                return Err(Error::invalid("update", "a parameter is named twice", given, ""));
            }
        }
        let meta: Vec<Rc<TensorMeta>> =
            updates.iter().map(|u| self.value(u.param).tensor_meta().clone()).collect();
        let accept = |k: usize, outs: &[Rc<TensorMeta>]| {
            let (update, first): (&Rc<TensorMeta>, _) = (&meta[k], outs.first());
            if first == Some(update) {
                return Ok(());
            }
            let rule = "the first result is the parameter's new value, of its dtype, shape and layout";
            let given = first.map_or_else(|| "no result".to_string(), |first| first.spec().to_string());
            Err(Error::invalid("update", rule, format!("{given} for {}", update.spec()), ""))
        };
        for update in updates.iter_mut() {
            let layout = self.value(update.param).layout();
            // A gradient may be sharded less than the parameter, and then a slice of it is this rank's.
            let elsewhere =
                |x: &&mut DTensor| x.shape() == self.value(update.param).shape() && x.layout() != layout;
            for operand in update.operands.iter_mut().filter(elsewhere) {
                *operand = operand.redistribute(layout.clone())?;
            }
        }
        let blocks: Vec<Option<usize>> = updates.iter().map(|u| self.block_of(u.param)).collect();
        let ids: Vec<ParamId> = updates.iter().map(|u| u.param).collect();
        let rounded = if O::ROUNDS { self.take_rounded(&ids)? } else { vec![None; ids.len()] };
        let rounds: Vec<bool> = rounded.iter().map(Option::is_some).collect();
        for (update, rounded) in updates.iter_mut().zip(rounded) {
            update.operands.insert(0, self.value_mut(update.param).take_value());
            let before_last = update.operands.len() - 1;
            rounded.into_iter().for_each(|x| update.operands.insert(before_last, x));
        }
        let mut calls: Vec<_> = updates.iter_mut().map(|u| (&u.op, &mut u.operands)).collect();
        let (outs, mut result) = DTensor::apply_owned_if(&mut calls, accept);
        let mut outs = outs.into_iter();
        let mut scattered = BTreeSet::new();
        for ((update, block), rounds) in updates.iter_mut().zip(blocks).zip(rounds) {
            match outs.next() {
                Some(mut outs) => {
                    result = self.set(update.param, outs.remove(0)).and(result);
                    if rounds {
                        self.keep_rounded(update.param, outs.remove(outs.len() - 1));
                    }
                    update.results = Some(outs);
                    scattered.extend(block.filter(|_| self.block_of(update.param).is_none()));
                }
                None => {
                    self.value_mut(update.param).put_back(update.operands.remove(0));
                    if rounds {
                        // It may have been written, so the next pass rounds.
                        update.operands.remove(update.operands.len() - 2);
                    }
                }
            }
        }
        self.store_together(&scattered).and(result)
    }

    /// Returns zeros of a parameter's dtype, shape and layout: the initial state of an optimizer. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().shard("w", "tp", 1), 7)?;
    ///     let w = params.root().param("w", [3, 4], Init::Ones)?;
    ///     assert_eq!(params.zeros_like(w)?.spec().to_string(), "f32[3, 4]@(tp:S1)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses another model's parameter; returns an error if the device has no memory left.
    pub fn zeros_like(&self, id: ParamId) -> Result<DTensor> {
        self.expect_own("zeros_like", id)?;
        let value = self.value(id);
        DTensor::zeros(self.mesh(), value.dtype(), value.shape(), value.layout().clone())
    }
}

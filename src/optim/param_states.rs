//! The tensors that an update rule keeps for each parameter.

use super::param_tensors::load_by_param;
use crate::checkpoint::{Checkpoint, StateTree};
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::nn::{ParamId, Params};
use crate::tensor::MappedFile;

/// One tensor per parameter, in the parameter's dtype, shape and layout: a state of an update rule, such as a momentum.
/// Parameters that have had no update have none.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::ParamStates, rng::Init};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
///     let w = params.root().param("w", [5], Init::Ones)?;
///     let mut momenta = ParamStates::default();
///     assert!(momenta.get(w).is_none());
///     momenta.prepare(&params, &[w])?; // zeros, each rank those of its shard
///     let momentum = momenta.take(w).expect("it was prepared");
///     momenta.put(w, momentum.add_scalar(0.5)?);
///     assert_eq!(momenta.get(w).expect("put").full_tensor()?.to_vec::<f32>()?, [0.5; 5]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct ParamStates {
    list: Vec<Option<DTensor>>,
    /// The file that has the tensors, if they are not in memory.
    mapped: Option<MappedFile>,
}

impl ParamStates {
    /// Makes zeros for those parameters that have no tensor: under [`fully_shard`](crate::fsdp::fully_shard), those of a unit
    /// lie in one block of memory, as its parameters do. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::ParamStates, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     let mut states = ParamStates::default();
    ///     states.prepare(&params, &[w])?;
    ///     assert_eq!(states.get(w).expect("made").full_tensor()?.to_vec::<f32>()?, [0.0; 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses another model's parameter; returns an error if the device has no memory left.
    pub fn prepare(&mut self, params: &Params, ids: &[ParamId]) -> Result<()> {
        self.list.resize_with(params.len().max(self.list.len()), || None);
        self.map_all()?;
        ids.iter().try_for_each(|&id| params.expect_own("prepare", id))?;
        let missing: Vec<ParamId> =
            ids.iter().copied().filter(|id| self.list[id.index()].is_none()).collect();
        let Some(file) = &self.mapped else {
            let values: Vec<&DTensor> = missing.iter().map(|&id| params.value(id)).collect();
            let zeros = DTensor::zeros_like_together(&values)?;
            missing.iter().zip(zeros).for_each(|(id, zeros)| self.list[id.index()] = Some(zeros));
            return Ok(());
        };
        // No second tensor is made in memory before one is in the file.
        for id in missing {
            self.list[id.index()] = Some(params.zeros_like(id)?.mapped_in(file)?);
        }
        Ok(())
    }

    /// Moves the tensors to a file that is mapped into memory, and keeps them there, as
    /// [`Params::offload`] does with the parameters. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::ParamStates};
    /// use isoshard::{rng::Init, tensor::MappedFile};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     let mut momenta = ParamStates::default();
    ///     momenta.offload(&params, &MappedFile::in_dir(std::env::temp_dir())?)?;
    ///     momenta.prepare(&params, &[w])?;
    ///     assert!(momenta.get(w).expect("prepared").local().is_mapped());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses parameters on [`Device::Meta`](crate::tensor::Device::Meta); returns an error if the disk is full.
    pub fn offload(&mut self, params: &Params, file: &MappedFile) -> Result<()> {
        params.expect_elements("offload")?;
        self.mapped = Some(file.clone());
        self.map_all()
    }

    /// Moves to the file, if there is one, those tensors that are not there: an update that could not write in place has left
    /// its result in memory.
    fn map_all(&mut self) -> Result<()> {
        let Some(file) = &self.mapped else { return Ok(()) };
        for value in self.list.iter_mut().flatten().filter(|value| !value.is_mapped()) {
            *value = value.mapped_in(file)?;
        }
        Ok(())
    }

    /// Returns a parameter's tensor, if it has one.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::{AdamW, Sgd}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     let mut optimizer = Sgd::new().momentum(0.5).rate(0.25);
    ///     let mut gradients = params.value(w).sum_all()?.backward()?;
    ///     optimizer.step(&mut params, &mut gradients)?;
    ///     let momentum = optimizer.rule().momenta().get(w).expect("there was a step");
    ///     assert_eq!(momentum.full_tensor()?.to_vec::<f32>()?, [1.0; 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn get(&self, id: ParamId) -> Option<&DTensor> {
        self.list.get(id.index())?.as_ref()
    }

    /// Removes and returns a parameter's tensor, for an [`Update`](crate::nn::Update) that changes it in place.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::ParamStates, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     let mut states = ParamStates::default();
    ///     states.prepare(&params, &[w])?;
    ///     assert!(states.take(w).is_some() && states.take(w).is_none());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn take(&mut self, id: ParamId) -> Option<DTensor> {
        self.list.get_mut(id.index())?.take()
    }

    /// Gives a parameter its tensor: the result of an update.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::ParamStates, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     let mut states = ParamStates::default();
    ///     states.put(w, params.zeros_like(w)?);
    ///     assert!(states.get(w).is_some());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn put(&mut self, id: ParamId, value: DTensor) {
        if self.list.len() <= id.index() {
            self.list.resize_with(id.index() + 1, || None);
        }
        self.list[id.index()] = Some(value);
    }

    /// Replaces a parameter's tensor, such as by one of another program's state.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::Sgd, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let mut optimizer = Sgd::new().momentum(0.5).rate(0.25);
    ///     let momentum = params.zeros_like(w)?.add_scalar(2.0)?;
    ///     optimizer.rule_mut().momenta_mut().set(&params, w, momentum)?;
    ///     let mut gradients = params.value(w).sum_all()?.backward()?;
    ///     optimizer.step(&mut params, &mut gradients)?;
    ///     assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [0.5; 3]); // 1 - 0.25 · (0.5 · 2 + 1)
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses another model's parameter, and a tensor of another dtype, shape or layout than the parameter's.
    pub fn set(&mut self, params: &Params, id: ParamId, value: DTensor) -> Result<()> {
        if !params.ids().any(|own| own == id) {
            let given = format!("{id:?}, this one has {} parameter(s)", params.len());
            return Err(Error::invalid(
                "set",
                "the parameter is another model's",
                given,
                "pass an id of Params::ids",
            ));
        }
        ParamStates::expect_like(params, id, &value)?;
        self.put(id, value.detach());
        Ok(())
    }

    /// Refuses a state that is not like its parameter.
    pub(super) fn expect_like(params: &Params, id: ParamId, value: &DTensor) -> Result<()> {
        let param = params.value(id);
        if value.tensor_meta() == param.tensor_meta() {
            return Ok(());
        }
        let rule = "a state has its parameter's dtype, shape and layout";
        let given = format!("{} for {}", value.spec(), param.spec());
        Err(Error::invalid("set", rule, given, "redistribute it first").at(params.path(id)))
    }

    /// Returns the tensors by their parameters' paths, for a checkpoint. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::ParamStates, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     let mut states = ParamStates::default();
    ///     states.prepare(&params, &[w])?;
    ///     assert!(states.state(&params)?.tensor("w").is_some());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns no error: the paths of parameters differ.
    pub fn state(&self, params: &Params) -> Result<StateTree> {
        let mut state = StateTree::new();
        for (id, value) in params.ids().zip(&self.list) {
            value.iter().try_for_each(|value| state.insert(params.path(id), value.clone()))?;
        }
        Ok(state)
    }

    /// Replaces the tensors by saved ones, in the layouts of `params`. Parameters that the checkpoint leaves out have none
    /// then. All ranks call this together.
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint}, comm::spmd, dtensor::DeviceMesh};
    /// use isoshard::{nn::{Params, Plan}, optim::ParamStates, rng::Init};
    /// let dir = std::env::temp_dir().join(format!("isoshard-states-{}", std::process::id()));
    /// # let also = dir.clone();
    /// spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let mut momenta = ParamStates::default();
    ///     momenta.put(w, params.zeros_like(w)?.add_scalar(2.0)?);
    ///     checkpoint::save(&mesh, &dir, &momenta.state(&params)?)?;
    ///     momenta.load_state(&params, &Checkpoint::open(&dir)?)?;
    ///     assert_eq!(momenta.get(w).expect("loaded").full_tensor()?.to_vec::<f32>()?, [2.0; 3]);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a checkpoint with tensors of other paths, dtypes or shapes, and files that are not those that were saved; the
    /// tensors are unchanged then.
    pub fn load_state(&mut self, params: &Params, saved: &Checkpoint) -> Result<()> {
        let list = load_by_param(params, saved)?;
        let mut loaded = ParamStates { list: Vec::new(), mapped: self.mapped.clone() };
        if self.mapped.is_none() {
            let there = params.ids().zip(&list).filter(|(_, value)| value.is_some()).map(|(id, _)| id);
            loaded.prepare(params, &there.collect::<Vec<_>>())?;
        }
        loaded.list.resize_with(list.len(), || None);
        for (own, value) in loaded.list.iter_mut().zip(list) {
            let is_there = match (&mut *own, &value) {
                (Some(own), Some(value)) => own.overwrite_part(value)?,
                _ => false,
            };
            if !is_there {
                *own = value;
            }
        }
        loaded.map_all()?;
        *self = loaded;
        Ok(())
    }

    /// Returns an empty list whose tensors will lie in the same file, if these do.
    pub(super) fn emptied(&self) -> ParamStates {
        ParamStates { list: Vec::new(), mapped: self.mapped.clone() }
    }

    /// Returns the parameters that have a tensor.
    pub(super) fn has(&self) -> Vec<bool> {
        self.list.iter().map(Option::is_some).collect()
    }
}

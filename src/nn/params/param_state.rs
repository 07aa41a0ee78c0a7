//! Parameters in checkpoints, and their digest.

use crate::base::Fnv1a;
use crate::checkpoint::{Checkpoint, StateTree};
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::nn::params::Params;
use crate::placement::Layout;
use crate::tensor::{Device, sort_by_key};

impl Params {
    /// Returns all parameters by path, for a checkpoint. Communicates nothing; the tree shares the parameters' memory.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Linear, Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     Linear::new(params.root().child("map"), 3, 2, Init::Ones)?;
    ///     let names: Vec<String> = params.state()?.tensors().map(|(name, _)| name.into()).collect();
    ///     assert_eq!(names, ["map.bias", "map.weight"]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns no error: the paths of parameters differ.
    pub fn state(&self) -> Result<StateTree> {
        let mut state = StateTree::new();
        self.ids().try_for_each(|id| state.insert(self.path(id), self.value(id).clone()))?;
        Ok(state)
    }

    /// Returns a hash (FNV-1a, 64 bits) of all parameters' global values, in the order of their paths. Equal training
    /// gives equal digests on any mesh. Gathers one parameter after another on every rank.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// let digest = |seed| spmd(1, move |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), seed)?;
    ///     params.root().param("w", [3], Init::Normal { mean: 0.0, std: 1.0 })?;
    ///     params.digest()
    /// });
    /// assert!(digest(7)? == digest(7)? && digest(7)? != digest(8)?);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if a rank fails.
    pub fn digest(&self) -> Result<u64> {
        let mut order: Vec<(&str, &DTensor)> = self.ids().map(|id| (self.path(id), self.value(id))).collect();
        sort_by_key(&mut order, |(path, _)| *path);
        let mut hash = Fnv1a::new();
        for (_, value) in order {
            let values = value.full_tensor()?.to_device(Device::Cpu)?.contiguous()?;
            hash.add(values.as_bytes()?.iter().copied());
        }
        Ok(hash.value())
    }

    /// Replaces every parameter by the saved one of its path, in this mesh's and plan's layouts, with the bits that any
    /// other mesh has saved. All ranks call this together ([`Checkpoint::tensors`]).
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint}, comm::spmd, dtensor::DeviceMesh};
    /// use isoshard::{nn::{Linear, Params, Plan}, rng::Init};
    /// let dir = std::env::temp_dir().join(format!("isoshard-params-{}", std::process::id()));
    /// let model = |mesh: &DeviceMesh, seed| {
    ///     let mut params = Params::new(mesh, Plan::default().fsdp("fsdp"), seed)?;
    ///     Linear::new(params.root().child("map"), 5, 3, Init::Normal { mean: 0.0, std: 1.0 })?;
    ///     Ok::<_, isoshard::Error>(params)
    /// };
    /// let to = dir.clone();
    /// let saved = spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let params = model(&mesh, 7)?;
    ///     checkpoint::save(&mesh, &to, &params.state()?)?;
    ///     params.digest()
    /// })?;
    /// let from = dir.clone();
    /// let loaded = spmd(3, move |rank| {
    ///     let mut params = model(&DeviceMesh::new(&rank, &[("fsdp", 3)])?, 8)?;
    ///     params.load_state(&Checkpoint::open(&from)?)?;
    ///     params.digest()
    /// })?;
    /// assert_eq!(saved[0], loaded[0]);
    /// # std::fs::remove_dir_all(dir).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a checkpoint that lacks a parameter, has a tensor of another path, or one of another dtype or shape, and
    /// files that are not those that were saved. All parameters are unchanged then.
    pub fn load_state(&mut self, saved: &Checkpoint) -> Result<()> {
        let missing = self.ids().map(|id| self.path(id)).filter(|path| saved.meta(path).is_none());
        refuse_names("lacks parameters", missing, saved)?;
        let extra = saved.names().filter(|name| self.find(name).is_none());
        refuse_names("has tensors that are no parameters", extra, saved)?;
        let wanted: Vec<(&str, &DTensor)> = self.ids().map(|id| (self.path(id), self.value(id))).collect();
        let loaded = load_like(saved, self, &wanted)?;
        let ids: Vec<_> = self.ids().collect();
        ids.into_iter().zip(loaded).try_for_each(|(id, value)| self.set(id, value))
    }
}

/// Loads tensors of the dtypes, shapes and layouts of others.
pub(crate) fn load_like(
    saved: &Checkpoint,
    params: &Params,
    wanted: &[(&str, &DTensor)],
) -> Result<Vec<DTensor>> {
    for (name, like) in wanted {
        let Some((dtype, shape)) = saved.meta(name) else { continue };
        if (dtype, &shape) != (like.dtype(), like.shape()) {
            let rule = format!("{name} has another dtype or shape in the checkpoint");
            let given = format!("{dtype}{shape} for {}{}", like.dtype(), like.shape());
            return Err(Error::invalid("load_state", rule, given, "load a checkpoint of the same model"));
        }
    }
    let wanted: Vec<(&str, Layout)> =
        wanted.iter().map(|(name, like)| (*name, like.layout().clone())).collect();
    saved.tensors(params.mesh(), &wanted)
}

/// Refuses names, and shows the first of them.
pub(crate) fn refuse_names<'a>(
    what: &str,
    names: impl Iterator<Item = &'a str>,
    saved: &Checkpoint,
) -> Result<()> {
    let names: Vec<&str> = names.collect();
    let Some(first) = names.first() else { return Ok(()) };
    let more = if names.len() > 1 { format!(" and {} more", names.len() - 1) } else { String::new() };
    let rule = format!("the checkpoint {}{what}", saved.dir().display().to_string() + " ");
    Err(Error::invalid("load_state", rule, format!("{first:?}{more}"), "load a checkpoint of the same model"))
}

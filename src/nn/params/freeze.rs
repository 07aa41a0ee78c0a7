//! Frozen parameters: those that training leaves as they are.

use crate::error::Result;
use crate::nn::params::Params;
use crate::nn::params::param_id::ParamId;

impl Params {
    /// Freezes the parameters whose paths match a pattern ([`Params::matching`]) and returns their number.
    ///
    /// A backward pass computes no gradient of a frozen parameter and communicates none. Optimizers make no state for it
    /// and leave its value as it is; state that they made before stays, also in checkpoints, and
    /// [`Params::unfreeze`] goes on from it. A plan lays the parameter out as before; FSDP gathers it for its use in
    /// both passes.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Forward, Params, Plan}, optim::AdamW, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let base = params.root().child("h").child(0).param("base", [3], Init::Ones)?;
    ///     let adapter = params.root().child("h").child(0).param("adapter", [3], Init::Ones)?;
    ///     assert_eq!(params.freeze("**.base")?, 1);
    ///     let cx = Forward::train_without_dropout(&params);
    ///     let mut gradients = cx.param(base)?.mul(&cx.param(adapter)?)?.sum_all()?.backward()?;
    ///     drop(cx);
    ///     assert!(gradients.get(params.value(base)).is_none());
    ///     AdamW::new().betas(0.9, 0.95).decay(0.5).rate(0.5).step(&mut params, &mut gradients)?;
    ///     assert_eq!(params.value(base).full_tensor()?.to_vec::<f32>()?, [1.0; 3]);
    ///     assert_eq!(params.value(adapter).full_tensor()?.to_vec::<f32>()?, [0.5; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a pattern that matches no parameter, and names the nearest paths.
    pub fn freeze(&mut self, pattern: &str) -> Result<usize> {
        let ids = self.matching_for("freeze", pattern)?;
        for &id in &ids {
            *self.value_mut(id) = self.value(id).detach();
        }
        Ok(ids.len())
    }

    /// Lets the parameters whose paths match a pattern learn again, and returns their number.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     for i in 0..3 {
    ///         params.root().child("h").child(i).param("weight", [2], Init::Ones)?;
    ///     }
    ///     // Fine-tune the last block alone.
    ///     params.freeze("**")?;
    ///     params.unfreeze("h.2.**")?;
    ///     let frozen: Vec<bool> = params.ids().map(|id| params.is_frozen(id)).collect();
    ///     assert_eq!(frozen, [true, true, false]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a pattern that matches no parameter, and names the nearest paths.
    pub fn unfreeze(&mut self, pattern: &str) -> Result<usize> {
        let ids = self.matching_for("unfreeze", pattern)?;
        for &id in ids.iter().filter(|&&id| self.is_frozen(id)).collect::<Vec<_>>() {
            let _scope = self.module_of(id).enter();
            *self.value_mut(id) = self.as_leaf(id, self.value(id))?;
        }
        Ok(ids.len())
    }

    /// Returns `true` if a parameter is [frozen](Params::freeze).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     assert!(!params.is_frozen(w));
    ///     let refused = params.freeze("v").unwrap_err().to_string();
    ///     assert!(refused.starts_with("freeze: a pattern matches no parameter") && !params.is_frozen(w));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics if the parameter is another model's.
    pub fn is_frozen(&self, id: ParamId) -> bool {
        !self.value(id).has_history()
    }
}

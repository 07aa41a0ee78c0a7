//! Passes for evaluation that serve several batches.

use super::Forward;
use crate::nn::params::Params;

impl<'a> Forward<'a> {
    /// Returns a pass for the evaluation of several batches: like [`Forward::eval`], but gathered units stay gathered until
    /// the pass is dropped. Only the first batch gathers. It takes the memory of the whole model in the dtype that modules
    /// compute in. The pass borrows the parameters, so no update comes between.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Forward, Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let ids = [0, 1, 2].map(|i| params.root().child("h").child(i).param("w", [4], Init::Ones).expect("a path"));
    ///     let cx = Forward::eval_gathered(&params);
    ///     let mut received = Vec::new();
    ///     for _batch in 0..3 {
    ///         let before = mesh.received_bytes();
    ///         for id in ids {
    ///             cx.param(id)?;
    ///         }
    ///         received.push(mesh.received_bytes() - before);
    ///     }
    ///     assert_eq!(received, [24, 0, 0]); // half of three parameters of four f32 elements
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn eval_gathered(params: &'a Params) -> Forward<'a> {
        let mut cx = Forward::eval(params);
        cx.gathers.keeps_units = true;
        cx
    }

    /// Returns true for a pass for evaluation ([`Forward::eval`]). A module that behaves differently in training asks it.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Forward, Params, Plan}};
    /// spmd(1, |rank| {
    ///     let params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     assert!(Forward::eval(&params).is_eval());
    ///     assert!(!Forward::train_without_dropout(&params).is_eval());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn is_eval(&self) -> bool {
        self._no_grad.is_some()
    }
}

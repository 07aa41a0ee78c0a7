//! Recomputation: activations that are dropped after the forward pass and computed again in the backward pass.

use std::rc::Rc;

use crate::dtensor::{DTensor, FirstRun, RecomputeInput};
use crate::error::{Error, Result};
use crate::nn::forward::Forward;
use crate::nn::params::param_id::ParamId;
use crate::nn::plan::pattern::nearest;

/// Returns `f` of `operands`, and keeps none of its activations: the backward pass computes them again (Chen et al.,
/// *Training deep nets with sublinear memory cost*, 2016), as `torch.utils.checkpoint` does. In PyTorch this is called
/// checkpointing; here a checkpoint is a [file](crate::checkpoint).
///
/// `f` runs at once, and once more in each backward pass. The second run draws the same dropout from the context that it
/// is given, and gathers the same parameters again, one unit ahead as in a backward pass without recomputation. Results
/// and gradients have the bits that they have without recomputation, and so have those of tensors that `f` captures.
/// Gradients of gradients ([`DTensor::grad`]) may differ from them by rounding, but not from mesh to mesh. In a pass that
/// keeps no history, `f` runs once.
///
/// `f` must compute the same in both runs.
///
/// A plan recomputes the blocks of a model with [`Plan::recompute`](crate::nn::Plan::recompute).
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::{Generator, Init}, tensor::DType};
/// use isoshard::nn::{Forward, Linear, Module, Params, Plan, recompute};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
///     let map = Linear::without_bias(params.root().child("h").child(0), 4, 4, Init::Normal { mean: 0.0, std: 1.0 })?;
///     let x = DTensor::full(&mesh, DType::F32, [6, 4], "(S0)", 1.0)?;
///     let norm = |recomputed: bool| -> isoshard::Result<f64> {
///         let mut generator = Generator::new(7);
///         let cx = Forward::train(&params, &mut generator);
///         let map = map.clone();
///         let layer = move |cx: &Forward, ins: &[DTensor]| cx.dropout(map.forward(cx, &ins[0])?.tanh()?, 0.5);
///         let y = if recomputed { recompute(&cx, &[&x], layer)? } else { layer(&cx, &[x.clone()])? };
///         let gradients = y.sum_all()?.backward()?;
///         params.grad_norm(&gradients)?.item()
///     };
///     assert_eq!(norm(true)?, norm(false)?);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns the error of `f`, and refuses operands on another mesh. A backward pass refuses a second run that draws,
/// reads or returns something else than the first.
pub fn recompute(
    cx: &Forward,
    operands: &[&DTensor],
    f: impl Fn(&Forward, &[DTensor]) -> Result<DTensor> + 'static,
) -> Result<DTensor> {
    let mesh = cx.params().mesh();
    if !mesh.grad_enabled() {
        return f(cx, &cloned(operands));
    }
    let first_run = |ins: &[DTensor]| {
        let draws = cx.generator().map(|generator| generator.draws());
        let (result, read) = cx.reads_of(|| f(cx, ins))?;
        let after = cx.generator();
        // A clone of the later generator counts as compared between ranks, so the second run does not compare it.
        let before = after.as_ref().zip(draws).map(|(after, draws)| after.at_draw(draws));
        let save = |(id, value): &(ParamId, DTensor)| (*id, Rc::new(RecomputeInput::new(value)));
        let saved: Vec<_> = read.iter().map(save).collect();
        let params = cx.shared_params();
        let again = move |ins: &[DTensor], recorded: bool| {
            let mut generator = before.clone();
            let result = f(&Forward::again(&params, generator.as_mut(), &saved, recorded)?, ins)?;
            if generator != after {
                let count = |g: &Option<_>| g.as_ref().map_or(0, crate::rng::Generator::draws);
                let given = format!("{} draws for {}", count(&generator), count(&after));
                let rule = "the second run of a function draws as often as the first";
                let remedy = "let the function depend on its operands alone, not on the number of its calls";
                return Err(Error::invalid("recompute", rule, given, remedy));
            }
            Ok(vec![result])
        };
        Ok(FirstRun { results: vec![result], again: Box::new(again) })
    };
    Ok(DTensor::recompute_with("recompute", mesh, operands, first_run)?.remove(0))
}

fn cloned(operands: &[&DTensor]) -> Vec<DTensor> {
    operands.iter().map(|&x| x.clone()).collect()
}

impl Forward<'_> {
    /// Returns true in the second run of a recomputed function ([`recompute`]). A module that changes something of its
    /// own in a pass, such as running averages, does so in the first run alone.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, tensor::DType};
    /// use isoshard::nn::{Forward, Params, Plan, recompute};
    /// use std::{cell::RefCell, rc::Rc};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let x = DTensor::full(&mesh, DType::F32, [2], Layout::replicated(0), 1.0)?.requires_grad()?;
    ///     let runs = Rc::new(RefCell::new(Vec::new()));
    ///     let noted = runs.clone();
    ///     let cx = Forward::train_without_dropout(&params);
    ///     let y = recompute(&cx, &[&x], move |cx, ins| {
    ///         noted.borrow_mut().push(cx.is_second_run());
    ///         ins[0].exp()
    ///     })?;
    ///     y.sum_all()?.backward()?;
    ///     assert_eq!(*runs.borrow(), [false, true]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn is_second_run(&self) -> bool {
        self.second_run.is_some()
    }

    /// Returns `f` of `operands` for the block `path`, which it enters ([`ModulePath::enter`](crate::comm::ModulePath::enter)). If the plan says so ([`Plan::recompute`](crate::nn::Plan::recompute)),
    /// the block's activations are dropped and computed again in the backward pass ([`recompute`]).
    ///
    /// ```
    /// use isoshard::{Result, comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, Linear, Module, Params, Plan, Scope};
    /// struct TanhBlock {
    ///     path: String,
    ///     map: Linear,
    /// }
    /// impl TanhBlock {
    ///     fn new(mut scope: Scope<'_>) -> Result<TanhBlock> {
    ///         let map = Linear::without_bias(scope.child("map"), 3, 3, Init::Ones)?;
    ///         Ok(TanhBlock { path: scope.block_here(), map })
    ///     }
    /// }
    /// impl Module for TanhBlock {
    ///     fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
    ///         let map = self.map.clone();
    ///         cx.block(&self.path, &[x], move |cx, ins| map.forward(cx, &ins[0])?.tanh())
    ///     }
    /// }
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default().recompute("h.*"), 7)?;
    ///     let model = TanhBlock::new(params.root().child("h").child(0))?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [2, 3], Layout::replicated(0))?;
    ///     let y = model.forward(&Forward::train_without_dropout(&params), &x)?;
    ///     let gradients = y.sum_all()?.backward()?; // computes tanh again
    ///     assert!(gradients.get(params.values().next().expect("a weight")).is_some());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a path that no module declared ([`Scope::block_here`](crate::nn::Scope::block_here)), a plan with a pattern
    /// that matches nothing, and what [`recompute`] refuses; returns the error of `f`.
    pub fn block(
        &self,
        path: &str,
        operands: &[&DTensor],
        f: impl Fn(&Forward, &[DTensor]) -> Result<DTensor> + 'static,
    ) -> Result<DTensor> {
        let params = self.params();
        params.check_plan()?;
        let Some(module) = params.block(path) else {
            let near = nearest(path, &params.blocks().collect::<Vec<_>>()).join(", ");
            let near = if near.is_empty() { near } else { format!("; the nearest are {near}") };
            let remedy = format!("declare it with Scope::block_here{near}");
            return Err(Error::invalid("block", "no module declared the block", format!("{path:?}"), remedy));
        };
        let _scope = module.enter();
        if params.plan().recomputes(path) {
            return self.leave(recompute(self, operands, f)?);
        }
        let _cheap = params.plan().recomputes_cheap(path).then(|| params.mesh().recompute_cheap());
        self.leave(f(self, &cloned(operands))?)
    }
}

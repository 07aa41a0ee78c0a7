//! Scopes: the paths under which modules declare their parameters and sites.

use std::fmt;

use crate::comm::ModulePath;
use crate::error::Result;
use crate::nn::params::Params;
use crate::nn::params::param_id::ParamId;
use crate::nn::params::pieces::ParamPiece;
use crate::rng::Init;
use crate::tensor::Shape;

/// A path below which a module declares its parameters.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
/// spmd(1, |rank| {
///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
///     let mut root = params.root();
///     let mut blocks = root.child("h");
///     for i in 0..2 {
///         blocks.child(i).param("weight", [3, 3], Init::Ones)?;
///     }
///     let paths: Vec<&str> = params.ids().map(|id| params.path(id)).collect();
///     assert_eq!(paths, ["h.0.weight", "h.1.weight"]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
pub struct Scope<'a> {
    params: &'a mut Params,
    path: String,
}

impl Params {
    /// Returns the scope of the whole model, with an empty path.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let gain = params.root().param("gain", [], Init::Ones)?;
    ///     assert_eq!(params.path(gain), "gain");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn root(&mut self) -> Scope<'_> {
        Scope { params: self, path: String::new() }
    }
}

impl Scope<'_> {
    /// Returns the scope one part deeper. The parameters below a number, such as `h.3`, form a unit that FSDP gathers
    /// together.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     assert_eq!(params.root().child("h").child(3).child("attn").path(), "h.3.attn");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn child(&mut self, name: impl fmt::Display) -> Scope<'_> {
        let path = self.join(&name);
        Scope { params: self.params, path }
    }

    /// Returns the path of this scope.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     assert_eq!(params.root().path(), "");
    ///     assert_eq!(params.root().child("mlp").path(), "mlp");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the path of this scope for [`ModulePath::enter`]: a module enters it while it runs, so that explanations,
    /// tallies and spans name the module.
    ///
    /// ```
    /// use isoshard::{comm::{ModulePath, spmd}, dtensor::DeviceMesh, nn::{Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let path = params.root().child("h").child(3).module_path();
    ///     let _scope = path.enter(); // usually in the module's forward
    ///     assert_eq!(ModulePath::current().as_str(), "h.3");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn module_path(&self) -> ModulePath {
        ModulePath::new(&self.path)
    }

    /// Declares a parameter of a global shape, in the layout of the plan. Its values depend on the seed, on its shape
    /// and on the number of parameters declared before; each rank makes only its shard. Communicates nothing, except
    /// that the first declaration compares the ranks' seeds.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// let held = spmd(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 3)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [7, 2], Init::Normal { mean: 0.0, std: 0.02 })?;
    ///     Ok(params.value(w).local().shape()[0])
    /// })?;
    /// assert_eq!(held, [3, 2, 2]); // rows per rank
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a path that is taken, a plan that cannot shard this shape, and ranks with different seeds.
    pub fn param(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> Result<ParamId> {
        self.declare(name, shape.into(), init, None)
    }

    /// Declares a parameter that consists of `pieces`, or is one itself.
    pub(in crate::nn) fn declare(
        &mut self,
        name: &str,
        shape: Shape,
        init: Init,
        pieces: Option<Vec<ParamPiece>>,
    ) -> Result<ParamId> {
        self.params.declare(self.join(&name), shape, init, pieces)
    }

    /// Declares a site below this scope: a place at which a plan may change the layout of activations. Returns its path
    /// for [`Forward::site`](crate::nn::Forward::site).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     assert_eq!(params.root().child("head").site("input"), "head.input");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn site(&mut self, name: &str) -> String {
        let path = self.join(&name);
        self.params.declare_site(path.clone());
        path
    }

    /// Declares this scope's own path as a [site](Scope::site), usually for the module's result.
    pub(crate) fn site_here(&mut self) -> String {
        self.params.declare_site(self.path.clone());
        self.path.clone()
    }

    /// Declares this scope's own path as a block: a part of the model whose activations a plan may drop after the forward
    /// pass ([`Plan::recompute`](crate::nn::Plan::recompute)). Returns the path for [`Forward::block`](crate::nn::Forward::block).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default().recompute("h.1"), 7)?;
    ///     params.root().child("h").child(0).block_here();
    ///     let missing = params.check_plan().unwrap_err().to_string();
    ///     assert!(missing.ends_with("the nearest are h.0"), "{missing}");
    ///     assert_eq!(params.root().child("h").child(1).block_here(), "h.1");
    ///     params.check_plan() // the plan's pattern matches the second block
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn block_here(&mut self) -> String {
        self.params.declare_block(self.path.clone());
        self.path.clone()
    }

    fn join(&self, name: &dyn fmt::Display) -> String {
        if self.path.is_empty() { name.to_string() } else { format!("{}.{name}", self.path) }
    }
}

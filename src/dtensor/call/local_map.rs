//! `local_map`: runs a program's own code on each rank's local tensors, between operators on distributed tensors.

use std::hash::Hasher;
use std::rc::Rc;

use rustc_hash::FxHasher;
use smallvec::SmallVec;

use crate::comm::{Lineage, operator_scope};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::rank_reports::{gather_texts, gather_words, group_by_value, list_values};
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::list::DTensors;
use crate::error::{Error, Result};
use crate::ops::{Meta, Tensors, Windows};
use crate::placement::{IntoLayout, Layout, Spec};
use crate::tensor::{DType, Device, Shape, Tensor, short_list};

/// A function on local tensors, with the layouts of its operands and results: created by [`DeviceMesh::local_map`].
///
/// [`LocalMap::run`] redistributes the operands to their layouts, calls the function with this rank's shards, and takes
/// the tensors that it returns as this rank's shards of the results. PyTorch has
/// `torch.distributed.tensor.experimental.local_map`, JAX has `shard_map`.
///
/// The function has the arguments of [`Op::eval`](crate::ops::Op::eval): the local operands, and the [`Windows`] that
/// say which global indices they are. It may call collectives of the mesh's groups ([`DeviceMesh::group_along`]); then
/// every rank of the group must make the same calls in the same order. Nothing checks that the results have the same
/// values on every mesh: that is the function's promise. Results that are replicated and differ between ranks are found
/// in the checking mode ([`DeviceMesh::set_check_replicas`]). An operator that states its sharding rows
/// ([`Op`](crate::ops::Op)) keeps the promise by tests.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::{DType, Tensor}};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
///     let whole = Tensor::from_vec(vec![3.0f32, 1.0, 4.0, 1.0, 5.0, 9.0], [3, 2])?;
///     let x = DTensor::distribute(&mesh, &whole, "(S1)")?;
///     // The running maximum of each row: a rank needs whole rows, so x moves from S1 to S0.
///     let map = mesh.local_map("running_max").operand(&x, "(S0)");
///     let outs = map.result(DType::F32, [3, 2], "(S0)").run(|ins, at| {
///         let mut rows = ins[0].to_vec::<f32>()?;
///         rows.chunks_mut(2).for_each(|row| row[1] = row[1].max(row[0]));
///         Ok([Tensor::from_vec(rows, at.outs[0].local())?])
///     })?;
///     assert_eq!(outs[0].full_tensor()?.to_vec::<f32>()?, [3.0, 3.0, 4.0, 4.0, 5.0, 9.0]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Derivative
/// There is none, so an operand with a history is refused while the tape records. Detach the operand, run under
/// [`DeviceMesh::no_grad`], or state a derivative with [`DTensor::custom_vjp`]:
///
/// ```
/// use isoshard::{Result, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::{DType, Tensor}};
/// /// The sum of each row's elements up to each place, or from there on. Each is the derivative of the other.
/// fn running_sum(x: &DTensor, backwards: bool) -> Result<DTensor> {
///     let map = x.mesh().local_map("running_sum").operand(x, "(S0)");
///     let outs = map.result(DType::F64, x.shape(), "(S0)").run(|ins, at| {
///         let mut rows = ins[0].to_vec::<f64>()?;
///         for row in rows.chunks_mut(3) {
///             if backwards { row.reverse() }
///             (1..3).for_each(|i| row[i] += row[i - 1]);
///             if backwards { row.reverse() }
///         }
///         Ok([Tensor::from_vec(rows, at.outs[0].local())?])
///     })?;
///     Ok(outs[0].clone())
/// }
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let x = DTensor::ones(&mesh, DType::F64, [4, 3], "(S1)")?.requires_grad()?;
///     let forward = |ins: &[DTensor]| Ok((vec![running_sum(&ins[0], false)?], vec![]));
///     let backward = |_: &[DTensor], grads: &[DTensor]| Ok(vec![Some(running_sum(&grads[0], true)?)]);
///     let y = DTensor::custom_vjp("running_sum", &[&x], forward, backward)?.remove(0);
///     let dx = y.sum_all()?.backward()?.take(&x).expect("x is a leaf tensor");
///     assert_eq!(dx.full_tensor()?.to_f64_vec(), [3.0, 2.0, 1.0].repeat(4));
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Partial
/// A result may be `Partial`: each rank returns a contribution of the full shape. Such a sum has no reduction tree. Its
/// contributions are added by a tree over the ranks, so a sum of floats can round differently on another mesh. It has the
/// same bits on every mesh if every sum is exact: for integers, or if at most one rank contributes a value other than
/// zero to each element. A maximum or a minimum always has. An operand may be `Partial` if its sum has no tree either.
#[must_use = "the function is called by `run` or `run_checked`"]
pub struct LocalMap<'a> {
    mesh: &'a DeviceMesh,
    name: &'static str,
    operands: SmallVec<[(&'a DTensor, Layout); 3]>,
    results: SmallVec<[(Meta, Layout); 3]>,
    /// The first layout that could not be read.
    refused: Option<Error>,
}

impl DeviceMesh {
    /// Starts to describe a function on this rank's local tensors; [`LocalMap`] has an example. Errors and flight
    /// records call the function `name`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::{DType, Tensor}};
    /// let ranks = spmd(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
    ///     // No operand: each rank makes its own element.
    ///     let outs = mesh.local_map("rank_numbers").result(DType::I64, [3], "(S0)").run(|_, at| {
    ///         Ok([Tensor::from_vec(vec![at.outs[0].start(0) as i64], [1])?])
    ///     })?;
    ///     outs[0].full_tensor()?.to_vec::<i64>()
    /// })?;
    /// assert_eq!(ranks[2], [0, 1, 2]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn local_map(&self, name: &'static str) -> LocalMap<'_> {
        LocalMap { mesh: self, name, operands: SmallVec::new(), results: SmallVec::new(), refused: None }
    }
}

impl<'a> LocalMap<'a> {
    /// Adds an operand. It is redistributed to `layout`, also in strict mode, since the layout is stated.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// let rows = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [5, 2], "(R)")?;
    ///     let mut rows = 0;
    ///     mesh.local_map("count").operand(&x, "(S0)").run(|ins, _| {
    ///         rows = ins[0].shape()[0];
    ///         Ok([])
    ///     })?;
    ///     Ok(rows)
    /// })?;
    /// assert_eq!(rows, [3, 2]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn operand(mut self, x: &'a DTensor, layout: impl IntoLayout) -> Self {
        let layout = self.read(layout.into_layout());
        self.operands.extend(layout.map(|layout| (x, layout)));
        self
    }

    /// Adds a result with its dtype, its global shape and its layout. The global shape is stated because shards may be
    /// uneven or empty.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::{DType, Tensor}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     // One contribution per rank, each of the full shape.
    ///     let map = mesh.local_map("votes").result(DType::I64, [], "(P(sum))");
    ///     let votes = map.run(|_, _| Ok([Tensor::scalar(1i64)]))?.remove(0);
    ///     assert_eq!(votes.item()?, 2.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn result(mut self, dtype: DType, shape: impl Into<Shape>, layout: impl IntoLayout) -> Self {
        let layout = self.read(layout.into_layout());
        self.results.extend(layout.map(|layout| (Meta::new(dtype, shape), layout)));
        self
    }

    /// Returns a layout, or keeps the error for the call.
    fn read(&mut self, layout: Result<Layout>) -> Option<Layout> {
        layout.map_err(|e| self.refused.get_or_insert(e.called(self.name))).ok()
    }

    /// Calls the function and returns the results. Communicates only to redistribute operands, and what the function
    /// communicates.
    ///
    /// If the function fails on one rank, that rank fails alone, and the other ranks get an error that names it when
    /// they next wait for it. [`LocalMap::run_checked`] makes all ranks fail together. A dry run does not call the
    /// function: its tensors have no elements.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::{DType, Tensor}};
    /// let said = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let map = mesh.local_map("make").result(DType::F32, [3], "(S0)");
    ///     Ok(map.run(|_, _| Ok([Tensor::zeros(DType::F32, [2])])).err().map(|e| e.to_string()))
    /// })?;
    /// let wrong = "make: the results are not the shards that the layouts give rank 1; got f32[2] for f32[3]@(dp:S0); \
    ///              return f32[1]";
    /// assert_eq!(said, [None, Some(wrong.to_string())]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses, on every rank alike, operands of another mesh, operands with a history while the tape records, layouts
    /// that do not fit, and a `Partial` operand with a reduction tree. Returns the function's error, and refuses results
    /// whose number, dtypes or local shapes are not the stated ones. Returns an error if communication fails.
    pub fn run<T: IntoIterator<Item = Tensor>>(
        self,
        function: impl FnOnce(&mut [Tensor], &Windows) -> Result<T>,
    ) -> Result<DTensors> {
        let results = self.result_metas()?;
        let outs = self.call(&results, function).and_then(|outs| self.expect_shards(outs, &results));
        self.wrap_checked(outs, results)
    }

    /// Calls the function as [`LocalMap::run`] does, and compares the outcome over all ranks of the mesh: one all-gather
    /// of 16 bytes per rank (not counted in [`DeviceMesh::received_bytes`]; none on a single rank). If one rank fails, all
    /// ranks return the same error.
    ///
    /// If the function itself communicates and fails on some ranks only, the other ranks may still wait within it. They
    /// get an error within the deadline.
    ///
    /// ```
    /// use isoshard::{Error, comm::spmd, dtensor::DeviceMesh, tensor::{DType, Tensor}};
    /// let said = spmd(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
    ///     let map = mesh.local_map("read").result(DType::F32, [3], "(S0)");
    ///     let outs = map.run_checked(|_, at| match at.outs[0].start(0) {
    ///         1 => Err(Error::other("the file is empty")),
    ///         _ => Ok([Tensor::zeros(DType::F32, [1])]),
    ///     });
    ///     Ok(outs.unwrap_err().to_string())
    /// })?;
    /// let failed = "read: the function failed on some ranks; got the file is empty on rank(s) 1";
    /// assert_eq!(said, [failed; 3]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns what [`LocalMap::run`] returns, and refuses ranks that state different names, operands or results; the
    /// text lists what each rank gave and should have given.
    pub fn run_checked<T: IntoIterator<Item = Tensor>>(
        self,
        function: impl FnOnce(&mut [Tensor], &Windows) -> Result<T>,
    ) -> Result<DTensors> {
        let results = self.result_metas()?;
        let group = self.mesh.all_ranks()?;
        let outs = self.call(&results, function);
        let right = outs.as_ref().is_ok_and(|outs| fits(outs, &results));
        if group.len() == 1 && (right || outs.is_err()) {
            return self.wrap(outs?, results);
        }
        let stated = self.stated(&results);
        let mut hasher = FxHasher::default();
        hasher.write(stated.as_bytes());
        let status = if outs.is_err() { 2 } else { i64::from(!right) };
        let device = self.mesh.device();
        let all = match gather_words(&group, device, vec![status, hasher.finish() as i64]) {
            Ok(all) => all,
            // The error of this rank's function says more than that of a group that it has broken.
            Err(broken) => return Err(outs.err().unwrap_or(broken)),
        };
        let differ = all.iter().any(|other| other[1] != all[0][1]);
        if !differ && all.iter().all(|other| other[0] == 0) {
            return self.wrap_checked(outs, results);
        }
        let failed = all.iter().any(|other| other[0] == 2);
        let mine = match &outs {
            _ if differ => stated,
            Err(error) => error.to_string(),
            Ok(outs) => notations(outs),
        };
        let told = gather_texts(&group, device, &mine)?;
        let ranks = group.ranks().iter().copied().zip(told).enumerate();
        let told = ranks.filter(|(i, _)| differ || !failed || all[*i][0] == 2).map(|(_, rank)| rank);
        let told = list_values(&group_by_value(told), "others", String::clone);
        if differ {
            let (rule, remedy) = ("ranks state different functions", "state one name, operands and results");
            return Err(Error::invalid(self.name, rule, told, remedy));
        }
        if failed {
            return Err(Error::invalid(self.name, "the function failed on some ranks", told, ""));
        }
        // An error that follows from shared metadata is equal on all ranks without further communication.
        let shards = self.mesh.mesh().ranks().map(|rank| (rank, shards_of(&results, rank)));
        let due = list_values(&group_by_value(shards), "others", String::clone);
        let rule = "the results are not the shards that the layouts give their ranks";
        let given = format!("{told} for {}", specs(&results));
        Err(Error::invalid(self.name, rule, given, format!("return {due}")))
    }

    /// Returns the metadata of the results, after checking what all ranks share.
    fn result_metas(&self) -> Result<Vec<Rc<TensorMeta>>> {
        if let Some(refused) = &self.refused {
            return Err(refused.clone());
        }
        for (i, (x, layout)) in self.operands.iter().enumerate() {
            self.check_operand(i, x, layout)?;
        }
        let result = |(Meta { dtype, shape }, layout): &(Meta, Layout)| {
            let (mesh, shape, layout) = (self.mesh.mesh().clone(), shape.clone(), layout.clone());
            let spec = Spec { mesh, dtype: *dtype, shape, layout, tree: None };
            spec.validate(self.name)?;
            self.mesh.intern(spec)
        };
        self.results.iter().map(result).collect()
    }

    fn check_operand(&self, i: usize, x: &DTensor, layout: &Layout) -> Result<()> {
        if !x.mesh().same(self.mesh) {
            let given = format!("operand {i} on {} for {}", x.mesh().mesh(), self.mesh.mesh());
            let rule = "an operand is on another mesh";
            return Err(Error::sharding(self.name, rule, given, "make it on the mesh of local_map"));
        }
        if x.has_history() && self.mesh.grad_enabled() {
            let given = format!("operand {i}, {}, with a history", x.spec());
            let remedy = "detach the operand, use no_grad, or give a derivative with custom_vjp";
            return Err(Error::unsupported(self.name, "local_map has no derivative", given, remedy));
        }
        let to = Spec { layout: layout.clone(), tree: None, ..x.spec().clone() };
        to.validate(self.name)?;
        if x.spec().with_layout(layout.clone())?.tree.is_some() {
            let rule = format!("operand {i} would stay a partial sum with a reduction tree");
            let given = format!("{} for {to}", x.spec());
            return Err(Error::sharding(self.name, rule, given, "give it a layout without Partial"));
        }
        Ok(())
    }

    /// Redistributes the operands and calls the function.
    fn call<T: IntoIterator<Item = Tensor>>(
        &self,
        results: &[Rc<TensorMeta>],
        function: impl FnOnce(&mut [Tensor], &Windows) -> Result<T>,
    ) -> Result<Tensors> {
        let _label = operator_scope(self.name);
        let moved = self.operands.iter().map(|(x, layout)| x.redistribute(layout.clone()));
        let moved = moved.collect::<Result<SmallVec<[DTensor; 3]>>>()?;
        if self.mesh.device() == Device::Meta {
            let shard = |m: &Rc<TensorMeta>| Tensor::without_elements(m.dtype(), m.local_shape());
            return results.iter().map(shard).collect();
        }
        let windows = Windows {
            ins: moved.iter().map(|x| x.tensor_meta().window().clone()).collect(),
            outs: results.iter().map(|m| m.window().clone()).collect(),
            exact: self.mesh.reduction().is_exact(),
        };
        let mut locals: Tensors = short_list(moved.into_iter().map(DTensor::into_local));
        Ok(function(&mut locals, &windows)?.into_iter().collect())
    }

    /// Refuses tensors that are not this rank's shards of the results.
    fn expect_shards(&self, outs: Tensors, results: &[Rc<TensorMeta>]) -> Result<Tensors> {
        if fits(&outs, results) {
            return Ok(outs);
        }
        let rank = self.mesh.mesh().rank();
        let rule = format!("the results are not the shards that the layouts give rank {rank}");
        let given = format!("{} for {}", notations(&outs), specs(results));
        Err(Error::invalid(self.name, rule, given, format!("return {}", shards_of(results, rank))))
    }

    /// Wraps the results. In the mesh's checking mode their replicas are compared.
    fn wrap_checked(&self, outs: Result<Tensors>, results: Vec<Rc<TensorMeta>>) -> Result<DTensors> {
        let wrapped = outs.and_then(|outs| self.wrap(outs, results));
        self.mesh.check_own_code(self.name, "result", wrapped, |all| all.iter().cloned().map(Some).collect())
    }

    fn wrap(&self, outs: Tensors, results: Vec<Rc<TensorMeta>>) -> Result<DTensors> {
        let operands = self.operands.iter().map(|(x, _)| x.lineage);
        let lineage = Lineage::of_call(self.name, Lineage::made_by(self.name, 0).hash(), operands);
        let one = |(i, (local, meta)): (usize, (Tensor, Rc<TensorMeta>))| {
            let local = local.to_device(self.mesh.device())?;
            Ok(DTensor::wrap(self.mesh, local, meta, lineage.result(i)))
        };
        outs.into_iter().zip(results).enumerate().map(one).collect()
    }

    /// Returns the name, operands and results as text, which must be equal on all ranks.
    fn stated(&self, results: &[Rc<TensorMeta>]) -> String {
        let operand = |(x, layout): &(&DTensor, Layout)| {
            Spec { layout: layout.clone(), tree: None, ..x.spec().clone() }.to_string()
        };
        let operands: Vec<String> = self.operands.iter().map(operand).collect();
        format!("{}({}) -> {}", self.name, operands.join(", "), specs(results))
    }
}

/// Returns true if the tensors have the number, dtypes and shapes of this rank's shards.
fn fits(outs: &[Tensor], results: &[Rc<TensorMeta>]) -> bool {
    let one = |(x, m): (&Tensor, &Rc<TensorMeta>)| x.dtype() == m.dtype() && x.shape() == m.local_shape();
    outs.len() == results.len() && outs.iter().zip(results).all(one)
}

fn notations(tensors: &[Tensor]) -> String {
    let all: Vec<String> = tensors.iter().map(|x| Meta::of(x).to_string()).collect();
    if all.is_empty() { "nothing".into() } else { all.join(", ") }
}

fn specs(results: &[Rc<TensorMeta>]) -> String {
    let all: Vec<String> = results.iter().map(|m| m.spec().to_string()).collect();
    if all.is_empty() { "no results".into() } else { all.join(", ") }
}

/// Returns dtypes and shapes of a rank's shards of the results.
fn shards_of(results: &[Rc<TensorMeta>], rank: usize) -> String {
    let shard = |m: &Rc<TensorMeta>| {
        let coords = m.spec().mesh.coords_of(rank).expect("a mesh's own rank");
        format!("{}{}", m.dtype(), m.spec().local_shape_at(&coords))
    };
    let all: Vec<String> = results.iter().map(shard).collect();
    if all.is_empty() { "nothing".into() } else { all.join(", ") }
}

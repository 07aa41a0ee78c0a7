//! The checking mode of a mesh: what a program's own functions return as replicated is compared over the ranks.

use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::rank_reports::SameOnRanks;
use crate::dtensor::tensor::check::check_replicas;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::error::{Divergence, Error, Result};
use crate::tensor::Device;

impl DeviceMesh {
    /// Sets the checking mode: if `check`, what a program's own functions return is compared over the ranks. These are the
    /// results of [`DeviceMesh::local_map`] and of [`DTensor::custom_vjp`], and the gradients that the backward function
    /// of the latter returns.
    ///
    /// Their number and layouts must be equal on all ranks, and along each mesh axis on which a tensor is replicated, its
    /// bits. (Without the mode nothing compares them: a tensor that is stated replicated and differs gives each rank a
    /// program of its own.) If a function fails on one rank, all ranks return its error. Per call each rank sends 32
    /// bytes to all ranks, and 16 bytes per tensor to those that have its replicas; [`DeviceMesh::received_bytes`] does
    /// not count them. The mode is for tests and for the search after a fault. `testing::equivalent` sets it.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::{DType, Tensor}};
    /// let said = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     mesh.set_check_replicas(true);
    ///     let map = mesh.local_map("noise").result(DType::I64, [], "(R)");
    ///     Ok(map.run(|_, _| Ok([Tensor::scalar(rank.rank() as i64)])).unwrap_err().to_string())
    /// })?;
    /// assert!(said[0].starts_with("noise: result 0 is replicated, and its replicas differ; got i64[]@(dp:R)"), "{}", said[0]);
    /// assert_eq!(said[0], said[1]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn set_check_replicas(&self, check: bool) {
        self.0.checks_own_code.set(check);
    }

    /// Sets the checking mode, with comparisons that another mesh of the same ranks communicates. A tally of this mesh does
    /// not count them.
    #[cfg(feature = "testing")]
    pub(crate) fn check_replicas_on(&self, other: DeviceMesh) {
        self.0.checks_own_code.set(true);
        self.0.checking_mesh.replace(Some(other));
    }

    /// Returns `made`, the outcome of the program's function `name` on this rank. In checking mode it is first compared
    /// over all ranks: `tensors` gives what the function has returned, and errors call each `what` and its number.
    pub(in crate::dtensor) fn check_own_code<T>(
        &self,
        name: &str,
        what: &str,
        made: Result<T>,
        tensors: impl Fn(&T) -> Vec<Option<DTensor>>,
    ) -> Result<T> {
        if !self.0.checks_own_code.get() || self.device() == Device::Meta || self.mesh().rank_len() == 1 {
            return made;
        }
        let returned = made.as_ref().map(tensors).map_err(Error::clone);
        self.expect_same_replicas(name, what, returned)?;
        made
    }

    /// Compares what a function has returned over all ranks.
    fn expect_same_replicas(
        &self,
        name: &str,
        what: &str,
        returned: Result<Vec<Option<DTensor>>>,
    ) -> Result<()> {
        let other = self.0.checking_mesh.borrow().clone();
        let mesh = other.as_ref().unwrap_or(self);
        let returned = mesh.expect_same_on_ranks(name, returned, |returned| {
            let text = |x: &Option<DTensor>| x.as_ref().map_or("none".into(), |x| x.spec().to_string());
            let texts = returned.iter().map(text).collect::<Vec<_>>().join(", ");
            [SameOnRanks::new("ranks return different tensors", texts.clone(), texts)]
        })?;
        for (i, x) in returned.into_iter().enumerate() {
            // A contribution has no value of its own, and the nodes of a tree belong to their rank.
            let Some(x) = x.filter(|x| !x.layout().has_partial()) else { continue };
            let meta = mesh.meta(x.dtype(), x.shape(), x.layout())?;
            let x = DTensor::wrap(mesh, x.resident()?, meta, x.lineage);
            let named = format!("{what} {i}");
            check_replicas(&[(&named, &x)]).map_err(|e| match e {
                Error::Diverged(found) => diverged(name, &found),
                e => e,
            })?;
        }
        Ok(())
    }
}

/// Returns the error of a function whose replicated result differs between ranks.
fn diverged(name: &str, found: &Divergence) -> Error {
    let Divergence { name: what, tensor, ranks, index, rank, bits, reference, reference_bits, element_bytes } =
        found;
    let width = 2 + 2 * element_bytes;
    let given = format!(
        "{tensor} at rank(s) {ranks:?}, first at index {index:?}: {bits:#0width$x} at rank {rank}, \
         {reference_bits:#0width$x} at rank {reference}"
    );
    let remedy = "compute it from what all ranks share, or state another layout";
    Error::invalid(name, format!("{what} is replicated, and its replicas differ"), given, remedy)
}

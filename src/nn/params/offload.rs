//! Parameters in a file that is mapped into memory.

use super::Params;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::nn::params::param_id::ParamId;
use crate::tensor::{Device, MappedFile};

impl Params {
    /// Moves the stored parameters, each rank's shards of them, to a file that is mapped into memory, and keeps them there:
    /// values that updates and checkpoints bring are placed in the file as well. Bits stay; the system decides which pages are
    /// in memory. Gathered and held values stay in memory.
    ///
    /// On a CUDA device the file is in the host's memory: in a directory such as `/dev/shm`, in memory alone. Stored values are copied to the
    /// device when they are read, such as by a unit's gather, and updates are computed on the CPU: a step copies each parameter to the device
    /// once per gather, and its gradient back. Memory is not pinned, and copies wait for the device. [`Params::value`] has its elements on the
    /// CPU. [`Optimizer::offload`](crate::optim::Optimizer::offload) does the
    /// same with an optimizer's states. Parameters that are declared later stay in memory. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::AdamW, rng::Init, tensor::MappedFile};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let file = MappedFile::in_dir(std::env::temp_dir())?; // one per rank
    ///     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.5);
    ///     params.offload(&file)?;
    ///     optimizer.offload(&params, &file)?;
    ///     let mut gradients = params.value(w).sum_all()?.backward()?;
    ///     optimizer.step(&mut params, &mut gradients)?;
    ///     assert!(params.value(w).local().is_mapped());
    ///     assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [0.5; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses parameters on [`Device::Meta`]. Returns an error if the disk is full.
    pub fn offload(&mut self, file: &MappedFile) -> Result<()> {
        self.expect_elements("offload")?;
        self.mapped = Some(file.clone());
        self.map_all()
    }

    /// Moves to the file, if there is one, those parameters that are not there.
    pub(super) fn map_all(&mut self) -> Result<()> {
        let elsewhere = |id: &ParamId| self.mapped.is_some() && !self.value(*id).is_mapped();
        for id in self.ids().filter(elsewhere).collect::<Vec<_>>() {
            let value = self.value(id).detach();
            self.set(id, value)?;
        }
        Ok(())
    }

    /// Returns a copy of a value in the file, unless there is no file or the value is there.
    pub(super) fn placed_in_file(&self, value: &DTensor) -> Result<Option<DTensor>> {
        let file = self.mapped.as_ref().filter(|_| !value.is_mapped());
        file.map(|file| value.mapped_in(file)).transpose()
    }

    /// Refuses, in the name of `verb`, parameters without elements.
    pub(crate) fn expect_elements(&self, verb: &str) -> Result<()> {
        match self.mesh.device() {
            Device::Cpu | Device::Cuda(_) => Ok(()),
            Device::Meta => {
                let rule = "a dry run has no elements to put in a file";
                Err(Error::unsupported(verb, rule, "meta", "leave states where they are"))
            }
        }
    }
}

//! Tensors whose elements on this rank lie in a file that is mapped into the CPU's memory, also on a mesh of CUDA devices: parameters and states
//! of an optimizer that a device has no room for ([`Params::offload`](crate::nn::Params::offload)).
//!
//! Operators and redistributions copy such elements to the device when they read them. An [update](DTensor::apply_owned) with an
//! offloaded operand is computed on the CPU, where most of its operands are; if its first operand, the parameter, is on the
//! device, the result is copied back to its place there.

use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::error::Result;
use crate::ops::Tensors;
use crate::tensor::{Device, MappedFile, Tensor};

/// Returns a local tensor on the mesh's device.
#[inline]
pub(in crate::dtensor) fn on_device_of(mesh: &DeviceMesh, local: Tensor) -> Result<Tensor> {
    if mesh.device().is_cuda() && local.device() == Device::Cpu {
        return local.to_device(mesh.device());
    }
    Ok(local)
}

/// Copies the operands of an update to the CPU if one of them is offloaded. Returns the first operand's tensor on the device then, if it
/// is there. After an error all are where they were.
pub(in crate::dtensor) fn offload_all(mesh: &DeviceMesh, locals: &mut Tensors) -> Result<Option<Tensor>> {
    let is_offloaded = |x: &Tensor| x.device() == Device::Cpu && x.numel() > 0;
    if !mesh.device().is_cuda() || !locals.iter().any(is_offloaded) {
        return Ok(None);
    }
    let copies = locals.iter().map(|local| local.to_device(Device::Cpu)).collect::<Result<Tensors>>()?;
    let there = std::mem::replace(locals, copies);
    Ok(there.into_iter().next().filter(|first| first.device() != Device::Cpu))
}

/// Returns a tensor on the device with the elements of one on the CPU, in the memory of `place` if nothing shares it.
pub(in crate::dtensor) fn returned_to(mut place: Tensor, from: &Tensor) -> Result<Tensor> {
    let from = from.to_device(place.device())?;
    if from.shape() != place.shape() || from.dtype() != place.dtype() || !place.is_unique() {
        return Ok(from);
    }
    let strides = from.shape().strides();
    from.copy_block(&mut place, from.shape(), (0, from.strides()), (0, &strides))?;
    Ok(place)
}

impl DTensor {
    /// Returns this rank's elements on the mesh's device.
    #[inline]
    pub(in crate::dtensor) fn resident(&self) -> Result<Tensor> {
        on_device_of(&self.mesh, self.local.clone())
    }

    /// Returns true if this rank's elements lie in a file that is mapped into memory. A rank without elements needs none.
    pub(crate) fn is_mapped(&self) -> bool {
        self.local.is_mapped() || self.local.numel() == 0
    }

    /// Returns the value with this rank's elements in a file, without history.
    pub(crate) fn mapped_in(&self, file: &MappedFile) -> Result<DTensor> {
        let local = match self.is_mapped() {
            true => self.local.clone(),
            false => file.copy(&self.local.to_device(Device::Cpu)?)?,
        };
        Ok(DTensor::wrap(&self.mesh, local, self.meta.clone(), self.lineage))
    }
}

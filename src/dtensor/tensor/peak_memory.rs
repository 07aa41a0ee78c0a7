//! The peak memory of a rank's device.

use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::error::Result;
use crate::tensor::{Device, cuda, meta, storage};

impl DeviceMesh {
    /// Returns the most bytes that tensors on this rank's device have taken at one time, since the program began or since
    /// [`DeviceMesh::reset_peak_bytes`]: those of this rank's thread on the CPU and in a dry run, those of the process on a CUDA
    /// device. Communicates nothing.
    ///
    /// ```
    /// use isoshard::prelude::*;
    /// let peaks = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     mesh.reset_peak_bytes()?;
    ///     drop(DTensor::zeros(&mesh, DType::F32, [1 << 20], "(S0)")?); // 2 MiB on each rank
    ///     mesh.peak_bytes()
    /// })?;
    /// assert!(peaks.iter().all(|peak| (2 << 20..3 << 20).contains(peak)), "{peaks:?}");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no such device.
    pub fn peak_bytes(&self) -> Result<usize> {
        Ok(match self.device() {
            Device::Cpu => storage::pool_stats().peak_live_bytes,
            Device::Meta => meta::memory_stats().peak_live_bytes,
            Device::Cuda(index) => cuda::memory_stats(index)?.peak_live_bytes,
        })
    }

    /// Counts the peak anew, from the bytes that are live now: before a step whose memory is measured.
    ///
    /// ```
    /// use isoshard::prelude::*;
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     drop(DTensor::zeros(&mesh, DType::F32, [1 << 20], "()")?);
    ///     mesh.reset_peak_bytes()?;
    ///     assert!(mesh.peak_bytes()? < 4 << 20);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no such device.
    pub fn reset_peak_bytes(&self) -> Result<()> {
        match self.device() {
            Device::Cpu => storage::reset_peak(),
            Device::Meta => meta::reset_memory_peak(),
            Device::Cuda(index) => cuda::reset_memory_peaks(index)?,
        }
        Ok(())
    }
}

//! Measures the rates of a [`Machine`] by the crate's own kernels.

use std::time::Instant;

use crate::comm::Machine;
use crate::error::Result;
use crate::ops::{Add, Matmul, Op, eval_whole};
use crate::tensor::{DType, Device, Tensor};

/// The side of the squares that are multiplied on a CPU, and on a GPU.
const SIDES: [usize; 2] = [384, 4096];
/// The number of f32 that are added on a CPU, and on a GPU: far more than caches hold.
const LENS: [usize; 2] = [1 << 23, 1 << 26];
/// The number of runs. The fastest counts.
const RUNS: usize = 3;

impl Machine {
    /// Measures the rates of `device` by products of squares and by sums of long vectors, in about half a second on one
    /// core. Other threads that run at the same time lower them. Communicates nothing; [`Rank::with_machine`] makes the
    /// rates common to all ranks. A plan never measures by itself.
    ///
    /// ```no_run
    /// use isoshard::{comm::{Machine, spmd}, dtensor::DeviceMesh};
    /// spmd(2, |rank| {
    ///     let machine = Machine::measure(rank.device())?;
    ///     let mesh = DeviceMesh::parse(&rank.with_machine(machine)?, "dp=2")?;
    ///     println!("{}", mesh.rank().machine());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses [`Device::Meta`], which computes nothing. Returns an error if the device has no memory left.
    ///
    /// [`Rank::with_machine`]: crate::comm::Rank::with_machine
    pub fn measure(device: Device) -> Result<Machine> {
        let on = usize::from(device.is_cuda());
        let product = |dtype| -> Result<f64> {
            let n = SIDES[on];
            let x = ones(device, dtype, n * n)?.reshape([n, n])?;
            let seconds = fastest(&Matmul::for_dims(2, 2)?, &[x.clone(), x])?;
            Ok(2.0 * (n as f64).powi(3) / seconds)
        };
        let [f64_flops_per_s, f32_flops_per_s, half_flops_per_s] =
            [product(DType::F64)?, product(DType::F32)?, product(DType::BF16)?];
        let x = ones(device, DType::F32, LENS[on])?;
        // Two operands are read and a result is written.
        let bytes_per_s = (3 * 4 * LENS[on]) as f64 / fastest(&Add, &[x.clone(), x])?;
        let call_memory_bytes = None;
        Ok(Machine { f64_flops_per_s, f32_flops_per_s, half_flops_per_s, bytes_per_s, call_memory_bytes })
    }
}

fn ones(device: Device, dtype: DType, len: usize) -> Result<Tensor> {
    Tensor::full(dtype, [len], 1.0).to_device(device)
}

/// Returns the seconds of the fastest run, with the time until its last element can be read.
fn fastest(op: &dyn Op, ins: &[Tensor]) -> Result<f64> {
    let mut least = f64::INFINITY;
    // The first run compiles a GPU's kernel and touches new memory.
    for _ in 0..=RUNS {
        let began = Instant::now();
        let out = eval_whole(op, ins)?.remove(0);
        out.reshape([out.numel()])?.narrow(0, out.numel() - 1, 1)?.to_device(Device::Cpu)?;
        least = least.min(began.elapsed().as_secs_f64());
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_a_processor() {
        let machine = Machine::measure(Device::Cpu).unwrap();
        for rate in [machine.f64_flops_per_s, machine.f32_flops_per_s, machine.half_flops_per_s] {
            assert!(rate > 0.0 && rate.is_finite(), "{machine:?}");
        }
        assert!(machine.bytes_per_s > 0.0, "{machine:?}");
        assert!(Machine::measure(Device::Meta).is_err());
    }
}

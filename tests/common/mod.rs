//! Code that several test programs share: the device and the engine on which tests run, samples with long sums, random
//! programs, and a CUDA device that the CPU emulates (`shim`). Values, shards, strategies and the judge are the
//! library's own, in `isoshard::testing`.

use isoshard::Result;
use isoshard::comm::Rank;
use isoshard::dtensor::DeviceMesh;
use isoshard::ops::Sample;
use isoshard::placement::Mesh;
use isoshard::tensor::Device;
#[allow(unused_imports, reason = "not every test program uses all")]
pub use isoshard::testing::{shards::*, values::*};

pub mod baby;
pub mod blas;
pub mod failures;
pub mod in_place;
pub mod index_file;
pub mod program;
pub mod ranks;
pub mod samples;
pub mod shim;

/// The device on which ranks compute: the CPU, or the device that `ISOSHARD_TEST_DEVICE` names (`cuda`, `cuda:1`), or
/// `shim`, a CUDA device whose kernels the CPU runs. The CPU's own loops always compute the expected values.
///
/// # Panics
/// Panics on another name, and if the shim finds no compiler.
pub fn device() -> Device {
    match std::env::var("ISOSHARD_TEST_DEVICE") {
        Ok(name) if name == "shim" => shim::device().expect("a C++ compiler"),
        Ok(name) => name.parse().unwrap_or_else(|e| panic!("ISOSHARD_TEST_DEVICE: {e}")),
        Err(_) => Device::Cpu,
    }
}

/// Runs a program on `world` ranks that compute on [`device`], by [`ranks::spmd`].
pub fn spmd<T, F>(world: usize, f: F) -> Result<Vec<T>>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
{
    let device = device();
    ranks::spmd(world, move |rank| f(rank.on(device)))
}

/// Runs `check` on every rank of the mesh, if its world [is tried](ranks::is_tried). No rank may fail or find a difference.
pub fn on_mesh(
    mesh: &Mesh,
    check: impl Fn(&DeviceMesh) -> Result<Vec<String>> + Send + Sync + 'static,
) -> std::result::Result<(), String> {
    if !ranks::is_tried(mesh.rank_len()) {
        return Ok(());
    }
    let axes: Vec<(String, usize)> =
        (0..mesh.ndim()).map(|a| (mesh.axis_name(a).into(), mesh.axis_len(a))).collect();
    let found = spmd(mesh.rank_len(), move |rank| {
        let axes: Vec<(&str, usize)> = axes.iter().map(|(name, len)| (&**name, *len)).collect();
        check(&DeviceMesh::new(&rank, &axes)?)
    });
    for (rank, found) in found.map_err(|e| e.to_string())?.into_iter().enumerate() {
        if !found.is_empty() {
            return Err(format!("rank {rank} finds {}", found.join("; ")));
        }
    }
    Ok(())
}

/// True for operators that are used in derivatives only and declare that they have none themselves (`Vjp::refuse`).
///
/// # Panics
/// Panics if an operator has no derivative and gives no reason.
pub fn has_no_derivative(sample: &Sample) -> bool {
    let metas = sample.metas();
    let needs: Vec<bool> = metas.iter().map(|m| m.dtype.is_float()).collect();
    match isoshard::ops::Vjp::write(sample.op.as_ref(), &metas, &needs) {
        Err(error @ isoshard::Error::Unsupported(_)) => {
            let says_why = format!("{}: no derivative: ", sample.op.name());
            assert!(error.to_string().starts_with(&says_why), "{sample:?}: {error}");
            true
        }
        _ => false,
    }
}

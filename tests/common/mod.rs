//! Code that several test programs share.
//!
//! This file cuts a whole tensor into the shards of a layout, without the library's own redistribution. `layouts` and
//! `program` draw random meshes, layouts and programs; `samples` has calls with long sums; `ranks` runs ranks as
//! threads or as processes; `rows` turns rows into layouts, and `judge` compares them with a single rank; `shim` is a
//! CUDA device that the CPU emulates.

use isoshard::Result;
use isoshard::comm::Rank;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::ops::{Fill, Input, Op, Sample, Tensors, Window, Windows};
use isoshard::placement::{Mesh, Placement, Spec};
use isoshard::tensor::{DType, Device, ReduceOp, Shape, Tensor};

pub mod blas;
pub mod judge;
pub mod layouts;
pub mod program;
pub mod ranks;
pub mod rows;
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

/// A fixed stream of numbers: SplitMix64.
pub struct Stream(pub u64);

impl Stream {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number from 0 to `n - 1`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// SplitMix64's finaliser.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A tensor of `dtype` with these values.
pub fn tensor(dtype: DType, values: &[f64], shape: &Shape) -> Tensor {
    fn of<T: isoshard::tensor::Element>(values: &[f64], shape: &Shape) -> Tensor {
        Tensor::from_vec(values.iter().map(|&v| T::from_f64(v)).collect::<Vec<T>>(), shape.clone())
            .expect("as many values as elements")
    }
    match dtype {
        DType::F32 => of::<f32>(values, shape),
        DType::F64 => of::<f64>(values, shape),
        DType::F16 => of::<half::f16>(values, shape),
        DType::BF16 => of::<half::bf16>(values, shape),
        DType::I64 => of::<i64>(values, shape),
        DType::I32 => of::<i32>(values, shape),
        DType::U8 => of::<u8>(values, shape),
        DType::Bool => of::<bool>(values, shape),
    }
}

/// Integers from -3 to 3 that depend on the index.
pub fn small_ints(dtype: DType, shape: &Shape, salt: u64) -> Tensor {
    let n = shape.numel() as u64;
    let values: Vec<f64> = (0..n).map(|e| (mix(e ^ salt << 40 ^ 0x5a17) % 7) as f64 - 3.0).collect();
    tensor(dtype, &values, shape)
}

/// True if the numbers are equal within `bound`. NaNs are equal, and so are zeros of either sign: `-(1 - 1)` is -0 and
/// `-1 + 1` is +0.
pub fn agree(a: f64, b: f64, bound: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= bound
}

/// A function that splits a value of a `Partial` tensor: given op, value, salt, the share's number and the number of
/// shares.
pub type Share = fn(ReduceOp, f64, u64, usize, usize) -> f64;

/// Returns the part of `whole` that the rank at `coords` holds under `spec`.
///
/// Partial sums are small integers that add up to the value. For a maximum one rank, which differs from element to
/// element, holds the value, and the other ranks hold lower ones.
pub fn part_of(whole: &Tensor, spec: &Spec, coords: &[usize], salt: u64) -> Tensor {
    part_by(share, whole, spec, coords, salt)
}

/// Works like [`part_of`], with another split of partial values.
pub fn part_by(share: Share, whole: &Tensor, spec: &Spec, coords: &[usize], salt: u64) -> Tensor {
    let values = whole.to_f64_vec();
    let (mut parts, mut mine, mut op) = (1, 0, None);
    for (a, placement) in spec.layout.placements().iter().enumerate() {
        if let Placement::Partial(o) = placement {
            (parts, mine, op) =
                (parts * spec.mesh.axis_len(a), mine * spec.mesh.axis_len(a) + coords[a], Some(*o));
        }
    }
    let region = spec.region_at(coords);
    let mut local = vec![0.0; region.local.numel()];
    region.runs(&spec.shape, |global, at, len| {
        for k in 0..len {
            let e = global as usize + k;
            local[at + k] = match op {
                None => values[e],
                Some(op) => share(op, values[e], e as u64 ^ salt << 32, mine, parts),
            };
        }
    });
    tensor(whole.dtype(), &local, &region.local)
}

/// Returns share `i` of `n` of a value that is reduced by `op`.
fn share(op: ReduceOp, value: f64, salt: u64, i: usize, n: usize) -> f64 {
    let noise = |i: usize| mix(salt.wrapping_mul(31).wrapping_add(i as u64));
    let small = |i: usize| (noise(i) % 7) as f64 - 3.0;
    let owner = (noise(n) % n as u64) as usize;
    match op {
        ReduceOp::Sum if i == owner => value - (0..n).filter(|&j| j != owner).map(small).sum::<f64>(),
        ReduceOp::Sum => small(i),
        _ if i == owner => value,
        ReduceOp::Max => value - (noise(i) % 4) as f64,
        ReduceOp::Min => value + (noise(i) % 4) as f64,
    }
}

/// Splits a value so that one rank holds all of a sum's term and the other ranks -0, which changes no bit of any sum.
pub fn owned(op: ReduceOp, value: f64, salt: u64, i: usize, n: usize) -> f64 {
    let owner = (mix(salt.wrapping_mul(31).wrapping_add(n as u64)) % n as u64) as usize;
    match op {
        ReduceOp::Sum if i == owner => value,
        ReduceOp::Sum => -0.0,
        _ => share(op, value, salt, i, n),
    }
}

/// Describes the first difference between the parts that ranks computed and the whole; `None` if there is none.
pub fn difference(whole: &Tensor, spec: &Spec, parts: &[Tensor], bound: f64) -> Option<String> {
    let values = whole.to_f64_vec();
    let mesh = &spec.mesh;
    let partial: Vec<usize> =
        (0..mesh.ndim()).filter(|&a| matches!(spec.layout.axis(a), Placement::Partial(_))).collect();
    let op = partial.first().map(|&a| match spec.layout.axis(a) {
        Placement::Partial(op) => *op,
        _ => unreachable!("filtered above"),
    });
    for rank in mesh.ranks() {
        let coords = mesh.coords_of(rank).expect("a rank of the mesh");
        let region = spec.region_at(&coords);
        if *parts[rank].shape() != region.local {
            return Some(format!("rank {rank} has {} instead of {}", parts[rank].notation(), region.local));
        }
        let mut local = parts[rank].contiguous().expect("it is in memory");
        if let Some(op) = op {
            if partial.iter().any(|&a| coords[a] != 0) {
                continue;
            }
            let peers: Vec<usize> =
                mesh.seen_from(rank).expect("in the mesh").slice(&partial).ranks().collect();
            for peer in peers.into_iter().filter(|&p| p != rank) {
                if parts[peer].shape() != parts[rank].shape() || op.fold(&mut local, &parts[peer]).is_err() {
                    return Some(format!(
                        "rank {peer} has {} instead of {}",
                        parts[peer].notation(),
                        region.local
                    ));
                }
            }
        }
        let local = local.to_f64_vec();
        let mut found = None;
        region.runs(&spec.shape, |global, at, len| {
            let fits = |want: f64, got: f64| {
                agree(want, got, bound) || (op == Some(ReduceOp::Sum) && !want.is_finite() && got.is_nan())
            };
            let bad = (0..len).find(|k| !fits(values[global as usize + k], local[at + k]));
            if let Some(k) = bad.filter(|_| found.is_none()) {
                let e = global as usize + k;
                found = Some(format!("rank {rank}, element {e}: {} instead of {}", local[at + k], values[e]));
            }
        });
        if found.is_some() {
            return found;
        }
    }
    None
}

/// Runs `op` on every rank of the mesh without communication. Errors and panics become texts.
pub fn eval_apart(
    op: &dyn Op,
    ins: &[(&Spec, &[Tensor])],
    outs: &[Spec],
) -> std::result::Result<Vec<Tensors>, String> {
    let mesh = &outs[0].mesh;
    let window = |s: &Spec, c: &[usize]| Window { global: s.shape.clone(), region: s.region_at(c) };
    mesh.ranks()
        .map(|rank| {
            let coords = mesh.coords_of(rank).expect("a rank of the mesh");
            let at = Windows {
                ins: ins.iter().map(|(s, _)| window(s, &coords)).collect(),
                outs: outs.iter().map(|s| window(s, &coords)).collect(),
                exact: true,
            };
            // Unshared copies let kernels work in place, as they do in the engine.
            let mut locals: Tensors =
                ins.iter().map(|(_, parts)| parts[rank].to_owned_copy().expect("it is in memory")).collect();
            let run = std::panic::AssertUnwindSafe(|| op.eval(&mut locals, &at));
            CAUGHT.set(true);
            let outcome = std::panic::catch_unwind(run);
            CAUGHT.set(false);
            match outcome {
                Ok(Ok(outs)) => Ok(outs),
                Ok(Err(e)) => Err(format!("rank {rank}: {e}")),
                Err(p) => {
                    let text = p.downcast_ref::<String>().cloned();
                    let text = text.or_else(|| p.downcast_ref::<&str>().map(|s| s.to_string()));
                    Err(format!("rank {rank} panics: {}", text.unwrap_or_default()))
                }
            }
        })
        .collect()
}

/// Returns the parts of all ranks.
pub fn parts_of(whole: &Tensor, spec: &Spec, salt: u64) -> Vec<Tensor> {
    let coords = spec.mesh.ranks().map(|r| spec.mesh.coords_of(r).expect("a rank of the mesh"));
    coords.map(|c| part_of(whole, spec, &c, salt)).collect()
}

/// The largest difference that a result may have from the whole's. It is 0 if the sample says that no addition is
/// rounded. Else `n` additions are each wrong by half an ulp of at most the largest value times the number of
/// addends, on both sides, and 8 ulps cover roundings outside sums.
pub fn bound(sample: &Sample, whole: &Tensor) -> f64 {
    match sample.rounded_sums {
        0 => 0.0,
        n => (n + 8) as f64 * epsilon(whole.dtype()) * magnitude(whole),
    }
}

/// The largest finite absolute value, at least 1.
pub fn magnitude(t: &Tensor) -> f64 {
    t.to_f64_vec().into_iter().filter(|v| v.is_finite()).fold(1.0, |m, v| m.max(v.abs()))
}

/// The distance from 1 to the next number; 0 for dtypes whose arithmetic does not round.
pub fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        _ => 0.0,
    }
}

/// The values of a sample's operands.
pub fn values(sample: &Sample, dtype: DType, salt: u64) -> Vec<Tensor> {
    let one = |(i, input): (usize, &Input)| input.values(dtype, salt * 16 + i as u64 + 1);
    sample.ins.iter().enumerate().map(one).collect()
}

/// Operands like a sample's with ordinary values: normals times powers of ten, whose sums are hardly ever exact. They
/// are positive if the sample asks for that; indices and conditions are the sample's own.
pub fn ordinary_values(sample: &Sample, dtype: DType, salt: u64) -> Vec<Tensor> {
    let one = |(i, input): (usize, &Input)| match input.fill {
        Fill::Ints if input.meta.dtype.is_float() => ordinary(dtype, &input.meta.shape, salt * 16 + i as u64),
        Fill::Positive => {
            let x = ordinary(DType::F64, &input.meta.shape, salt * 16 + i as u64).to_f64_vec();
            tensor(dtype, &x.iter().map(|v| v.abs().clamp(1e-3, 1e3)).collect::<Vec<_>>(), &input.meta.shape)
        }
        _ => input.values(dtype, salt * 16 + i as u64 + 1),
    };
    sample.ins.iter().enumerate().map(one).collect()
}

/// Normals times powers of ten from 1e-2 to 1e2, which depend on the index.
pub fn ordinary(dtype: DType, shape: &Shape, salt: u64) -> Tensor {
    let unit = |z: u64| ((z >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let value = |e: u64| {
        let (a, b, c) = (mix(e ^ salt << 33), mix(e ^ salt << 33 ^ 0xabcd), mix(e ^ salt << 33 ^ 0x1234));
        let normal = (-2.0 * unit(a).ln()).sqrt() * (std::f64::consts::TAU * unit(b)).cos();
        normal * 10f64.powi((c % 5) as i32 - 2)
    };
    tensor(dtype, &(0..shape.numel() as u64).map(value).collect::<Vec<_>>(), shape)
}

/// Describes the first element whose bits differ, NaNs aside; `None` if there is none.
pub fn bits_differ(got: &Tensor, want: &Tensor) -> Option<String> {
    if got.shape() != want.shape() || got.dtype() != want.dtype() {
        return Some(format!("{} instead of {}", got.notation(), want.notation()));
    }
    let mut pairs = got.to_f64_vec().into_iter().zip(want.to_f64_vec()).enumerate();
    // Widening to f64 keeps every number and the sign of zero.
    let (e, (g, w)) = pairs.find(|(_, (g, w))| g.to_bits() != w.to_bits() && !(g.is_nan() && w.is_nan()))?;
    Some(format!("element {e}: {g:e} instead of {w:e}"))
}

/// Returns `whole` in the layout of `spec`, from parts that were cut without the engine.
pub fn spread(mesh: &DeviceMesh, whole: &Tensor, spec: &Spec, salt: u64) -> Result<DTensor> {
    spread_by(share, mesh, whole, spec, salt)
}

/// Works like [`spread`], with another split of partial values.
pub fn spread_by(share: Share, mesh: &DeviceMesh, whole: &Tensor, spec: &Spec, salt: u64) -> Result<DTensor> {
    let spec = Spec::new(mesh.mesh(), whole.dtype(), whole.shape().clone(), spec.layout.clone())?;
    let part = part_by(share, whole, &spec, mesh.mesh().coords(), salt);
    DTensor::from_local(mesh, part, whole.shape().clone(), spec.layout)
}

/// Runs `check` on every rank of the mesh. No rank may fail or find a difference.
pub fn on_mesh(
    mesh: &Mesh,
    check: impl Fn(&DeviceMesh) -> Result<Vec<String>> + Send + Sync + 'static,
) -> std::result::Result<(), String> {
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

/// Suppresses the messages of panics that `eval_apart` catches.
pub fn quiet_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !CAUGHT.get() {
                loud(info);
            }
        }));
    });
}

thread_local!(static CAUGHT: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });

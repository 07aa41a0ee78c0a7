//! Matrix products on a CUDA device: the kernels have the CPU's bits for every tile, layout and cut of the
//! contraction, and the vendor's library gets the right matrices.

use std::sync::{Arc, OnceLock};

use crate::common::SplitMix;
use crate::common::blas::{REFUSED_COLS, Wrapped};
use crate::common::shim::{self, Settings, Shim};
use isoshard::ops::{Matmul, eval_whole};
use isoshard::tensor::cuda::{self, DeviceProperties, Driver};
use isoshard::tensor::{DType, Device, Tensor, cpu};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Emulated devices of several kinds, so that small shapes use every plan. On a machine with a GPU, only that GPU.
struct Devices {
    /// A device with many multiprocessors.
    large: Device,
    /// A device with one multiprocessor and little shared memory.
    small: Device,
    /// A device with a library of matrix products.
    library: Device,
    /// The drivers of these devices; `None` on a real device.
    drivers: Option<[Arc<Wrapped>; 3]>,
}

fn devices() -> Option<&'static Devices> {
    static DEVICES: OnceLock<Option<Devices>> = OnceLock::new();
    let install = || {
        let device = shim::device()?;
        if shim::shim().is_none() {
            return Some(Devices { large: device, small: device, library: device, drivers: None });
        }
        let [large, small, library] = [1, 2, 3].map(Device::Cuda);
        let over = |index, multiprocessors, shared_bytes, blas| {
            let inner = Shim::new(Settings::default()).expect("as the one before");
            let properties = DeviceProperties { multiprocessors, shared_bytes, ..inner.properties().clone() };
            let driver = Wrapped::new(inner, properties, blas);
            cuda::install(index, driver.clone()).unwrap();
            driver
        };
        let drivers = [over(1, 132, 232_448, false), over(2, 1, 60_000, false), over(3, 132, 232_448, true)];
        Some(Devices { large, small, library, drivers: Some(drivers) })
    };
    DEVICES.get_or_init(install).as_ref()
}

/// Values whose sum has other bits in every other order.
fn noise(dtype: DType, shape: &[usize], seed: u64) -> Tensor {
    let mut stream = SplitMix(seed);
    let scale = if dtype == DType::F16 { [1.0, 30.0, 0.03, 3.0] } else { [1.0, 1e3, 1e-3, 3.0] };
    let mut value = || (stream.below(10007) as f64 * 1e-3 - 5.0) * stream.pick(&scale);
    let values = (0..shape.iter().product()).map(|_| value()).collect();
    Tensor::from_vec::<f64>(values, shape).unwrap().cast(dtype).unwrap()
}

/// Returns the same view of the same buffer on both devices: kind 0 is contiguous, the others are not.
const KINDS: usize = 6;
fn laid_out(
    kind: usize,
    dtype: DType,
    [batch, rows, cols]: [usize; 3],
    seed: u64,
    to: Device,
) -> [Tensor; 2] {
    let shape = match kind {
        0 => [batch, rows, cols],
        1 => [batch, cols, rows],
        2 => [batch, rows, 2 * cols],
        3 => [batch, rows, cols + 3],
        4 => [1, rows, cols],
        _ => [rows, batch, cols],
    };
    let base = noise(dtype, &shape, seed);
    [base.clone(), base.to_device(to).unwrap()].map(|x| match kind {
        0 => x,
        1 => x.transpose(1, 2).unwrap(),
        2 => {
            let x = x.reshape([batch, rows, cols, 2]).unwrap();
            x.narrow(3, 1, 1).unwrap().squeeze(3).unwrap()
        }
        3 => x.narrow(2, 1, cols).unwrap(),
        4 => x.expand([batch, rows, cols]).unwrap(),
        _ => x.transpose(0, 1).unwrap(),
    })
}

fn bits(x: &Tensor) -> Vec<u8> {
    x.to_device(Device::Cpu).unwrap().contiguous().unwrap().as_bytes().unwrap().to_vec()
}

fn expect_bits(
    device: Device,
    dtype: DType,
    [batch, m, n]: [usize; 3],
    tree: &[usize],
    kinds: (usize, usize),
) {
    let k = tree.iter().product();
    let [a, a_there] = laid_out(kinds.0, dtype, [batch, m, k], 1, device);
    let [b, b_there] = laid_out(kinds.1, dtype, [batch, k, n], 2, device);
    let want = cpu::gemm("matmul", &a, &b, tree).unwrap();
    let got = cuda::gemm("matmul", &a_there, &b_there, tree, true).unwrap();
    assert_eq!(got.shape(), want.shape());
    assert!(
        bits(&got) == bits(&want),
        "{dtype} [{batch}, {m}, {n}] over {tree:?}, layouts {kinds:?}, on {device}"
    );
}

#[test]
fn sums_of_every_length_have_the_processors_bits() {
    let Some(on) = devices() else { return };
    let lengths = (0..=130).chain([160, 192, 193, 200, 255, 256, 257, 511, 512, 513, 1024, 1025]);
    for (i, k) in lengths.enumerate() {
        let dtype = FLOATS[i % 4];
        expect_bits(on.large, dtype, [1, 33, 9], &[k], (0, 0));
        expect_bits(on.small, dtype, [2, 3, 5], &[k], (i % 2, i / 2 % 2));
    }
    for (i, tree) in
        [&[2, 33][..], &[5, 7], &[7, 100], &[3, 1], &[1, 70], &[6, 5, 4], &[3, 700], &[1500, 1], &[]]
            .into_iter()
            .enumerate()
    {
        expect_bits(on.large, FLOATS[i % 4], [1, 4, 3], tree, (0, 0));
        expect_bits(on.small, FLOATS[i % 4], [1, 40, 17], tree, (1, 0));
    }
}

#[test]
fn every_layout_has_the_processors_bits() {
    let Some(on) = devices() else { return };
    let shapes = [[1, 1, 1], [2, 3, 7], [1, 40, 70], [3, 1, 130], [2, 129, 1], [1, 8, 132], [2, 36, 68]];
    let mut stream = SplitMix(5);
    for (i, shape) in shapes.into_iter().enumerate() {
        for kinds in (0..KINDS * KINDS).map(|pair| (pair / KINDS, pair % KINDS)) {
            let (k, device) = (*stream.pick(&[1, 7, 32, 64, 96, 75]), *stream.pick(&[on.large, on.small]));
            expect_bits(device, FLOATS[(i + kinds.0 + kinds.1) % 4], shape, &[k], kinds);
        }
    }
    for dtype in FLOATS {
        // Columns of one buffer, in whole vectors, and every operand in groups of four.
        for kinds in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 3)] {
            expect_bits(on.small, dtype, [1, 132, 64], &[96], kinds);
            expect_bits(on.large, dtype, [1, 132, 65], &[40], kinds);
        }
    }
}

#[test]
fn every_tile_and_every_cut_has_the_processors_bits() {
    let Some(on) = devices() else { return };
    for dtype in FLOATS {
        // Many tiles; few tiles of a long sum, which is cut into parts; slots that overflow to global memory.
        expect_bits(on.small, dtype, [1, 260, 140], &[70], (0, 0));
        expect_bits(on.small, dtype, [2, 128, 64], &[2048], (0, 1));
        expect_bits(on.large, dtype, [1, 150, 66], &[2048], (1, 0));
        for (m, n) in [(1, 300), (300, 1), (7, 200), (200, 8), (3, 2), (20, 300), (300, 20)] {
            expect_bits(on.large, dtype, [1, m, n], &[1100], (0, 0));
            expect_bits(on.small, dtype, [3, m, n], &[129], (0, 1));
        }
    }
    let asked = |k: usize| on.drivers.as_ref().map(|drivers| drivers[k].entries.lock().unwrap().clone());
    let (Some(large), Some(small)) = (asked(0), asked(1)) else { return };
    for dtype in FLOATS {
        for stem in ["small", "few", "one", "join"].map(|stem| format!("matmul_{stem}_{dtype}")) {
            assert!(large.contains(&stem), "{stem} is not among {large:?}");
        }
        let stem = format!("matmul_large_{dtype}");
        assert!(small.contains(&stem), "{stem} is not among {small:?}");
    }
}

#[test]
fn slices_have_the_bits_of_the_whole() {
    let Some(on) = devices() else { return };
    let (a, b) = (noise(DType::F32, &[1, 61, 531], 1), noise(DType::F32, &[1, 531, 77], 2));
    let [a, b] = [a, b].map(|x| x.to_device(on.large).unwrap());
    let product = |a: &Tensor, b: &Tensor| cuda::gemm("matmul", a, b, &[531], true).unwrap();
    let whole = product(&a, &b).to_device(Device::Cpu).unwrap();
    for (r, rows, c, cols) in
        [(0, 1, 0, 1), (5, 1, 0, 77), (0, 61, 76, 1), (7, 30, 3, 41), (60, 1, 76, 1), (0, 9, 0, 17)]
    {
        let part = product(&a.narrow(1, r, rows).unwrap(), &b.narrow(2, c, cols).unwrap());
        let want = whole.narrow(1, r, rows).unwrap().narrow(2, c, cols).unwrap();
        assert_eq!(bits(&part), bits(&want), "rows {r}+{rows}, columns {c}+{cols}");
    }
}

#[test]
fn zeros_and_signs_and_infinities() {
    let Some(on) = devices() else { return };
    let of = |x: Vec<f32>, shape: [usize; 3]| Tensor::from_vec(x, shape).unwrap();
    let pairs = [
        (of(vec![-1.0], [1, 1, 1]), of(vec![0.0], [1, 1, 1])),
        (of(vec![-1.0; 33], [1, 1, 33]), of(vec![0.0; 33], [1, 33, 1])),
        (of(vec![f32::INFINITY; 3], [1, 1, 3]), of(vec![1.0, -0.0, 2.0], [1, 3, 1])),
        (of(vec![f32::MAX; 5], [1, 1, 5]), of(vec![1e9; 5], [1, 5, 1])),
        (of(vec![1e-30; 6], [1, 2, 3]), of(vec![1e-12; 12], [1, 3, 4])),
    ];
    for (a, b) in pairs {
        let tree = [a.shape()[2]];
        let want = cpu::gemm("matmul", &a, &b, &tree).unwrap().to_f64_vec();
        let [x, y] = [a, b].map(|x| x.to_device(on.large).unwrap());
        let got = cuda::gemm("matmul", &x, &y, &tree, true).unwrap().to_device(Device::Cpu).unwrap();
        for (got, want) in got.to_f64_vec().iter().zip(want) {
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{got} {want}");
        }
    }
    for dtype in FLOATS {
        expect_bits(on.large, dtype, [2, 3, 4], &[0], (0, 0));
        expect_bits(on.large, dtype, [0, 3, 4], &[5], (0, 0));
        expect_bits(on.large, dtype, [2, 0, 4], &[5], (0, 0));
    }
    let i = Tensor::zeros_on(on.large, DType::I64, [1, 2, 2]).unwrap();
    let refused = cuda::gemm("matmul", &i, &i, &[2], true).unwrap_err().to_string();
    assert_eq!(refused, "matmul: integer products are not built; got i64[1, 2, 2]; cast to f64 first");
    let x = Tensor::zeros_on(on.large, DType::F32, [1, 5, 300]).unwrap();
    assert!(cuda::gemm("matmul", &x, &x, &[300], true).is_err());
}

#[test]
fn the_operator_runs_on_its_operands_device() {
    let Some(on) = devices() else { return };
    for sample in isoshard::ops::catalog().iter().filter(|s| s.op.as_any().is::<Matmul>()) {
        let ins: Vec<Tensor> = sample.ins.iter().map(|i| i.values(DType::F32, 1)).collect();
        let there: Vec<Tensor> = ins.iter().map(|x| x.to_device(on.large).unwrap()).collect();
        let (want, got) = (eval_whole(&*sample.op, &ins).unwrap(), eval_whole(&*sample.op, &there).unwrap());
        assert_eq!(bits(&got[0]), bits(&want[0]), "{:?}", sample.op);
    }
    let op = Matmul::new("b m k, b k n -> b m n").unwrap();
    let mixed =
        [noise(DType::F32, &[2, 3, 4], 1), noise(DType::F32, &[2, 4, 5], 2).to_device(on.large).unwrap()];
    assert!(eval_whole(&op, &mixed).is_err());
}

#[test]
fn the_library_is_told_the_right_matrices() {
    let Some(on) = devices() else { return };
    for (i, shape) in
        [[1, 1, 1], [2, 3, 7], [1, 40, 17], [3, 1, 5], [2, 9, 1], [4, 6, 8]].into_iter().enumerate()
    {
        for kinds in (0..KINDS * KINDS).map(|pair| (pair / KINDS, pair % KINDS)) {
            for (j, k) in [1, 5, 33].into_iter().enumerate() {
                against_bound(on.library, FLOATS[(i + j) % 4], shape, k, kinds);
            }
        }
    }
    let Some([_, _, driver]) = &on.drivers else { return };
    let made = || driver.blas.as_ref().unwrap().products.lock().unwrap();
    assert!(made().iter().any(|p| p.left.transposed) && made().iter().any(|p| p.right.transposed));
    assert!(made().iter().any(|p| p.left.batch_step == 0 && p.batch > 1), "a shared operand is not copied");
    // Our kernel computes products that the library does not support. The library sees the product transposed: its
    // columns are our rows.
    let before = made().len();
    let (a, b) = (noise(DType::F32, &[1, REFUSED_COLS, 50], 1), noise(DType::F32, &[1, 50, 6], 2));
    let want = cpu::gemm("matmul", &a, &b, &[50]).unwrap();
    let [a, b] = [a, b].map(|x| x.to_device(on.library).unwrap());
    assert_eq!(bits(&cuda::gemm("matmul", &a, &b, &[50], false).unwrap()), bits(&want));
    assert_eq!(made().len(), before);
    // The setting holds for the process: no other test here multiplies f32 with a library that reads it.
    assert!(made().iter().all(|p| !p.tf32));
    cuda::set_tf32(true);
    for dtype in [DType::F32, DType::F64] {
        against_bound(on.library, dtype, [1, 4, 4], 4, (0, 0));
        assert_eq!(made().last().unwrap().tf32, dtype == DType::F32);
    }
    cuda::set_tf32(false);
}

/// Compares the library's product with our own: both are within the bound of any order of summation in f32 (Higham,
/// *Accuracy and Stability of Numerical Algorithms*, 3.5), plus one rounding to the dtype each.
fn against_bound(device: Device, dtype: DType, [batch, m, n]: [usize; 3], k: usize, kinds: (usize, usize)) {
    let [a, a_there] = laid_out(kinds.0, dtype, [batch, m, k], 1, device);
    let [b, b_there] = laid_out(kinds.1, dtype, [batch, k, n], 2, device);
    let of = |exact| cuda::gemm("matmul", &a_there, &b_there, &[k], exact).unwrap().to_device(Device::Cpu);
    let (fast, own) = (of(false).unwrap().to_f64_vec(), of(true).unwrap().to_f64_vec());
    let positive = |x: &Tensor| {
        let x: Vec<f64> = x.contiguous().unwrap().to_f64_vec().iter().map(|x| x.abs()).collect();
        x
    };
    let (a, b) = (positive(&a), positive(&b));
    let sum_unit = if dtype == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) } / 2.0;
    let unit = match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => sum_unit,
    };
    for (at, (fast, own)) in fast.iter().zip(&own).enumerate() {
        let (batch, row, col) = (at / (m * n), at / n % m, at % n);
        let size: f64 = (0..k).map(|i| a[(batch * m + row) * k + i] * b[(batch * k + i) * n + col]).sum();
        let bound = 2.0 * (k as f64 * sum_unit * size + unit * own.abs()) * 1.01;
        assert!((fast - own).abs() <= bound, "{dtype} [{batch}, {m}, {n}] over {k}, {kinds:?}: {fast} {own}");
    }
}

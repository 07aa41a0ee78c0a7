//! Rotary position embedding by tables: scaled frequencies against their reference formulas, positions of packed
//! documents, both pairings, on every mesh.

use isoshard::Result;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::ops::{Llama3Scaling, RotaryFrequencies, RotaryPairing, YarnScaling};
use isoshard::placement::{Layout, Mesh};
use isoshard::tensor::{DType, Tensor};

use crate::common::spmd;

fn near(got: f64, want: f64) {
    assert!((got / want - 1.0).abs() < 1e-13, "{got} {want}");
}

/// Numbers of the formulas in `transformers` (`modeling_rope_utils.py`), computed in f64.
#[test]
fn scaled_frequencies_are_those_of_the_reference() {
    let scaling = Llama3Scaling {
        factor: 8.0,
        low_frequency_factor: 1.0,
        high_frequency_factor: 4.0,
        original_context: 8192.0,
    };
    let llama = RotaryFrequencies::llama3(128, 5e5, scaling).unwrap();
    let want = [
        (0, 1.0),
        (20, 0.016560440080994446),
        (28, 0.0032114459947525913),
        (29, 0.002166570763503359),
        (30, 0.0013718935677611381),
        (32, 0.0005248461609929547),
        (34, 0.00017850781276799638),
        (35, 9.556212353964683e-05),
        (36, 7.78465527393245e-05),
        (50, 4.411534674558404e-06),
        (63, 3.068925988914511e-07),
    ];
    want.iter().for_each(|&(i, want): &(usize, f64)| near(llama.angles[i], want));
    let scaling = YarnScaling {
        factor: 16.0,
        fast_turns: 32.0,
        slow_turns: 1.0,
        original_context: 4096.0,
        attention_factor: None,
    };
    let yarn = RotaryFrequencies::yarn(128, 1e4, scaling).unwrap();
    let want = [
        (0, 1.0),
        (20, 0.056234132519034905),
        (21, 0.046940859997959404),
        (30, 0.00852684377296741),
        (40, 0.0008817889629315673),
        (45, 0.00015177160473182487),
        (46, 8.334508951020775e-05),
        (47, 7.217387404309113e-05),
        (63, 7.217387404309114e-06),
    ];
    want.iter().for_each(|&(i, want): &(usize, f64)| near(yarn.angles[i], want));
    near(yarn.scale, 1.2772588722239782);
    let bad = YarnScaling { factor: 0.5, ..scaling };
    let error = RotaryFrequencies::yarn(128, 1e4, bad).unwrap_err().to_string();
    assert!(error.starts_with("rotary_frequencies: the context factor is at least 1"), "{error}");
    let error = RotaryFrequencies::geometric(7, 1e4).unwrap_err().to_string();
    assert_eq!(error, "rotary_frequencies: pairs need an even width; got 7");
}

/// Returns what `f` returns on rank 0 of a mesh.
fn on(
    mesh: &'static str,
    f: impl Fn(&DeviceMesh) -> Result<Vec<Vec<f64>>> + Send + Sync + 'static,
) -> Vec<Vec<f64>> {
    let ranks = Mesh::parse(mesh, 0).expect("a mesh").rank_len();
    spmd(ranks, move |rank| f(&DeviceMesh::parse(&rank, mesh)?)).expect("runs").swap_remove(0)
}

const SHAPE: [usize; 4] = [2, 3, 5, 6];

fn wave(salt: usize) -> Tensor {
    let n = SHAPE.iter().product();
    Tensor::from_vec((0..n).map(|i: usize| ((i * 31 + salt) as f64 * 0.37).sin()).collect(), SHAPE)
        .expect("fits")
}

/// Two documents are packed into each sequence; the second sequence begins with the rest of a document.
const POSITIONS: [i64; 10] = [0, 1, 2, 0, 1, 100_003, 100_004, 0, 1, 2];

/// Returns the rotated vectors, and the gradients of the vectors and of the tables.
fn packed(mesh: &'static str, layout: &'static str, pairing: RotaryPairing) -> Vec<Vec<f64>> {
    on(mesh, move |mesh| {
        let whole = Layout::replicated(mesh.mesh().ndim());
        let x = DTensor::distribute(mesh, &wave(1), layout)?.requires_grad()?;
        let positions = DTensor::distribute(mesh, &Tensor::from_slice(&POSITIONS, [2, 5])?, whole.clone())?;
        let (cos, sin) = positions.rotary_tables(&RotaryFrequencies::geometric(6, 1e4)?, DType::F64)?;
        let (cos, sin) = (cos.unsqueeze(1)?.requires_grad()?, sin.unsqueeze(1)?.requires_grad()?);
        let y = x.rotary_with(&cos, &sin, pairing)?;
        let grads = y.mul(&DTensor::distribute(mesh, &wave(2), whole)?)?.sum_all()?.backward()?;
        let of = |x: &DTensor| -> Result<Vec<f64>> {
            Ok(grads.get(x).expect("a leaf").full_tensor()?.to_f64_vec())
        };
        Ok(vec![y.full_tensor()?.to_f64_vec(), of(&x)?, of(&cos)?, of(&sin)?])
    })
}

#[test]
fn packed_documents_rotate_by_their_own_positions_on_every_mesh() {
    for pairing in [RotaryPairing::Halves, RotaryPairing::Interleaved] {
        let single = packed("a=1", "(R)", pairing);
        let (x, dy) = (wave(1).to_f64_vec(), wave(2).to_f64_vec());
        let (mut dcos, mut dsin) = (vec![0.0; 30], vec![0.0; 30]);
        for row in 0..30 {
            let (b, t) = (row / 15, row % 5);
            let position = POSITIONS[b * 5 + t] as f64;
            for i in 0..3 {
                let (first, second) = match pairing {
                    RotaryPairing::Halves => (row * 6 + i, row * 6 + i + 3),
                    RotaryPairing::Interleaved => (row * 6 + 2 * i, row * 6 + 2 * i + 1),
                };
                let (s, c) = (position * 1e4f64.powf(-(i as f64) / 3.0)).sin_cos();
                let close = |got: f64, want: f64| {
                    assert!((got - want).abs() < 1e-9, "{pairing:?} {row} {i}: {got} {want}")
                };
                close(single[0][first], x[first] * c - x[second] * s);
                close(single[0][second], x[second] * c + x[first] * s);
                close(single[1][first], dy[first] * c + dy[second] * s);
                close(single[1][second], dy[second] * c - dy[first] * s);
                let at = (b * 5 + t) * 3 + i;
                dcos[at] += x[first] * dy[first] + x[second] * dy[second];
                dsin[at] += x[first] * dy[second] - x[second] * dy[first];
            }
        }
        for (got, want) in [(&single[2], dcos), (&single[3], dsin)] {
            got.iter().zip(want).for_each(|(g, w)| assert!((g - w).abs() < 1e-12, "{g} {w}"));
        }
        for (mesh, layout) in [
            ("a=2", "(S0)"),
            ("a=2", "(S1)"),
            ("a=3", "(S2)"),
            ("a=3", "(S3)"),
            ("a=5", "(S1)"),
            ("a=2,b=3", "(S1, S2)"),
            ("a=2,b=2", "(S2, S2)"),
        ] {
            assert_eq!(packed(mesh, layout, pairing), single, "{pairing:?} on {mesh} {layout}");
        }
    }
}

/// Tables of the plain frequencies have the bits of the operator that computes its own.
#[test]
fn tables_of_plain_frequencies_have_the_bits_of_rotary() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        on("a=1", move |mesh| {
            let whole = Layout::replicated(mesh.mesh().ndim());
            let x = DTensor::distribute(mesh, &wave(1), whole.clone())?.cast(dtype)?;
            let positions = DTensor::distribute(mesh, &Tensor::from_vec((7i64..12).collect(), [5])?, whole)?;
            let table = if dtype == DType::F64 { dtype } else { DType::F32 };
            let (cos, sin) = positions.rotary_tables(&RotaryFrequencies::geometric(6, 5e5)?, table)?;
            let (y, want) = (x.rotary_with(&cos, &sin, RotaryPairing::Halves)?, x.rotary(5e5, 7)?);
            assert_eq!(y.full_tensor()?.to_f64_vec(), want.full_tensor()?.to_f64_vec(), "{dtype}");
            Ok(vec![])
        });
    }
}

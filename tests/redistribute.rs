//! Redistribution from any random layout to any other of one mesh gives what gathering and cutting gives; and without
//! `Partial` a rank receives exactly what it lacks.

use std::fmt;

use isoshard::Result;
use isoshard::dtensor::DeviceMesh;
use isoshard::placement::{Mesh, Spec};
use isoshard::tensor::{DType, Shape, Tensor};
use proptest::collection::vec;
use proptest::prelude::*;

mod common;
use common::layouts::{Failures, layouts, meshes, shapes};
use common::{on_mesh, part_of, small_ints, spread};

const MESHES: [&str; 8] = ["1", "a=2", "a=3", "a=5", "a=2,b=2", "a=2,b=3", "a=3,b=2", "a=2,b=2,c=2"];
const DTYPES: [DType; 3] = [DType::F32, DType::I64, DType::BF16];
const SHAPES: [&[usize]; 9] =
    [&[], &[7], &[5, 3], &[4, 6], &[1, 5], &[0, 3], &[2, 3, 4], &[11, 1, 2], &[8, 8]];

#[test]
fn any_layout_to_any_other() {
    let mut failures = Failures::default();
    for text in MESHES {
        let mesh = Mesh::parse(text, 0).expect("a mesh");
        for shape in SHAPES.map(Shape::from) {
            for dtype in DTYPES {
                let moves = vec(Move::any(&mesh, dtype, &shape), 1..=9);
                failures.check(&format!("{dtype}{shape} on {text}"), 4, &moves, |moves| run(&mesh, moves));
            }
        }
    }
    failures.report();
}

#[test]
fn on_any_mesh_of_any_shape() {
    let given = (meshes(), shapes()).prop_flat_map(|(mesh, shape)| {
        let moves = vec(Move::any(&mesh, DType::F32, &shape), 1..=9);
        (Just(mesh), moves)
    });
    let mut failures = Failures::default();
    failures.check("any mesh and shape", 512, &given, |(mesh, moves)| run(&mesh, moves));
    failures.report();
}

#[derive(Clone)]
struct Move {
    from: Spec,
    to: Spec,
    salt: u64,
}

impl Move {
    fn any(mesh: &Mesh, dtype: DType, shape: &Shape) -> impl Strategy<Value = Move> + use<> {
        let ends = (layouts(mesh, dtype, shape, true), layouts(mesh, dtype, shape, true), 0..64u64);
        ends.prop_map(|(from, to, salt)| Move { from, to, salt })
    }
}

impl fmt::Debug for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {} (values {})", self.from, self.to.layout, self.salt)
    }
}

/// All moves in one world.
fn run(mesh: &Mesh, moves: Vec<Move>) -> std::result::Result<(), String> {
    on_mesh(mesh, move |mesh| {
        for one in &moves {
            let found = check(mesh, one)?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    })
}

fn check(mesh: &DeviceMesh, Move { from, to, salt }: &Move) -> Result<Vec<String>> {
    let (dtype, shape, mut found) = (from.dtype, &from.shape, Vec::new());
    let mut same = |what: &str, got: &Tensor, want: &Tensor| {
        if got.shape() != want.shape() || got.to_f64_vec() != want.to_f64_vec() {
            found.push(format!("{what}: {:?} instead of {:?}", got.to_f64_vec(), want.to_f64_vec()));
        }
    };
    let whole = small_ints(dtype, shape, *salt);
    let [src, dst] = [from, to].map(|s| Spec::new(mesh.mesh(), dtype, shape.clone(), s.layout.clone()));
    let (src, dst) = (src?, dst?);
    let x = spread(mesh, &whole, &src, *salt)?;
    let before = mesh.received_bytes();
    let y = x.redistribute(dst.layout.clone())?;
    let received = mesh.received_bytes() - before;
    if dst.layout.has_partial() {
        same("gathered", &y.full_tensor()?, &whole);
    } else {
        same("local", y.local(), &part_of(&whole, &dst, mesh.mesh().coords(), *salt));
    }
    if y.local().shape() != &dst.local_shape() {
        found.push(format!("local {} instead of {}", y.local(), dst.local_shape()));
    }
    if !src.layout.has_partial() && !dst.layout.has_partial() {
        let (mine, wanted) = (src.region(), dst.region());
        let held: usize = mine.intersect(&wanted).iter().map(|o| o.numel()).sum();
        let lacking = ((wanted.numel() - held) * dtype.size_bytes()) as u64;
        if received != lacking {
            found.push(format!("{received} bytes received, {lacking} lacking"));
        }
    }
    Ok(found)
}

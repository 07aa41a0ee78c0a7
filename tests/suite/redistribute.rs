//! Redistribution from any random layout to any other layout of one mesh gives the bits of gathering and slicing.
//! Without `Partial`, a rank receives exactly the elements that it lacks. A partial sum keeps its bits on every path,
//! however many of its axes are reduced on the way.

use std::fmt;

use isoshard::Result;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Mesh, Spec};
use isoshard::tensor::{DType, Shape, Tensor};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::failures::Failures;
use crate::common::{bits_differ, on_mesh, ordinary, part_of, small_ints, spread};
use isoshard::testing::strategies::{layouts, meshes, shapes};

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

#[test]
fn sums_in_parts_keep_their_bits() {
    let mut failures = Failures::default();
    for text in ["a=2", "a=3", "a=5", "a=2,b=2", "a=2,b=3", "a=3,b=2", "a=2,b=1,c=3"] {
        let mesh = Mesh::parse(text, 0).expect("a mesh");
        for (shape, dims) in SUMS {
            let given = Travels::any(&mesh, shape, dims);
            failures.check(&format!("{shape:?} on {text}"), 96, &given, |given| {
                on_mesh(&mesh, move |mesh| given.check(mesh))
            });
        }
    }
    failures.report();
}

/// A shape and the dims to sum over: ranks then finish one node of the tree, several, or none.
const SUMS: [(&[usize], &[isize]); 5] =
    [(&[7, 3], &[0]), (&[12, 2, 5], &[0, 1]), (&[3, 70, 4], &[0, 1]), (&[2, 3, 6], &[1]), (&[0, 4], &[0])];

/// A sum that is computed and then redistributed from layout to layout.
#[derive(Clone)]
struct Travels {
    dims: &'static [isize],
    from: Spec,
    stations: Vec<Spec>,
    dtype: DType,
    salt: u64,
}

impl Travels {
    fn any(mesh: &Mesh, shape: &[usize], dims: &'static [isize]) -> impl Strategy<Value = Travels> + use<> {
        let kept = (0..shape.len()).filter(|&d| !dims.contains(&(d as isize))).map(|d| shape[d]).collect();
        let station = layouts(mesh, DType::F32, &kept, true);
        let from = layouts(mesh, DType::F32, &shape.into(), false);
        let dtype = prop::sample::select(vec![DType::F32, DType::F64, DType::BF16, DType::F16]);
        let given = (from, vec(station, 0..=3), dtype, 0..64u64);
        given.prop_map(move |(from, stations, dtype, salt)| Travels { dims, from, stations, dtype, salt })
    }

    fn check(&self, mesh: &DeviceMesh) -> Result<Vec<String>> {
        let whole = ordinary(self.dtype, &self.from.shape, self.salt);
        let x = spread(mesh, &whole, &self.from, self.salt)?;
        let replicated = Layout::replicated(mesh.mesh().ndim());
        let want = DTensor::distribute(mesh, &whole, replicated)?.sum(self.dims, false)?.into_local();
        let mut y = x.sum(self.dims, false)?;
        for (i, to) in self.stations.iter().enumerate() {
            // Half of them are in flight while another one is checked.
            let moving = y.redistribute_async(to.layout.clone())?;
            let seen = if i % 2 == 0 { Some(y.full_tensor()?) } else { None };
            y = moving.wait()?;
            if let Some(how) = seen.and_then(|seen| bits_differ(&seen, &want)) {
                return Ok(vec![format!("before station {i}: {how}")]);
            }
            if !to.layout.has_partial() {
                let spec = Spec::new(mesh.mesh(), self.dtype, want.shape().clone(), to.layout.clone())?;
                let part = part_of(&want, &spec, mesh.mesh().coords(), 0);
                if let Some(how) = bits_differ(y.local(), &part) {
                    return Ok(vec![format!("at station {i}: {how}")]);
                }
            }
        }
        Ok(bits_differ(&y.full_tensor()?, &want).into_iter().collect())
    }
}

impl fmt::Debug for Travels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the sum over {:?} of {} {} (values {})", self.dims, self.dtype, self.from, self.salt)?;
        self.stations.iter().try_for_each(|to| write!(f, " to {}", to.layout))
    }
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

/// Runs all moves in one world.
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
        found.push(format!("local {} instead of {}", y.local().notation(), dst.local_shape()));
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

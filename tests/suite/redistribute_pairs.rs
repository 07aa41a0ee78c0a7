//! Every pair of layouts, forward and backward, has the bits of a single rank, which are those of gathering and
//! slicing, on numbers whose sums round.

use isoshard::Result;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Mesh, Placement, Spec};
use isoshard::tensor::{DType, Shape, Tensor};

use crate::common::{bits_differ, on_mesh, ordinary, part_of};

/// The number of summed rows: halves and quarters of them are nodes of the reduction tree, thirds are not.
const TERMS: usize = 8;

/// Returns all layouts of two dims with partial sums, the first axis outermost.
fn layouts(ndim: usize) -> Vec<Layout> {
    let choices = ["R", "S0", "S1", "P(sum)"];
    let mut all = vec![String::new()];
    for a in 0..ndim {
        let comma = if a == 0 { "" } else { ", " };
        all = all.iter().flat_map(|l| choices.map(|c| format!("{l}{comma}{c}"))).collect();
    }
    all.iter().map(|l| format!("({l})").parse().expect("a layout")).collect()
}

/// Returns the layout of the operand whose sum over dim 0 has layout `layout`.
fn terms(layout: &Layout) -> Layout {
    let of = |p: &Placement| match p {
        Placement::Partial(_) => Placement::Shard(0),
        Placement::Shard(d) => Placement::Shard(d + 1),
        other => other.clone(),
    };
    Layout::new(layout.placements().iter().map(of)).with_order(layout.order()).expect("its own order")
}

/// Returns the sum over dim 0 of the squares of `w`, redistributed from layout `from` to `to`, and the gradient of its
/// product with other numbers.
fn program(w: &DTensor, from: &Layout, to: &Layout) -> Result<(DTensor, DTensor)> {
    let w = w.requires_grad()?;
    let y = w.mul(&w)?.sum(&[0], false)?;
    // If a boundary leaves several nodes, the plan may compute the sum in another way for fewer bytes.
    let whole_nodes = (0..from.ndim()).all(|a| w.mesh().mesh().axis_len(a).is_power_of_two());
    assert!(y.layout() == from || !whole_nodes, "the sum lies as it was meant to: {y:?}, not {from}");
    let z = y.redistribute(to.clone())?;
    let factors = ordinary(DType::F32, z.shape(), 77);
    let factors = DTensor::distribute(w.mesh(), &factors, to.clone())?;
    let mut gradients = z.mul(&factors)?.sum_all()?.backward()?;
    Ok((z, gradients.take(&w).expect("the leaf")))
}

fn check(mesh: &DeviceMesh, shape: &Shape, from: &Layout, to: &Layout) -> Result<Option<String>> {
    let m = mesh.mesh();
    let whole_shape: Shape = std::iter::once(TERMS).chain(shape.iter().copied()).collect();
    let whole: Tensor = ordinary(DType::F32, &whole_shape, 5);
    let alone = Layout::replicated(m.ndim());
    let (want, want_gradient) = program(&DTensor::distribute(mesh, &whole, alone.clone())?, &alone, &alone)?;
    let w = DTensor::distribute(mesh, &whole, terms(from))?;
    let (got, gradient) = program(&w, from, to)?;
    let spec = Spec::new(m, DType::F32, shape, to.clone())?;
    let part = part_of(want.local(), &spec, m.coords(), 0);
    let forward = bits_differ(got.local(), &part).map(|how| format!("{from} to {to}, forward: {how}"));
    let gradients = bits_differ(&gradient.full_tensor()?, want_gradient.local());
    Ok(forward.or(gradients.map(|how| format!("{from} to {to}, backward: {how}"))))
}

fn all_pairs(mesh: &str, shape: &[usize], every: usize) {
    let mesh = Mesh::parse(mesh, 0).expect("a mesh");
    let shape = Shape::from(shape);
    let found = on_mesh(&mesh, move |mesh| {
        let layouts = layouts(mesh.mesh().ndim());
        let mut found = Vec::new();
        let mut pairs = 0;
        for (i, from) in layouts.iter().enumerate() {
            for (j, to) in layouts.iter().enumerate() {
                if i == j || to.has_partial() || (i * 5 + j) % every != 0 {
                    continue;
                }
                pairs += 1;
                found.extend(check(mesh, &shape, from, to)?);
            }
        }
        assert!(pairs >= 9, "{pairs} pairs");
        Ok(found)
    });
    found.unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn two_by_four() {
    all_pairs("a=2,b=4", &[5, 7], 1);
    all_pairs("a=2,b=4", &[8, 8], 1);
}

#[test]
fn other_meshes() {
    all_pairs("a=4", &[5, 3], 1);
    all_pairs("a=2,b=2", &[5, 7], 1);
    all_pairs("a=3,b=2", &[7, 4], 1);
    all_pairs("a=2,b=2,c=2", &[5, 6], 11);
}

/// A shape so large that a fold and an exchange cost less than an all-reduce.
#[test]
fn of_two_calls() {
    all_pairs("a=2,b=4", &[129, 255], 4);
}

#[test]
fn ragged() {
    let mesh = Mesh::parse("a=2,b=2", 0).expect("a mesh");
    let found = on_mesh(&mesh, |mesh| {
        let mut found = Vec::new();
        let froms = ["(R, S0)", "(P(sum), S1)", "(S0, P(sum))", "(P(sum), P(sum))", "(S0, S0)"];
        let tos = ["(R, RS(0..1; 0,1))", "(RS(0..2; 3,4), R)", "(S0, RS(0..1; 1,0))", "(S0, RS(0..2; 5,2))"];
        for from in froms.map(|l| l.parse::<Layout>().expect("a layout")) {
            for to in tos.map(|l| l.parse::<Layout>().expect("a layout")) {
                found.extend(check(mesh, &[6, 7].into(), &from, &to)?);
            }
        }
        Ok(found)
    });
    found.unwrap_or_else(|e| panic!("{e}"));
}

/// Ragged axes inside each other and around a shard, in both orders.
#[test]
fn nested_ragged() {
    let mesh = Mesh::parse("a=2,b=2", 0).expect("a mesh");
    let found = on_mesh(&mesh, |mesh| {
        let mut found = Vec::new();
        let nested = [
            "(RS(0..1; 1,2), RS(0..1; 1,1))",
            "(RS(0..1; 1,1)^1, RS(0..1; 1,2)^0)",
            "(RS(0..1; 2,1), S0)",
            "(RS(0..2; 1,2), RS(0..2; 3,4))",
            "(RS(0..1; 1,2), RS(0..2; 5,2))",
            "(RS(0..1; 0,1), S1)",
        ];
        let layout = |l: &str| l.parse::<Layout>().expect("a layout");
        let shape = Shape::from([6, 7]);
        let whole = ordinary(DType::F32, &shape, 3);
        for from in nested.iter().chain(&["(R, R)", "(S0, S1)", "(S0, S0)", "(RS(0..1; 1,2), R)"]) {
            let x = DTensor::distribute(mesh, &whole, layout(from))?;
            for to in nested.iter().chain(&["(R, R)", "(S1, S0)", "(R, RS(0..2; 3,4))"]) {
                let y = x.redistribute(layout(to))?;
                let spec = Spec::new(mesh.mesh(), DType::F32, &shape, layout(to))?;
                let part = part_of(&whole, &spec, mesh.mesh().coords(), 0);
                found.extend(bits_differ(y.local(), &part).map(|how| format!("{from} to {to}: {how}")));
            }
        }
        for from in ["(P(sum), S1)", "(S0, P(sum))", "(P(sum), P(sum))"] {
            for to in nested {
                found.extend(check(mesh, &shape, &layout(from), &layout(to))?);
            }
        }
        Ok(found)
    });
    found.unwrap_or_else(|e| panic!("{e}"));
}

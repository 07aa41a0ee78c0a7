//! Random chains of operators, from random layouts and with random redistributions between steps, give on every mesh
//! the bits of a single rank, in every intermediate value and in the gradient of every leaf tensor.
//!
//! In exact mode leaves are ordinary values, normals times powers of ten in f32, f64, bf16 and f16, and some programs
//! have sums with several leaves of the reduction tree. In fast mode values are small integers with bounds that are
//! known while a program is drawn: it ends before a number could exceed f32's 24 bits, so nothing is ever rounded. A
//! failure prints the shortest program and the simplest layouts found.

use std::fmt;
use std::sync::Arc;

use isoshard::Result;
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::placement::{Layout, Mesh, Spec};
use isoshard::tensor::{DType, Tensor};
use proptest::option;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::common::failures::{Failures, is_complete};
use crate::common::program::{KINDS, Program, Value, long_programs, programs};
use crate::common::{agree, bits_differ, on_mesh, ordinary, owned, small_ints, spread, spread_by};
use isoshard::testing::strategies::{layouts, meshes};

const MESHES: [&str; 7] = ["a=2", "a=3", "a=4", "a=5", "a=2,b=2", "a=3,b=2", "a=2,b=2,c=2"];

#[test]
fn programs_give_what_a_single_rank_gives() {
    over_meshes(Reduction::Fast, 128, programs);
}

#[test]
fn ordinary_values_have_the_bits_of_a_single_rank() {
    over_meshes(Reduction::Exact, 192, programs);
}

#[test]
fn long_sums_have_the_bits_of_a_single_rank() {
    over_meshes(Reduction::Exact, 96, long_programs);
}

/// Returns the number of programs to run: half of them, unless `tests/complete.sh` asks for all.
fn half_of(cases: u32) -> u32 {
    if is_complete() { cases } else { cases / 2 }
}

fn over_meshes<S: Strategy<Value = Arc<Program>>>(mode: Reduction, cases: u32, programs: impl Fn() -> S) {
    let mut failures = Failures::default();
    for text in MESHES {
        let mesh = Mesh::parse(text, 0).expect("a mesh");
        let given = programs().prop_flat_map(|p| Given::any(mode, &mesh, p));
        failures.check(text, half_of(cases), &given, |given| run(&mesh, given));
    }
    failures.report();
}

#[test]
fn on_any_mesh() {
    let mode = prop_oneof![1 => Just(Reduction::Fast), 3 => Just(Reduction::Exact)];
    let given = (mode, meshes(), programs()).prop_flat_map(|(mode, mesh, program)| {
        let given = Given::any(mode, &mesh, program);
        (Just(mesh), given)
    });
    let mut failures = Failures::default();
    failures.check("any mesh", half_of(256), &given, |(mesh, given)| run(&mesh, given));
    failures.report();
}

/// A program reads a leaf twice while the previous program, already differentiated, is dropped.
#[test]
fn a_leaf_outlives_the_programs_that_read_it() {
    let mesh = Mesh::parse("a=3", 0).expect("a mesh");
    let outcome = on_mesh(&mesh, |mesh| {
        let whole = small_ints(DType::F32, &[7].into(), 1);
        let x = DTensor::distribute(mesh, &whole, "(S0)")?.requires_grad()?;
        let mut held = x.sum_all()?;
        let mut found = Vec::new();
        for step in 0..4 {
            held.backward()?;
            let mut twice = x.add(&x.mul_scalar(2.0)?)?.sum_all()?;
            held = twice.clone();
            let got = twice.backward()?.take(&x).map(|g| g.local().to_f64_vec());
            let want = vec![3.0; x.local().numel()];
            if got.as_ref() != Some(&want) {
                found.push(format!("step {step}: {got:?} instead of {want:?}"));
            }
        }
        Ok(found)
    });
    outcome.unwrap_or_else(|e| panic!("{e}"));
}

/// The strategies of the other tests draw every operator, in long programs too, and most programs have gradients.
#[test]
fn programs_use_every_operator() {
    let mut runner = TestRunner::deterministic();
    let drawn: Vec<Program> = (0..400)
        .map(|_| programs().new_tree(&mut runner).expect("nothing is rejected").current())
        .map(Arc::unwrap_or_clone)
        .collect();
    for kind in 0..KINDS {
        let has = |p: &&Program| p.acts().any(|(act, _)| act.kind() == kind);
        assert!(drawn.iter().filter(has).count() >= 10, "kind {kind} is rare");
    }
    assert!(drawn.iter().filter(|p| p.acts().count() >= 5).count() > 50, "long programs are rare");
    assert!(drawn.iter().filter(|p| p.has_gradients()).count() > 200, "gradients are rare");
}

/// A program with a layout for each leaf, moves after some values, and a layout for the result's gradient.
#[derive(Clone)]
struct Given {
    mode: Reduction,
    program: Arc<Program>,
    /// One spec per value; only those of leaves are used.
    leaves: Vec<Spec>,
    moves: Vec<Option<Spec>>,
    grad: Spec,
    salt: u64,
}

impl Given {
    fn any(mode: Reduction, mesh: &Mesh, program: Arc<Program>) -> impl Strategy<Value = Given> + use<> {
        let of = |v: &Value, partials| layouts(mesh, DType::F32, &v.shape, partials);
        let leaf =
            |v: &Value| if v.from.is_none() { of(v, false) } else { Just(replicated(mesh, v)).boxed() };
        let leaves: Vec<_> = program.0.iter().map(leaf).collect();
        let moves: Vec<_> = program.0.iter().map(|v| option::weighted(0.4, of(v, true))).collect();
        let grad = of(program.0.last().expect("a program has a value"), true);
        (leaves, moves, grad, 0..16u64).prop_map(move |(leaves, moves, grad, salt)| Given {
            mode,
            program: program.clone(),
            leaves,
            moves,
            grad,
            salt,
        })
    }

    /// Returns the same program for a single rank.
    fn alone(&self) -> Given {
        let one = Mesh::parse("1", 0).expect("a mesh");
        let specs: Vec<Spec> = self.program.0.iter().map(|v| replicated(&one, v)).collect();
        let grad = specs.last().expect("a program has a value").clone();
        Given { moves: vec![None; specs.len()], leaves: specs, grad, ..self.clone() }
    }

    /// Returns a tensor of this run in the layout of `spec`.
    fn laid(&self, mesh: &DeviceMesh, spec: &Spec, salt: u64) -> Result<DTensor> {
        let dtype = [DType::F32, DType::F32, DType::BF16, DType::F64, DType::F16][self.salt as usize % 5];
        match self.mode {
            Reduction::Exact | Reduction::Grouped(_) => {
                spread_by(owned, mesh, &ordinary(dtype, &spec.shape, salt), spec, self.salt)
            }
            Reduction::Fast => spread(mesh, &small_ints(DType::F32, &spec.shape, salt), spec, self.salt),
        }
    }

    /// Returns every value, then the gradient of every leaf, each with its name.
    fn run(&self, mesh: &DeviceMesh) -> Result<Vec<(String, Tensor)>> {
        mesh.set_reduction(self.mode);
        let (mut xs, mut leaves, mut all): (Vec<DTensor>, _, _) = (Vec::new(), Vec::new(), Vec::new());
        for (i, value) in self.program.0.iter().enumerate() {
            let made = match &value.from {
                Some((act, ins)) => act.run(&ins.iter().map(|&i| &xs[i]).collect::<Vec<_>>())?,
                None => {
                    let leaf =
                        self.laid(mesh, &self.leaves[i], self.salt * 16 + i as u64)?.requires_grad()?;
                    leaves.push((i, leaf.clone()));
                    leaf
                }
            };
            assert_eq!(made.shape(), &value.shape, "programs know their shapes");
            xs.push(match &self.moves[i] {
                Some(to) => made.redistribute(to.layout.clone())?,
                None => made,
            });
            all.push((format!("v{i}"), xs[i].full_tensor()?));
        }
        let mut last = xs.last().expect("a program has a value").clone();
        if self.mode == Reduction::Exact || self.program.has_gradients() {
            let grad = self.laid(mesh, &self.grad, self.salt)?;
            let grads = last.clone().backward_from(grad.clone())?;
            let again = last.backward_from(grad)?;
            for (i, leaf) in &leaves {
                if let Some(grad) = grads.get(leaf) {
                    assert_eq!(grad.layout(), leaf.layout(), "gradients lie as their leaves");
                    let second = again.get(leaf).expect("it is there in a second pass as well");
                    assert_eq!(bits_differ(second.local(), grad.local()), None, "v{i} in a second pass");
                    all.push((format!("gradient of v{i}"), grad.full_tensor()?));
                }
            }
        }
        Ok(all)
    }
}

fn replicated(mesh: &Mesh, value: &Value) -> Spec {
    let layout = Layout::replicated(mesh.ndim());
    Spec::new(mesh, DType::F32, value.shape.clone(), layout).expect("replication is legal")
}

/// Compares the program on the mesh with the program on a single rank.
fn run(mesh: &Mesh, given: Given) -> std::result::Result<(), String> {
    let (alone, exact) = (given.alone(), given.mode == Reduction::Exact);
    let known = isoshard::comm::spmd(1, move |rank| alone.run(&DeviceMesh::parse(&rank, "1")?));
    let known = known.map_err(|e| format!("alone: {e}"))?.swap_remove(0);
    on_mesh(mesh, move |mesh| {
        let got = given.run(mesh)?;
        let names = |all: &[(String, Tensor)]| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        if names(&got) != names(&known) {
            return Ok(vec![format!("{:?} instead of {:?}", names(&got), names(&known))]);
        }
        let differs = |((name, got), (_, want)): (&(String, Tensor), &(String, Tensor))| {
            if exact {
                return bits_differ(got, want).map(|how| format!("{name}, {how}"));
            }
            let (g, w) = (got.to_f64_vec(), want.to_f64_vec());
            let same = got.shape() == want.shape() && g.iter().zip(&w).all(|(g, w)| agree(*g, *w, 0.0));
            (!same).then(|| format!("{name}: {got:?} {g:?} instead of {want:?} {w:?}"))
        };
        Ok(got.iter().zip(&known).filter_map(differs).take(1).collect())
    })
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: ", self.mode)?;
        for (i, value) in self.program.0.iter().enumerate() {
            match &value.from {
                None => write!(f, "{}v{i} = {}", if i == 0 { "" } else { "; " }, self.leaves[i])?,
                Some((act, ins)) => {
                    let ins: Vec<String> = ins.iter().map(|i| format!("v{i}")).collect();
                    write!(f, "; v{i} = {act:?} of {}: {}", ins.join(", "), value.shape)?;
                }
            }
            if let Some(to) = &self.moves[i] {
                write!(f, " moved to {}", to.layout)?;
            }
        }
        write!(f, "; gradient {} (values {})", self.grad, self.salt)
    }
}

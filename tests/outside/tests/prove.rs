//! The model and its operator mean the same on every mesh.

use std::time::Duration;

use isoshard::dtensor::DTensor;
use isoshard::ops::{Input, Sample};
use isoshard::placement::{Layout, Spec};
use isoshard::tensor::{DType, Tensor};
use isoshard::testing::{Equivalence, equivalent, gradients, judge, strategies};
use outside::{RunningSum, train};
use proptest::prelude::*;

#[test]
fn the_operator_s_rows_are_true() {
    for reverse in [false, true] {
        judge(&Sample::new(RunningSum { reverse }, [Input::ints([5, 2, 7])])).assert();
    }
}

#[test]
fn the_operator_is_equivalent() {
    equivalent(|mesh| {
        let (rows, columns) = (mesh.size("rows", 0..=7), mesh.size("columns", 1..=9));
        let x = mesh.leaf("x", DType::F32, [rows, columns])?;
        DTensor::apply_one(&RunningSum { reverse: false }, &[&x])
    });
}

#[test]
fn the_operator_s_derivative_is_right() {
    let x = Tensor::from_vec((0..6).map(|i| f64::from(i) * 0.5 - 1.0).collect(), [2, 3]).expect("six values");
    gradients(&[x], |x| DTensor::apply_one(&RunningSum { reverse: false }, &[&x[0].tanh()?]));
}

#[test]
fn training_is_equivalent() {
    let report = Equivalence::new(|mesh| {
        train(mesh, 3, |_, loss, params| {
            mesh.record("loss", loss)?;
            mesh.record_params(params)?;
            mesh.next_step();
            Ok(())
        })
        .map(drop)
    })
    .meshes(["fsdp=2", "fsdp=3", "dp=2,tp=2"])
    .at_most(64 << 10)
    .assert();
    assert_eq!(report.runs, 3);
    println!("{report:?}");
}

#[test]
fn a_rank_that_fails_is_named() {
    Equivalence::new(|mesh| train(mesh, 2, |_, _, _| Ok(())).map(drop))
        .meshes(["fsdp=3"])
        .deadline(Duration::from_secs(1))
        .with_fault(1, None);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(32) })]

    /// The strategies serve tests of a crate's own.
    #[test]
    fn each_element_is_stored(
        spec in strategies::meshes().prop_flat_map(|mesh| {
            strategies::layouts(&mesh, DType::F32, &[5, 3].into(), false)
        })
    ) {
        let stored: usize = spec.mesh.ranks().map(|rank| {
            spec.region_at(&spec.mesh.coords_of(rank).expect("a rank")).local.numel()
        }).sum();
        let whole = Spec::new(&spec.mesh, DType::F32, spec.shape.clone(), Layout::replicated(spec.mesh.ndim()))?;
        prop_assert!((15..=15 * whole.mesh.rank_len()).contains(&stored), "{}", spec);
    }
}

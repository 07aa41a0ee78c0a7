//! Sizes that overflow, and memory that does not suffice: errors in the operator's name, alike on every rank.

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh, Redistribution};
use isoshard::placement::{Mesh, Spec};
use isoshard::rng::{Fans, Generator, Init};
use isoshard::tensor::{DType, Shape, Tensor};

/// The most bytes that an address space can hold.
const MOST: usize = isize::MAX as usize;

/// Runs `f` on two ranks, which refuse alike, and returns the error's text.
fn refused(f: impl Fn(&DeviceMesh) -> Result<()> + Send + Sync + 'static) -> String {
    let ends = spmd(2, move |rank| Ok(f(&DeviceMesh::new(&rank, &[("dp", 2)])?).unwrap_err().to_string()));
    let [a, b] = ends.unwrap().try_into().unwrap();
    assert_eq!(a, b);
    a
}

#[test]
fn products_of_extents_never_wrap() {
    assert_eq!(Shape::from([1 << 40, 1 << 40]).numel(), usize::MAX);
    assert_eq!(Shape::from([1 << 40, 1 << 40, 0]).numel(), 0);
    assert_eq!(Shape::from([0, 3, 6, MOST]).strides()[..], [usize::MAX, usize::MAX, MOST, 1]);
    for shape in [&[1 << 32, 1 << 32, 1 << 33][..], &[0, 1 << 40, 1 << 40], &[2, 3, MOST]] {
        let said = Fans::of(shape).unwrap_err().to_string();
        assert!(said.starts_with("init: the number of elements overflows; got ["), "{said}");
        let init = Init::XavierUniform { gain: 1.0 };
        assert!(init.fill(Generator::new(0).next_draw(), shape, 0, &mut [0f32; 2]).is_err());
    }
}

#[test]
fn shapes_that_overflow_behind_an_extent_of_zero_are_refused_on_every_rank() {
    let rule = "the number of elements overflows; got [0, 3, 6, 9223372036854775807]; use smaller extents";
    let huge = [0, 3, 6, MOST];
    let empty = |mesh: &DeviceMesh, shape: &[usize]| DTensor::zeros(mesh, DType::F32, shape, "(R)".parse()?);
    assert_eq!(refused(move |mesh| empty(mesh, &huge).map(drop)), format!("layout: {rule}"));
    assert_eq!(
        refused(move |mesh| empty(mesh, &[0, 3])?.reshape(huge).map(drop)),
        format!("reshape: {rule}")
    );
    assert_eq!(
        refused(move |mesh| empty(mesh, &[0, 1, 1, 1])?.expand(huge).map(drop)),
        format!("expand: {rule}")
    );
    let said =
        refused(move |mesh| empty(mesh, &[1 << 40, 0])?.matmul(&empty(mesh, &[0, 1 << 40])?).map(drop));
    assert_eq!(
        said,
        "matmul: the number of elements overflows; got [1099511627776, 1099511627776]; use smaller extents"
    );
}

#[test]
fn an_expansion_has_at_most_as_many_bytes_as_addresses() {
    let one = Tensor::scalar(1.0f64).reshape([1]).unwrap();
    for n in [MOST, 1 << 61, 1 << 60] {
        let said = one.expand([n]).unwrap_err().to_string();
        assert!(said.starts_with("expand: the number of bytes overflows; got f64["), "{said}");
    }
    let wide = one.expand([(1 << 60) - 1]).unwrap();
    assert_eq!(wide.len_bytes(), MOST - 7);
}

#[test]
fn positions_overflow_on_every_rank_or_on_none() {
    for layout in ["(S0)", "(R)", "(S1)"] {
        for offset in [usize::MAX, usize::MAX - 1, usize::MAX - 2] {
            let said = refused(move |mesh| {
                DTensor::ones(mesh, DType::F32, [3, 4], layout.parse()?)?.rotary(1e4, offset).map(drop)
            });
            assert_eq!(said, format!("rotary: the positions overflow; got offset {offset} for f32[3, 4]"));
        }
    }
}

/// Costs and bytes of moves saturate; a build with overflow checks panicked here, and others chose plans by sums that had
/// wrapped.
#[test]
fn the_largest_tensors_have_plans() -> Result<()> {
    for ranks in [2, 3, 64, 1000] {
        let mesh = Mesh::parse(&format!("dp={ranks}"), 0)?;
        let spec = |placement: &str| Spec::parse(&format!("u8[{MOST}]@(dp:{placement})"), &mesh);
        for (from, to) in [("P(sum)", "R"), ("P(sum)", "S0"), ("S0", "R"), ("P(max)", "R"), ("S0", "P(sum)")]
        {
            let plan = Redistribution::plan(&spec(from)?, &spec(to)?)?;
            assert!(plan.received_bytes() >= (MOST / 2) as u64, "{plan}");
        }
    }
    Ok(())
}

//! Redistribution from any random layout to any other of one mesh gives what gathering and cutting gives; and without
//! `Partial` a rank receives exactly what it lacks.

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Spec};
use isoshard::tensor::{DType, Shape};

mod common;
use common::{Stream, part_of, random_layout, small_ints};

const MESHES: [(&str, usize); 8] = [
    ("1", 1),
    ("a=2", 2),
    ("a=3", 3),
    ("a=5", 5),
    ("a=2,b=2", 4),
    ("a=2,b=3", 6),
    ("a=3,b=2", 6),
    ("a=2,b=2,c=2", 8),
];

fn shapes() -> Vec<Shape> {
    let some: [&[usize]; 9] =
        [&[], &[7], &[5, 3], &[4, 6], &[1, 5], &[0, 3], &[2, 3, 4], &[11, 1, 2], &[8, 8]];
    some.map(Shape::from).to_vec()
}

#[test]
fn any_layout_to_any_other() {
    for (text, ranks) in MESHES {
        let done = spmd(ranks, move |rank| {
            let mesh = DeviceMesh::parse(&rank, text)?;
            let mut stream = Stream(ranks as u64);
            for (n, shape) in shapes().into_iter().enumerate() {
                for k in 0..40 {
                    check(&mesh, &mut stream, &shape, n as u64 * 64 + k)?;
                }
            }
            Ok(())
        });
        done.unwrap_or_else(|e| panic!("on {text}: {e}"));
    }
}

fn check(mesh: &DeviceMesh, stream: &mut Stream, shape: &Shape, salt: u64) -> Result<()> {
    let dtype = *stream.pick(&[DType::F32, DType::I64, DType::BF16]);
    let whole = small_ints(dtype, shape, salt);
    let from = random_layout(stream, mesh.mesh(), dtype, shape, true);
    let to = random_layout(stream, mesh.mesh(), dtype, shape, true);
    let (src, dst) = (spec(mesh, dtype, shape, &from)?, spec(mesh, dtype, shape, &to)?);
    let coords = mesh.mesh().coords();
    let x = DTensor::from_local(mesh, part_of(&whole, &src, coords, salt), shape.clone(), from.clone())?;
    let before = mesh.received_bytes();
    let y = x.redistribute(to.clone())?;
    let received = mesh.received_bytes() - before;
    let named = format!("{src} to {dst}");
    assert_eq!(y.local().shape(), &dst.local_shape(), "{named}");
    if to.has_partial() {
        assert_eq!(y.full_tensor()?.to_f64_vec(), whole.to_f64_vec(), "{named}, gathered");
    } else {
        assert_eq!(y.local().to_f64_vec(), part_of(&whole, &dst, coords, salt).to_f64_vec(), "{named}");
    }
    if !from.has_partial() && !to.has_partial() {
        let (mine, wanted) = (src.region(), dst.region());
        let held: usize = mine.intersect(&wanted).iter().map(|o| o.numel()).sum();
        let lacking = ((wanted.numel() - held) * dtype.size_bytes()) as u64;
        assert_eq!(received, lacking, "{named}: bytes received, bytes lacking");
    }
    Ok(())
}

fn spec(mesh: &DeviceMesh, dtype: DType, shape: &Shape, layout: &Layout) -> Result<Spec> {
    Spec::new(mesh.mesh(), dtype, shape.clone(), layout.clone())
}

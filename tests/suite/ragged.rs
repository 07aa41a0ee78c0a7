//! Operators on ragged shards: with operands laid out so, nothing moves, the results have a single rank's bits, and so
//! have gradients.

use isoshard::Result;
use isoshard::comm::Rank;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::Layout;
use isoshard::tensor::{DType, Tensor};

use crate::common::{ordinary, small_ints, spmd};

type Call = fn(&[DTensor]) -> Result<DTensor>;

/// An operator, the shapes of its operands, their layouts on three ranks, the result's layout, and the call.
type Case = (&'static str, &'static [&'static [usize]], &'static [&'static str], &'static str, Call);

const ROWS: &str = "(RS(0..1; 1,0,5))";
const FLAT: &str = "(RS(0..2; 7,0,17))";

const CASES: &[Case] = &[
    ("matmul, x ragged", &[&[6, 4], &[4, 3]], &[ROWS, "(R)"], ROWS, |x| x[0].matmul(&x[1])),
    ("matmul, batches ragged", &[&[6, 2, 4], &[6, 4, 3]], &[ROWS, ROWS], ROWS, |x| x[0].matmul(&x[1])),
    ("matmul, w ragged", &[&[6, 4], &[4]], &[ROWS, "(R)"], ROWS, |x| x[0].einsum("n k, k -> n", &x[1])),
    ("w before x", &[&[3, 4], &[6, 4]], &["(R)", ROWS], ROWS, |x| x[0].einsum("b k, n k -> n b", &x[1])),
    ("matmul, x flat", &[&[6, 4, 5], &[5, 3]], &[FLAT, "(R)"], FLAT, |x| x[0].matmul(&x[1])),
    ("summed leaves whole", &[&[128, 2], &[128, 3]], &["(RS(0..1; 1,1,2))"; 2], "(P(sum))", |x| {
        x[0].einsum("t m, t n -> m n", &x[1])
    }),
    ("sum over another dim", &[&[6, 4]], &[ROWS], ROWS, |x| x[0].sum(&[1], false)),
    ("sum over flat", &[&[6, 4, 3]], &[FLAT], FLAT, |x| x[0].sum(&[2], true)),
    ("sum over the ragged dim", &[&[6, 4, 2]], &[ROWS], "(P(sum))", |x| x[0].sum(&[0], false)),
    ("sum over all flat dims", &[&[6, 4, 2]], &["(RS(0..2; 8,0,16))"], "(P(sum))", |x| {
        x[0].sum(&[0, 1], false)
    }),
    ("max over the ragged dim", &[&[6, 4]], &[ROWS], "(P(max))", |x| x[0].max(&[0], false)),
    ("softmax", &[&[6, 4]], &[ROWS], ROWS, |x| x[0].softmax(1)),
    ("softmax, flat", &[&[6, 4, 3]], &[FLAT], FLAT, |x| x[0].softmax(-1)),
    ("log_softmax, flat", &[&[6, 4, 3]], &[FLAT], FLAT, |x| x[0].log_softmax(-1)),
    ("layer_norm", &[&[6, 4, 3], &[3]], &[FLAT, "(R)"], FLAT, |x| x[0].layer_norm(&x[1], None, 1e-5)),
    ("rms_norm", &[&[6, 4], &[4]], &[ROWS, "(R)"], ROWS, |x| x[0].rms_norm(&x[1], 1e-5)),
    ("slice", &[&[6, 4]], &[ROWS], ROWS, |x| x[0].slice(1, 1, 2)),
    ("slice, flat", &[&[6, 4, 3]], &[FLAT], FLAT, |x| x[0].slice(2, 1, 2)),
    ("transpose behind", &[&[6, 4, 3]], &[ROWS], ROWS, |x| x[0].transpose(1, 2)),
    ("transpose behind flat dims", &[&[6, 4, 3, 2]], &[FLAT], FLAT, |x| x[0].transpose(2, 3)),
    ("cat", &[&[6, 4], &[6, 1]], &[ROWS, ROWS], ROWS, |x| DTensor::cat(&[&x[0], &x[1]], 1)),
    ("cat, flat", &[&[6, 4, 3], &[6, 4, 1]], &[FLAT, FLAT], FLAT, |x| DTensor::cat(&[&x[0], &x[1]], 2)),
    ("join dims", &[&[6, 4, 3]], &[ROWS], ROWS, |x| x[0].reshape([6, 12])),
    ("join the ragged dim", &[&[6, 4]], &[ROWS], ROWS, |x| x[0].reshape([24])),
    ("join flat dims", &[&[6, 4, 3]], &[FLAT], "(RS(0..1; 7,0,17))", |x| x[0].reshape([24, 3])),
    ("cut the ragged dim", &[&[6, 5]], &[ROWS], "(RS(0..2; 1,0,5))", |x| x[0].reshape([2, 3, 5])),
    ("cut at blocks", &[&[6, 5]], &["(RS(0..1; 1,0,2))"], "(RS(0..1; 1,0,2))", |x| x[0].reshape([3, 2, 5])),
    ("flip", &[&[6, 4, 3]], &[FLAT], FLAT, |x| x[0].flip(&[2])),
];

/// Returns the bytes of the result and of the operands' gradients, and the result's layout.
fn run(
    case: &'static Case,
    mesh: &'static str,
    layouts: Vec<Layout>,
    strict: bool,
) -> (Vec<Vec<u8>>, String) {
    let (name, shapes, _, _, call) = *case;
    let ranks = isoshard::placement::Mesh::parse(mesh, 0).expect("a mesh").rank_len();
    let wholes: Vec<Tensor> =
        shapes.iter().enumerate().map(|(i, s)| ordinary(DType::F32, &(*s).into(), i as u64)).collect();
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let lay = |(x, l): (&Tensor, &Layout)| DTensor::distribute(&mesh, x, l.clone())?.requires_grad();
        let ins: Vec<DTensor> = wholes.iter().zip(&layouts).map(lay).collect::<Result<_>>()?;
        mesh.set_strict(strict);
        let y = call(&ins)?;
        mesh.set_strict(false);
        let bytes =
            |x: &DTensor| Ok::<_, isoshard::Error>(x.full_tensor()?.contiguous()?.as_bytes()?.to_vec());
        let weights = small_ints(y.dtype(), y.shape(), 7);
        let weights = DTensor::distribute(&mesh, &weights, Layout::replicated(mesh.mesh().ndim()))?;
        let grads = y.mul(&weights)?.sum_all()?.backward()?;
        let mut all = vec![bytes(&y)?];
        for x in &ins {
            let dx = grads.get(x).expect("a leaf");
            assert_eq!(dx.layout(), x.layout(), "a gradient takes its leaf's layout");
            all.push(bytes(dx)?);
        }
        Ok((all, y.layout().to_string()))
    };
    spmd(ranks, run).unwrap_or_else(|e| panic!("{name} on {mesh}: {e}")).swap_remove(0)
}

#[test]
fn operators_take_ragged_operands_where_they_lie() {
    for case in CASES {
        let (name, shapes, layouts, out, _) = *case;
        let (want, _) = run(case, "a=1", vec![Layout::replicated(1); shapes.len()], false);
        let layouts: Vec<Layout> = layouts.iter().map(|l| l.parse().expect("a layout")).collect();
        let (got, layout) = run(case, "a=3", layouts.clone(), true);
        assert_eq!(layout, out, "{name}");
        assert!(got == want, "{name}: other bits");
        // The same beside an axis that splits dim 0 from outside, in two halves; operands may move.
        let outside = layouts.iter().map(|l| {
            let splits = l.ragged_axis().is_some();
            let text = l.to_string();
            let inner = text[1..text.len() - 1].replace("1,0,5", "1,0,2").replace("7,0,17", "3,0,9");
            let inner = inner.replace("8,0,16", "4,0,8").replace("1,1,2", "1,0,1").replace("1,0,2", "1,0,0");
            format!("({}, {inner})", if splits { "S0" } else { "R" }).parse().expect("a layout")
        });
        let (got, _) = run(case, "b=2,a=3", outside.collect(), false);
        assert!(got == want, "{name}: other bits beside S0");
    }
}

/// A sum over flattened dims beside an axis that splits another dim and leaves one rank without elements.
#[test]
fn sums_over_flat_dims_beside_empty_shards() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, "a=2,b=3")?;
        let whole = ordinary(DType::F32, &[4, 3, 2].into(), 9);
        let x = DTensor::distribute(&mesh, &whole, "(RS(0..2; 3,9), S2)")?;
        mesh.set_strict(true);
        let sum = x.sum(&[0, 1], false)?;
        assert_eq!(sum.layout().to_string(), "(P(sum), S0)");
        mesh.set_strict(false);
        let alone = DTensor::distribute(&mesh, &whole, "(R, R)")?.sum(&[0, 1], false)?;
        assert_eq!(sum.full_tensor()?.to_f64_vec(), alone.full_tensor()?.to_f64_vec());
        Ok(())
    };
    spmd(6, run).unwrap_or_else(|e| panic!("{e}"));
}

/// An index is an operand without a gradient.
#[test]
fn rows_are_looked_up_where_they_lie() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, "a=3")?;
        let table = small_ints(DType::F32, &[6, 2].into(), 1);
        let index = Tensor::from_vec(vec![5i64, 0, 3, 3, 1, 2, 4, 0, 5, 1, 0, 2], [6, 2])?;
        let lay = |x: &Tensor, layout: &str| DTensor::distribute(&mesh, x, layout);
        let want = lay(&table, "(R)")?.embedding(&lay(&index, "(R)")?)?.full_tensor()?.to_f64_vec();
        mesh.set_strict(true);
        for (table_in, index_in, out) in [
            ("(R)", ROWS, ROWS),
            ("(R)", "(RS(0..2; 5,0,7))", "(RS(0..2; 5,0,7))"),
            (ROWS, "(R)", "(P(sum))"),
        ] {
            let y = lay(&table, table_in)?.embedding(&lay(&index, index_in)?)?;
            assert_eq!(y.layout().to_string(), out, "{table_in} {index_in}");
            mesh.set_strict(false);
            assert_eq!(y.full_tensor()?.to_f64_vec(), want, "{table_in} {index_in}");
            mesh.set_strict(true);
        }
        let x = small_ints(DType::F32, &[6, 2].into(), 2);
        let columns = Tensor::from_vec(vec![1i64, 0, 0, 1, 1, 1], [6, 1])?;
        let y = lay(&x, ROWS)?.gather(1, &lay(&columns, ROWS)?)?;
        assert_eq!(y.layout().to_string(), ROWS);
        mesh.set_strict(false);
        let want = lay(&x, "(R)")?.gather(1, &lay(&columns, "(R)")?)?;
        assert_eq!(y.full_tensor()?.to_f64_vec(), want.full_tensor()?.to_f64_vec());
        Ok(())
    };
    spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
}

/// Results that no placement can cut raggedly: a ragged operand moves.
#[test]
fn products_with_ragged_columns_move_an_operand() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, "a=3")?;
        let x = DTensor::zeros(&mesh, DType::F32, [2, 4], "(R)")?;
        let w = DTensor::zeros(&mesh, DType::F32, [6, 4], ROWS)?;
        mesh.set_strict(true);
        let refused = x.einsum("b k, n k -> b n", &w).unwrap_err().to_string();
        assert!(refused.contains("would have to move"), "{refused}");
        mesh.set_strict(false);
        assert_eq!(x.einsum("b k, n k -> b n", &w)?.shape()[..], [2, 6]);
        Ok(())
    };
    spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
}

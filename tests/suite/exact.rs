//! Sums whose bits reveal the order of addition.
//!
//! Eight terms have 428 bracketings besides the reduction tree. A search finds columns of eight numbers such that
//! each of these bracketings gives other bits in some column. A mesh, a layout or an operator that adds in another
//! order fails.

use std::ops::Add;

use isoshard::Result;
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::ops::{EmbeddingGrad, Matmul, ScatterAdd};
use isoshard::optim::global_norm;
use isoshard::placement::{Layout, Mesh};
use isoshard::tensor::{DType, Element, Tensor};

use crate::common::{self, SplitMix, spmd};

const N: usize = 8;
const MESHES: [&str; 9] = ["1", "a=2", "a=3", "a=4", "a=5", "a=8", "a=2,b=2", "a=2,b=3", "a=3,b=2"];

/// The sums of `x` under all bracketings, in a fixed order.
fn bracketings<T: Copy + Add<Output = T>>(x: &[T]) -> Vec<T> {
    if let [only] = x {
        return vec![*only];
    }
    let at = |k: usize| {
        let (left, right) = (bracketings(&x[..k]), bracketings(&x[k..]));
        left.iter().flat_map(|&a| right.iter().map(move |&b| a + b)).collect::<Vec<_>>()
    };
    (1..x.len()).flat_map(at).collect()
}

/// The sum in the order of the reduction tree, by its definition.
fn tree<T: Copy + Add<Output = T>>(x: &[T]) -> T {
    match x {
        [only] => *only,
        _ => tree(&x[..x.len().div_ceil(2)]) + tree(&x[x.len().div_ceil(2)..]),
    }
}

/// Finds columns that tell the tree from every other bracketing. `term` maps a number to the term that is added,
/// `finish` a sum to the result.
fn telling<T: Element + Add<Output = T>>(term: impl Fn(T) -> T, finish: impl Fn(T) -> T) -> Vec<[T; N]> {
    let mut stream = SplitMix(1);
    let mut columns = Vec::new();
    let mut alive = [true; 429];
    while alive.iter().filter(|a| **a).count() > 1 {
        let x: [T; N] = std::array::from_fn(|_| {
            let bits = if T::DTYPE == DType::F64 { 52 } else { 23 };
            let mantissa = 1.0 + stream.below(1 << bits) as f64 / 2f64.powi(bits);
            let sign = if stream.below(2) == 0 { -1.0 } else { 1.0 };
            T::from_f64(sign * mantissa * 2f64.powi(stream.below(5) as i32 - 2))
        });
        let terms = x.map(&term);
        let want = finish(tree(&terms));
        let sums = bracketings(&terms);
        assert_eq!(sums.len(), alive.len());
        alive.iter_mut().zip(sums).for_each(|(alive, sum)| *alive &= finish(sum) == want);
        columns.push(x);
        assert!(columns.len() < 1000, "some bracketing never differs");
    }
    columns
}

fn plain() -> Vec<[f32; N]> {
    telling(|x: f32| x, |x| x)
}

/// Runs `check` on every mesh, for every split of the first dim of eight rows.
fn everywhere(check: impl Fn(&DeviceMesh, Layout) -> Result<()> + Copy + Send + Sync + 'static) {
    let mut ways = 0;
    for text in MESHES {
        let mesh = Mesh::parse(text, 0).unwrap();
        let layouts: Vec<String> = match mesh.ndim() {
            0 => vec!["()".into()],
            1 => {
                let mut units = vec![0; mesh.axis_len(0)];
                units[0] = 3;
                *units.last_mut().unwrap() += 5;
                let units: Vec<String> = units.iter().map(usize::to_string).collect();
                vec!["(S0)".into(), format!("(RS(0..1; {}))", units.join(",")), "(R)".into()]
            }
            _ => ["(S0, S0)", "(S0^1, S0^0)", "(S0, R)", "(R, S0)"].map(String::from).to_vec(),
        };
        for layout in layouts {
            ways += 1;
            let layout = if layout == "()" { Layout::replicated(0) } else { layout.parse().unwrap() };
            let at = format!("{text} {layout}");
            spmd(mesh.rank_len(), move |rank| check(&DeviceMesh::parse(&rank, text)?, layout.clone()))
                .unwrap_or_else(|e| panic!("{at}: {e}"));
        }
    }
    assert_eq!(ways, 1 + 5 * 3 + 3 * 4);
}

/// Returns the columns as `[8, C]` in `layout`.
fn rows<T: Element>(mesh: &DeviceMesh, columns: &[[T; N]], layout: Layout) -> Result<DTensor> {
    let x: Vec<T> = (0..N).flat_map(|i| columns.iter().map(move |c| c[i])).collect();
    DTensor::distribute(mesh, &Tensor::from_vec(x, [N, columns.len()])?, layout)
}

/// Fails unless `got` has the columns' sums in the order of the tree.
#[track_caller]
fn expect(sums: &DTensor, columns: &[[f32; N]]) -> Result<()> {
    let bits = |x: f32| x.to_bits();
    let got: Vec<u32> = sums.full_tensor()?.to_vec::<f32>()?.into_iter().map(bits).collect();
    assert_eq!(got, columns.iter().map(|c| bits(tree(c))).collect::<Vec<_>>(), "{sums:?}");
    Ok(())
}

#[test]
fn sums_and_products_and_scattered_sums() {
    everywhere(|mesh, layout| {
        let columns = plain();
        let (n, whole) = (columns.len(), Layout::replicated(mesh.mesh().ndim()));
        let x = rows(mesh, &columns, layout.clone())?;
        expect(&x.sum(&[0], false)?, &columns)?;
        // A product's leaf is not split, so the rows are an outer dim.
        let ones = DTensor::full(mesh, DType::F32, [N, 1], whole, 1.0)?;
        let product = Matmul::new("b s, b s n -> n")?;
        let outer = x.reshape([N, 1, n])?;
        expect(&DTensor::apply_one(&product, &[&ones, &outer])?, &columns)?;
        let zeros = DTensor::zeros(mesh, DType::I64, [N, 1], layout.clone())?;
        expect(&DTensor::apply_one(&EmbeddingGrad { rows: 1 }, &[&zeros, &outer])?, &columns)?;
        let zeros = zeros.expand([N, n])?;
        expect(&DTensor::apply_one(&ScatterAdd { dim: 0, extent: 1 }, &[&zeros, &x])?, &columns)
    });
}

#[test]
fn gradients_of_what_every_row_shares() {
    everywhere(|mesh, layout| {
        let columns = plain();
        let (n, whole) = (columns.len(), Layout::replicated(mesh.mesh().ndim()));
        // d/dw sum(x w) = sum x, through a broadcast.
        let w = DTensor::full(mesh, DType::F32, [1, n], whole.clone(), 0.5)?.requires_grad()?;
        let y = rows(mesh, &columns, layout.clone())?.mul(&w.expand([N, n])?)?;
        let grads = y.sum_all()?.backward()?;
        expect(grads.get(&w).expect("w is a leaf"), &columns)?;
        // The gradient of a layer norm's bias is the result's gradient summed over the rows.
        let x =
            DTensor::full(mesh, DType::F32, [N, 1, n], whole.clone(), 1.0)?.redistribute(layout.clone())?;
        let ones = DTensor::full(mesh, DType::F32, [n], whole.clone(), 1.0)?;
        let shift = DTensor::zeros(mesh, DType::F32, [n], whole)?.requires_grad()?;
        let dy = rows(mesh, &columns, layout)?.reshape([N, 1, n])?;
        let grads = x.layer_norm(&ones, Some(&shift), 1e-5)?.backward_from(dy)?;
        expect(grads.get(&shift).expect("shift is a leaf"), &columns)
    });
}

#[test]
fn the_norm_of_gradients() {
    everywhere(|mesh, layout| {
        for column in telling(|x: f64| x * x, f64::sqrt) {
            let norm = global_norm([&rows(mesh, &[column], layout.clone())?])?.item()?;
            assert_eq!(norm.to_bits(), tree(&column.map(|x| x * x)).sqrt().to_bits());
            // The squares of f32 are summed in f64.
            let narrow = column.map(|x| x as f32);
            let norm =
                global_norm([&rows(mesh, &[narrow], layout.clone())?])?.full_tensor()?.to_vec::<f32>()?;
            let squares = narrow.map(|x| f64::from(x) * f64::from(x));
            assert_eq!(norm[0].to_bits(), (tree(&squares).sqrt() as f32).to_bits());
        }
        Ok(())
    });
}

/// A tree over the ranks gives other bits, so the columns do reveal the order.
#[test]
fn another_order_shows() {
    let differ = spmd(3, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 3)])?;
        let columns = plain();
        let sum = || rows(&mesh, &columns, "(S0)".parse()?)?.sum(&[0], false);
        expect(&sum()?, &columns)?;
        let fast = mesh.with_reduction(Reduction::Fast, || sum()?.full_tensor()?.to_vec::<f32>())?;
        Ok(fast.iter().zip(&columns).any(|(f, c)| *f != tree(c)))
    });
    assert_eq!(differ.unwrap(), [true; 3]);
}

/// Exact mode moves the nodes of the tree that splits cut through, and nothing if splits fall on nodes.
#[test]
fn bytes_are_those_of_the_nodes() {
    let bytes = |text: &'static str, layout: &'static str, reduction: Reduction| {
        spmd(Mesh::parse(text, 0).unwrap().rank_len(), move |rank| {
            let mesh = DeviceMesh::parse(&rank, text)?;
            mesh.set_reduction(reduction);
            let x = DTensor::full(&mesh, DType::F32, [12, 1, 30], layout, 1.0)?;
            let partial = x.sum(&[0, 1], false)?;
            let before = mesh.received_bytes();
            let sum = partial.reduce_partial()?;
            assert_eq!(sum.full_tensor()?.to_f64_vec(), [12.0; 30]);
            Ok(mesh.received_bytes() - before)
        })
        .unwrap()
    };
    for (mesh, layout) in [("a=2", "(S0)"), ("a=4", "(S0)"), ("a=2,b=2", "(S0, S0)")] {
        assert_eq!(bytes(mesh, layout, Reduction::Exact), bytes(mesh, layout, Reduction::Fast), "{mesh}");
    }
    // Twelve rows on three ranks: [0, 3) [3, 4) | [4, 5) [5, 6) [6, 8) | [8, 9) [9, 12).
    assert_eq!(bytes("a=3", "(S0)", Reduction::Fast), [2 * 2 * 120 / 3; 3]);
    let finished = [2, 3, 2];
    let want = [0, 1, 2].map(|r| ((7 - finished[r]) * 120 / 3 + 2 * 120 / 3) as u64);
    assert_eq!(bytes("a=3", "(S0)", Reduction::Exact), want);
}

/// A rank with many nodes computes them in one call, and they equal those of a single rank.
#[test]
fn many_nodes_at_once() {
    for (mesh, layout) in
        [("a=2", "(S1)"), ("a=3", "(S1)"), ("a=3", "(S2)"), ("a=2,b=2", "(S0, S2)"), ("a=2,b=3", "(S1, S2)")]
    {
        let sums = |mesh: &'static str, layout: &'static str| {
            let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
            let run = move |rank| {
                let mesh = DeviceMesh::parse(&rank, mesh)?;
                let whole = common::ordinary(DType::F32, &[7, 5, 70].into(), 3);
                let x = DTensor::distribute(&mesh, &whole, layout)?;
                let mut found = Vec::new();
                for dims in [&[0, 1, 2][..], &[0, 1], &[1, 2], &[0, 2], &[2]] {
                    found.push(x.sum(dims, false)?.full_tensor()?.to_vec::<f32>()?);
                    found.push(x.sum(dims, true)?.full_tensor()?.to_vec::<f32>()?);
                }
                Ok(found)
            };
            spmd(ranks, run).unwrap()
        };
        let want = sums("1", "()").swap_remove(0);
        assert!(sums(mesh, layout).iter().all(|found| *found == want), "{mesh} {layout}");
    }
}

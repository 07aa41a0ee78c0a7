//! Every method that only moves elements is compared with a brute-force map of indices: the result's element at an
//! index is the operand's element at the index that the method's definition names. All layouts of a 2x2 mesh and of
//! three ranks; forward values, and gradients as the sum over the places to which an element goes.

use isoshard::Result;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Placement};
use isoshard::tensor::{ReduceOp, Shape, Tensor};

use crate::common::spmd;

/// A method, the result's shape, and the index of the operand's element at an index of the result.
struct Case {
    name: &'static str,
    run: fn(&DTensor) -> Result<DTensor>,
    shape: Vec<usize>,
    from: fn(&[usize]) -> Vec<usize>,
}

/// The operand: [4, 3, 2] has an extent that ranks divide, one that they do not, and one that is less than their number.
const OPERAND: [usize; 3] = [4, 3, 2];

fn cases() -> Vec<Case> {
    let case = |name, run, shape: &[usize], from| Case { name, run, shape: shape.to_vec(), from };
    vec![
        case("flip 0", |x| x.flip(&[0]), &[4, 3, 2], |i| vec![3 - i[0], i[1], i[2]]),
        case("flip 1, 2", |x| x.flip(&[1, -1]), &[4, 3, 2], |i| vec![i[0], 2 - i[1], 1 - i[2]]),
        case("roll 0", |x| x.roll(1, 0), &[4, 3, 2], |i| vec![(i[0] + 3) % 4, i[1], i[2]]),
        case("roll 1", |x| x.roll(-5, 1), &[4, 3, 2], |i| vec![i[0], (i[1] + 5) % 3, i[2]]),
        case("repeat", |x| x.repeat(&[2, 1, 3, 2]), &[2, 4, 9, 4], |i| vec![i[1], i[2] % 3, i[3] % 2]),
        case("repeat none", |x| x.repeat(&[1, 0, 1]), &[4, 0, 2], |i| i.to_vec()),
        case("interleave 0", |x| x.repeat_interleave(3, 0), &[12, 3, 2], |i| vec![i[0] / 3, i[1], i[2]]),
        case("interleave 1", |x| x.repeat_interleave(2, 1), &[4, 6, 2], |i| vec![i[0], i[1] / 2, i[2]]),
        case("stack", |x| DTensor::stack(&[x, x], 1), &[4, 2, 3, 2], |i| vec![i[0], i[2], i[3]]),
        case("unbind", |x| Ok(x.unbind(1)?.swap_remove(2)), &[4, 2], |i| vec![i[0], 2, i[1]]),
        case("chunk", |x| Ok(x.chunk(3, 0)?.swap_remove(1)), &[2, 3, 2], |i| vec![i[0] + 2, i[1], i[2]]),
        case("diagonal", |x| x.diagonal(0, 0, 1), &[2, 3], |i| vec![i[1], i[1], i[0]]),
        case("diagonal below", |x| x.diagonal(-1, 0, 2), &[3, 2], |i| vec![i[1] + 1, i[0], i[1]]),
        case("diagonal outside", |x| x.diagonal(5, 0, 2), &[3, 0], |i| i.to_vec()),
        case("movedim", |x| x.movedim(0, -1), &[3, 2, 4], |i| vec![i[2], i[0], i[1]]),
        case("flatten", |x| x.flatten(0, 1), &[12, 2], |i| vec![i[0] / 3, i[0] % 3, i[1]]),
        case("unflatten", |x| x.unflatten(0, &[2, 2]), &[2, 2, 3, 2], |i| vec![2 * i[0] + i[1], i[2], i[3]]),
        case("transpose", |x| x.transpose(0, 2), &[2, 3, 4], |i| vec![i[2], i[1], i[0]]),
        case("permute", |x| x.permute(&[1, 2, 0]), &[3, 2, 4], |i| vec![i[2], i[0], i[1]]),
        case("slice", |x| x.slice(1, 1, 2), &[4, 2, 2], |i| vec![i[0], i[1] + 1, i[2]]),
        case(
            "split",
            |x| Ok(x.split(&[1, 3], 0)?.swap_remove(1)),
            &[3, 3, 2],
            |i| vec![i[0] + 1, i[1], i[2]],
        ),
        case("cat", |x| DTensor::cat(&[x, x], 0), &[8, 3, 2], |i| vec![i[0] % 4, i[1], i[2]]),
        case("expand", |x| x.unsqueeze(0)?.expand([2, 4, 3, 2]), &[2, 4, 3, 2], |i| i[1..].to_vec()),
        case("unsqueeze", |x| x.unsqueeze(1), &[4, 1, 3, 2], |i| vec![i[0], i[2], i[3]]),
        case(
            "reshape",
            |x| x.reshape([8, 3]),
            &[8, 3],
            |i| {
                let e = i[0] * 3 + i[1];
                vec![e / 6, e / 2 % 3, e % 2]
            },
        ),
    ]
}

/// Returns the multi-dimensional index of row-major element `e`.
fn unravel(mut e: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, &n) in index.iter_mut().zip(shape).rev() {
        *i = e % n;
        e /= n;
    }
    index
}

fn ravel(index: &[usize], shape: &[usize]) -> usize {
    index.iter().zip(shape).fold(0, |e, (&i, &n)| {
        assert!(i < n, "{index:?} of {shape:?}");
        e * n + i
    })
}

/// Returns all layouts of one or two axes without `RaggedShard`, in both orders of axes that cut one dim, and some with
/// it, among them ranks without elements.
fn layouts(axes: usize) -> Result<Vec<Layout>> {
    let one: Vec<Placement> = [Placement::Replicate, Placement::Partial(ReduceOp::Sum)]
        .into_iter()
        .chain((0..OPERAND.len()).map(Placement::Shard))
        .collect();
    let mut all: Vec<Layout> = match axes {
        1 => one.into_iter().map(|p| Layout::new([p])).collect(),
        _ => one.iter().flat_map(|p| one.iter().map(|q| Layout::new([p.clone(), q.clone()]))).collect(),
    };
    let more: &[&str] = match axes {
        1 => &["(RS(0..1; 1, 0, 3))", "(RS(0..2; 5, 0, 7))", "(RS(0..3; 1, 20, 3))"],
        _ => &[
            "(S0^1, S0^0)",
            "(S1^1, S1^0)",
            "(S2^1, S2^0)",
            "(RS(0..2; 5, 7), R)",
            "(RS(0..3; 0, 24), R)",
            "(S2, RS(0..2; 7, 5))",
            "(RS(0..1; 3, 1), S1)",
            "(P(sum), RS(0..1; 1, 3))",
        ],
    };
    for layout in more {
        all.push(layout.parse()?);
    }
    Ok(all)
}

fn judge(mesh: &DeviceMesh, layout: &Layout, case: &Case) -> Result<()> {
    let n = OPERAND.iter().product::<usize>();
    let whole = Tensor::from_vec((1..=n).map(|e| e as f32).collect(), OPERAND)?;
    let x = DTensor::distribute(mesh, &whole, Layout::replicated(mesh.mesh().ndim()))?;
    let x = crate::common::spread(mesh, &whole, &x.spec().with_layout(layout.clone())?, 1)?;
    // A tensor with a Partial layout is no leaf.
    let is_leaf = !layout.placements().iter().any(Placement::is_partial);
    let x = if is_leaf { x.requires_grad()? } else { x };
    let y = (case.run)(&x)?;
    assert_eq!(y.shape()[..], case.shape[..], "{} of {layout}", case.name);
    let places: Vec<usize> = (0..Shape::from(&case.shape[..]).numel())
        .map(|e| ravel(&(case.from)(&unravel(e, &case.shape)), &OPERAND))
        .collect();
    let want: Vec<f32> = places.iter().map(|&e| 1.0 + e as f32).collect();
    assert_eq!(y.full_tensor()?.to_vec::<f32>()?, want, "{} of {layout}", case.name);
    let weights =
        Tensor::from_vec((0..places.len()).map(|e| (e * e % 11) as f32).collect(), &case.shape[..])?;
    let mut gradient = vec![0.0f32; n];
    places.iter().zip(weights.to_vec::<f32>()?).for_each(|(&e, w)| gradient[e] += w);
    let weights = DTensor::distribute(mesh, &weights, Layout::replicated(mesh.mesh().ndim()))?;
    if !is_leaf {
        return Ok(());
    }
    let dx = y.mul(&weights)?.sum_all()?.backward()?.take(&x).expect("x is a leaf");
    assert_eq!(dx.full_tensor()?.to_vec::<f32>()?, gradient, "gradient of {} of {layout}", case.name);
    Ok(())
}

fn all_layouts(ranks: usize, axes: &'static [(&'static str, usize)]) {
    spmd(ranks, move |rank| {
        let mesh = DeviceMesh::new(&rank, axes)?;
        for case in cases() {
            for layout in layouts(axes.len())? {
                judge(&mesh, &layout, &case)?;
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn elements_are_moved_by_definition_on_two_by_two() {
    all_layouts(4, &[("a", 2), ("b", 2)]);
}

#[test]
fn elements_are_moved_by_definition_on_three_ranks() {
    all_layouts(3, &[("a", 3)]);
}

/// Index methods against loops over elements, with equal indices, on layouts that cut each operand.
#[test]
fn elements_are_read_and_written_by_index() {
    for (x, index, src) in
        [("(R)", "(R)", "(R)"), ("(S0)", "(R)", "(S1)"), ("(S1)", "(S0)", "(S0)"), ("(S1)", "(R)", "(S1)")]
    {
        spmd(3, move |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 3)])?;
            let tensor = |n: usize, shape: [usize; 2]| {
                Tensor::from_vec((0..n).map(|e| (e * 7 % 13) as f32).collect(), shape)
            };
            let (whole_x, whole_src, rows) = (tensor(20, [5, 4])?, tensor(16, [4, 4])?, [3i64, 0, 3, 1]);
            let put = |t: &Tensor, layout: &str| -> Result<DTensor> {
                let plain = DTensor::distribute(&mesh, t, Layout::replicated(1))?;
                crate::common::spread(&mesh, t, &plain.spec().with_layout(layout.parse()?)?, 2)
            };
            let (x, src) = (put(&whole_x, x)?.requires_grad()?, put(&whole_src, src)?.requires_grad()?);
            let rows_tensor = Tensor::from_vec(rows.to_vec(), [4])?;
            let index = DTensor::distribute(&mesh, &rows_tensor, index.parse::<Layout>()?)?;
            let (vx, vs) = (whole_x.to_vec::<f32>()?, whole_src.to_vec::<f32>()?);
            let check = |name: &str, y: &DTensor, want: &[f32]| -> Result<()> {
                assert_eq!(y.full_tensor()?.to_vec::<f32>()?, want, "{name}");
                Ok(())
            };
            let selected: Vec<f32> = rows.iter().flat_map(|&r| vx[r as usize * 4..][..4].to_vec()).collect();
            check("index_select", &x.index_select(0, &index)?, &selected)?;
            check("index", &x.index(&[&index])?, &selected)?;
            let (mut copied, mut added, mut largest) = (vx.clone(), vx.clone(), vx.clone());
            for (k, &r) in rows.iter().enumerate() {
                for c in 0..4 {
                    let (to, from) = (r as usize * 4 + c, vs[k * 4 + c]);
                    copied[to] = from;
                    added[to] += from;
                    largest[to] = largest[to].max(from);
                }
            }
            let copy = x.index_copy(0, &index, &src)?;
            check("index_copy", &copy, &copied)?;
            check("index_add", &x.index_add(0, &index, &src)?, &added)?;
            check("index_put", &x.index_put(&[&index], &src, true)?, &added)?;
            let full = index.reshape([4, 1])?.expand([4, 4])?;
            check("scatter_reduce", &x.scatter_reduce(0, &full, &src, ReduceOp::Max)?, &largest)?;
            check("take", &x.take(&index)?, &rows.map(|r| vx[r as usize]))?;
            let counts = index.bincount(5)?.full_tensor()?.to_vec::<i64>()?;
            assert_eq!(counts, [1, 1, 0, 2, 0]);
            // The gradient of an element that was overwritten is 0: rows 0, 1 and 3 of x, and row 0 of src.
            let mut grads = copy.sum_all()?.backward()?;
            let dx: Vec<f32> = (0..20).map(|e| f32::from(![0, 1, 3].contains(&(e / 4)))).collect();
            check("dx", &grads.take(&x).expect("x is a leaf"), &dx)?;
            let dsrc: Vec<f32> = (0..16).map(|e| f32::from(e / 4 != 0)).collect();
            check("dsrc", &grads.take(&src).expect("src is a leaf"), &dsrc)
        })
        .unwrap();
    }
}

/// Gradients go to the elements that were chosen; equal extremes share them.
#[test]
fn gradients_of_chosen_elements() {
    for layout in ["(R)", "(S0)"] {
        spmd(2, move |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
            let put = |x: Vec<f32>| {
                let n = x.len();
                DTensor::distribute(&mesh, &Tensor::from_vec(x, [n])?, layout.parse::<Layout>()?)?
                    .requires_grad()
            };
            let index = Tensor::from_vec(vec![1i64, 1, 0], [3])?;
            let index = DTensor::distribute(&mesh, &index, Layout::replicated(1))?;
            let (x, src) = (put(vec![1.0, 5.0, 5.0])?, put(vec![5.0, 2.0, 1.0])?);
            let mut grads = x.scatter_reduce(0, &index, &src, ReduceOp::Max)?.sum_all()?.backward()?;
            let mut of = |x: &DTensor| grads.take(x).expect("a leaf").full_tensor()?.to_vec::<f32>();
            assert_eq!((of(&x)?, of(&src)?), (vec![0.5, 0.5, 1.0], vec![0.5, 0.0, 0.5]));
            let weights = put(vec![1.0, 10.0, 100.0])?.detach();
            let x = put(vec![3.0, 1.0, 2.0])?;
            let mut grads = x.sort(0, false)?.0.mul(&weights)?.sum_all()?.backward()?;
            let dx = grads.take(&x).expect("a leaf").full_tensor()?.to_vec::<f32>()?;
            assert_eq!(dx, [100.0, 1.0, 10.0]);
            let mut grads = x.topk(1, 0, true)?.0.mul_scalar(7.0)?.sum_all()?.backward()?;
            let dx = grads.take(&x).expect("a leaf").full_tensor()?.to_vec::<f32>()?;
            assert_eq!(dx, [7.0, 0.0, 0.0]);
            Ok(())
        })
        .unwrap();
    }
}

/// A sharded top-k sends candidates alone, and has the elements of a whole one: values with many ties, NaN and both
/// zeros, on one axis and on two.
#[test]
fn a_sharded_topk_is_the_whole_one() {
    for (axes, layouts) in
        [(&[("a", 3)][..], &["(S1)", "(S0)"][..]), (&[("a", 2), ("b", 2)], &["(S1, S1)", "(S0, S1)"])]
    {
        for n in [23usize, 24] {
            spmd(axes.iter().map(|a| a.1).product(), move |rank| {
                let mesh = DeviceMesh::new(&rank, axes)?;
                let value = |e: usize| [3.0f32, -0.0, 0.0, f32::NAN, -1.0, 3.0, f32::NEG_INFINITY][e * e % 7];
                let whole = Tensor::from_vec((0..5 * n).map(value).collect(), [5, n])?;
                let x = DTensor::distribute(&mesh, &whole, Layout::replicated(axes.len()))?;
                for layout in layouts {
                    let cut = x.redistribute(layout)?;
                    for (k, largest) in [(1, true), (2, false), (5, true), (6, true), (n, true)] {
                        let (want, got) = (x.topk(k, 1, largest)?, cut.topk(k, 1, largest)?);
                        let bits =
                            |t: &DTensor| Ok::<_, isoshard::Error>(t.full_tensor()?.as_bytes()?.to_vec());
                        assert_eq!(bits(&want.0)?, bits(&got.0)?, "values: {layout} {k} of {n}");
                        assert_eq!(bits(&want.1)?, bits(&got.1)?, "indices: {layout} {k} of {n}");
                    }
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

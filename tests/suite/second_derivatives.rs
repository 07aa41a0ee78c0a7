//! Gradients of gradients: compared with central differences of gradients in f64, with PyTorch's values, and by bits
//! with a single rank's on meshes.

mod differences;

use std::cell::Cell;
use std::rc::Rc;

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::placement::{Layout, Mesh, Placement};
use isoshard::rng::Generator;
use isoshard::tensor::{DType, Tensor};

/// Numbers from this script, run with PyTorch 2.15. It writes layer norm as a formula, since the third derivative of
/// PyTorch's own `layer_norm` differs from central differences of its second one, by a factor of 1.7 in element 0 of `k`.
///
/// ```python
/// import torch
/// def n(shape, salt):
///     numbers = [((3 * e + salt) % 7 - 3) / 4 for e in range(torch.Size(shape).numel())]
///     return torch.tensor(numbers, dtype=torch.float64).reshape(shape)
/// x, w, b, u = n((2, 4), 1), n((4,), 2) + 1, n((4,), 3), n((4, 3), 5)
/// v, t = n((2, 4), 6), torch.tensor([2, 0])
/// x.requires_grad_()
/// c = x - x.mean(-1, keepdim=True)
/// y = c / (c.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w + b
/// loss = torch.nn.functional.cross_entropy(torch.nn.functional.gelu(y) @ u, t)
/// g, = torch.autograd.grad(loss, x, create_graph=True)
/// h, = torch.autograd.grad((g * v).sum(), x, create_graph=True)
/// k, = torch.autograd.grad((h * v).sum(), x)
/// q = n((1, 2, 3, 2), 1).requires_grad_()
/// with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
///     o = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5)
/// a, = torch.autograd.grad((o * o).sum(), q, create_graph=True)
/// p, = torch.autograd.grad((a * n((1, 2, 3, 2), 4)).sum(), q)
/// for it in [g, h, k, p]: print([float(f"{z:.15g}") for z in it.detach().flatten()])
/// ```
#[test]
fn derivatives_are_those_of_pytorch() {
    let want: [&[f64]; 4] = [
        &[
            0.013669110236689,
            -0.0229455961295314,
            -0.0160653677613319,
            0.0253418536541743,
            -0.109598865928639,
            0.128431498621081,
            0.103964731120762,
            -0.122797363813204,
        ],
        &[
            0.0520187969257685,
            0.0380405992059951,
            -0.0269485093073705,
            -0.0631108868243931,
            0.22137735479719,
            -1.23975505872686,
            0.251015067888235,
            0.767362636041435,
        ],
        &[
            0.199440722411795,
            0.0295203311946646,
            0.00728646045057138,
            -0.236247514057031,
            -2.21103474646624,
            5.36437602691335,
            -1.69197699253398,
            -1.46136428791313,
        ],
        &[
            0.613851253955537,
            -1.36806435130107,
            -0.0303249650751601,
            0.219348840701497,
            -0.412596454840935,
            0.349749975536398,
            -1.57178720741529,
            0.584018384763663,
            -0.603630387607594,
            -0.0905844375034034,
            -0.034118990109321,
            -0.162160420459073,
        ],
    ];
    for mesh in MESHES {
        let found = on_mesh(mesh, |mesh| {
            let n = |shape: &[usize], salt: usize, by: f64| {
                let numbers =
                    (0..shape.iter().product()).map(|e: usize| ((3 * e + salt) % 7) as f64 / 4.0 - 0.75 + by);
                DTensor::distribute(mesh, &Tensor::from_vec(numbers.collect(), shape)?, spread(mesh, shape))
            };
            let targets = Tensor::from_vec(vec![2i64, 0], [2])?;
            let targets = DTensor::distribute(mesh, &targets, spread(mesh, &[2]))?;
            let (x, w, b, u) = (n(&[2, 4], 1, 0.0)?, n(&[4], 2, 1.0)?, n(&[4], 3, 0.0)?, n(&[4, 3], 5, 0.0)?);
            let (x, v) = (x.requires_grad()?, n(&[2, 4], 6, 0.0)?);
            let y = x.layer_norm(&w, Some(&b), 1e-3)?.gelu()?.matmul(&u)?;
            let g = y.cross_entropy(&targets)?.mean_all()?.grad(&[&x])?.remove(0);
            let h = g.mul(&v)?.sum_all()?.grad(&[&x])?.remove(0);
            let k = h.mul(&v)?.sum_all()?.grad(&[&x])?.remove(0);
            let q = n(&[1, 2, 3, 2], 1, 0.0)?.requires_grad()?;
            let o = q.attention(&q, &q, 0.5)?;
            let a = o.mul(&o)?.sum_all()?.grad(&[&q])?.remove(0);
            let c = a.mul(&n(&[1, 2, 3, 2], 4, 0.0)?)?.sum_all()?.grad(&[&q])?.remove(0);
            [g, h, k, c].iter().map(DTensor::full_tensor).collect()
        });
        for ((got, want), name) in found.iter().zip(want).zip(["g", "h", "k", "c"]) {
            for (got, want) in got.to_f64_vec().iter().zip(want) {
                assert!((got - want).abs() < 1e-12, "{mesh}: {name}: {got} instead of {want}");
            }
        }
    }
}

const MESHES: [&str; 4] = ["1", "fsdp=3", "tp=2", "dp=2,tp=2"];

/// Runs `f` on each rank and returns the tensors, which must have the same bits on all ranks.
fn on_mesh(
    mesh: &'static str,
    f: impl Fn(&DeviceMesh) -> Result<Vec<Tensor>> + Send + Sync + Clone + 'static,
) -> Vec<Tensor> {
    let ranks = Mesh::parse(mesh, 0).expect("a mesh").rank_len();
    let all = spmd(ranks, move |rank| f(&DeviceMesh::parse(&rank, mesh)?));
    let mut all = all.unwrap_or_else(|e| panic!("{mesh}: {e}"));
    for other in &all[1..] {
        same_bits(mesh, other, &all[0]);
    }
    all.remove(0)
}

fn same_bits(mesh: &str, got: &[Tensor], want: &[Tensor]) {
    assert_eq!(got.len(), want.len(), "{mesh}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!((got.dtype(), got.shape()), (want.dtype(), want.shape()), "{mesh}: tensor {i}");
        let bits = |x: &Tensor| x.to_f64_vec().into_iter().map(f64::to_bits).collect::<Vec<_>>();
        assert!(bits(got) == bits(want), "{mesh}: tensor {i}: {got:?} instead of {want:?}");
    }
}

/// Asserts that the program has one rank's bits on each mesh, and returns them.
fn equal_on_meshes(
    f: impl Fn(&DeviceMesh) -> Result<Vec<Tensor>> + Send + Sync + Clone + 'static,
) -> Vec<Tensor> {
    let want = on_mesh("1", f.clone());
    for mesh in &MESHES[1..] {
        same_bits(mesh, &on_mesh(mesh, f.clone()), &want);
    }
    want
}

/// Returns the layout that shards dim 0 over the first axis and the last dim over the second, if there are any.
fn spread(mesh: &DeviceMesh, shape: &[usize]) -> Layout {
    let axes = mesh.mesh().ndim();
    let dims = [0, shape.len() - 1];
    let two = axes == 2 && shape.len() > 1;
    let of = |axis: usize| if axis == 0 || two { Placement::Shard(dims[axis]) } else { Placement::Replicate };
    Layout::new((0..axes).map(of))
}

/// A language model's Hessian times a vector, with parameters that FSDP gathers again in both passes.
#[test]
fn a_hessian_vector_product_has_one_rank_s_bits() {
    let products = equal_on_meshes(|mesh| {
        let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
        let layout = plan.batch_layout(mesh.mesh());
        let mut params = Params::new(mesh, plan, 11)?;
        let config =
            GptConfig { vocabulary: 13, block: 7, layers: 2, heads: 2, width: 10, dropout: 0.1, bias: true };
        let model = Gpt::new(&mut params, config)?;
        let tokens = |next: usize| -> Result<DTensor> {
            let all = (0..21).map(|e| ((e + next) * (e + next) % 13) as i64).collect();
            DTensor::distribute(mesh, &Tensor::from_vec(all, [3, 7])?, layout.clone())
        };
        let mut dropout = Generator::new(3);
        let cx = Forward::train(&params, &mut dropout);
        let loss = model.loss(&cx, &tokens(0)?, &tokens(1)?)?;
        let leaves: Vec<&DTensor> = params.values().collect();
        let mut vectors = Generator::new(4);
        let mut dot = None;
        for (x, grad) in leaves.iter().zip(loss.grad(&leaves)?) {
            let v = DTensor::randn(mesh, x.dtype(), x.shape().clone(), x.layout().clone(), &mut vectors)?;
            let term = grad.mul(&v)?.sum_all()?;
            dot = Some(match dot {
                None => term,
                Some(dot) => term.add(&dot)?,
            });
        }
        let products = dot.expect("parameters").backward()?;
        leaves.iter().map(|x| products.get(x).expect("a leaf").full_tensor()).collect()
    });
    let largest = |x: &Tensor| x.to_f64_vec().into_iter().fold(0.0, |m: f64, v| m.max(v.abs()));
    assert!(products.iter().all(|x| largest(x) > 1e-4 && largest(x) < 1e3), "every parameter bends the loss");
}

/// A critic is trained for one step with the penalty `(|dD/dx| - 1)²` (Gulrajani et al., *Improved Training of
/// Wasserstein GANs*, 2017).
#[test]
fn training_with_a_gradient_penalty_has_one_rank_s_bits() {
    let trained = equal_on_meshes(|mesh| {
        let mut generator = Generator::new(5);
        let mut leaf = |shape: &[usize]| {
            DTensor::randn(mesh, DType::F32, shape, spread(mesh, shape), &mut generator)?
                .mul_scalar(0.5)?
                .requires_grad()
        };
        let mut params = Vec::new();
        for shape in [&[6][..], &[6], &[6, 6], &[6, 10], &[10, 3]] {
            params.push(leaf(shape)?);
        }
        let x = leaf(&[4, 5, 6])?;
        let target = Tensor::from_vec((0..20).map(|e| e % 3).collect::<Vec<i64>>(), [4, 5])?;
        let target = DTensor::distribute(mesh, &target, spread(mesh, &[4, 5]))?;
        let loss = |params: &[DTensor]| -> Result<DTensor> {
            let [w, b, wq, w1, w2] = params else { unreachable!("five parameters") };
            let heads = |x: &DTensor| x.reshape([4, 5, 2, 3])?.permute(&[0, 2, 1, 3]);
            let normal = x.layer_norm(w, Some(b), 1e-3)?;
            let q = heads(&normal.matmul(wq)?)?;
            let mixed = q.attention(&heads(&normal)?, &q, 0.6)?.permute(&[0, 2, 1, 3])?.reshape([4, 5, 6])?;
            let scores = mixed.add(&x)?.matmul(w1)?.gelu()?.matmul(w2)?;
            let critic = scores.cross_entropy(&target)?.mean_all()?;
            let dx = critic.grad(&[&x])?.remove(0);
            let norms = dx.mul(&dx)?.sum(&[1, 2], false)?.add_scalar(1e-6)?.sqrt()?;
            critic.add(&norms.add_scalar(-1.0)?.square()?.mean_all()?.mul_scalar(10.0)?)
        };
        let mut before = loss(&params)?;
        let gradients = before.backward()?;
        let step = |w: &DTensor| -> Result<DTensor> {
            let _guard = mesh.no_grad();
            let by = gradients.get(w).expect("a leaf").mul_scalar(0.01)?;
            w.detach().sub(&by)?.requires_grad()
        };
        let params = params.iter().map(step).collect::<Result<Vec<_>>>()?;
        let after = loss(&params)?;
        let all = [&before, &after].into_iter().chain(&params);
        all.map(DTensor::full_tensor).collect()
    });
    let [before, after] = [0, 1].map(|i| trained[i].to_f64_vec()[0]);
    assert!(after < before - 1e-3, "the penalty falls: {before}, {after}");
}

/// Rounds, with the derivative of the identity (a straight-through estimator; Bengio et al., 2013).
fn straight_through(x: &DTensor) -> Result<DTensor> {
    let forward = |ins: &[DTensor]| Ok((vec![ins[0].round()?], vec![]));
    let backward = |_: &[DTensor], grads: &[DTensor]| Ok(vec![Some(grads[0].clone())]);
    Ok(DTensor::custom_vjp("straight_through", &[x], forward, backward)?.remove(0))
}

/// Returns `(√(x y), x + y)`. The derivative reads an operand and a result.
fn root(x: &DTensor, y: &DTensor) -> Result<Vec<DTensor>> {
    let forward = |ins: &[DTensor]| {
        let root = ins[0].mul(&ins[1])?.sqrt()?;
        let saved = vec![ins[0].clone(), ins[1].clone(), root.clone()];
        Ok((vec![root, ins[0].add(&ins[1])?], saved))
    };
    let backward = |saved: &[DTensor], grads: &[DTensor]| {
        let [x, y, root] = saved else { unreachable!("three are saved") };
        let half = grads[0].div(root)?.mul_scalar(0.5)?;
        Ok(vec![Some(half.mul(y)?.add(&grads[1])?), Some(half.mul(x)?.add(&grads[1])?)])
    };
    DTensor::custom_vjp("root", &[x, y], forward, backward)
}

#[test]
fn a_user_s_derivative_is_used_on_every_mesh() {
    let found = equal_on_meshes(|mesh| {
        let mut generator = Generator::new(6);
        let mut leaf = || {
            let shape = [5, 7];
            let x = DTensor::randn(mesh, DType::F64, shape, spread(mesh, &shape), &mut generator)?;
            x.square()?.add_scalar(0.5)?.requires_grad()
        };
        let (x, y) = (leaf()?, leaf()?);
        let [ours, sum] = root(&x, &y)?.try_into().expect("two results");
        let theirs = x.mul(&y)?.sqrt()?;
        let mut found = Vec::new();
        for z in [ours.mul(&sum)?, theirs.mul(&x.add(&y)?)?, straight_through(&x)?.mul(&y)?] {
            let first = z.sum_all()?.grad(&[&x, &y])?;
            let second = first[0].mul(&first[1])?.sum_all()?.grad(&[&x, &y])?;
            let leaves = second[0].mul(&second[1])?.sum_all()?.backward()?;
            found.extend(first.into_iter().chain(second));
            found.push(leaves.get(&x).expect("a leaf").clone());
        }
        found.iter().map(DTensor::full_tensor).collect()
    });
    let close = |a: &Tensor, b: &Tensor| {
        a.to_f64_vec().iter().zip(b.to_f64_vec()).all(|(a, b)| (a - b).abs() < 1e-9 * (1.0 + b.abs()))
    };
    for i in 0..5 {
        assert!(close(&found[i], &found[5 + i]), "the derivative {i} of the function is that of its formula");
    }
    // z = round(x) y: dz/dx is y although round is constant in pieces.
    assert!(found[10].to_f64_vec().iter().all(|&y| y >= 0.5));
}

#[test]
fn each_backward_pass_calls_the_function_and_none_is_no_gradient() {
    on_mesh("tp=2", |mesh| {
        let x = DTensor::full(mesh, DType::F32, [3], "(S0)", 2.0)?.requires_grad()?;
        let y = DTensor::full(mesh, DType::F32, [3], "(R)", 5.0)?.requires_grad()?;
        let calls = Rc::new(Cell::new(0));
        let counted = calls.clone();
        let forward = |ins: &[DTensor]| {
            assert!(!ins[0].has_history(), "the operations are not recorded");
            Ok((vec![ins[0].clone(), ins[1].clone()], vec![]))
        };
        let backward = move |_: &[DTensor], grads: &[DTensor]| {
            counted.set(counted.get() + 1);
            assert_eq!(grads[1].full_tensor()?.to_f64_vec(), [0.0; 3], "it has no gradient");
            Ok(vec![Some(grads[0].neg()?), None])
        };
        let z = DTensor::custom_vjp("reversal", &[&x, &y], forward, backward)?;
        for pass in 1..3 {
            let gradients = z[0].mul(&x)?.sum_all()?.backward()?;
            assert_eq!(gradients.get(&x).expect("a leaf").full_tensor()?.to_f64_vec(), [0.0; 3], "2 - 2");
            assert!(gradients.get(&y).is_none());
            assert_eq!(calls.get(), pass);
        }
        assert_eq!(z[0].sum_all()?.grad(&[&y])?[0].full_tensor()?.to_f64_vec(), [0.0; 3]);
        let _guard = mesh.no_grad();
        let constant =
            DTensor::custom_vjp("reversal", &[&x], |ins| Ok((ins.to_vec(), vec![])), |_, _| Ok(vec![None]))?;
        assert!(!constant[0].has_history());
        Ok(vec![])
    });
}

#[test]
fn errors_name_the_function_and_the_rule() {
    on_mesh("1", |mesh| {
        let full = |shape: &[usize]| DTensor::full(mesh, DType::F64, shape, Layout::replicated(0), 2.0);
        let (x, constant) = (full(&[3])?.requires_grad()?, full(&[3])?);
        let refused = |result: Result<Vec<DTensor>>, text: &str| {
            let error = result.expect_err(text).to_string();
            assert!(error.contains(text), "{error:?} does not contain {text:?}");
        };
        let y = x.mul(&x)?;
        refused(y.grad(&[&x]), "grad: wants one element; got f64[3]");
        refused(
            constant.sum_all()?.grad(&[&x]),
            "grad: this tensor does not depend on a leaf that requires a gradient",
        );
        refused(
            y.sum_all()?.grad(&[&constant]),
            "grad: differentiates with respect to tensors with history; got f64[3]",
        );
        refused(y.grad_from(&full(&[2])?, &[&x]), "grad: the gradient does not fit; got f64[2]");
        let other = DeviceMesh::new(mesh.rank(), &[])?;
        let far = DTensor::zeros(&other, DType::F64, [3], Layout::replicated(0))?.requires_grad()?;
        refused(y.sum_all()?.grad(&[&far]), "grad: differentiates with respect to tensors on its own mesh");
        refused(
            x.digamma()?.sum_all()?.grad(&[&x]),
            "trigamma: no derivative: the second derivative of digamma is not available",
        );
        // The gradient of a linear function is a constant.
        let linear = x.mul_scalar(3.0)?.sum_all()?.grad(&[&x])?.remove(0);
        assert!(!linear.has_history());

        let with = |grads: fn(&[DTensor]) -> Result<Vec<Option<DTensor>>>| -> Result<Vec<DTensor>> {
            let forward = |ins: &[DTensor]| Ok((vec![ins[0].exp()?], vec![ins[0].exp()?]));
            let z = DTensor::custom_vjp("mine", &[&x], forward, move |saved, _| grads(saved))?.remove(0);
            z.sum_all()?.backward()?;
            z.sum_all()?.grad(&[&x])
        };
        refused(
            with(|_| Ok(vec![])),
            "mine: the backward function returns one gradient per operand; got 0 for 1 operand(s)",
        );
        refused(
            with(|saved| Ok(vec![Some(saved[0].sum_all()?)])),
            "mine: the gradient of operand 0 has the operand's shape and dtype; got f64[] for f64[3]",
        );
        refused(
            with(|saved| Ok(vec![Some(saved[0].cast(DType::F32)?)])),
            "mine: the gradient of operand 0 has the operand's shape and dtype; got f32[3] for f64[3]",
        );
        refused(
            with(|saved| Ok(vec![Some(saved[0].clone())])),
            "mine: a backward pass that is recorded needs the history of saved tensors",
        );
        refused(
            DTensor::custom_vjp("mine", &[], |_| Ok((vec![], vec![])), |_, _| Ok(vec![])),
            "mine: wants operands; got none",
        );
        refused(
            DTensor::custom_vjp("mine", &[&x, &far], |_| Ok((vec![], vec![])), |_, _| Ok(vec![])),
            "mine: the operands are on one mesh",
        );
        Ok(vec![])
    });
}

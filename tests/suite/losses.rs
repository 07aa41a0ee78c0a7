//! Losses and norms on every mesh: values and gradients equal PyTorch's, and have the bits of a single rank.

use isoshard::Result;
use isoshard::dtensor::{BinaryLossOptions, CrossEntropyOptions, DTensor, DeviceMesh, LossReduction};
use isoshard::placement::{Layout, Mesh};
use isoshard::tensor::{DType, Shape, Tensor};

use crate::common::spmd;

/// The operands of every loss: numbers, probabilities, classes.
struct LossInputs {
    x: DTensor,
    y: DTensor,
    p: DTensor,
    w: DTensor,
    target: DTensor,
    columns: DTensor,
    signs: DTensor,
}

struct LossCase {
    name: &'static str,
    loss: fn(&LossInputs) -> Result<DTensor>,
    want: f64,
    /// The gradients of x and of the other operand that has one, 12 numbers each.
    gradients: &'static str,
}

const PADDED: CrossEntropyOptions = CrossEntropyOptions {
    class_dim: -1,
    reduction: LossReduction::Mean,
    ignore_index: Some(-100),
    class_weights: None,
    label_smoothing: 0.0,
    z_loss: 0.0,
};

/// Numbers from PyTorch 2.15 in f64; the z-loss is added there by its definition.
const CASES: &[LossCase] = &[
    LossCase {
        name: "padding",
        loss: |i| i.x.cross_entropy_with(&i.target, &PADDED),
        want: 2.1653786832603,
        gradients: "0.079846775016 -0.486124711034 0.357848418891 0.048429517126 0.0 0.0
            0.0 0.0 0.007158849935 0.111983254252 -0.262931448889 0.143789344702",
    },
    LossCase {
        name: "padding, sum",
        loss: |i| {
            i.x.cross_entropy_with(
                &i.target,
                &CrossEntropyOptions { reduction: LossReduction::Sum, ..PADDED },
            )
        },
        want: 4.3307573665207,
        gradients: "0.159693550032 -0.972249422067 0.715696837782 0.096859034253 0.0 0.0
            0.0 0.0 0.014317699871 0.223966508503 -0.525862897778 0.287578689405",
    },
    LossCase {
        name: "smoothing",
        loss: |i| i.x.cross_entropy_with(&i.target, &CrossEntropyOptions { label_smoothing: 0.1, ..PADDED }),
        want: 2.1466286832603,
        gradients: "0.067346775016 -0.448624711034 0.345348418891 0.035929517126 0.0 0.0
            0.0 0.0 -0.005341150065 0.099483254252 -0.225431448889 0.131289344702",
    },
    LossCase {
        name: "weights",
        loss: |i| {
            i.x.cross_entropy_with(&i.target, &CrossEntropyOptions { class_weights: Some(&i.w), ..PADDED })
        },
        want: 2.6384186597081,
        gradients: "0.106462366688 -0.648166281378 0.477131225188 0.064572689502 0.0 0.0
            0.0 0.0 0.004772566624 0.074655502834 -0.175287632593 0.095859563135",
    },
    LossCase {
        name: "weights and smoothing",
        loss: |i| {
            i.x.cross_entropy_with(
                &i.target,
                &CrossEntropyOptions { class_weights: Some(&i.w), label_smoothing: 0.1, ..PADDED },
            )
        },
        want: 2.5010587947744,
        gradients: "0.096639886791 -0.599149114347 0.443450295517 0.059058932039 0.0 0.0
            0.0 0.0 0.000576071415 0.057522239275 -0.151275418222 0.093177107532",
    },
    LossCase {
        name: "z-loss",
        loss: |i| i.x.cross_entropy_with(&i.target, &CrossEntropyOptions { z_loss: 0.01, ..PADDED }),
        want: 2.2178564940693,
        gradients: "0.083574818726 -0.485476874177 0.37455635164 0.050690689937 0.0 0.0
            0.0 0.0 0.007480462522 0.117014121555 -0.252281102725 0.150249106188",
    },
    LossCase {
        name: "classes first",
        loss: |i| {
            i.x.cross_entropy_with(&i.columns, &CrossEntropyOptions { class_dim: 0, ..Default::default() })
        },
        want: 3.0881022223141,
        gradients: "0.018847186991 -0.236015387945 0.148050267547 0.04997693819 0.229605741691 0.13268230495
            -0.237847293992 -0.185828341115 -0.248452928682 0.103333082995 0.089797026446 0.135851402925",
    },
    LossCase {
        name: "probabilities",
        loss: |i| i.x.cross_entropy_with(&i.p, &Default::default()),
        want: 2.8416109481543,
        gradients:
            "-0.030102149989 -0.074083140689 0.071898945927 0.032286344751 0.237788289345 -0.02997434507
            -0.091812836406 -0.116001107869 -0.32856076671 0.074655502834 0.158045700741 0.095859563135
            0.611499537535 1.194832870868 0.111499537535 0.778166204201 0.068858492647 0.735525159314
            1.235525159314 0.985525159314 1.415419584639 0.498752917972 0.248752917972 0.415419584639",
    },
    LossCase {
        name: "probabilities, weights, smoothing, z-loss",
        loss: |i| {
            i.x.cross_entropy_with(
                &i.p,
                &CrossEntropyOptions {
                    class_weights: Some(&i.w),
                    label_smoothing: 0.1,
                    z_loss: 0.01,
                    ..Default::default()
                },
            )
        },
        want: 2.2541844546311,
        gradients:
            "0.019705692381 -0.156001749816 0.116718497431 0.035140884088 0.231046465744 -0.102804001522
            -0.090777551437 -0.016087742932 -0.151357175174 0.027281174535 0.08470424722 0.054346811778
            0.275174791891 2.150699167562 0.100349583781 0.175087395945 0.030986321691 1.323945286765
            1.111972643383 0.221743160846 0.636938813088 0.89775525235 0.223877626175 0.093469406544",
    },
    LossCase {
        name: "nll",
        loss: |i| {
            i.x.log_softmax(1)?
                .nll_loss(&i.target, &CrossEntropyOptions { class_weights: Some(&i.w), ..PADDED })
        },
        want: 2.6384186597081,
        gradients: "0.106462366688 -0.648166281378 0.477131225188 0.064572689502 0.0 0.0
            0.0 0.0 0.004772566624 0.074655502834 -0.175287632593 0.095859563135",
    },
    LossCase {
        name: "mse",
        loss: |i| i.x.mse_loss(&i.y, LossReduction::Mean),
        want: 3.0364583333333,
        gradients: "-0.083333333333 -0.291666666667 0.666666666667 0.0 0.166666666667 0.333333333333
            -0.166666666667 -0.083333333333 -0.375 0.208333333333 0.083333333333 -0.333333333333
            0.083333333333 0.291666666667 -0.666666666667 0.0 -0.166666666667 -0.333333333333
            0.166666666667 0.083333333333 0.375 -0.208333333333 -0.083333333333 0.333333333333",
    },
    LossCase {
        name: "l1",
        loss: |i| i.x.l1_loss(&i.y, LossReduction::Mean),
        want: 1.3958333333333,
        gradients: "-0.083333333333 -0.083333333333 0.083333333333 0.0 0.083333333333 0.083333333333
            -0.083333333333 -0.083333333333 -0.083333333333 0.083333333333 0.083333333333 -0.083333333333
            0.083333333333 0.083333333333 -0.083333333333 0.0 -0.083333333333 -0.083333333333
            0.083333333333 0.083333333333 0.083333333333 -0.083333333333 -0.083333333333 0.083333333333",
    },
    LossCase {
        name: "huber",
        loss: |i| i.x.huber_loss(&i.y, 1.25, LossReduction::Mean),
        want: 1.1041666666667,
        gradients: "-0.041666666667 -0.104166666667 0.104166666667 0.0 0.083333333333 0.104166666667
            -0.083333333333 -0.041666666667 -0.104166666667 0.104166666667 0.041666666667 -0.104166666667
            0.041666666667 0.104166666667 -0.104166666667 0.0 -0.083333333333 -0.104166666667
            0.083333333333 0.041666666667 0.104166666667 -0.104166666667 -0.041666666667 0.104166666667",
    },
    LossCase {
        name: "smooth l1",
        loss: |i| i.x.smooth_l1_loss(&i.y, 0.75, LossReduction::Sum),
        want: 12.75,
        gradients: "-0.666666666667 -1.0 1.0 0.0 1.0 1.0
            -1.0 -0.666666666667 -1.0 1.0 0.666666666667 -1.0
            0.666666666667 1.0 -1.0 0.0 -1.0 -1.0
            1.0 0.666666666667 1.0 -1.0 -0.666666666667 1.0",
    },
    LossCase {
        name: "kl",
        loss: |i| i.x.log_softmax(1)?.kl_div_loss(&i.p, false, LossReduction::Sum),
        want: 6.2052578477892,
        gradients:
            "-0.090306449968 -0.222249422067 0.215696837782 0.096859034253 0.713364868034 -0.08992303521
            -0.275438509218 -0.348003323606 -0.985682300129 0.223966508503 0.474137102222 0.287578689405",
    },
    LossCase {
        name: "kl of logarithms",
        loss: |i| i.x.log_softmax(1)?.kl_div_loss(&i.y.log_softmax(1)?, true, LossReduction::Mean),
        want: 0.1910066609806,
        gradients:
            "-0.02786078922 -0.022657460893 0.05759173999 -0.007073489877 0.014341803433 0.006512529056
            -0.009876972977 -0.010977359512 -0.00313991471 0.01661708481 0.030338344786 -0.043815514886
            -0.007122077478 0.026892752966 -0.009578071573 -0.010192603915 -0.028313438894 -0.004070194461
            0.017529945596 0.014853687759 0.002565247745 -0.005952030911 -0.019795341579 0.023182124745",
    },
    LossCase {
        name: "cosine along rows",
        loss: |i| i.x.cosine_similarity(&i.y, 1, 1e-8)?.sum_all(),
        want: 0.2948714867852,
        gradients: "0.245259852032 -0.070074243438 -0.105111365156 0.0 0.072800697554 -0.19100398068
            0.09550199034 0.081411532749 0.131240626378 -0.09447542544 0.033868548743 0.282534998722
            0.232746594275 -0.155164396183 0.077582198092 0.0 0.168050170733 0.238881234431
            -0.119440617215 -0.049998397904 -0.232609949001 0.103138373614 0.127952352208 -0.006076892717",
    },
    LossCase {
        name: "cosine along columns",
        loss: |i| i.x.cosine_similarity(&i.y, 0, 1e-8)?.sum_all(),
        want: 0.3380727019276,
        gradients: "0.094453385692 -0.138564064606 -0.197520227313 0.0 0.078327197891 -0.166276877527
            0.049380056828 0.0 0.14110414326 -0.009237604307 0.279820322026 0.0
            -0.083659931952 -0.269430125622 0.163032568576 0.0 0.076876694226 -0.153960071784
            -0.040758142144 0.0 -0.280373826002 0.038490017946 0.346444208223 0.0",
    },
    LossCase {
        name: "cosine embedding",
        loss: |i| i.x.cosine_embedding_loss(&i.y, &i.signs, 0.1, LossReduction::Mean),
        want: 0.8627762666832,
        gradients: "-0.081753284011 0.023358081146 0.035037121719 0.0 0.024266899185 -0.06366799356
            0.03183399678 0.027137177583 0.043746875459 -0.03149180848 0.011289516248 0.094178332907
            -0.077582198092 0.051721465394 -0.025860732697 0.0 0.056016723578 0.079627078144
            -0.039813539072 -0.016666132635 -0.077536649667 0.034379457871 0.042650784069 -0.002025630906",
    },
    LossCase {
        name: "bce with logits",
        loss: |i| i.x.bce_with_logits_loss(&i.p, &Default::default()),
        want: 1.2269933902448,
        gradients: "0.0310382776 -0.002274988431 0.031733089831 0.041666666667 0.071047843902 0.044254881553
            0.0064617224 0.013514708407 -0.073399756498 0.056598224931 0.068131206349 0.060921548219
            -0.041666666667 0.104166666667 -0.166666666667 0.0 -0.25 -0.083333333333
            0.041666666667 -0.020833333333 0.166666666667 -0.0625 -0.125 -0.083333333333",
    },
    LossCase {
        name: "bce with logits, weights",
        loss: |i| {
            i.x.bce_with_logits_loss(
                &i.p,
                &BinaryLossOptions {
                    reduction: LossReduction::Sum,
                    weight: Some(&i.w),
                    pos_weight: Some(&i.w.mul_scalar(2.0)?),
                },
            )
        },
        want: 15.582622845372,
        gradients: "0.186229665601 -1.220549514111 0.321195616967 0.125 0.426287063411 0.739387451616
            -0.109197130562 0.062435300177 -0.440398538989 1.358357398351 0.817574476194 0.182764644658
            -0.25 11.511574488072 -1.873071988957 -0.08664339757 -1.5 -0.120429874891
            1.47407698418 -0.134492427485 1.0 0.821226036689 -1.298586722017 -0.28915771094",
    },
    LossCase {
        name: "bce",
        loss: |i| {
            i.x.sigmoid()?.bce_loss(&i.p, &BinaryLossOptions { weight: Some(&i.w), ..Default::default() })
        },
        want: 1.0522437557125,
        gradients: "0.0155191388 -0.004549976862 0.031733089831 0.010416666667 0.035523921951 0.088509763105
            0.0064617224 0.003378677102 -0.036699878249 0.113196449863 0.068131206349 0.015230387055
            -0.020833333333 0.208333333333 -0.166666666667 0.0 -0.125 -0.166666666667
            0.041666666667 -0.005208333333 0.083333333333 -0.125 -0.125 -0.020833333333",
    },
];

const X: [f64; 12] = [0.5, -1.25, 2.0, 0.0, 3.0, 1.0, -0.5, 0.25, -2.0, 0.75, 1.5, 1.0];
const Y: [f64; 12] = [1.0, 0.5, -2.0, 0.0, 2.0, -1.0, 0.5, 0.75, 0.25, -0.5, 1.0, 3.0];
const P: [f64; 12] = [0.25, 0.25, 0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 1.0, 0.0, 0.0, 0.0];
const MESHES: [(&str, &str); 7] = [
    ("a=1", "(R)"),
    ("a=2", "(S0)"),
    ("a=2", "(S1)"),
    ("a=3", "(S1)"),
    ("a=5", "(S0)"),
    ("a=2,b=2", "(S0, S1)"),
    ("a=2,b=2", "(S1, S1)"),
];

fn put(mesh: &DeviceMesh, values: &[f64], shape: impl Into<Shape>, layout: &str) -> Result<DTensor> {
    DTensor::distribute(mesh, &Tensor::from_slice(values, shape)?, layout)
}

fn indices(mesh: &DeviceMesh, values: &[i64]) -> Result<DTensor> {
    let layout = Layout::replicated(mesh.mesh().ndim());
    DTensor::distribute(mesh, &Tensor::from_slice(values, [values.len()])?, layout)
}

/// Returns what `f` returns on rank 0 of a mesh; every rank returns the same.
fn on<T: PartialEq + std::fmt::Debug + Send + 'static>(
    mesh: &'static str,
    f: impl Fn(&DeviceMesh) -> Result<T> + Send + Sync + 'static,
) -> T {
    let ranks = Mesh::parse(mesh, 0).expect("a mesh").rank_len();
    let mut all = spmd(ranks, move |rank| f(&DeviceMesh::parse(&rank, mesh)?)).expect("runs");
    assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
    all.swap_remove(0)
}

/// Reads the numbers of a text.
fn numbers(text: &str) -> Vec<f64> {
    text.split_whitespace().map(|n| n.parse().expect("a number")).collect()
}

fn near(what: &str, got: &[f64], want: &[f64], close: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (g, w) in got.iter().zip(want) {
        assert!((g - w).abs() <= close * (1.0 + w.abs()), "{what}: got {got:?}, want {want:?}");
    }
}

#[test]
fn losses_are_pytorchs_on_every_mesh() {
    for case in CASES {
        let run = |mesh: &'static str, layout: &'static str| {
            on(mesh, move |mesh| {
                let whole = Layout::replicated(mesh.mesh().ndim()).to_string();
                let leaf = |values: &[f64]| put(mesh, values, [3, 4], layout)?.requires_grad();
                let inputs = LossInputs {
                    x: leaf(&X)?,
                    y: leaf(&Y)?,
                    p: leaf(&P)?,
                    w: put(mesh, &[0.5, 2.0, 1.0, 0.25], [4], &whole)?,
                    target: indices(mesh, &[1, -100, 2])?,
                    columns: indices(mesh, &[2, 0, 1, 1])?,
                    signs: indices(mesh, &[1, -1, -1])?,
                };
                let mut loss = (case.loss)(&inputs)?;
                let mut all = vec![loss.full_tensor()?.to_f64_vec()];
                let grads = loss.backward()?;
                for leaf in [&inputs.x, &inputs.y, &inputs.p] {
                    if let Some(grad) = grads.get(leaf) {
                        all.push(grad.full_tensor()?.to_f64_vec());
                    }
                }
                Ok(all)
            })
        };
        let single = run("a=1", "(R)");
        near(case.name, &single[0], &[case.want], 1e-12);
        let gradients = numbers(case.gradients);
        for (got, want) in single[1..].iter().zip(gradients.chunks(12)) {
            near(case.name, got, want, 1e-11);
        }
        for (mesh, layout) in &MESHES[1..] {
            assert_eq!(run(mesh, layout), single, "{} on {mesh} {layout}", case.name);
        }
    }
}

/// PyTorch's `cosine_embedding_loss` over a sharded dim of 4 ranks is silently wrong.
#[test]
fn cosine_embedding_loss_over_a_sharded_dim() {
    let loss = |mesh: &'static str, layout: &'static str| {
        on(mesh, move |mesh| {
            let wave =
                |salt: usize| (0..1280).map(|i| ((i * 31 + salt) as f64 * 0.37).sin()).collect::<Vec<f64>>();
            let (x, y) = (put(mesh, &wave(1), [5, 256], layout)?, put(mesh, &wave(2), [5, 256], layout)?);
            let signs = indices(mesh, &[1, -1, 1, -1, -1])?;
            let loss = x.cosine_embedding_loss(&y, &signs, 0.25, LossReduction::None)?;
            if mesh.mesh().rank_len() == 4 {
                assert!(mesh.received_bytes() < 1000, "three numbers per pair and rank, and no vectors");
            }
            Ok(loss.full_tensor()?.to_f64_vec())
        })
    };
    let single = loss("a=1", "(R)");
    let wave = |salt: usize, i: usize| ((i * 31 + salt) as f64 * 0.37).sin();
    for (row, got) in single.iter().enumerate() {
        let dot =
            |a: usize, b: usize| (row * 256..row * 256 + 256).map(|i| wave(a, i) * wave(b, i)).sum::<f64>();
        let cos = dot(1, 2) / (dot(1, 1) * dot(2, 2)).sqrt();
        let want = if [0, 2].contains(&row) { 1.0 - cos } else { (cos - 0.25).max(0.0) };
        assert!((got - want).abs() < 1e-11, "{row}: {got} {want}");
    }
    for (mesh, layout) in [("a=4", "(S1)"), ("a=4", "(S0)"), ("a=3", "(S1)")] {
        assert_eq!(loss(mesh, layout), single, "{mesh} {layout}");
    }
}

/// Squares overflowed and vanished, and the square of a small `eps` was 0.
#[test]
fn cosines_of_extreme_vectors() {
    let cosine = |dtype: DType, x: [f64; 2], y: [f64; 2], eps: f64| {
        on("a=2", move |mesh| {
            let vector = |v: [f64; 2]| put(mesh, &v, [2], "(S0)")?.cast(dtype)?.requires_grad();
            let (x, y) = (vector(x)?, vector(y)?);
            let mut cosine = x.cosine_similarity(&y, 0, eps)?;
            let slope = cosine.backward()?.get(&x).expect("a leaf").full_tensor()?.to_f64_vec();
            assert!(slope.iter().all(|d| d.is_finite()), "{x:?}: {slope:?}");
            let sign = DTensor::full(mesh, DType::F32, [], "(R)", 1.0)?;
            let loss = x.cosine_embedding_loss(&y, &sign, 0.0, LossReduction::None)?.item()?;
            Ok((cosine.item()?, loss))
        })
    };
    for (dtype, scale, close) in [
        (DType::F64, 1e200, 4e-16),
        (DType::F64, 1e-200, 4e-16),
        (DType::F32, 1e30, 6e-8),
        (DType::F32, 1e-30, 6e-8),
        (DType::F16, 1e4, 3e-4),
        (DType::BF16, 1e37, 2e-3),
    ] {
        let (got, loss) = cosine(dtype, [3.0 * scale, 4.0 * scale], [4.0, 3.0], 0.0);
        assert!((got - 0.96).abs() <= close, "{dtype} {scale:e}: {got}");
        // The loss adds 1e-12 to the squares.
        let want = if scale > 1.0 { 0.04 } else { 1.0 };
        assert!((loss - want).abs() <= f64::max(close, 4e-14), "{dtype} {scale:e}: {loss}");
    }
    assert_eq!(cosine(DType::F32, [0.0; 2], [4.0, 3.0], 1e-30).0, 0.0);
    assert_eq!(cosine(DType::F64, [0.0; 2], [4.0, 3.0], 1e-300).0, 0.0);
    // Each norm is bounded by itself: 3e-10 / 1e-8 times 3 / 5.
    let (got, _) = cosine(DType::F64, [3e-10, 0.0], [3.0, 4.0], 1e-8);
    assert!((got - 0.018).abs() < 1e-16, "{got}");
}

/// [50, 36] with target 0 gave 0 for 8.3e-7, and [1e6, 1e6] gave 0.6875 for ln 2.
#[test]
fn cross_entropy_does_not_cancel() {
    for (mesh, layout) in [("a=1", "(R)"), ("a=2", "(S1)"), ("a=2", "(S0)")] {
        let got = on(mesh, move |mesh| {
            let logits = Tensor::from_vec(vec![50f32, 36.0, 1e6, 1e6], [2, 2])?;
            let logits = DTensor::distribute(mesh, &logits, layout)?;
            Ok(logits.cross_entropy(&indices(mesh, &[0, 0])?)?.full_tensor()?.to_f64_vec())
        });
        assert!((got[0] - 8.315283660e-7).abs() < 6e-8, "{got:?}");
        assert!((got[1] - std::f64::consts::LN_2).abs() < 1e-7, "{got:?}");
    }
}

#[test]
fn rows_without_a_class_give_nan_as_a_mean_and_zero_as_a_sum() {
    for (mesh, layout) in [("a=1", "(R)"), ("a=2", "(S0)")] {
        let got = on(mesh, move |mesh| {
            let x = put(mesh, &X, [3, 4], layout)?;
            let none = indices(mesh, &[-100; 3])?;
            let sum = CrossEntropyOptions { reduction: LossReduction::Sum, ..PADDED };
            let item = |o: &CrossEntropyOptions| x.cross_entropy_with(&none, o)?.item();
            Ok((item(&PADDED)?.is_nan(), item(&sum)?))
        });
        assert_eq!(got, (true, 0.0));
    }
}

#[test]
fn losses_name_what_they_refuse() {
    on("a=1", |mesh| {
        let x = put(mesh, &X, [3, 4], "(R)")?;
        let target = indices(mesh, &[0, 1, 2])?;
        let refused = |o: CrossEntropyOptions| x.cross_entropy_with(&target, &o).unwrap_err().to_string();
        let smoothing = refused(CrossEntropyOptions { label_smoothing: 1.5, ..PADDED });
        assert_eq!(smoothing, "cross_entropy: label smoothing lies in [0, 1]; got 1.5");
        let z = refused(CrossEntropyOptions { z_loss: -1.0, ..PADDED });
        assert_eq!(z, "cross_entropy: the factor of the z-loss is finite and not negative; got -1");
        let weights = refused(CrossEntropyOptions { class_weights: Some(&x), ..PADDED });
        assert!(
            weights.starts_with("cross_entropy: wants a floating-point weight per class; got f64[3, 4]"),
            "{weights}"
        );
        let soft = x.cross_entropy_with(&x, &PADDED).unwrap_err().to_string();
        assert!(soft.starts_with("cross_entropy: probabilities have no class to ignore"), "{soft}");
        let huber = x.huber_loss(&x, 0.0, LossReduction::Mean).unwrap_err().to_string();
        assert_eq!(huber, "huber_loss: delta is positive and finite; got 0");
        Ok(())
    });
}

/// Values and input gradients of PyTorch 2.15 in f64 for `dy = (5 i mod 7) / 4 - 1/2`, eps 1e-3, x `[2, 4, 3]`.
#[test]
fn norms_are_pytorchs_on_every_mesh() {
    type Norm = fn(&DTensor, &DTensor, &DTensor) -> Result<DTensor>;
    let cases: [(&str, Norm, &str, &str); 4] = [
        (
            "group_norm",
            |x, w, b| x.group_norm(2, Some((w, b)), 1e-3),
            "-1.39280386594 0.69640193297 -0.49742995212 1.79588792339 1.19897198085 0.6020560383
                -0.86172038258 0.34869773527 1.55911585312 1.61823170624 -0.80260452946 -3.22344076517
                0.2862316057 -1.08768010167 1.31666538623 0.97137683943 0.28442098574 1.48659372969
                0.2137683943 1.58768010167 -0.81666538623 -0.61449264228 -3.36231605702 1.44637491878",
            "-0.28631269683 0.27373171085 0.08161689415 -0.32832710481 0.15108851385 0.10820268279
                -0.00506773147 0.14513539587 -0.7637773299 0.25943644746 -0.49817401358 0.86244723162
                0.32798031228 -0.14719582078 -0.26020188673 0.20918627902 -0.09425089063 -0.03551799316
                -0.58562252619 -0.45376222986 0.26004655039 -0.63852693382 0.86724506988 0.5506200696",
        ),
        (
            "instance_norm",
            |x, w, b| x.instance_norm(Some((w, b)), 1e-3),
            "-1.16219372604 1.27841309864 -0.1162193726 1.61225764815 1.0 0.38774235185
                -0.72451529629 0.5 1.72451529629 1.94903059259 -0.5 -2.94903059259
                0.1162193726 -1.27841309864 1.16219372604 1.0581096863 0.36079345068 1.58109686302
                0.3837806274 1.77841309864 -0.66219372604 -0.26756125479 -3.05682619729 1.82438745208",
            "-0.05673770873 -0.04218595574 0.09892366447 -0.08933060692 0.17857514738 -0.08924454046
                -0.17848908092 0.35715029475 -0.17866121383 0.35697816184 -0.7143005895 0.35732242767
                0.36278603333 -0.15540707072 -0.20737896261 0.18139301667 -0.07770353536 -0.10368948131
                -0.36278603333 0.15540707072 0.20737896261 -0.89051077105 0.38184930067 0.50866147038",
        ),
        (
            "batch_norm",
            |x, w, b| Ok(x.batch_norm(Some((w, b)), 1e-3)?.0),
            "-1.5072826964 0.60291307856 -0.60291307856 1.67677007069 1.02707080283 0.37737153496
                -0.85354014138 0.44585839434 1.74525693007 2.20708028277 -0.39171678869 -2.99051386014
                0.60291307856 -0.60291307856 1.5072826964 1.02707080283 0.37737153496 1.51434525373
                0.44585839434 1.74525693007 -0.52869050745 -0.39171678869 -2.99051386014 1.5573810149",
            "-0.26038203565 0.3654151483 0.13701241716 -0.08435288316 0.22077213209 -0.04258971205
                -0.03467663001 0.50537836373 -0.09154036128 0.47611805269 -0.63065454576 0.53652029332
                0.21468687866 -0.01371585248 -0.443016556 0.1395597236 -0.12380212053 -0.10958713995
                -0.46917053806 0.07088445568 0.01912470994 -0.95550417969 0.21167065939 0.36184972004",
        ),
        (
            "layer_norm_over",
            |x, _, _| x.layer_norm_over(2, None, None, 1e-3),
            "-1.37690488867 0.72600439585 -0.47565805245 1.62725123207 0.42558878377 -0.77607366453
                1.32683562 0.1251731717 -1.0764892766 1.02642000792 -0.17524244038 -1.37690488867
                0.59555766221 -0.70384087352 1.570106564 0.27070802828 -1.02869050745 1.24525693007
                -0.05414160566 -1.35354014138 0.92040729614 -0.37899123959 -1.67838977532 0.59555766221",
            "-0.53346677331 0.34409665391 -0.02861861361 -0.20250982866 0.47622954608 0.10351427856
                -0.07037693648 -0.443092204 0.23564717074 0.06175595569 -0.31095931183 0.36778006291
                0.25670190481 -0.24431140861 -0.26087460343 0.37508580191 -0.12592751152 -0.14249070634
                0.493469699 -0.00754361443 -0.02410680924 -0.52512012267 0.11084028267 0.09427708785",
        ),
    ];
    for (name, norm, value, gradient) in cases {
        let run = |mesh: &'static str, layout: &'static str| {
            on(mesh, move |mesh| {
                let x: Vec<f64> = (0..24).map(|i| f64::from(i * 7 % 11) * 0.5 - 2.0).collect();
                let dy: Vec<f64> = (0..24).map(|i| f64::from(i * 5 % 7) * 0.25 - 0.5).collect();
                let whole = Layout::replicated(mesh.mesh().ndim()).to_string();
                let x = put(mesh, &x, [2, 4, 3], layout)?.requires_grad()?;
                let w = put(mesh, &[1.0, 0.5, -1.0, 2.0], [4], &whole)?.requires_grad()?;
                let b = put(mesh, &[0.0, 1.0, 0.5, -0.5], [4], &whole)?.requires_grad()?;
                let y = norm(&x, &w, &b)?;
                let grads = y.mul(&put(mesh, &dy, [2, 4, 3], layout)?)?.sum_all()?.backward()?;
                let mut all = vec![y.full_tensor()?.to_f64_vec()];
                for leaf in [&x, &w, &b] {
                    if let Some(grad) = grads.get(leaf) {
                        all.push(grad.full_tensor()?.to_f64_vec());
                    }
                }
                Ok(all)
            })
        };
        let single = run("a=1", "(R)");
        near(name, &single[0], &numbers(value), 1e-9);
        near(name, &single[1], &numbers(gradient), 1e-9);
        let meshes =
            [("a=2", "(S0)"), ("a=2", "(S1)"), ("a=3", "(S1)"), ("a=3", "(S2)"), ("a=2,b=2", "(S0, S1)")];
        for (mesh, layout) in meshes {
            assert_eq!(run(mesh, layout), single, "{name} on {mesh} {layout}");
        }
    }
}

/// [MAX, -MAX, 0, 0] gave zeros.
#[test]
fn layer_norm_of_the_largest_numbers() {
    let y = on("a=2", |mesh| {
        let most = f32::MAX;
        let x = Tensor::from_vec(vec![most, -most, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0], [2, 4])?;
        let x = DTensor::distribute(mesh, &x, "(S0)")?;
        let one = DTensor::full(mesh, DType::F32, [4], "(R)", 1.0)?;
        Ok(x.layer_norm(&one, None, 1e-5)?.full_tensor()?.to_f64_vec())
    });
    near("layer_norm", &y[..4], &[2f64.sqrt(), -2f64.sqrt(), 0.0, 0.0], 1e-6);
}

/// The gradient of a root-mean-square norm of [MAX; 4] was NaN or 0; it is that of [1; 4] divided by MAX.
#[test]
fn rms_norm_gradient_of_the_largest_numbers() {
    let dx = on("a=2", |mesh| {
        let x = DTensor::full(mesh, DType::F32, [2, 4], "(S0)", f64::from(f32::MAX))?.requires_grad()?;
        let one = DTensor::full(mesh, DType::F32, [4], "(R)", 1.0)?;
        let y = x.rms_norm(&one, 1e-5)?;
        assert_eq!(y.full_tensor()?.to_f64_vec().iter().map(|y| (y * 1e5).round()).sum::<f64>(), 8e5);
        let first = y.slice(1, 0, 1)?.sum_all()?.backward()?.take(&x).expect("x is a leaf");
        Ok(first.full_tensor()?.to_f64_vec())
    });
    let scaled: Vec<f64> = dx[..4].iter().map(|d| d * f64::from(f32::MAX)).collect();
    near("rms_norm", &scaled, &[0.75, -0.25, -0.25, -0.25], 1e-5);
}

#[test]
fn weight_norm_scales_slices_on_every_mesh() {
    let run = |mesh: &'static str, layout: &'static str| {
        on(mesh, move |mesh| {
            let v = put(mesh, &X, [3, 4], layout)?.requires_grad()?;
            let whole = Layout::replicated(mesh.mesh().ndim()).to_string();
            let g = put(mesh, &[2.0, 1.0, -3.0], [3], &whole)?.requires_grad()?;
            let w = v.weight_norm(&g, 0)?;
            let grads = w.mul(&put(mesh, &Y, [3, 4], layout)?)?.sum_all()?.backward()?;
            let of = |x: &DTensor| grads.get(x).expect("a leaf").full_tensor();
            Ok([w.full_tensor()?.to_f64_vec(), of(&v)?.to_f64_vec(), of(&g)?.to_f64_vec()])
        })
    };
    let single = run("a=1", "(R)");
    for (got, want) in single.iter().zip([
        &[
            0.41478067789,
            -1.03695169473,
            1.65912271157,
            0.0,
            0.93419873299,
            0.31139957766,
            -0.15569978883,
            0.07784989442,
            2.1466252584,
            -0.8049844719,
            -1.6099689438,
            -1.0733126292,
        ][..],
        &[
            1.12392183687,
            -0.32112052482,
            -0.48168078723,
            0.0,
            0.17551612559,
            -0.46049392091,
            0.23024696046,
            0.19627609744,
            -1.2643622772,
            0.91016910956,
            -0.32628703928,
            -2.72192082765,
        ],
        &[-1.71097029631, 1.53753541472, 1.29691942695],
    ]) {
        near("weight_norm", got, want, 1e-10);
    }
    for (mesh, layout) in &MESHES[1..] {
        assert_eq!(run(mesh, layout), single, "{mesh} {layout}");
    }
}

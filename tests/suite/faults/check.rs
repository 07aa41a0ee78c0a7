//! Replicas that differ by one bit, and gradients that are not finite.

use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, check_finite, check_replicas};
use isoshard::nn::{Linear, Module, Params, Plan};
use isoshard::placement::Layout;
use isoshard::rng::Init;
use isoshard::tensor::{DType, Shape, Tensor};
use isoshard::{Error, Result};

use super::program::{Random, repeated};

const MESHES: [&str; 4] = ["dp=2", "dp=3", "dp=2,tp=2", "dp=3,tp=2"];
const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::I64];

/// Tensors on a mesh; one rank changes one of them.
#[derive(Clone, Debug)]
struct Scene {
    mesh: &'static str,
    /// Shape, placement per axis, dtype.
    tensors: Vec<(Shape, Layout, DType)>,
    which: usize,
    rank: usize,
    /// The changed element, as a fraction of the rank's shard.
    at: f64,
    bit: usize,
}

impl Scene {
    fn random(random: &mut Random, dtypes: &[DType]) -> Scene {
        let mesh = *random.pick(&MESHES);
        let axes: Vec<&str> = mesh.split(',').collect();
        let ranks = axes.iter().map(|axis| axis[3..].parse::<usize>().unwrap()).product();
        let tensor = |random: &mut Random| {
            let shape = Shape::from([1 + random.below(40), 1 + random.below(40)]);
            // Only the last axis may shard, so there are always replicas along the first one.
            let last = *random.pick(&["R", "S0", "S1"]);
            let layout = if axes.len() == 1 { "(R)".into() } else { format!("(R, {last})") };
            (shape, layout.parse().unwrap(), *random.pick(dtypes))
        };
        let tensors: Vec<_> = (0..3).map(|_| tensor(random)).collect();
        let at = random.below(1000) as f64 / 1000.0;
        Scene { mesh, which: random.below(3), rank: random.below(ranks), at, bit: random.below(64), tensors }
    }

    /// Returns the tensors after `change` changed an element at the rank, and that element's global index.
    fn tensors(&self, rank: &Rank, change: impl Fn(&mut [u8])) -> Result<(Vec<DTensor>, Vec<usize>)> {
        let mesh = DeviceMesh::parse(rank, self.mesh)?;
        let mut index = vec![];
        let mut all = Vec::new();
        for (k, (shape, layout, dtype)) in self.tensors.iter().enumerate() {
            let values: Vec<f32> = (0..shape.numel()).map(|i| (i * 7 % 64) as f32 + 0.5).collect();
            let whole = Tensor::from_vec(values, shape)?.cast(*dtype)?;
            let x = DTensor::distribute(&mesh, &whole, layout.clone())?;
            let (n, each) = (x.local().numel(), dtype.size_bytes());
            if k != self.which || rank.rank() != self.rank || n == 0 {
                all.push(x);
                continue;
            }
            let at = (self.at * n as f64) as usize;
            let mut bytes = x.local().contiguous()?.as_bytes()?.to_vec();
            change(&mut bytes[at * each..(at + 1) * each]);
            let local = from_bytes(*dtype, x.local().shape(), &bytes)?;
            x.tensor_meta().spec().region().runs(shape, |global, from, len| {
                if (from..from + len).contains(&at) {
                    let linear = global as usize + at - from;
                    index = vec![linear / shape[1], linear % shape[1]];
                }
            });
            all.push(DTensor::from_local(&mesh, local, shape.clone(), layout.clone())?);
        }
        Ok((all, index))
    }
}

fn from_bytes(dtype: DType, shape: &Shape, bytes: &[u8]) -> Result<Tensor> {
    let word = |b: &[u8]| b.iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
    let words = bytes.chunks(dtype.size_bytes()).map(word);
    match dtype {
        DType::F32 => Tensor::from_vec(words.map(|w| f32::from_bits(w as u32)).collect(), shape),
        DType::F64 => Tensor::from_vec(words.map(f64::from_bits).collect(), shape),
        DType::BF16 => Tensor::from_vec(words.map(|w| half::bf16::from_bits(w as u16)).collect(), shape),
        _ => Tensor::from_vec(words.map(|w| w as i64).collect(), shape),
    }
}

fn named(tensors: &[DTensor]) -> Vec<(&str, &DTensor)> {
    ["embed", "h.0.weight", "h.1.bias"].into_iter().zip(tensors).collect()
}

#[test]
fn one_flipped_bit() {
    repeated("bit", |random| {
        let scene = Scene::random(random, &DTYPES);
        let (world, shared) = (DeviceMeshLen(scene.mesh).ranks(), scene.clone());
        let found = spmd(world, move |rank| {
            let scene = &shared;
            let (same, _) = scene.tensors(&rank, |_| ())?;
            check_replicas(&named(&same))?;
            let flip = |element: &mut [u8]| element[scene.bit / 8 % element.len()] ^= 1 << (scene.bit % 8);
            let (tensors, index) = scene.tensors(&rank, flip)?;
            Ok((check_replicas(&named(&tensors)), index))
        });
        let found = found.unwrap();
        let index = found[scene.rank].1.clone();
        for (said, _) in &found {
            if index.is_empty() {
                // The rank's shard is empty.
                assert_eq!(said, &Ok(()));
                continue;
            }
            let Err(Error::Diverged(found)) = said else { panic!("{scene:?}: {said:?}") };
            assert_eq!(found.name, ["embed", "h.0.weight", "h.1.bias"][scene.which]);
            assert_eq!(
                (&found.index, (found.bits ^ found.reference_bits).count_ones()),
                (&index, 1),
                "{scene:?}"
            );
            // With two replicas it is unknown which one is right.
            let pair = [found.rank, found.reference];
            assert!(pair.contains(&scene.rank), "{found}");
            assert!(
                found.ranks == [scene.rank] || scene.mesh.starts_with("dp=2") && pair.contains(&scene.rank)
            );
        }
        assert!(found.windows(2).all(|pair| pair[0].0 == pair[1].0), "all ranks say the same");
    });
}

#[test]
fn no_number_in_one_shard() {
    repeated("nan", |random| {
        let scene = Scene::random(random, &[DType::F32, DType::F64, DType::BF16]);
        let step = random.below(1000) as u64;
        let (world, shared) = (DeviceMeshLen(scene.mesh).ranks(), scene.clone());
        let found = spmd(world, move |rank| {
            let (same, _) = shared.tensors(&rank, |_| ())?;
            check_finite(&named(&same), step)?;
            // All bits set except the sign: a NaN in every format.
            let (tensors, index) = shared.tensors(&rank, |element| {
                element.fill(255);
                *element.last_mut().unwrap() = 127;
            })?;
            Ok((
                check_finite(&named(&tensors), step).map_err(|e| e.to_string()),
                index,
                named(&tensors)[shared.which].1.spec().to_string(),
            ))
        });
        let found = found.unwrap();
        let (_, index, tensor) = found[scene.rank].clone();
        let name = ["embed", "h.0.weight", "h.1.bias"][scene.which];
        for (said, ..) in &found {
            match said {
                Ok(()) => assert!(index.is_empty(), "{scene:?}"),
                Err(said) => assert_eq!(
                    *said,
                    format!(
                        "check_finite: every element must be finite; got {name} {tensor} at rank(s) [{r}] in step {step}, \
                         first NaN at index {index:?} at rank {r}; go back to the step before, or lower the learning rate",
                        r = scene.rank
                    )
                ),
            }
        }
    });
}

/// Checks a trained model's parameters by their own names, with shards and replicas.
#[test]
fn a_models_parameters_and_gradients_by_path() {
    let said = spmd(4, |rank| {
        let mesh = DeviceMesh::parse(&rank, "dp=2,fsdp=2")?;
        let plan = Plan::transformer(mesh.mesh(), isoshard::nn::Parallel { heads: 1, sequence: false })?;
        let mut params = Params::new(&mesh, plan, 3)?;
        let linear = Linear::new(params.root().child("head"), 5, 7, Init::Normal { mean: 0.0, std: 1.0 })?;
        params.check_replicas()?;
        let x = DTensor::full(&mesh, DType::F32, [8, 1, 5], "(S0, S0)", 1.0)?;
        let pass = isoshard::nn::Forward::train_without_dropout(&params);
        let grads = linear.forward(&pass, &x)?.sum_all()?.backward()?;
        drop(pass);
        params.check_gradients(&grads, 0)?;
        // One rank's shard of the weight becomes infinite.
        let id = params.find("head.weight").expect("declared");
        let value = params.value(id).detach();
        let scale = if rank.rank() == 2 { f32::INFINITY } else { 1.0 };
        let local: Vec<f32> = value.local().to_vec::<f32>()?.iter().map(|v| v * scale).collect();
        let local = Tensor::from_vec(local, value.local().shape())?;
        params.set(id, DTensor::from_local(&mesh, local, value.shape().clone(), value.layout().clone())?)?;
        let replicas = params.check_replicas().unwrap_err().to_string();
        let pass = isoshard::nn::Forward::train_without_dropout(&params);
        let grads = linear.forward(&pass, &x)?.mul(&linear.forward(&pass, &x)?)?.sum_all()?.backward()?;
        drop(pass);
        Ok((replicas, params.check_gradients(&grads, 17).unwrap_err().to_string()))
    });
    let said = said.unwrap();
    assert!(said.iter().all(|s| *s == said[0]), "{said:?}");
    let (replicas, gradients) = &said[0];
    assert!(replicas.starts_with("check_replicas: replicas differ; got head.weight f32["), "{replicas}");
    assert!(gradients.starts_with("check_finite: every element must be finite; got head."), "{gradients}");
    assert!(gradients.contains("in step 17"), "{gradients}");
}

/// Returns the number of ranks in a mesh's text.
struct DeviceMeshLen(&'static str);

impl DeviceMeshLen {
    fn ranks(&self) -> usize {
        self.0.split(',').map(|axis| axis[3..].parse::<usize>().unwrap()).product()
    }
}

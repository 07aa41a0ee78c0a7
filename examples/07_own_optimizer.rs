//! 7. An optimizer of your own: an operator, its state for each parameter, groups and checkpoints. `cargo run --example 07_own_optimizer`

use std::path::Path;

use isoshard::checkpoint::{self, Checkpoint, StateTree};
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan, Update};
use isoshard::ops::{
    Batched, Bits, MeshAxis, Meta, Metas, Op, Row, Tensors, Unkeyed, Vjp, Windows, Work, arity, each_chunk,
    expect_step, no_cuda_kernel, step_rows,
};
use isoshard::optim::{Optimizer, ParamGroup, ParamGroups, ParamStates, Rates, UpdateRule};
use isoshard::tensor::{DType, MappedFile, Tensor};
use isoshard::{Error, Result};

/// (p, g, m, scale) -> (p', m'): Chen et al., *Symbolic Discovery of Optimization Algorithms* (Lion), 2023, algorithm
/// 2, on f32.
///
/// With `scale` times `g` for `g`: `p' = (1 - lr λ) p - lr sign(β1 m + (1 - β1) g)` and `m' = β2 m + (1 - β2) g`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct LionStep {
    betas: [Bits; 2],
    weight_decay: Bits,
    /// Unkeyed: another rate is the same plan.
    lr: Unkeyed<f64>,
}

impl Op for LionStep {
    fn name(&self) -> &'static str {
        "lion"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [p, g, m, scale] = arity("lion", ins)?;
        if p.dtype != DType::F32 {
            return Err(Error::unsupported("lion", "is written for f32", format!("{p}"), ""));
        }
        expect_step("lion", p, g, &[m], scale, ins)?;
        Ok([p.clone(), m.clone()].into_iter().collect())
    }

    /// Element by element, however the parameter lies.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        step_rows(&ins[0], 3, 2)
    }

    /// In place: parameter and momentum are written where they are, if they have no other owner.
    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let [p, g, m, scale] = ins else { unreachable!("infer counted the operands") };
        let ([b1, b2], lr) = (self.betas.map(|b| b.0 as f32), self.lr.0 as f32);
        let (scale, keep) = (scale.item()? as f32, (1.0 - self.lr.0 * self.weight_decay.0) as f32);
        let momentum = m.make_mut::<f32>()?;
        each_chunk::<f32>(p, g, |at, p, g, out| {
            for (((out, p), g), m) in out.iter_mut().zip(p).zip(g).zip(&mut momentum[at..]) {
                let g = g * scale;
                let direction = b1 * *m + (1.0 - b1) * g;
                *out = keep * p - if direction == 0.0 { 0.0 } else { lr.copysign(direction) };
                *m = b2 * *m + (1.0 - b2) * g;
            }
        })?;
        Ok([p.clone(), m.clone()].into_iter().collect())
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        no_cuda_kernel(self, ins)
    }

    /// For each element: 1 to scale the gradient, 3 for the direction, 3 for the momentum, 4 for the parameter.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(11, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.no_gradients("an optimizer's step is not part of the function that is differentiated");
        Ok(())
    }
}

/// All updates go to [`Params::update`] at once. With kernels of its own, one launch could compute them all.
impl Batched for LionStep {}

struct Lion {
    weight_decay: f64,
    groups: ParamGroups,
    /// One momentum per parameter, which lies as the parameter does.
    momenta: ParamStates,
}

/// With this it has schedules, clipping and checkpoints.
impl UpdateRule for Lion {
    fn step(
        &mut self,
        params: &mut Params,
        grads: &mut Gradients,
        scale: &DTensor,
        rates: &Rates,
    ) -> Result<()> {
        let betas = [0.9, 0.99].map(Bits);
        let settings = self.groups.settings("lion", params)?;
        let ids: Vec<_> = params.ids().filter(|&id| grads.get(params.value(id)).is_some()).collect();
        self.momenta.prepare(params, &ids)?;
        let mut updates = Vec::new();
        for id in ids {
            let (Some(grad), Some(momentum)) = (grads.take(params.value(id)), self.momenta.take(id)) else {
                continue;
            };
            let own = settings[id.index()];
            let weight_decay = Bits(own.decay_or(self.weight_decay));
            let op = LionStep { betas, weight_decay, lr: Unkeyed(own.rate_at(rates.of(id))) };
            updates.push(Update::new(id, op, [grad, momentum, scale.clone()]));
        }
        let result = params.update(&mut updates);
        for Update { param, operands, results, .. } in updates {
            // The momentum is the second result; of an update that was refused, the second operand still.
            let momentum = match results {
                Some(results) => results.into_iter().next(),
                None => operands.into_iter().nth(1),
            };
            momentum.into_iter().for_each(|momentum| self.momenta.put(param, momentum));
        }
        result
    }

    fn offload(&mut self, params: &Params, file: &MappedFile) -> Result<()> {
        self.momenta.offload(params, file)
    }

    fn state(&self, params: &Params) -> Result<StateTree> {
        let mut state = StateTree::new();
        state.insert_value("kind", "lion")?;
        state.insert_tree("momentum", self.momenta.state(params)?)?;
        Ok(state)
    }

    fn load_state(&mut self, params: &Params, saved: &Checkpoint) -> Result<()> {
        if saved.value("kind").is_none_or(|kind| kind != "lion") {
            return Err(Error::invalid("load_state", "the state is that of lion", "another", ""));
        }
        self.momenta.load_state(params, &saved.subtree("momentum"))
    }
}

/// The digest of the parameters after five steps on a mesh, and the losses of the steps from `from` on: those before it come
/// from the checkpoint in `dir`, or save it if they are all made here.
fn train(mesh: &'static str, ranks: usize, dir: &Path, from: usize) -> Result<(u64, Vec<f64>)> {
    let dir = dir.to_path_buf();
    let mut results = spmd(ranks, move |rank| {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
        let batch = plan.batch_layout(mesh.mesh());
        let mut params = Params::new(&mesh, plan, 7)?;
        let config =
            GptConfig { vocabulary: 11, block: 6, layers: 1, heads: 2, width: 8, dropout: 0.0, bias: true };
        let model = Gpt::new(&mut params, config)?;
        let mut groups = ParamGroups::default();
        groups.add("wte.**", ParamGroup::new().rate(0.5).decay(0.0));
        let lion = Lion { weight_decay: 0.1, groups, momenta: ParamStates::default() };
        let mut optimizer = Optimizer::new(lion, |step: usize| 1e-2 / (1.0 + 0.1 * step as f64)).clip(1.0);
        let token = |i: usize| (i * i % 11) as i64;
        let text = |from: usize| Tensor::from_vec((from..from + 24).map(token).collect(), [4, 6]);
        let tokens = DTensor::distribute(&mesh, &text(0)?, batch.clone())?;
        let targets = DTensor::distribute(&mesh, &text(1)?, batch)?;
        if from > 0 {
            let saved = Checkpoint::open(&dir)?;
            params.load_state(&saved.subtree("model"))?;
            optimizer.load_state(&params, &saved.subtree("optimizer"))?;
        }
        let places = |params: &Params| -> Result<Vec<*const f32>> {
            params.values().map(|value| Ok(value.local().data::<f32>()?.as_ptr())).collect()
        };
        let before = places(&params)?;
        let mut losses = Vec::new();
        for step in from..5 {
            if step == 3 && from == 0 && ranks == 1 {
                let mut state = StateTree::new();
                state.insert_tree("model", params.state()?)?;
                state.insert_tree("optimizer", optimizer.state(&params)?)?;
                checkpoint::save(&mesh, &dir, &state)?;
            }
            let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &targets)?;
            let mut grads = loss.backward()?;
            losses.push(loss.item()?);
            // The loss keeps its operands, parameters among them, which would be copied.
            drop(loss);
            optimizer.step(&mut params, &mut grads)?;
        }
        assert_eq!(places(&params)?, before, "parameters are written where they are");
        Ok((params.digest()?, losses))
    })?;
    Ok(results.swap_remove(0))
}

/// Trains on one rank and on meshes of several, and compares.
///
/// # Errors
/// Returns an error if a rank fails.
pub fn main() -> Result<()> {
    let dir = std::env::temp_dir().join(format!("isoshard-lion-{}", std::process::id()));
    let (digest, losses) = train("1", 1, &dir, 0)?;
    assert!(losses[4] < losses[0], "{losses:?}");
    println!("losses of a GPT trained with Lion");
    println!("{:>12}  {losses:.6?}", "1");
    for (mesh, ranks) in [("fsdp=2", 2), ("tp=2", 2), ("dp=2,fsdp=2", 4)] {
        let (own_digest, own) = train(mesh, ranks, &dir, 0)?;
        println!("{mesh:>12}  {own:.6?}");
        assert_eq!((own_digest, own), (digest, losses.clone()), "{mesh}");
    }
    println!("parameters have digest {digest:016x} on all four meshes");
    // The single rank's parameters and momenta after three steps, on three ranks.
    let (own_digest, own) = train("fsdp=3", 3, &dir, 3)?;
    assert_eq!((own_digest, &own[..]), (digest, &losses[3..]));
    println!("{:>12}  {own:.6?}, from the checkpoint of one rank after three steps", "fsdp=3");
    std::fs::remove_dir_all(&dir).map_err(Error::from)
}

//! The program of one rank. It names the mesh once, where it is made.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use isoshard::Result;
use isoshard::comm::Rank;
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients, Reduction};
use isoshard::nn::{Forward, Parallel, Params, Plan};
use isoshard::optim::{AdamW, WarmupCosine, clip_scale, global_norm};
use isoshard::placement::Mesh;
use isoshard::rng::Generator;
use isoshard::tensor::{Device, Tensor, cuda};

use crate::args::{Args, ReductionName};
use crate::data::{Batches, Corpus, Part};
use crate::model::{Model, Sizes};
use crate::report::{End, Report, Start, Step, median, per_second};
use crate::sample::sample;

const BETAS: (f64, f64) = (0.9, 0.99);
const SAMPLE_LEN: usize = 200;

/// What all ranks share.
pub struct Job {
    args: Args,
    corpus: Corpus,
    sizes: Sizes,
    batch: usize,
    /// The number of ranks to start.
    pub ranks: usize,
    begun: AtomicBool,
}

/// What one rank trains with.
struct Trainer<'a> {
    job: &'a Job,
    params: Params,
    model: Model,
    optimizer: AdamW,
    dropout: Generator,
}

impl Job {
    /// Reads the data and sets the sizes.
    ///
    /// # Errors
    /// Refuses data that cannot be read or is too short, and sizes that the model does not have.
    pub fn new(args: Args) -> Result<Job> {
        let ranks = Mesh::parse(&args.mesh, 0)?.rank_len();
        let block = args.sizes(0)?.0.block();
        let corpus = Corpus::read(args.data.as_deref(), block)?;
        let (sizes, batch) = args.sizes(corpus.vocabulary_len())?;
        Ok(Job { args, corpus, sizes, batch, ranks, begun: AtomicBool::new(false) })
    }

    /// True once a model was made and training began.
    pub fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// What the user says.
    pub fn args(&self) -> &Args {
        &self.args
    }

    /// The model's sizes, and the rows of a batch.
    pub fn sizes(&self) -> (Sizes, usize) {
        (self.sizes, self.batch)
    }

    fn batches(&self, part: Part) -> Batches<'_> {
        self.corpus.batches(part, self.args.seed, self.sizes.block(), self.batch)
    }
}

/// Trains, evaluates and writes a sample. Every rank runs this; rank 0 reports.
pub fn train(rank: &Rank, job: &Job) -> Result<()> {
    let args = &job.args;
    let report = (rank.rank() == 0).then(|| Report::new(args.json, args.steps));
    let mut trainer = Trainer::new(rank, job)?;
    let start = Start {
        ranks: job.ranks,
        mesh: &args.mesh,
        device: rank.device(),
        dtype: args.compute(),
        parameters: trainer.params.numel(),
        vocabulary: job.sizes.vocabulary(),
        digest: trainer.params.digest()?,
    };
    job.begun.store(true, Ordering::Relaxed);
    report.iter().try_for_each(|r| r.start(&start))?;

    let schedule = WarmupCosine { peak: args.lr, floor: args.min_lr, warmup: args.warmup, steps: args.steps };
    let batches = job.batches(Part::Training);
    let step_tokens = job.batch * job.sizes.block() * args.accumulate;
    let mut rates = Vec::with_capacity(args.steps);
    let mut val_loss = None;
    for step in 0..args.steps {
        if args.fail_at == Some((step, rank.rank())) {
            panic!("failing at step {step}, as --fail-at asks");
        }
        let began = Instant::now();
        let lr = schedule.at(step);
        let (loss, grad_norm) = trainer.step(&batches, step, lr)?;
        let tokens_per_s = per_second(step_tokens, began.elapsed());
        rates.push(tokens_per_s);
        report.iter().try_for_each(|r| r.step(&Step { step, loss, grad_norm, lr, tokens_per_s }))?;
        if (step + 1) % args.eval_every == 0 || step + 1 == args.steps {
            let loss = trainer.evaluate()?;
            val_loss = Some(loss);
            report.iter().try_for_each(|r| r.eval(step + 1, loss))?;
        }
    }
    let val_loss = val_loss.map_or_else(|| trainer.evaluate(), Ok)?;
    let text = if args.json { None } else { Some(trainer.sample()?) };
    let digest = trainer.params.digest()?;
    let peak_device_bytes = match rank.device() {
        Device::Cpu | Device::Meta => None,
        Device::Cuda(index) => Some(cuda::memory_stats(index)?.peak_live_bytes),
    };
    let end =
        End { val_loss, tokens_per_s: median(&rates), digest, peak_device_bytes, sample: text.as_deref() };
    report.iter().try_for_each(|r| r.end(&end))
}

impl<'a> Trainer<'a> {
    fn new(rank: &Rank, job: &'a Job) -> Result<Trainer<'a>> {
        let args = &job.args;
        let mesh = DeviceMesh::parse(rank, &args.mesh)?;
        mesh.set_reduction(match args.reduction {
            ReductionName::Exact => Reduction::Exact,
            ReductionName::Fast => Reduction::Fast,
        });
        let parallel = Parallel { heads: job.sizes.whole_heads(), sequence: args.sequence_parallel };
        let plan = Plan::transformer(mesh.mesh(), parallel)?;
        let mut params = Params::new(&mesh, plan, args.seed)?;
        params.compute_in(args.compute())?;
        let model = Model::new(&mut params, job.sizes)?;
        let optimizer = AdamW::new(BETAS, args.weight_decay);
        Ok(Trainer { job, params, model, optimizer, dropout: Generator::new(args.seed).child("dropout") })
    }

    /// One step at rate `lr`: the mean loss of its micro-batches, and the gradients' norm before clipping.
    fn step(&mut self, batches: &Batches, step: usize, lr: f64) -> Result<(f32, f64)> {
        let micros = self.job.args.accumulate;
        let mut grads = Gradients::default();
        let mut losses = Vec::with_capacity(micros);
        for micro in 0..micros {
            let (tokens, targets) = self.distribute(batches.at(step * micros + micro)?)?;
            let cx = Forward::train(&self.params, &mut self.dropout);
            let loss = self.model.loss(&cx, &tokens, &targets)?;
            drop(cx);
            // The mean of the micro-batches' gradients is the gradient of the mean of their losses.
            let part = if micros == 1 { loss.clone() } else { loss.mul_scalar(1.0 / micros as f64)? };
            grads.merge(part.backward()?)?;
            losses.push(loss.full_tensor()?.item()?);
        }
        let every = self.job.args.check;
        if every > 0 && step.is_multiple_of(every) {
            self.params.check_replicas()?;
            self.params.check_gradients(&grads, step as u64)?;
        }
        let all = self.params.ids().filter_map(|id| grads.get(self.params.value(id)));
        let norm = global_norm(all)?;
        let limit = self.job.args.clip;
        let scale = clip_scale(&norm, if limit == 0.0 { f64::INFINITY } else { limit })?;
        self.optimizer.step(&mut self.params, &mut grads, &scale, lr)?;
        let loss = losses.iter().sum::<f64>() / micros as f64;
        Ok((loss as f32, norm.full_tensor()?.item()?))
    }

    /// The mean loss over the same validation batches every time, without dropout.
    fn evaluate(&self) -> Result<f64> {
        let _guard = self.params.mesh().no_grad();
        let batches = self.job.batches(Part::Validation);
        let count = self.job.args.eval_batches;
        let mut sum = 0.0;
        for number in 0..count {
            let (tokens, targets) = self.distribute(batches.at(number)?)?;
            let loss = self.model.loss(&Forward::eval(&self.params), &tokens, &targets)?;
            sum += loss.full_tensor()?.item()?;
        }
        Ok(sum / count as f64)
    }

    fn sample(&self) -> Result<String> {
        let job = self.job;
        sample((&self.model, job.sizes.block()), &self.params, &job.corpus, job.args.seed, SAMPLE_LEN)
    }

    /// Every rank makes the same batch and keeps its rows: nothing is sent.
    fn distribute(&self, (tokens, targets): (Tensor, Tensor)) -> Result<(DTensor, DTensor)> {
        let mesh = self.params.mesh();
        let layout = self.params.plan().batch_layout(mesh.mesh());
        Ok((
            DTensor::distribute(mesh, &tokens, layout.clone())?,
            DTensor::distribute(mesh, &targets, layout)?,
        ))
    }
}

//! The program of one rank. It names the mesh once, when it makes the model.

use std::fs::OpenOptions;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use isoshard::comm::{Launch, Rank, Tally, Traffic};
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients, Reduction, check_replicas};
use isoshard::nn::{Forward, Params};
use isoshard::optim::{AdamW, WarmupCosine, clip_scale, global_norm};
use isoshard::placement::{Layout, Mesh};
use isoshard::rng::Generator;
use isoshard::tensor::Tensor;
use isoshard::{Error, Result};

use crate::args::{Args, EngineName};
use crate::data::{Batches, Corpus, Part};
use crate::model::{Model, Sizes};
use crate::report::{End, Report, Start, Step};
use crate::resume::{Saves, TrainerState};
use crate::room;
use crate::sample::sample;

const BETAS: (f64, f64) = (0.9, 0.99);
const SAMPLE_LEN: usize = 300;

/// The settings and the data that all ranks share.
pub struct Job {
    args: Args,
    corpus: Corpus,
    sizes: Sizes,
    batch: usize,
    /// The settings that decide which batches a run sees.
    settings: String,
    /// The number of ranks to start.
    pub ranks: usize,
    begun: AtomicBool,
}

/// The model, its parameters and the optimizer on one rank.
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
    /// Refuses data that cannot be read or is too short, a trained model without its tokenizer, sizes that the model or
    /// the machine does not have, a plot that cannot be written, and a folder with checkpoints of an earlier run.
    pub fn new(args: Args) -> Result<Job> {
        let ranks = Mesh::parse(&args.mesh, 0)?.rank_len();
        let (sizes, batch) = args.sizes(0)?;
        // Before a long text is read; then again with its vocabulary.
        room::check(&args, ranks, &sizes, batch)?;
        let block = sizes.block();
        args.check_tokenizer()?;
        let corpus = Corpus::read(args.data.as_deref(), args.tokenizer().as_ref(), block)?;
        Job::on(args, corpus)
    }

    /// Sets the sizes for a text.
    fn on(args: Args, corpus: Corpus) -> Result<Job> {
        let ranks = Mesh::parse(&args.mesh, 0)?.rank_len();
        let (sizes, batch) = args.sizes(corpus.vocabulary_len())?;
        if corpus.vocabulary_len() > sizes.vocabulary() {
            let given = format!("{} for {}", corpus.vocabulary_len(), sizes.vocabulary());
            let rule = "the text has more different tokens than the model";
            return Err(Error::invalid("from", rule, given, "give the model's tokenizer"));
        }
        room::check(&args, ranks, &sizes, batch)?;
        // Rank 0 alone writes the plot, and a dry run has none.
        let writes = Launch::from_env()?.is_none_or(|launch| launch.rank() == 0);
        if let Some(path) = args.plot.as_ref().filter(|_| writes && args.engine != EngineName::Dry) {
            // A minute of training should not end with a path that cannot be written.
            let opened = OpenOptions::new().create(true).append(true).open(path);
            opened.map_err(|e| Error::io("plot", path, e))?;
        }
        if args.save.is_some() && args.engine == EngineName::Dry {
            let remedy = "choose another engine, or leave out --save";
            return Err(Error::unsupported(
                "save",
                "a dry run has no values to save",
                "--engine dry",
                remedy,
            ));
        }
        if writes {
            Saves::refuse_others(&args)?;
        }
        let settings = format!(
            "{}, vocabulary {}, text {:016x}, batch {batch}, accumulate {}, seed {}",
            sizes.describe(),
            sizes.vocabulary(),
            corpus.digest(),
            args.accumulate,
            args.seed
        );
        Ok(Job { args, corpus, sizes, batch, settings, ranks, begun: AtomicBool::new(false) })
    }

    /// True once the model is made and training begins.
    pub fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// Returns the command line.
    pub fn args(&self) -> &Args {
        &self.args
    }

    /// Returns the model's sizes, and the number of sequences per micro-batch.
    pub fn sizes(&self) -> (Sizes, usize) {
        (self.sizes.clone(), self.batch)
    }

    /// Compares the text and the settings over the ranks: processes read files of their own, and batches would mix them.
    ///
    /// # Errors
    /// Names the ranks that differ.
    fn compare(&self, mesh: &DeviceMesh) -> Result<()> {
        let bytes = self.settings.bytes();
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let everywhere = Layout::replicated(mesh.mesh().ndim());
        let hash = DTensor::distribute(mesh, &Tensor::from_vec(vec![hash as i64], [1])?, everywhere)?;
        check_replicas(&[("the text, the sizes, the batches and the seed", &hash)])
    }

    fn schedule(&self) -> WarmupCosine {
        let args = &self.args;
        WarmupCosine { peak: args.lr, floor: args.min_lr, warmup: args.warmup, steps: args.steps }
    }

    fn batches(&self, part: Part) -> Batches<'_> {
        self.corpus.batches(part, self.args.seed, self.sizes.block(), self.batch)
    }
}

/// Trains, evaluates and writes a sample. Every rank runs this; rank 0 reports.
pub fn train(rank: &Rank, job: &Job) -> Result<()> {
    let args = &job.args;
    let (rank, tally) = Tally::of(rank)?;
    let mut trainer = Trainer::new(&rank, job)?;
    let mesh = trainer.params.mesh().clone();
    job.compare(&mesh)?;
    let mut saves = Saves::of(args, &mesh)?;
    let first_step = match &mut saves {
        Some(saves) if args.resume => saves.resume(&mesh, trainer.state())?,
        _ => 0,
    };
    let step_tokens = job.batch * job.sizes.block() * args.accumulate;
    let start = Start {
        model: &job.sizes.describe(),
        ranks: job.ranks,
        device: rank.device(),
        dtype: args.compute(),
        parameters: trainer.params.numel(),
        tokens: (job.corpus.len(), job.corpus.units()),
        vocabulary: job.sizes.vocabulary(),
        step_tokens,
        digest: trainer.params.digest()?,
        first_step,
    };
    job.begun.store(true, Ordering::Relaxed);
    let mut report = if rank.rank() == 0 { Some(Report::start(args, &start)?) } else { None };

    let schedule = job.schedule();
    let batches = job.batches(Part::Training);
    let (mut val_loss, mut step_traffic) = (None, Vec::new());
    for step in first_step..args.steps {
        if args.fail_at == Some((step, rank.rank())) {
            panic!("failing at step {step}, as --fail-at asks");
        }
        let last = step + 1 == args.steps;
        let before = if last { tally.rows() } else { Vec::new() };
        let began = Instant::now();
        let lr = schedule.at(step);
        let (loss, grad_norm) = trainer.step(&batches, step, lr)?;
        let time = began.elapsed();
        report.iter_mut().try_for_each(|r| r.step(&Step { step, loss, grad_norm, lr, time }))?;
        if last {
            step_traffic = since(&before, tally.rows());
        }
        if (step + 1).is_multiple_of(args.eval_every) || last {
            let began = Instant::now();
            let loss = trainer.evaluate()?;
            val_loss = Some(loss);
            report.iter_mut().try_for_each(|r| r.validation(step + 1, loss, began.elapsed()))?;
        }
        report.iter_mut().try_for_each(Report::row)?;
        if let Some(saves) = &mut saves {
            saves.save(&mesh, step + 1, trainer.state())?;
        }
    }
    if let Some(saves) = &mut saves {
        saves.finish(&mesh)?;
    }
    let val_loss = val_loss.map_or_else(|| trainer.evaluate(), Ok)?;
    let text = if args.json { None } else { Some(trainer.sample()?) };
    let end = End {
        val_loss,
        parameters: trainer.params.numel(),
        digest: trainer.params.digest()?,
        step_traffic: &step_traffic,
        sample: text.as_deref(),
    };
    report.iter().try_for_each(|r| r.end(&end))
}

/// Returns the calls in `after` that are not yet counted in `before`.
fn since(before: &[Traffic], after: Vec<Traffic>) -> Vec<Traffic> {
    let mut rows = after;
    for row in &mut rows {
        if let Some(old) = before.iter().find(|old| (&old.group, old.call) == (&row.group, row.call)) {
            row.total.calls -= old.total.calls;
            row.total.sent_bytes -= old.total.sent_bytes;
            row.total.received_bytes -= old.total.received_bytes;
        }
    }
    rows.retain(|row| row.total.calls > 0);
    rows
}

impl<'a> Trainer<'a> {
    fn new(rank: &Rank, job: &'a Job) -> Result<Trainer<'a>> {
        let args = &job.args;
        let mesh = DeviceMesh::parse(rank, &args.mesh)?;
        mesh.set_reduction(args.reduction()?);
        let plan = args.plan(mesh.mesh(), (&job.sizes, job.batch))?;
        let mut params = Params::new(&mesh, plan, args.seed)?;
        params.compute_in(args.compute())?;
        let model = Model::new(&mut params, &job.sizes)?;
        Model::load(&mut params, &job.sizes)?;
        Model::shard(&mut params)?;
        let optimizer = AdamW::new().betas(BETAS.0, BETAS.1).decay(args.weight_decay);
        Ok(Trainer { job, params, model, optimizer, dropout: Generator::new(args.seed).child("dropout") })
    }

    /// Returns the values that a checkpoint holds.
    fn state(&mut self) -> TrainerState<'_> {
        TrainerState {
            params: &mut self.params,
            optimizer: &mut self.optimizer,
            dropout: &mut self.dropout,
            settings: &self.job.settings,
        }
    }

    /// Takes a step at rate `lr`. Returns the mean loss of its micro-batches, and the gradients' norm before clipping.
    fn step(&mut self, batches: &Batches, step: usize, lr: f64) -> Result<(f32, f64)> {
        let micros = self.job.args.accumulate;
        // Exact mode reduces the gradients of each micro-batch.
        let unreduced = self.params.mesh().reduction() != Reduction::Exact;
        let mut grads = Gradients::default();
        let mut losses = Vec::with_capacity(micros);
        for micro in 0..micros {
            let (tokens, targets) = self.distribute(batches.at(step * micros + micro)?)?;
            let cx = Forward::train(&self.params, &mut self.dropout);
            let mut loss = self.model.loss(&cx, &tokens, &targets)?;
            drop(cx);
            let value = loss.detach();
            if micros > 1 {
                // The mean of the micro-batches' gradients is the gradient of the mean of their losses.
                loss = loss.mul_scalar(1.0 / micros as f64)?;
            }
            let _guard = (unreduced && micro + 1 < micros).then(|| self.params.mesh().no_sync());
            loss.backward_into(&mut grads)?;
            losses.push(value.item()?);
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
        Ok((loss as f32, norm.item()?))
    }

    /// Returns the mean loss, without dropout, over validation batches that are the same every time.
    fn evaluate(&self) -> Result<f64> {
        let _guard = self.params.mesh().no_grad();
        let batches = self.job.batches(Part::Validation);
        let count = self.job.args.eval_batches;
        let mut sum = 0.0;
        for number in 0..count {
            let (tokens, targets) = self.distribute(batches.at(number)?)?;
            let loss = self.model.loss(&Forward::eval(&self.params), &tokens, &targets)?;
            sum += loss.item()?;
        }
        Ok(sum / count as f64)
    }

    fn sample(&self) -> Result<String> {
        let job = self.job;
        sample((&self.model, job.sizes.block()), &self.params, &job.corpus, job.args.seed, SAMPLE_LEN)
    }

    /// Distributes a batch. Every rank makes the whole batch and keeps its own rows, so nothing is sent.
    fn distribute(&self, (tokens, targets): (Tensor, Tensor)) -> Result<(DTensor, DTensor)> {
        let mesh = self.params.mesh();
        let layout = self.params.batch_layout();
        Ok((
            DTensor::distribute(mesh, &tokens, layout.clone())?,
            DTensor::distribute(mesh, &targets, layout)?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use isoshard::comm::spmd;

    use super::*;

    /// The default run begins with these losses on every mesh; `tests/complete.sh` compares whole runs.
    #[test]
    fn the_default_run_begins_with_these_losses() {
        for mesh in ["1", "fsdp=2", "dp=2,tp=2"] {
            let job = Job::new(Args::parse_from(["train_gpt", "--mesh", mesh])).unwrap();
            let ranks = job.ranks;
            let job = std::sync::Arc::new(job);
            let losses = spmd(ranks, move |rank| {
                let mut trainer = Trainer::new(&rank, &job)?;
                let batches = job.batches(Part::Training);
                let schedule = job.schedule();
                (0..3)
                    .map(|step| Ok(trainer.step(&batches, step, schedule.at(step))?.0))
                    .collect::<Result<Vec<f32>>>()
            });
            let losses = losses.unwrap();
            assert!(losses.iter().all(|l| *l == [4.5683613, 4.5460663, 4.495282]), "{mesh}: {losses:?}");
        }
    }

    /// A run that ends between checkpoints and goes on, twice, each time on another mesh and with dropout.
    #[test]
    fn a_resumed_run_has_the_bits_of_an_uninterrupted_one() {
        let dir = std::env::temp_dir().join(format!("isoshard-resume-{}", std::process::id()));
        let run = |mesh: &str, saves: bool, until: usize| {
            let mut words = vec!["train_gpt", "--mesh", mesh, "--steps", "6", "--dropout", "0.1"];
            words
                .extend(["--layers", "2", "--width", "32", "--block", "16", "--batch", "5", "--warmup", "2"]);
            let name = dir.display().to_string();
            if saves {
                words.extend(["--save", &name, "--save-every", "2", "--keep", "1", "--resume"]);
            }
            let job = std::sync::Arc::new(Job::new(Args::parse_from(words)).unwrap());
            let outcomes = spmd(job.ranks, move |rank| {
                let mut trainer = Trainer::new(&rank, &job)?;
                let mesh = trainer.params.mesh().clone();
                let mut saves = Saves::of(&job.args, &mesh)?;
                let first = saves.as_mut().map_or(Ok(0), |s| s.resume(&mesh, trainer.state()))?;
                let (batches, schedule) = (job.batches(Part::Training), job.schedule());
                let mut losses = Vec::new();
                for step in first..until {
                    losses.push(trainer.step(&batches, step, schedule.at(step))?.0.to_bits());
                    saves.iter_mut().try_for_each(|s| s.save(&mesh, step + 1, trainer.state()))?;
                }
                saves.iter_mut().try_for_each(|s| s.finish(&mesh))?;
                Ok((first, losses, trainer.params.digest()?))
            });
            outcomes.unwrap_or_else(|e| panic!("{mesh}: {e}")).remove(0)
        };
        let (_, losses, digest) = run("1", false, 6);
        assert_eq!(run("fsdp=2", true, 3).1, losses[..3]);
        let (first, second_losses, _) = run("dp=2,tp=2", true, 5);
        assert_eq!((first, &second_losses[..]), (2, &losses[2..5]), "the third step was not saved");
        assert_eq!(run("fsdp=3", true, 6), (4, losses[4..].to_vec(), digest));
        assert_eq!(run("1", true, 6), (6, vec![], digest), "nothing is left to do");
        let kept: Vec<_> = std::fs::read_dir(&dir).unwrap().flatten().map(|e| e.file_name()).collect();
        assert_eq!(kept, ["step-000000000006"]);
        // Without --resume the folder is refused, and with it a run of other batches.
        let name = dir.display().to_string();
        let refused = |more: &[&str]| {
            let words = ["train_gpt", "--mesh", "1", "--layers", "2", "--save", &name];
            Job::new(Args::parse_from(words.iter().chain(more))).map(|job| {
                let resumed = spmd(1, move |rank| {
                    let mut trainer = Trainer::new(&rank, &job)?;
                    let mesh = trainer.params.mesh().clone();
                    Saves::of(&job.args, &mesh)?.expect("given").resume(&mesh, trainer.state())
                });
                resumed.unwrap_err()
            })
        };
        let said = refused(&[]).expect_err("refused").to_string();
        assert!(said.starts_with("save: the folder has checkpoints of an earlier run; got "), "{said}");
        let said = refused(&["--resume", "--seed", "7"]).expect("begins").to_string();
        assert!(said.contains("resume: the checkpoint is one of a run with other settings"), "{said}");
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// Fine-tunes models that `transformers` wrote: the first loss does not depend on the mesh, and the next ones fall.
    #[test]
    fn weights_of_hugging_face_are_fine_tuned() {
        let text = std::env::temp_dir().join(format!("isoshard-from-{}.txt", std::process::id()));
        std::fs::write(&text, "to be or not to be, that is the question. ".repeat(40)).unwrap();
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hugging_face/");
        for model in ["gpt2", "llama3"] {
            let (dir, data) = (format!("{root}{model}"), text.display().to_string());
            let run = |mesh: &str| {
                let words = ["train_gpt", "--mesh", mesh, "--from", &dir, "--data", &data, "--block", "16"];
                let rest = ["--batch", "4", "--steps", "12", "--warmup", "0", "--lr", "0.01"];
                // The numbers of characters serve as tokens, which the fixtures have no names for.
                let corpus = Corpus::read(Some(&text), None, 16).unwrap();
                let job = Job::on(Args::parse_from(words.iter().chain(&rest)), corpus);
                let job = std::sync::Arc::new(job.unwrap_or_else(|e| panic!("{model}: {e}")));
                let losses = spmd(job.ranks, move |rank| {
                    let mut trainer = Trainer::new(&rank, &job)?;
                    let (batches, schedule) = (job.batches(Part::Training), job.schedule());
                    let losses = (0..12).map(|step| Ok(trainer.step(&batches, step, schedule.at(step))?.0));
                    losses.collect::<Result<Vec<f32>>>()
                });
                losses.unwrap_or_else(|e| panic!("{model} on {mesh}: {e}")).remove(0)
            };
            let losses = run("1");
            assert!(losses[11] < losses[0], "{model}: {losses:?}");
            for mesh in ["fsdp=2", "tp=2"] {
                assert_eq!(run(mesh), losses, "{model} on {mesh}");
            }
        }
        std::fs::remove_file(text).unwrap();
    }

    /// Two processes whose files have the same name and length.
    #[test]
    fn ranks_that_read_different_texts_are_refused() {
        let path = std::env::temp_dir().join(format!("isoshard-differs-{}.txt", std::process::id()));
        let jobs = [0, 1].map(|rank| {
            std::fs::write(&path, ["to be or not ", "to eb or not "][rank].repeat(40)).unwrap();
            let data = path.display().to_string();
            let words =
                ["train_gpt", "--data", &data, "--block", "8", "--batch", "2", "--steps", "1", "--json"];
            Job::new(Args::parse_from(words)).unwrap()
        });
        std::fs::remove_file(&path).unwrap();
        let jobs = std::sync::Arc::new(jobs);
        let run = move |rank: Rank| Ok(train(&rank, &jobs[rank.rank()]).unwrap_err().to_string());
        for said in spmd(2, run).unwrap_or_else(|e| panic!("{e}")) {
            assert!(
                said.contains("replicas differ; got the text, the sizes, the batches and the seed i64[1]"),
                "{said}"
            );
        }
    }

    /// Characters, and the tokens of a new tokenizer, are not the tokens of a model that was trained.
    #[test]
    fn a_trained_model_wants_its_tokenizer() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hugging_face/gpt2");
        let job = |more: &[&str]| {
            let words = ["train_gpt", "--from", dir, "--block", "8"];
            Job::new(Args::parse_from(words.iter().chain(more))).map(|job| job.corpus)
        };
        for (more, rule) in [
            (
                &[][..],
                "from: the model's folder has no tokenizer.json, and the model's tokens are no characters; got ",
            ),
            (
                &["--tokenizer", "300"],
                "from: a model that was trained has its own tokens, and not those of a new",
            ),
        ] {
            let said = job(more).unwrap_err().to_string();
            assert!(
                said.starts_with(rule) && said.contains(dir) && said.contains("--tokenizer FILE"),
                "{said}"
            );
        }
        let said = job(&["--tokenizer", "no/such.json"]).unwrap_err().to_string();
        assert!(said.starts_with("tokenizer: "), "{said}");
        let said = job(&["--engine", "dry"]).unwrap_err().to_string();
        assert!(said.starts_with("from: the text has more different tokens than the model"), "{said}");
        // A token that the text has not is no reason to panic.
        let corpus = Corpus::read(None, None, 8).unwrap();
        assert_eq!(corpus.text(&[0, 1 << 40]).unwrap(), "\n\u{fffd}");
    }
}

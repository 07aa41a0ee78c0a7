//! Rank 0's report of a run: a table on standard output or JSON lines, and the losses as a picture.

use std::fmt::Display;
use std::fs;
use std::io::{Write, stdout};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use isoshard::comm::Traffic;
use isoshard::tensor::{DType, Device, cpu, cuda};
use isoshard::{Error, Result};

use crate::args::Args;
use crate::plot::LossCurve;
use crate::table::{HEADER, TableRow, about, bytes, thousands};

/// The report of a run, kept by rank 0.
pub struct Report<'a> {
    args: &'a Args,
    output: Output,
    title: String,
    ranks: usize,
    step_tokens: usize,
    device: Device,
    began: Instant,
    curve: LossCurve,
    /// The number of steps that an earlier run has made.
    first_step: usize,
    /// The time of each step, validation excluded.
    times: Vec<Duration>,
    /// The number of steps that the table shows.
    shown: usize,
    /// The time of the last validation.
    validation_time: Option<Duration>,
    /// True once the time of the whole run has been said.
    announced: bool,
}

enum Output {
    /// A table on standard output, and a progress bar on standard error if that is a terminal.
    Table(ProgressBar),
    /// One object per line on standard output.
    Json,
}

/// The properties of a run that are known before the first step.
pub struct Start<'a> {
    pub model: &'a str,
    pub ranks: usize,
    pub device: Device,
    pub dtype: DType,
    pub parameters: usize,
    /// The number of tokens in the text, and their name.
    pub tokens: (usize, &'static str),
    pub vocabulary: usize,
    pub step_tokens: usize,
    pub digest: u64,
    /// The number of steps that an earlier run has made.
    pub first_step: usize,
}

/// The results of a step.
pub struct Step {
    pub step: usize,
    pub loss: f32,
    pub grad_norm: f64,
    pub lr: f64,
    pub time: Duration,
}

/// The results of a run.
pub struct End<'a> {
    pub val_loss: f64,
    pub parameters: usize,
    pub digest: u64,
    /// Rank 0's collective calls in the last step, by group.
    pub step_traffic: &'a [Traffic],
    pub sample: Option<&'a str>,
}

/// Steps that are timed before the time of the whole run is said; fewer if they take longer than [`TIMED_FOR`].
const TIMED_STEPS: usize = 10;
const TIMED_FOR: Duration = Duration::from_secs(2);
/// The time of a forward pass, as a part of the step's.
const FORWARD_PART: f64 = 0.35;
/// The number of steps whose mean is reported as the training loss at the end.
const LAST_STEPS: usize = 100;

impl<'a> Report<'a> {
    /// Begins the report of a run.
    pub fn start(args: &'a Args, s: &Start) -> Result<Report<'a>> {
        let output = if args.json {
            Output::Json
        } else {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len}, {eta} left");
            Output::Table(
                ProgressBar::new(args.steps as u64).with_style(style.expect("the template is right")),
            )
        };
        let size = thousands(s.parameters as u64);
        let report = Report {
            args,
            output,
            title: format!("{}, {size} parameters, mesh {}", s.model, args.mesh),
            ranks: s.ranks,
            step_tokens: s.step_tokens,
            device: s.device,
            began: Instant::now(),
            curve: LossCurve::default(),
            first_step: s.first_step,
            times: Vec::new(),
            shown: s.first_step,
            validation_time: None,
            announced: false,
        };
        if let Output::Json = report.output {
            line(&[
                ("event", text("start")),
                ("ranks", s.ranks.to_string()),
                ("mesh", text(&args.mesh)),
                ("device", text(s.device)),
                ("dtype", text(s.dtype)),
                ("parameters", s.parameters.to_string()),
                ("vocabulary", s.vocabulary.to_string()),
                (
                    "threads",
                    args.threads.map_or_else(|| cpu::threads_each(s.ranks), Ok).unwrap_or(1).to_string(),
                ),
                ("parameters_digest", digest(s.digest)),
            ])?;
        } else {
            let data = args.data.as_ref().map_or("handbook".into(), |path| path.display().to_string());
            report
                .say(format_args!("model   {}: {size} parameters in {} on {}", s.model, s.dtype, s.device))?;
            report.say(format_args!(
                "data    {data}: {} {}, {} different; the last tenth is for validation",
                thousands(s.tokens.0 as u64),
                s.tokens.1,
                s.vocabulary
            ))?;
            if s.first_step > 0 {
                report.say(format_args!("resumed after step {}", thousands(s.first_step as u64)))?;
            }
            report.say(format_args!(
                "mesh    {} ({}), {} tokens per step",
                args.mesh,
                report.ranks(),
                s.step_tokens
            ))?;
        }
        Ok(report)
    }

    /// Reports a step.
    pub fn step(&mut self, s: &Step) -> Result<()> {
        self.curve.training.push(s.loss);
        self.times.push(s.time);
        let Output::Table(bar) = &self.output else {
            return line(&[
                ("event", text("step")),
                ("step", s.step.to_string()),
                ("loss", if s.loss.is_finite() { s.loss.to_string() } else { "null".into() }),
                ("loss_bits", text(format!("{:08x}", s.loss.to_bits()))),
                ("grad_norm", number(s.grad_norm)),
                ("lr", number(s.lr)),
                ("tokens_per_s", number(per_second(self.step_tokens, s.time))),
            ]);
        };
        bar.set_position(s.step as u64 + 1);
        self.announce()
    }

    /// Reports a validation after `step` steps.
    pub fn validation(&mut self, step: usize, val_loss: f64, time: Duration) -> Result<()> {
        self.curve.validation.push((step, val_loss));
        self.validation_time = Some(time);
        if let Err(error) = self.plot() {
            // The plot can be written again later: training goes on.
            eprintln!("{error}");
        }
        match &self.output {
            Output::Table(_) => Ok(()),
            Output::Json => {
                line(&[("event", text("eval")), ("step", step.to_string()), ("val_loss", number(val_loss))])
            }
        }
    }

    /// Prints a line of the table if one is due after the last step and its validation.
    pub fn row(&mut self) -> Result<()> {
        let done = self.first_step + self.times.len();
        let every = self.args.print_every.unwrap_or((self.args.steps / 20).max(1));
        let validation =
            self.curve.validation.last().filter(|(step, _)| *step == done).map(|(_, loss)| *loss);
        let due = done.is_multiple_of(every) || done == self.args.steps || validation.is_some();
        if !due || done == self.shown || matches!(self.output, Output::Json) {
            return Ok(());
        }
        let steps = done - self.shown;
        let time = self.times[self.times.len() - steps..].iter().sum::<Duration>();
        let row = TableRow {
            step: done,
            loss: self.curve.recent(steps),
            validation,
            tokens_per_s: per_second(steps * self.step_tokens, time),
            left: self.left(time / steps as u32),
            memory_bytes: self.peak_bytes()?,
        };
        if self.shown == self.first_step {
            self.say(HEADER)?;
        }
        self.shown = done;
        self.say(row)
    }

    /// Ends the report.
    pub fn end(&self, e: &End) -> Result<()> {
        let steps = self.times.len();
        let tokens = steps * self.step_tokens;
        let train_loss = self.curve.recent(LAST_STEPS);
        let tokens_per_s = median(&self.times).map_or(0.0, |time| per_second(self.step_tokens, time));
        let calls: u64 = e.step_traffic.iter().map(|row| row.total.calls).sum();
        let received: u64 = e.step_traffic.iter().map(|row| row.total.received_bytes).sum();
        let Output::Table(bar) = &self.output else {
            let device = self.peak_device_bytes()?;
            return line(&[
                ("event", text("end")),
                ("val_loss", number(e.val_loss)),
                ("tokens_per_s", number(tokens_per_s)),
                ("peak_rss_bytes", peak_rss_bytes().unwrap_or(0).to_string()),
                ("peak_device_bytes", device.map_or("null".into(), |bytes| bytes.to_string())),
                ("parameters_digest", digest(e.digest)),
                ("train_loss", number(train_loss)),
                ("steps", steps.to_string()),
                ("tokens", tokens.to_string()),
                ("seconds", number(self.began.elapsed().as_secs_f64())),
                ("calls_per_step", calls.to_string()),
                ("received_bytes_per_step", received.to_string()),
            ]);
        };
        bar.finish_and_clear();
        if let Some(sample) = e.sample {
            print(format_args!("\nThe model writes:\n{}\n", indented(sample)))?;
        }
        print(format_args!(
            "trained {} steps, {} tokens in {}: {} tokens/s (median)",
            thousands(steps as u64),
            thousands(tokens as u64),
            about(self.began.elapsed()),
            thousands(tokens_per_s.round() as u64)
        ))?;
        let last = LAST_STEPS.min(steps);
        print(format_args!(
            "losses  training {train_loss:.4} (mean of the last {last} steps), validation {:.4}",
            e.val_loss
        ))?;
        if let Some(peak) = self.peak_bytes()? {
            let of = if self.peak_device_bytes()?.is_some() { "of the device's memory" } else { "resident" };
            print(format_args!("memory  {} {of} at the most", bytes(peak)))?;
        }
        print(format_args!(
            "result  {} parameters on {}, digest {:016x}; any other mesh gives the same{}",
            thousands(e.parameters as u64),
            self.ranks(),
            e.digest,
            if self.args.is_exact() { "" } else { " with --reduction exact" }
        ))?;
        print(format_args!(
            "moved   per step, rank 0: {calls} collective calls, {} received",
            bytes(received)
        ))?;
        for row in e.step_traffic {
            let (calls, came) = (row.total.calls, bytes(row.total.received_bytes));
            print(format_args!("{:>12} x {:<14} {came:>10}  {}", calls, row.call, row.group))?;
        }
        match &self.args.plot {
            Some(path) => {
                self.plot()?;
                print(format_args!("plot    {}", path.display()))
            }
            None => Ok(()),
        }
    }

    /// Says the time of the whole run once enough steps have been timed.
    fn announce(&mut self) -> Result<()> {
        let (done, steps) = (self.times.len(), self.args.steps - self.first_step);
        let timed = done >= TIMED_STEPS || (done >= 2 && self.began.elapsed() >= TIMED_FOR);
        if self.announced || !timed || done == steps {
            return Ok(());
        }
        self.announced = true;
        // The first step finds the plans that later ones reuse.
        let each = median(&self.times[1..]).expect("at least two steps are timed");
        self.say(format_args!(
            "time    about {} for {} steps on {} ({:.0} ms per step, measured over the first {done})\n",
            about(self.began.elapsed().saturating_add(self.left(each))),
            thousands(steps as u64),
            self.ranks(),
            each.as_secs_f64() * 1e3
        ))
    }

    /// The time that the remaining steps and validations take if a step takes `each`.
    fn left(&self, each: Duration) -> Duration {
        let (done, every) = (self.times.len(), self.args.eval_every);
        let steps = self.args.steps - self.first_step;
        let validations = steps.div_ceil(every) - self.curve.validation.len().min(steps.div_ceil(every));
        let guess =
            || each.mul_f64(FORWARD_PART * self.args.eval_batches as f64 / self.args.accumulate as f64);
        let validation = self.validation_time.unwrap_or_else(guess);
        let seconds =
            each.as_secs_f64() * (steps - done) as f64 + validation.as_secs_f64() * validations as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    fn ranks(&self) -> String {
        format!("{} rank{}", self.ranks, if self.ranks == 1 { "" } else { "s" })
    }

    fn plot(&self) -> Result<()> {
        let Some(path) = &self.args.plot else { return Ok(()) };
        fs::write(path, self.curve.svg(&self.title)).map_err(|e| Error::io("plot", path, e))
    }

    /// The most memory in use so far: of the device if there is one, else of this process.
    fn peak_bytes(&self) -> Result<Option<u64>> {
        Ok(self.peak_device_bytes()?.or_else(peak_rss_bytes))
    }

    /// The most memory that tensors took of the device so far, over all ranks that share it.
    fn peak_device_bytes(&self) -> Result<Option<u64>> {
        match self.device {
            Device::Cpu | Device::Meta => Ok(None),
            Device::Cuda(index) => Ok(Some(cuda::memory_stats(index)?.peak_live_bytes as u64)),
        }
    }

    fn say(&self, what: impl Display) -> Result<()> {
        match &self.output {
            Output::Table(bar) => bar.suspend(|| print(what)),
            Output::Json => Ok(()),
        }
    }
}

fn per_second(tokens: usize, time: Duration) -> f64 {
    tokens as f64 / time.as_secs_f64().max(1e-9)
}

/// Returns the median of the times after the first ten, which warm up, or of all if there are no more than ten.
fn median(times: &[Duration]) -> Option<Duration> {
    let mut times = times[if times.len() > 10 { 10 } else { 0 }..].to_vec();
    times.sort();
    times.get(times.len() / 2).copied()
}

fn indented(text: &str) -> String {
    text.trim().lines().map(|line| format!("    {line}").trim_end().to_string() + "\n").collect()
}

fn line(fields: &[(&str, String)]) -> Result<()> {
    let fields: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
    print(format_args!("{{{}}}", fields.join(",")))
}

fn print(what: impl Display) -> Result<()> {
    writeln!(stdout().lock(), "{what}").map_err(|reason| Error::io("report", "standard output", reason))
}

fn text(what: impl Display) -> String {
    serde_json::Value::from(what.to_string()).to_string()
}

/// Writes a number; JSON has no infinities and no NaN, so they become `null`.
fn number(x: f64) -> String {
    serde_json::Value::from(x).to_string()
}

fn digest(hash: u64) -> String {
    text(format!("{hash:016x}"))
}

/// Returns the most memory that this process had resident so far, if the system tells.
fn peak_rss_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kib: u64 =
        status.lines().find_map(|l| l.strip_prefix("VmHWM:")?.split_whitespace().next()?.parse().ok())?;
    Some(kib * 1024)
}

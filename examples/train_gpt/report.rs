//! What the user sees: a progress bar, or JSON lines.

use std::fmt::Display;
use std::fs;
use std::io::{Write, stdout};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use isoshard::tensor::{DType, Device};
use isoshard::{Error, Result};

/// Where rank 0 reports; other ranks have none.
pub enum Report {
    /// A bar on standard error, results on standard output.
    Bar(ProgressBar),
    /// One object a line on standard output.
    Json,
}

/// What is known before the first step.
pub struct Start<'a> {
    pub ranks: usize,
    pub mesh: &'a str,
    pub device: Device,
    pub dtype: DType,
    pub parameters: usize,
    pub vocabulary: usize,
    pub digest: u64,
}

/// What a step gave.
pub struct Step {
    pub step: usize,
    pub loss: f32,
    pub grad_norm: f64,
    pub lr: f64,
    pub tokens_per_s: f64,
}

/// What training gave.
pub struct End<'a> {
    pub val_loss: f64,
    pub tokens_per_s: f64,
    pub digest: u64,
    /// The most that tensors took of a device's memory, over all ranks that share it.
    pub peak_device_bytes: Option<usize>,
    pub sample: Option<&'a str>,
}

impl Report {
    /// A report of `steps` steps.
    pub fn new(json: bool, steps: usize) -> Report {
        if json {
            return Report::Json;
        }
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {eta} left");
        let bar = ProgressBar::new(steps as u64);
        Report::Bar(bar.with_style(style.expect("the template is right")))
    }

    pub fn start(&self, s: &Start) -> Result<()> {
        match self {
            Report::Bar(_) => self.say(format!(
                "{} parameters, {} characters, mesh {} ({} rank(s)) on {}, in {}",
                s.parameters, s.vocabulary, s.mesh, s.ranks, s.device, s.dtype
            )),
            Report::Json => line(&[
                ("event", text("start")),
                ("ranks", s.ranks.to_string()),
                ("mesh", text(s.mesh)),
                ("device", text(s.device)),
                ("dtype", text(s.dtype)),
                ("parameters", s.parameters.to_string()),
                ("vocabulary", s.vocabulary.to_string()),
                ("threads", "1".into()),
                ("parameters_digest", digest(s.digest)),
            ]),
        }
    }

    pub fn step(&self, s: &Step) -> Result<()> {
        match self {
            Report::Bar(bar) => {
                bar.set_position(s.step as u64 + 1);
                bar.set_message(format!("loss {:.4}, {:.0} tokens/s,", s.loss, s.tokens_per_s));
                Ok(())
            }
            Report::Json => line(&[
                ("event", text("step")),
                ("step", s.step.to_string()),
                ("loss", if s.loss.is_finite() { s.loss.to_string() } else { "null".into() }),
                ("loss_bits", text(format!("{:08x}", s.loss.to_bits()))),
                ("grad_norm", number(s.grad_norm)),
                ("lr", number(s.lr)),
                ("tokens_per_s", number(s.tokens_per_s)),
            ]),
        }
    }

    pub fn eval(&self, step: usize, val_loss: f64) -> Result<()> {
        match self {
            Report::Bar(_) => self.say(format!("after {step} steps: validation loss {val_loss:.4}")),
            Report::Json => {
                line(&[("event", text("eval")), ("step", step.to_string()), ("val_loss", number(val_loss))])
            }
        }
    }

    pub fn end(&self, e: &End) -> Result<()> {
        match self {
            Report::Bar(bar) => {
                bar.finish_and_clear();
                if let Some(sample) = e.sample {
                    print(format_args!("sample:\n{sample}\n"))?;
                }
                print(format_args!("validation loss {:.4}, {:.0} tokens/s", e.val_loss, e.tokens_per_s))
            }
            Report::Json => line(&[
                ("event", text("end")),
                ("val_loss", number(e.val_loss)),
                ("tokens_per_s", number(e.tokens_per_s)),
                ("peak_rss_bytes", peak_rss_bytes().to_string()),
                ("peak_device_bytes", e.peak_device_bytes.map_or("null".into(), |bytes| bytes.to_string())),
                ("parameters_digest", digest(e.digest)),
            ]),
        }
    }

    fn say(&self, what: String) -> Result<()> {
        match self {
            Report::Bar(bar) => bar.suspend(|| print(what)),
            Report::Json => Ok(()),
        }
    }
}

/// Tokens in a second.
pub fn per_second(tokens: usize, time: Duration) -> f64 {
    tokens as f64 / time.as_secs_f64().max(1e-9)
}

/// The middle one of some rates after the first ten, which warm up; of all where there are no more.
pub fn median(rates: &[f64]) -> f64 {
    let mut rates = rates[if rates.len() > 10 { 10 } else { 0 }..].to_vec();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(0.0)
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

/// JSON has no infinities and no NaN.
fn number(x: f64) -> String {
    serde_json::Value::from(x).to_string()
}

fn digest(hash: u64) -> String {
    text(format!("{hash:016x}"))
}

/// The most memory this process had resident so far, where the system tells.
fn peak_rss_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status.lines().find_map(|l| l.strip_prefix("VmHWM:")?.split_whitespace().next()?.parse().ok());
    kib.unwrap_or(0u64) * 1024
}

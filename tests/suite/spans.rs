//! Spans: a `tracing` subscriber sees a span per operator, per move and per collective of a training step, nested and with
//! the fields that docs/plans.md lists; their numbers and bytes are those of the tallies.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use isoshard::Result;
use isoshard::comm::{Rank, Tally, Total, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, WorkTotal};
use isoshard::nn::{Forward, Llama, LlamaConfig, Parallel, Params, Plan};
use isoshard::optim::Sgd;
use isoshard::tensor::DType;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// A span as the subscriber saw it.
#[derive(Clone, Debug, Default)]
struct SeenSpan {
    target: &'static str,
    fields: BTreeMap<&'static str, String>,
    parent: Option<usize>,
    entered: usize,
    closed: bool,
}

#[derive(Default)]
struct SeenSpans {
    all: Vec<SeenSpan>,
    handles: Vec<usize>,
    inside: Vec<usize>,
}

/// Keeps the spans of one thread whose target begins with a prefix.
#[derive(Clone, Default)]
struct Collector {
    prefix: &'static str,
    seen: Arc<Mutex<SeenSpans>>,
}

struct FieldTexts<'a>(&'a mut BTreeMap<&'static str, String>);

impl Visit for FieldTexts<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_string());
    }
}

fn index(id: &Id) -> usize {
    id.into_u64() as usize - 1
}

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target().starts_with(self.prefix)
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut seen = self.seen.lock().unwrap();
        let mut new = SeenSpan { target: span.metadata().target(), ..SeenSpan::default() };
        span.record(&mut FieldTexts(&mut new.fields));
        new.parent = seen.inside.last().copied();
        seen.all.push(new);
        seen.handles.push(1);
        Id::from_u64(seen.all.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, span: &Id) {
        let mut seen = self.seen.lock().unwrap();
        seen.inside.push(index(span));
        seen.all[index(span)].entered += 1;
    }

    fn exit(&self, span: &Id) {
        assert_eq!(self.seen.lock().unwrap().inside.pop(), Some(index(span)), "spans nest");
    }

    fn clone_span(&self, id: &Id) -> Id {
        self.seen.lock().unwrap().handles[index(id)] += 1;
        id.clone()
    }

    fn try_close(&self, id: Id) -> bool {
        let mut seen = self.seen.lock().unwrap();
        seen.handles[index(&id)] -= 1;
        let closed = seen.handles[index(&id)] == 0;
        seen.all[index(&id)].closed = closed;
        closed
    }
}

/// Runs a training step on four ranks, and returns rank 0's spans, traffic and work.
fn step(prefix: &'static str) -> (Vec<SeenSpan>, Total, WorkTotal) {
    let run = move |rank: Rank| -> Result<_> {
        let (rank, tally) = Tally::of(&rank)?;
        let mesh = DeviceMesh::parse(&rank, "fsdp=2,tp=2")?;
        let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: true })?.recompute("h.1");
        let batch = plan.batch_layout(mesh.mesh());
        let mut params = Params::new(&mesh, plan, 7)?;
        let config = LlamaConfig {
            vocabulary: 11,
            block: 6,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_width: 4,
            width: 10,
            hidden: 64,
            base: 1e4,
            dropout: 0.0,
        };
        let model = Llama::new(&mut params, config)?;
        let mut optimizer = Sgd::new().rate(0.1).clip(1.0);
        let tokens = DTensor::zeros(&mesh, DType::I64, [4, 6], batch)?;
        let (before, work) = (tally.total(), mesh.tally_work());
        let collector = Collector { prefix, ..Collector::default() };
        tracing::subscriber::with_default(collector.clone(), || {
            let mut gradients = {
                let cx = Forward::train_without_dropout(&params);
                model.loss(&cx, &tokens, &tokens)?.backward()?
            };
            optimizer.step(&mut params, &mut gradients)?;
            // An operand that moves within its operator.
            let x = DTensor::zeros(&mesh, DType::F32, [4, 4], "(S0, R)")?;
            x.add(&DTensor::zeros(&mesh, DType::F32, [4, 4], "(S1, R)")?).map(drop)
        })?;
        let after = tally.total();
        let seen = std::mem::take(&mut collector.seen.lock().unwrap().all);
        let traffic = Total {
            calls: after.calls - before.calls,
            sent_bytes: after.sent_bytes - before.sent_bytes,
            received_bytes: after.received_bytes - before.received_bytes,
            ..Total::default()
        };
        let work = work.total();
        model.loss(&Forward::eval(&params), &tokens, &tokens)?;
        assert!(collector.seen.lock().unwrap().all.is_empty(), "nothing is seen after the subscription");
        Ok((seen, traffic, work))
    };
    spmd(4, run).unwrap_or_else(|e| panic!("{e}")).swap_remove(0)
}

const TARGETS: [&str; 3] = ["isoshard::op", "isoshard::move", "isoshard::collective"];

#[test]
fn a_step_has_a_span_per_operator_move_and_collective() {
    let (seen, traffic, work) = step("isoshard");
    let of = |target: &'static str| seen.iter().filter(move |span| span.target == target);
    let [ops, moves, collectives] = TARGETS.map(|target| of(target).count());
    assert_eq!(ops + moves + collectives, seen.len(), "there are no other spans");
    assert_eq!(ops as u64, work.calls);
    assert_eq!(collectives as u64, traffic.calls);
    let bytes =
        |target, field: &str| -> u64 { of(target).map(|s| s.fields[field].parse::<u64>().unwrap()).sum() };
    assert_eq!(bytes(TARGETS[2], "received_bytes"), traffic.received_bytes);
    assert_eq!(bytes(TARGETS[2], "sent_bytes"), traffic.sent_bytes);
    let parent = |span: &SeenSpan| span.parent.map(|at| &seen[at]);
    for span in &seen {
        assert!(span.closed && span.entered > 0, "{span:?}");
        let around = parent(span).map(|parent| parent.target);
        let fits = match span.target {
            // A derivative is no span of its own; an operator may be within another's move, but is in none here.
            "isoshard::op" => around.is_none(),
            "isoshard::move" => around.is_none() || around == Some("isoshard::op"),
            _ => around.is_none() || around == Some("isoshard::move"),
        };
        assert!(fits, "{span:?} in {around:?}");
        for field in ["operator", "path", "phase"] {
            assert!(span.fields.contains_key(field), "{span:?}");
        }
    }
    // Each move has as many collectives as it says, and an operator's bytes are those of its moves.
    for (at, span) in seen.iter().enumerate() {
        let inside = seen.iter().filter(|other| other.parent == Some(at));
        match span.target {
            "isoshard::move" => assert_eq!(span.fields["calls"], inside.count().to_string(), "{span:?}"),
            "isoshard::op" => {
                let moved: u64 = inside.map(|m| m.fields["received_bytes"].parse::<u64>().unwrap()).sum();
                assert!(span.fields["received_bytes"].parse::<u64>().unwrap() >= moved, "{span:?}");
            }
            _ => assert_eq!(span.entered, 2, "it is started, and waited for: {span:?}"),
        }
    }
    let add = of(TARGETS[0]).next_back().expect("the last operator");
    assert_eq!(add.fields["operator"], "add");
    assert_eq!(add.fields["operands"], "f32[4, 4]@(fsdp:S0, tp:R), f32[4, 4]@(fsdp:S1, tp:R)");
    let last = of(TARGETS[2]).next_back().expect("the last collective");
    let around = parent(last).expect("a move");
    assert_eq!(parent(around).map(|op| &op.fields), Some(&add.fields), "operator, move, collective");
    assert_eq!((&*last.fields["operator"], &*last.fields["group"]), ("add", "fsdp{0, 2}"));
    let with = |path: &str, phase: &str| {
        let same = |s: &&SeenSpan| s.fields["path"] == path && s.fields["phase"] == phase;
        TARGETS.map(|target| of(target).filter(same).count() > 0)
    };
    assert_eq!(with("h.0.attn.qkv", "forward"), [true, false, false]);
    assert_eq!(with("h.0", "forward"), [true; 3], "a unit is gathered by one call");
    assert_eq!(with("h.0.attn.qkv", "backward"), [true, false, false]);
    assert_eq!(with("h.0", "backward"), [false, true, true], "and its gradients are reduced by one");
    assert_eq!(with("h.1.attn", "recomputation"), [true, true, true]);
    assert_eq!(with("h.0.attn", "recomputation"), [false; 3]);
}

#[test]
fn a_subscriber_may_want_collectives_alone() {
    let (all, ..) = step("isoshard");
    let (seen, traffic, _) = step("isoshard::collective");
    assert!(seen.iter().all(|span| span.target == TARGETS[2] && span.parent.is_none()));
    assert_eq!(seen.len() as u64, traffic.calls);
    let texts = |spans: &[SeenSpan]| -> Vec<BTreeMap<&str, String>> {
        spans.iter().filter(|span| span.target == TARGETS[2]).map(|span| span.fields.clone()).collect()
    };
    assert_eq!(texts(&seen), texts(&all), "each step has the same collectives, with the same fields");
}

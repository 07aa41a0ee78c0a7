//! Checks the slots' protocol in every order in which two or three threads can run, up to a number of preemptions.

use std::sync::Arc;
use std::time::Duration;

use loom::model::Builder;
use loom::thread;

use crate::comm::calls::{Call, Lineage, Route, Sequence};
use crate::comm::transport::Reduce;
use crate::comm::transport::threads::ThreadWorld;
use crate::comm::transport::threads::group::{PublishedCall, ThreadGroup};
use crate::comm::transport::threads::shared_folds::ReusedResult;
use crate::comm::transport::threads::slot::SlotOutcome;
use crate::error::{CommFault, Error, Result};
use crate::tensor::{DType, ReduceOp, Shape, Tensor};

/// Runs `program` in all orders with at most `preemptions` preemptions.
fn try_all(preemptions: usize, program: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(program);
}

/// One member of a group that is the whole world.
#[derive(Clone)]
struct ModelMember {
    world: Arc<ThreadWorld>,
    group: Arc<ThreadGroup>,
    position: usize,
}

impl ModelMember {
    fn all(n: usize) -> Vec<ModelMember> {
        let world = Arc::new(ThreadWorld::new(n, Duration::from_secs(3600)));
        let everyone: Vec<usize> = (0..n).collect();
        let group = world.group(0, &everyone, "model");
        (0..n).map(|position| ModelMember { world: world.clone(), group: group.clone(), position }).collect()
    }

    fn publish(&self, call: &Call<'_>, reduce: Option<&Reduce>) -> Result<PublishedCall> {
        self.group.publish(Sequence::Collective, self.position, call, reduce, &mut None)
    }

    fn wait(&self, published: &PublishedCall) -> Result<()> {
        self.group.wait(published, |cycle| self.world.fail_others_in(cycle, &self.group))
    }

    /// Gathers every member's number of this round.
    fn gather(&self, round: usize) -> Result<()> {
        let n = self.group.ranks.len();
        let x = Tensor::scalar((10 * round + self.position) as i64);
        let shapes = vec![Shape::default(); n];
        let published = self.publish(&gather(&x, &shapes), None)?;
        let waited = self.wait(&published);
        if waited.is_ok() {
            assert_eq!(published.slot.seq(), round as u64, "this slot serves another call already");
            let all = published.slot.contents().take(self.position);
            let all: Vec<i64> = all.iter().map(|x| x.to_vec::<i64>().unwrap()[0]).collect();
            let want: Vec<i64> = (0..n).map(|at| (10 * round + at) as i64).collect();
            assert_eq!(all, want);
        }
        self.group.leave(&published);
        waited
    }

    /// Gathers two elements of every member, a chunk each, to the places of one member.
    fn gather_to_places(&self, round: usize) -> Result<()> {
        let n = self.group.ranks.len();
        let value = |member: usize| 10 * round + member;
        let x = Tensor::full(DType::I64, [2], value(self.position) as f64);
        let shapes = vec![Shape::from([2]); n];
        let mut places = Some(shapes.iter().map(|shape| Tensor::zeros(DType::I64, shape.clone())).collect());
        let call = gather(&x, &shapes);
        let published = self.group.publish(Sequence::Collective, self.position, &call, None, &mut places)?;
        assert_eq!(places.is_none(), round % n == self.position, "members bring places in turn");
        let waited = self.wait(&published).and_then(|()| {
            let contents = &*published.slot.contents();
            let SlotOutcome::Placed(places) = &contents.outcome else {
                unreachable!("a member has brought places")
            };
            if places.work(|member| contents.part(member, 0)) {
                self.group.wake();
            }
            self.group.wait_for_work(&published, || places.is_done())?;
            for (member, x) in places.tensors().iter().enumerate() {
                assert_eq!(x.to_vec::<i64>().unwrap(), vec![value(member) as i64; 2]);
            }
            Ok(())
        });
        self.group.leave(&published);
        waited
    }

    /// Sums `len` elements over the members.
    fn all_reduce(&self, len: usize) -> Result<()> {
        let n = self.group.ranks.len();
        let x = Tensor::full(DType::I64, [len], (self.position + 1) as f64);
        let reduce = Reduce::halving(ReduceOp::Sum, n, [len].into());
        let shapes = vec![Shape::from([len]); n];
        let published = self.publish(&gather(&x, &shapes), Some(&reduce))?;
        let waited = self.wait(&published).and_then(|()| {
            let contents = &*published.slot.contents();
            let sum = match &contents.outcome {
                SlotOutcome::Whole(sum) => sum.clone(),
                SlotOutcome::Shared(folds) => {
                    if folds.work(self.position, |member, part| contents.part(member, part)) {
                        self.group.wake();
                    }
                    self.group.wait_for_work(&published, || folds.is_done(self.position))?;
                    folds.result(self.position)
                }
                SlotOutcome::Parts | SlotOutcome::Placed(_) => {
                    unreachable!("an all-reduce is folded for all")
                }
            };
            assert_eq!(sum.to_vec::<i64>().unwrap(), vec![(n * (n + 1) / 2) as i64; len]);
            Ok(())
        });
        self.group.leave(&published);
        waited
    }

    fn fail(&self) {
        self.world.fail(self.position, "struck".into());
    }
}

fn gather<'a>(x: &'a Tensor, shapes: &'a [Shape]) -> Call<'a> {
    let outgoing = std::slice::from_ref(x);
    let (dtype, lineage) = (x.dtype(), Lineage::NONE);
    Call { name: "gather", route: Route::Gather, op: None, dtype, outgoing, incoming: shapes, lineage }
}

/// Runs one closure per member, each on a thread whose stack has room for a fold.
fn run_members<T: Send + 'static>(
    n: usize,
    program: impl Fn(ModelMember) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let spawn = |member| {
        let program = program.clone();
        thread::Builder::new().stack_size(256 << 10).spawn(move || program(member)).unwrap()
    };
    let all: Vec<_> = ModelMember::all(n).into_iter().map(spawn).collect();
    all.into_iter().map(|one| one.join().unwrap()).collect()
}

fn all_done(results: Vec<Result<()>>) {
    results.into_iter().for_each(|result| result.unwrap());
}

fn fault(result: &Result<()>) -> &CommFault {
    match result {
        Err(Error::Comm(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

/// Every member wakes when the slot opens, in any order of arrival.
#[test]
fn three_members_complete_a_call() {
    try_all(3, || all_done(run_members(3, |m| m.gather(0))));
}

/// There are two slots, so the second or third call reuses one. No member loses results that it has not taken, or
/// takes those of another call.
#[test]
fn slots_are_used_again_when_all_have_left() {
    try_all(3, || {
        let calls = |m: ModelMember| (0..3).try_for_each(|round| m.gather(round));
        all_done(run_members(2, calls));
    });
}

/// A member that leaves without waiting takes nothing from the other.
#[test]
fn a_dropped_call_disturbs_nobody() {
    try_all(3, || {
        let calls = |m: ModelMember| -> Result<()> {
            if m.position == 1 {
                let (x, shapes) = (Tensor::scalar(1i64), vec![Shape::default(); 2]);
                let published = m.publish(&gather(&x, &shapes), None)?;
                m.group.leave(&published);
            } else {
                m.gather(0)?;
            }
            m.gather(1)
        };
        all_done(run_members(2, calls));
    });
}

/// The last member to arrive folds for all members before they read the result.
#[test]
fn a_small_reduction_is_there_when_the_slot_opens() {
    try_all(2, || all_done(run_members(2, |m| m.all_reduce(0))));
}

/// The member that folds the last chunk wakes those that wait for it; chunks are written once.
#[test]
fn a_large_reduction_is_folded_by_both() {
    try_all(2, || all_done(run_members(2, |m| m.all_reduce(2))));
}

/// Each member brings places once. No member reads them before both have copied their last chunks.
#[test]
fn a_large_gather_is_copied_by_both() {
    try_all(2, || all_done(run_members(2, |m| m.gather_to_places(0))));
    try_all(1, || all_done(run_members(2, |m| (0..2).try_for_each(|round| m.gather_to_places(round)))));
}

/// Two waiting members, and one that arrives later, learn of a third that fails.
#[test]
fn a_failure_wakes_all() {
    try_all(2, || {
        let results = run_members(3, |m| {
            if m.position == 1 {
                m.fail();
                None
            } else {
                Some(m.gather(0))
            }
        });
        for result in results.into_iter().flatten() {
            assert!(matches!(fault(&result), CommFault::PeerFailed { rank: 1, .. }), "{result:?}");
        }
    });
}

/// A rank that ends without arriving is not waited for; one that arrived before is not missed.
#[test]
fn an_end_wakes_who_waits() {
    try_all(3, || {
        let results = run_members(2, |m| {
            let result = m.gather(0).and_then(|()| if m.position == 0 { m.gather(1) } else { Ok(()) });
            m.world.end(m.position);
            result
        });
        assert!(results[1].is_ok());
        let CommFault::Missing { missing, ended, .. } = fault(&results[0]) else { panic!("{results:?}") };
        assert_eq!((&missing[..], *ended), (&[1][..], true));
    });
}

/// Both members learn that their calls disagree, whichever arrives first.
#[test]
fn a_disagreement_is_heard_by_both() {
    try_all(3, || {
        let results = run_members(2, |m| {
            let dtype = if m.position == 0 { DType::F32 } else { DType::I64 };
            let (x, shapes) = (Tensor::zeros(dtype, [1]), vec![Shape::from([1]); 2]);
            let published = m.publish(&gather(&x, &shapes), None)?;
            let waited = m.wait(&published);
            m.group.leave(&published);
            waited
        });
        for result in results {
            assert!(matches!(fault(&result), CommFault::Mismatch { .. }), "{result:?}");
        }
    });
}

/// A result's memory is not reused while something holds the result.
#[test]
fn a_result_that_is_held_is_not_written() {
    try_all(1, || {
        let mut reused = ReusedResult::default();
        let reduce = Reduce::halving(ReduceOp::Sum, 2, Shape::default());
        let parts = [Tensor::scalar(1i64), Tensor::scalar(2i64)];
        let first = reused.fold(&reduce, &|at| &parts[at]).unwrap();
        let second = reused.fold(&reduce, &|_| &parts[1]).unwrap();
        assert_eq!((first.to_vec::<i64>().unwrap()[0], second.to_vec::<i64>().unwrap()[0]), (3, 4));
    });
}

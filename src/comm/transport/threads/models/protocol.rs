//! The protocol of slots, in every order in which two or three threads can run, up to a number of preemptions.

use std::sync::Arc;
use std::time::Duration;

use loom::model::Builder;
use loom::thread;

use crate::comm::transport::threads::World;
use crate::comm::transport::threads::hub::{By, Hub, Place};
use crate::comm::transport::threads::reduction::Kept;
use crate::comm::transport::threads::slot::Outcome;
use crate::comm::{Call, Reduce, Route};
use crate::error::{CommFault, Error, Result};
use crate::tensor::{DType, ReduceOp, Shape, Tensor};

/// Tries `program` in all orders with at most `preemptions` of them.
fn try_all(preemptions: usize, program: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(program);
}

/// One member of one group: the whole world.
#[derive(Clone)]
struct Member {
    world: Arc<World>,
    hub: Arc<Hub>,
    position: usize,
}

impl Member {
    fn all(n: usize) -> Vec<Member> {
        let world = Arc::new(World::new(n, Duration::from_secs(3600)));
        let everyone: Vec<usize> = (0..n).collect();
        let hub = world.hub(0, &everyone, "model");
        (0..n).map(|position| Member { world: world.clone(), hub: hub.clone(), position }).collect()
    }

    fn publish(&self, call: &Call<'_>, reduce: Option<&Reduce>) -> Result<Place> {
        self.hub.publish(&self.world, (By::Collective, self.position), call, reduce)
    }

    /// Everybody's number of this round, by a gather.
    fn gather(&self, round: usize) -> Result<()> {
        let n = self.hub.ranks.len();
        let x = Tensor::scalar((10 * round + self.position) as i64);
        let shapes = vec![Shape::default(); n];
        let place = self.publish(&gather(&x, &shapes), None)?;
        let met = self.hub.wait(&self.world, &place);
        if met.is_ok() {
            assert_eq!(place.slot.seq(), round as u64, "this slot serves another call already");
            let all = place.slot.contents().take(self.position);
            let all: Vec<i64> = all.iter().map(|x| x.to_vec::<i64>().unwrap()[0]).collect();
            let want: Vec<i64> = (0..n).map(|at| (10 * round + at) as i64).collect();
            assert_eq!(all, want);
        }
        self.hub.leave(&place);
        met
    }

    /// The sum over the members of `len` elements each.
    fn all_reduce(&self, len: usize) -> Result<()> {
        let n = self.hub.ranks.len();
        let x = Tensor::full(DType::I64, [len], (self.position + 1) as f64);
        let reduce = Reduce::halving(ReduceOp::Sum, n, [len].into());
        let shapes = vec![Shape::from([len]); n];
        let place = self.publish(&gather(&x, &shapes), Some(&reduce))?;
        let met = self.hub.wait(&self.world, &place).and_then(|()| {
            let contents = &*place.slot.contents();
            let sum = match &contents.outcome {
                Outcome::Whole(sum) => sum.clone()?,
                Outcome::Folds(folds) => {
                    if folds.work(self.position, contents) {
                        self.hub.wake();
                    }
                    self.hub.wait_for_work(&self.world, &place, || folds.is_done(self.position))?;
                    folds.result(self.position)
                }
                Outcome::Parts => unreachable!("an all-reduce is folded for all"),
            };
            assert_eq!(sum.to_vec::<i64>().unwrap(), vec![(n * (n + 1) / 2) as i64; len]);
            Ok(())
        });
        self.hub.leave(&place);
        met
    }

    fn fail(&self) {
        self.world.fail(self.position, "struck".into());
    }
}

fn gather<'a>(x: &'a Tensor, shapes: &'a [Shape]) -> Call<'a> {
    let outgoing = std::slice::from_ref(x);
    Call { name: "gather", route: Route::Gather, op: None, dtype: x.dtype(), outgoing, incoming: shapes }
}

/// Runs one closure a member, each on a thread with room for a fold.
fn together<T: Send + 'static>(n: usize, life: impl Fn(Member) -> T + Clone + Send + 'static) -> Vec<T> {
    let spawn = |member| {
        let life = life.clone();
        thread::Builder::new().stack_size(256 << 10).spawn(move || life(member)).unwrap()
    };
    let all: Vec<_> = Member::all(n).into_iter().map(spawn).collect();
    all.into_iter().map(|one| one.join().unwrap()).collect()
}

fn all_met(met: Vec<Result<()>>) {
    met.into_iter().for_each(|met| met.unwrap());
}

fn fault(met: &Result<()>) -> &CommFault {
    match met {
        Err(Error::Comm(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

/// Nobody sleeps through the opening, whoever comes last.
#[test]
fn three_meet() {
    try_all(3, || all_met(together(3, |m| m.gather(0))));
}

/// With two slots at hand, the second or third call goes by one that was used before; nobody loses what he has still to
/// take from it, or finds what belongs to another call.
#[test]
fn slots_are_used_again_when_all_have_left() {
    try_all(3, || {
        let calls = |m: Member| (0..3).try_for_each(|round| m.gather(round));
        all_met(together(2, calls));
    });
}

/// A member that leaves without waiting takes nothing from the other.
#[test]
fn a_dropped_call_disturbs_nobody() {
    try_all(3, || {
        let calls = |m: Member| -> Result<()> {
            if m.position == 1 {
                let (x, shapes) = (Tensor::scalar(1i64), vec![Shape::default(); 2]);
                let place = m.publish(&gather(&x, &shapes), None)?;
                m.hub.leave(&place);
            } else {
                m.gather(0)?;
            }
            m.gather(1)
        };
        all_met(together(2, calls));
    });
}

/// The last to come folds for all, before anybody looks.
#[test]
fn a_small_reduction_is_there_when_the_slot_opens() {
    try_all(2, || all_met(together(2, |m| m.all_reduce(0))));
}

/// Whoever folds the last chunk wakes who waits for it; chunks are written once.
#[test]
fn a_large_reduction_is_folded_by_both() {
    try_all(2, || all_met(together(2, |m| m.all_reduce(2))));
}

/// Two that wait hear of a third that fails; so does who comes after.
#[test]
fn a_failure_wakes_all() {
    try_all(2, || {
        let met = together(3, |m| {
            if m.position == 1 {
                m.fail();
                None
            } else {
                Some(m.gather(0))
            }
        });
        for met in met.into_iter().flatten() {
            assert!(matches!(fault(&met), CommFault::PeerFailed { rank: 1, .. }), "{met:?}");
        }
    });
}

/// A rank that ends without coming is not waited for; one that came before is not missed.
#[test]
fn an_end_wakes_who_waits() {
    try_all(3, || {
        let met = together(2, |m| {
            let met = m.gather(0).and_then(|()| if m.position == 0 { m.gather(1) } else { Ok(()) });
            m.world.end(m.position);
            met
        });
        assert!(met[1].is_ok());
        let CommFault::Missing { missing, ended, .. } = fault(&met[0]) else { panic!("{met:?}") };
        assert_eq!((&missing[..], *ended), (&[1][..], true));
    });
}

/// Both hear that they do not belong together, whoever comes first.
#[test]
fn a_disagreement_is_heard_by_both() {
    try_all(3, || {
        let met = together(2, |m| {
            let dtype = if m.position == 0 { DType::F32 } else { DType::I64 };
            let (x, shapes) = (Tensor::zeros(dtype, [1]), vec![Shape::from([1]); 2]);
            let place = m.publish(&gather(&x, &shapes), None)?;
            let met = m.hub.wait(&m.world, &place);
            m.hub.leave(&place);
            met
        });
        for met in met {
            assert!(matches!(fault(&met), CommFault::Mismatch { .. }), "{met:?}");
        }
    });
}

/// What is kept of a result is not written while somebody holds it.
#[test]
fn a_kept_result_is_the_holders() {
    try_all(1, || {
        let mut kept = Kept::default();
        let reduce = Reduce::halving(ReduceOp::Sum, 2, Shape::default());
        let parts = [Tensor::scalar(1i64), Tensor::scalar(2i64)];
        let first = kept.fold(&reduce, &|at| &parts[at]).unwrap();
        let second = kept.fold(&reduce, &|_| &parts[1]).unwrap();
        assert_eq!((first.to_vec::<i64>().unwrap()[0], second.to_vec::<i64>().unwrap()[0]), (3, 4));
    });
}

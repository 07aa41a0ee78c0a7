//! The table's faults, refusals and bounds.

use super::*;
use crate::tensor::DType;

fn signature(name: &'static str, route: Route, n: usize) -> CallSignature {
    let (name, incoming) = (name.into(), vec![Shape::from([n])]);
    CallSignature {
        name,
        route,
        op: None,
        dtype: DType::F32,
        outgoing: vec![],
        incoming,
        operator: "".into(),
        lineage: 0,
        made_by: "".into(),
    }
}

pub(super) fn gather(n: usize) -> CallSignature {
    signature("all_gather", Route::Gather, n)
}

pub(super) fn open(world: usize) -> CallTable {
    let mut table = CallTable::new(world, Duration::from_millis(500));
    let ranks: Vec<usize> = (0..world).collect();
    (0..world).for_each(|rank| table.open(rank, "dp", &ranks, Instant::now()).unwrap());
    table
}

/// The key of a collective on the group of all ranks of a table.
pub(super) fn collective(table: &CallTable, seq: u64) -> CallKey {
    (dp(table), Sequence::Collective, seq)
}

pub(super) fn dp(table: &CallTable) -> u64 {
    group_number("dp", &(0..table.last.len()).collect::<Vec<_>>())
}

pub(super) fn arrive(
    table: &mut CallTable,
    rank: usize,
    seq: u64,
    signature: CallSignature,
) -> Option<String> {
    table
        .arrive(rank, collective(table, seq), signature, Instant::now())
        .unwrap()
        .map(|fault| fault.to_string())
}

fn late(table: &CallTable, rank: usize, seq: u64) -> String {
    table.late(rank, collective(table, seq), &"all_gather".into(), true, Instant::now()).unwrap().to_string()
}

#[test]
fn calls_are_compared_in_whatever_order_they_come() {
    let mut table = open(3);
    let empty = table.held.clone();
    for seq in [0, 2, 1] {
        for rank in [1, 0, 2] {
            assert_eq!(arrive(&mut table, rank, seq, gather(3)), None);
        }
    }
    assert!(table.open.is_empty() && table.held == empty, "a call that all have come to is forgotten");
    assert_eq!(arrive(&mut table, 2, 3, gather(3)), None);
    assert_eq!(
        arrive(&mut table, 0, 3, gather(4)).unwrap(),
        "all_gather #3 on group dp{0, 1, 2}: rank 2 brought all_gather f32[3], rank 0 brought all_gather f32[4]; \
         every rank must make the same calls in the same order; last completed: rank(s) [0, 1, 2] all_gather #2"
    );
}

#[test]
fn who_is_late_and_who_is_over() {
    let mut table = open(3);
    arrive(&mut table, 1, 0, gather(3));
    assert_eq!(
        late(&table, 1, 0),
        "all_gather #0 on group dp{0, 1, 2}: rank(s) [0, 2] did not come within 0.5 s; rank 1 waited with all_gather \
         f32[3]; last completed: rank(s) [0, 1, 2] nothing"
    );
    let mut table = open(1);
    arrive(&mut table, 0, 0, gather(3));
    assert!(late(&table, 0, 0).contains("not finished within 0.5 s; all members have come"));
    let mut table = open(2);
    arrive(&mut table, 1, 0, gather(3));
    assert!(
        table.ended(0, Instant::now()).unwrap().to_string().contains("rank(s) [0] had ended; rank 1 waited")
    );
    let mut table = open(2);
    assert_eq!(table.ended(0, Instant::now()), None);
    assert!(arrive(&mut table, 1, 0, gather(3)).unwrap().contains("[0] had ended"));
}

#[test]
fn tensors_of_one_shape_are_told_apart() {
    let of = |path: &'static str, lineage| CallSignature { made_by: path.into(), lineage, ..gather(3) };
    let mut table = open(2);
    assert_eq!(arrive(&mut table, 0, 0, of("h.1.w", 7)), None);
    let said = arrive(&mut table, 1, 0, of("h.2.w", 8)).unwrap();
    let [first, second] = ["h.1.w (lineage 0000000000000007)", "h.2.w (lineage 0000000000000008)"];
    let brought =
        format!("rank 1 brought all_gather f32[3] of {second}, rank 0 brought all_gather f32[3] of {first};");
    assert!(said.contains(&brought), "{said}");
    let mut table = open(2);
    assert_eq!(arrive(&mut table, 0, 0, of("", 0)), None);
    assert!(arrive(&mut table, 1, 0, of("w", 8)).unwrap().contains("all_gather f32[3] of a plain tensor"));
    // The name says nothing by itself.
    let mut table = open(2);
    assert_eq!(arrive(&mut table, 0, 0, of("w", 8)), None);
    assert_eq!(arrive(&mut table, 1, 0, of("v", 8)), None);
}

#[test]
fn who_waits_for_whom_and_what_was_completed() {
    let mut table = open(3);
    let world = dp(&table);
    let arrive_at = |table: &mut CallTable, rank, group, operator: &'static str| {
        let key = (group, Sequence::Collective, u64::from(group == world));
        let signature = CallSignature { operator: operator.into(), ..gather(3) };
        table.arrive(rank, key, signature, Instant::now()).unwrap()
    };
    [0, 1].into_iter().for_each(|rank| table.open(rank, "ep", &[0, 1], Instant::now()).unwrap());
    (0..3).for_each(|rank| {
        assert_eq!(arrive(&mut table, rank, 0, signature("barrier", Route::Barrier, 0)), None)
    });
    assert_eq!(
        (
            arrive_at(&mut table, 0, world, "matmul"),
            arrive_at(&mut table, 1, group_number("ep", &[0, 1]), "")
        ),
        (None, None)
    );
    assert_eq!(
        late(&table, 0, 1),
        "all_gather #1 on group dp{0, 1, 2} (for matmul): ranks wait for each other in a cycle: rank 0 waits in \
         all_gather #1 on group dp{0, 1, 2} (for matmul) for rank 1, which waits in all_gather #0 on group ep{0, 1} for \
         rank 0; ranks must call the groups that they share in the same order; last completed: rank(s) [0, 1] barrier #0"
    );
    // A missing rank waits elsewhere, for a rank that does not wait.
    let mut table = open(3);
    [1, 2].into_iter().for_each(|rank| table.open(rank, "ep", &[1, 2], Instant::now()).unwrap());
    assert_eq!(
        (arrive_at(&mut table, 0, world, ""), arrive_at(&mut table, 1, group_number("ep", &[1, 2]), "")),
        (None, None)
    );
    assert_eq!(
        late(&table, 0, 1),
        "all_gather #1 on group dp{0, 1, 2}: rank(s) [2] did not come within 0.5 s; rank 0 waited with all_gather \
         f32[3]; rank 1 waited in all_gather #0 on group ep{1, 2} for rank 2; last completed: rank(s) [0, 1, 2] none of the 1 \
         call(s) before on the group"
    );
}

#[test]
fn messages_have_sequences_of_their_own() {
    let mut table = open(3);
    let group = dp(&table);
    let mut message = |rank: usize, (from, to): (usize, usize), route, n| {
        let key = (group, Sequence::Message { from, to }, 0);
        table
            .arrive(rank, key, signature("m", route, n), Instant::now())
            .unwrap()
            .map(|fault| fault.to_string())
    };
    assert_eq!(message(0, (0, 1), Route::Send { to: 1 }, 2), None);
    assert_eq!(message(2, (2, 1), Route::Send { to: 1 }, 5), None);
    assert_eq!(message(1, (0, 1), Route::Recv { from: 0 }, 2), None);
    let differs = message(1, (2, 1), Route::Recv { from: 2 }, 2).unwrap();
    assert!(differs.contains("rank 1 brought m f32[2], rank 2"), "{differs}");
    let mut table = open(2);
    let key = (dp(&table), Sequence::Message { from: 0, to: 1 }, 0);
    table.arrive(0, key, signature("send", Route::Send { to: 1 }, 2), Instant::now()).unwrap();
    assert_eq!(table.ended(1, Instant::now()), None, "the sender goes on");
    assert!(!table.all_have_ended());
    assert_eq!(
        table.ended(0, Instant::now()).expect("a message is left").to_string(),
        "send #0 on group dp{0, 1}: rank 0 brought send f32[2], and rank 1 ended without receiving it; every message needs a \
         receive"
    );
    assert!(table.all_have_ended());
    // A receive that the program has dropped is no fault.
    let mut table = open(2);
    let recv = signature("recv", Route::Recv { from: 0 }, 2);
    let key = (dp(&table), Sequence::Message { from: 0, to: 1 }, 0);
    table.arrive(1, key, recv, Instant::now()).unwrap();
    assert_eq!(table.ended(1, Instant::now()), None);
}

#[test]
fn what_no_rank_may_say_is_refused() {
    let mut table = open(2);
    for (name, ranks, want) in [
        ("g", &[1, 999][..], "group g{1, 999} names rank 999 in a world of 2"),
        ("g", &[1, 1], "group g{1, 1} names a rank twice"),
        ("g", &[0], "it opens g{0}, which it is not in"),
        ("g", &[], "it opens g{}, which it is not in"),
        ("g", &[0, 1, 2], "a group has 3 members in a world of 2"),
    ] {
        let (shown, wanted) = (table.open(1, name, ranks, Instant::now()).unwrap_err(), want.to_string());
        assert_eq!(shown, wanted);
    }
    assert!(
        table.open(1, &"n".repeat(2000), &[1], Instant::now()).unwrap_err().contains("name has 2000 bytes")
    );
    let group = dp(&table);
    let message = |from, to| (group, Sequence::Message { from, to }, 0);
    for (key, signature, want) in [
        ((8, Sequence::Collective, 0), gather(1), "it reports a call on group 0x8, which it has not opened"),
        (message(0, 2), gather(1), "it reports a message from 0 to 2 on dp{0, 1}"),
        (message(0, 0), gather(1), "it comes to a message of dp{0, 1} that is not its own"),
        (
            (group, Sequence::Collective, 0),
            signature("all_to_all", Route::AllToAll, 1),
            "its all_to_all on dp{0, 1} has 0 parts for 1",
        ),
    ] {
        assert_eq!(table.arrive(1, key, signature, Instant::now()).unwrap_err(), want);
    }
    assert!(table.late(1, message(5, 5), &"send".into(), true, Instant::now()).is_err());
    let long = CallSignature { operator: "n".repeat(257).into(), ..gather(1) };
    let long_path = CallSignature { made_by: "n".repeat(257).into(), ..gather(1) };
    for long in [long, long_path] {
        let said = table.arrive(1, (group, Sequence::Collective, 0), long, Instant::now()).unwrap_err();
        assert_eq!(said, "the name of a call has 257 bytes, but at most 256 are allowed");
    }
    arrive(&mut table, 1, 0, gather(1));
    assert_eq!(
        table.arrive(1, collective(&table, 0), gather(1), Instant::now()).unwrap_err(),
        "it comes to all_gather #0 on group dp{0, 1} twice"
    );
}

#[test]
fn a_rank_fills_no_more_than_its_budget_and_takes_no_more_than_its_time() {
    let mut table = open(20);
    let (group, budget) = (dp(&table), BUDGET_BYTES + 20 * BUDGET_BYTES_PER_RANK);
    let key = |seq| (group, Sequence::Collective, seq);
    let filled = (0..1 << 20).find_map(|seq| table.arrive(1, key(seq), gather(1), Instant::now()).err());
    assert!(filled.unwrap().contains(&format!("take more than {budget} bytes")));
    assert!(table.held[1] <= budget && table.open.len() > 60_000);
    assert_eq!(arrive(&mut table, 0, 0, gather(1)), None, "the others have their own");
    // With a scan of all calls each of these took minutes, and the search for a cycle their cube.
    (0..1000).for_each(|_| assert_eq!(table.ended(1, Instant::now()), None));
    assert!(late(&table, 1, 0).contains("rank(s) [2, 3, 4, "));
    // A rank that catches up frees memory.
    let mut table = open(2);
    (0..100).for_each(|seq| assert_eq!(arrive(&mut table, 1, seq, gather(1)), None));
    let held = table.held[1];
    assert_eq!(arrive(&mut table, 0, 0, gather(1)), None);
    assert!(table.held[1] < held && table.open_of[1].len() == 99);
    let names = (10..1 << 20).map(|group| format!("g{group}"));
    assert!(
        names.into_iter().any(|name| table.open(1, &name, &[1], Instant::now()).is_err()),
        "groups count too"
    );
}

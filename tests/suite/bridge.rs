//! Bridges between meshes: for all meshes and layouts, every rank ends with its shard, bit for bit, and receives only
//! the elements that it lacks, and replicas send equally much.

use std::collections::BTreeMap;
use std::fmt;

use isoshard::Result;
use isoshard::comm::{DryRun, Rank, Spmd};
use isoshard::dtensor::{Bridge, DTensor, DeviceMesh, Transfer};
use isoshard::placement::{Layout, Mesh, Spec};
use isoshard::tensor::{DType, Tensor};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::failures::Failures;
use crate::common::{SplitMix, bits_differ, ordinary, part_of, small_ints, spmd, spread};
use isoshard::testing::strategies::{layouts, shapes};

#[test]
fn any_mesh_and_layout_to_any_other() {
    let mut failures = Failures::default();
    for world in 1..=6usize {
        let given = (meshes(world), meshes(world)).prop_flat_map(move |(from, to)| {
            let crossings = vec(Crossing::any(&from, &to), 1..=4);
            (Just(from), Just(to), crossings)
        });
        failures.check(&format!("{world} ranks"), 120, &given, |(from, to, crossings)| {
            run(world, &from, &to, crossings)
        });
    }
    failures.report();
}

#[test]
fn holders_of_the_same_share_the_work() {
    // (source, target, shape, most and least elements that a replica sends)
    let cases = [
        ("(R)", 0..4, "(S0)", 4..8, vec![8, 3], (6, 6)),
        ("(R)", 0..4, "(R)", 4..5, vec![1 << 14, 9], (9 << 12, 9 << 12)),
        ("(R)", 0..3, "(R)", 3..8, vec![1 << 14, 9], (9 * 27_308, 9 * 27_306)),
        // Each rank is its own nearest replica: nothing is sent.
        ("(R)", 0..4, "(S0)", 0..4, vec![8, 3], (0, 0)),
        // Each rank sends its shard to the other.
        ("(S0)", 0..2, "(R)", 0..2, vec![6, 2], (6, 6)),
    ];
    for (from, senders, to, receivers, shape, (most, least)) in cases {
        let meshes = [senders.clone(), receivers.clone()].map(|r| Mesh::over(&[("a", r.len())], r).unwrap());
        let text = format!("{shape:?} {from} on {senders:?} to {to} on {receivers:?}");
        let transfer = Transfer::new(DType::F32, &shape[..], from.parse().unwrap(), to.parse().unwrap());
        let sent = spmd(8, move |rank| {
            if !meshes.iter().any(|mesh| mesh.contains(rank.rank())) {
                return Ok(None);
            }
            let bridge = Bridge::new(&rank, &meshes[0], &meshes[1], [transfer.clone()])?;
            Ok(meshes[0].contains(rank.rank()).then(|| bridge.sent_bytes() / 4))
        });
        let sent: Vec<u64> = sent.unwrap().into_iter().flatten().collect();
        assert_eq!((sent.iter().max(), sent.iter().min()), (Some(&most), Some(&least)), "{text}: {sent:?}");
    }
}

#[test]
fn several_on_their_way_in_any_order() {
    let run = |rank: Rank| {
        let (train, generate) = (Mesh::over(&[("a", 3)], 0..3)?, Mesh::over(&[("b", 2)], 2..4)?);
        let shapes = [[7, 3], [5, 2]];
        let transfers = shapes.map(|s| Transfer::new(DType::F32, s, layout("(S0)"), layout("(S1)")));
        let bridge = Bridge::new(&rank, &train, &generate, transfers)?;
        let ends = Ends::new(&rank, &train, &generate)?;
        let wholes = |salt| shapes.map(|s| ordinary(DType::F32, &s.into(), salt));
        let sources = |salt| -> Result<Vec<DTensor>> {
            let Some(mesh) = &ends.from else { return Ok(Vec::new()) };
            wholes(salt).iter().map(|whole| DTensor::distribute(mesh, whole, layout("(S0)"))).collect()
        };
        let mut flights = Vec::new();
        for salt in 0..4 {
            // A sent tensor may be dropped or overwritten at once.
            flights.push(bridge.send_async(&sources(salt)?, ends.to.as_ref())?);
        }
        drop(flights.remove(1));
        for (flight, salt) in flights.into_iter().rev().zip([3, 2, 0]) {
            let arrived = flight.wait()?;
            assert_eq!(arrived.len(), if ends.to.is_some() { 2 } else { 0 });
            for (got, want) in arrived.iter().zip(wholes(salt)) {
                assert_eq!(bits_differ(&got.full_tensor()?, &want), None);
            }
        }
        Ok(())
    };
    spmd(5, move |rank| if rank.rank() < 4 { run(rank) } else { Ok(()) }).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn what_arrives_is_nobody_elses_and_has_no_history() {
    let run = |rank: Rank| {
        let mesh = Mesh::over(&[("a", 2)], 0..2)?;
        let ends = Ends::new(&rank, &mesh, &mesh)?;
        let (from, to) = (ends.from.expect("all"), ends.to.expect("all"));
        let x = DTensor::full(&from, DType::F32, [4], layout("(S0)"), 1)?.requires_grad()?;
        for end in ["(S0)", "(R)"] {
            let transfer = Transfer::new(DType::F32, [4], layout("(S0)"), layout(end));
            let arrived = Bridge::new(&rank, &mesh, &mesh, [transfer])?.send([&x], Some(&to))?.remove(0);
            assert!(!arrived.has_history() && arrived.mesh().mesh() == to.mesh());
            let mut local = x.local().clone();
            local.make_mut::<f32>()?.fill(7.0);
            assert_eq!(arrived.full_tensor()?.to_vec::<f32>()?, [1.0; 4], "{end}");
        }
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}

/// If one rank fails, before or after it has sent, the other ranks end, with an error if they lack something.
#[test]
fn a_rank_that_fails_on_the_way() {
    for salt in 0..50 {
        let mut random = SplitMix(salt);
        let (bad, sends) = (random.below(4), random.below(2) == 1);
        let run = move |rank: Rank| {
            let (train, generate) = (Mesh::over(&[("a", 3)], 0..3)?, Mesh::over(&[("b", 2)], 2..4)?);
            let transfers =
                [[64, 9], [600, 500]].map(|s| Transfer::new(DType::F32, s, layout("(S0)"), layout("(R)")));
            let bridge = Bridge::new(&rank, &train, &generate, transfers.clone())?;
            let ends = Ends::new(&rank, &train, &generate)?;
            let zeros = |t: &Transfer| {
                ends.from.as_ref().map(|m| DTensor::zeros(m, t.dtype, &t.shape, t.from.clone())).transpose()
            };
            let mut sources = Vec::new();
            for transfer in &transfers {
                sources.extend(zeros(transfer)?);
            }
            let fails = || Err(isoshard::Error::invalid("program", "fails", "", ""));
            if rank.rank() == bad && !sends {
                return fails();
            }
            let flights = [0, 1].map(|_| bridge.send_async(&sources, ends.to.as_ref()));
            if rank.rank() == bad {
                return fails();
            }
            for flight in flights.into_iter().rev() {
                match flight.and_then(|flight| flight.wait()) {
                    Ok(arrived) => assert_eq!(arrived.len(), if ends.to.is_some() { 2 } else { 0 }),
                    Err(e) => assert!(e.is_echo(), "{e}"),
                }
            }
            Ok(())
        };
        let error =
            Spmd::new(4).deadline(std::time::Duration::from_secs(20)).run(run).unwrap_err().to_string();
        assert_eq!(error, format!("rank {bad}: program: fails"));
    }
}

/// In a dry run of single ranks of a large world, a rank receives its target shard, and meanwhile holds that and its source
/// shard.
#[test]
fn weights_cross_between_thousands_of_ranks() {
    let (train, generate) = (
        Mesh::over(&[("fsdp", 1024), ("tp", 8)], 0..8192).unwrap(),
        Mesh::over(&[("dp", 512), ("tp", 16)], 8192..16_384).unwrap(),
    );
    let matrix = |from, to| Transfer::new(DType::BF16, [16_384, 8_192], layout(from), layout(to));
    let transfers = [matrix("(S0, S1)", "(R, S0)"), matrix("(S0^1, S0^0)", "(R, S1)")];
    for rank in [777, 16_383] {
        let dry = DryRun::new(16_384, rank).unwrap();
        let handle = dry.rank().unwrap();
        let bridge = Bridge::new(&handle, &train, &generate, transfers.clone()).unwrap();
        let ends = Ends::new(&handle, &train, &generate).unwrap();
        let source = |t: &Transfer| {
            let zeros = |m| DTensor::zeros(m, t.dtype, &t.shape, t.from.clone()).unwrap();
            ends.from.as_ref().map(zeros)
        };
        let sources: Vec<DTensor> = transfers.iter().filter_map(source).collect();
        let arrived = bridge.send(&sources, ends.to.as_ref()).unwrap();
        let bytes = |xs: &[DTensor]| xs.iter().map(|x| x.local().len_bytes() as u64).sum::<u64>();
        let total = dry.report().total();
        assert_eq!(
            (total.received_bytes, bytes(&arrived)),
            (bridge.received_bytes(), bridge.received_bytes())
        );
        assert_eq!(bytes(&arrived), if rank < 8192 { 0 } else { 2 * (16_384 * 8_192 * 2) / 16 });
        // 8192 ranks hold once what 512 replicas receive, and each of them sends equally much.
        assert_eq!(total.sent_bytes, if rank < 8192 { 512 * bytes(&sources) } else { 0 });
        // The received pieces, and the shard that they are written to.
        assert!(dry.report().peak_bytes as u64 <= bytes(&sources) + 2 * bytes(&arrived));
    }
}

#[test]
fn a_bridge_counts_and_speaks() {
    let run = |rank: Rank| {
        let (train, generate) = (Mesh::over(&[("a", 2)], 0..2)?, Mesh::over(&[("b", 2)], 1..3)?);
        let to = |shape: [usize; 2]| Transfer::new(DType::F32, shape, layout("(S0)"), layout("(R)"));
        let transfers =
            [to([4, 2]), to([0, 2]), to([512, 512]), Transfer { dtype: DType::I64, ..to([1, 1]) }];
        let bridge = Bridge::new(&rank, &train, &generate, transfers)?;
        Ok((bridge.to_string(), bridge.sent_bytes(), bridge.received_bytes()))
    };
    let said = spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
    // Rank 1 lacks the shard of rank 0, and rank 2 lacks everything.
    let half = 16 + (512 << 10);
    let bytes: Vec<(u64, u64)> = said.iter().map(|(_, sent, came)| (*sent, *came)).collect();
    assert_eq!(bytes, [(2 * (half + 8), 0), (half, half + 8), (0, 2 * half + 8)]);
    assert_eq!(
        said[1].0,
        format!(
            "(a=2) over {{0, 1}} to (b=2) over {{1, 2}}: 4 tensor(s) in 3 exchange(s), sends {half} bytes and receives {}",
            half + 8
        )
    );
}

#[test]
fn refusals() {
    let text = |f: fn(&Rank) -> Result<()>| {
        let texts = spmd(4, move |rank| Ok(f(&rank).err().map(|e| e.to_string()).unwrap_or_default()));
        texts.unwrap_or_else(|e| panic!("{e}"))
    };
    fn way(from: &str, to: &str) -> Transfer {
        Transfer::new(DType::F32, [4, 2], layout(from), layout(to))
    }
    fn meshes() -> Result<(Mesh, Mesh)> {
        Ok((Mesh::over(&[("a", 2)], 0..2)?, Mesh::over(&[("b", 2)], 1..3)?))
    }

    let outside = text(|rank| {
        let (a, b) = meshes()?;
        Bridge::new(rank, &a, &b, [way("(S0)", "(R)")]).map(drop)
    });
    assert_eq!(outside[..3], ["", "", ""]);
    assert_eq!(
        outside[3],
        "bridge: this rank is in neither mesh; got (a=2) over {0, 1} to (b=2) over {1, 2} on rank 3; only their members make \
         it"
    );
    let partial = text(|rank| {
        let (a, b) = meshes()?;
        if rank.rank() == 3 {
            return Ok(());
        }
        Bridge::new(rank, &a, &b, [way("(S0)", "(P(sum))")]).map(drop)
    });
    let want =
        "bridge: a tensor cannot arrive as Partial; got f32[4, 2]@(b:P(sum)); replicate or shard it there";
    assert_eq!(partial, [want, want, want, ""]);
    let absent = text(|rank| {
        let (a, b) = (Mesh::over(&[("a", 2)], 0..2)?, Mesh::over(&[("b", 3)], 2..5)?);
        Bridge::new(rank, &a, &b, []).map(drop)
    });
    let want = "bridge: no such rank; got rank 4 in (a=2) over {0, 1} to (b=3) over {2, 3, 4} for 4 rank(s); ranks are 0 to 3";
    assert!(absent.iter().all(|t| t == want), "{absent:?}");
    let unfit = text(|rank| {
        let (a, b) = meshes()?;
        if rank.rank() == 3 {
            return Ok(());
        }
        Bridge::new(rank, &a, &b, [way("(S0)", "(S2)")]).map(drop)
    });
    let want = "layout: shards a dim that is not there; got f32[4, 2]@(b:S2); dims are 0 to 1";
    assert_eq!(unfit, [want, want, want, ""]);

    // A wrong argument fails on the rank that passes it; the other ranks get an error that names it.
    let sent = |f: fn(&Rank, &Bridge, &Ends) -> Result<()>| {
        let run = move |rank: Rank| {
            if rank.rank() == 3 {
                return Ok(());
            }
            let (a, b) = meshes()?;
            let bridge = Bridge::new(&rank, &a, &b, [way("(S0)", "(R)")])?;
            f(&rank, &bridge, &Ends::new(&rank, &a, &b)?)
        };
        Spmd::new(4).deadline(std::time::Duration::from_secs(10)).run(run).unwrap_err().to_string()
    };
    let other = sent(|rank, bridge, ends| {
        let mesh = ends.from.as_ref();
        let wrong = if rank.rank() == 1 { "(S1)" } else { "(S0)" };
        let x = mesh.map(|mesh| DTensor::zeros(mesh, DType::F32, [4, 2], layout(wrong))).transpose()?;
        bridge.send(&x, ends.to.as_ref()).map(drop)
    });
    assert_eq!(
        other,
        "rank 1: bridge: a tensor is not as planned; got f32[4, 2]@(a:S1) on (a=2) over {0, 1} on rank 1; give \
         f32[4, 2]@(S0) on (a=2) over {0, 1}"
    );
    let none = sent(|rank, bridge, ends| {
        let x =
            ends.from.as_ref().map(|m| DTensor::zeros(m, DType::F32, [4, 2], layout("(S0)"))).transpose()?;
        bridge.send(x.iter().filter(|_| rank.rank() > 0), ends.to.as_ref()).map(drop)
    });
    assert_eq!(
        none,
        "rank 0: bridge: wants one tensor for each planned transfer; got 0 tensor(s) on rank 0; give 1"
    );
    let nowhere = sent(|rank, bridge, ends| {
        let x =
            ends.from.as_ref().map(|m| DTensor::zeros(m, DType::F32, [4, 2], layout("(S0)"))).transpose()?;
        bridge.send(&x, ends.to.as_ref().filter(|_| rank.rank() != 2)).map(drop)
    });
    assert_eq!(
        nowhere,
        "rank 2: bridge: not the target mesh; got none on rank 2; give a DeviceMesh of (b=2) over {1, 2}"
    );
}

/// The source and target mesh of a rank, if it is in them.
struct Ends {
    from: Option<DeviceMesh>,
    to: Option<DeviceMesh>,
}

impl Ends {
    fn new(rank: &Rank, from: &Mesh, to: &Mesh) -> Result<Ends> {
        let on = |mesh: &Mesh| mesh.contains(rank.rank()).then(|| DeviceMesh::on(rank, mesh)).transpose();
        Ok(Ends { from: on(from)?, to: on(to)? })
    }
}

/// Generates meshes of one or two axes over some of the ranks, in any order.
fn meshes(world: usize) -> impl Strategy<Value = Mesh> {
    let ranks = Just((0..world).collect::<Vec<usize>>()).prop_shuffle();
    (ranks, 1..=world, any::<bool>(), 1..=3usize).prop_map(|(mut ranks, len, regular, outer)| {
        let outer = (1..=outer).rev().find(|n| len % n == 0).expect("1 divides");
        ranks.truncate(len);
        if regular {
            ranks.sort_unstable();
        }
        let axes = [("a", outer), ("b", len / outer)];
        Mesh::over(if outer == 1 { &axes[1..] } else { &axes }, ranks).expect("some ranks, once each")
    })
}

/// A tensor that is transferred, with its specs seen from the first rank of each mesh.
#[derive(Clone)]
struct Crossing {
    from: Spec,
    to: Spec,
    salt: u64,
}

impl Crossing {
    fn any(from: &Mesh, to: &Mesh) -> impl Strategy<Value = Crossing> + use<> {
        let (from, to) = (from.clone(), to.clone());
        let dtype = prop::sample::select(vec![DType::F32, DType::I64, DType::BF16, DType::Bool]);
        (shapes(), dtype).prop_flat_map(move |(shape, dtype)| {
            let ends = (layouts(&from, dtype, &shape, true), layouts(&to, dtype, &shape, false), 0..64u64);
            ends.prop_map(|(from, to, salt)| Crossing { from, to, salt })
        })
    }

    fn transfer(&self) -> Transfer {
        let Spec { dtype, ref shape, ref layout, .. } = self.from;
        Transfer::new(dtype, shape, layout.clone(), self.to.layout.clone())
    }

    /// Partial sums are of small integers, so that every order of addition gives the same bits.
    fn whole(&self) -> Tensor {
        let make = if self.from.layout.has_partial() { small_ints } else { ordinary };
        make(self.from.dtype, &self.from.shape, self.salt)
    }
}

impl fmt::Debug for Crossing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let over = |s: &Spec| format!("{s} over {:?}", s.mesh.ranks().collect::<Vec<_>>());
        write!(f, "{} to {} (values {})", over(&self.from), over(&self.to), self.salt)
    }
}

/// Sends all tensors over one bridge, twice.
fn run(world: usize, from: &Mesh, to: &Mesh, crossings: Vec<Crossing>) -> std::result::Result<(), String> {
    let (from, to, given) = (from.clone(), to.clone(), crossings.clone());
    let sent = spmd(world, move |rank| check(&rank, &from, &to, &given)).map_err(|e| e.to_string())?;
    let mut all = Vec::new();
    for (found, sent) in sent {
        if let Some(found) = found {
            return Err(found);
        }
        all.push(sent);
    }
    match &crossings[..] {
        [one] if !one.from.layout.has_partial() => shared(one, &all),
        _ => Ok(()),
    }
}

fn check(rank: &Rank, from: &Mesh, to: &Mesh, crossings: &[Crossing]) -> Result<(Option<String>, u64)> {
    let me = rank.rank();
    if !from.contains(me) && !to.contains(me) {
        return Ok((None, 0));
    }
    let bridge = Bridge::new(rank, from, to, crossings.iter().map(Crossing::transfer))?;
    let ends = Ends::new(rank, from, to)?;
    let mut sources = Vec::new();
    for c in crossings {
        sources.extend(ends.from.as_ref().map(|m| spread(m, &c.whole(), &c.from, c.salt)).transpose()?);
    }
    let lacking: usize = crossings.iter().map(|c| lacking(c, me) * c.from.dtype.size_bytes()).sum();
    let partial = crossings.iter().any(|c| c.from.layout.has_partial());
    for round in 0..2 {
        let before = ends.to.as_ref().map_or(0, DeviceMesh::received_bytes);
        let arrived = bridge.send(&sources, ends.to.as_ref())?;
        let received = ends.to.as_ref().map_or(0, DeviceMesh::received_bytes) - before;
        if ends.to.is_some() != (arrived.len() == crossings.len()) {
            return Ok((Some(format!("rank {me} got {} tensors", arrived.len())), 0));
        }
        for (c, got) in crossings.iter().zip(&arrived) {
            let coords = to.coords_of(me).expect("a member");
            let want = part_of(&c.whole(), &c.to, &coords, c.salt);
            if let Some(how) = bits_differ(got.local(), &want) {
                return Ok((Some(format!("rank {me}, round {round}, {c:?}: {how}")), 0));
            }
        }
        if received != bridge.received_bytes() || (!partial && received != lacking as u64) {
            let how =
                format!("rank {me} receives {received}, plans {}, lacks {lacking}", bridge.received_bytes());
            return Ok((Some(how), 0));
        }
    }
    Ok((None, bridge.sent_bytes()))
}

/// Counts, one by one, the elements of its target shard that a rank does not hold.
fn lacking(c: &Crossing, rank: usize) -> usize {
    let held = held(&c.from, rank);
    held_len(&held_not(&self::held(&c.to, rank), &held))
}

fn held(spec: &Spec, rank: usize) -> Vec<bool> {
    let mut held = vec![false; spec.shape.numel()];
    if let Some(coords) = spec.mesh.coords_of(rank) {
        let region = spec.region_at(&coords);
        region.runs(&spec.shape, |at, _, len| held[at as usize..at as usize + len].fill(true));
    }
    held
}

fn held_not(these: &[bool], others: &[bool]) -> Vec<bool> {
    these.iter().zip(others).map(|(a, b)| *a && !*b).collect()
}

fn held_len(held: &[bool]) -> usize {
    held.iter().filter(|h| **h).count()
}

/// Checks that replicas of a shard each send the mean of what receivers lack of it, up to the largest piece.
fn shared(c: &Crossing, sent: &[u64]) -> std::result::Result<(), String> {
    let size = c.from.dtype.size_bytes() as u64;
    let mut cells: BTreeMap<Vec<bool>, Vec<usize>> = BTreeMap::new();
    for rank in c.from.mesh.ranks() {
        cells.entry(held(&c.from, rank)).or_default().push(rank);
    }
    for (cell, holders) in cells {
        let lacks = |rank: usize| {
            let wanted = held_not(&held(&c.to, rank), &held(&c.from, rank));
            wanted.iter().zip(&cell).filter(|(w, h)| **w && **h).count() as u64
        };
        let lacked: Vec<u64> = c.to.mesh.ranks().map(lacks).collect();
        let largest = lacked.iter().max().copied().unwrap_or(0);
        let most = holders.iter().map(|&r| sent[r] / size).max().unwrap_or(0);
        let mean = lacked.iter().sum::<u64>().div_ceil(holders.len() as u64);
        let total: u64 = holders.iter().map(|&r| sent[r] / size).sum();
        if total != lacked.iter().sum::<u64>() || most > mean + largest {
            return Err(format!(
                "{c:?}: {holders:?} send at most {most}, in all {total}; others lack {lacked:?}"
            ));
        }
    }
    Ok(())
}

fn layout(text: &str) -> Layout {
    text.parse().expect("a layout")
}

//! The routing of one tensor between two meshes: each rank computes from shared metadata what it sends to and
//! receives from which ranks.
//!
//! The mesh axes that split the source tensor make distinct *shards*; along the other axes, ranks hold *replicas* of
//! each shard. A receiver lacks the part of each shard that its target region contains, except of its own shard.
//! Shards are independent of each other, so a rank plans only the shard that it holds and those from which it lacks
//! something.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::bridge_piece::{BridgePiece, is_box};
use crate::placement::{Region, Spec};
use crate::tensor::{Dims, Shape, sort_by_key};

/// The smallest size in bytes to which a piece is split so that two replicas can send it.
const CUT_BYTES: usize = 64 << 10;

/// The pieces of a tensor that one rank sends, receives and keeps.
#[derive(Debug, Default)]
pub(super) struct Routing {
    /// The pieces to send, with the receiving ranks.
    pub give: Vec<(usize, BridgePiece)>,
    /// The pieces to receive, with the sending ranks.
    pub take: Vec<(usize, BridgePiece)>,
    /// The piece of its target region that the rank holds already, if it is in both meshes.
    pub keep: Option<BridgePiece>,
    /// True if that piece is the whole target region and is stored as the target requires.
    pub stays: bool,
}

/// The part of a shard that one receiver lacks.
struct Demand<'a> {
    to: usize,
    /// The index of the replica nearest to the receiver, if the receiver is in the source mesh.
    nearest: Option<usize>,
    piece: Cow<'a, BridgePiece>,
}

impl Routing {
    /// Computes the routing of rank `me` from `src` to `dst`. `turn` varies the order in which replicas are loaded,
    /// so that different tensors load different replicas.
    pub fn new(src: &Spec, dst: &Spec, me: usize, turn: usize) -> Routing {
        let (source, target) = (DistinctShards::new(src), DistinctShards::new(dst));
        let wanted: Vec<(Region, Vec<usize>)> =
            target.all().map(|shard| (dst.region_at(&shard), target.replicas(&shard))).collect();
        let own = source.of(me);
        let mine = target.of(me).map(|shard| dst.region_at(&shard));
        let mut routing = Routing::default();
        for shard in source.all() {
            let is_own = own.as_ref() == Some(&shard);
            let held = src.region_at(&shard);
            let common = mine.as_ref().and_then(|mine| BridgePiece::new(&held, mine));
            if !is_own && common.is_none() {
                continue;
            }
            let replicas = source.replicas(&shard);
            if let [replica] = replicas[..]
                && !is_own
            {
                // A shard without further replicas: what other receivers lack of it does not matter here.
                routing.take.extend(common.map(|piece| (replica, piece)));
                continue;
            }
            let part = is_box(&held).then_some(&held.local);
            let pieces: Vec<(BridgePiece, &[usize])> = wanted
                .iter()
                .filter_map(|(region, ranks)| Some((BridgePiece::new(&held, region)?, &ranks[..])))
                .collect();
            let least = CUT_BYTES / src.dtype.size_bytes();
            for (replica, to, piece) in
                share(source.demands(&shard, &pieces), replicas.len(), turn, least, part)
            {
                if to == me {
                    routing.take.push((replicas[replica], piece.into_owned()));
                } else if replicas[replica] == me {
                    routing.give.push((to, piece.into_owned()));
                }
            }
            if let (true, Some(mine)) = (is_own, &mine) {
                routing.stays = common.as_ref().is_some_and(|piece| piece.is_all_of(&held, mine));
                routing.keep = common;
            }
        }
        routing
    }
}

/// The distinct shards of a tensor without `Partial`; a shard is named by the coordinates of its first replica.
struct DistinctShards<'a> {
    spec: &'a Spec,
    /// The axes along which ranks hold the same elements.
    copies: Vec<usize>,
}

impl<'a> DistinctShards<'a> {
    fn new(spec: &'a Spec) -> DistinctShards<'a> {
        let copies = (0..spec.mesh.ndim()).filter(|&a| spec.layout.axis(a).is_replicate()).collect();
        DistinctShards { spec, copies }
    }

    /// Returns the coordinates of the first replica of each shard.
    fn all(&self) -> impl Iterator<Item = Dims> + '_ {
        let coords = self.spec.mesh.ranks().map(|r| self.spec.mesh.coords_of(r).expect("a mesh's own rank"));
        coords.filter(|c| self.copies.iter().all(|&a| c[a] == 0))
    }

    /// Returns the shard that `rank` holds, if it is in the mesh.
    fn of(&self, rank: usize) -> Option<Dims> {
        let mut coords = self.spec.mesh.coords_of(rank)?;
        self.copies.iter().for_each(|&a| coords[a] = 0);
        Some(coords)
    }

    /// Returns the ranks that hold this shard.
    fn replicas(&self, shard: &[usize]) -> Vec<usize> {
        let mesh = &self.spec.mesh;
        let first = mesh.seen_from(mesh.rank_at(shard)).expect("a mesh's own rank");
        first.slice(&self.copies).ranks().collect()
    }

    /// Returns what the receivers lack of a shard, given the pieces that each group of receivers needs.
    fn demands<'p>(&self, shard: &Dims, pieces: &'p [(BridgePiece, &[usize])]) -> Vec<Demand<'p>> {
        let mesh = &self.spec.mesh;
        let mut demands = Vec::new();
        for (piece, ranks) in pieces {
            for &to in *ranks {
                let coords = mesh.coords_of(to);
                let is_cut = |a: &usize| !self.copies.contains(a);
                if coords.as_ref().is_some_and(|c| (0..c.len()).filter(is_cut).all(|a| c[a] == shard[a])) {
                    continue;
                }
                // The replica with the receiver's own coordinates along the replicated axes.
                let place = |c: &Dims| self.copies.iter().fold(0, |h, &a| h * mesh.axis_len(a) + c[a]);
                let nearest = coords.as_ref().map(place);
                demands.push(Demand { to, nearest, piece: Cow::Borrowed(piece) });
            }
        }
        demands
    }
}

/// Distributes demands among `replicas`; each replica could fulfil all of them: (replica, receiver, piece). Each replica
/// sends the mean, up to one piece; pieces larger than `least` elements are split, so that the load differs by at
/// most a row. First the nearest replicas take pieces up to the mean; then each remaining piece goes to the replica
/// with most room, and is split if that is not enough (as in McNaughton's rule for preemptive schedules, 1959).
fn share<'a>(
    demands: Vec<Demand<'a>>,
    replicas: usize,
    turn: usize,
    least: usize,
    part: Option<&Shape>,
) -> Vec<(usize, usize, Cow<'a, BridgePiece>)> {
    if replicas == 1 {
        return demands.into_iter().map(|d| (0, d.to, d.piece)).collect();
    }
    let total: usize = demands.iter().map(|d| d.piece.numel()).sum();
    let mut room = vec![total.div_ceil(replicas) as isize; replicas];
    let mut shared = Vec::with_capacity(demands.len());
    let mut rest = Vec::new();
    for Demand { to, nearest, piece } in demands {
        let Some(h) = nearest else {
            rest.push((to, piece));
            continue;
        };
        let (now, later) = within(piece, room[h], least, part);
        if let Some(piece) = now {
            room[h] -= piece.numel() as isize;
            shared.push((h, to, piece));
        }
        rest.extend(later.map(|piece| (to, piece)));
    }
    // Largest first: small pieces fill the room that large ones leave.
    sort_by_key(&mut rest, |(_, piece)| Reverse(piece.numel()));
    let after = |h: usize| (h + replicas - turn % replicas) % replicas;
    let mut most: BinaryHeap<(isize, Reverse<usize>, usize)> =
        room.into_iter().enumerate().map(|(h, room)| (room, Reverse(after(h)), h)).collect();
    for (to, piece) in rest {
        let mut left = Some(piece);
        while let Some(piece) = left.take() {
            let (room, turn, h) = most.pop().expect("a shard has replicas");
            let (now, later) = match within(piece, room, least, part) {
                (None, whole) => (whole, None),
                cut => cut,
            };
            let piece = now.expect("a piece goes somewhere");
            most.push((room - piece.numel() as isize, turn, h));
            shared.push((h, to, piece));
            left = later;
        }
    }
    shared
}

/// A piece, or `None` if it would be empty.
type MaybePiece<'a> = Option<Cow<'a, BridgePiece>>;

/// Splits a piece into the part that fits into `room` and the rest. Neither part is smaller than `least`; a piece
/// that cannot be split so stays whole.
fn within<'a>(
    piece: Cow<'a, BridgePiece>,
    room: isize,
    least: usize,
    part: Option<&Shape>,
) -> (MaybePiece<'a>, MaybePiece<'a>) {
    let (len, room) = (piece.numel(), room.max(0) as usize);
    if len <= room {
        return (Some(piece), None);
    }
    if room < least || len - room < least {
        return (None, Some(piece));
    }
    match piece.split(room, part) {
        Some((now, later)) => (Some(Cow::Owned(now)), Some(Cow::Owned(later))),
        None => (None, Some(piece)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Mesh;
    use crate::tensor::DType;

    /// Returns what each rank sends, in elements, to bring `from` on ranks `0..a` to `to` on other ranks.
    fn sent(
        from: (&str, usize),
        to: (&str, std::ops::Range<usize>),
        shape: &[usize],
        turn: usize,
    ) -> Vec<usize> {
        let spec = |layout: &str, ranks: std::ops::Range<usize>| {
            let mesh = Mesh::over(&[("r", 2), ("c", ranks.len() / 2)], ranks).unwrap();
            Spec::new(&mesh, DType::F32, shape, layout.parse().unwrap()).unwrap()
        };
        let (src, dst) = (spec(from.0, 0..from.1), spec(to.0, to.1));
        let of = |r| Routing::new(&src, &dst, r, turn).give.iter().map(|(_, p)| p.numel()).sum();
        (0..from.1).map(of).collect()
    }

    #[test]
    fn replicas_share_large_pieces_by_rows_and_small_ones_whole() {
        let large = sent(("(R, R)", 6), ("(R, R)", 6..8), &[1200, 100], 0);
        assert_eq!(large, [40_000; 6], "two wholes by six");
        let odd = sent(("(R, R)", 4), ("(R, R)", 6..8), &[1201, 101], 0);
        assert_eq!(odd.iter().sum::<usize>(), 2 * 1201 * 101);
        assert!(odd.iter().all(|n| n.abs_diff(1201 * 101 / 2) <= 101 * 2), "{odd:?}");
        let small = sent(("(R, R)", 4), ("(S0, S1)", 6..10), &[5, 3], 1);
        assert_eq!(small, [2, 6, 4, 3], "four pieces of 6, 3, 4 and 2, by turns");
    }

    #[test]
    fn the_nearest_replica_is_asked_first() {
        // Ranks 0 and 1 hold the two halves, and so do 2 and 3; each asks the neighbour in its own replica.
        let mesh = Mesh::over(&[("r", 2), ("c", 2)], 0..4).unwrap();
        let spec = |text: &str| Spec::new(&mesh, DType::F32, [8], text.parse().unwrap()).unwrap();
        for (me, neighbour) in [(0, 1), (1, 0), (2, 3), (3, 2)] {
            let routing = Routing::new(&spec("(R, S0)"), &spec("(R, R)"), me, 0);
            let others =
                |list: &[(usize, BridgePiece)]| list.iter().map(|(r, p)| (*r, p.numel())).collect::<Vec<_>>();
            assert_eq!(others(&routing.take), [(neighbour, 4)]);
            assert_eq!(others(&routing.give), [(neighbour, 4)]);
            assert!(routing.keep.is_some_and(|p| p.numel() == 4) && !routing.stays);
            assert!(Routing::new(&spec("(R, S0)"), &spec("(R, S0)"), me, 0).stays);
        }
    }
}

//! One exchange: every rank receives exactly what it lacks, from whoever holds it.

use smallvec::SmallVec;

use super::device_mesh::DeviceMesh;
use crate::comm::{Group, Pending};
use crate::error::Result;
use crate::placement::{Layout, Overlap, Placement, Region, Spec};
use crate::tensor::{Dims, Shape, Tensor};

/// A planned exchange, as one rank takes part in it.
#[derive(Debug)]
pub(super) struct Exchange {
    pub group: Group,
    /// What each member gets of mine; none where everybody gets all of it.
    pub give: Option<Vec<Piece>>,
    /// What I get of each member's, with the shapes that arrive.
    take: Vec<Piece>,
    shapes: Vec<Shape>,
    pub out: Shape,
    /// The elements that come from others, and their size.
    pub received_len: usize,
    pub size_bytes: usize,
    /// The number of nodes of a sum in parts that move, each by an exchange; 1 for all else.
    pub nodes: usize,
}

/// The elements that one rank's part has in common with another's.
#[derive(Debug)]
pub(super) struct Piece {
    overlaps: SmallVec<[Overlap; 1]>,
    /// The box inside the giver's part, where it is one: then a view is given. Otherwise the elements are packed.
    view: Option<(Dims, Dims)>,
}

/// The axes of `cur` whose cut is not, together with every cut outside it, also the outermost of `mid`: along these
/// ranks must talk, and along no others.
pub(super) fn talking_axes(cur: &Layout, mid: &Layout, ndim: usize) -> Vec<usize> {
    let mut axes: Vec<usize> = (0..ndim)
        .flat_map(|d| {
            let (old, new) = (cuts(cur, d), cuts(mid, d));
            let same = old.iter().zip(&new).take_while(|(o, n)| o == n).count();
            old[same..].iter().map(|(a, _)| *a).collect::<Vec<_>>()
        })
        .collect();
    // A ragged cut over several dims depends on every cut of each of them.
    for a in 0..cur.placements().len() {
        let dims = if cur.ragged_axis() == Some(a) { cur.axis(a).split_dims() } else { 0..0 };
        if dims.into_iter().any(|d| cuts(cur, d).iter().any(|(b, _)| axes.contains(b))) {
            axes.push(a);
        }
    }
    axes.sort_unstable();
    axes.dedup();
    axes
}

/// The exchange after which this mesh holds `mid` instead of `cur`, which differs in cuts only.
pub(super) fn exchange(mesh: &DeviceMesh, cur: &Spec, mid: &Spec) -> Result<Exchange> {
    let axes = talking_axes(&cur.layout, &mid.layout, cur.shape.len());
    let group = mesh.group(&axes)?;
    let coords = members(mesh, &axes);
    let (mine, wanted) = (cur.region(), mid.region());
    let take: Vec<Piece> = coords.iter().map(|c| Piece::new(&cur.region_at(c), &wanted)).collect();
    debug_assert_eq!(take.iter().map(Piece::numel).sum::<usize>(), wanted.numel(), "{cur} to {mid}");
    // Whether everybody wants everything is decided from the layouts, so that all ranks decide alike.
    let gathers = !axes.is_empty() && axes.iter().all(|&a| *mid.layout.axis(a) == Placement::Replicate);
    let new_cuts = (0..mid.mesh.ndim())
        .any(|a| *mid.layout.axis(a) != *cur.layout.axis(a) && *mid.layout.axis(a) != Placement::Replicate);
    let (give, shapes) = if gathers && !new_cuts {
        (None, coords.iter().map(|c| cur.region_at(c).local).collect())
    } else {
        let give = coords.iter().map(|c| Piece::new(&mine, &mid.region_at(c))).collect();
        (Some(give), take.iter().map(Piece::shape).collect())
    };
    let others =
        take.iter().enumerate().filter(|(i, _)| *i != group.index()).map(|(_, p)| p.numel()).sum::<usize>();
    let (received_len, size_bytes) = (others, cur.stored_dtype().size_bytes());
    let nodes = cur.nodes_len_at(cur.mesh.coords());
    Ok(Exchange { group, give, take, shapes, out: mid.local_shape(), received_len, size_bytes, nodes })
}

impl Exchange {
    pub fn run(&self, local: &Tensor) -> Result<Tensor> {
        if self.group.len() == 1 {
            return self.take[0].cut(local)?.reshape(self.out.clone());
        }
        self.assemble(&self.start(local)?.wait()?, local)
    }

    pub fn start(&self, local: &Tensor) -> Result<Pending<Vec<Tensor>>> {
        match &self.give {
            None => Ok(self.group.all_gather_async(local, &self.shapes)),
            Some(give) => {
                let parts = give.iter().map(|p| p.cut(local)).collect::<Result<_>>()?;
                Ok(self.group.all_to_all_async(parts, &self.shapes))
            }
        }
    }

    pub fn assemble(&self, parts: &[Tensor], local: &Tensor) -> Result<Tensor> {
        let mut out = Tensor::stale_on(local.device(), local.dtype(), self.out.clone())?;
        for (piece, part) in self.take.iter().zip(parts) {
            // Of a gathered part the piece is a cut; of an exchanged one it is all.
            let part = if self.give.is_none() { piece.cut(part)? } else { part.clone() };
            piece.paste(&part, &mut out)?;
        }
        Ok(out)
    }
}

impl Piece {
    pub fn new(giver: &Region, taker: &Region) -> Piece {
        let overlaps: SmallVec<[Overlap; 1]> = giver.intersect(taker).into_iter().collect();
        let plain =
            giver.boxes.len() == 1 && overlaps.len() == 1 && giver.local[..] == giver.boxes[0].len[..];
        let view = plain.then(|| {
            let o = &overlaps[0];
            let start = giver
                .local
                .strides()
                .iter()
                .zip(giver.local.iter())
                .map(|(s, n)| o.a_offset / s % n)
                .collect();
            (start, o.len.clone())
        });
        Piece { overlaps, view }
    }

    pub fn numel(&self) -> usize {
        self.overlaps.iter().map(|o| o.len.iter().product::<usize>()).sum()
    }

    /// The shape in which the piece travels.
    pub fn shape(&self) -> Shape {
        match &self.view {
            Some((_, len)) => len.clone().into(),
            None => [self.numel()].into(),
        }
    }

    /// The piece of `local`: a view where it is one box, else packed.
    pub fn cut(&self, local: &Tensor) -> Result<Tensor> {
        if let Some((start, len)) = &self.view {
            return (0..len.len()).try_fold(local.clone(), |t, d| t.narrow(d, start[d], len[d]));
        }
        let local = local.contiguous()?;
        let mut out = Tensor::stale_on(local.device(), local.dtype(), self.shape())?;
        let mut at = 0;
        for o in &self.overlaps {
            let strides = Shape::from(o.len.clone()).strides();
            local.copy_block(&mut out, &o.len, (o.a_offset, &o.a_strides), (at, &strides))?;
            at += o.len.iter().product::<usize>();
        }
        Ok(out)
    }

    /// The piece of each of `nodes` tensors, stacked unless there is one, as it travels.
    pub fn cut_nodes(&self, local: &Tensor, nodes: usize) -> Result<Tensor> {
        if nodes == 1 {
            return self.cut(local);
        }
        let cuts: Vec<Tensor> = (0..nodes).map(|i| self.cut(&local.select(0, i)?)).collect::<Result<_>>()?;
        Tensor::stack(&cuts, &self.shape(), local.dtype(), local.device())
    }

    /// Writes what `cut` made into the taker's part.
    fn paste(&self, part: &Tensor, out: &mut Tensor) -> Result<()> {
        let mut at = 0;
        for o in &self.overlaps {
            let packed = Shape::from(o.len.clone()).strides();
            let strides = if self.view.is_some() { part.strides() } else { &packed };
            part.copy_block(out, &o.len, (at, strides), (o.b_offset, &o.b_strides))?;
            at += o.len.iter().product::<usize>();
        }
        Ok(())
    }
}

/// The coordinates of the ranks that differ from this one along `axes` only, in group order.
pub(super) fn members(mesh: &DeviceMesh, axes: &[usize]) -> Vec<Dims> {
    let m = mesh.mesh();
    m.slice(axes).ranks().map(|r| m.coords_of(r).expect("a sub-mesh's ranks are in the mesh")).collect()
}

/// The axes that cut dim `d`, outermost first, with what they do.
pub(super) fn cuts(layout: &Layout, d: usize) -> Vec<(usize, &Placement)> {
    let cut = |&a: &usize| match layout.axis(a) {
        Placement::Shard(dim) => *dim == d,
        Placement::RaggedShard { dims, .. } => d < *dims,
        _ => false,
    };
    layout.order().iter().copied().filter(cut).map(|a| (a, layout.axis(a))).collect()
}

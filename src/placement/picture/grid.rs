//! The grid that a picture of a layout shows: rows and columns of cells, each stored by one set of ranks.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::placement::{Layout, Mesh, Placement, Region, Spec};
use crate::tensor::{DType, ReduceOp, Shape};

/// Meshes of more ranks are not drawn.
const DRAWN_RANKS: usize = 64;

/// The content of a picture.
pub(super) struct LayoutPicture {
    /// The notation of tensor and mesh.
    pub caption: String,
    /// `None` if nothing is drawn.
    pub grid: Option<LayoutGrid>,
    /// Lines below the grid.
    pub notes: Vec<String>,
}

/// A grid of cells, each stored by one set of ranks.
pub(super) struct LayoutGrid {
    /// The first indices of the rows and of the columns of cells, and the end.
    pub rows: Vec<usize>,
    pub columns: Vec<usize>,
    /// The dim whose indices the rows are; `None` if there is one row without a name.
    pub row_dim: Option<usize>,
    /// The dim whose indices the columns are; `None` if there is one column without a name.
    pub column_dim: Option<usize>,
    /// The ranks of the cells, row by row.
    pub cells: Vec<Vec<CellRanks>>,
    /// The operation of the layout's `Partial` axes.
    partial: Option<ReduceOp>,
}

/// The ranks that store a cell: a list of replicas. A replica is the list of the ranks that contribute to it, one rank if
/// no axis is `Partial`.
pub(super) type CellRanks = Vec<Vec<usize>>;

impl Layout {
    /// Returns a spec of this layout for a picture, and its notation without a dtype.
    pub(super) fn without_dtype(&self, mesh: &Mesh, shape: Shape) -> Result<(Spec, String)> {
        let spec = Spec::new(mesh, DType::F32, shape, self.clone())?;
        let name = spec.to_string();
        Ok((spec, name.trim_start_matches("f32").to_string()))
    }
}

impl LayoutPicture {
    /// Returns the picture of a tensor; `name` is its notation.
    pub fn of(spec: &Spec, name: &str) -> LayoutPicture {
        let caption = format!("{name} on {}", spec.mesh);
        let nothing = |why: String| LayoutPicture { caption: caption.clone(), grid: None, notes: vec![why] };
        if spec.mesh.rank_len() > DRAWN_RANKS {
            return nothing(format!("not drawn: more than {DRAWN_RANKS} ranks"));
        }
        if spec.shape.contains(&0) {
            return nothing("no elements".into());
        }
        let drawn = drawn_dims(spec);
        let mut notes = Vec::new();
        let hidden = |dim: &usize| !drawn.contains(dim) && spec.layout.splitters(*dim).next().is_some();
        let hidden: Vec<String> = (0..spec.shape.len()).filter(hidden).map(|dim| dim.to_string()).collect();
        if !hidden.is_empty() {
            notes.push(format!("also split: dim {} (index 0 is drawn)", hidden.join(" and dim ")));
        }
        let idle: Vec<usize> = spec.mesh.ranks().filter(|rank| region_of(spec, *rank).is_empty()).collect();
        match idle.len() {
            0 => {}
            1 => notes.push(format!("rank {} stores nothing", idle[0])),
            _ => notes.push(format!("ranks {} store nothing", list(&idle, ", "))),
        }
        LayoutPicture { caption, grid: Some(LayoutGrid::of(spec, &drawn)), notes }
    }
}

impl LayoutGrid {
    fn of(spec: &Spec, drawn: &[usize]) -> LayoutGrid {
        // A vector is drawn as a row, a single element as a cell.
        let (row_dim, column_dim) = match drawn {
            [] => (None, None),
            [dim] => (None, Some(*dim)),
            [row, column, ..] => (Some(*row), Some(*column)),
        };
        let mut boxes = Vec::new();
        for rank in spec.mesh.ranks() {
            for b in region_of(spec, rank).boxes {
                let in_picture = (0..spec.shape.len()).all(|d| drawn.contains(&d) || b.start[d] == 0);
                let range = |dim: Option<usize>| dim.map_or(0..1, |d| b.start[d]..b.start[d] + b.len[d]);
                boxes.extend(in_picture.then(|| (rank, range(row_dim), range(column_dim))));
            }
        }
        let cuts = |ranges: Vec<&std::ops::Range<usize>>| {
            let mut cuts: Vec<usize> = ranges.into_iter().flat_map(|r| [r.start, r.end]).collect();
            cuts.sort_unstable();
            cuts.dedup();
            cuts
        };
        let rows = cuts(boxes.iter().map(|(_, rows, _)| rows).collect());
        let columns = cuts(boxes.iter().map(|(_, _, columns)| columns).collect());
        let ranks_of = |row: usize, column: usize| {
            let here =
                boxes.iter().filter(|(_, rows, columns)| rows.contains(&row) && columns.contains(&column));
            let mut ranks: Vec<usize> = here.map(|(rank, ..)| *rank).collect();
            ranks.sort_unstable();
            replicas(spec, &ranks)
        };
        let row = |row: &usize| columns[..columns.len() - 1].iter().map(|c| ranks_of(*row, *c)).collect();
        let cells = rows[..rows.len() - 1].iter().map(row).collect();
        let partial = spec.layout.placements().iter().find_map(partial_op);
        LayoutGrid { rows, columns, row_dim, column_dim, cells, partial }
    }

    /// Returns the label of a cell: replicas side by side, contributions to a `Partial` value joined by its operation.
    pub fn label(&self, cell: &CellRanks) -> String {
        let Some(op) = self.partial else {
            let mut ranks = cell.concat();
            ranks.sort_unstable();
            return list(&ranks, ", ");
        };
        let replicas = cell.iter().map(|ranks| match op {
            ReduceOp::Sum => list(ranks, "+"),
            ReduceOp::Max | ReduceOp::Min => format!("{op}({})", list(ranks, ", ")),
        });
        replicas.collect::<Vec<_>>().join(", ")
    }
}

/// Returns the dims to draw, ascending: the first two that are split, filled up with the first others.
fn drawn_dims(spec: &Spec) -> Vec<usize> {
    let dims = 0..spec.shape.len();
    let split = |dim: &usize| spec.layout.splitters(*dim).next().is_some();
    let mut drawn: Vec<usize> =
        dims.clone().filter(split).chain(dims.filter(|d| !split(d))).take(2).collect();
    drawn.sort_unstable();
    drawn
}

fn region_of(spec: &Spec, rank: usize) -> Region {
    spec.region_at(&spec.mesh.coords_of(rank).expect("a rank of the mesh"))
}

/// Groups the ranks of a cell by the value to which they contribute.
fn replicas(spec: &Spec, ranks: &[usize]) -> CellRanks {
    let mut groups: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
    for &rank in ranks {
        let mut coords = spec.mesh.coords_of(rank).expect("a rank of the mesh").to_vec();
        for (coord, placement) in coords.iter_mut().zip(spec.layout.placements()) {
            if partial_op(placement).is_some() {
                *coord = 0;
            }
        }
        groups.entry(coords).or_default().push(rank);
    }
    groups.into_values().collect()
}

fn partial_op(placement: &Placement) -> Option<ReduceOp> {
    match placement {
        Placement::Partial(op) => Some(*op),
        Placement::Replicate | Placement::Shard(_) | Placement::RaggedShard { .. } => None,
    }
}

/// Returns the indices of interval `i` between the cuts: `3-4`, or `3`.
pub(super) fn range_text(cuts: &[usize], i: usize) -> String {
    indices_text(cuts[i], cuts[i + 1])
}

/// Returns the indices `start..end` as text.
pub(super) fn indices_text(start: usize, end: usize) -> String {
    if start + 1 == end { start.to_string() } else { format!("{start}-{}", end - 1) }
}

/// Returns ranks in a list, shortened if there are many at equal distances.
fn list(ranks: &[usize], between: &str) -> String {
    let step = |pair: &[usize]| pair[1] - pair[0];
    let regular = ranks.windows(2).all(|pair| step(pair) == step(&ranks[..2]));
    if ranks.len() > 4 && regular {
        let last = ranks[ranks.len() - 1];
        return format!("{}{between}{}{between}..{between}{last}", ranks[0], ranks[1]);
    }
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(between)
}

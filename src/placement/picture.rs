//! Layouts as pictures in text.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::{Placement, Region, Spec};
use crate::tensor::ReduceOp;

/// Meshes of more ranks are not drawn.
const DRAWN_RANKS: usize = 64;
/// A drawn dim of at most this many indices takes a line, or two columns, per index.
const DRAWN_TO_SCALE: usize = 8;

impl Spec {
    /// Draws which ranks store which elements.
    ///
    /// Each box is a block of elements, and the numbers in it are the ranks that store it: `0, 1` are two replicas,
    /// `0+1` are two `Partial` contributions whose sum is the value (`max(0, 1)` for a maximum). The ranges at the
    /// edges are indices. The picture has two dims: those that the layout splits, and dim 0 and dim 1 otherwise. If
    /// more than two are split, it shows index 0 of the others, and a line below says so. A mesh of more than 64 ranks
    /// is not drawn: the text is the notation alone.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    ///
    /// let mesh = Mesh::parse("dp=2,tp=2", 0)?;
    /// let picture = "
    /// f32[5, 4]@(dp:S0, tp:S1) on (dp=2, tp=2)
    ///       0-1   2-3
    ///     ┌─────┬─────┐
    ///     │     │     │
    /// 0-2 │  0  │  1  │
    ///     │     │     │
    ///     ├─────┼─────┤
    /// 3-4 │  2  │  3  │
    ///     │     │     │
    ///     └─────┴─────┘
    /// ";
    /// assert_eq!(Spec::parse("f32[5, 4]@(dp:S0, tp:S1)", &mesh)?.draw(), picture.trim_start());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn draw(&self) -> String {
        let mut text = format!("{self} on {}\n", self.mesh);
        if self.mesh.rank_len() > DRAWN_RANKS {
            let _ = writeln!(text, "not drawn: more than {DRAWN_RANKS} ranks");
            return text;
        }
        if self.shape.contains(&0) {
            text.push_str("no elements\n");
            return text;
        }
        let drawn = self.drawn_dims();
        LayoutPicture::of(self, &drawn).write(&mut text);
        let hidden = |dim: &usize| !drawn.contains(dim) && self.layout.splitters(*dim).next().is_some();
        let hidden: Vec<String> = (0..self.shape.len()).filter(hidden).map(|dim| dim.to_string()).collect();
        if !hidden.is_empty() {
            let _ = writeln!(text, "also split: dim {} (index 0 is drawn)", hidden.join(" and dim "));
        }
        let idle = |rank: &usize| self.region_of(*rank).is_empty();
        let idle: Vec<usize> = self.mesh.ranks().filter(idle).collect();
        match idle.len() {
            0 => {}
            1 => _ = writeln!(text, "rank {} stores nothing", idle[0]),
            _ => _ = writeln!(text, "ranks {} store nothing", list(&idle, ", ")),
        }
        text
    }

    /// The dims to draw, ascending: the first two that are split, filled up with the first others.
    fn drawn_dims(&self) -> Vec<usize> {
        let dims = 0..self.shape.len();
        let split = |dim: &usize| self.layout.splitters(*dim).next().is_some();
        let mut drawn: Vec<usize> =
            dims.clone().filter(split).chain(dims.filter(|d| !split(d))).take(2).collect();
        drawn.sort_unstable();
        drawn
    }

    fn region_of(&self, rank: usize) -> Region {
        self.region_at(&self.mesh.coords_of(rank).expect("a rank of the mesh"))
    }

    /// The ranks of a cell as its label: replicas side by side, contributions to a `Partial` value joined by its
    /// operation.
    fn label(&self, ranks: &[usize]) -> String {
        let mut groups: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
        let mut op = None;
        for &rank in ranks {
            let mut coords = self.mesh.coords_of(rank).expect("a rank of the mesh").to_vec();
            for (coord, placement) in coords.iter_mut().zip(self.layout.placements()) {
                match placement {
                    Placement::Partial(reduction) => {
                        op = Some(*reduction);
                        *coord = 0;
                    }
                    Placement::Replicate | Placement::Shard(_) | Placement::RaggedShard { .. } => {}
                }
            }
            groups.entry(coords).or_default().push(rank);
        }
        let Some(op) = op else { return list(ranks, ", ") };
        let groups = groups.values().map(|ranks| match op {
            ReduceOp::Sum => list(ranks, "+"),
            ReduceOp::Max | ReduceOp::Min => format!("{op}({})", list(ranks, ", ")),
        });
        groups.collect::<Vec<_>>().join(", ")
    }
}

/// A grid of cells, each stored by one set of ranks.
struct LayoutPicture {
    /// The first indices of the rows and of the columns of cells, and the end.
    rows: Vec<usize>,
    columns: Vec<usize>,
    /// The labels of the cells, row by row.
    labels: Vec<Vec<String>>,
    /// True for rows and for columns if their cells show their range of indices.
    ranges: (bool, bool),
}

impl LayoutPicture {
    fn of(spec: &Spec, drawn: &[usize]) -> LayoutPicture {
        // A vector is drawn as a row, a single element as a cell.
        let (row_dim, column_dim) = match drawn {
            [] => (None, None),
            [dim] => (None, Some(*dim)),
            [row, column, ..] => (Some(*row), Some(*column)),
        };
        let mut boxes = Vec::new();
        for rank in spec.mesh.ranks() {
            for b in spec.region_of(rank).boxes {
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
        let label = |row: usize, column: usize| {
            let here =
                boxes.iter().filter(|(_, rows, columns)| rows.contains(&row) && columns.contains(&column));
            let mut ranks: Vec<usize> = here.map(|(rank, ..)| *rank).collect();
            ranks.sort_unstable();
            spec.label(&ranks)
        };
        let cells =
            |row: &usize| columns[..columns.len() - 1].iter().map(|column| label(*row, *column)).collect();
        let labels = rows[..rows.len() - 1].iter().map(cells).collect();
        LayoutPicture { rows, columns, labels, ranges: (row_dim.is_some(), column_dim.is_some()) }
    }

    fn write(&self, text: &mut String) {
        let heights = drawn_lens(&self.rows, 1);
        let mut widths = drawn_lens(&self.columns, 2);
        for (c, width) in widths.iter_mut().enumerate() {
            let labels = self.labels.iter().map(|row| row[c].chars().count());
            let range = if self.ranges.1 { range_text(&self.columns, c).len() } else { 0 };
            *width = labels.chain([range]).max().unwrap_or(0).max(*width - 1) + 2;
        }
        let side = |r: usize| if self.ranges.0 { range_text(&self.rows, r) } else { String::new() };
        let side_len = (0..heights.len()).map(|r| side(r).len()).max().unwrap_or(0);
        let margin = if side_len == 0 { String::new() } else { " ".repeat(side_len + 1) };
        let mut line = |left: &str, inner: &str| {
            text.push_str(format!("{left}{inner}").trim_end());
            text.push('\n');
        };
        if self.ranges.1 {
            let ranges =
                (0..widths.len()).map(|c| format!("{:^1$}", range_text(&self.columns, c), widths[c]));
            line(&margin, &format!(" {}", ranges.collect::<Vec<_>>().join(" ")));
        }
        for r in 0..=heights.len() {
            line(&margin, &self.border(r, &widths));
            let Some(&height) = heights.get(r) else { break };
            for i in 0..height {
                let middle = i == (height - 1) / 2;
                let mut inner = String::new();
                for c in 0..=widths.len() {
                    inner.push(if self.is_edge((r, c), (r, c.wrapping_sub(1))) { '│' } else { ' ' });
                    let Some(&width) = widths.get(c) else { break };
                    let label = if middle { self.labels[r][c].as_str() } else { "" };
                    let _ = write!(inner, "{label:^width$}");
                }
                let left = if middle { side(r) } else { String::new() };
                let left = if side_len == 0 { left } else { format!("{left:>side_len$} ") };
                line(&left, &inner);
            }
        }
    }

    /// The line above row `r` of cells.
    fn border(&self, r: usize, widths: &[usize]) -> String {
        let above = r.wrapping_sub(1);
        let mut border = String::new();
        for c in 0..=widths.len() {
            let before = c.wrapping_sub(1);
            let [left, right] = [before, c].map(|c| self.is_edge((above, c), (r, c)));
            let [up, down] = [above, r].map(|r| self.is_edge((r, before), (r, c)));
            let corners = [' ', '╶', '╴', '─', '╷', '┌', '┐', '┬', '╵', '└', '┘', '┴', '│', '├', '┤', '┼'];
            let bits =
                [right, left, down, up].iter().rev().fold(0, |bits, &edge| bits * 2 + usize::from(edge));
            border.push(corners[bits]);
            let Some(&width) = widths.get(c) else { break };
            border.extend(std::iter::repeat_n(if right { '─' } else { ' ' }, width));
        }
        border
    }

    /// True if a line separates two neighbouring cells; outside the grid there are none.
    fn is_edge(&self, a: (usize, usize), b: (usize, usize)) -> bool {
        let label = |(r, c): (usize, usize)| self.labels.get(r)?.get(c);
        label(a) != label(b)
    }
}

/// The lengths, in lines or columns, at which intervals between these cuts are drawn.
fn drawn_lens(cuts: &[usize], per_index: usize) -> Vec<usize> {
    let to_scale = cuts[cuts.len() - 1] - cuts[0] <= DRAWN_TO_SCALE;
    cuts.windows(2).map(|pair| if to_scale { (pair[1] - pair[0]) * per_index } else { per_index }).collect()
}

fn range_text(cuts: &[usize], i: usize) -> String {
    let (first, last) = (cuts[i], cuts[i + 1] - 1);
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

/// Ranks in a list, shortened if there are many at equal distances.
fn list(ranks: &[usize], between: &str) -> String {
    let step = |pair: &[usize]| pair[1] - pair[0];
    let regular = ranks.windows(2).all(|pair| step(pair) == step(&ranks[..2]));
    if ranks.len() > 4 && regular {
        let last = ranks[ranks.len() - 1];
        return format!("{}{between}{}{between}..{between}{last}", ranks[0], ranks[1]);
    }
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(between)
}

#[cfg(test)]
mod tests {
    use super::super::Mesh;
    use super::*;

    #[track_caller]
    fn draws(mesh: &str, spec: &str, want: &str) {
        let mesh = Mesh::parse(mesh, 0).unwrap();
        let drawn = Spec::parse(spec, &mesh).unwrap().draw();
        let want = format!("{spec} on {mesh}{want}\n");
        assert!(drawn == want, "drawn:\n{drawn}\nwant:\n{want}");
    }

    #[test]
    fn matrices() {
        let replicas = "
        0-3
    ┌─────────┐
    │         │
0-2 │  0, 1   │
    │         │
    ├─────────┤
3-4 │  2, 3   │
    │         │
    └─────────┘";
        draws("dp=2,tp=2", "f32[5, 4]@(dp:S0, tp:R)", replicas);
        let sums = "
        0-1        2-3
    ┌──────────┬──────────┐
    │          │          │
0-2 │ 0+1, 4+5 │ 2+3, 6+7 │
    │          │          │
    └──────────┴──────────┘";
        draws("dp=2,tp=2,sp=2", "f32[3, 4]@(dp:R, tp:S1, sp:P(sum))", sums);
    }

    /// In both orders, as in PyTorch issue 168134.
    #[test]
    fn nested_shards_of_a_vector() {
        let dp_first = "
  0-1   2   3   4
┌─────┬───┬───┬───┐
│  0  │ 1 │ 2 │ 3 │
└─────┴───┴───┴───┘";
        draws("dp=2,tp=2", "f32[5]@(dp:S0, tp:S0)", dp_first);
        let tp_first = "
  0-1   2   3   4
┌─────┬───┬───┬───┐
│  0  │ 2 │ 1 │ 3 │
└─────┴───┴───┴───┘";
        draws("dp=2,tp=2", "f32[5]@(dp:S0^1, tp:S0^0)", tp_first);
    }

    #[test]
    fn ragged_shards_and_ranks_that_store_nothing() {
        let rows = "
      0-1
    ┌─────┐
0-1 │  0  │
    │     │
    ├─────┤
  2 │  2  │
    ├─────┤
3-4 │  3  │
    │     │
    └─────┘
rank 1 stores nothing";
        draws("fsdp=4", "f32[5, 2]@(fsdp:RS(0..1; 2,0,1,2))", rows);
        // Half of the flattened elements ends within a row.
        let flat = "
    0-1   2-3
  ┌───────────┐
0 │  0     0  │
  │     ┌─────┤
1 │  0  │  1  │
  ├─────┘     │
2 │  1     1  │
  └───────────┘";
        draws("fsdp=2", "f32[3, 4]@(fsdp:RS(0..2; 1,1))", flat);
        draws("dp=4", "f32[1]@(dp:S0)", "\n  0\n┌───┐\n│ 0 │\n└───┘\nranks 1, 2, 3 store nothing");
    }

    #[test]
    fn other_numbers_of_dims() {
        draws("dp=2", "f32[]@(dp:P(max))", "\n┌───────────┐\n│ max(0, 1) │\n└───────────┘");
        draws("dp=8", "i64[]@(dp:R)", "\n┌─────────────┐\n│ 0, 1, .., 7 │\n└─────────────┘");
        draws("dp=2", "f32[0, 4]@(dp:S0)", "\nno elements");
        let last_dim = "
      0-8   9-17
    ┌─────┬──────┐
    │     │      │
0-2 │  0  │  1   │
    │     │      │
    └─────┴──────┘";
        draws("tp=2", "f32[3, 7, 18]@(tp:S2)", last_dim);
        let cut = "
    0   1
  ┌───┬───┐
0 │ 0 │ 2 │
  ├───┼───┤
1 │ 4 │ 6 │
  └───┴───┘
also split: dim 2 (index 0 is drawn)";
        draws("a=2,b=2,c=2", "f32[2, 2, 2]@(a:S0, b:S1, c:S2)", cut);
    }

    #[test]
    fn a_large_mesh_is_not_drawn() {
        draws("dp=65", "f32[65]@(dp:S0)", "\nnot drawn: more than 64 ranks");
    }
}

//! Pictures of layouts as text.

use std::fmt::Write;

use super::grid::{LayoutGrid, LayoutPicture, range_text};
use crate::error::Result;
use crate::placement::{Layout, Mesh, Spec};
use crate::tensor::Shape;

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
        write_text(&LayoutPicture::of(self, &self.to_string()))
    }
}

impl Layout {
    /// Draws which ranks of a mesh store which elements of a tensor of this shape: see [`Spec::draw`].
    ///
    /// ```
    /// use isoshard::placement::{Layout, Mesh};
    /// let layout: Layout = "(S0)".parse()?;
    /// let picture = "
    /// [3]@(dp:S0) on (dp=2)
    ///   0-1   2
    /// ┌─────┬───┐
    /// │  0  │ 1 │
    /// └─────┴───┘
    /// ";
    /// assert_eq!(layout.draw(&Mesh::parse("dp=2", 0)?, [3])?, picture.trim_start());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit the mesh or the shape.
    pub fn draw(&self, mesh: &Mesh, shape: impl Into<Shape>) -> Result<String> {
        let (spec, name) = self.without_dtype(mesh, shape.into())?;
        Ok(write_text(&LayoutPicture::of(&spec, &name)))
    }
}

fn write_text(picture: &LayoutPicture) -> String {
    let mut text = format!("{}\n", picture.caption);
    if let Some(grid) = &picture.grid {
        TextGrid::of(grid).write(&mut text);
    }
    for note in &picture.notes {
        text.push_str(note);
        text.push('\n');
    }
    text
}

/// A grid whose cells are labelled.
struct TextGrid<'a> {
    grid: &'a LayoutGrid,
    /// The labels of the cells, row by row.
    labels: Vec<Vec<String>>,
}

impl TextGrid<'_> {
    fn of(grid: &LayoutGrid) -> TextGrid<'_> {
        let label = |row: &Vec<_>| row.iter().map(|cell| grid.label(cell)).collect();
        TextGrid { grid, labels: grid.cells.iter().map(label).collect() }
    }

    fn write(&self, text: &mut String) {
        let heights = drawn_lens(&self.grid.rows, 1);
        let mut widths = drawn_lens(&self.grid.columns, 2);
        for (c, width) in widths.iter_mut().enumerate() {
            let labels = self.labels.iter().map(|row| row[c].chars().count());
            let range =
                if self.grid.column_dim.is_some() { range_text(&self.grid.columns, c).len() } else { 0 };
            *width = labels.chain([range]).max().unwrap_or(0).max(*width - 1) + 2;
        }
        let side = |r: usize| {
            if self.grid.row_dim.is_some() { range_text(&self.grid.rows, r) } else { String::new() }
        };
        let side_len = (0..heights.len()).map(|r| side(r).len()).max().unwrap_or(0);
        let margin = if side_len == 0 { String::new() } else { " ".repeat(side_len + 1) };
        let mut line = |left: &str, inner: &str| {
            text.push_str(format!("{left}{inner}").trim_end());
            text.push('\n');
        };
        if self.grid.column_dim.is_some() {
            let ranges =
                (0..widths.len()).map(|c| format!("{:^1$}", range_text(&self.grid.columns, c), widths[c]));
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

#[cfg(test)]
mod tests {
    use crate::placement::{Mesh, Spec};

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

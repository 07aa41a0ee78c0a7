//! Pictures of layouts as SVG.

use std::fmt::Write;
use std::ops::Range;

use super::grid::{CellRanks, LayoutGrid, LayoutPicture, indices_text, range_text};
use crate::error::Result;
use crate::placement::{Layout, Mesh, Spec};
use crate::tensor::Shape;

/// The palette of Okabe and Ito (2008), in which people of any colour vision tell neighbouring ranks apart; grey stands
/// for its black.
const PALETTE: [[u32; 3]; 8] = [
    [86, 180, 233],
    [230, 159, 0],
    [0, 158, 115],
    [240, 228, 66],
    [204, 121, 167],
    [0, 114, 178],
    [213, 94, 0],
    [120, 120, 120],
];
/// A drawn dim of at most this many indices has [`PER_INDEX`] units for each.
const DRAWN_TO_SCALE: usize = 16;
/// The units, about a pixel, of an index.
const PER_INDEX: usize = 28;
/// The units of a dim that is not drawn to scale, which its intervals share by their lengths.
const LONG_DIM: usize = 448;
/// The least units of an interval: a line of text fits.
const LEAST: usize = 24;
/// The least units of one rank's stripe of a box.
const STRIPE: usize = 8;
/// The units of a character and of a line of text.
const CHARACTER: usize = 8;
const LINE: usize = 18;
/// The units around the picture.
const MARGIN: usize = 10;

impl Spec {
    /// Draws which ranks store which elements as an SVG image, in the form of [`Spec::draw`].
    ///
    /// Each rank has a colour, and each box the colours and numbers of the ranks that store it: replicas are stripes side
    /// by side, `Partial` contributions are stripes on top of each other. Pointing at a box shows its indices. There are
    /// eight colours, which people of any colour vision tell apart; ranks from 8 on have lighter tints of them. Units are
    /// pixels at the natural size, and the image scales. Up to 16 indices of a dim are drawn to scale. A mesh of more
    /// than 64 ranks is not drawn: the image has the notation alone.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let mesh = Mesh::parse("dp=2,tp=2", 0)?;
    /// let image = Spec::parse("f32[5, 4]@(dp:S0, tp:S1)", &mesh)?.draw_svg();
    /// assert!(image.starts_with("<svg ") && image.ends_with("</svg>\n"));
    /// assert!(image.contains("<title>dim 0: 3-4, dim 1: 0-1: rank 2</title>"));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn draw_svg(&self) -> String {
        write_svg(&LayoutPicture::of(self, &self.to_string()))
    }
}

impl Layout {
    /// Draws which ranks of a mesh store which elements of a tensor of this shape as an SVG image: see
    /// [`Spec::draw_svg`].
    ///
    /// ```
    /// use isoshard::placement::{Layout, Mesh};
    /// let (layout, mesh): (Layout, _) = ("(R)".parse()?, Mesh::parse("dp=3", 0)?);
    /// assert!(layout.draw_svg(&mesh, [4])?.contains(">0, 1, 2</text>")); // three replicas
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit the mesh or the shape.
    pub fn draw_svg(&self, mesh: &Mesh, shape: impl Into<Shape>) -> Result<String> {
        let (spec, name) = self.without_dtype(mesh, shape.into())?;
        Ok(write_svg(&LayoutPicture::of(&spec, &name)))
    }
}

fn write_svg(picture: &LayoutPicture) -> String {
    let mut body = String::new();
    let mut y = MARGIN + LINE;
    write_label(&mut body, (MARGIN, y - 5), "start", &picture.caption);
    let mut width = text_width(&picture.caption);
    if let Some(grid) = &picture.grid {
        let placed = PlacedGrid::of(grid, y);
        placed.write(&mut body);
        width = width.max(placed.xs[placed.xs.len() - 1] - MARGIN);
        y = placed.ys[placed.ys.len() - 1];
    }
    for note in &picture.notes {
        y += LINE;
        write_label(&mut body, (MARGIN, y - 3), "start", note);
        width = width.max(text_width(note));
    }
    let (width, height) = (width + 2 * MARGIN, y + MARGIN);
    let mut text = String::new();
    let _ = writeln!(
        text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} \
         {height}\" font-family=\"monospace\" font-size=\"13\" role=\"img\">"
    );
    let _ = writeln!(text, "<title>{}</title>", picture.caption);
    let _ = writeln!(text, "<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>");
    text + &body + "</svg>\n"
}

/// Cells that are drawn as one box: neighbours with the same ranks.
struct DrawnBox<'a> {
    rows: Range<usize>,
    columns: Range<usize>,
    ranks: &'a CellRanks,
    label: String,
}

/// A grid with the positions of its lines.
struct PlacedGrid<'a> {
    grid: &'a LayoutGrid,
    boxes: Vec<DrawnBox<'a>>,
    /// The positions of the vertical and of the horizontal lines, one more than columns and rows.
    xs: Vec<usize>,
    ys: Vec<usize>,
}

impl PlacedGrid<'_> {
    /// Places a grid whose first line, the indices of the columns, begins at `top`.
    fn of(grid: &LayoutGrid, top: usize) -> PlacedGrid<'_> {
        let boxes = boxes(grid);
        let mut widths = drawn_lens(&grid.columns);
        let mut heights = drawn_lens(&grid.rows);
        for (c, width) in widths.iter_mut().enumerate() {
            let range = grid.column_dim.map_or(0, |_| text_width(&range_text(&grid.columns, c)));
            *width = (*width).max(range + CHARACTER);
        }
        for b in &boxes {
            let across = (text_width(&b.label) + CHARACTER).max(STRIPE * b.ranks.len());
            let contributions = b.ranks.iter().map(Vec::len).max().unwrap_or(1);
            let (columns, rows) = (b.columns.len(), b.rows.len());
            widths[b.columns.clone()].iter_mut().for_each(|w| *w = (*w).max(across.div_ceil(columns)));
            let down = (STRIPE * contributions).div_ceil(rows);
            heights[b.rows.clone()].iter_mut().for_each(|h| *h = (*h).max(down));
        }
        let side = |_| (0..heights.len()).map(|r| text_width(&range_text(&grid.rows, r))).max();
        let side = grid.row_dim.and_then(side).map_or(0, |width| width + CHARACTER);
        let head = if grid.column_dim.is_some() { LINE } else { CHARACTER };
        let lines = |first: usize, lens: &[usize]| -> Vec<usize> {
            (0..=lens.len()).map(|i| first + lens[..i].iter().sum::<usize>()).collect()
        };
        let (xs, ys) = (lines(MARGIN + side, &widths), lines(top + head, &heights));
        PlacedGrid { grid, boxes, xs, ys }
    }

    fn write(&self, text: &mut String) {
        let PlacedGrid { grid, xs, ys, .. } = self;
        let middle = |lines: &[usize], i: usize| (lines[i] + lines[i + 1]) / 2;
        if grid.column_dim.is_some() {
            for c in 0..xs.len() - 1 {
                write_label(text, (middle(xs, c), ys[0] - 5), "middle", &range_text(&grid.columns, c));
            }
        }
        if grid.row_dim.is_some() {
            for r in 0..ys.len() - 1 {
                let place = (xs[0] - CHARACTER, middle(ys, r) + 4);
                write_label(text, place, "end", &range_text(&grid.rows, r));
            }
        }
        self.boxes.iter().for_each(|b| self.write_box(text, b));
        let _ = writeln!(text, "<path d=\"{}\" stroke=\"#333333\" fill=\"none\"/>", self.borders());
    }

    /// Writes the stripes of a box: replicas side by side, each with its contributions on top of each other.
    fn write_box(&self, text: &mut String, b: &DrawnBox) {
        let _ = writeln!(text, "<g><title>{}</title>", self.title(b));
        let (x, y) = (self.xs[b.columns.start], self.ys[b.rows.start]);
        let (width, height) = (self.xs[b.columns.end] - x, self.ys[b.rows.end] - y);
        for (i, contributions) in b.ranks.iter().enumerate() {
            let across = width * i / b.ranks.len()..width * (i + 1) / b.ranks.len();
            for (k, &rank) in contributions.iter().enumerate() {
                let down = height * k / contributions.len()..height * (k + 1) / contributions.len();
                let _ = writeln!(
                    text,
                    "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"/>",
                    x + across.start,
                    y + down.start,
                    across.len(),
                    down.len(),
                    colour(rank)
                );
            }
        }
        let centre = (x + width / 2, y + height / 2 + 4);
        write_label(text, centre, "middle", &b.label);
        text.push_str("</g>\n");
    }

    /// Returns the indices of a box and all its ranks.
    fn title(&self, b: &DrawnBox) -> String {
        let (rows, columns) = (&self.grid.rows, &self.grid.columns);
        let dims = [
            (self.grid.row_dim, rows[b.rows.start], rows[b.rows.end]),
            (self.grid.column_dim, columns[b.columns.start], columns[b.columns.end]),
        ];
        let dims: Vec<String> = dims
            .into_iter()
            .filter_map(|(dim, start, end)| Some(format!("dim {}: {}", dim?, indices_text(start, end))))
            .collect();
        let ranks: Vec<String> = b.ranks.iter().flatten().map(usize::to_string).collect();
        let ranks = format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, ranks.join(", "));
        if dims.is_empty() { ranks } else { format!("{}: {ranks}", dims.join(", ")) }
    }

    /// Returns the lines between cells with different ranks, as commands of a path.
    fn borders(&self) -> String {
        let PlacedGrid { xs, ys, .. } = self;
        let cell = |r: usize, c: usize| self.grid.cells.get(r)?.get(c);
        let mut path = String::new();
        for (r, y) in ys.iter().enumerate() {
            let is_edge = |c: usize| cell(r.wrapping_sub(1), c) != cell(r, c);
            for run in runs(xs.len() - 1, is_edge) {
                let _ = write!(path, "M{} {y}H{}", xs[run.start], xs[run.end]);
            }
        }
        for (c, x) in xs.iter().enumerate() {
            let is_edge = |r: usize| cell(r, c.wrapping_sub(1)) != cell(r, c);
            for run in runs(ys.len() - 1, is_edge) {
                let _ = write!(path, "M{x} {}V{}", ys[run.start], ys[run.end]);
            }
        }
        path
    }
}

/// Returns the boxes of a grid: neighbours in a row with the same ranks are one, and so are equal ones below each other.
fn boxes(grid: &LayoutGrid) -> Vec<DrawnBox<'_>> {
    let mut boxes: Vec<DrawnBox> = Vec::new();
    for (r, cells) in grid.cells.iter().enumerate() {
        let mut start = 0;
        for same in cells.chunk_by(|a, b| a == b) {
            let (columns, ranks) = (start..start + same.len(), &same[0]);
            start = columns.end;
            let above = |b: &&mut DrawnBox| b.rows.end == r && b.columns == columns && b.ranks == ranks;
            match boxes.iter_mut().find(above) {
                Some(above) => above.rows.end = r + 1,
                None => boxes.push(DrawnBox { rows: r..r + 1, columns, ranks, label: grid.label(ranks) }),
            }
        }
    }
    boxes
}

/// Returns the longest ranges of `0..len` in which `holds` is true.
fn runs(len: usize, holds: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for i in (0..len).filter(|&i| holds(i)) {
        match runs.last_mut() {
            Some(last) if last.end == i => last.end = i + 1,
            _ => runs.push(i..i + 1),
        }
    }
    runs
}

/// Returns the units of the intervals between these cuts.
fn drawn_lens(cuts: &[usize]) -> Vec<usize> {
    let all = (cuts[cuts.len() - 1] - cuts[0]) as u128;
    let one = |pair: &[usize]| match pair[1] - pair[0] {
        len if all <= DRAWN_TO_SCALE as u128 => len * PER_INDEX,
        len => ((len as u128 * LONG_DIM as u128 / all) as usize).max(LEAST),
    };
    cuts.windows(2).map(one).collect()
}

/// Returns a rank's colour. The more often the palette has been used, the lighter.
pub(crate) fn colour(rank: usize) -> String {
    let white = 35 + 7 * (rank / PALETTE.len() % 8) as u32;
    let [red, green, blue] = PALETTE[rank % PALETTE.len()].map(|c| c + (255 - c) * white / 100);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// Writes black text with a white rim at the position of its base line.
pub(crate) fn write_label(text: &mut String, (x, y): (usize, usize), anchor: &str, label: &str) {
    let _ = writeln!(
        text,
        "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" stroke=\"#ffffff\" stroke-width=\"3\" \
         paint-order=\"stroke\" fill=\"#111111\">{}</text>",
        label
    );
}

fn text_width(text: &str) -> usize {
    text.chars().count() * CHARACTER
}

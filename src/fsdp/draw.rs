//! Pictures of shard plans: as text, and as SVG.

use std::fmt::Write;
use std::ops::Range;

use super::fully_shard::ShardedUnit;
use super::shard_plan::{BlockedTensor, ShardPlan};
use crate::placement::{colour, write_label};
use crate::tensor::sort_by_key;

/// The most cells of a shard in a text.
const CELLS: usize = 64;
/// The most ranks that a picture shows: half of them first ones, half of them last ones.
const RANKS: usize = 16;
/// The most tensors that a picture names.
const NAMED: usize = 26;
/// The most characters of a name; the last ones are kept.
const NAME: usize = 48;
/// The units of an image, about pixels: of a shard, of a rank's row, and of a line between blocks.
const SHARD: usize = 640;
const ROW: usize = 30;
const BLOCK_LINE: usize = 4;
/// The units of a character, of a line of text, and around the image.
const CHARACTER: usize = 8;
const LINE: usize = 18;
const MARGIN: usize = 10;

impl ShardPlan {
    /// Draws the shards as text: a line per rank, then a line per tensor.
    ///
    /// The letter in a cell is that of the tensor, or the padding's (`·`), that takes the largest part of it, as a
    /// capital if one of the tensor's blocks begins there, and in the first cell of each run. A shard of up to 64 elements has a cell per element, a longer one
    /// 64 cells. Of more than 16 ranks, the first eight and the last eight are drawn; of more than 26 tensors, the first
    /// 26 are named, and the others are drawn as `#`.
    ///
    /// ```
    /// use isoshard::fsdp::{BlockedTensor, ShardPlan};
    /// let tensors = [(12, 4), (5, 1), (8, 8)].map(|(len, block)| BlockedTensor { len, block });
    /// let picture = "
    /// 3 shards of 9 elements, 2 of 27 are padding
    /// rank 0 │·AaaaAaaa│
    /// rank 1 │AaaaBBBBB│
    /// rank 2 │Cccccccc·│
    /// a tensor 0: 12 elements, 3 blocks of 4, on ranks 0-1
    /// b tensor 1: 5 elements, one by one, on rank 1
    /// c tensor 2: 8 elements, 1 block, on rank 2
    /// ";
    /// assert_eq!(ShardPlan::new(&tensors, &[1, 13, 18], 3, 9)?.draw(), picture.trim_start());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn draw(&self) -> String {
        write_text(self, &|t| format!("tensor {t}"))
    }

    /// Draws the shards as an SVG image: a row per rank, then a line per tensor.
    ///
    /// Each tensor has a colour, padding is grey, and lines separate blocks that are wide enough. Pointing at a
    /// part shows its tensor and its elements. Ranks and names are limited as in [`ShardPlan::draw`], and parts that would
    /// be narrower than a pixel are left out.
    ///
    /// ```
    /// use isoshard::fsdp::{BlockedTensor, ShardPlan};
    /// let tensors = [(12, 4), (5, 1)].map(|(len, block)| BlockedTensor { len, block });
    /// let image = ShardPlan::new(&tensors, &[1, 13], 2, 9)?.draw_svg();
    /// assert!(image.starts_with("<svg ") && image.ends_with("</svg>\n"));
    /// assert!(image.contains("<title>tensor 0: elements 8-11 of 12, rank 1</title>"));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn draw_svg(&self) -> String {
        write_svg(self, &|t| format!("tensor {t}"))
    }
}

impl ShardedUnit {
    /// Draws the unit's shards as [`ShardPlan::draw`] does, with the parameters' paths.
    ///
    /// ```
    /// use isoshard::fsdp::{BlockedTensor, ShardPlanner, ShardedUnit};
    /// let plan = ShardPlanner::new(2).plan(&[BlockedTensor { len: 16, block: 16 }])?;
    /// let unit = ShardedUnit { name: "h.0".into(), paths: vec!["h.0.w".into()], plan: Some(plan) };
    /// let picture = "
    /// h.0: 2 shards of 16 elements, 16 of 32 are padding
    /// rank 0 │Aaaaaaaaaaaaaaaa│
    /// rank 1 │················│
    /// a h.0.w: 16 elements, 1 block, on rank 0
    /// ";
    /// assert_eq!(unit.draw(), picture.trim_start());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn draw(&self) -> String {
        match &self.plan {
            Some(plan) => format!("{}: {}", self.title(), write_text(plan, &|t| self.name_of(t))),
            None => format!("{}: nothing is sharded\n", self.title()),
        }
    }

    /// Draws the unit's shards as [`ShardPlan::draw_svg`] does, with the parameters' paths. Returns `None` if nothing is
    /// sharded.
    ///
    /// ```
    /// use isoshard::fsdp::{BlockedTensor, ShardPlanner, ShardedUnit};
    /// let plan = ShardPlanner::new(2).plan(&[BlockedTensor { len: 16, block: 8 }])?;
    /// let unit = ShardedUnit { name: "h.0".into(), paths: vec!["h.0.w".into()], plan: Some(plan) };
    /// assert!(unit.draw_svg().is_some_and(|image| image.contains("h.0.w: elements 8-15 of 16, rank 1")));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn draw_svg(&self) -> Option<String> {
        self.plan.as_ref().map(|plan| write_svg(plan, &|t| self.name_of(t)))
    }

    fn title(&self) -> &str {
        if self.name.is_empty() { "root" } else { &self.name }
    }

    fn name_of(&self, tensor: usize) -> String {
        self.paths.get(tensor).cloned().unwrap_or_else(|| format!("tensor {tensor}"))
    }
}

fn write_text(plan: &ShardPlan, name: &dyn Fn(usize) -> String) -> String {
    let mut text = caption(plan) + "\n";
    let cells = plan.shard_len().min(CELLS);
    let in_order = in_order(plan);
    let width = (plan.ranks() - 1).to_string().len();
    for rank in shown_ranks(plan) {
        let Some(rank) = rank else {
            let _ = writeln!(text, "{}", hidden_ranks(plan));
            continue;
        };
        let first = rank * plan.shard_len();
        let mut bar = String::with_capacity(cells);
        let mut before = None;
        for c in 0..cells {
            let [from, to] = [c, c + 1].map(|c| first + scale(c, cells, plan.shard_len()));
            let (tensor, begins) = cell(plan, &in_order, from..to);
            // A block may have begun in a cell of another letter.
            bar.push(tensor.map_or('·', |t| letter(t, begins || tensor != before)));
            before = tensor;
        }
        let _ = writeln!(text, "rank {rank:>width$} │{bar}│");
    }
    for t in 0..plan.tensors().len().min(NAMED) {
        let _ = writeln!(text, "{} {}", letter(t, false), legend(plan, t, name));
    }
    text + &unnamed(plan).map_or(String::new(), |line| line + "\n")
}

fn write_svg(plan: &ShardPlan, name: &dyn Fn(usize) -> String) -> String {
    let side = MARGIN + CHARACTER * (6 + (plan.ranks() - 1).to_string().len());
    let mut body = String::new();
    let mut y = MARGIN + LINE;
    let caption = caption(plan);
    write_label(&mut body, (MARGIN, y - 5), "start", &caption);
    let mut width = side + SHARD;
    for rank in shown_ranks(plan) {
        let Some(rank) = rank else {
            y += LINE;
            write_label(&mut body, (MARGIN, y - 5), "start", &hidden_ranks(plan));
            continue;
        };
        write_label(&mut body, (side - CHARACTER, y + ROW / 2 + 2), "end", &format!("rank {rank}"));
        let _ = writeln!(
            body,
            "<rect x=\"{side}\" y=\"{y}\" width=\"{SHARD}\" height=\"{}\" fill=\"#dddddd\"/>",
            ROW - 4
        );
        for t in 0..plan.tensors().len() {
            write_part(&mut body, plan, (t, rank), (side, y), name);
        }
        y += ROW;
    }
    for t in 0..plan.tensors().len().min(NAMED) {
        let _ = writeln!(
            body,
            "<rect x=\"{MARGIN}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{}\"/>",
            y + 4,
            colour(t)
        );
        y += LINE;
        let line = legend(plan, t, name);
        width = width.max(MARGIN + 2 * CHARACTER + CHARACTER * line.chars().count());
        write_label(&mut body, (MARGIN + 2 * CHARACTER, y - 5), "start", &escaped(&line));
    }
    if let Some(line) = unnamed(plan) {
        y += LINE;
        write_label(&mut body, (MARGIN, y - 5), "start", &line);
    }
    let (width, height) = (width + MARGIN, y + MARGIN);
    let mut text = String::new();
    let _ = writeln!(
        text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} \
         {height}\" font-family=\"monospace\" font-size=\"13\" role=\"img\">"
    );
    let _ = writeln!(text, "<title>{caption}</title>");
    let _ = writeln!(text, "<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>");
    text + &body + "</svg>\n"
}

/// Writes a rank's part of a tensor in the row at `(x, y)`, with lines between its blocks.
fn write_part(
    text: &mut String,
    plan: &ShardPlan,
    (t, rank): (usize, usize),
    (x, y): (usize, usize),
    name: &dyn Fn(usize) -> String,
) {
    let part = plan.part(t, rank);
    if part.is_empty() {
        return;
    }
    let at =
        |element: usize| x + scale(plan.position(t, rank) + element - part.start, plan.shard_len(), SHARD);
    let (left, right) = (at(part.start), at(part.end));
    if left == right {
        return;
    }
    let BlockedTensor { len, block } = plan.tensors()[t];
    let name = escaped(&shortened(&name(t)));
    let elements = match part.len() {
        1 => format!("element {}", part.start),
        _ => format!("elements {}-{}", part.start, part.end - 1),
    };
    let _ = writeln!(text, "<g><title>{name}: {elements} of {len}, rank {rank}</title>");
    let (width, height, fill) = (right - left, ROW - 4, colour(t));
    let _ = writeln!(
        text,
        "<rect x=\"{left}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\"/>"
    );
    let mut lines = String::new();
    let blocks = part.len().div_ceil(block);
    if width >= blocks.saturating_mul(BLOCK_LINE) {
        for block_start in part.clone().step_by(block) {
            let _ = write!(lines, "M{} {y}v{height}", at(block_start));
        }
    } else {
        let _ = write!(lines, "M{left} {y}v{height}");
    }
    let _ = writeln!(text, "<path d=\"{lines}\" stroke=\"#333333\" fill=\"none\"/></g>");
}

fn caption(plan: &ShardPlan) -> String {
    let (ranks, len) = (plan.ranks(), plan.shard_len());
    let shards = if ranks == 1 { "1 shard".into() } else { format!("{ranks} shards") };
    format!("{shards} of {len} elements, {} of {} are padding", plan.padding(), plan.buffer_len())
}

/// Returns the ranks to draw; `None` stands for those that are left out.
fn shown_ranks(plan: &ShardPlan) -> Vec<Option<usize>> {
    let ranks = plan.ranks();
    if ranks <= RANKS {
        return (0..ranks).map(Some).collect();
    }
    let (first, last) = (0..RANKS / 2, ranks - RANKS / 2..ranks);
    first.map(Some).chain([None]).chain(last.map(Some)).collect()
}

fn hidden_ranks(plan: &ShardPlan) -> String {
    format!("... {} more ranks ...", plan.ranks() - RANKS)
}

/// Returns `n * to / of`, rounded down.
fn scale(n: usize, of: usize, to: usize) -> usize {
    (n as u128 * to as u128 / of.max(1) as u128) as usize
}

/// Returns the tensors that have elements, by their positions in the buffer.
fn in_order(plan: &ShardPlan) -> Vec<(Range<usize>, usize)> {
    let mut ranges: Vec<_> = (0..plan.tensors().len()).map(|t| (plan.range(t), t)).collect();
    ranges.retain(|(range, _)| !range.is_empty());
    sort_by_key(&mut ranges, |(range, _)| range.start);
    ranges
}

/// Returns the tensor that takes most of these elements of the buffer, or `None` for padding, and true if one of its blocks
/// begins there.
fn cell(plan: &ShardPlan, in_order: &[(Range<usize>, usize)], cell: Range<usize>) -> (Option<usize>, bool) {
    let first = in_order.partition_point(|(range, _)| range.end <= cell.start);
    let mut most: Option<(usize, usize)> = None;
    let mut padding = cell.len();
    for (range, t) in in_order[first..].iter().take_while(|(range, _)| range.start < cell.end) {
        let taken = range.end.min(cell.end) - range.start.max(cell.start);
        padding -= taken;
        if most.is_none_or(|(len, _)| taken > len) {
            most = Some((taken, *t));
        }
    }
    let Some((_, t)) = most.filter(|(len, _)| *len > padding) else { return (None, false) };
    let range = plan.range(t);
    let (from, to) = (range.start.max(cell.start) - range.start, range.end.min(cell.end) - range.start);
    let begin = from.checked_next_multiple_of(plan.tensors()[t].block);
    (Some(t), begin.is_some_and(|begin| begin < to))
}

fn letter(t: usize, is_capital: bool) -> char {
    if t >= NAMED {
        return '#';
    }
    let letter = (b'a' + t as u8) as char;
    if is_capital { letter.to_ascii_uppercase() } else { letter }
}

/// Returns the line of a tensor: its name, its blocks, and its ranks.
fn legend(plan: &ShardPlan, t: usize, name: &dyn Fn(usize) -> String) -> String {
    let BlockedTensor { len, block } = plan.tensors()[t];
    let name = shortened(&name(t));
    if len == 0 {
        return format!("{name}: no elements");
    }
    let range = plan.range(t);
    let blocks = match (len.div_ceil(block), block) {
        (1, _) => "1 block".to_string(),
        (_, 1) => "one by one".to_string(),
        (blocks, _) => format!("{blocks} blocks of {block}"),
    };
    let [first, last] = [range.start, range.end - 1].map(|at| at / plan.shard_len());
    let ranks = if first == last { format!("rank {first}") } else { format!("ranks {first}-{last}") };
    format!("{name}: {len} {}, {blocks}, on {ranks}", if len == 1 { "element" } else { "elements" })
}

/// Returns the line about the tensors that are not named.
fn unnamed(plan: &ShardPlan) -> Option<String> {
    let more = plan.tensors().len().checked_sub(NAMED).filter(|more| *more > 0)?;
    Some(format!("# {more} more tensors"))
}

/// Returns the last characters of a long name.
fn shortened(name: &str) -> String {
    let len = name.chars().count();
    if len <= NAME {
        name.into()
    } else {
        format!("...{}", name.chars().skip(len + 3 - NAME).collect::<String>())
    }
}

/// Returns text with the entities that XML needs.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fsdp::ShardPlanner;

    fn plan(ranks: usize, tensors: &[(usize, usize)]) -> ShardPlan {
        let tensors: Vec<_> = tensors.iter().map(|&(len, block)| BlockedTensor { len, block }).collect();
        ShardPlanner::new(ranks).plan(&tensors).expect("there is a plan")
    }

    /// The bars of a text, by rank.
    fn bars(text: &str) -> Vec<&str> {
        text.lines().filter_map(|line| line.split('│').nth(1)).collect()
    }

    /// Each cell of a picture to scale is the element's tensor, by the plan's own parts.
    #[test]
    fn a_cell_per_element_shows_the_parts_of_the_plan() {
        let plan = plan(3, &[(35, 7), (11, 1), (24, 24), (0, 1), (5, 3)]);
        let text = plan.draw();
        assert!(plan.shard_len() <= CELLS && bars(&text).len() == 3, "{text}");
        for (rank, bar) in bars(&text).into_iter().enumerate() {
            let mut want = vec!['·'; plan.shard_len()];
            for (t, of) in plan.tensors().iter().enumerate() {
                let at = plan.position(t, rank);
                for (i, element) in plan.part(t, rank).enumerate() {
                    let letter = (b'a' + t as u8) as char;
                    want[at + i] = if element % of.block == 0 { letter.to_ascii_uppercase() } else { letter };
                }
            }
            assert_eq!(bar, want.into_iter().collect::<String>(), "rank {rank} of\n{text}");
        }
        assert!(text.contains("\nd tensor 3: no elements\n"), "{text}");
        assert!(text.contains("\ne tensor 4: 5 elements, 2 blocks of 3, on rank"), "{text}");
    }

    #[test]
    fn large_plans_are_drawn_in_a_bounded_space() {
        let tensors: Vec<(usize, usize)> = (0..800).map(|i| (10_000 + i, 1)).collect();
        let plan = plan(16_384, &tensors);
        let unit = ShardedUnit { name: "h".into(), paths: vec!["é".repeat(300); 800], plan: Some(plan) };
        let text = unit.draw();
        assert_eq!(bars(&text).len(), RANKS);
        assert_eq!(text.lines().count(), 1 + RANKS + 1 + NAMED + 1);
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
        assert!(text.contains("\n... 16368 more ranks ...\nrank 16376 │"), "{text}");
        assert!(text.ends_with("# 774 more tensors\n"), "{text}");
        let image = unit.draw_svg().expect("it is sharded");
        assert!(image.len() < 100_000, "{} bytes", image.len());
    }

    #[test]
    fn long_shards_show_what_takes_most_of_a_cell() {
        let [a, b] = [(96, 8), (32, 32)].map(|(len, block)| BlockedTensor { len, block });
        let text = ShardPlan::new(&[a, b], &[0, 96], 1, 128).expect("it fits").draw();
        // Two elements a cell, so every fourth cell of the first tensor begins a block.
        assert_eq!(bars(&text), ["Aaaa".repeat(12) + "B" + &"b".repeat(15)]);
        let half = ShardPlan::new(&[a], &[3], 1, 128).expect("it fits").draw();
        // The second cell is half padding, and so is the last one of the tensor.
        assert!(bars(&half)[0].starts_with("··AaaAaaaA"), "{half}");
        assert_eq!(bars(&half)[0].matches('·').count(), 17, "{half}");
    }

    #[test]
    fn empty_plans_and_odd_names_are_drawn() {
        let empty = ShardPlan::new(&[], &[], 2, 0).expect("it is empty");
        assert_eq!(empty.draw(), "2 shards of 0 elements, 0 of 0 are padding\nrank 0 ││\nrank 1 ││\n");
        assert!(empty.draw_svg().ends_with("</svg>\n"));
        let unit = ShardedUnit { name: String::new(), paths: vec!["a<b>&c".into()], plan: None };
        assert_eq!((unit.draw(), unit.draw_svg()), ("root: nothing is sharded\n".to_string(), None));
        let unit = ShardedUnit { plan: Some(plan(1, &[(8, 1)])), ..unit };
        let image = unit.draw_svg().expect("it is sharded");
        assert!(image.contains("<title>a&lt;b&gt;&amp;c: elements 0-7 of 8, rank 0</title>"), "{image}");
        assert!(!image.contains("a<b"), "{image}");
    }
}

//! Pictures of layouts: SVG images are well-formed XML, their boxes cover the tensor without overlap, each element has
//! exactly the ranks whose regions hold it, and the image of the book is up to date. Pictures of shard plans show each
//! rank's parts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::Path;

use isoshard::fsdp::{BlockedTensor, ShardPlanner, ShardedUnit};
use isoshard::placement::{Layout, Mesh, Spec};
use isoshard::tensor::DType;
use isoshard::testing::strategies::{layouts, meshes, shapes};
use proptest::prelude::*;

use crate::common::failures::Failures;

/// An element of an XML document, with its text if it has no children.
#[derive(Default)]
struct Element {
    name: String,
    attributes: BTreeMap<String, String>,
    children: Vec<Element>,
    text: String,
}

impl Element {
    /// Parses a whole document, which is one element.
    fn parse(text: &str) -> Result<Element, String> {
        let mut rest = text;
        let root = Element::read(&mut rest)?;
        if rest.trim().is_empty() { Ok(root) } else { Err(format!("{rest:?} after the document")) }
    }

    fn read(rest: &mut &str) -> Result<Element, String> {
        let tag = rest.strip_prefix('<').ok_or_else(|| format!("no tag at {:?}", head(rest)))?;
        let end = tag.find('>').ok_or("a tag does not end")?;
        let (tag, after) = (&tag[..end], &tag[end + 1..]);
        let (tag, is_whole) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
        let (name, mut given) = tag.split_once(' ').unwrap_or((tag, ""));
        if name.is_empty() || !name.chars().all(char::is_alphanumeric) {
            return Err(format!("no name: {tag:?}"));
        }
        let mut element = Element { name: name.into(), ..Element::default() };
        while !given.trim_start().is_empty() {
            let (key, value) =
                given.trim_start().split_once("=\"").ok_or_else(|| format!("no value: {given:?}"))?;
            let (value, next) = value.split_once('"').ok_or_else(|| format!("no end: {given:?}"))?;
            if element.attributes.insert(key.into(), plain(value)?).is_some() {
                return Err(format!("{key} twice in {tag:?}"));
            }
            given = next;
        }
        *rest = after;
        if is_whole {
            return Ok(element);
        }
        loop {
            let text = rest.find('<').ok_or_else(|| format!("{name} does not end"))?;
            element.text += &plain(&rest[..text])?;
            *rest = &rest[text..];
            if let Some(end) = rest.strip_prefix("</") {
                *rest = end
                    .strip_prefix(name)
                    .and_then(|end| end.strip_prefix('>'))
                    .ok_or_else(|| format!("{name} ends with {:?}", head(end)))?;
                return Ok(element);
            }
            element.children.push(Element::read(rest)?);
        }
    }

    fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Element> {
        self.children.iter().filter(move |child| child.name == name)
    }

    fn number(&self, attribute: &str) -> usize {
        self.attributes[attribute].parse().unwrap_or_else(|e| panic!("{attribute}: {e}"))
    }

    /// The horizontal and vertical range of a rectangle.
    fn rectangle(&self) -> [Range<usize>; 2] {
        let [x, y, width, height] = ["x", "y", "width", "height"].map(|name| self.number(name));
        [x..x + width, y..y + height]
    }
}

fn head(text: &str) -> &str {
    text.get(..40).unwrap_or(text)
}

/// Replaces entities, and refuses characters that XML does not allow in text.
fn plain(text: &str) -> Result<String, String> {
    let mut parts = text.split('&');
    let mut plain = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let (entity, after) = part.split_once(';').ok_or_else(|| format!("a bare & in {text:?}"))?;
        plain.push(match entity {
            "amp" => '&',
            "lt" => '<',
            "gt" => '>',
            other => return Err(format!("unknown entity {other}")),
        });
        plain += after;
    }
    if plain.chars().any(|c| c.is_control() && c != '\n') {
        Err(format!("control in {text:?}"))
    } else {
        Ok(plain)
    }
}

/// A box of an image: the indices of the drawn dims, the ranks, their colours, and its rectangle.
#[derive(Debug)]
struct PictureBox {
    dims: BTreeMap<usize, Range<usize>>,
    ranks: Vec<usize>,
    colours: Vec<String>,
    place: [Range<usize>; 2],
}

impl PictureBox {
    /// Reads a group whose title is `dim 0: 0-2, dim 1: 3: ranks 0, 1`.
    fn of(group: &Element) -> PictureBox {
        let title = &group.named("title").next().expect("a box has a title").text;
        let (dims, ranks) = title.rsplit_once("rank").expect("a title names ranks");
        let dims = dims.split("dim ").skip(1).map(|dim| {
            let (dim, range) = dim.split_once(": ").expect("a dim has a range");
            let range = range.trim_end_matches([' ', ',', ':']);
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let [dim, first, last] = [dim, first, last].map(|n| n.parse::<usize>().expect("a number"));
            (dim, first..last + 1)
        });
        let ranks = ranks.trim_start_matches('s').split(", ");
        let ranks: Vec<usize> = ranks.map(|rank| rank.trim().parse().expect("a rank")).collect();
        let stripes: Vec<[Range<usize>; 2]> = group.named("rect").map(Element::rectangle).collect();
        let span = |axis: usize| {
            let ends = stripes.iter().map(|stripe| stripe[axis].end).max().expect("a box has stripes");
            stripes.iter().map(|stripe| stripe[axis].start).min().expect("a box has stripes")..ends
        };
        let place = [span(0), span(1)];
        assert_eq!(stripes.iter().map(area).sum::<usize>(), area(&place), "stripes fill the box: {title}");
        assert!(stripes.iter().all(|stripe| area(stripe) > 0), "{title}");
        let colours = group.named("rect").map(|stripe| stripe.attributes["fill"].clone()).collect();
        PictureBox { dims: dims.collect(), ranks, colours, place }
    }
}

fn area([x, y]: &[Range<usize>; 2]) -> usize {
    x.len() * y.len()
}

fn overlap(a: &[Range<usize>; 2], b: &[Range<usize>; 2]) -> bool {
    (0..2).all(|axis| a[axis].start < b[axis].end && b[axis].start < a[axis].end)
}

/// Compares an image with the definition of regions. Returns the first difference.
fn check(spec: &Spec) -> Result<(), String> {
    let text = spec.draw_svg();
    let image = Element::parse(&text)?;
    assert_eq!(image.name, "svg");
    let words: Vec<&str> = image.named("text").map(|text| text.text.as_str()).collect();
    if !words.contains(&format!("{spec} on {}", spec.mesh).as_str()) {
        return Err(format!("no caption in {words:?}"));
    }
    // The lines below the text's picture.
    let notes = ["stores nothing", "store nothing", "also split", "not drawn", "no elements"];
    for line in spec.draw().lines().skip(1).filter(|line| notes.iter().any(|note| line.contains(note))) {
        if !words.contains(&line) {
            return Err(format!("no {line:?} in {words:?}"));
        }
    }
    let boxes: Vec<PictureBox> = image.named("g").map(PictureBox::of).collect();
    if spec.shape.contains(&0) {
        return if boxes.is_empty() { Ok(()) } else { Err("boxes without elements".into()) };
    }
    let size = [0..image.number("width"), 0..image.number("height")];
    for (i, a) in boxes.iter().enumerate() {
        if boxes[..i].iter().any(|b| overlap(&a.place, &b.place)) {
            return Err(format!("{a:?} overlaps another box"));
        }
        if (0..2).any(|axis| a.place[axis].end > size[axis].end) {
            return Err(format!("{a:?} leaves the image"));
        }
        if a.colours.len() != a.ranks.len() {
            return Err(format!("not a stripe per rank: {a:?}"));
        }
    }
    let drawn: Vec<usize> = boxes[0].dims.keys().copied().collect();
    let whole: usize = drawn.iter().map(|&d| spec.shape[d]).product();
    // Every element of the drawn dims, at index 0 of the others.
    for element in 0..whole {
        let (mut index, mut rest) = (vec![0; spec.shape.len()], element);
        for &d in drawn.iter().rev() {
            index[d] = rest % spec.shape[d];
            rest /= spec.shape[d];
        }
        let holds = |rank: &usize| {
            let coords = spec.mesh.coords_of(*rank).expect("a rank of the mesh");
            spec.region_at(&coords).offset_of(&index).is_some()
        };
        let want: Vec<usize> = spec.mesh.ranks().filter(holds).collect();
        let here: Vec<&PictureBox> =
            boxes.iter().filter(|b| b.dims.iter().all(|(&d, range)| range.contains(&index[d]))).collect();
        let [here] = here[..] else { return Err(format!("{} boxes at {index:?}", here.len())) };
        let mut ranks = here.ranks.clone();
        ranks.sort_unstable();
        if ranks != want {
            return Err(format!("{ranks:?} at {index:?}, and {want:?} store it"));
        }
    }
    Ok(())
}

#[test]
fn images_show_the_ranks_of_every_element() {
    let thin = format!("f32[9, 7]@(a:RS(0..2; 1,1,0,{}))", vec!["1"; 61].join(","));
    let cases = [
        ("1", "f32[3]@()"),
        ("dp=2,tp=2", "f32[5, 4]@(dp:S0, tp:R)"),
        ("dp=2,tp=2", "f32[5]@(dp:S0, tp:S0)"),
        ("dp=2,tp=2", "f32[5]@(dp:S0^1, tp:S0^0)"),
        ("fsdp=4", "f32[5, 2]@(fsdp:RS(0..1; 2,0,1,2))"),
        ("fsdp=2", "f32[3, 4]@(fsdp:RS(0..2; 1,1))"),
        ("dp=2,tp=2,sp=2", "f32[3, 4]@(dp:R, tp:S1, sp:P(sum))"),
        ("dp=2", "bf16[]@(dp:P(max))"),
        ("dp=8", "i64[]@(dp:R)"),
        ("a=2,b=2,c=2", "f32[2, 2, 2]@(a:S0, b:S1, c:S2)"),
        ("a=8,b=8", "f32[64, 100]@(a:S0, b:S1)"),
        ("a=64", &thin),
        ("dp=2", "f32[0, 4]@(dp:S0)"),
        ("dp=65", "f32[0]@(dp:S0)"),
    ];
    for (mesh, spec) in cases {
        let mesh = Mesh::parse(mesh, 0).expect("a mesh");
        let spec = Spec::parse(spec, &mesh).expect("a spec");
        check(&spec).unwrap_or_else(|e| panic!("{spec}: {e}"));
    }
}

#[test]
fn images_of_random_layouts() {
    let mut failures = Failures::default();
    let given = (meshes(), shapes()).prop_flat_map(|(mesh, shape)| layouts(&mesh, DType::F32, &shape, true));
    failures.check("images of layouts", 300, &given, |spec| check(&spec));
    failures.report();
}

/// A rank has one colour in all images, and the ranks of a small mesh have colours of their own.
#[test]
fn each_rank_has_a_colour() {
    let colours = |spec: &str| {
        let mesh = Mesh::parse("a=64", 0).expect("a mesh");
        let image = Element::parse(&Spec::parse(spec, &mesh).expect("a spec").draw_svg()).expect("XML");
        let mut colours = BTreeMap::new();
        for b in image.named("g").map(PictureBox::of) {
            colours.extend(b.ranks.into_iter().zip(b.colours));
        }
        colours
    };
    let sharded = colours("f32[64]@(a:S0)");
    assert_eq!(sharded.len(), 64);
    assert_eq!(sharded, colours("f32[2]@(a:R)"));
    let distinct: std::collections::BTreeSet<&String> = sharded.values().collect();
    assert_eq!(distinct.len(), 64);
}

#[test]
fn an_image_stays_small() {
    let mesh = Mesh::parse("a=64", 0).expect("a mesh");
    let units = vec!["1"; 64].join(",");
    // The most boxes: each part of the flattened elements begins and ends within a row.
    let spec = Spec::parse(&format!("f32[1000, 1048]@(a:RS(0..2; {units}))"), &mesh).expect("a spec");
    assert!(spec.draw_svg().len() < 200_000, "{} bytes", spec.draw_svg().len());
    let mesh = Mesh::parse("a=1024,b=1024", 0).expect("a mesh");
    let spec = Spec::parse("f32[4096, 4096]@(a:S0, b:S1)", &mesh).expect("a spec");
    assert!(spec.draw_svg().contains("not drawn: more than 64 ranks"));
    let long = Spec::parse(
        &format!("u8[{}]@(a:R, b:R)", usize::MAX / 2),
        &Mesh::parse("a=2,b=2", 0).expect("a mesh"),
    );
    let image = long.expect("a spec").draw_svg();
    assert!(image.len() < 5_000, "{image}");
}

#[test]
fn layouts_and_tensors_draw_themselves() {
    let mesh = Mesh::parse("dp=2", 0).expect("a mesh");
    let layout: Layout = "(S0)".parse().expect("a layout");
    let spec = Spec::parse("f32[3, 2]@(dp:S0)", &mesh).expect("a spec");
    assert_eq!(layout.draw(&mesh, [3, 2]).expect("it fits"), spec.draw()["f32".len()..]);
    let images = [spec.draw_svg(), layout.draw_svg(&mesh, [3, 2]).expect("it fits")];
    assert!(images[1].contains("<title>[3, 2]@(dp:S0) on (dp=2)</title>"), "{}", images[1]);
    let boxes = |image: &str| image[image.find("<g>").expect("a box")..].to_string();
    assert_eq!(boxes(&images[0]), boxes(&images[1]));
    let refused = layout.draw(&mesh, []).unwrap_err().to_string();
    assert_eq!(refused, "layout: a single element has no dim to shard; got f32[]@(dp:S0); replicate it");
}

/// The image of docs/book/src/layouts.md. `ISOSHARD_BLESS=1` writes it.
#[test]
fn the_image_of_the_book_is_up_to_date() {
    let mesh = Mesh::parse("dp=2,tp=2", 0).expect("a mesh");
    let image = Spec::parse("f32[5, 4]@(dp:S0, tp:R)", &mesh).expect("a spec").draw_svg();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/book/src/layout.svg");
    if std::env::var_os("ISOSHARD_BLESS").is_some() {
        fs::write(&path, &image).expect("the book can be written");
    }
    let held = fs::read_to_string(&path).unwrap_or_default();
    assert!(held == image, "docs/book/src/layout.svg is not up to date: run this test with ISOSHARD_BLESS=1");
}

/// Each part lies in the row of its rank, at its position in the shard, to scale.
#[test]
fn an_image_of_a_shard_plan_shows_each_part() {
    const WIDTH: usize = 640;
    let tensors = [(96, 8), (40, 40), (0, 1), (23, 1)].map(|(len, block)| BlockedTensor { len, block });
    let plan = ShardPlanner::new(3).plan(&tensors).expect("there is a plan");
    let image = Element::parse(&plan.draw_svg()).expect("it is well-formed");
    let rows: Vec<_> = image.named("rect").filter(|r| r.attributes["fill"] == "#dddddd").collect();
    let rows: Vec<_> = rows.into_iter().map(Element::rectangle).collect();
    assert_eq!(rows.len(), plan.ranks());
    let mut found = BTreeMap::new();
    for group in image.named("g") {
        let title = group.named("title").next().expect("a part has a title").text.clone();
        let rect = group.named("rect").next().expect("a part has a box");
        assert!(found.insert(title, (rect.rectangle(), rect.attributes["fill"].clone())).is_none());
    }
    let mut colours: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
    for (t, rank) in (0..tensors.len()).flat_map(|t| (0..plan.ranks()).map(move |rank| (t, rank))) {
        let part = plan.part(t, rank);
        if part.is_empty() {
            continue;
        }
        let (first, last, len) = (part.start, part.end - 1, tensors[t].len);
        let title = format!("tensor {t}: elements {first}-{last} of {len}, rank {rank}");
        let (place, colour) = found.remove(&title).unwrap_or_else(|| panic!("{title} in {found:?}"));
        let at = |position: usize| rows[rank][0].start + position * WIDTH / plan.shard_len();
        let position = plan.position(t, rank);
        assert_eq!(place[0], at(position)..at(position + part.len()), "{title}");
        assert_eq!(place[1], rows[rank][1], "{title}");
        colours.entry(t).or_default().insert(colour);
    }
    assert!(found.is_empty(), "parts that the plan lacks: {found:?}");
    assert!(colours.values().all(|colours| colours.len() == 1), "{colours:?}");
    assert_eq!(colours.values().flatten().collect::<BTreeSet<_>>().len(), 3, "{colours:?}");
}

/// The pictures of docs/fsdp.md. `ISOSHARD_BLESS=1` writes the image.
#[test]
fn the_pictures_of_the_guide_to_fsdp_are_up_to_date() {
    let parameters = [
        ("attn.qkv.weight", 96 * 32, 4 * 32),
        ("attn.out.weight", 32 * 32, 4 * 32),
        ("moe.router.weight", 8 * 32, 32),
        ("moe.experts.up", 8 * 32 * 16, 32 * 16),
        ("moe.experts.down", 8 * 16 * 32, 16 * 32),
        ("norm.weight", 32, 1),
    ];
    let tensors = parameters.map(|(_, len, block)| BlockedTensor { len, block });
    let unit = ShardedUnit {
        name: "h.0".into(),
        paths: parameters.iter().map(|(path, ..)| format!("h.0.{path}")).collect(),
        plan: Some(ShardPlanner::new(4).plan(&tensors).expect("there is a plan")),
    };
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let image = unit.draw_svg().expect("it is sharded");
    if std::env::var_os("ISOSHARD_BLESS").is_some() {
        fs::write(docs.join("fsdp.svg"), &image).expect("the image can be written");
    }
    let held = fs::read_to_string(docs.join("fsdp.svg")).unwrap_or_default();
    assert!(held == image, "docs/fsdp.svg is not up to date: run this test with ISOSHARD_BLESS=1");
    let guide = fs::read_to_string(docs.join("fsdp.md")).unwrap_or_default();
    assert!(guide.contains(&unit.draw()), "docs/fsdp.md lacks this picture:\n{}", unit.draw());
}

//! Runs of a kernel per box of a shard that is ragged over several dims.
//!
//! Such a shard is a run of flattened indices: a few boxes of global indices, one after another in local storage.
//! Kernels compute on boxes. So a kernel runs once per box, on views of the operands, and its results are written one
//! after another. The boxes follow from the flattened dims alone; operands and results that are cut alike have the
//! same ones.

use std::ops::Range;

use smallvec::SmallVec;

use crate::error::Result;
use crate::ops::{Tensors, Window, Windows};
use crate::placement::{Layout, Placement, Region};
use crate::tensor::{DType, Device, Dims, Shape, Tensor, short_list};

/// The runs of a kernel for one call of an operator whose operands are ragged over several dims.
pub(crate) struct RaggedBoxes {
    boxes: Vec<BoxRun>,
    /// Per operand: true if it is ragged over several dims.
    cut: SmallVec<[bool; 4]>,
}

/// The run of a kernel for one box.
struct BoxRun {
    at: Windows,
    /// The flattened indices in local storage.
    rows: Range<usize>,
}

/// Returns true if a kernel may run once per box: every result has flattened dims, and all operands and results that
/// have some have the same ones, cut by the same placements of the same axes, so their boxes are equal on every rank.
pub(crate) fn are_cut_alike<'a>(
    ins: impl Iterator<Item = (&'a Shape, &'a Layout)>,
    outs: impl Iterator<Item = (&'a Shape, &'a Layout)>,
) -> bool {
    let outs: SmallVec<[_; 3]> = short_list(outs.map(|(shape, layout)| FlatCut::of(shape, layout)));
    let Some(Some(first)) = outs.first() else { return false };
    outs.iter().all(|cut| cut.as_ref() == Some(first))
        && ins.filter_map(|(shape, layout)| FlatCut::of(shape, layout)).all(|cut| cut == *first)
}

/// The flattened dims of a tensor and how they are cut.
#[derive(PartialEq)]
struct FlatCut<'a> {
    extents: &'a [usize],
    /// The axes that cut them, with their placements, the outermost first.
    axes: SmallVec<[(usize, &'a Placement); 4]>,
}

impl FlatCut<'_> {
    /// Returns the cut of the flattened dims, or `None` if no axis flattens several.
    fn of<'a>(shape: &'a Shape, layout: &'a Layout) -> Option<FlatCut<'a>> {
        let ragged = layout.placements().iter().filter(|p| p.ragged_units().is_some());
        let flat = ragged.max_by_key(|p| p.split_dims().end).filter(|p| p.split_dims().end > 1)?;
        let cutting = layout.order().iter().map(|&a| (a, layout.axis(a)));
        Some(FlatCut {
            extents: &shape[flat.split_dims()],
            axes: cutting.filter(|(_, placement)| placement.meets(flat)).collect(),
        })
    }
}

impl RaggedBoxes {
    /// Returns the runs for the windows of operands and results that [are cut alike](are_cut_alike).
    pub fn of(at: &Windows) -> RaggedBoxes {
        let flat: SmallVec<[&Window; 6]> = short_list(at.ins.iter().chain(&at.outs).filter(|w| is_flat(w)));
        let first = flat.iter().find(|w| !w.region.is_empty()).or(flat.first()).expect("a result is flat");
        let dims = flattened(first);
        let prefixes = |w: &Window| w.region.boxes.iter().map(|b| prefix(&b.start, &b.len, dims)).collect();
        let boxes: Vec<(Dims, Dims)> = prefixes(first);
        let alike = |w: &&Window| {
            // A region is empty as well if a dim that is not flattened has no index.
            let held = w.region.is_empty() || prefixes(w) == boxes;
            flattened(w) == dims && w.local()[0] == first.local()[0] && held
        };
        assert!(flat.iter().all(alike) && at.outs.iter().all(is_flat), "operands are cut alike");
        let mut done = 0;
        let run = |(start, len): &(Dims, Dims)| {
            let window = |w: &Window| if is_flat(w) { within(w, start, len) } else { w.clone() };
            let rows = done..done + len.iter().product::<usize>();
            done = rows.end;
            let (ins, outs) = (at.ins.iter().map(window).collect(), at.outs.iter().map(window).collect());
            BoxRun { at: Windows { ins, outs, exact: at.exact }, rows }
        };
        RaggedBoxes { boxes: boxes.iter().map(run).collect(), cut: at.ins.iter().map(is_flat).collect() }
    }

    /// Runs `kernel` on each box. Returns results of these dtypes and local shapes.
    pub fn run(
        &self,
        ins: &[Tensor],
        outs: impl Iterator<Item = (DType, Shape)>,
        kernel: impl Fn(&mut [Tensor], &Windows) -> Result<Tensors>,
    ) -> Result<Tensors> {
        let device = ins.first().map_or(Device::Cpu, Tensor::device);
        let mut whole: Tensors = outs
            .map(|(dtype, shape)| match self.boxes.is_empty() {
                true => Tensor::zeros_on(device, dtype, shape),
                false => Tensor::uninit_on(device, dtype, shape),
            })
            .collect::<Result<_>>()?;
        for BoxRun { at, rows } in &self.boxes {
            let part = |(i, x): (usize, &Tensor)| match self.cut[i] {
                true => x.narrow(0, rows.start, rows.len())?.reshape(at.ins[i].local().clone()),
                false => Ok(x.clone()),
            };
            let mut locals: Tensors = ins.iter().enumerate().map(part).collect::<Result<_>>()?;
            let found = kernel(&mut locals, at)?;
            for ((part, whole), w) in found.iter().zip(&mut whole).zip(&at.outs) {
                let (shape, strides) = (w.local(), w.local().strides());
                let first = rows.start * whole.shape()[1..].iter().product::<usize>();
                part.copy_block(whole, shape, (0, part.strides()), (first, &strides))?;
            }
        }
        Ok(whole)
    }
}

/// Returns true if the window's leading dims are flattened.
fn is_flat(w: &Window) -> bool {
    w.local().len() < w.global.len()
}

/// Returns the number of leading dims that are flattened.
fn flattened(w: &Window) -> usize {
    w.global.len() + 1 - w.local().len()
}

/// Returns the first `dims` entries of both.
fn prefix(start: &[usize], len: &[usize], dims: usize) -> (Dims, Dims) {
    (start[..dims].into(), len[..dims].into())
}

/// Returns the box of a window whose flattened dims have this start and these extents.
fn within(w: &Window, start: &[usize], len: &[usize]) -> Window {
    let rest = w.global.len() - start.len();
    let from = w.region.boxes.first().map_or(Dims::from_elem(0, rest), |b| b.start[start.len()..].into());
    let start = start.iter().copied().chain(from).collect();
    let len: Shape = len.iter().chain(&w.local()[1..]).copied().collect();
    Window { global: w.global.clone(), region: Region::of_box(start, len) }
}

/// Returns the extents of an empty shard along the dims of the `global` shape: 0 for flattened dims, else those of the
/// `local` shape.
pub(crate) fn empty_box(global: &Shape, local: &Shape) -> Dims {
    match global.len() - local.len() {
        0 => local.iter().copied().collect(),
        more => std::iter::repeat_n(0, more + 1).chain(local[1..].iter().copied()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Op, Softmax};
    use crate::placement::{Mesh, Spec};

    fn windows(ins: &[&str], out: &str, mesh: &Mesh) -> Windows {
        let window = |text: &&str| {
            let spec = Spec::parse(text, mesh).unwrap();
            Window { global: spec.shape.clone(), region: spec.region() }
        };
        let ins = ins.iter().map(window).collect();
        Windows { ins, outs: [window(&out)].into_iter().collect(), exact: true }
    }

    #[test]
    fn each_box_is_computed_and_stored_in_its_place() {
        let mesh = |rank| Mesh::parse("a=3", rank).unwrap();
        let text = "f32[3, 4, 2]@(a:RS(0..2; 0,7,5))";
        let op = Softmax { dim: 2 };
        for (rank, runs) in [(0, 0), (1, 2), (2, 2)] {
            let at = windows(&[text], text, &mesh(rank));
            let boxes = RaggedBoxes::of(&at);
            assert_eq!(boxes.boxes.len(), runs, "rank {rank}");
            let x = Tensor::from_vec((0..at.ins[0].region.numel()).map(|i| (i * i) as f32).collect(), {
                at.ins[0].local().clone()
            });
            let x = x.unwrap();
            let outs = || [(DType::F32, at.outs[0].local().clone())].into_iter();
            let got = boxes.run(std::slice::from_ref(&x), outs(), |ins, at| op.eval(ins, at)).unwrap();
            // The flattened shard is a matrix, and the same rows of it are wanted.
            let rows = Window::whole(x.shape());
            let at = Windows {
                ins: [rows.clone()].into_iter().collect(),
                outs: [rows].into_iter().collect(),
                exact: true,
            };
            let want = Softmax { dim: 1 }.eval(&mut [x], &at).unwrap();
            assert_eq!(got[0].to_f64_vec(), want[0].to_f64_vec(), "rank {rank}");
        }
    }

    #[test]
    fn tensors_that_are_cut_otherwise_have_no_common_boxes() {
        let mesh = Mesh::parse("a=2,b=2", 0).unwrap();
        let alike = |ins: &[&str], out: &str| {
            let spec = |text: &str| Spec::parse(text, &mesh).unwrap();
            let (ins, out) = (ins.iter().map(|text| spec(text)).collect::<Vec<_>>(), spec(out));
            let alike = are_cut_alike(
                ins.iter().map(|x| (&x.shape, &x.layout)),
                std::iter::once((&out.shape, &out.layout)),
            );
            // A cut that is alike gives equal boxes on every rank.
            for rank in mesh.ranks().filter(|_| alike) {
                let coords = mesh.coords_of(rank).unwrap();
                let window = |x: &Spec| Window { global: x.shape.clone(), region: x.region_at(&coords) };
                let ins = ins.iter().map(window).collect();
                let outs = [window(&out)].into_iter().collect();
                RaggedBoxes::of(&Windows { ins, outs, exact: true });
            }
            alike
        };
        let x = "f32[3, 4, 5]@(a:RS(0..2; 7,5), b:R)";
        assert!(alike(&[x, x], x));
        assert!(alike(&["f32[3]@(a:R, b:R)", "f32[3, 4]@(a:RS(0..2; 7,5), b:R)"], x));
        assert!(alike(&[x], "f32[3, 4, 5]@(a:RS(0..2; 7,5), b:S2)"));
        assert!(alike(&[x], "f32[3, 4, 5]@(a:RS(0..2; 7,5), b:P(sum))"));
        assert!(!alike(&[x, "f32[4, 3, 5]@(a:RS(0..2; 7,5), b:R)"], x));
        assert!(!alike(&[x, "f32[3, 4, 5]@(a:RS(0..3; 7,5), b:R)"], x));
        assert!(!alike(&[x], "f32[3]@(a:R, b:R)"));
        // Another axis cuts one of them, outside or inside, ragged or not, or in another order.
        let nested = "f32[4, 3, 5]@(a:RS(0..2; 1,2), b:RS(0..2; 1,1))";
        assert!(alike(&[nested, nested], nested));
        for other in [
            "f32[4, 3, 5]@(a:RS(0..2; 1,2), b:R)",
            "f32[4, 3, 5]@(a:RS(0..2; 1,2)^1, b:S0^0)",
            "f32[4, 3, 5]@(a:RS(0..2; 1,2)^1, b:RS(0..2; 1,1)^0)",
            "f32[4, 3, 5]@(a:RS(0..2; 2,1), b:RS(0..2; 1,1))",
        ] {
            assert!(!alike(&[other], nested) && !alike(&[other, nested], nested), "{other}");
            assert!(alike(&[other], other), "{other}");
        }
    }
}

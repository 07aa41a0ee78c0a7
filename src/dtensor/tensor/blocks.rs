//! Tensors whose elements on this rank share blocks of memory, such as the parameters of a unit of FSDP: what is done with all
//! of them is done once per block.

use super::dtensor::DTensor;
use super::lineage::{lineage_of_full, lineage_of_new};
use crate::error::Result;
use crate::placement::{Layout, Spec};
use crate::tensor::{CutBlock, DType, Scalar, Tensor};

/// Returns the blocks whose parts are all among these tensors' local ones.
fn blocks_of(of: &[&DTensor]) -> Vec<CutBlock> {
    CutBlock::of(&of.iter().map(|x| &x.local).collect::<Vec<_>>())
}

impl DTensor {
    /// Returns zeros of the dtypes, shapes and layouts of these tensors. Those of a block lie in a block in the same positions.
    /// Communicates nothing.
    pub(crate) fn zeros_like_together(of: &[&DTensor]) -> Result<Vec<DTensor>> {
        let mut places = vec![None; of.len()];
        for block in blocks_of(of) {
            let whole = &block.whole;
            let zeros = Tensor::zeros_on(whole.device(), whole.dtype(), whole.shape().clone())?;
            block.cut_alike(zeros)?.into_iter().for_each(|(i, part)| places[i] = Some(part));
        }
        let zeros = |(x, place): (&&DTensor, Option<Tensor>)| match place {
            Some(place) => {
                let lineage = lineage_of_full(&x.meta, Scalar::Float(0.0));
                Ok(DTensor::wrap(&x.mesh, place, x.meta.clone(), lineage))
            }
            None => x.detach().zeros_like(),
        };
        of.iter().zip(places).map(zeros).collect()
    }

    /// Returns tensors of the shapes and layouts of these, in `dtype` and with arbitrary elements, so that their
    /// redistribution together to the given layouts copies nothing before its calls. Those of a block lie in a block in the
    /// same positions.
    pub(crate) fn uninit_together(of: &[(&DTensor, &Layout)], dtype: DType) -> Result<Vec<DTensor>> {
        let mut places = vec![None; of.len()];
        for block in blocks_of(&of.iter().map(|(x, _)| *x).collect::<Vec<_>>()) {
            let whole = Tensor::uninit_on(block.whole.device(), dtype, block.whole.shape().clone())?;
            block.cut_alike(whole)?.into_iter().for_each(|(i, part)| places[i] = Some(part));
        }
        if places.iter().all(Option::is_none) {
            places = DTensor::gather_places(of, dtype)?;
        }
        let uninit = |((x, _), place): (&(&DTensor, &Layout), Option<Tensor>)| {
            let meta = x.mesh.intern(Spec { dtype, ..x.spec().clone() })?;
            let own = || Tensor::uninit_on(x.local.device(), dtype, x.local.shape().clone());
            let lineage = lineage_of_new("uninit", &meta, &[]);
            Ok(DTensor::wrap(&x.mesh, place.map_or_else(own, Ok)?, meta, lineage))
        };
        of.iter().zip(places).map(uninit).collect()
    }

    /// Returns true if no other tensor has this one's elements, so that an operator may write to them.
    pub(crate) fn is_unique(&mut self) -> bool {
        self.local.is_unique()
    }

    /// Returns the local tensors of [`DTensor::leaf_in`] for those of these tensors that are a block, which is cast at once.
    /// They lie in a block in the same positions.
    pub(crate) fn cast_blocks(of: &[&DTensor], dtype: DType) -> Result<Vec<Option<Tensor>>> {
        let mut made = vec![None; of.len()];
        for block in blocks_of(of).into_iter().filter(|block| block.whole.dtype() != dtype) {
            let cast = block.whole.cast(dtype)?;
            block.cut_alike(cast)?.into_iter().for_each(|(i, part)| made[i] = Some(part));
        }
        Ok(made)
    }

    /// Writes the elements of `value`, which has this tensor's metadata, to this tensor's memory, if it is a part of a block and
    /// no other tensor shares it. Returns true if it did.
    pub(crate) fn overwrite_part(&mut self, value: &DTensor) -> Result<bool> {
        if !self.local.is_part() || !self.local.is_unique() {
            return Ok(false);
        }
        let (shape, from) = (value.local.shape(), value.local.strides());
        let to = shape.strides();
        value.local.copy_block(&mut self.local, shape, (0, from), (0, &to))?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DeviceMesh;
    use crate::tensor::Shape;

    #[test]
    fn blocks_are_cast_and_made_at_once_with_the_bits_of_their_tensors() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            let shapes: [Shape; 2] = [[3].into(), [2, 2].into()];
            let whole = Tensor::build([8], |out: &mut [f32]| {
                out.iter_mut().zip(1..).for_each(|(x, i)| *x = 1.0 / i as f32)
            });
            let parts = whole.cut(&[(0, shapes[0].clone()), (4, shapes[1].clone())])?;
            let own = |part: Tensor| {
                let shape = part.shape().clone();
                DTensor::from_local(&mesh, part, shape, Layout::replicated(1))?.requires_grad()
            };
            let block: Vec<DTensor> = parts.into_iter().map(own).collect::<Result<_>>()?;
            let other = DTensor::ones(&mesh, DType::F32, [3], Layout::replicated(1))?;
            let all = [&block[1], &other, &block[0]];
            let made = DTensor::cast_blocks(&all, DType::BF16)?;
            assert_eq!(made.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false, true]);
            for (x, local) in all.into_iter().zip(made) {
                let Some(local) = local else { continue };
                assert!(local.is_part());
                let (cast, alone) = (x.leaf_in(DType::BF16, Some(local))?, x.cast(DType::BF16)?);
                assert_eq!(cast.spec(), alone.spec());
                assert_eq!(cast.local().to_f64_vec(), alone.local().to_f64_vec());
                let grads = cast.cast(DType::F32)?.sum_all()?.backward()?;
                assert_eq!(
                    grads.get(x).expect("it is the leaf").local().to_f64_vec(),
                    vec![1.0; x.local.numel()]
                );
            }
            let zeros = DTensor::zeros_like_together(&all)?;
            assert_eq!(zeros.iter().map(|x| x.local.is_part()).collect::<Vec<_>>(), [true, false, true]);
            for (x, zeros) in all.into_iter().zip(zeros) {
                assert_eq!(
                    (zeros.spec(), zeros.local().to_f64_vec()),
                    (x.spec(), vec![0.0; x.local.numel()])
                );
            }
            Ok(())
        };
        spmd(2, run).unwrap();
    }

    #[test]
    fn only_parts_that_nothing_shares_are_overwritten() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[])?;
            let of = |local: Tensor| DTensor::from_local(&mesh, local, [2], Layout::replicated(0));
            let cut = Tensor::zeros(DType::F32, [2]).cut(&[(0, [2].into())])?.remove(0);
            let (mut part, mut alone) = (of(cut)?, of(Tensor::zeros(DType::F32, [2]))?);
            let value = of(Tensor::from_vec(vec![1.0f32, 2.0], [2])?)?;
            assert!(!alone.overwrite_part(&value)?);
            let shared = part.clone();
            assert!(!part.overwrite_part(&value)?);
            drop(shared);
            assert!(part.overwrite_part(&value)?);
            assert_eq!([part, alone].map(|x| x.local.to_f64_vec()), [[1.0, 2.0], [0.0, 0.0]]);
            Ok(())
        };
        spmd(1, run).unwrap();
    }
}

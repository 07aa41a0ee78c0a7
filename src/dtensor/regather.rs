//! Tensors that the tape does not keep but gathers again: the parameters of FSDP in the backward pass.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use super::redistribute;
use super::tensor::{DTensor, GatheredFrom, Saved};
use crate::error::Result;

/// A handle to a gathered tensor that the tape does not keep; it stays valid while the tape refers to the tensor.
#[derive(Clone)]
pub(crate) struct Regather(Weak<GatheredFrom>);

impl DTensor {
    /// Marks `gathered`, which is this tensor redistributed, so that the backward pass gathers it again instead of
    /// keeping it. `earlier` are tensors marked before it in the forward pass, which the backward pass needs next.
    pub(crate) fn regathered(&self, gathered: DTensor, earlier: &[Regather]) -> DTensor {
        let earlier = earlier.iter().map(|a| a.0.clone()).collect();
        let origin = GatheredFrom {
            shard: self.detach(),
            meta: gathered.meta.clone(),
            in_flight: RefCell::new(None),
            earlier,
        };
        DTensor { origin: Some(Rc::new(origin)), ..gathered }
    }

    /// Returns the handle of this tensor, if it was marked so.
    pub(crate) fn regather(&self) -> Option<Regather> {
        self.origin.as_ref().map(|o| Regather(Rc::downgrade(o)))
    }
}

impl Saved {
    /// Returns the shards from which a recorded pass gathers the value again, if it is not kept. That pass reads the
    /// units in another order, so it starts no gather ahead: the units would stay in memory until its end.
    pub(super) fn origin_of_recorded(&self) -> Option<Rc<GatheredFrom>> {
        match self {
            Saved::Kept(_) => None,
            Saved::Regather(origin) => {
                let GatheredFrom { shard, meta, .. } = &**origin;
                let (shard, meta) = (shard.clone(), meta.clone());
                Some(Rc::new(GatheredFrom {
                    shard,
                    meta,
                    in_flight: RefCell::new(None),
                    earlier: Vec::new(),
                }))
            }
        }
    }
}

impl GatheredFrom {
    /// Returns the gathered tensor, and starts the gathers of the earlier ones.
    pub(super) fn value(&self) -> Result<DTensor> {
        for gather in self.earlier.iter().filter_map(Weak::upgrade) {
            gather.prefetch()?;
        }
        self.prefetch()?;
        let in_flight = self.in_flight.borrow_mut().take().expect("just prefetched");
        let local = in_flight.finish(&self.shard.mesh)?;
        Ok(DTensor::wrap(&self.shard.mesh, local, self.meta.clone()))
    }

    /// Starts the gather, unless it is in flight.
    fn prefetch(&self) -> Result<()> {
        let mut in_flight = self.in_flight.borrow_mut();
        if in_flight.is_none() {
            let mesh = &self.shard.mesh;
            *in_flight = Some(
                redistribute::find(mesh, &self.shard.meta, &self.meta)?
                    .start(mesh, self.shard.local.clone())?,
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DeviceMesh;
    use crate::tensor::Tensor;

    #[test]
    fn what_is_gathered_again_is_asked_for_ahead_and_let_go_of() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
            let whole = Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?;
            let shard = |_| DTensor::distribute(&mesh, &whole, "(S0)".parse()?)?.requires_grad();
            let leaves: Vec<DTensor> = (0..2).map(shard).collect::<Result<_>>()?;
            let gather = |k: usize, earlier: &[Regather]| -> Result<DTensor> {
                let leaf: &DTensor = &leaves[k];
                Ok(leaf.regathered(leaf.redistribute("(R)".parse()?)?, earlier))
            };
            let first = gather(0, &[])?;
            let second = gather(1, &[first.regather().expect("marked")])?;
            let product = first.mul(&second)?;
            let (first, second) =
                [first, second].map(|t| Rc::downgrade(t.origin.as_ref().expect("marked"))).into();
            let in_flight = |o: &Weak<GatheredFrom>| o.upgrade().map(|o| o.in_flight.borrow().is_some());
            assert_eq!(
                (in_flight(&first), in_flight(&second)),
                (Some(false), Some(false)),
                "the tape holds both"
            );
            second.upgrade().expect("held").value()?;
            assert_eq!(
                (in_flight(&first), in_flight(&second)),
                (Some(true), Some(false)),
                "the earlier one is in flight"
            );
            let lacked = [4, 8][mesh.rank().rank()];
            let before = mesh.received_bytes();
            let gradients = product.sum_all()?.backward()?;
            assert!(mesh.received_bytes() - before >= 2 * lacked, "both are gathered again");
            for leaf in &leaves {
                assert_eq!(gradients.get(leaf).expect("a leaf").full_tensor()?.to_f64_vec(), [1.0, 2.0, 3.0]);
            }
            drop(product);
            assert_eq!((in_flight(&first), in_flight(&second)), (None, None), "let go of with the tape");
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}

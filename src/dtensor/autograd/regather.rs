//! Tensors that the tape does not keep but gathers again: the parameters of FSDP in the backward pass.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use crate::comm::{ModulePath, operator_scope};
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::saved::{GatheredFrom, HeldGather, Origin, UnitGathers};
use crate::dtensor::tensor::start_moves::{TensorMove, start_moves};
use crate::error::Result;
use crate::tensor::Tensor;

impl DTensor {
    /// Marks `gathered`, which is this tensor redistributed, so that the backward pass gathers it again instead of
    /// keeping it. `earlier` are tensors marked before it in the forward pass, which the backward pass needs next; `unit` are
    /// those that are needed beside it.
    pub(crate) fn regathered(&self, gathered: DTensor, earlier: &UnitGathers, unit: &UnitGathers) -> DTensor {
        let origin = GatheredFrom {
            shard: self.detach(),
            path: ModulePath::current(),
            meta: gathered.meta.clone(),
            in_flight: RefCell::new(None),
            held: RefCell::default(),
            earlier: earlier.clone(),
            unit: unit.clone(),
            read_in: Cell::new(0),
        };
        let origin = Rc::new(origin);
        unit.0.all.borrow_mut().push(Rc::downgrade(&origin));
        DTensor { origin: Some(Origin::Gathered(origin)), ..gathered }
    }

    /// Lets the backward pass use this tensor, which was marked so, as long as the forward pass holds it.
    pub(crate) fn hold_gathered(&self) {
        if let Some(Origin::Gathered(origin)) = &self.origin {
            *origin.held.borrow_mut() = HeldGather::ByForward(self.local.clone());
        }
    }

    /// Ends [`DTensor::hold_gathered`]: the backward pass gathers the tensor again.
    pub(crate) fn drop_gathered(&self) {
        if let Some(Origin::Gathered(origin)) = &self.origin {
            *origin.held.borrow_mut() = HeldGather::Dropped;
        }
    }

    /// Leaves this tensor, which was held until now, to the first node of the tape that reads it, if there is one.
    pub(crate) fn leave_gathered(self) {
        let DTensor { origin: Some(Origin::Gathered(origin)), local, .. } = self else { return };
        // This handle is the only one besides the tape's.
        if Rc::strong_count(&origin) > 1 {
            *origin.held.borrow_mut() = HeldGather::ForFirstUse(local);
        }
    }

    /// Returns true if the backward pass gathers this tensor again.
    #[cfg(test)]
    pub(crate) fn is_regathered(&self) -> bool {
        matches!(self.origin, Some(Origin::Gathered(_)))
    }
}

impl UnitGathers {
    /// Returns the number of tensors.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.all.borrow().len()
    }

    /// Starts the gathers of those tensors that a backward pass has not read, once in the pass.
    fn start(&self, pass: u64) -> Result<()> {
        let started = (pass, self.0.all.borrow().len());
        if self.0.started.replace(started) == started {
            return Ok(());
        }
        self.start_unread(pass, None)
    }

    /// Starts the gathers of those tensors that a backward pass has not read, and of the one that it reads now.
    fn start_unread(&self, pass: u64, read_now: Option<&GatheredFrom>) -> Result<()> {
        let all: Vec<Rc<GatheredFrom>> = self.0.all.borrow().iter().filter_map(Weak::upgrade).collect();
        let is_read_now = |of: &GatheredFrom| read_now.is_some_and(|now| std::ptr::eq(of, now));
        GatheredFrom::prefetch(all.into_iter().filter(|of| is_read_now(of) || of.read_in.get() != pass))
    }
}

impl GatheredFrom {
    /// Returns the same shards for a recorded pass. That pass reads the units in another order, so it starts no gather ahead: the
    /// units would stay in memory until its end.
    pub(in crate::dtensor) fn of_recorded(&self) -> Rc<GatheredFrom> {
        let GatheredFrom { shard, path, meta, .. } = self;
        Rc::new(GatheredFrom {
            shard: shard.clone(),
            path: *path,
            meta: meta.clone(),
            in_flight: RefCell::new(None),
            held: RefCell::default(),
            earlier: UnitGathers::default(),
            unit: UnitGathers::default(),
            read_in: Cell::new(0),
        })
    }

    /// Returns the gathered tensor, and starts the gathers of the earlier ones. The first tensor of a unit that a pass reads
    /// gathers all of them, unless they were gathered ahead. Those that the pass does not read stay until the tape is freed.
    pub(in crate::dtensor) fn value(&self) -> Result<DTensor> {
        let pass = self.shard.mesh.0.backward_pass.get();
        let was_read = self.read_in.replace(pass) == pass;
        let held = self.held_local();
        if held.is_none() && self.in_flight.borrow().is_none() && !was_read {
            self.unit.start_unread(pass, Some(self))?;
        }
        self.earlier.start(pass)?;
        if let Some(local) = held {
            return Ok(DTensor::wrap(&self.shard.mesh, local, self.meta.clone(), self.shard.lineage));
        }
        let in_flight = self.in_flight.borrow_mut().take();
        let in_flight = match in_flight {
            Some(in_flight) => in_flight,
            None => {
                let _label = operator_scope("redistribute");
                let _scope = self.path.enter();
                start_moves(&self.shard.mesh, vec![self.tensor_move()?])?.remove(0)
            }
        };
        let local = in_flight.finish(&self.shard.mesh)?;
        Ok(DTensor::wrap(&self.shard.mesh, local, self.meta.clone(), self.shard.lineage))
    }

    fn held_local(&self) -> Option<Tensor> {
        let mut held = self.held.borrow_mut();
        match std::mem::take(&mut *held) {
            HeldGather::Dropped => None,
            HeldGather::ForFirstUse(local) => Some(local),
            HeldGather::ByForward(local) => {
                *held = HeldGather::ByForward(local.clone());
                Some(local)
            }
        }
    }

    /// Starts gathers, except those that are in flight or need not be made. Gathers along the same axes share a call.
    pub(in crate::dtensor) fn prefetch(all: impl Iterator<Item = Rc<GatheredFrom>>) -> Result<()> {
        let wanted: Vec<Rc<GatheredFrom>> = all.filter(|gather| gather.is_wanted()).collect();
        let Some(first) = wanted.first() else { return Ok(()) };
        let _label = operator_scope("redistribute");
        let _scope = wanted.iter().fold(first.path, |path, gather| path.common(gather.path)).enter();
        let moves = wanted.iter().map(|gather| gather.tensor_move()).collect::<Result<_>>()?;
        for (gather, started) in wanted.iter().zip(start_moves(&first.shard.mesh, moves)?) {
            *gather.in_flight.borrow_mut() = Some(started);
        }
        Ok(())
    }

    /// Returns true if the tensor has neither been kept nor asked for.
    fn is_wanted(&self) -> bool {
        self.in_flight.borrow().is_none() && matches!(*self.held.borrow(), HeldGather::Dropped)
    }

    fn tensor_move(&self) -> Result<TensorMove> {
        let GatheredFrom { shard, meta, .. } = self;
        let (from, to) = (shard.meta.clone(), meta.clone());
        Ok(TensorMove { local: shard.resident()?, from, to, lineage: shard.lineage })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DeviceMesh;
    use crate::dtensor::tensor::tape::next_id;

    #[test]
    fn what_is_gathered_again_is_asked_for_ahead_and_let_go_of() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
            let whole = Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?;
            let shard = |_| DTensor::distribute(&mesh, &whole, "(S0)")?.requires_grad();
            let leaves: Vec<DTensor> = (0..2).map(shard).collect::<Result<_>>()?;
            let units = [UnitGathers::default(), UnitGathers::default()];
            let gather = |k: usize, earlier: &UnitGathers| -> Result<DTensor> {
                let leaf: &DTensor = &leaves[k];
                let gathered = leaf.redistribute("(R)")?;
                Ok(leaf.regathered(gathered, earlier, &units[k]))
            };
            let (first, second) = (gather(0, &UnitGathers::default())?, gather(1, &units[0])?);
            assert!(first.is_regathered() && second.is_regathered());
            let product = first.mul(&second)?;
            drop((first, second));
            let [first, second] = units.each_ref().map(|unit| unit.0.all.borrow()[0].clone());
            let in_flight = |o: &Weak<GatheredFrom>| o.upgrade().map(|o| o.in_flight.borrow().is_some());
            assert_eq!(
                (in_flight(&first), in_flight(&second)),
                (Some(false), Some(false)),
                "the tape holds both"
            );
            mesh.0.backward_pass.set(next_id());
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

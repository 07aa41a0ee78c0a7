//! Tensors that a tape does not keep but gathers again: FSDP's parameters in the backward pass.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use super::facts::Facts;
use super::redistribute::{self, InFlight};
use super::tensor::DTensor;
use crate::error::Result;

/// Where a gathered tensor can be had again.
pub(super) struct Origin {
    shard: DTensor,
    facts: Rc<Facts>,
    flight: RefCell<Option<InFlight>>,
    /// The origins of the unit that ran before: asked for while this one is used.
    before: Vec<Weak<Origin>>,
}

/// How a tensor can be had again after it was let go of, while a tape remembers it.
#[derive(Clone)]
pub(crate) struct Again(Weak<Origin>);

impl DTensor {
    /// `gathered`, which is this tensor redistributed, marked so that the backward pass gathers it again instead of
    /// keeping it; `before` are tensors so marked that ran earlier and will be needed next.
    pub(crate) fn gathered_again(&self, gathered: DTensor, before: &[Again]) -> DTensor {
        let before = before.iter().map(|a| a.0.clone()).collect();
        let origin = Origin {
            shard: self.detach(),
            facts: gathered.facts.clone(),
            flight: RefCell::new(None),
            before,
        };
        DTensor { origin: Some(Rc::new(origin)), ..gathered }
    }

    /// How this tensor can be had again, if it was marked so.
    pub(crate) fn again(&self) -> Option<Again> {
        self.origin.as_ref().map(|o| Again(Rc::downgrade(o)))
    }
}

impl Origin {
    pub(super) fn value(&self) -> Result<DTensor> {
        for earlier in self.before.iter().filter_map(Weak::upgrade) {
            earlier.prefetch()?;
        }
        self.prefetch()?;
        let flight = self.flight.borrow_mut().take().expect("just prefetched");
        let local = flight.finish(&self.shard.mesh)?;
        Ok(DTensor::wrap(&self.shard.mesh, local, self.facts.clone()))
    }

    fn prefetch(&self) -> Result<()> {
        let mut flight = self.flight.borrow_mut();
        if flight.is_none() {
            let mesh = &self.shard.mesh;
            *flight = Some(
                redistribute::find(mesh, &self.shard.facts, &self.facts)?
                    .start(mesh, self.shard.local.clone())?,
            );
        }
        Ok(())
    }
}

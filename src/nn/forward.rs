//! One forward pass: parameters as they are used, activations where the plan wants them, randomness in order.

use std::cell::RefCell;

use super::params::{ParamId, Params};
use crate::dtensor::{Again, DTensor, Pending};
use crate::error::Result;
use crate::rng::Generator;

/// What a module's `forward` gets: the parameters and the plan, without their names.
///
/// Parameters that lie otherwise than they are used (FSDP) are gathered unit by unit, the next unit's while this one's
/// are used, and let go of when the next unit begins; the backward pass gathers them again, likewise a unit ahead.
pub struct Forward<'a> {
    params: &'a Params,
    /// Draws for dropout; none in evaluation.
    generator: Option<RefCell<&'a mut Generator>>,
    slots: RefCell<Vec<Slot>>,
    current: RefCell<Current>,
}

enum Slot {
    Idle,
    InFlight(Box<Pending>),
    Ready(DTensor),
}

/// The unit whose parameters are in use, and how the one before it can be had again.
#[derive(Default)]
struct Current {
    unit: Option<usize>,
    before: Vec<Again>,
}

impl<'a> Forward<'a> {
    /// A pass that trains: dropout draws from `generator`, which every rank must have in the same state.
    pub fn train(params: &'a Params, generator: &'a mut Generator) -> Forward<'a> {
        Self::new(params, Some(RefCell::new(generator)))
    }

    /// A pass that evaluates: no dropout.
    pub fn eval(params: &'a Params) -> Forward<'a> {
        Self::new(params, None)
    }

    fn new(params: &'a Params, generator: Option<RefCell<&'a mut Generator>>) -> Forward<'a> {
        let slots = RefCell::new(params.ids().map(|_| Slot::Idle).collect());
        Forward { params, generator, slots, current: RefCell::default() }
    }

    /// A parameter in the layout the plan computes with.
    ///
    /// # Errors
    /// A fault of communication.
    pub fn param(&self, id: ParamId) -> Result<DTensor> {
        let leaf = self.params.value(id);
        let used = self.params.used_layout(id);
        if leaf.layout() == used {
            return Ok(leaf.clone());
        }
        let unit = self.params.unit_of(id);
        self.enter(unit)?;
        self.start(unit)?;
        let slot = std::mem::replace(&mut self.slots.borrow_mut()[id.0], Slot::Idle);
        let ready = match slot {
            Slot::Ready(t) => t,
            Slot::InFlight(pending) => leaf.gathered_again(pending.wait()?, &self.current.borrow().before),
            Slot::Idle => unreachable!("the unit was just started"),
        };
        self.slots.borrow_mut()[id.0] = Slot::Ready(ready.clone());
        Ok(ready)
    }

    /// `x` as the plan wants it at the site `path`.
    ///
    /// # Errors
    /// A fault of communication.
    pub fn site(&self, path: &str, x: DTensor) -> Result<DTensor> {
        let layout = self.params.plan().site_layout(x.mesh().mesh(), path, x.layout());
        if layout == *x.layout() { Ok(x) } else { x.redistribute(layout) }
    }

    /// `x` with elements dropped with probability `p`; `x` itself in evaluation.
    ///
    /// # Errors
    /// Refuses a `p` outside `[0, 1]`.
    pub fn dropout(&self, x: DTensor, p: f64) -> Result<DTensor> {
        match &self.generator {
            Some(g) if p > 0.0 => x.dropout(p, g.borrow_mut().next_draw()),
            _ => Ok(x),
        }
    }

    /// Causal attention whose probabilities are dropped with probability `p`; none in evaluation.
    ///
    /// # Errors
    /// Refuses shapes that do not fit.
    pub fn attention(&self, q: &DTensor, k: &DTensor, v: &DTensor, scale: f64, p: f64) -> Result<DTensor> {
        match &self.generator {
            Some(g) if p > 0.0 => q.attention_dropout(k, v, scale, p, g.borrow_mut().next_draw()),
            _ => q.attention(k, v, scale),
        }
    }

    /// On the first use of a unit: lets go of the one before, and asks for the next.
    fn enter(&self, unit: usize) -> Result<()> {
        let units = self.params.units();
        let mut current = self.current.borrow_mut();
        if current.unit == Some(unit) || (units[unit].is_root() && current.unit.is_some()) {
            return Ok(());
        }
        self.start(unit)?;
        if let Some(previous) = current.unit.replace(unit) {
            let mut slots = self.slots.borrow_mut();
            let members = &units[previous].members;
            let ready = |id: &ParamId| match &slots[id.0] {
                Slot::Ready(t) => t.again(),
                _ => None,
            };
            current.before = members.iter().filter_map(ready).collect();
            if !units[previous].is_root() {
                members.iter().for_each(|id| slots[id.0] = Slot::Idle);
            }
        }
        if let Some(next) = (unit + 1..units.len()).find(|&u| !units[u].is_root()) {
            self.start(next)?;
        }
        Ok(())
    }

    fn start(&self, unit: usize) -> Result<()> {
        for &id in &self.params.units()[unit].members {
            let (leaf, used) = (self.params.value(id), self.params.used_layout(id));
            let slot = &mut self.slots.borrow_mut()[id.0];
            if matches!(slot, Slot::Idle) && leaf.layout() != used {
                *slot = Slot::InFlight(Box::new(leaf.redistribute_async(used.clone())?));
            }
        }
        Ok(())
    }
}

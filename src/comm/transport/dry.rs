//! The engine of a dry run: one rank without peers, whose calls complete at once with tensors that hold no data.

use std::sync::Arc;
use std::time::Duration;

use super::engine::{CallResults, Channel, Engine, Request, check_places};
use super::member_place::MemberPlace;
use crate::comm::calls::{Call, Route};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// A dry run's rank.
#[derive(Debug)]
pub(in crate::comm) struct DryEngine {
    pub rank: usize,
    pub world_len: usize,
}

impl Engine for DryEngine {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_len(&self) -> usize {
        self.world_len
    }

    fn deadline(&self) -> Duration {
        Duration::MAX
    }

    fn open(&self, ranks: &[usize], _: &str) -> Result<Arc<dyn Channel>> {
        let index = ranks.iter().position(|&r| r == self.rank).expect("checked by the caller");
        Ok(Arc::new(DryChannel { index }))
    }

    fn end(&self) -> Result<()> {
        Ok(())
    }

    fn abort(&self, _: &Error) {}
}

/// A group's channel in a dry run. A tensor that this rank sends to itself arrives; everything else is an absent tensor.
#[derive(Debug)]
struct DryChannel {
    index: usize,
}

impl Channel for DryChannel {
    fn start(&self, call: Call) -> Result<Box<dyn Request>> {
        let Call { route, dtype, outgoing, incoming, .. } = call;
        let own = match route {
            Route::Gather => Some((self.index, 0)),
            Route::AllToAll => Some((self.index, self.index)),
            Route::Broadcast { root } if root == self.index => Some((0, 0)),
            Route::Send { .. } | Route::Barrier => return Ok(Box::new(DryRequest(CallResults::new()))),
            Route::Broadcast { .. } | Route::Recv { .. } => None,
        };
        let own = own.map(|(at, from)| (at, &outgoing[from]));
        let all = incoming.iter().enumerate().map(|(i, shape)| match own {
            Some((at, x)) if at == i => Ok(x.clone()),
            _ => Tensor::without_elements(dtype, shape.clone()),
        });
        Ok(Box::new(DryRequest(all.collect::<Result<_>>()?)))
    }

    fn gather_into(&self, call: Call, mut into: Vec<Tensor>) -> Result<Box<dyn Request>> {
        let place = MemberPlace { index: self.index, members: call.incoming.len() };
        check_places(&call, Some(place), &mut into)?;
        Ok(Box::new(DryRequest(into.into())))
    }
}

/// A call's results, which are there at once.
struct DryRequest(CallResults);

impl Request for DryRequest {
    fn wait(self: Box<Self>) -> Result<CallResults> {
        Ok(self.0)
    }

    fn is_ready(&self) -> bool {
        true
    }
}

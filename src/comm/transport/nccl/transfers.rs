//! The transfers that a call consists of.

use super::group::NcclGroup;
use super::{Communicator, Nccl, NcclResult};
use crate::comm::calls::{Call, Route};
use crate::error::Result;
use crate::tensor::cuda::{Address, Gpu};
use crate::tensor::{DType, Shape, Tensor};

/// One function call of the library.
enum StreamTransfer {
    Send { from: Address, bytes: usize, to: usize },
    Recv { at: Address, bytes: usize, from: usize },
    Gather { from: Address, at: Address, bytes: usize },
    Broadcast { at: Address, bytes: usize, root: usize },
}

/// A call's transfers and results.
pub(super) struct CallTransfers {
    transfers: Vec<StreamTransfer>,
    results: Vec<Tensor>,
    /// Tensors that are kept until their transfers are on the stream, so that the stream counts among the users of
    /// their memory.
    kept: Vec<Tensor>,
}

/// Builds a [`CallTransfers`].
struct TransferBuilder<'a> {
    group: &'a NcclGroup,
    gpu: &'a Gpu,
    dtype: DType,
    transfers: Vec<StreamTransfer>,
    kept: Vec<Tensor>,
}

impl CallTransfers {
    pub fn new(call: &Call<'_>, group: &NcclGroup, gpu: &Gpu) -> Result<CallTransfers> {
        let (me, n) = (group.state.index, group.state.ranks.len());
        let mut p = TransferBuilder::new(call, group, gpu);
        let others = || (0..n).filter(move |&i| i != me);
        let outgoing = |i: usize| call.outgoing[i].contiguous();
        let shapes = call.incoming;
        let results = match call.route {
            Route::Gather if group.has_no_comm => vec![outgoing(0)?],
            Route::Gather if shapes.iter().all(|s| *s == shapes[0]) => p.gather(&outgoing(0)?, n)?,
            Route::Gather => {
                let own = outgoing(0)?;
                others().try_for_each(|to| p.send(&own, to))?;
                p.receive_all(shapes, own)?
            }
            Route::AllToAll => {
                others().try_for_each(|to| p.send(&outgoing(to)?, to))?;
                p.receive_all(shapes, call.outgoing[me].clone())?
            }
            Route::Broadcast { root } => {
                let x = if root == me { outgoing(0)? } else { gpu.uninit(call.dtype, shapes[0].clone())? };
                if x.len_bytes() > 0 && !group.has_no_comm {
                    let (at, bytes) = (p.use_tensor(&x)?, x.len_bytes());
                    p.transfers.push(StreamTransfer::Broadcast { at, bytes, root });
                }
                vec![x]
            }
            Route::Send { to } => {
                p.send(&outgoing(0)?, to)?;
                vec![]
            }
            Route::Recv { from } => vec![p.receive(&shapes[0], from)?],
            Route::Barrier if group.has_no_comm => vec![],
            Route::Barrier => {
                p.gather(&gpu.zeros(DType::U8, [1])?, n)?;
                vec![]
            }
        };
        Ok(CallTransfers { transfers: p.transfers, results, kept: p.kept })
    }

    /// Plans a gather whose parts arrive in `into`. Equal parts that lie one after the other are one transfer.
    pub fn gather_into(
        call: &Call<'_>,
        mut into: Vec<Tensor>,
        group: &NcclGroup,
        gpu: &Gpu,
    ) -> Result<CallTransfers> {
        let mut p = TransferBuilder::new(call, group, gpu);
        let (me, own) = (group.state.index, call.outgoing[0].contiguous()?);
        let bytes = own.len_bytes();
        let places = into.iter().map(|part| p.use_tensor(part)).collect::<Result<Vec<Address>>>()?;
        let in_a_row = places.windows(2).all(|pair| pair[1] == pair[0] + bytes as Address)
            && into.iter().all(|part| part.len_bytes() == bytes);
        if in_a_row && bytes > 0 && !group.has_no_comm {
            let from = p.use_tensor(&own)?;
            p.transfers.push(StreamTransfer::Gather { from, at: places[0], bytes });
        } else {
            p.kept.clear(); // a kernel writes only to what nothing else holds
            own.copy_block(&mut into[me], &[own.numel()], (0, &[1]), (0, &[1]))?;
            for (i, part) in into.iter().enumerate().filter(|(i, _)| *i != me) {
                p.send(&own, i)?;
                let at = p.use_tensor(part)?;
                let bytes = part.len_bytes();
                p.transfers.extend((bytes > 0).then_some(StreamTransfer::Recv { at, bytes, from: i }));
            }
        }
        Ok(CallTransfers { transfers: p.transfers, results: into, kept: p.kept })
    }

    /// Returns the results, once the transfers are on the stream.
    pub fn into_results(self) -> Vec<Tensor> {
        drop(self.kept);
        self.results
    }

    pub fn is_empty(&self) -> bool {
        self.transfers.is_empty()
    }

    /// Puts the transfers on the group's stream, as one group of calls.
    pub fn issue(&self, nccl: &dyn Nccl, comm: Communicator, group: &NcclGroup) -> NcclResult<()> {
        let stream = group.side.handle();
        nccl.group_start()?;
        let put = self.transfers.iter().try_for_each(|one| {
            // SAFETY: each address is that of a tensor with as many bytes. The tensors' blocks count the stream as a
            // user, and are not used otherwise before it has done the transfer.
            unsafe {
                match *one {
                    StreamTransfer::Send { from, bytes, to } => nccl.send(from, bytes, to, comm, stream),
                    StreamTransfer::Recv { at, bytes, from } => nccl.recv(at, bytes, from, comm, stream),
                    StreamTransfer::Gather { from, at, bytes } => {
                        nccl.all_gather(from, at, bytes, comm, stream)
                    }
                    StreamTransfer::Broadcast { at, bytes, root } => {
                        nccl.broadcast(at, bytes, root, comm, stream)
                    }
                }
            }
        });
        // Every started group is ended, even after a failure.
        put.and(nccl.group_end())
    }
}

impl<'a> TransferBuilder<'a> {
    fn new(call: &Call<'_>, group: &'a NcclGroup, gpu: &'a Gpu) -> TransferBuilder<'a> {
        TransferBuilder { group, gpu, dtype: call.dtype, transfers: vec![], kept: vec![] }
    }

    fn use_tensor(&mut self, x: &Tensor) -> Result<Address> {
        self.kept.push(x.clone());
        self.group.side.use_tensor(x)
    }

    fn send(&mut self, x: &Tensor, to: usize) -> Result<()> {
        let bytes = x.len_bytes();
        if bytes > 0 {
            let from = self.use_tensor(x)?;
            self.transfers.push(StreamTransfer::Send { from, bytes, to });
        }
        Ok(())
    }

    fn receive(&mut self, shape: &Shape, from: usize) -> Result<Tensor> {
        let x = self.gpu.uninit(self.dtype, shape.clone())?;
        let bytes = x.len_bytes();
        if bytes > 0 {
            let at = self.use_tensor(&x)?;
            self.transfers.push(StreamTransfer::Recv { at, bytes, from });
        }
        Ok(x)
    }

    fn receive_all(&mut self, shapes: &[Shape], own: Tensor) -> Result<Vec<Tensor>> {
        let me = self.group.state.index;
        let one = |(i, shape)| if i == me { Ok(own.clone()) } else { self.receive(shape, i) };
        shapes.iter().enumerate().map(one).collect()
    }

    /// Gathers equal parts of all members into one tensor, and returns views of it.
    fn gather(&mut self, own: &Tensor, n: usize) -> Result<Vec<Tensor>> {
        let shape: Shape = std::iter::once(n).chain(own.shape().iter().copied()).collect();
        let all = self.gpu.uninit(own.dtype(), shape)?;
        let bytes = own.len_bytes();
        if bytes > 0 {
            let (from, at) = (self.use_tensor(own)?, self.use_tensor(&all)?);
            self.transfers.push(StreamTransfer::Gather { from, at, bytes });
        }
        (0..n).map(|i| all.narrow(0, i, 1)?.reshape(own.shape().clone())).collect()
    }
}

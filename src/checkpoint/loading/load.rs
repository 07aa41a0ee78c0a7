//! Loading: a redistribution whose source is a disk.
//!
//! Ranks that need common bytes form a group: replicas, and ranks whose shards are columns of the same rows. The group
//! reads the rows together, each member a contiguous share of their blocks, and then exchanges: each byte is read from the
//! disk once per group, except in blocks at the borders of shares, and each member receives only bytes that it lacks (Wan et al., *ByteCheckpoint*, NSDI 2025). A rank
//! whose shard is its own, as under FSDP, reads it straight into place.

use std::ops::Range;
use std::sync::Mutex;
use std::thread::Builder;

use super::checkpoint::Checkpoint;
use crate::base::{lock, unpoisoned};
use crate::checkpoint::format::piece_checksums::BLOCK_BYTES;
use crate::dtensor::{DTensor, DeviceMesh, SameOnRanks};
use crate::error::{Error, Result};
use crate::placement::{Layout, Mesh, Placement, Region, Spec};
use crate::tensor::{DType, Device, Shape, Tensor};

const VERB: &str = "load";
/// The most threads per rank that read.
const THREADS: usize = 4;
/// The number of tensors that an error lists; it counts the rest.
const SHOWN: usize = 4;
/// The bytes that a thread reads at a time, a multiple of a block.
const RANGE_BYTES: usize = 16 << 20;

/// A tensor that is being loaded.
struct LoadedTensor<'a> {
    name: &'a str,
    dtype: DType,
    shape: Shape,
    layout: Layout,
    region: Region,
    /// The axes over which ranks read together; none if this rank reads alone.
    axes: Vec<usize>,
    /// The region that this rank reads from byte `first` on: its own, or the group's.
    read: Region,
    first: usize,
    /// This rank's shard: filled while reading if it reads alone, else by the exchange.
    local: Tensor,
    /// The bytes of the share that this rank reads for its group.
    share: Tensor,
}

impl Checkpoint {
    /// Loads tensors in any layouts, on any mesh, with the bits that were saved. All ranks of the mesh call this together.
    ///
    /// Each rank reads the blocks (1 MiB) that have bytes of its shard. Ranks whose shards have blocks in common read
    /// them once and pass on what the others lack. Every block is compared with its checksum. A rank holds its shards and,
    /// for tensors that are read in common, its share of what the group reads.
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint, StateTree}, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// let dir = std::env::temp_dir().join(format!("isoshard-tensors-{}", std::process::id()));
    /// # let also = dir.clone();
    /// spmd(4, move |rank| {
    ///     let mesh = DeviceMesh::parse(&rank, "fsdp=2,tp=2")?;
    ///     let x = Tensor::from_vec((0..30).map(|i| i as f32).collect(), [5, 6])?;
    ///     let mut state = StateTree::new();
    ///     state.insert("x", DTensor::distribute(&mesh, &x, "(S0, S1)")?)?;
    ///     checkpoint::save(&mesh, &dir, &state)?;
    ///     let wanted = [("x", "(R, S0)".parse()?), ("x", "(S1, R)".parse()?)];
    ///     for loaded in Checkpoint::open(&dir)?.tensors(&mesh, &wanted)? {
    ///         assert_eq!(loaded.full_tensor()?.to_vec::<f32>()?, x.to_vec::<f32>()?);
    ///     }
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses names that the checkpoint lacks, layouts that do not fit or are `Partial`, and files that are not those
    /// that were saved; on every rank if one rank finds it. Refuses ranks that have opened different checkpoints or want
    /// different tensors, and names them.
    pub fn tensors(&self, mesh: &DeviceMesh, wanted: &[(&str, Layout)]) -> Result<Vec<DTensor>> {
        let busy = mesh.rank().busy("loading a checkpoint");
        let read = self.read_shares(mesh, wanted);
        drop(busy);
        let mut tensors =
            mesh.expect_same_on_ranks(VERB, read, |_| [self.opened_alike(), self.wanted(wanted)])?;
        for (turn, x) in tensors.iter_mut().enumerate().filter(|(_, x)| !x.axes.is_empty()) {
            x.exchange(mesh, turn)?;
        }
        let finish =
            |x: LoadedTensor| DTensor::from_local(mesh, x.local, x.shape, x.layout).map_err(|e| e.at(x.name));
        tensors.into_iter().map(finish).collect()
    }

    /// Returns the tensors that a load wants, to be compared with other ranks'.
    fn wanted(&self, wanted: &[(&str, Layout)]) -> SameOnRanks {
        let texts: Vec<String> =
            wanted.iter().map(|(name, layout)| format!("{}{name} {layout}", self.prefix())).collect();
        let more = texts.len().saturating_sub(SHOWN);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let shown = format!("{}{more}", texts[..texts.len().min(SHOWN)].join(", "));
        SameOnRanks::new("all ranks load the same tensors in the same layouts", texts, shown)
    }

    /// Reads, of each tensor, this rank's shard or its share of what its group reads.
    fn read_shares<'a>(
        &self,
        mesh: &DeviceMesh,
        wanted: &[(&'a str, Layout)],
    ) -> Result<Vec<LoadedTensor<'a>>> {
        if mesh.device() == Device::Meta {
            return Err(Error::unsupported(VERB, "tensors on meta have no values", "a dry run", ""));
        }
        let plan = |(turn, (name, layout)): (usize, &(&'a str, Layout))| {
            self.plan_share(mesh.mesh(), turn, name, layout)
        };
        let mut tensors = wanted.iter().enumerate().map(plan).collect::<Result<Vec<_>>>()?;
        let mut ranges = Vec::new();
        for x in &mut tensors {
            let LoadedTensor { name, dtype, read, first, local, share, axes, .. } = x;
            let bytes = if axes.is_empty() { local.bytes_mut() } else { share.bytes_mut() };
            for (number, into) in bytes.chunks_mut(RANGE_BYTES).enumerate() {
                ranges.push(ReadRange {
                    name,
                    dtype: *dtype,
                    read,
                    first: *first + number * RANGE_BYTES,
                    into,
                });
            }
        }
        self.read_ranges(ranges)?;
        Ok(tensors)
    }

    /// Plans what this rank reads of a tensor, and takes memory for it. `turn` is the number of tensors before this one.
    fn plan_share<'a>(
        &self,
        mesh: &Mesh,
        turn: usize,
        name: &'a str,
        layout: &Layout,
    ) -> Result<LoadedTensor<'a>> {
        let entry = self.entry(name)?;
        let dtype = entry.dtype().expect("checked when the index was read");
        let shape = Shape::from(&entry.shape[..]);
        let spec = Spec::new(mesh, dtype, shape.clone(), layout.clone()).map_err(|e| e.at(name))?;
        if layout.has_partial() {
            let rule = "a checkpoint has values, not partial ones";
            return Err(Error::invalid(VERB, rule, spec.to_string(), "replicate"));
        }
        let region = spec.region();
        let local = Tensor::try_uninit(dtype, region.local.clone()).map_err(|e| e.at(name))?;
        let axes = common_axes(&spec);
        let (read, first, share) = if axes.is_empty() {
            (region.clone(), 0, Tensor::try_uninit(DType::U8, [0])?)
        } else {
            let CommonRegion { region, members, index } = CommonRegion::new(&spec, &axes);
            let mine = shares(&region, dtype, members, turn).swap_remove(index);
            let share = Tensor::try_uninit(DType::U8, [mine.len()]).map_err(|e| e.at(name))?;
            (region, mine.start, share)
        };
        let layout = layout.clone();
        Ok(LoadedTensor { name, dtype, shape, layout, region, axes, read, first, local, share })
    }

    /// Reads ranges on a few threads, since one thread does not use all that a file system gives. Returns the error of
    /// the first range that has one.
    fn read_ranges(&self, ranges: Vec<ReadRange<'_>>) -> Result<()> {
        let bytes: usize = ranges.iter().map(|range| range.into.len()).sum();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(THREADS).min(bytes.div_ceil(RANGE_BYTES)).max(1);
        let queue = Mutex::new(ranges.into_iter().enumerate());
        let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        let work = || {
            let mut reader = self.reader();
            loop {
                let next = lock(&queue).next();
                let Some((number, ReadRange { name, dtype, read, first, into })) = next else { break };
                let entry = self.entry(name).expect("found before");
                let done =
                    reader.read(entry, dtype, read, first, into).and_then(|()| expect_bools(dtype, into));
                let Err(error) = done else { continue };
                let mut failed = lock(&failed);
                if failed.as_ref().is_none_or(|(other, _)| number < *other) {
                    *failed = Some((number, error.at(name)));
                }
            }
        };
        std::thread::scope(|scope| {
            // If the system refuses a thread, those that there are read everything.
            let spawn = |_: &usize| Builder::new().spawn_scoped(scope, work).is_ok();
            (1..threads).take_while(spawn).for_each(drop);
            work();
        });
        unpoisoned(failed.into_inner()).map_or(Ok(()), |(_, error)| Err(error))
    }
}

/// A range of a region's bytes that a thread reads.
struct ReadRange<'a> {
    name: &'a str,
    dtype: DType,
    read: &'a Region,
    /// The position in the region's storage.
    first: usize,
    into: &'a mut [u8],
}

impl LoadedTensor<'_> {
    /// Exchanges the shares of a group: each member receives the bytes of its shard that others have read.
    fn exchange(&mut self, mesh: &DeviceMesh, turn: usize) -> Result<()> {
        let names: Vec<&str> = self.axes.iter().map(|&a| mesh.mesh().axis_name(a)).collect();
        let group = mesh.group_along(&names)?;
        let spec = Spec::new(mesh.mesh(), self.dtype, self.shape.clone(), self.layout.clone())?;
        let CommonRegion { region: common, members, index } = CommonRegion::new(&spec, &self.axes);
        let shares = shares(&common, self.dtype, members, turn);
        let size = self.dtype.size_bytes();
        let regions: Vec<Region> =
            spec.mesh.members_along(&self.axes).iter().map(|coords| spec.region_at(coords)).collect();
        debug_assert_eq!((group.len(), group.index()), (members, index));
        // The bytes of a shard that lie in a share, in the order of the common region.
        let in_share = |region: &Region, share: usize, f: &mut dyn FnMut(usize, usize, usize)| {
            for overlap in common.intersect(region) {
                overlap.runs(|from, to, len| {
                    let Range { start, end } = shares[share];
                    let (first, end) = ((from * size).max(start), ((from + len) * size).min(end));
                    if first < end {
                        f(first - start, to * size + (first - from * size), end - first);
                    }
                });
            }
        };
        let len_in_share = |region: &Region, share: usize| {
            let mut bytes = 0;
            in_share(region, share, &mut |_, _, len| bytes += len);
            bytes
        };
        let pack = |region: &Region| {
            let mut part = Tensor::try_uninit(DType::U8, [len_in_share(region, index)])?;
            let (from, into, mut end) = (self.share.as_bytes()?, part.bytes_mut(), 0);
            in_share(region, index, &mut |start, _, len| {
                into[end..end + len].copy_from_slice(&from[start..start + len]);
                end += len;
            });
            part.to_device(mesh.device())
        };
        let is_common = |region: &Region| *region == common;
        // Replicas get the same bytes: they are packed once.
        let mut packed: Option<Tensor> = None;
        let mut parts = Vec::with_capacity(members);
        for region in &regions {
            parts.push(match (&packed, is_common(region)) {
                (Some(part), true) => part.clone(),
                (None, true) => packed.insert(pack(region)?).clone(),
                _ => pack(region)?,
            });
        }
        let shapes: Vec<Shape> =
            (0..members).map(|share| Shape::from([len_in_share(&self.region, share)])).collect();
        let received = group.all_to_all(parts, &shapes)?;
        let into = self.local.bytes_mut();
        for (share, part) in received.iter().enumerate() {
            let part = part.to_device(Device::Cpu)?;
            let (bytes, mut start) = (part.as_bytes()?, 0);
            in_share(&self.region, share, &mut |_, to, len| {
                into[to..to + len].copy_from_slice(&bytes[start..start + len]);
                start += len;
            });
        }
        self.share = Tensor::try_uninit(DType::U8, [0])?;
        // The others may be other processes.
        expect_bools(self.dtype, into).map_err(|e| e.at(self.name))
    }
}

/// Returns the axes over which ranks have blocks in common: replicated axes, and axes that shard a dim after the first,
/// if all ranks' shards are parts of the shards that they would have without these axes. All ranks find the same axes.
fn common_axes(spec: &Spec) -> Vec<usize> {
    let replicated = |a: &usize| *spec.layout.axis(*a) == Placement::Replicate;
    let columns = |a: &usize| spec.layout.axis(*a).shard_dim().is_some_and(|dim| dim > 0);
    let long = |a: &usize| spec.mesh.axis_len(*a) > 1;
    let long_axes = (0..spec.mesh.ndim()).filter(long);
    let axes: Vec<usize> = long_axes.clone().filter(|a| replicated(a) || columns(a)).collect();
    let inside = || {
        let common = without(spec, &axes);
        spec.mesh.ranks().filter_map(|rank| spec.mesh.coords_of(rank)).all(|coords| {
            let (common, region) = (common.region_at(&coords), spec.region_at(&coords));
            common.intersect(&region).iter().map(|o| o.numel()).sum::<usize>() == region.numel()
        })
    };
    if axes.iter().all(replicated) || inside() { axes } else { long_axes.filter(replicated).collect() }
}

/// Returns the spec that is replicated over some axes.
fn without(spec: &Spec, axes: &[usize]) -> Spec {
    let layout = axes.iter().fold(spec.layout.clone(), |layout, &a| layout.set(a, Placement::Replicate));
    spec.with_layout(layout).expect("fewer sharded axes fit as well")
}

/// The region that the ranks along some axes read together.
struct CommonRegion {
    region: Region,
    /// The number of these ranks, and this one's position among them.
    members: usize,
    index: usize,
}

impl CommonRegion {
    fn new(spec: &Spec, axes: &[usize]) -> CommonRegion {
        let mesh = &spec.mesh;
        CommonRegion {
            region: without(spec, axes).region(),
            members: axes.iter().map(|&a| mesh.axis_len(a)).product(),
            index: axes.iter().fold(0, |index, &a| index * mesh.axis_len(a) + mesh.coords()[a]),
        }
    }
}

/// Returns the bytes of a region's storage that each member reads: whole blocks, because they are read and checked whole.
/// If there are fewer blocks than members, the members take turns from tensor to tensor.
fn shares(common: &Region, dtype: DType, members: usize, turn: usize) -> Vec<Range<usize>> {
    let bytes = common.numel() * dtype.size_bytes();
    let blocks = bytes.div_ceil(BLOCK_BYTES);
    let start =
        |slot: usize| ((slot * (blocks / members) + slot.min(blocks % members)) * BLOCK_BYTES).min(bytes);
    let slot = |member: usize| (member + turn) % members;
    (0..members).map(|member| start(slot(member))..start(slot(member) + 1)).collect()
}

/// Refuses bytes that are not bools: a damaged file with right checksums must not become undefined behaviour.
fn expect_bools(dtype: DType, bytes: &[u8]) -> Result<()> {
    match dtype == DType::Bool && bytes.iter().any(|&byte| byte > 1) {
        true => Err(Error::invalid(VERB, "bools are 0 or 1", "another byte", "load another checkpoint")),
        false => Ok(()),
    }
}

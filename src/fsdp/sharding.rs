//! The axes over which fully sharded data parallelism shards parameters, gradients and optimizer states.

use crate::error::{Error, Result};
use crate::placement::Mesh;
use crate::tensor::DType;

/// The mesh axes over which parameters, their gradients and the optimizer's states are sharded. The batch is sharded over
/// all of them, and over axes on which all three are replicated.
///
/// The bytes per parameter of a rank, in a world of `d` data-parallel ranks that is split in `n` replicas of `d / n` ranks,
/// with parameters of 4 bytes and an optimizer with two states (gathered units and activations come on top):
///
/// | | parameters | gradients | optimizer's states |
/// |---|---|---|---|
/// | [`ddp`](Sharding::ddp) | 4 | 4 | 8 |
/// | [`zero1`](Sharding::zero1) | 4 held, 4/d stored | 4 | 8/d |
/// | [`zero2`](Sharding::zero2) | 4 held, 4/d stored | 4/d | 8/d |
/// | [`zero3`](Sharding::zero3) | 4/d | 4/d | 8/d |
/// | [`hsdp`](Sharding::hsdp) | 4n/d | 4n/d | 8n/d |
/// | [`hfsdp`](Sharding::hfsdp) | 4n/d held, 4/d stored | 4/d | 8/d |
///
/// A parameter is *stored* as the optimizer updates it. It is *held* in the dtype that modules compute in, from the first
/// use after an update to the next update, if it is sharded less than it is stored.
///
/// ZeRO is of Rajbhandari et al., *ZeRO: Memory optimizations toward training trillion parameter models* (SC 2020); hybrid
/// sharding of Zhao et al., *PyTorch FSDP* (VLDB 2023).
///
/// ```
/// use isoshard::fsdp::Sharding;
/// // Between ZeRO-1 and ZeRO-3: all three over one axis.
/// assert_eq!(Sharding::zero3("fsdp").to_string(), "parameters: fsdp, gradients: fsdp, states: fsdp, batch: fsdp");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sharding {
    batch: Vec<String>,
    parameters: Vec<String>,
    gradients: Vec<String>,
    states: Vec<String>,
    stays_gathered: Vec<String>,
    /// The dtypes in which the gradients of units are reduced, by pattern.
    reduced_in: Vec<(String, DType)>,
    gather_limit: Option<usize>,
}

impl Sharding {
    /// Replicates everything over the axes of the batch: data parallelism. The other methods add axes.
    ///
    /// ```
    /// use isoshard::fsdp::Sharding;
    /// let zero2 = Sharding::over(&["dp"]).gradients(&["dp"]).states(&["dp"]);
    /// assert_eq!(zero2, Sharding::zero2("dp"));
    /// ```
    pub fn over(batch: &[&str]) -> Sharding {
        let batch = owned(batch);
        let [parameters, gradients, states, stays_gathered] = Default::default();
        let (reduced_in, gather_limit) = Default::default();
        Sharding { batch, parameters, gradients, states, stays_gathered, reduced_in, gather_limit }
    }

    /// Shards the held parameters over these axes. Stored parameters are sharded as the optimizer's states are.
    ///
    /// ```
    /// use isoshard::fsdp::Sharding;
    /// let axes = &["fsdp"];
    /// assert_eq!(Sharding::over(axes).parameters(axes).gradients(axes).states(axes), Sharding::zero3("fsdp"));
    /// ```
    pub fn parameters(mut self, axes: &[&str]) -> Sharding {
        self.parameters = owned(axes);
        self
    }

    /// Shards gradients over these axes: a reduce-scatter instead of an all-reduce.
    ///
    /// ```
    /// use isoshard::fsdp::Sharding;
    /// assert_eq!(Sharding::zero1("dp").gradients(&["dp"]), Sharding::zero2("dp"));
    /// ```
    pub fn gradients(mut self, axes: &[&str]) -> Sharding {
        self.gradients = owned(axes);
        self
    }

    /// Shards the stored parameters and the optimizer's states over these axes.
    ///
    /// ```
    /// use isoshard::fsdp::Sharding;
    /// assert_eq!(Sharding::ddp("dp").states(&["dp"]), Sharding::zero1("dp"));
    /// ```
    pub fn states(mut self, axes: &[&str]) -> Sharding {
        self.states = owned(axes);
        self
    }

    /// Leaves units gathered from the forward pass to the backward pass, which then gathers nothing for them: those whose
    /// module's path matches `pattern`. It takes their memory, and saves a gather of each.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Forward, Params, Plan}, rng::Init};
    /// use isoshard::fsdp::{BlockPolicy, Sharding, fully_shard};
    /// let received = |pattern: Option<&'static str>| spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let ids: Vec<_> = (0..3)
    ///         .map(|i| params.root().child("h").child(i).param("w", [8, 8], Init::Ones))
    ///         .collect::<isoshard::Result<_>>()?;
    ///     let sharding = pattern.into_iter().fold(Sharding::zero3("fsdp"), |all, p| all.stay_gathered(p));
    ///     fully_shard(&mut params, &["h.*"], &sharding, &BlockPolicy::default())?;
    ///     let cx = Forward::train_without_dropout(&params);
    ///     let product = cx.param(ids[0])?.matmul(&cx.param(ids[1])?)?.matmul(&cx.param(ids[2])?)?;
    ///     drop(cx);
    ///     let before = mesh.received_bytes();
    ///     product.sum_all()?.backward()?;
    ///     Ok(mesh.received_bytes() - before)
    /// });
    /// assert_eq!(received(None)?[0] - received(Some("h.0"))?[0], 128); // half of 64 f32 elements
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn stay_gathered(mut self, pattern: &str) -> Sharding {
        self.stays_gathered.push(pattern.into());
        self
    }

    /// Reduces the gradients of units in a dtype of choice: those whose module's path matches `pattern`; `**` matches all,
    /// the root too. Later patterns override earlier ones. Ranks send partial sums in that dtype, and the optimizer gets the
    /// sums in the parameters' dtype.
    ///
    /// In fast mode each rank rounds its part, so bf16 halves the bytes of f32 gradients; f32 keeps parts of bf16
    /// computation from being rounded between ranks, at twice the bytes. Exact mode sends f32, and refuses other dtypes;
    /// groups ([`SumGroups::with_wire`](crate::placement::SumGroups::with_wire)) send their own, and refuse others.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DeviceMesh, Reduction}, nn::{Params, Plan}, rng::Init, tensor::DType};
    /// use isoshard::fsdp::{BlockPolicy, Sharding, fully_shard};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     params.root().child("h").child(0).param("w", [4, 4], Init::Ones)?;
    ///     let sharding = Sharding::zero3("fsdp").reduce_in("h.*", DType::BF16);
    ///     let refused = fully_shard(&mut params, &["h.*"], &sharding, &BlockPolicy::default()).unwrap_err().to_string();
    ///     assert!(refused.starts_with("fully_shard: exact mode sends sums as f32"), "{refused}");
    ///     mesh.set_reduction(Reduction::Fast);
    ///     fully_shard(&mut params, &["h.*"], &sharding, &BlockPolicy::default()).map(drop)
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn reduce_in(mut self, pattern: &str, dtype: DType) -> Sharding {
        self.reduced_in.push((pattern.into(), dtype));
        self
    }

    /// Limits the bytes that gathered parameters take on a rank, in the dtype that modules compute in. A unit is gathered ahead
    /// if it fits beside the one in use, the root and the units that [stay gathered](Sharding::stay_gathered); otherwise when
    /// it is used first, after the one before it is freed, so its communication is not hidden behind computation. Without a
    /// limit the next unit is always gathered ahead. The same bits and the same bytes are sent with any limit, if units are used
    /// in the order of their declaration.
    ///
    /// The limit is that of one pass whose [`Forward`](crate::nn::Forward) is dropped before the backward pass. It does not
    /// hold for parameters that are *held* ([`Sharding`]), for passes that keep all units
    /// ([`Forward::eval_gathered`](crate::nn::Forward::eval_gathered)), for a recomputed function that reads several units,
    /// and while a unit whose shards are not sent as equal ones is put together, which takes it twice.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// use isoshard::fsdp::{BlockPolicy, ShardedBytes, Sharding, fully_shard};
    /// let gathered = |limit: usize| spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     for i in 0..4 {
    ///         params.root().child("h").child(i).param("w", [8, 8], Init::Ones)?;
    ///     }
    ///     let sharding = Sharding::zero3("fsdp").gather_at_most(limit);
    ///     fully_shard(&mut params, &["h.*"], &sharding, &BlockPolicy::default())?;
    ///     Ok(ShardedBytes::of(&params)?.gathered)
    /// });
    /// assert_eq!(gathered(600)?[0], 512); // two units of 256 bytes
    /// assert_eq!(gathered(500)?[0], 256); // one
    /// let refused = gathered(200).unwrap_err().to_string();
    /// assert!(refused.contains("0 bytes that stay gathered and 256 of unit \"h."), "{refused}");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn gather_at_most(mut self, bytes: usize) -> Sharding {
        self.gather_limit = Some(bytes);
        self
    }

    /// Returns the limit of gathered bytes.
    pub(super) fn gather_limit(&self) -> Option<usize> {
        self.gather_limit
    }

    /// Returns the patterns of the units that are reduced in a dtype of choice, and the dtypes.
    pub(super) fn reductions(&self) -> &[(String, DType)] {
        &self.reduced_in
    }

    /// Returns the patterns of the units that stay gathered.
    pub(super) fn patterns(&self) -> &[String] {
        &self.stays_gathered
    }

    /// Returns data parallelism: everything replicated.
    ///
    /// ```
    /// use isoshard::fsdp::Sharding;
    /// assert_eq!(Sharding::ddp("dp"), Sharding::over(&["dp"]));
    /// ```
    pub fn ddp(axis: &str) -> Sharding {
        Sharding::over(&[axis])
    }

    /// Returns ZeRO-1: the optimizer's states sharded.
    ///
    /// ```
    /// use isoshard::fsdp::Sharding;
    /// assert_eq!(Sharding::zero1("dp").to_string(), "parameters: -, gradients: -, states: dp, batch: dp");
    /// ```
    pub fn zero1(axis: &str) -> Sharding {
        Sharding::over(&[axis]).states(&[axis])
    }

    /// Returns ZeRO-2: gradients sharded as well.
    ///
    /// ```
    /// use isoshard::fsdp::Sharding;
    /// assert_eq!(Sharding::zero2("dp").to_string(), "parameters: -, gradients: dp, states: dp, batch: dp");
    /// ```
    pub fn zero2(axis: &str) -> Sharding {
        Sharding::zero1(axis).gradients(&[axis])
    }

    /// Returns ZeRO-3, which is FSDP: parameters sharded as well, gathered unit by unit in each pass.
    ///
    /// ```
    /// use isoshard::fsdp::Sharding;
    /// assert_eq!(Sharding::zero3("dp").to_string(), "parameters: dp, gradients: dp, states: dp, batch: dp");
    /// ```
    pub fn zero3(axis: &str) -> Sharding {
        Sharding::zero2(axis).parameters(&[axis])
    }

    /// Returns hybrid sharding: FSDP over `shard`, and replicas over `replicate`.
    ///
    /// ```
    /// use isoshard::fsdp::Sharding;
    /// let hybrid = Sharding::hsdp("dp", "fsdp");
    /// assert_eq!(hybrid.to_string(), "parameters: fsdp, gradients: fsdp, states: fsdp, batch: dp fsdp");
    /// ```
    pub fn hsdp(replicate: &str, shard: &str) -> Sharding {
        Sharding { batch: owned(&[replicate, shard]), ..Sharding::zero3(shard) }
    }

    /// Returns hybrid sharding with gradients and the optimizer's states sharded over both axes: each update is followed by
    /// a gather over `replicate`.
    ///
    /// ```
    /// use isoshard::fsdp::Sharding;
    /// let hybrid = Sharding::hfsdp("dp", "fsdp");
    /// assert_eq!(hybrid.to_string(), "parameters: fsdp, gradients: fsdp dp, states: fsdp dp, batch: dp fsdp");
    /// ```
    pub fn hfsdp(replicate: &str, shard: &str) -> Sharding {
        let both = &[shard, replicate];
        Sharding::hsdp(replicate, shard).gradients(both).states(both)
    }

    /// Returns the axes over which the batch is sharded.
    pub(super) fn batch(&self) -> &[String] {
        &self.batch
    }

    /// Returns the numbers of the axes that shard parameters, gradients and states on a mesh.
    ///
    /// # Errors
    /// Refuses an axis that the mesh lacks, one that is named twice, one that does not shard the batch, and parameters that
    /// are sharded more than gradients, or gradients more than states.
    pub(super) fn axes(&self, mesh: &Mesh) -> Result<ShardingAxes> {
        let all = [&self.batch, &self.parameters, &self.gradients, &self.states];
        let mut numbers = Vec::with_capacity(all.len());
        for axes in all {
            let found = axes.iter().map(|axis| mesh.axis(axis)).collect::<Result<Vec<usize>>>()?;
            if let Some(k) = (0..found.len()).find(|&k| found[..k].contains(&found[k])) {
                return self.refuse(format!("axis {} is named twice", axes[k]));
            }
            numbers.push(found);
        }
        let [batch, parameters, gradients, states] = numbers.try_into().expect("four lists");
        for (rule, some, all) in [
            ("an axis that shards parameters shards gradients", &parameters, &gradients),
            ("an axis that shards gradients shards states", &gradients, &states),
            ("an axis that shards states shards the batch", &states, &batch),
        ] {
            if some.iter().any(|a| !all.contains(a)) {
                return self.refuse(rule.to_string());
            }
        }
        Ok(ShardingAxes { parameters, gradients, states })
    }

    fn refuse<T>(&self, rule: String) -> Result<T> {
        Err(Error::invalid("fully_shard", rule, self.to_string(), ""))
    }
}

/// The numbers of the mesh axes of a [`Sharding`].
pub(super) struct ShardingAxes {
    pub parameters: Vec<usize>,
    pub gradients: Vec<usize>,
    pub states: Vec<usize>,
}

impl std::fmt::Display for Sharding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names =
            [("parameters", &self.parameters), ("gradients", &self.gradients), ("states", &self.states)];
        for (what, axes) in names {
            let axes = if axes.is_empty() { "-".into() } else { axes.join(" ") };
            write!(f, "{what}: {axes}, ")?;
        }
        write!(f, "batch: {}", self.batch.join(" "))
    }
}

fn owned(axes: &[&str]) -> Vec<String> {
    axes.iter().map(|axis| axis.to_string()).collect()
}

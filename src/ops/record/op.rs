//! The trait that every operator implements.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::{MeshAxis, Meta, Metas, OpKey, Row, Vjp, Windows, Work};
use crate::error::Result;
use crate::tensor::Tensor;

/// A short list of local tensors, one per operand or result.
pub type Tensors = SmallVec<[Tensor; 3]>;

/// The record of one operator: shapes, sharding rows, kernels, work and derivative.
///
/// The value holds the operator's attributes, for example a dim or a probability. It is part of the key under which
/// plans are cached, so it is compared and hashed. `ins` and `outs` of type [`Meta`] have *global* shapes; the tensors
/// that [`Op::eval`] and [`Op::cuda`] take and return are this rank's shards. The [module's page](crate::ops) shows a
/// complete operator.
///
/// # Contract
/// The methods agree with each other. A broken clause is an error in the operator's name when a call is planned, when a
/// derivative is written, or when a kernel has run:
///
/// - Each row of [`Op::rows`] has one placement per operand, and one per result of [`Op::infer`]. It shards only dims that
///   the tensor has.
/// - A tree sum ([`AxisPlacement::TreeSum`](super::AxisPlacement::TreeSum)) is the placement of a result, in a row that
///   shards an operand. Rows with one are listed for every [`MeshAxis`], also for an axis of one rank.
/// - A result is ragged only if an operand is.
/// - [`Op::eval`] and [`Op::cuda`] return one tensor per result of [`Op::infer`], with its dtype and the local shape of its
///   window.
/// - [`Op::vjp`] names operands, results and values that there are. A gradient has its operand's dtype and shape. Each
///   operand whose gradient is wanted gets one ([`Vjp::set`]) or a reason why there is none ([`Vjp::none`]).
///
/// Nothing can check in a call that a row holds and that a kernel gives the same bits on every mesh: `testing::judge` and
/// `testing::equivalent` do that in a test.
pub trait Op: OpKey + fmt::Debug + Send + Sync {
    /// Returns the operator's name, with which its errors begin.
    ///
    /// ```
    /// use isoshard::ops::{Op, Softmax};
    /// assert_eq!(Softmax { dim: 1 }.name(), "softmax");
    /// ```
    fn name(&self) -> &'static str;

    /// Returns the results' dtypes and global shapes.
    ///
    /// ```
    /// use isoshard::{ops::{Matmul, Meta, Op}, tensor::DType};
    /// let ins = [Meta::new(DType::F32, [4, 6]), Meta::new(DType::F32, [6, 5])];
    /// let product = Matmul::new("m k, k n -> m n")?;
    /// assert_eq!(product.infer(&ins)?[0].to_string(), "f32[4, 5]");
    /// let refused = product.infer(&[ins[0].clone(), ins[0].clone()]).unwrap_err();
    /// assert!(refused.to_string().starts_with("matmul: dim k has extents 6 and 4"), "{refused}");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses operands that the operator cannot take. The error begins with the operator's name.
    fn infer(&self, ins: &[Meta]) -> Result<Metas>;

    /// Returns the sharding rows for one mesh axis of `axis.ranks` ranks.
    ///
    /// A row is a claim: if the operands have the row's placements on this axis and each rank runs [`Op::eval`] on its
    /// shards, then the local results are the shards of the results in the row's placements. The row of replicated
    /// operands and results holds for every operator and is not listed. Rows for operands that are ragged over dims
    /// follow from rows that shard these dims, if operands and results have equal extents there; an operator lists
    /// [`AxisPlacement::Ragged`](super::AxisPlacement::Ragged) if its kernel computes flattened shards in one call.
    /// `ins` have passed [`Op::infer`].
    ///
    /// ```
    /// use isoshard::{ops::{MeshAxis, Meta, Op, Softmax}, tensor::DType};
    /// let x = Meta::new(DType::F32, [8, 100]);
    /// // Softmax over dim 1 needs whole rows, so only dim 0 may be sharded.
    /// assert_eq!(format!("{:?}", Softmax { dim: 1 }.rows(&[x], MeshAxis::new(2))), "[S0 -> S0]");
    /// ```
    fn rows(&self, ins: &[Meta], axis: MeshAxis) -> Vec<Row>;

    /// Computes this rank's shards of the results from its shards of the operands, on the CPU.
    ///
    /// `at` gives the window of each operand and result in its global tensor. A kernel may write its result over an
    /// operand's buffer if it is the buffer's only owner ([`Tensor::is_unique`]).
    ///
    /// ```
    /// use isoshard::ops::{Meta, Op, Sub, Windows};
    /// use isoshard::tensor::Tensor;
    /// let mut ins = [Tensor::from_vec(vec![5i32, 7], [2])?, Tensor::from_vec(vec![3i32, 0], [2])?];
    /// let metas: Vec<Meta> = ins.iter().map(Meta::of).collect();
    /// let at = Windows::whole(&metas, &Sub.infer(&metas)?);
    /// assert_eq!(Sub.eval(&mut ins, &at)?[0].to_vec::<i32>()?, [2, 7]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error only for what [`Op::infer`] cannot see, such as an index out of range.
    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors>;

    /// Computes the same as [`Op::eval`] on operands that are stored on one CUDA device. Puts kernels on this rank's
    /// stream and does not wait for them.
    ///
    /// # Errors
    /// Returns an error if the device has no memory left or a launch fails. A kernel records faulty values, such as an
    /// index out of range, and the next call that reads a value on the host returns the error.
    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors>;

    /// Returns the operations and bytes of a call, as a formula of global shapes. If a row shards operands and results,
    /// each rank does its share of this work.
    ///
    /// ```
    /// use isoshard::{ops::{Meta, Op, Sum}, tensor::DType};
    /// let x = Meta::new(DType::F32, [1000]);
    /// let sum = Sum { dims: [0].into_iter().collect(), keep: false };
    /// let outs = sum.infer(&[x.clone()])?;
    /// let work = sum.work(&[x], &outs);
    /// assert_eq!((work.flops, work.bytes), (999, 4 * 1001));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work;

    /// Writes the derivative as steps of other operators; [`Vjp`] has an example.
    ///
    /// # Errors
    /// Returns an error if one of the steps' operators refuses its operands.
    fn vjp(&self, g: &mut Vjp) -> Result<()>;

    /// Returns a variant that keeps the first `outer` reduced dims as leading dims of the result, or `None` if there is
    /// none. Only for operators with one result.
    ///
    /// In exact mode a rank may have to return several nodes of the reduction tree. With this variant the rank computes
    /// them in one kernel call, without it in one call per node.
    ///
    /// ```
    /// use isoshard::{ops::{Meta, Op, Sum}, tensor::DType};
    /// let sum = Sum { dims: [0, 1].into_iter().collect(), keep: false };
    /// let per_row = sum.keep_leading(1).expect("sum has this variant");
    /// assert_eq!(per_row.infer(&[Meta::new(DType::F32, [4, 6])])?[0].to_string(), "f32[4]");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    fn keep_leading(&self, _outer: usize) -> Option<Box<dyn Op>> {
        None
    }

    /// Returns true if a program can declare that this operator's sums are taken in parts: products, and the gradients
    /// of tables. Only for operators with one result.
    ///
    /// ```
    /// use isoshard::ops::{Matmul, Op, Sum};
    /// assert!(Matmul::for_dims(2, 2)?.takes_groups());
    /// assert!(!Sum { dims: [0].into_iter().collect(), keep: false }.takes_groups()); // losses stay exact
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    fn takes_groups(&self) -> bool {
        false
    }

    /// Returns true if [`Op::eval`] computes no element: its results are views of the operands, or copies if strides
    /// allow no view.
    ///
    /// ```
    /// use isoshard::ops::{Op, Permute, Softmax};
    /// assert!(Permute::swap(2, 0, 1).is_view() && !Softmax { dim: 1 }.is_view());
    /// ```
    fn is_view(&self) -> bool {
        false
    }

    /// Returns true if [`Op::eval`] writes a result over an operand that nothing else holds, if dtype and shape are the
    /// same. Dry runs use this to count memory.
    ///
    /// ```
    /// use isoshard::ops::{Add, Op, Softmax};
    /// assert!(Add.writes_in_place() && !Softmax { dim: 1 }.writes_in_place());
    /// ```
    fn writes_in_place(&self) -> bool {
        false
    }

    /// Returns the operands that must be computed from other operands to give finite results, such as the maximum of
    /// each row that an exponential subtracts. The tests compute these; they give any values to the other operands.
    ///
    /// ```
    /// use isoshard::{ops::{Meta, Op, SumExp}, tensor::DType};
    /// let ins = [Meta::new(DType::F32, [4, 10]), Meta::new(DType::F32, [4, 1])];
    /// let statistics = SumExp.statistics(&ins);
    /// assert_eq!((statistics[0].operand, statistics[0].op.name()), (1, "max"));
    /// ```
    fn statistics(&self, _ins: &[Meta]) -> Vec<Statistic> {
        Vec::new()
    }
}

/// An operand that is a result of another operator on other operands; see [`Op::statistics`].
#[derive(Clone, Debug)]
pub struct Statistic {
    /// The operand's number.
    pub operand: usize,
    /// The operator that computes the operand.
    pub op: Arc<dyn Op>,
    /// The numbers of the operands that `op` takes, in order.
    pub of: Vec<usize>,
    /// The number of the result of `op` that the operand is.
    pub result: usize,
}

/// An operator that a CUDA device can compute for many calls in one launch, such as an optimizer's step on many
/// parameters.
///
/// [`nn::Params::update`](crate::nn::Params::update) and
/// [`DTensor::apply_owned_batch`](crate::dtensor::DTensor::apply_owned_batch) take such operators. On the CPU they make
/// one kernel call per operand list.
///
/// ```
/// use isoshard::comm::spmd;
/// use isoshard::dtensor::{DTensor, DTensors, DeviceMesh};
/// use isoshard::ops::{Bits, SgdStep, Unkeyed};
/// use isoshard::placement::Layout;
/// use isoshard::tensor::DType;
///
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let full = |value| DTensor::full(&mesh, DType::F32, [4], "(S0)", value);
///     let scale = DTensor::full(&mesh, DType::F32, [], Layout::replicated(1), 1.0)?;
///     let op = SgdStep { momentum: Bits(0.0), weight_decay: Bits(0.0), nesterov: false, lr: Unkeyed(0.5) };
///     // Operands: parameter, gradient, momentum, scale of the gradient.
///     let mut first: DTensors = [full(1.0)?, full(2.0)?, full(0.0)?, scale.clone()].into_iter().collect();
///     let mut second: DTensors = [full(3.0)?, full(4.0)?, full(0.0)?, scale].into_iter().collect();
///     let (outs, end) = DTensor::apply_owned_batch(&mut [(&op, &mut first), (&op, &mut second)]);
///     end?;
///     assert_eq!(outs[0][0].full_tensor()?.to_f64_vec(), [0.0; 4]);
///     assert_eq!(outs[1][0].full_tensor()?.to_f64_vec(), [1.0; 4]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
pub trait Batched: Op + Sized {
    /// True for an optimizer's step that takes one more operand before the last, and returns it last: a tensor of an f32
    /// parameter's shape in f16 or bf16, which it overwrites with the new parameter, rounded.
    /// [`Params::update`](crate::nn::Params::update) brings it where modules compute in that dtype, so that no pass
    /// rounds the parameter again.
    const ROUNDS: bool = false;

    /// Makes all calls on one CUDA device and returns their results in order. A call is an operator and its operands,
    /// as for [`Op::cuda`].
    ///
    /// The default calls [`Op::cuda`] once per call. An operator with a kernel for many calls overrides it.
    ///
    /// # Errors
    /// Returns the errors of [`Op::cuda`]. If one call fails, none has results.
    fn cuda_batch(calls: &mut [(&Self, &mut [Tensor])], at: &[&Windows]) -> Result<Vec<Tensors>> {
        calls.iter_mut().zip(at).map(|((op, ins), at)| op.cuda(ins, at)).collect()
    }
}

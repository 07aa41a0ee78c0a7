//! A decoder with the weights of a folder.

use std::path::Path;

use super::VERB;
use super::agreement::{agree, agree_on_files};
use super::config::HuggingFaceConfig;
use super::format::HuggingFaceFormat;
use crate::comm::DryRun;
use crate::dtensor::DeviceMesh;
use crate::error::{Error, Result};
use crate::nn::{Decoder, Params, Plan};
use crate::tensor::Device;

/// The seed of parameters that are declared after the weights are read.
const LATER_SEED: u64 = 0;

/// A decoder that was read from a folder, its parameters, and the form of its files.
pub struct PretrainedDecoder {
    /// The parameters, f32, in the layouts of the plan.
    pub params: Params,
    /// The model.
    pub model: Decoder,
    /// The names, dtypes and shapes of the files, for export.
    pub format: HuggingFaceFormat,
}

impl Decoder {
    /// Reads a model that `save_pretrained` of `transformers` wrote, straight into the shards of a plan.
    ///
    /// Each rank maps the files and copies the elements that it stores, so no rank holds a whole tensor that it does
    /// not need whole. Nothing is allocated before the files are found to be what config.json says, and the plan's
    /// patterns to match. All ranks call this together: they compare configs, headers and samples of the weights, at
    /// most 4,096 places of 256 bytes, by some bytes per rank, and fail together. [`HuggingFaceFormat::compare_all`]
    /// compares all bytes. The files must not change meanwhile.
    ///
    /// Parameters that are declared later, such as adapters, are drawn from the seed 0; [`Params::reseed`] sets another.
    ///
    /// [`HuggingFaceConfig::read`] tells the number of heads, from which a plan for tensor parallelism follows:
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, hugging_face::HuggingFaceConfig, tensor::DType};
    /// use isoshard::nn::{Decoder, Forward, Module, Parallel, Plan};
    /// let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hugging_face/qwen3");
    /// spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let [_, kv_heads] = HuggingFaceConfig::read(dir)?.heads();
    ///     let plan = Plan::transformer(mesh.mesh(), Parallel { heads: kv_heads, sequence: false })?;
    ///     let qwen = Decoder::from_hugging_face(&mesh, dir, plan)?;
    ///     let tokens = DTensor::zeros(&mesh, DType::I64, [1, 5], "(R)")?;
    ///     let scores = qwen.model.forward(&Forward::eval(&qwen.params), &tokens)?;
    ///     assert_eq!(scores.shape()[..], [1, 5, 53]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`HuggingFaceFormat::read`] refuses, ranks that read different files, a plan that cannot shard the
    /// parameters, and one with a pattern that matches nothing of the model or of adapters that it can have. A program
    /// with parameters of its own beside the model's declares all of them and calls [`HuggingFaceFormat::load`].
    pub fn from_hugging_face(
        mesh: &DeviceMesh,
        dir: impl AsRef<Path>,
        plan: Plan,
    ) -> Result<PretrainedDecoder> {
        // The other ranks may be done long before a rank whose disk is slow.
        let _busy = mesh.rank().busy("reading weights");
        let opened = HuggingFaceFormat::open_folder(dir.as_ref()).and_then(|opened| {
            expect_plan(mesh, &plan, opened.0.config())?;
            Ok(opened)
        });
        let read = opened.as_ref().map(|(format, files)| (format, files)).map_err(Error::clone);
        agree_on_files(mesh, read, false)?;
        let (format, files) = opened?;
        let fill = || {
            let mut params = Params::blank(mesh, plan)?;
            let model = Decoder::new(&mut params, format.config().decoder())?;
            format.fill(&files, &mut params)?;
            params.reseed(LATER_SEED);
            Ok((params, model))
        };
        let (params, model) = agree(mesh, VERB, fill(), 0)?;
        Ok(PretrainedDecoder { params, model, format })
    }
}

/// Refuses a plan that cannot shard a model, or that has a pattern that matches nothing of the model and its adapters,
/// before there is memory for a parameter.
fn expect_plan(mesh: &DeviceMesh, plan: &Plan, config: &HuggingFaceConfig) -> Result<()> {
    // A dry run takes no memory, and a thread has one at a time.
    if mesh.device() == Device::Meta {
        return Ok(());
    }
    let dry = DryRun::new(mesh.rank().world_len(), mesh.rank().rank())?;
    let mut params = Params::blank(&DeviceMesh::on(&dry.rank()?, mesh.mesh())?, plan.clone())?;
    Decoder::new(&mut params, config.decoder())?;
    params.expect_plan_matches()
}

impl PretrainedDecoder {
    /// Writes the parameters into a new folder, as [`HuggingFaceFormat::save`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Decoder, Plan}};
    /// let from = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hugging_face/llama2");
    /// let to = std::env::temp_dir().join(format!("isoshard-saved-{}", std::process::id()));
    /// # let _ = std::fs::remove_dir_all(&to);
    /// let dir = to.clone();
    /// spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let llama = Decoder::from_hugging_face(&mesh, from, Plan::default().fsdp("fsdp"))?;
    ///     llama.save(&dir)?;
    ///     let again = Decoder::from_hugging_face(&mesh, &dir, Plan::default().fsdp("fsdp"))?;
    ///     assert_eq!(again.params.digest()?, llama.params.digest()?);
    ///     Ok(())
    /// })?;
    /// std::fs::remove_dir_all(&to).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`HuggingFaceFormat::save`].
    pub fn save(&self, dir: impl AsRef<Path>) -> Result<()> {
        self.format.save(&self.params, dir)
    }
}

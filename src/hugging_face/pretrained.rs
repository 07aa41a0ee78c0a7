//! A decoder with the weights of a folder.

use std::path::Path;

use super::VERB;
use super::agreement::agree;
use super::config::HuggingFaceConfig;
use super::format::HuggingFaceFormat;
use super::weight_files::WeightFiles;
use crate::dtensor::DeviceMesh;
use crate::error::Result;
use crate::nn::{Decoder, Params, Plan};

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
    /// Each rank maps the files and copies the elements that it stores, so no rank holds a whole tensor that it does not
    /// need whole. Nothing is allocated before the files are found to be what config.json says. All ranks call this
    /// together: they compare what they read by some bytes per rank, and fail together. The files must not change
    /// meanwhile.
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
    ///     let tokens = DTensor::zeros(&mesh, DType::I64, [1, 5], "(R)".parse()?)?;
    ///     let scores = qwen.model.forward(&Forward::eval(&qwen.params), &tokens)?;
    ///     assert_eq!(scores.shape()[..], [1, 5, 53]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`HuggingFaceFormat::read`] refuses, ranks that read different models, and a plan that cannot shard the parameters.
    pub fn from_hugging_face(
        mesh: &DeviceMesh,
        dir: impl AsRef<Path>,
        plan: Plan,
    ) -> Result<PretrainedDecoder> {
        // The other ranks may be done long before a rank whose disk is slow.
        let _busy = mesh.rank().busy("reading weights");
        let open = || {
            let config = HuggingFaceConfig::read(&dir)?;
            let files = WeightFiles::open(dir.as_ref())?;
            Ok((HuggingFaceFormat::of_files(config, &files)?, files))
        };
        let opened = open();
        let word = opened.as_ref().map_or(0, |(format, _)| format.fingerprint());
        let (format, files) = agree(mesh, VERB, opened, word)?;
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

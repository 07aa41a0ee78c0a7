//! Failures and differences of single ranks, which end a call on all ranks.

use super::format::HuggingFaceFormat;
use crate::dtensor::DeviceMesh;
use crate::error::{Error, Result};
use crate::tensor::Device;

/// Returns this rank's value if no rank brings an error and all ranks bring equal words; otherwise an error on every
/// rank. All-gathers of some bytes per rank.
pub(super) fn agree<T>(mesh: &DeviceMesh, verb: &str, mine: Result<T>, word: u64) -> Result<T> {
    // A dry run has no peers.
    if mesh.device() == Device::Meta {
        return mine;
    }
    let told = mine.as_ref().map(|_| vec![word as i64]).map_err(Error::clone);
    let all = mesh.agree(verb, told);
    let (mine, all) = (mine?, all?);
    match all.iter().position(|words| *words != all[0]) {
        None => Ok(mine),
        Some(other) => {
            let given = format!("positions 0 and {other} of {}", mesh.mesh());
            let remedy = "give all ranks the same folder";
            Err(Error::invalid(verb, "the ranks read different configs or tensors", given, remedy))
        }
    }
}

impl HuggingFaceFormat {
    /// Returns a hash (FNV-1a, 64 bits) of the config, and of the tensors' names, dtypes and shapes.
    pub(super) fn fingerprint(&self) -> u64 {
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        let mut add = |text: &str| {
            for &byte in text.as_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        };
        add(&serde_json::Value::Object(self.config.json.clone()).to_string());
        for (tensor, dtype) in self.tensors.iter().zip(&self.dtypes) {
            add(&format!("{} {dtype} {};", tensor.name, tensor.shape));
        }
        add(&format!("{:?}", self.second_head));
        hash
    }
}

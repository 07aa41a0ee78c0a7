//! Adapters on models that were read, and what export writes of them.

use isoshard::comm::spmd;
use isoshard::dtensor::DeviceMesh;
use isoshard::nn::{Forward, LoraConfig, Plan};

use super::{Stored, fixture, new_folder, put, read};

/// Adapters of a model that was read have values, learn, and are merged into files that can be read again.
#[test]
fn adapters_of_pretrained_models_learn() {
    let dir = new_folder("adapters");
    let run = |name: &'static str, pattern: &'static str, seed: Option<u64>| {
        let target = dir.join(format!("{name}-{seed:?}"));
        let run = move |rank| {
            let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
            let mut of = read(&mesh, &fixture(name))?;
            let before = of.params.digest()?;
            if let Some(seed) = seed {
                of.params.reseed(seed);
            }
            let lora = LoraConfig { rank: 2, alpha: 8.0, dropout: 0.0 };
            let found = of.model.add_lora(&mut of.params, pattern, lora)?;
            let mut first = Vec::new();
            for id in of.params.ids().filter(|&id| of.params.path(id).ends_with("lora_a")) {
                let values = of.params.value(id).full_tensor()?.to_vec::<f32>()?;
                assert!(values.iter().all(|&x| x != 0.0), "{} has zeros", of.params.path(id));
                first.push(values);
            }
            assert_eq!(first.len(), found);
            assert!((1..first.len()).all(|i| first[i] != first[i - 1]), "each adapter has its own values");
            let expected = Stored::read(&fixture(name).join("expected.safetensors"));
            let (tokens, targets) = (put(&of, expected.i64s("tokens"))?, put(&of, expected.i64s("targets"))?);
            let mut losses = Vec::new();
            for _ in 0..5 {
                let mut loss =
                    of.model.loss(&Forward::train_without_dropout(&of.params), &tokens, &targets)?;
                losses.push(loss.item()?);
                let grads = loss.backward()?;
                drop(loss);
                let ids: Vec<_> = of.params.ids().collect();
                for id in ids {
                    let value = of.params.value(id);
                    if let Some(grad) = grads.get(value) {
                        let step = grad.redistribute(value.layout().clone())?.mul_scalar(-0.1)?;
                        of.params.set(id, value.detach().add(&step)?)?;
                    }
                }
            }
            assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "{losses:?}");
            let (_, merged) = of.model.merge_lora(&of.params, Plan::default().fsdp("fsdp"))?;
            of.format.save(&merged, &target)?;
            let again = read(&mesh, &target)?;
            assert_ne!(merged.digest()?, before);
            assert_eq!(again.params.digest()?, merged.digest()?);
            Ok(first)
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}")).swap_remove(0)
    };
    std::fs::create_dir_all(&dir).expect("the folder is new");
    let llama = |seed| run("llama2", "h.*.attn.*", seed);
    let first = llama(None);
    assert_eq!(first, llama(Some(0)), "the seed is the documented one");
    assert_ne!(llama(Some(1)), llama(Some(2)));
    // Four maps of attention, and three of the experts, in two layers.
    assert_eq!(first.len(), 8);
    assert_eq!(run("mixtral", "h.*.moe.experts.*", None).len(), 6);
    std::fs::remove_dir_all(&dir).expect("it was made here");
}

//! Steps of training on several threads per rank.

use super::AdamW;
use crate::comm::Spmd;
use crate::dtensor::{DTensor, DeviceMesh};
use crate::error::Result;
use crate::nn::{Forward, Gpt, GptConfig, Llama, LlamaConfig, Parallel, Params, Plan};
use crate::rng::Generator;
use crate::tensor::{DType, Tensor, cpu};
use isoshard_kernels::set_smallest_part;

/// Returns the losses of two steps of a model, and a digest of the parameters after them.
fn train(threads: usize, mesh: &'static str, llama: bool) -> Result<(Vec<u64>, u64)> {
    let ranks = mesh.rsplit('=').next().and_then(|n| n.parse().ok()).unwrap_or(1);
    let results = Spmd::new(ranks).threads_per_rank(threads).run(move |rank| {
        // The kernels of such a model are too small for several threads.
        set_smallest_part(40);
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
        let (batch, mut params) = (plan.batch_layout(mesh.mesh()), Params::new(&mesh, plan, 7)?);
        let (vocabulary, block, layers, heads, width, dropout) = (35, 21, 1, 2, 20, 0.2);
        let gpt = GptConfig { vocabulary, block, layers, heads, width, dropout, bias: true };
        let gpt = if llama { None } else { Some(Gpt::new(&mut params, gpt)?) };
        let (kv_heads, head_width, hidden, base) = (1, 10, 32, 1e4);
        let config = LlamaConfig {
            vocabulary,
            block,
            layers,
            heads,
            kv_heads,
            head_width,
            width,
            hidden,
            base,
            dropout,
        };
        let llama = if gpt.is_some() { None } else { Some(Llama::new(&mut params, config)?) };
        let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(1e-2).clip(1.0);
        let mut generator = Generator::new(7).child("dropout");
        let text = |from: i64| Tensor::from_vec((from..from + 84).map(|i| i * i % 35).collect(), [4, 21]);
        let tokens = DTensor::distribute(&mesh, &text(0)?, batch.clone())?;
        let targets = DTensor::distribute(&mesh, &text(1)?, batch)?;
        let mut losses = Vec::new();
        for _ in 0..2 {
            let forward = Forward::train(&params, &mut generator);
            let mut loss = match (&gpt, &llama) {
                (Some(gpt), _) => gpt.loss(&forward, &tokens, &targets)?,
                (None, llama) => llama.as_ref().expect("one of both").loss(&forward, &tokens, &targets)?,
            };
            losses.push(loss.item()?.to_bits());
            optimizer.step(&mut params, &mut loss.backward()?)?;
        }
        Ok((losses, params.digest()?))
    })?;
    Ok(results.into_iter().next().expect("a rank"))
}

#[test]
fn a_step_of_training_has_the_same_bits_on_any_number_of_threads() {
    for llama in [false, true] {
        let want = train(1, "dp=1", llama).unwrap();
        for (threads, mesh) in [(2, "dp=1"), (3, "dp=1"), (5, "dp=1"), (2, "fsdp=2")] {
            assert_eq!(train(threads, mesh, llama).unwrap(), want, "{threads} threads, {mesh}, {llama}");
        }
    }
}

/// Kernels that the model above does not have, or not in each dtype and layout.
#[test]
fn kernels_have_the_same_bits_on_any_number_of_threads() {
    let noise = |shape: [usize; 3]| {
        Tensor::build(shape, |out: &mut [f32]| {
            out.iter_mut().enumerate().for_each(|(i, x)| *x = ((i * 7919) % 1009) as f32 * 0.003 - 1.5);
        })
    };
    let run = |threads: usize| -> Result<Vec<Vec<u8>>> {
        let x = noise([9, 70, 33]);
        let turned = noise([33, 70, 9]).permute(&[2, 1, 0])?;
        let row = noise([1, 1, 33]).expand([9, 70, 33])?;
        let mut all = Vec::new();
        cpu::with_threads(threads, || -> Result<()> {
            for x in [&x, &turned, &row] {
                for dims in [&[0][..], &[1], &[2], &[0, 1], &[0, 2], &[0, 1, 2]] {
                    all.push(cpu::reduce("sum", x, dims, crate::tensor::ReduceOp::Sum, false)?);
                    all.push(cpu::reduce("max", x, dims, crate::tensor::ReduceOp::Max, false)?);
                }
                for dtype in [DType::BF16, DType::F64, DType::I64, DType::Bool] {
                    let narrow = cpu::cast(x, dtype)?;
                    all.push(cpu::cast(&narrow, DType::F16)?);
                    all.extend([narrow.contiguous()?, cpu::map1::<f32, f32, _>(x, f32::sqrt)?]);
                }
                all.push(cpu::gemm("matmul", x, &x.transpose(1, 2)?, &[33])?);
            }
            Ok(())
        })?;
        all.iter().map(|x| Ok(x.contiguous()?.as_bytes()?.to_vec())).collect()
    };
    set_smallest_part(40);
    let want = run(1).unwrap();
    for threads in [2, 3, 5] {
        assert!(run(threads).unwrap() == want, "{threads} threads");
    }
    set_smallest_part(20_000);
}

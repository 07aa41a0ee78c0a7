//! Text that the model writes.

use isoshard::Result;
use isoshard::dtensor::DTensor;
use isoshard::nn::{Forward, Params};
use isoshard::rng::{Generator, uniform};
use isoshard::tensor::Tensor;

use crate::data::Corpus;
use crate::model::Model;

/// Scores are divided by this before the softmax: below 1, likely characters become likelier.
const TEMPERATURE: f64 = 0.8;

/// Writes `len` tokens, each drawn from the model's distribution after the tokens before it; it sees the last `block`.
///
/// All ranks compute, on the mesh that trained. Each rank knows the probabilities and the random number, so the chosen
/// token need not be sent.
pub fn sample(
    (model, block): (&Model, usize),
    params: &Params,
    corpus: &Corpus,
    seed: u64,
    len: usize,
) -> Result<String> {
    let mesh = params.mesh();
    let _guard = mesh.no_grad();
    let layout = params.batch_layout();
    let mut draws = vec![0f32; len];
    uniform(Generator::new(seed).child("sample").next_draw(), 0, &mut draws);

    let mut tokens = vec![corpus.first_token()];
    for u in draws {
        let seen = &tokens[tokens.len().saturating_sub(block)..];
        let x = DTensor::distribute(mesh, &Tensor::from_slice(seen, [1, seen.len()])?, layout.clone())?;
        let scores = model.forward(&Forward::eval(params), &x)?;
        let odds =
            scores.slice(1, seen.len() - 1, 1)?.mul_scalar(1.0 / TEMPERATURE)?.softmax(-1)?.full_tensor()?;
        let token = pick(&odds.to_vec::<f32>()?, u);
        tokens.push(token as i64);
    }
    corpus.text(&tokens[1..])
}

/// Returns the first index up to which the odds add up to more than `u`.
fn pick(odds: &[f32], u: f32) -> usize {
    let mut sum = 0.0;
    let passed = odds.iter().position(|p| {
        sum += p;
        sum > u
    });
    passed.unwrap_or(odds.len() - 1)
}

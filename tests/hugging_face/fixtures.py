"""Writes the fixtures of tests/suite/hugging_face.rs: small random models of each architecture, made by `transformers`.

Each folder below this file has what `save_pretrained` writes (config.json and model.safetensors), and beside it

- expected.safetensors: tokens and targets [batch, time], logits, loss, a prompt and 24 greedily chosen tokens, each by
  a whole forward pass;
- gradients.safetensors: the loss's gradients, under the names that the parameters have in model.safetensors.

Some folders have a config and logits only: another config computes them from the weights of another folder.

A seed is taken only if at each step the two best logits differ by more than 1e-3, and if routers choose by a margin of
1e-3 as well. Run it with `transformers` 5.23 and PyTorch 2.15 on a CPU:

    python tests/hugging_face/fixtures.py            # writes the folders anew
    python tests/hugging_face/fixtures.py --check    # compares with the folders, up to rounding; takes 10 s

Another version may save other configs or names: then --check prints SKIPPED.
"""

import argparse
import json
import pathlib
import shutil
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

VERSION = "5.23."
HERE = pathlib.Path(__file__).parent
BATCH, TIME, PROMPT, GREEDY = 2, 12, 5, 24
VOCABULARY, WIDTH, HIDDEN = 53, 24, 33
MARGIN = 1e-3

# Sizes that all models with grouped heads share.
GROUPED = dict(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=HIDDEN,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
    tie_word_embeddings=False,
)


def rope(theta, **more):
    return dict(rope_parameters=dict(rope_theta=theta, rope_type="default") | more)


def configs():
    t = transformers
    llama31 = dict(
        rope_type="llama3",
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    )
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=10, decoder_sparse_step=1)
    gemma3_rope = dict(
        full_attention=dict(rope_type="default", rope_theta=1e5),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
    )
    return {
        "gpt2": t.GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4, n_inner=40, bos_token_id=1, eos_token_id=2
        ),
        "llama2": t.LlamaConfig(**GROUPED | dict(num_key_value_heads=4), **rope(1e4)),
        "llama3": t.LlamaConfig(**GROUPED, **rope(5e5)),
        "llama3.1": t.LlamaConfig(**GROUPED | dict(tie_word_embeddings=True), **rope(5e5, **llama31)),
        "llama_biases": t.LlamaConfig(**GROUPED, **rope(1e4), attention_bias=True, mlp_bias=True),
        "mistral": t.MistralConfig(**GROUPED, **rope(1e4), head_dim=8, sliding_window=5),
        "qwen2": t.Qwen2Config(**GROUPED | dict(tie_word_embeddings=True), **rope(1e6)),
        "qwen3": t.Qwen3Config(**GROUPED, **rope(1e6), head_dim=8),
        "gemma": t.GemmaConfig(**GROUPED | dict(tie_word_embeddings=True), **rope(1e4), head_dim=8),
        "gemma2": t.Gemma2Config(
            **GROUPED | dict(tie_word_embeddings=True),
            **rope(1e4),
            head_dim=8,
            sliding_window=4,
            query_pre_attn_scalar=11,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=6.0,
        ),
        "gemma3": t.Gemma3TextConfig(
            **GROUPED | dict(tie_word_embeddings=True),
            rope_parameters=gemma3_rope,
            head_dim=8,
            sliding_window=4,
            query_pre_attn_scalar=9,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "mixtral": t.MixtralConfig(
            **GROUPED | dict(intermediate_size=10), **rope(1e6), num_local_experts=4, num_experts_per_tok=2
        ),
        "qwen2_moe": t.Qwen2MoeConfig(**GROUPED, **rope(1e6), **moe, shared_expert_intermediate_size=16),
        "qwen3_moe_mixed": t.Qwen3MoeConfig(
            **GROUPED, **rope(1e6), **moe | dict(decoder_sparse_step=2), head_dim=6, norm_topk_prob=False
        ),
        "qwen3_moe": t.Qwen3MoeConfig(**GROUPED, **rope(1e6), **moe, head_dim=8, norm_topk_prob=True),
    }


def variants():
    """Returns configs that compute something else from the weights of another fixture."""
    t = transformers
    linear = dict(rope_type="linear", factor=3.0)
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=1.0)
    window = dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    return {
        "llama3_linear": ("llama3", t.LlamaConfig(**GROUPED, **rope(5e5, **linear))),
        "llama3_yarn": ("llama3", t.LlamaConfig(**GROUPED, **rope(5e5, **yarn))),
        "qwen2_window": ("qwen2", t.Qwen2Config(**GROUPED | dict(tie_word_embeddings=True), **rope(1e6), **window)),
    }


def draw(model, seed):
    """Fills the parameters so that logits spread and every term matters."""
    g = torch.Generator().manual_seed(seed)
    unit_offset = "Gemma" in type(model).__name__
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            x = torch.randn(p.shape, generator=g)
            if "embed" in name or "wte" in name or "wpe" in name:
                x *= 0.1 if unit_offset else 0.2
            elif p.ndim > 1:
                x *= p.shape[-1] ** -0.5
            elif name.endswith("bias"):
                x *= 0.2
            else:
                x = 0.2 * x + (0 if unit_offset else 1)
            p.copy_(x)
    return g


def margins(model, tokens):
    """Returns the logits, and the smallest distance between a chosen and a rejected expert of the routers."""
    least = [float("inf")]
    hooks = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith("TopKRouter"):

            def hook(module, args, output, k=module.top_k):
                logits = torch.nn.functional.linear(args[0].reshape(-1, WIDTH), module.weight).softmax(-1)
                best = logits.sort(-1, descending=True).values
                least[0] = min(least[0], (best[:, k - 1] - best[:, k]).min().item())

            hooks.append(module.register_forward_hook(hook))
    logits = model(input_ids=tokens, use_cache=False).logits
    for h in hooks:
        h.remove()
    return logits, least[0]


def outputs(model, g):
    """Returns the expected tensors, or None if a choice is too close."""
    tokens = torch.randint(0, VOCABULARY, (BATCH, TIME), generator=g)
    targets = torch.randint(0, VOCABULARY, (BATCH, TIME), generator=g)
    targets[0, 3] = targets[1, 0] = -100
    prompt = torch.randint(0, VOCABULARY, (1, PROMPT), generator=g)
    model.zero_grad()
    logits, least = margins(model, tokens)
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), ignore_index=-100)
    loss.backward()
    if least < MARGIN:
        return None
    sequence = prompt
    with torch.no_grad():
        for _ in range(GREEDY):
            logits_now, least = margins(model, sequence)
            best = logits_now[0, -1].topk(2)
            if (best.values[0] - best.values[1]).item() <= MARGIN or least < MARGIN:
                return None
            sequence = torch.cat([sequence, best.indices[:1].reshape(1, 1)], 1)
    chosen = sequence[:, PROMPT:]
    if len(set(chosen[0].tolist())) < 4:
        return None
    return dict(tokens=tokens, targets=targets, prompt=prompt, greedy=chosen.contiguous(), logits=logits.detach(), loss=loss.detach())


def make(config):
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    for seed in range(1, 1000):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **eager).eval()
        expected = outputs(model, draw(model, seed))
        if expected is not None:
            return model, expected
    raise SystemExit("no seed keeps the margins")


def save(model, to, **more):
    model.save_pretrained(to, **more)
    (to / "generation_config.json").unlink(missing_ok=True)


def write_all(root):
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name, config in configs().items():
        to = root / name
        model, expected = make(config)
        save(model, to)
        save_file(expected, to / "expected.safetensors")
        # Saving the gradients as if they were the parameters gives them the names in the file.
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        with tempfile.TemporaryDirectory() as aside, torch.no_grad():
            for p in model.parameters():
                p.copy_(p.grad if p.grad is not None else torch.zeros_like(p))
            save(model, pathlib.Path(aside))
            shutil.copy(pathlib.Path(aside) / "model.safetensors", to / "gradients.safetensors")
            for n, p in model.named_parameters():
                p.copy_(values[n])
        if name == "llama3":
            save(model, root / "llama3_shards", max_shard_size="20KB")
        if name == "qwen3_moe":
            save(model, root / "qwen3_moe_fused", save_original_format=False)
        if name == "qwen2":
            model.to(torch.bfloat16)
            save(model, root / "qwen2_bf16")
            # Read again: .to() also rounded the frequencies of rotary positions.
            again = dict(dtype=torch.float32, attn_implementation="eager")
            model = AutoModelForCausalLM.from_pretrained(root / "qwen2_bf16", **again).eval()
            with torch.no_grad():
                logits = model(input_ids=expected["tokens"], use_cache=False).logits
            save_file(dict(tokens=expected["tokens"], logits=logits), root / "qwen2_bf16" / "expected.safetensors")
        print(name, sum(p.numel() for p in model.parameters()), "parameters", file=sys.stderr)
    for name, (base, config) in variants().items():
        model = AutoModelForCausalLM.from_pretrained(
            root / base, config=config, dtype=torch.float32, attn_implementation="eager"
        )
        tokens = load_file(root / base / "expected.safetensors")["tokens"]
        with torch.no_grad():
            logits = model.eval()(input_ids=tokens, use_cache=False).logits
        config.architectures = [type(model).__name__]
        config.save_pretrained(root / name)
        save_file(dict(tokens=tokens, logits=logits), root / name / "expected.safetensors")


def differences(root):
    """Yields the names of files that differ from the stored ones by more than rounding."""
    for new in sorted(p for p in root.rglob("*") if p.is_file()):
        path = new.relative_to(root)
        old = HERE / path
        if not old.exists():
            yield f"{path} is missing"
        elif path.suffix == ".json":
            a, b = (json.loads(p.read_text()) for p in (old, new))
            for x in (a, b):
                x.pop("transformers_version", None)
            if a != b:
                yield f"{path} differs"
        else:
            a, b = load_file(old), load_file(new)
            if a.keys() != b.keys():
                yield f"{path} has other tensors"
                continue
            for n in a:
                x, y = a[n].double(), b[n].double()
                if x.shape != y.shape or (x - y).abs().max() > 1e-5 * y.abs().max():
                    yield f"{n} of {path} differs"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        if not transformers.__version__.startswith(VERSION):
            print(f"SKIPPED: the fixtures are those of transformers {VERSION}*, not of {transformers.__version__}")
            return
        with tempfile.TemporaryDirectory() as aside:
            write_all(pathlib.Path(aside))
            found = list(differences(pathlib.Path(aside)))
        print("\n".join(found) or "the stored fixtures are what transformers gives")
        raise SystemExit(bool(found))
    for folder in HERE.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    write_all(HERE)


if __name__ == "__main__":
    main()

"""Tiny random models as published folders, their answers by transformers, and engines that answer the same."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.endpoint.seam import Prompted, Sampling
from meshwright.run.serve.built import engine
from meshwright.run.serve.engine import TorchEngine
from meshwright.spec.serve import engine_words as parse

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
}
EXPERTS = {"num_experts_per_tok": 2}
#: By the name of transformers' configuration.
FAMILIES = {
    "llama": SMALL,
    "qwen2": {key: value for key, value in SMALL.items() if key != "head_dim"},
    "qwen3": SMALL,
    "mistral": SMALL | {"sliding_window": 6},
    "mixtral": SMALL | EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": SMALL | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16},
    "gemma": SMALL,
    "gemma2": SMALL | {"sliding_window": 6},
    "gemma3_text": SMALL | {"sliding_window": 6},
    "gpt2": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}
#: Prompts of unlike lengths, the last of which begins as the third does.
LENGTHS = (5, 9, 17, 3, 12)
LIMITS = (10, 11, 12, 13, 14, 15)


def prompts() -> list[list[int]]:
    """The prompts of every test."""
    draw = torch.Generator().manual_seed(1)
    found = [torch.randint(0, 97, (n,), generator=draw).tolist() for n in LENGTHS]
    return [*found, [*found[2][:12], 4, 5]]


def published(family: str, folder: Path, **more: int) -> torch.nn.Module:
    """A random model in float64, written to a folder, with `more` in its configuration. Its tables end no answer."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    said = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family] | more, **said)
    net = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    net.save_pretrained(folder)
    return net


@torch.no_grad()
def generated(net: torch.nn.Module) -> list[list[int]]:
    """The greedy answers to all prompts by transformers' own loop."""
    out = []
    for prompt, limit in zip(prompts(), LIMITS):
        ids = torch.tensor([prompt])
        said = {"attention_mask": torch.ones_like(ids), "max_new_tokens": limit, "do_sample": False, "pad_token_id": 0}
        out.append(net.generate(ids, **said)[0, len(prompt) :].tolist())
    return out


def served(folder: Path, words: str, **more) -> TorchEngine:
    """An engine of a folder in float64."""
    return engine(folder, words=parse(words), dtype="float64", **more)


def greedy(number: int, prompt: list[int], limit: int, **said) -> Prompted:
    """A request for the likeliest tokens."""
    return Prompted(number=number, prompt=tuple(prompt), limit=limit, sampling=Sampling(temperature=0.0, **said))


def answers(one, asked: list[Prompted], every: int = 0) -> list[list[int]]:
    """The answers of an engine to requests, a new one of which comes in every so many steps (0: all at once). Behind
    every step the blocks of an engine that is not divided are where the decider counts them."""
    out: dict[int, list[int]] = {each.number: [] for each in asked}
    waiting, steps = list(asked), 0
    while waiting or not one.idle:
        while waiting and (not every or steps % every == 0):
            one.submit(waiting.pop(0))
            if every:
                break
        for piece in one.step():
            assert not piece.error
            out[piece.number] += piece.tokens
        if isinstance(one, TorchEngine):
            assert len(one.tables.free) == one.state.cache.bare
        steps += 1
        assert steps < 100_000  # else a half waits for what does not come
    return [out[each.number] for each in asked]

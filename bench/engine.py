"""The serving engine against transformers' ``generate``: tokens a second of one request, and of sixteen at a time.

Both compute the same random model with the same weights on one thread, greedily, in turns within one run; what counts
is the processor's time, which other processes on the machine do not change as they change the clock's. On a GPU they
compute in bfloat16, and what counts is the time that passes.

Run: python -m bench.engine [--hidden N] [--layers N] [--rounds N] [--device cuda] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from meshwright.endpoint.seam import Prompted, Sampling
from meshwright.run.serve.built import engine
from meshwright.run.serve.engine import TorchEngine
from meshwright.spec.serve import engine_words as parse

PROMPT, ANSWER, TOGETHER, VOCAB = 64, 48, 16, 8192
#: What the engine has to reach of transformers' tokens a second: with one request, and with sixteen.
TARGETS = (0.9, 3.0)


def model(hidden: int, layers: int, device: str) -> transformers.PreTrainedModel:
    """A random Llama whose answers never end by themselves."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // (32 if device == "cpu" else 128),
        num_key_value_heads=hidden // (64 if device == "cpu" else 256),
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
    )
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    return transformers.LlamaForCausalLM(config).to(device, kind).eval()


def served(one: TorchEngine, prompts: torch.Tensor, first: int) -> list[list[int]]:
    """The engine's answers to prompts [n, tokens] that come at once."""
    said = Sampling(temperature=0.0)
    answers: list[list[int]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts.tolist(), first):
        one.submit(Prompted(number=number, prompt=tuple(prompt), limit=ANSWER, sampling=said))
    while not one.idle:
        for piece in one.step():
            answers[piece.number - first] += piece.tokens
    return answers


@torch.no_grad()
def generated(net: transformers.PreTrainedModel, prompts: torch.Tensor) -> list[list[int]]:
    """transformers' answers to prompts, one after the other."""
    said = {"max_new_tokens": ANSWER, "do_sample": False, "pad_token_id": 0}
    made = [net.generate(p[None], attention_mask=torch.ones_like(p[None]), **said) for p in prompts.to(net.device)]
    return [one[0, PROMPT:].tolist() for one in made]


def measured(hidden: int, layers: int, rounds: int, device: str) -> dict[str, float]:
    """Tokens a second of processor time (on a GPU of time), medians, and their ratios; the share of answers alike."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    net, number, alike, all_answers = model(hidden, layers, device), 0, 0, 0
    clock = time.process_time if device == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder)
        kind = "fp32" if device == "cpu" else "bf16"
        one = engine(Path(folder), words=parse("kv_blocks=512"), dtype=kind, device=device)
    found: dict[str, list[float]] = {"alone": [], "generate": [], "together": []}
    draw = torch.Generator().manual_seed(0)
    for turn in range(rounds + 1):
        prompts = torch.randint(0, VOCAB, (TOGETHER, PROMPT), generator=draw)
        told = []
        for name, run, some in (
            ("alone", served, prompts[:1]),
            ("generate", generated, prompts[:1]),
            ("together", served, prompts),
        ):
            begin = clock()
            told.append(run(one, some, number) if run is served else run(net, some))
            seconds = clock() - begin
            number += len(some)
            if turn:  # the first warms up
                found[name].append(len(some) * ANSWER / seconds)
        alike += told[0][0] == told[1][0]
        all_answers += 1
    out = {f"{name}_tokens_per_s": statistics.median(values) for name, values in found.items()}
    pairs = [[a / g for a, g in zip(found[name], found["generate"])] for name in ("alone", "together")]
    out |= {"ratio_1": statistics.median(pairs[0]), f"ratio_{TOGETHER}": statistics.median(pairs[1])}
    return out | {"answers_alike": alike / all_answers}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    asked = parser.parse_args()
    found = measured(asked.hidden, asked.layers, asked.rounds, asked.device)
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    print(f"hidden {asked.hidden}, {asked.layers} layers, prompts of {PROMPT}, answers of {ANSWER} tokens, one thread")
    print(f"transformers generate   {found['generate_tokens_per_s']:8.1f} tokens/s")
    for name, count, target in (("alone", 1, TARGETS[0]), ("together", TOGETHER, TARGETS[1])):
        ratio = found[f"ratio_{count}"]
        verdict = "met" if ratio >= target else "missed"
        said = f"{ratio:5.2f} times, {verdict} (at least {target})"
        print(f"engine, {count:2d} at a time    {found[f'{name}_tokens_per_s']:8.1f} tokens/s  {said}")
    print(f"answers alike           {found['answers_alike']:8.0%}")


if __name__ == "__main__":
    main()

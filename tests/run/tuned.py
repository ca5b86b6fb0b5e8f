"""A small Llama's adapters as PEFT, transformers and torch train them, in float64."""

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when its packages are: nothing here is asked for over a network
from transformers import AutoModelForCausalLM

from meshwright.run import data
from meshwright.run.data import tokenizer
from meshwright.spec.workload import parse

WORDS = [
    "?",
    "<user>",
    "<bot>",
    "</s>",
    "<end>",
    *["the", "a", "old", "new", "cat", "dog", "sat", "ran", "on", "in", "mat", "hat", "hut", "who", "what", "where"],
]
TRAIN = "batch=4,seq=16,dtype=fp32,phase=lora,rank=4,alpha=8,targets=q+v+o+down"
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
STEPS, LR, DECAY = 6, 1e-2, 0.05


def peft():
    """PEFT's package, where it is used: to load it takes half a second of every process that collects the suite."""
    import peft

    return peft


class Turns(torch.nn.Module):
    """The cosines and sines of Llama's rotation of 16-wide heads, in the type of the hidden states."""

    def forward(self, x, position_ids):
        angles = position_ids[..., None].to(x.dtype) * 10_000.0 ** (-torch.arange(0, 16, 2, dtype=x.dtype) / 16)
        both = torch.cat((angles, angles), -1)
        return both.cos(), both.sin()


def in_64_bits(model):
    """Norms and rotation in 64 bits, which `transformers` computes in 32 whatever the type of its model is."""
    model.model.rotary_emb = Turns()
    for owner in [*model.model.layers, model.model]:
        for name in ("input_layernorm", "post_attention_layernorm", "norm"):
            if hasattr(owner, name):
                norm = torch.nn.RMSNorm(64, eps=getattr(owner, name).variance_epsilon, dtype=torch.float64)
                norm.weight = getattr(owner, name).weight
                setattr(owner, name, norm)
    return model


def theirs(base, start):
    """Losses of PEFT's own training from the adapters in a folder, by `transformers` and torch's AdamW, on the batches
    of the corpus; and the logits of the trained model."""
    model = (
        peft()
        .PeftModel.from_pretrained(in_64_bits(untouched(base)), start, is_trainable=True, autocast_adapter_dtype=False)
        .double()
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    folder = data.build(
        str(base / "chat.jsonl"), tokenizer.load(str(base / "base")), base / "cache" / "meshwright" / "corpus"
    )
    corpus, losses = data.load(folder, parse(TRAIN), vocab=len(WORDS)), []
    for step in range(STEPS):
        batch = corpus.batch(step)
        numbers = batch.documents
        same = (numbers[:, :, None] == numbers[:, None, :]) & torch.ones(16, 16).tril().bool()
        mask = torch.zeros(same.shape, dtype=torch.float64).masked_fill(~same, float("-inf"))[:, None]
        logits = model(input_ids=batch.tokens[:, :-1], attention_mask=mask, position_ids=torch.arange(16)[None]).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-1))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses], model


def untouched(base):
    return AutoModelForCausalLM.from_pretrained(base / "base", dtype=torch.float64)


def probe(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(12)[None]).logits

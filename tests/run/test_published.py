"""The model against transformers: same weights, same logits and the same loss, for every family that is trained."""

from __future__ import annotations

import pytest
import torch

from meshwright.plan import parse
from meshwright.run.data import Batch
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.run.weights import load_weights
from meshwright.spec.model import from_config
from meshwright.spec.workload import Train
from tests.run.processes import launch_kept as launch

SMALL = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
FAMILIES = {
    "llama": SMALL | {"rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    "llama with scaled positions": SMALL
    | {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": SMALL | {"sliding_window": 7, "head_dim": 16},
    "qwen2": SMALL | {"use_sliding_window": False, "tie_word_embeddings": True},
    "qwen3": SMALL | {"head_dim": 32, "use_sliding_window": False},
    "gpt2": {"vocab_size": 99, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": SMALL | MOE | {"shared_expert_intermediate_size": 80, "norm_topk_prob": False},
    "qwen3_moe": SMALL | MOE | {"norm_topk_prob": True, "head_dim": 16},
}
TRAIN = Train(global_batch=2, seq_len=24, dtype="fp32")


def published(rank: int, name: str, folder) -> tuple[dict, torch.Tensor, float, torch.Tensor]:
    """A random model of transformers: its configuration, tokens, loss and logits."""
    import transformers

    config = dict(FAMILIES[name])
    kind = config.pop("model_type", name)
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(kind, **config)
    made._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(torch.randn_like(parameter) * 0.05)
        tokens = torch.randint(0, 99, (TRAIN.global_batch, TRAIN.seq_len + 1))
        logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    model.save_pretrained(folder)
    return made.to_dict(), tokens, float(loss), logits


def ours(rank: int, config: dict, folder, tokens, plan_text: str):
    model = from_config(config, name="small")
    plan = parse(plan_text)
    plan = plan.on(plan.layout.tp * plan.layout.pp)
    trainer = Trainer(model, plan, TRAIN, build(plan), settings=Settings(lr=0.0, weight_decay=0.0))
    load_weights(folder, trainer.pieces(), model, trainer.mesh["world"])
    trainer.publish()
    trainer.settle()
    logits = None
    if plan.layout.num_ranks == 1:
        (one,) = trainer.passes(Batch(tokens, None))
        (stage,) = trainer.stages.values()
        with torch.no_grad():
            x = stage.embedding(one)
            for layer in stage.layers:
                x = layer(x, one)
            logits = stage.head.logits(x).transpose(0, 1)
    return trainer.step(Batch(tokens, None)).loss, logits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_loss_are_those_of_transformers(name, tmp_path):
    ((config, tokens, loss, logits),) = launch(1, published, name, tmp_path)
    ((got, got_logits),) = launch(1, ours, config, tmp_path, tokens, "tp1 mb2")
    assert got == pytest.approx(loss, rel=1e-5)
    assert (got_logits - logits).abs().max() < 1e-5 * max(1.0, float(logits.abs().max()))
    for two, _ in launch(2, ours, config, tmp_path, tokens, "tp2 mb2"):
        assert two == pytest.approx(loss, rel=1e-5)

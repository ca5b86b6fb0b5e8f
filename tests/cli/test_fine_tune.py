"""A fine-tune as a user types it: one command trains adapters on conversations and leaves what PEFT loads."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from meshwright.cli import main
from meshwright.run import data
from meshwright.run.data import tokenizer
from meshwright.spec.workload import parse

#: What PEFT asks of a model of `transformers` by a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
WORDS = [
    "?",
    "<user>",
    "<bot>",
    "</s>",
    "<end>",
    *["the", "a", "old", "new", "cat", "dog", "sat", "ran", "on", "in", "mat", "hat", "hut", "who", "what", "where"],
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<bot> {{ m.content }} <end> "
    "{% else %}<user> {{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
)
TRAIN = "batch=4,seq=16,dtype=fp32,phase=lora,rank=4,alpha=8,targets=q+v+o+down"
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
STEPS, LR, DECAY = 6, 1e-2, 0.05
HOW = ["--steps", str(STEPS), "--lr", str(LR), "--weight-decay", str(DECAY), "--clip", "0", "--dtype", "float64"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of a small Llama with its tokenizer and template, and conversations beside it."""
    folder = tmp_path_factory.mktemp("tune")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=None,
        bos_token_id=3, eos_token_id=3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "base" / "tokenizer.json"))
    said = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "base" / "tokenizer_config.json").write_text(json.dumps(said))
    draw = torch.Generator().manual_seed(1)

    def text():
        return " ".join(WORDS[5 + int(i)] for i in torch.randint(0, 16, (4,), generator=draw))

    rows = [{"messages": [{"role": role, "content": text()} for role in ("user", "assistant") * 2]} for _ in range(40)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def here(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))


def run(base, *words, train=TRAIN, plan="dp2 mb2", on="2xh100"):
    asked = [str(base / "base"), "--on", on, "--train", train, "--plan", plan, "--data", str(base / "chat.jsonl")]
    return main(["run", *asked, *HOW, *words])


def metrics(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


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
    model = PeftModel.from_pretrained(
        in_64_bits(untouched(base)), start, is_trainable=True, autocast_adapter_dtype=False
    ).double()
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


@pytest.fixture(scope="module")
def start(base):
    """Adapters as PEFT begins them, with a second factor that is not zero."""
    torch.manual_seed(2)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(untouched(base), config).save_pretrained(base / "start")
    return base / "start"


@pytest.fixture(scope="module")
def reference(base, start):
    return theirs(base, start)


def test_a_fine_tune_is_one_command_whose_losses_are_those_of_peft_and_whose_folder_peft_loads(base, start, reference):
    losses, model = reference
    assert run(base, "--adapter", str(start), "--out", "tuned") == 0
    assert [line["loss"] for line in metrics("tuned")] == pytest.approx(losses, rel=1e-9, abs=0)
    tuned = PeftModel.from_pretrained(untouched(base), "tuned/adapter", autocast_adapter_dtype=False).double()
    # the folder holds 32 bits of what was trained in 64
    assert torch.allclose(probe(tuned), probe(model), rtol=0, atol=1e-5)
    assert not torch.allclose(probe(tuned), probe(untouched(base)), rtol=0, atol=1e-2)

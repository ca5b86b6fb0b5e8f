"""A fine-tune as a user types it: one command trains adapters on conversations and leaves what PEFT loads."""

import json
import os
import re
import shlex
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when its packages are: nothing here is asked for over a network
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.plan import parse as parse_plan
from meshwright.run import data
from meshwright.run.lora.formats import FORMATS, quantise
from meshwright.run.lora.fused import fused
from meshwright.run.lora.peft import load_adapter, load_base, read_config
from meshwright.run.mesh import alone
from meshwright.run.new_folder import new_folder
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.model import load
from meshwright.spec.workload import parse
from tests.run.small_families import CONFIGS
from tests.run.tuned import DECAY, LR, STEPS, TARGETS, TRAIN, WORDS, peft, probe, theirs, untouched

#: What PEFT asks of a model of `transformers` by a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<bot> {{ m.content }} <end> "
    "{% else %}<user> {{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
)
HOW = {"--steps": STEPS, "--lr": LR, "--weight-decay": DECAY, "--clip": 0, "--dtype": "float64"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of a small Llama with its tokenizer and template, and conversations beside it."""
    folder = tmp_path_factory.mktemp("tune")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=None,
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
    usual = HOW | {"--on": on, "--train": train, "--plan": plan, "--data": base / "chat.jsonl"}
    usual = [str(part) for word, said in usual.items() if word not in words for part in (word, said)]
    return main(["run", str(base / "base"), *usual, *words])


def metrics(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def start(base):
    """Adapters as PEFT begins them, with a second factor that is not zero."""
    torch.manual_seed(2)
    config = peft().LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False
    )
    peft().get_peft_model(untouched(base), config).save_pretrained(base / "start")
    return base / "start"


@pytest.fixture(scope="module")
def reference(base, start):
    return theirs(base, start)


def test_a_fine_tune_is_one_command_whose_losses_are_those_of_peft_and_whose_folder_peft_loads(base, start, reference):
    losses, model = reference
    assert run(base, "--adapter", str(start), "--out", "tuned") == 0
    assert [line["loss"] for line in metrics("tuned")] == pytest.approx(losses, rel=1e-9, abs=0)
    tuned = peft().PeftModel.from_pretrained(untouched(base), "tuned/adapter", autocast_adapter_dtype=False).double()
    # the folder holds 32 bits of what was trained in 64
    assert torch.allclose(probe(tuned), probe(model), rtol=0, atol=1e-5)
    assert not torch.allclose(probe(tuned), probe(untouched(base)), rtol=0, atol=1e-2)


def test_the_command_of_the_readme_is_a_fine_tune_of_two_processes_that_peft_and_transformers_load(base, capfd):
    """As it stands there, of a small model by that name; in bf16, as it says nothing else."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = [
        text for text in re.findall(r"^```bash\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL) if "lora" in text
    ]
    Path("llama").symlink_to(base / "base")
    Path("chats.jsonl").write_text((base / "chat.jsonl").read_text() * 10)
    assert main(shlex.split(block.replace("\\\n", " "))[1:]) == 0
    assert "on 2 processes" in capfd.readouterr().err
    seen = losses("tuned")
    assert len(seen) == 20 and seen[-1] < seen[0]
    tuned = peft().PeftModel.from_pretrained(untouched(base), "tuned/adapter", autocast_adapter_dtype=False).double()
    assert not torch.allclose(probe(tuned), probe(untouched(base)), rtol=0, atol=1e-3)


GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.parametrize(
    ("family", "words"),
    [
        *(("gemma2", "q o gate down"), ("phi", "v o up"), ("olmo2", "k up")),
        *(("gpt2", "q k v down"), ("phi3", "q k v o gate up")),
        *(("deepseek_v3", "q k o q_up kv_up"), ("deepseek_v2", "q kv_up")),
    ],
)
def test_adapters_of_other_families_are_those_of_peft_at_their_places(family, words, tmp_path, wide):
    """One step's loss and gradients of adapters that PEFT drew."""
    called = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj"}
    called |= {"down": "down_proj"} | ({"o": "dense", "up": "fc1"} if family == "phi" else {})
    if family == "phi3":
        called |= dict.fromkeys("qkv", "qkv_proj") | dict.fromkeys(("gate", "up"), "gate_up_proj")
    if "deepseek" in family:
        called |= {"q": "q_a_proj" if family[-1] == "3" else "q_proj", "k": "kv_a_proj_with_mqa"}
        called |= {"q_up": "q_b_proj", "kv_up": "kv_b_proj"}
    called |= dict.fromkeys("qkv", "c_attn") | {"down": "mlp.c_proj"} if family == "gpt2" else {}
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **(CONFIGS | {"gpt2": GPT2})[family])
    with wide():
        base = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()
    base.save_pretrained(tmp_path / "base")
    targets = list(dict.fromkeys(called[word] for word in words.split()))
    drawn = {"init_lora_weights": False, "fan_in_fan_out": family == "gpt2"}
    config = peft().LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", **drawn)
    theirs = peft().get_peft_model(base, config)
    theirs.save_pretrained(tmp_path / "start")
    tokens = torch.randint(0, 99, (2, 17))
    with wide():
        logits = theirs(tokens[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        expected.backward()
    model, plan = load(tmp_path / "base"), parse_plan("mb2").on(1)
    train = parse(f"batch=2,seq=16,dtype=fp32,rank=3,alpha=6,targets={words.replace(' ', '+')}")
    assert read_config(tmp_path / "start", model) == train.lora
    ours, group = Trainer(model, plan, train, alone(), settings=Settings(precision="float64")), alone()["world"]
    load_base(tmp_path / "base", ours.base, model, group)
    load_adapter(tmp_path / "start", ours.pieces(), model, group, "")
    ours.set_step(0)
    found: dict[str, torch.Tensor] = {}
    held = ours.optimizer.held
    ours.before_update.append(lambda: found.update((h.parameter.parts[0].name, h.gradient.clone()) for h in held))
    assert ours.step(data.Batch(tokens, None)).loss == pytest.approx(expected.item(), rel=1e-9)
    wanted = {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter.grad.flatten()
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert found.keys() == wanted.keys()
    far = {name: float((found[name] - one).abs().max() / one.abs().max()) for name, one in wanted.items()}
    assert max(far.values()) < 1e-7, far  # Gemma keeps the scale of its embedding in 32 bits


@pytest.fixture
def wide(monkeypatch):
    """Norms, softmax, rotations and routers, of which `transformers` asks 32 bits, are in 64 while this is open."""

    @contextmanager
    def opened():
        with monkeypatch.context() as patch:
            for name in ("float32", "float"):
                patch.setattr(torch, name, torch.float64)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            yield

    return opened


EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 48, "moe_intermediate_size": 24, "vocab_size": len(WORDS)}
EXPERTS |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS |= {"head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 3, "eos_token_id": 3}
MIXTURES = {"mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True}}


@pytest.mark.parametrize(
    ("family", "words"),
    [("mixtral", "v experts_up experts_down"), ("qwen3_moe", "experts_down")],
)
def test_adapters_of_experts_are_those_of_peft_in_and_out(family, words, base, tmp_path, wide):
    """One step's loss and gradients of adapters that PEFT drew on parameters of all experts; and what a run over two
    ranks of experts leaves is in PEFT what its merged weights are in `transformers`."""
    called = {"experts_up": "mlp.experts.gate_up_proj", "experts_down": "mlp.experts.down_proj"}
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **EXPERTS, **MIXTURES[family])
    with wide():
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()
    model.save_pretrained("base")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / "base" / file, f"base/{file}")
    chosen = words.split()
    how = {
        "target_modules": ["v_proj"] if "v" in chosen else [],
        "target_parameters": [called[t] for t in chosen if t in called],
    }
    theirs = peft().get_peft_model(
        model, peft().LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", init_lora_weights=False, **how)
    )
    theirs.save_pretrained("start")
    tokens = torch.randint(0, len(WORDS), (2, 17))
    with wide():
        logits = theirs(tokens[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        expected.backward()
    ours, train = load("base"), parse(f"batch=2,seq=16,dtype=fp32,rank=3,alpha=6,targets={'+'.join(chosen)}")
    assert read_config("start", ours) == train.lora
    trainer = Trainer(ours, parse_plan("mb2").on(1), train, alone(), settings=Settings(precision="float64"))
    group, held, found = alone()["world"], trainer.optimizer.held, {}
    load_base("base", trainer.base, ours, group)
    load_adapter("start", trainer.pieces(), ours, group, "")
    trainer.set_step(0)
    trainer.before_update.append(
        lambda: found.update(
            (p.name, h.gradient.view(h.parameter.shape)[p.select]) for h in held for p in h.parameter.parts
        )
    )
    assert trainer.step(data.Batch(tokens, None)).loss == pytest.approx(expected.item(), rel=1e-9)
    whole = {one.name: one.joined([found.pop(name) for name in one.parts]) for one in fused(list(found))} | found
    wanted = {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert whole.keys() == wanted.keys()
    far = {name: float((whole[name].view_as(one) - one).abs().max() / one.abs().max()) for name, one in wanted.items()}
    assert max(far.values()) < 1e-8, far

    if family != "mixtral":
        return
    asked = f"batch=4,seq=16,dtype=fp32,rank=3,alpha=6,targets={'+'.join(chosen)}"
    how = f"--on 2xh100 --device cpu --plan 'dp2 ep2 mb2' --lr 1e-2 --steps 3 --data {base / 'chat.jsonl'}"
    assert main(["run", "base", *shlex.split(how), "--train", asked, "--out", "tuned", "--export", "merged"]) == 0
    assert main(["weights", "tuned", "--to", "tuned/adapter"]) == 0
    plain = AutoModelForCausalLM.from_pretrained("base", experts_implementation="eager")
    before = probe(plain)
    tuned = peft().PeftModel.from_pretrained(plain, "tuned/adapter")
    merged = AutoModelForCausalLM.from_pretrained("tuned/merged", experts_implementation="eager")
    assert torch.allclose(probe(tuned), probe(merged), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(probe(tuned), before, rtol=0, atol=1e-3)


def test_a_folder_that_cannot_take_its_place_leaves_the_older_one_there(tmp_path, monkeypatch):
    folder, rename = tmp_path / "adapter", Path.rename
    folder.mkdir()
    (folder / "older").touch()

    def fails(self, to):
        if self.suffix == ".part":
            raise OSError(28, "No space left on device")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(MeshwrightError, match="H008"), new_folder(folder, over=True):
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["adapter"] and (folder / "older").exists()


def losses(folder):
    return [line["loss"] for line in metrics(folder)]


@pytest.mark.parametrize(("plan", "after"), [("fsdp mb2", "fsdp mb2"), ("tp2 mb2", "dp2 mb1")])
def test_adapters_go_on_from_a_checkpoint_under_the_plan_that_saved_it_or_another(base, start, reference, plan, after):
    """To the last bit under the same one; sums in another order under another."""
    assert run(base, "--adapter", str(start), "--out", "half", "--steps", "3", plan=plan) == 0
    assert run(base, "--out", "half", "--resume", plan=after) == 0
    assert losses("half") == pytest.approx(reference[0], rel=1e-9, abs=0)
    if plan == after:
        assert run(base, "--adapter", str(start), "--out", "whole", plan=plan) == 0
        assert losses("half") == losses("whole")
        a, b = (load_file(f"{folder}/adapter/adapter_model.safetensors") for folder in ("half", "whole"))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_merged_weights_are_those_that_peft_merges(base, start, capfd):
    words = ["--adapter", str(start), "--out", "merged"]
    assert run(base, *words, "--export", "merged", plan="dp1 mb4", on="1xh100") == 0
    assert main(["weights", "merged", "--to", "adapters"]) == 0  # the same checkpoint as adapters
    capfd.readouterr()
    assert main(["weights", "merged", "--format", "dcp", "--to", "for-torch"]) == 0
    assert "adapters alone, without the frozen base that they are for" in capfd.readouterr().err
    tuned = peft().PeftModel.from_pretrained(untouched(base), "./adapters", autocast_adapter_dtype=False).double()
    ours = AutoModelForCausalLM.from_pretrained("merged/merged", dtype=torch.float64)
    # published weights are in 32 bits, as those they were added to
    assert torch.allclose(probe(ours), probe(tuned.merge_and_unload()), rtol=0, atol=1e-5)
    assert (
        Path("merged/merged/tokenizer_config.json").read_bytes()
        == (base / "base" / "tokenizer_config.json").read_bytes()
    )


def test_a_quantised_base_is_trained_and_merged_into_what_it_stood_for(base, start):
    """With a learning rate of nearly nothing the merged weights are those of the quantised base and the adapters that
    training began with."""
    words = ["--adapter", str(start), "--out", "q", "--export", "merged", "--lr", "1e-30", "--steps", "1"]
    train = TRAIN.replace("fp32", "bf16")
    assert run(base, *words, train=train, plan="dp1 mb4 params=nf4", on="1xh100") == 0
    ours, whole = (load_file(f"{folder}/model.safetensors") for folder in ("q/merged", base / "base"))
    factors = load_file(start / "adapter_model.safetensors")
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"):
        stood_for = quantise(whole[f"{name}.weight"], FORMATS["nf4"]).restored(FORMATS["nf4"], torch.float32)
        if f"base_model.model.{name}.lora_A.weight" in factors:
            a, b = (factors[f"base_model.model.{name}.lora_{side}.weight"].float() for side in "AB")
            stood_for += 2 * (b @ a)
        assert torch.allclose(ours[f"{name}.weight"], stood_for, rtol=0, atol=1e-6)
    assert torch.equal(ours["lm_head.weight"], whole["lm_head.weight"])


def changed(folder, to, **said):
    """A folder of adapters with another configuration."""
    shutil.copytree(folder, to)
    config = json.loads((to / "adapter_config.json").read_text()) | said
    (to / "adapter_config.json").write_text(json.dumps(config))
    return to


def refused(capfd, base, *words, **said):
    assert run(base, *words, **said) == 2
    return re.findall(r"^error\[(\w+)\]: (.*)$", capfd.readouterr().err, re.MULTILINE)


def test_every_wrong_word_of_a_fine_tune_is_one_error_before_anything_is_written(base, start, capfd, tmp_path):
    plain, out = "batch=4,seq=16,dtype=fp32", ["--out", "none"]

    def says(code, part, *words, **how):
        found = refused(capfd, base, *words, *out, **how)
        assert {one for one, _ in found} == {code} and part in found[0][1], found

    says("W002", "'q+z' is not", train=f"{plain},targets=q+z")
    says("W002", "rank = '0' is not", train=f"{plain},rank=0")
    says("W002", "alpha = '-1' is not", train=f"{plain},phase=lora,alpha=-1")
    says("L005", "--export adapter cannot be", "--export", "adapter", train=plain)
    says("L005", "--export all cannot be", "--export", "all")
    says("L005", "--resume --adapter cannot be", "--resume", "--adapter", str(start))
    says("H009", "FileNotFoundError", "--adapter", "absent")
    says("H009", "rank=4", "--adapter", str(start), train=TRAIN.replace("rank=4", "rank=8"))
    says("H009", "use_dora is not trained here", "--adapter", str(changed(start, tmp_path / "dora", use_dora=True)))
    says("H009", "has no qkv", "--adapter", str(changed(start, tmp_path / "qkv", target_modules=["qkv"])))
    for number, (part, value) in enumerate(
        [
            ("r=8.5 is not", {"r": 8.5}),
            ("r=inf is not", {"r": float("inf")}),
            ("lora_alpha=0 is not a number above 0", {"lora_alpha": 0}),
            ("lora_alpha=-16 is not", {"lora_alpha": -16}),
            ("lora_alpha=nan is not", {"lora_alpha": float("nan")}),
            ("lora_dropout='x' is not", {"lora_dropout": "x"}),
            ("lora_dropout=1.5 is not", {"lora_dropout": 1.5}),
            ("target_modules is not", {"target_modules": [{"a": 1}]}),
            ("target_modules is not", {"target_modules": []}),
            ("init_lora_weights=pissa is not trained here", {"init_lora_weights": "pissa"}),
        ]
    ):
        says("H009", part, "--adapter", str(changed(start, tmp_path / f"wrong{number}", **value)))
    deep = changed(start, tmp_path / "deep")
    (deep / "adapter_config.json").write_text("[" * 100_000)
    says("H009", "RecursionError", "--adapter", str(deep))
    says("P033", "int4 has a scale for 128 weights", train=TRAIN.replace("fp32", "bf16"), plan="dp2 mb2 params=int4")
    says(
        "P033",
        "nf4 has a scale for 64 weights",
        train=TRAIN.replace("fp32", "bf16"),
        plan="tp4 mb2 params=nf4",
        on="4xh100",
    )
    says("D009", "the weight -1 is not above 0", "--data", f"{base / 'chat.jsonl'}=1,x.jsonl=-1")
    says("L008", "is not MODULE:FUNCTION", "--callback", "mine")
    assert not Path("none").exists()


def test_adapters_of_another_base_are_refused_by_what_they_are_of(base, start, capfd, tmp_path):
    """By the shapes of their tensors, and by the weights that a run of ours says they were trained over."""
    shutil.copytree(base / "base", tmp_path / "other")
    held = load_file(base / "base" / "model.safetensors")
    save_file(held | {"lm_head.weight": held["lm_head.weight"] + 1}, tmp_path / "other" / "model.safetensors")
    assert run(base, "--out", "ours", "--steps", "1", plan="dp1 mb4", on="1xh100") == 0
    capfd.readouterr()
    other = ["--weights", str(tmp_path / "other"), "--steps", "2"]
    one = {"plan": "dp1 mb4", "on": "1xh100"}
    ((code, said),) = refused(capfd, base, "--adapter", "ours/adapter", *other, "--out", "b", **one)
    assert code == "H009" and "other weights" in said
    ((code, said),) = refused(capfd, base, "--resume", "--out", "ours", *other, **one)
    assert code == "H009" and "other weights" in said
    ((code, said),) = refused(capfd, base, "--resume", "--out", "ours", train=TRAIN.replace("rank=4", "rank=2"), **one)
    assert code == "H009" and "rank=4" in said and "rank=2" in said
    words = {"train": TRAIN.replace("fp32", "bf16"), "plan": "dp1 mb4 params=nf4", "on": "1xh100"}
    ((code, said),) = refused(capfd, base, "--resume", "--out", "ours", **words)
    assert code == "H009" and "stored as it is, and this run's is as nf4" in said
    bent = tmp_path / "bent"
    shutil.copytree(start, bent)
    factors = load_file(start / "adapter_model.safetensors")
    save_file(
        {name: tensor[:, :-1].contiguous() for name, tensor in factors.items()}, bent / "adapter_model.safetensors"
    )
    ((code, said),) = refused(capfd, base, "--adapter", str(bent), "--out", "c", **one)
    assert code == "H007" and "have another shape" in said

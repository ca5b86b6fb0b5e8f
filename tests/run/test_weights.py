"""Published weights are read by any shards and written for `transformers` to read."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run import safetensors_file
from meshwright.run.checkpoint import Meta, save
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.run.weights import export_weights, load_weights, save_weights
from meshwright.spec.model import from_config, transformer
from meshwright.spec.workload import Train
from tests.run import shards
from tests.run.processes import launch_kept as launch
from tests.run.shards import ALONE

MODEL = transformer(layers=2, hidden=16, heads=2, vocab=13, ffn=8, name="small", tied_embeddings=True)
META = Meta(step=1, seed=0, model="small", model_hash="cafe", plan="dp1", world=1)


def params(seed, dtype=torch.float32):
    return {name: value for (state, name), value in shards.values(seed, dtype).items() if state == "param"}


def expected(held, seed, dtype=torch.float32):
    return [p for p in shards.pieces(held, shards.values(seed), dtype) if p.key == "param"]


def loaded(path, held, dtype=torch.float32, model=MODEL):
    pieces = shards.pieces(held, None, dtype)
    load_weights(path, pieces, model, ALONE)
    assert all((p.values == -7).all() for p in pieces if p.key != "param")
    return [p for p in pieces if p.key == "param"]


def raised(path, held):
    pieces = shards.pieces(held, None)
    with pytest.raises(MeshwrightError) as caught:
        load_weights(path, pieces, MODEL, ALONE)
    assert shards.differences(pieces, shards.pieces(held, None)) == []
    return caught.value.diagnostics


# --- in --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_any_shards_are_read_from_one_file(tmp_path, seed):
    save_file(params(seed), tmp_path / "model.safetensors")
    held = [h for rank in shards.sharding(seed, 3) for h in rank]
    assert shards.differences(loaded(tmp_path, held), expected(held, seed)) == []
    assert shards.differences(loaded(tmp_path / "model.safetensors", held), expected(held, seed)) == []


def _several(folder, seed):
    tensors = params(seed)
    names = sorted(tensors)
    where = {}
    for i in range(3):
        some = names[i::3]
        save_file({n: tensors[n] for n in some}, folder / f"model-0000{i + 1}-of-00003.safetensors")
        where |= dict.fromkeys(some, f"model-0000{i + 1}-of-00003.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_several_files_are_read_through_their_index(tmp_path):
    _several(tmp_path, 3)
    (held,) = shards.sharding(4, 1)
    assert shards.differences(loaded(tmp_path, held), expected(held, 3)) == []


def test_values_are_converted_to_the_type_that_is_trained(tmp_path):
    (held,), published = shards.sharding(1, 1), params(1, torch.bfloat16)
    save_file(published, tmp_path / "model.safetensors")
    state = {("param", n): v.float() for n, v in published.items()}
    state |= {key: v for key, v in shards.values(1).items() if key[0] != "param"}
    whole = [p for p in shards.pieces(held, state) if p.key == "param"]
    assert shards.differences(loaded(tmp_path, held), whole) == []


def test_a_tied_head_a_prefix_left_out_and_computed_tables_are_no_fault(tmp_path):
    (held,) = shards.sharding(1, 1)
    held = [
        h._replace(
            parameter=h.parameter._replace(parts=tuple(p._replace(name=f"model.{p.name}") for p in h.parameter.parts))
        )
        for h in held
    ]
    extra = {"lm_head.weight": torch.zeros(13, 6), "layers.0.rotary_emb.inv_freq": torch.zeros(3)}
    save_file(params(1) | extra, tmp_path / "model.safetensors")
    state = {(s, f"model.{n}"): v for (s, n), v in shards.values(1).items()}
    whole = [p for p in shards.pieces(held, state) if p.key == "param"]
    assert shards.differences(loaded(tmp_path, held), whole) == []


def test_all_that_does_not_fit_is_said_at_once_and_nothing_is_loaded(tmp_path):
    tensors = params(1)
    del tensors["q"]
    tensors["norm"] = torch.zeros(12)
    tensors["nobody"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    found = raised(tmp_path, shards.sharding(1, 1)[0])
    assert [d.code for d in found] == ["H007"] * 3
    assert [d.message for d in found] == [
        "1 tensors are missing from the weights: q",
        "1 tensors have another shape: norm is [12] there and [11] here",
        "1 tensors are of no use to small: nobody",
    ]


@pytest.mark.parametrize("broken", ["nothing", "folder", "garbage", "truncated", "index", "outside", "no file"])
def test_what_are_no_weights_is_one_error(tmp_path, broken):
    (held,), path = shards.sharding(1, 1), tmp_path
    match broken:
        case "nothing":
            path = tmp_path / "nowhere"
        case "garbage":
            (tmp_path / "model.safetensors").write_bytes(b"\x80pickle")
        case "truncated":
            save_file(params(1), tmp_path / "model.safetensors")
            data = (tmp_path / "model.safetensors").read_bytes()
            (tmp_path / "model.safetensors").write_bytes(data[:-4])
        case "index":
            (tmp_path / "model.safetensors.index.json").write_text('["no map"]')
        case "outside":
            (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"q": "../q.safetensors"}}')
        case "no file":
            (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"q": "q.safetensors"}}')
    (diagnostic,) = raised(path, held)
    assert diagnostic.code == "H006" and diagnostic.place == str(path)


# --- out -------------------------------------------------------------------------------------------------------------


def test_weights_of_a_checkpoint_are_its_parameters(tmp_path):
    (held,) = shards.sharding(1, 1)
    made = save(tmp_path / "run", shards.pieces(held, shards.values(1)), META, ALONE)
    folder = export_weights(made, tmp_path / "weights")
    assert [f.name for f in folder.iterdir()] == ["model.safetensors"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {n: file.get_tensor(n).tolist() for n in file.keys()} == {  # noqa: SIM118
            n: v.tolist() for n, v in params(1).items()
        }


def test_weights_are_converted_and_cut_into_files_with_an_index(tmp_path):
    (held,) = shards.sharding(1, 1)
    made = save(tmp_path / "run", shards.pieces(held, shards.values(1)), META, ALONE)
    export_weights(made, tmp_path / "weights", dtype=torch.bfloat16, shard_bytes=200)
    index = json.loads((tmp_path / "weights" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))] and len(files) > 2
    assert index["metadata"]["total_size"] == 2 * sum(v.numel() for v in params(1).values())
    for file in files:
        with safe_open(tmp_path / "weights" / file, "pt") as opened:
            names = list(opened.keys())
            assert len(names) == 1 or sum(opened.get_tensor(n).nbytes for n in names) <= 200
            for name in names:
                assert index["weight_map"][name] == file
                assert torch.equal(opened.get_tensor(name), params(1)[name].to(torch.bfloat16))


def test_weights_are_never_mixed_with_what_is_there(tmp_path):
    (held,) = shards.sharding(1, 1)
    made = save(tmp_path / "run", shards.pieces(held, shards.values(1)), META, ALONE)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "mine").write_text("keep")
    with pytest.raises(MeshwrightError, match="H008"):
        export_weights(made, tmp_path / "weights")
    assert sorted(f.name for f in tmp_path.rglob("*") if f.name.startswith(".") or f.name == "mine") == ["mine"]


def test_a_disk_that_fills_leaves_no_weights(tmp_path, monkeypatch):
    (held,) = shards.sharding(1, 1)
    made = save(tmp_path / "run", shards.pieces(held, shards.values(1)), META, ALONE)

    def full(handle, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_file, "write_all", full)
    with pytest.raises(MeshwrightError, match=r"H008.*No space left on device"):
        export_weights(made, tmp_path / "weights")
    assert [f.name for f in tmp_path.iterdir()] == ["run"]


def test_a_damaged_checkpoint_becomes_no_weights(tmp_path):
    (held,) = shards.sharding(1, 1)
    made = save(tmp_path / "run", shards.pieces(held, shards.values(1)), META, ALONE)
    shards.damage(made / "rank-00000.safetensors", "param")
    with pytest.raises(MeshwrightError, match="H002"):
        export_weights(made, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


# --- as transformers has them ----------------------------------------------------------------------------------------

LLAMA = LlamaConfig(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
)
TIED = LlamaConfig(**(LLAMA.to_dict() | {"tie_word_embeddings": True}))
GPT2 = GPT2Config(vocab_size=67, n_embd=32, n_layer=4, n_head=4, n_positions=64, initializer_range=0.3)


def published(config):
    torch.manual_seed(0)
    model = (GPT2LMHeadModel if config.model_type == "gpt2" else LlamaForCausalLM)(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)  # biases and norms too
    return model


def _through(rank, folder, out, config, plan_text):
    """Published weights into a trainer's rank, and out again."""
    model = from_config(config, name="small")
    plan = parse(plan_text)
    plan = plan.on(plan.layout.num_ranks)
    train = Train(seq_len=16, global_batch=4)
    trainer = Trainer(model, plan, train, build(plan), settings=Settings(precision="fp32"))
    world = trainer.mesh["world"]
    load_weights(folder, trainer.pieces(), model, world)
    save_weights(out, trainer.pieces(), model, world, config=config, shard_bytes=20_000)


@pytest.mark.parametrize("plan", ["dp1", "tp2 dp1", "pp2 dp1", "dp2 zero1", "dp2 zero3", "tp4 dp1"])
@pytest.mark.parametrize("config", [LLAMA, TIED, GPT2], ids=["llama", "tied", "gpt2"])
def test_what_transformers_wrote_goes_through_any_plan_and_back_unchanged(tmp_path, config, plan):
    model = published(config)
    model.save_pretrained(tmp_path / "in")
    said = json.loads((tmp_path / "in" / "config.json").read_text())
    num_ranks = 1 if plan == "dp1" else 4 if "4" in plan else 2
    launch(num_ranks, _through, tmp_path / "in", tmp_path / "out", said, plan)
    assert not list(tmp_path.glob(".*"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert again.config.to_dict() == model.config.to_dict() | {"_name_or_path": str(tmp_path / "out")}
    want, got = model.state_dict(), again.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)

"""`meshwright weights`: from a run's checkpoint to a folder that transformers loads, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
from safetensors import safe_open

from meshwright.cli import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 260,
    "max_position_embeddings": 64,
}
QUESTION = ["tiny/config.json", "--on", "2xh100", "--train", "batch=4,seq=32,dtype=fp32", "--data", "sample"]


@pytest.fixture
def trained(tmp_path, monkeypatch, capfd):
    """A folder with a tiny model, trained for two steps under ZeRO-1 on two processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    words = ["--plan", "dp2 zero1", "--steps", "2", "--out", "run1", "--lr", "1e-2", "--json"]
    assert main(["run", *QUESTION, *words]) == 0
    capfd.readouterr()
    return tmp_path


def errors(capfd):
    out, err = capfd.readouterr()
    assert out == ""
    return re.findall(r"^error\[(\w+)\]: (.*)$", err, re.MULTILINE)


def test_a_run_goes_on_from_the_weights_of_another_where_that_one_stopped(trained, capfd):
    assert main(["weights", "run1", "--to", "published", "--model", "tiny", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["checkpoint"].endswith("step-00000002")
    assert sorted(said["files"]) == ["config.json", "model.safetensors"]
    assert json.loads((trained / "published" / "config.json").read_text()) == CONFIG | {"dtype": "float32"}
    words = ["--plan", "tp2 dp1", "--steps", "1", "--json"]
    first_losses = []
    for more in ([], ["--weights", "published"]):
        assert main(["run", *QUESTION, *words, *more]) == 0
        first_losses.append(json.loads(capfd.readouterr().out)["losses"][0])
    assert first_losses[1] < first_losses[0]


def test_a_type_is_converted_and_a_configuration_is_left_out(trained, capfd):
    assert main(["weights", "run1/step-00000002", "--to", "half", "--dtype", "bf16"]) == 0
    assert capfd.readouterr().out.startswith("wrote half: model.safetensors (")
    with safe_open(trained / "half" / "model.safetensors", framework="pt") as found:
        types = {found.get_slice(name).get_dtype() for name in found.keys()}  # noqa: SIM118  (not a mapping)
    assert types == {"BF16"}
    assert not (trained / "half" / "config.json").exists()


def test_what_cannot_be_is_refused_all_at_once(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["weights", "--dtype", "int3", "--model", "llama9"]) == 2
    found = errors(capfd)
    assert [code for code, _ in found] == ["X004", "X004", "L005", "M006"]
    assert main(["weights", "nowhere", "--to", "out"]) == 2
    assert errors(capfd) == [("H001", "no folder nowhere")]
    assert not (tmp_path / "out").exists()


def test_another_model_a_full_folder_and_a_damaged_checkpoint_write_nothing(trained, capfd):
    assert main(["weights", "run1", "--to", "out", "--model", "gpt2"]) == 2
    assert errors(capfd) == [("H003", "the checkpoint is of another model (tiny) than gpt2")]
    (trained / "there").mkdir()
    (trained / "there" / "mine").write_text("kept")
    assert main(["weights", "run1", "--to", "there"]) == 2
    assert errors(capfd)[0][0] == "H008"
    assert [f.name for f in (trained / "there").iterdir()] == ["mine"]
    file = trained / "run1" / "step-00000002" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["weights", "run1", "--to", "out"]) == 2
    assert errors(capfd)[0][0] == "H002"
    assert not (trained / "out").exists()

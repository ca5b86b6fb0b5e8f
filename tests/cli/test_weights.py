"""`meshwright weights`: from a run's checkpoint to a folder that transformers loads, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer, models

from meshwright.cli import main
from meshwright.run import weights
from tests.cli.tiny import CONFIG, tiny
from tests.run.forked import Program
from tests.run.shards import damage

QUESTION = ["tiny/config.json", "--on", "2xh100", "--train", "batch=4,seq=32,dtype=fp32", "--data", "sample"]


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A folder with a tiny model, trained for two steps under ZeRO-1 on two processes."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["--plan", "dp2 zero1", "--steps", "2", "--out", "run1", "--lr", "1e-2", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        tiny(folder)
        assert main(["run", *QUESTION, *words]) == 0
    return folder.rename(folder.with_name("moved"))  # so that its model's file is not where it was read


@pytest.fixture
def trained(once, tmp_path, monkeypatch, capfd):
    """A folder of the test's own with that model."""
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
    assert main(["weights", "nowhere", "--to", "out", "--nope", "3"]) == 2
    assert [code for code, _ in errors(capfd)] == ["X003"]
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
    for rank in (0, 1):
        damage(trained / "run1" / "step-00000002" / f"rank-0000{rank}.safetensors", "param")
    assert main(["weights", "run1", "--to", "there"]) == 2
    assert errors(capfd)[0][0] == "H008"  # said before gigabytes are read
    assert main(["weights", "run1", "--to", "out"]) == 2
    assert {code for code, _ in errors(capfd)} == {"H002"}
    assert not (trained / "out").exists()


def test_what_is_no_parameter_of_a_checkpoint_is_not_read(trained, capfd):
    """Moments are twice the parameters, and more where those are stored in 16 bits."""
    for rank in (0, 1):
        damage(trained / "run1" / "step-00000002" / f"rank-0000{rank}.safetensors", "exp_avg")
    assert main(["weights", "run1", "--to", "out"]) == 0
    assert (trained / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("to", ["run1/step-00000002/index.json", "tiny/config.json/out"])
def test_a_folder_that_cannot_be_made_is_said_before_anything_is_read(trained, capfd, monkeypatch, to):
    monkeypatch.setattr("meshwright.run.weights.CheckpointReader.wrong", lambda self: pytest.fail("read"))
    assert main(["weights", "run1", "--to", to]) == 2
    assert errors(capfd)[0][0] == "H008"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_weights_that_are_interrupted_leave_nothing_behind(trained, number):
    def ended(*_):
        assert list(trained.glob(".out.*"))
        os.kill(os.getpid(), number)
        time.sleep(30)

    def program():
        os.chdir(trained)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in a shell's background ignores it
        weights._write = ended
        return main(["weights", "run1", "--to", "out"])

    before = sorted(trained.iterdir())
    interrupted = Program(program, {})
    _, err = interrupted.communicate(timeout=120)
    assert interrupted.returncode == 130, err
    assert sorted(trained.iterdir()) == before


def test_weights_within_a_round_of_local_steps_are_said_to_be_one_replicas(trained, capfd):
    words = ["--plan", "dp2 mb1 sync=local:h=2", "--out", "run2", "--json", "--steps"]
    assert main(["run", *QUESTION, *words, "3"]) == 0
    assert main(["weights", "run2", "--to", "within"]) == 0
    assert "within a round of local steps: the first replica's own weights" in capfd.readouterr().err
    assert main(["run", *QUESTION, *words, "4", "--resume"]) == 0
    assert main(["weights", "run2", "--to", "joined"]) == 0
    assert "within a round" not in capfd.readouterr().err


def test_weights_without_their_configuration_are_said_to_lack_it(trained, capfd):
    assert main(["weights", "run1", "--to", "bare"]) == 0
    assert "no config.json" in capfd.readouterr().err


@pytest.mark.parametrize("file", ["config.json", "shape.json"])
def test_the_configuration_that_a_run_read_its_model_from_goes_with_the_weights(file, trained, capfd):
    (trained / "tiny" / "config.json").rename(trained / "tiny" / file)
    question = [f"tiny/{file}", *QUESTION[1:], "--plan", "dp2 zero1", "--steps", "1", "--out", "run2"]
    assert main(["run", *question]) == 0
    assert main(["weights", "run2", "--to", "whole"]) == 0
    assert "no config.json" not in capfd.readouterr().err
    assert json.loads((trained / "whole" / "config.json").read_text()) == CONFIG | {"dtype": "float32"}


def test_a_tokenizer_and_a_configuration_go_with_the_weights_from_the_folder_that_a_run_began_with(trained, capfd):
    assert main(["weights", "run1", "--to", "base", "--model", "tiny"]) == 0
    words = Tokenizer(models.BPE(vocab={"</s>": 0, "a": 1}, merges=[], unk_token="a"))
    words.save(str(trained / "base" / "tokenizer.json"))
    (trained / "base" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (trained / "base" / "chat_template.jinja").write_text("{{ messages }}")
    (trained / "base" / "generation_config.json").write_text('{"temperature": 0.5}')
    began = ["--plan", "dp2 zero1", "--weights", "base", "--out", "run2", "--json", "--steps"]
    assert main(["run", *QUESTION, *began, "1"]) == 0
    # goes on without --weights, as it must, and so with the tokenizer that its checkpoint names
    assert main(["run", *QUESTION, *began[:2], *began[4:], "2", "--resume"]) == 0
    capfd.readouterr()
    assert main(["weights", "run2", "--to", "tuned", "--dtype", "bf16"]) == 0
    out, err = capfd.readouterr()
    assert "step-00000002" in err and "no config.json" not in err
    beside = ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in beside:
        assert (trained / "tuned" / name).read_bytes() == (trained / "base" / name).read_bytes()
        assert name in out
    assert json.loads((trained / "tuned" / "config.json").read_text()) == CONFIG | {"dtype": "bfloat16"}
    assert sorted(file.name for file in (trained / "tuned").iterdir()) == sorted(
        [*beside, "config.json", "model.safetensors"]
    )


def test_a_configuration_of_another_model_is_not_taken(trained):
    (trained / "run1" / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 96}))
    assert main(["weights", "run1", "--to", "bare"]) == 0
    assert [file.name for file in (trained / "bare").iterdir()] == ["model.safetensors"]
    (trained / "run1" / "config.json").write_text(json.dumps(CONFIG))
    assert main(["weights", "run1", "--to", "found"]) == 0
    assert json.loads((trained / "found" / "config.json").read_text()) == CONFIG | {"dtype": "float32"}

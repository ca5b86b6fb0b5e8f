"""Checkpoints in and out of torch's distributed format: torch's own load and save are the other side, and a file that
names other things than torch's is refused before any of them runs."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as theirs
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run.checkpoint import load, save
from meshwright.run.checkpoint.dcp import MOMENTS, DistributedReader, export_distributed, into_checkpoint
from meshwright.run.checkpoint.dcp_metadata import METADATA, read_tensors
from meshwright.run.checkpoint.format import Meta, identity
from meshwright.run.checkpoint.loading import CheckpointReader
from meshwright.run.mesh import alone, build
from meshwright.run.published import published_tensors
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.run.weights import load_weights
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import Train
from tests.cli.tiny import CONFIG
from tests.run.processes import launch
from tests.run.small import batch

TRAIN = Train(global_batch=2, seq_len=16, dtype="fp32")
STEPS = 2


def trained(rank: int, model, folder: str) -> None:
    """Two steps on two tensor-parallel processes, saved."""
    plan = parse("tp2 mb2").on(2)
    trainer = Trainer(model, plan, TRAIN, build(plan), settings=Settings(lr=1e-2))
    for step in range(STEPS):
        trainer.step(batch(TRAIN, model.vocab, step))
    trainer.settle()
    meta = Meta(step=STEPS, seed=0, model=model.name, model_hash=identity(model), plan="tp2 mb2", world=2)
    save(folder, trainer.pieces(), meta, trainer.mesh["world"])


def sharded(rank: int, folder: str, whole: dict[str, torch.Tensor]) -> None:
    """Torch's own save of tensors that two processes each have half of, under prefixes of its user."""
    mesh = init_device_mesh("cpu", (2,))
    halves = {name: distribute_tensor(value.clone(), mesh, [Shard(0)]) for name, value in whole.items()}
    state = {name: {"step": torch.tensor(7.0)} for name in whole}
    for name, value in whole.items():
        for n, key in enumerate(MOMENTS, 1):
            state[name][key] = distribute_tensor(value + n, mesh, [Shard(value.dim() - 1)])
    theirs.save({"app": {"model": halves, "optim": {"state": state}}, "epoch": 3}, checkpoint_id=folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model's configuration, a run's checkpoint of it and that as torch's."""
    folder = tmp_path_factory.mktemp("dcp")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    model = load_model(str(folder / "config.json"))
    launch(2, trained, model, str(folder / "run"))
    export_distributed(CheckpointReader(folder / "run" / "step-00000002"), folder / "torch")
    return folder, model


def held(model, path: Path) -> tuple[Meta, dict[tuple[str, str], torch.Tensor]]:
    """The parameters of one process that resumes from a checkpoint."""
    plan = parse("tp1 mb2").on(1)
    trainer = Trainer(model, plan, TRAIN, alone(), settings=Settings(seed=5))
    pieces = trainer.pieces()
    meta = load(path, pieces, trainer.mesh["world"], model_hash=identity(model))
    return meta, {(p.key, p.parameter.name): p.values.clone() for p in pieces}


def test_a_checkpoint_goes_out_and_comes_back_for_another_layout_as_it_was(saved, tmp_path):
    folder, model = saved
    wanted = published_tensors(model)

    def meta(step: int) -> Meta:
        return Meta(step=step, seed=0, model=model.name, model_hash=identity(model), plan="", world=1)

    made = into_checkpoint(folder / "torch", tmp_path / "back", wanted, meta)
    assert made.name == "step-00000002"
    before, after = held(model, folder / "run"), held(model, tmp_path / "back")
    assert after[0].step == before[0].step == STEPS
    assert before[1].keys() == after[1].keys() and {key for key, _ in before[1]} == {"param", *MOMENTS}
    assert all(torch.equal(after[1][key], values) for key, values in before[1].items())


def test_torchs_own_load_reads_what_goes_out(saved, capfd):
    folder, model = saved
    wanted = published_tensors(model)
    moments = {
        name: {m: torch.zeros(shape) for m in MOMENTS} | {"step": torch.zeros(())} for name, shape in wanted.items()
    }
    state = {"model": {n: torch.zeros(s) for n, s in wanted.items()}, "optim": {"state": moments}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.load(state, checkpoint_id=folder / "torch", no_dist=True)
    assert main(["weights", str(folder / "run"), "--to", str(folder / "hub")]) == 0
    published = load_file(folder / "hub" / "model.safetensors")
    assert published.keys() == state["model"].keys()
    assert all(torch.equal(state["model"][name], values) for name, values in published.items())
    assert {float(one["step"]) for one in moments.values()} == {float(STEPS)}
    assert all(one["exp_avg_sq"].any() for one in moments.values())


def test_what_torch_cut_over_processes_comes_in_as_weights_and_as_a_checkpoint(saved, tmp_path, capfd, monkeypatch):
    folder, model = saved
    torch.manual_seed(1)
    whole = {name: torch.randn(shape) for name, shape in published_tensors(model).items()}
    launch(2, sharded, str(tmp_path / "theirs"), whole)
    assert len(list((tmp_path / "theirs").glob("*.distcp"))) == 2
    reader = DistributedReader(tmp_path / "theirs", whole)
    assert reader.prefix == "app.model." and reader.moments == "app.optim.state."
    trainer = Trainer(model, parse("tp1 mb2").on(1), TRAIN, alone(), settings=Settings())
    load_weights(tmp_path / "theirs", trainer.pieces(), model, trainer.mesh["world"])
    for piece in trainer.pieces():
        if piece.key == "param":
            for part in piece.parameter.parts:
                mine = part.view(piece.values.view(piece.parameter.shape))
                assert torch.equal(mine, whole[part.name][part.region(tuple(mine.shape))])
    monkeypatch.chdir(tmp_path)
    config = str(folder / "config.json")
    assert main(["weights", "theirs", "--format", "checkpoint", "--model", config, "--to", "mine"]) == 0
    meta, values = held(model, tmp_path / "mine")
    assert meta.step == 7
    norm = whole["model.norm.weight"]
    for n, key in enumerate(("param", *MOMENTS)):
        assert torch.equal(values[key, "model.norm.weight"], norm + n)
    assert main(["weights", "theirs", "--model", config, "--to", "hub"]) == 0
    found = load_file(tmp_path / "hub" / "model.safetensors")
    assert found.keys() == whole.keys() and all(torch.equal(found[n], v) for n, v in whole.items())
    # one process's file is cut short: the cause, and nothing is written
    file = next((tmp_path / "theirs").glob("__1*.distcp"))
    file.write_bytes(file.read_bytes()[:2000])
    capfd.readouterr()
    assert main(["weights", "theirs", "--model", config, "--to", "again"]) == 2
    err = capfd.readouterr().err
    assert "error[H010]" in err and "holds no tensor" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "mine", "theirs"]


class _Runs:
    """A value whose pickle calls any function when it is read."""

    def __init__(self, function, *arguments):
        self.said = function, arguments

    def __reduce__(self):
        return self.said


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.mkdir, ("ran",)),
        (eval, ("__import__('os').mkdir('ran')",)),
        (getattr, (Path, "mkdir")),
        (torch.load, ("ran",)),
        (torch.Size.__class__, ("made", (), {})),
    ],
)
def test_metadata_that_names_anything_else_is_refused_before_it_runs(function, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / METADATA).write_bytes(pickle.dumps(_Runs(function, *arguments)))
    with pytest.raises(MeshwrightError) as caught:
        read_tensors(tmp_path)
    (found,) = caught.value.diagnostics
    assert found.code == "H010" and "which torch's does not" in found.message and found.place == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [METADATA]


def test_metadata_that_does_not_fit_is_refused(saved, tmp_path):
    folder = saved[0]

    def said(change) -> str:
        found = FileSystemReader(folder / "torch").read_metadata()
        for info in found.storage_data.values():
            change(info)
        (tmp_path / METADATA).write_bytes(pickle.dumps(found))
        with pytest.raises(MeshwrightError) as caught:
            read_tensors(tmp_path)
        return caught.value.diagnostics[0].message

    assert "not in a file of the folder" in said(lambda info: setattr(info, "relative_path", "../../etc/passwd"))
    assert "is compressed" in said(lambda info: setattr(info, "transform_descriptors", ["zstd"]))
    (tmp_path / METADATA).write_bytes(b"\x80\x04 not a pickle")
    with pytest.raises(MeshwrightError, match="H010"):
        read_tensors(tmp_path)
    (tmp_path / METADATA).write_bytes(pickle.dumps({"state": 1}))
    with pytest.raises(MeshwrightError, match="its metadata is a dict"):
        read_tensors(tmp_path)


def test_what_does_not_go_together_is_refused_all_at_once(saved, capfd, monkeypatch, tmp_path):
    folder = saved[0]
    monkeypatch.chdir(tmp_path)
    assert main(["weights", str(folder / "torch"), "--to", "x", "--format", "dcp"]) == 2
    err = capfd.readouterr().err
    assert "--model is missing" in err and "of a folder that has it already" in err
    assert main(["weights", str(folder / "run"), "--to", "x", "--format", "checkpoint", "--dtype", "bf16"]) == 2
    err = capfd.readouterr().err
    assert "of what is one already" in err and "with --format checkpoint" in err
    assert main(["weights", str(folder / "torch"), "--to", "x", "--model", "gpt2"]) == 2
    assert "H010" in capfd.readouterr().err
    assert main(["weights", str(folder / "torch" / "no"), "--to", "x"]) == 2
    with pytest.raises(MeshwrightError, match=r"meshwright weights .* --format checkpoint --model MODEL"):
        load(folder / "torch", [], alone()["world"], model_hash="")
    assert not (tmp_path / "x").exists()

"""Several pools trained for real: losses, gradients and parameters of one process, whatever flows between them."""

import json

import numpy as np
import pytest

from meshwright.cli import main
from meshwright.lower.pools import orders
from meshwright.plan import check, parse
from meshwright.plan.executable import unexecutable
from meshwright.run import mesh
from meshwright.run.equality import EqualityCase, apart
from meshwright.run.links import End, cuts
from meshwright.run.microbatches import own_rows
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.cli.tiny import tiny
from tests.run.processes import start_kept
from tests.run.small import batch, llama

#: As in test_equality: relative to each tensor's largest element.
TOLERANCE = 1e-9
TRAIN = Train(global_batch=8, seq_len=16, dtype="fp32")
DENSE = [
    "a=[dp2 mb2 on=0:2 part=0:2] + b=[dp1 pp2 mb1 on=2:4 part=2:4]",  # other replicas, other microbatches
    "a=[tp2 mb1 on=0:2 part=0:1] + b=[dp2 mb4 zero1 on=2:4 part=1:4]",  # halves of tokens to whole ones
    "a=[tp2 nosp mb2 on=0:2 part=0:3] + b=[tp2 mb1 on=2:4 part=3:4]",  # whole sequences to shards
    "a=[dp2 mb1 on=0:2 part=0:2 full] + b=[tp2 nosp mb2 gpipe]",  # gradients in the opposite order
    "b=[pp2 vpp1 zb-h1 on=0:2 part=2:4] + a=[dp2 mb2 on=2:4 part=0:2] a->b",  # devices in another order than layers
    "a=[dp1 on=0:1 part=0:1] + b=[tp2 on=1:3 mb2 part=1:3] + c=[dp1 mb4]",  # three in a row
    "a=[dp2 fsdp mb1 on=0:2 part=0:2] + b=[dp2 zero2 mb2 on=2:4 part=2:4]",
]


def test_pools_train_as_one_process_does():
    cluster = load("4xh100")
    found = [EqualityCase(model=llama(), plan=parse(text).on(4), train=TRAIN) for text in DENSE]
    assert not [d for case in found for d in check(case.plan, case.model, cluster, TRAIN)]
    assert not [d for case in found for d in unexecutable(case.plan, case.model, TRAIN)]
    far = {text: one for text, one in zip(DENSE, apart(found)) if not one.most <= TOLERANCE}
    assert far == {}


def frozen_steps(world, plan, steps):
    """Losses of a rank under a plan whose first two layers and embedding are not trained, and the largest change of
    those; as one process, which puts them back after every step, where `plan` is of one rank."""
    model, alone = llama(), not plan.several
    place = mesh.alone() if alone else mesh.build(plan)
    settings = Settings(precision="float64", lr=1e-2, clip=0.0, weight_decay=0.0)
    train = Train(global_batch=8, seq_len=16, dtype="fp32", optimizer="sgd")
    trainer = Trainer(model, plan, train, place, settings=settings)
    kept = {p.parameter.name: p.values.clone() for p in trainer.pieces() if p.key == "param"}
    fixed = lambda name: any(word in name for word in ("embed_tokens", "layers.0.", "layers.1."))  # noqa: E731
    losses = []
    for step in range(steps):
        whole = batch(train, model.vocab, step)
        rows = own_rows(trainer)
        losses.append(trainer.step(whole if rows is None else whole.taking(rows)).loss)
        if alone:
            for piece in trainer.pieces():
                if fixed(piece.parameter.name):
                    piece.values.copy_(kept[piece.parameter.name])
            trainer.publish()
    trainer.settle()
    moved = [float((p.values - kept[p.parameter.name]).abs().max()) for p in trainer.pieces() if p.key == "param"]
    names = [p.parameter.name for p in trainer.pieces() if p.key == "param"]
    return {"losses": losses, "names": names, "moved": moved, "moments": [p.key for p in trainer.pieces()]}


def test_a_frozen_pool_is_left_as_it_is_and_the_others_train_the_same():
    plan = parse("a=[dp1 mb2 on=0:1 part=0:2 frozen] + b=[dp1 mb1 on=1:2 part=2:4]").on(2)
    found = start_kept(frozen_steps, plan, 3, num_ranks=2)
    alone = start_kept(frozen_steps, parse("dp1 mb8"), 3, num_ranks=1)
    assert found["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)
    assert found["losses"][2] < found["losses"][0]
    # rank 0 is of the frozen pool: its parameters are there, unmoved, and have no moments
    assert set(found["moments"]) == {"param"} and max(found["moved"]) == 0.0
    assert any("embed_tokens" in name for name in found["names"])


@pytest.mark.parametrize("text", DENSE)
def test_every_token_of_a_link_is_sent_once(text):
    plan = parse(text).on(4)
    found = orders(plan, 8, {})
    number = {pool.name: i for i, pool in enumerate(plan.pools)}
    for link in plan.links:
        a, b = number[link.source], number[link.target]
        source = End(plan.pools[a], found[a], found[a].num_stages - 1)
        target = End(plan.pools[b], found[b], 0)
        for own, other in ((source, target), (target, source)):
            layout, mb = own.pool.plan.layout, own.pool.plan.pipeline.microbatch
            for replica in range(layout.dp):
                for shard in range(layout.tp):
                    for microbatch in range(own.actions.num_microbatches):
                        times = np.zeros((16 // layout.tp, mb), int)
                        for cut in cuts(own, other, replica, shard, microbatch, 16):
                            times[cut.tokens, cut.rows] += 1
                            assert cut.peer in range(*other.pool.devices)
                        assert np.all(times == 1)


def test_what_links_cannot_carry_yet_is_refused_by_name():
    plan = parse("a=[dp2 fsdp frozen on=0:2 part=0:2] + b=[cp2 bf16 on=2:4 part=2:4 unfused]").on(4)
    found = unexecutable(plan, llama(), TRAIN)
    assert {d.code for d in found} == {"P033"}
    said = " ".join(f"{d.place} {d.message}" for d in found)
    for part in ("plan.b.layout.cp = 2", "plan.a.layout.zero = 3", "bf16 and fp32", "plan.b.memory.attention"):
        assert part in said


@pytest.fixture
def here(tmp_path, monkeypatch):
    tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def trained(capsys, *words) -> dict:
    asked = ["tiny/config.json", "--on", "4xh100", "--train", "batch=8,seq=16,dtype=fp32", "--data", "sample"]
    assert main(["run", *asked, "--device", "cpu", "--dtype", "float64", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_of_pools_goes_on_from_its_checkpoint_under_any_plan(here, capsys):
    pools = "enc=[dp2 mb2 part=0:1] + lm=[tp2 mb1 zero1]"
    whole = trained(capsys, "--plan", "dp4", "--steps", "4")["losses"]
    first = trained(capsys, "--plan", pools, "--steps", "2", "--out", "out", "--trace", "t.json")["losses"]
    second = trained(capsys, "--plan", pools, "--steps", "3", "--out", "out", "--resume")["losses"]
    third = trained(capsys, "--plan", "tp2 dp2", "--steps", "4", "--out", "out", "--resume")["losses"]
    assert [*first, *second, *third] == pytest.approx(whole, rel=1e-6)
    from meshwright.trace import read

    timeline = read(here / "t.json")
    assert [(r.pool, dict(r.at)) for r in timeline.ranks] == [
        ("enc", {"dp": 0}),
        ("enc", {"dp": 1}),
        ("lm", {"tp": 0}),
        ("lm", {"tp": 1}),
    ]

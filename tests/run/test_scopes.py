"""Weights, gradients and optimizer states over nested groups: as one process, in the bytes that are predicted."""

import pytest
import torch

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.lower.place import Mesh
from meshwright.plan import check, parse
from meshwright.plan.executable import unexecutable
from meshwright.run.mesh import members
from meshwright.run.record import Off, Recorder, install
from meshwright.run.settings import Settings
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from meshwright.spec.workload import parse as workload
from meshwright.sync.scoped import nested
from tests.run import local, small
from tests.run.processes import launch_kept as launch
from tests.run.test_codes import totals

TRAIN = Train(global_batch=16, seq_len=16)


@pytest.fixture(scope="module")
def alone():
    return launch(1, small.train_steps, small.llama(), "dp1 mb1", TRAIN, 2)


@pytest.mark.parametrize(
    "text",
    [
        "dp8 fsdp scopes=2,4 mb1",  # pairs, two of them a node, two nodes, two microbatches
        "dp2 cp2 fsdp scopes=2,2 mb2",  # a pair that shares a sequence; rows that do not divide
        "dp4 tp2 hsdp2 scopes=2,2 mb2",  # two copies of each tensor-parallel part
        "dp4 fsdp hpz2 mb2 full",  # a second copy in pairs, two microbatches
        "dp2 cp2 tp2 hsdp4 hpz2 mb2",  # rows that do not divide
    ],
)
def test_scopes_train_as_one_process(text, alone):
    got = launch(parse(text).layout.num_ranks, small.train_steps, small.llama(), text, TRAIN, 2)
    for which in (1, 2):  # gradients, then parameters after two steps
        apart = small.differences(small.assemble(got, which), small.assemble(alone, which))
        assert max(apart.values()) < 1e-12
    assert torch.tensor(got[0][0]).allclose(torch.tensor(alone[0][0]))


@pytest.mark.parametrize(
    "text",
    [
        "dp8 fsdp scopes=2,4 mb1",
        "dp4 fsdp scopes=2,2 mb2 sync=qsdp:weights=5,grads=4",
        "dp4 fsdp hpz2 mb2",
        "dp4 fsdp hpz2 mb2 sync=qsdp:weights=5,grads=4,near=2",
    ],
)
def test_a_step_moves_the_bytes_that_are_predicted_and_leaves_all_ranks_alike(text):
    """By operation and number of ranks. Torch gathers embedding, final norm and head once for both passes; a
    prediction counts both."""
    plan, model = parse(text), small.llama(vocab=128)
    ranks, train = plan.layout.num_ranks, Train(global_batch=16, seq_len=16, dtype="fp32")
    got = launch(ranks, recorded, model, text, train)
    run = simulate(plan, model, load(f"{ranks}xh100"), train, standard())
    graph, programs = run.lowered.graph, run.lowered.programs
    moved = [m for key in graph.cost_key if programs[key].kind == "exchange" for m in programs[key].moves]
    told = totals(((m.op, m.group.size), m.num_bytes) for m in moved if (m.op, m.num_bytes) != ("all_reduce", 4))
    table = 128 * 32  # numbers of the embedding and of the head
    near = plan.layout.hpz or plan.layout.weights_over
    if "qsdp" in text and not plan.layout.hpz:  # a second copy is sent as the code has left it
        # half of either, in 5 bits with two numbers of 4 bytes a bucket of 1024, from both; the norm's as they are
        again = 2 * 2 * (table // 2 * 5 // 8 + 2 * 8) + 32 * 4
    else:
        again = (2 * table + 32) * 4
    told["all_gather", near] -= again * plan.num_microbatches(16)
    assert all(totals(sent) == told for _, sent in got)
    assert all(seen == got[0][0] for seen, _ in got)


def recorded(rank, model, text, train):
    """Losses and norms of a step, and (operation, bytes) of every exchange of state."""
    trainer = local.begun(model, text, train, local.FP32)
    recorder = Recorder(rank=rank, device=torch.device("cpu"), warmup=0, keep=1)
    install(recorder)
    seen = local.steps(trainer, 0, 1)
    install(Off())
    labels = [recorder.recording().labels[i] for i in recorder.recording().label.tolist()]
    return seen, [
        ((x.kind, len(x.group)), x.num_bytes) for x in labels if x.queue in ("dp", "dp_gather") and x.stage >= 0
    ]


def held(rank, text):
    """Bytes of state on this rank by kind, in bf16 with fp32 masters; of sums while they add up."""
    trainer = local.begun(small.llama(vocab=64), text, Train(global_batch=8, seq_len=16), Settings())
    (scoped,) = trainer.exchanges
    local.steps(trainer, 0, 1)
    of = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)  # noqa: E731
    sums = sum(flat.width * flat.outer.size * 4 for flat in scoped.flats) * (not scoped.flats[0].outer.alone)
    return {
        "parameters": of(p.to_local() for stage in trainer.stages.values() for p in stage.parameters()),
        "gradients": sums + of(flat.gradient for flat in scoped.flats),
        "optimizer": of(h.master for h in scoped.held())
        + of(m for i in range(len(scoped.held())) for m in trainer.optimizer.moments(i)),
    }


def test_a_rank_holds_the_state_that_is_predicted():
    """Weights of 2 bytes over the pair; sums of 4 over the pair and, scattered on, over all 4; masters and moments of
    12 over all."""
    text, model = "dp4 fsdp scopes=2,2 mb1", small.llama(vocab=64)
    n = model.num_params
    assert launch(4, held, text) == [{"parameters": n, "gradients": 3 * n, "optimizer": 3 * n}] * 4
    run = simulate(parse(text), model, load("4xh100"), Train(global_batch=8, seq_len=16), standard())
    constant = run.lowered.static_bytes[0]
    assert (constant["parameters"], constant["optimizer"]) == (n, 3 * n)
    # and the last layer's gradient with the head's and the final norm's, whole until it is scattered
    layer, head = (n - 2 * 64 * 32 - 32) // 4, 64 * 32 + 32
    assert constant["gradients"] == 3 * n + 4 * (layer + head)


@pytest.mark.parametrize("text", ["dp16 fsdp scopes=2,8", "cp2 dp8 hsdp8 scopes=2,4", "tp2 dp8 fsdp scopes=2,4"])
def test_groups_of_scopes_lie_where_the_run_makes_them(text):
    plan = parse(text)
    mesh = Mesh(plan, load("16xh100"))
    for among in nested(plan):
        first = next(ranks for ranks in members(plan)[among.name] if 0 in ranks)
        places = [0]
        for stride, size in mesh.spans(mesh.among(among.name)) if among.size > 1 else ():
            places = [p + stride * i for i in range(size) for p in places]
        assert sorted(places) == sorted(first) and len(first) == among.size


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("fsdp scopes=2,3", "P019", "not nested"),
        ("fsdp scopes=2", "P019", "has 1 of two numbers"),
        ("fsdp scopes=1,2", "P019", "weights over one rank are whole"),
        ("zero2 scopes=2,4", "P061", "zero2 keeps weights whole"),
        ("fsdp pp2 scopes=2,2", "P061", "under a pipeline"),
        ("hsdp4 scopes=2,4 sync=local:h=2", "P061", "sync=local:h=2 exchanges state that has one scope"),
        ("fsdp scopes=2,4 offload=optimizer", "P061", "state off the device has one scope"),
        ("fsdp scopes=2,4 hpz2", "P061", "need no second copy"),
    ],
)
def test_scopes_that_do_not_go_together_are_refused(words, code, said):
    model, cluster, train = small.llama(), load("8xh100"), workload("batch=8,seq=16")
    found = check(parse(words).on(8), model, cluster, train)
    assert any(d.code == code and said in d.message and "scopes" in d.place for d in found)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("fsdp hpz3", "P019", "no part of the 8 ranks"),
        ("hsdp4 hpz4", "P019", "no part of the 4 ranks"),
        ("zero2 hpz2", "P061", "of which there is no second copy"),
        ("fsdp pp2 hpz2", "P061", "hpz2: under a pipeline"),
        ("fsdp hpz2 sync=qsdp:near=4", "P061", "among 4 neighbours, and a copy lies among 2"),
        ("fsdp sync=qsdp:near=8", "Y003", "8 neighbours are no part of the 8 ranks"),
        ("zero2 sync=qsdp:near=2", "Y003", "gathered for every pass"),
    ],
)
def test_second_copies_and_first_sums_that_do_not_go_together_are_refused(words, code, said):
    model, cluster, train = small.llama(), load("8xh100"), workload("batch=8,seq=16")
    assert any(d.code == code and said in d.message for d in check(parse(words).on(8), model, cluster, train))


def test_a_sum_made_among_neighbours_first_is_the_sum():
    """Of 255 levels in a bucket's span, rounded twice: the error's norm is within a thirtieth of the gradient's."""
    text, train = "dp4 fsdp sync=qsdp:near=2", Train(global_batch=4, seq_len=16)
    coded, whole = (
        small.assemble(launch(parse(one).layout.num_ranks, small.train_steps, small.llama(), one, train, 1), 1)
        for one in (text, "dp1 mb1")
    )
    norm = lambda tensors: sum(float(t.square().sum()) for t in tensors) ** 0.5  # noqa: E731
    assert 0 < norm(coded[n] - whole[n] for n in whole) < norm(whole.values()) / 30


def test_neighbours_hold_a_second_copy_of_weights_as_predicted():
    """Of 2 bytes a weight over a pair, all layers at the end of a forward."""
    model = small.llama(vocab=64)
    one, two = (
        simulate(parse(f"dp4 fsdp{w} mb1"), model, load("4xh100"), Train(global_batch=8, seq_len=16), standard())
        for w in ("", " hpz2")
    )
    before, after = (run.lowered.static_bytes[0] for run in (one, two))
    assert after == before | {"second copy of weights": model.num_params}


def test_scopes_are_words_that_round_trip_and_run():
    plan = parse("fsdp scopes=2,4").on(8)
    assert parse(plan.text()) == plan and "scopes=2,4" in plan.text()
    assert unexecutable(plan, small.llama(), TRAIN) == []
    with pytest.raises(MeshwrightError):
        parse("scopes=two")

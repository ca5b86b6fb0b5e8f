"""Paths of modules that are shared by some: each on its sequences alone, module by module as by hand in float64."""

from collections import Counter
from math import sqrt

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open

import meshwright as mw
from meshwright.answer.predict import simulate
from meshwright.assign.kmeans import centres, classifier, nearest, ranked, shares
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.lower.place import Mesh
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.run import routes
from meshwright.run.checkpoint import AsyncSaver, Meta, identity
from meshwright.run.checkpoint import load as load_checkpoint
from meshwright.run.data.corpus import Corpus, judged_sequences, sequences
from meshwright.run.judge import RoutedJudge
from meshwright.run.loss import token_losses
from meshwright.run.mesh import alone, build, members
from meshwright.run.record import Off, Recorder, install
from meshwright.run.resume import wanted_of
from meshwright.run.trainer import Trainer
from meshwright.run.weights import export_weights
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from tests.run import local
from tests.run.processes import launch_kept as launch
from tests.run.rounds import LAYERS, layer_of
from tests.run.small import differences, llama

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
MODEL = llama(layers=LAYERS, vocab=64)
PREFIX, STEPS, H = 4, 4, 2
DIPACO = f"dp4 mb1 sync=dipaco:levels=2x2,h={H},prefix={PREFIX}"
DDM = f"dp2 mb1 sync=ddm:prefix={PREFIX}"


def corpus(batch=4, seed=0):
    """Sequences whose tokens are of one quarter of the vocabulary each, so that their prefixes are told apart."""
    rng = np.random.default_rng(seed)
    quarters = rng.integers(0, 4, 40)
    tokens = np.concatenate([16 * q + rng.integers(0, 16, 16) for q in quarters] + [np.zeros(1, np.int64)])
    starts = np.zeros(1, np.int64)
    return Corpus(tokens=tokens, starts=starts, largest=63, seq_len=16, global_batch=batch, boundaries=False)


def routed(text, train=TRAIN):
    trainer = Trainer(MODEL, parse(text), train, build(parse(text)), settings=local.SETTINGS)
    trainer.routes = routes.prepared(trainer, corpus(), corpus(seed=1))
    routes.ready(trainer, corpus(), corpus(seed=1))
    return trainer


def trained(rank, text, steps):
    """The state of a rank, its routes, its judged loss, and what it sent."""
    trainer = routed(text)
    recorder = Recorder(rank=rank, device=torch.device("cpu"), warmup=0, keep=steps)
    install(recorder)
    for step in range(steps):
        trainer.step(routes.routed_of(trainer, corpus(), step))
    trainer.settle()
    install(Off())
    labels = [recorder.recording().labels[i] for i in recorder.recording().label.tolist()]
    sent = [(one.kind, one.num_bytes) for one in labels if one.num_bytes]
    loss = RoutedJudge(trainer, corpus(seed=1)).loss()
    held = [piece for piece in local.state(trainer) if not piece[0].startswith("route")]
    return held, trainer.routes.of, trainer.routes.judged, sent, loss


def by_hand(rank, of, judged, levels, steps, rates):
    """Algorithm 1 of 2403.10616 in one process, paths one after the other, with section 2.7's weights and lengths: the
    parameters of each path, and the loss of held-out sequences under the weights of their paths."""
    count = int(of.max()) + 1
    rows = TRAIN.global_batch // count
    share = msgspec.structs.replace(TRAIN, global_batch=rows)
    paths = [Trainer(MODEL, parse("tp1 mb1").on(1), share, alone(), settings=local.SETTINGS) for _ in range(count)]
    held = [{p.parameter.name: p.values for p in t.pieces() if p.key == "param"} for t in paths]
    common = [{name: values.clone() for name, values in mine.items()} for mine in held]
    speed = [{name: torch.zeros_like(values) for name, values in mine.items()} for mine in held]
    sizes = torch.bincount(of.long()).tolist()
    for step in range(1, steps + 1):
        for number, trainer in enumerate(paths):
            members = np.flatnonzero(of.numpy() == number)
            chosen = members[sequences(np.arange((step - 1) * rows, step * rows), len(members), 0)]
            batch = routes.learnt_from(corpus().sequences_at(chosen), PREFIX, rows * (16 - PREFIX + 1))
            trainer.step(batch)
        for name in held[0] if levels and step % H == 0 else ():
            level = layer_of(name) * len(levels) // LAYERS
            block = count // int(np.prod(levels[: level + 1]))
            before = [mine[name].clone() for mine in held]
            for number in range(count):
                some = [p for p in range(count) if p // block % levels[level] == number // block % levels[level]]
                whole = sum(sizes[p] for p in some)
                mean = sum((common[p][name] - before[p]) * sizes[p] / whole for p in some)
                gradient = mean * sqrt(len(some))
                speed[number][name] = rates[1] * speed[number][name] + gradient
                along = gradient + rates[1] * speed[number][name]
                held[number][name].copy_(common[number][name] - rates[0] * along)
            for number in range(count):
                common[number][name] = held[number][name].clone()
        for trainer in paths:
            trainer.publish()
    total, tokens = 0.0, corpus(seed=1)
    for row, number in enumerate(judged_sequences(tokens)):
        batch = tokens.sequences_at(np.array([number]))
        likely = 0.0
        for path, trainer in enumerate(paths):
            weight = float(judged.view(-1, count)[row, path])
            if weight:
                likely = likely + weight * torch.exp(-losses_of(trainer, batch))
        total += float(-likely[PREFIX - 1 :].log().mean())
    return [local.state(trainer) for trainer in paths], total / (row + 1)


def losses_of(trainer, batch):
    seen = []
    ((_, stage),) = trainer.stages.items()
    hook = stage.head.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.no_grad():
        trainer.forwards().run(trainer.passes(batch.taking([0] * trainer.train.global_batch)))
    hook.remove()
    with torch.no_grad():
        return token_losses(stage.head.logits(seen[0]), batch.tokens[:, 1:].T, 0, trainer.mesh["tp"])[:, 0].double()


def test_modules_are_averaged_among_the_paths_that_share_them_as_by_hand():
    found = launch(4, trained, DIPACO, STEPS)
    _, of, judged, *_ = found[0]
    assert sorted(set(of.tolist())) == [0, 1, 2, 3] and len(set(torch.bincount(of.long()).tolist())) > 1
    ((expected, loss),) = launch(1, by_hand, of, judged, (2, 2), STEPS, (0.7, 0.9))
    for (held, *_, judged_loss), want in zip(found, expected):
        apart = differences(local.whole([held], "param"), local.whole([want], "param"))
        assert max(apart.values()) < 1e-12, max(apart, key=apart.get)
        assert judged_loss == pytest.approx(loss, rel=1e-12)
    run = simulate(parse(DIPACO), MODEL, load("4xh100"), TRAIN, standard())
    programs = [run.lowered.programs[k] for k in run.lowered.graph.cost_key]
    told = Counter((m.op, 2 * m.num_bytes) for p in programs for m in p.moves if p.rare)
    assert Counter(found[0][3]) == Counter({one: STEPS // H * times for one, times in told.items()})


def test_experts_that_exchange_nothing_are_weighed_by_a_router_as_by_hand():
    found = launch(2, trained, DDM, STEPS)
    _, of, judged, *_ = found[0]
    weights = judged.view(-1, 2)
    assert torch.allclose(weights.sum(1), torch.ones(len(weights))) and float(weights.min()) > 0
    ((expected, loss),) = launch(1, by_hand, of, judged, (), STEPS, ())
    for (held, _, _, sent, judged_loss), want in zip(found, expected):
        assert not sent
        apart = differences(local.whole([held], "param"), local.whole([want], "param"))
        assert max(apart.values()) < 1e-12
        assert judged_loss == pytest.approx(loss, rel=1e-9)


def sharded(rank, text):
    trainer = routed(text, msgspec.structs.replace(TRAIN, global_batch=4))
    for step in range(2):
        trainer.step(routes.routed_of(trainer, corpus(), step))
    trainer.settle()
    loss = RoutedJudge(trainer, corpus(seed=1)).loss()
    held = [piece for piece in local.state(trainer) if not piece[0].startswith("route")]
    return trainer.rounds.replica, held, loss


def test_a_path_of_ranks_that_shard_its_state_is_that_of_one_rank():
    words = f"sync=dipaco:levels=1x2,h=2,prefix={PREFIX}"
    whole = launch(2, sharded, f"dp2 mb2 {words}")
    parts = launch(4, sharded, f"dp4 hsdp2 mb1 {words}")
    for replica in (0, 1):
        got, want = (local.whole([one[1] for one in some if one[0] == replica], "param") for some in (parts, whole))
        assert max(differences(got, want).values()) < 1e-12
    assert [one[2] for one in parts] == [pytest.approx(whole[0][2], rel=1e-12)] * 4


def resumed(rank, root):
    """State that a run goes on with after a step within a round, and a trainer that loads it, routes included."""
    text = DIPACO
    trainer = routed(text)
    trainer.step(routes.routed_of(trainer, corpus(), 0))
    extra = {"sync": trainer.plan.sync.policy, "replicas": 4, "joined": trainer.joined}
    meta = Meta(step=1, seed=0, model=MODEL.name, model_hash=identity(MODEL), plan=text, world=4, extra=extra)
    saver = AsyncSaver(root, trainer.mesh["world"])
    saver.begin(trainer.pieces(), meta)
    saver.wait()
    again = Trainer(MODEL, parse(text), TRAIN, build(parse(text)), settings=local.SETTINGS)
    again.routes = routes.prepared(again, corpus(), corpus(seed=1))
    wanted, _ = wanted_of(str(root), text, again)
    load_checkpoint(root, wanted, again.mesh["world"], model_hash=identity(MODEL))
    again.set_step(1)
    assert again.routes.known
    routes.ready(again, corpus(), corpus(seed=1))
    out = []
    for one in (trainer, again):
        for step in (1, 2):
            one.step(routes.routed_of(one, corpus(), step))
        one.settle()
        out.append(local.state(one))
    if not rank:  # the first replica's model is what is published of all
        export_weights(str(root), f"{root}-weights")
        with safe_open(f"{root}-weights/model.safetensors", "pt") as file:
            assert not any(name.startswith("route") for name in file.keys())  # noqa: SIM118
    with pytest.raises(MeshwrightError) as refused:
        wanted_of(str(root), "dp4 mb1", Trainer(MODEL, parse("dp4 mb1"), TRAIN, build(parse("dp4 mb1"))))
    return out, refused.value.diagnostics[0].code


def test_training_goes_on_from_within_a_round_with_the_routes_it_had(tmp_path):
    for (on, again), code in launch(4, resumed, tmp_path):
        assert all(torch.equal(a[-1], b[-1]) and a[0] == b[0] for a, b in zip(on, again, strict=True))
        assert code == "Y004"


def test_groups_of_modules_are_the_same_in_the_mesh_of_a_prediction_and_of_a_run():
    plan, cluster = parse("tp2 dp8 shard2 mb1 sync=dipaco:levels=2x2"), load("2x8xh100")
    held = members(plan)
    assert held["module0"][0] == (0, 4) and held["module1"][0] == (0, 8)
    mesh = Mesh(plan, cluster)
    for name in ("module0", "module1"):
        for ranks in held[name]:
            spans = mesh.spans(mesh.among(name, ranks[-1]))
            steps = [s * np.arange(n) for s, n in spans]
            reached = ranks[0] + sum(np.meshgrid(*steps)) if steps else np.array(ranks)
            assert sorted(np.ravel(reached).tolist()) == sorted(ranks)


def test_a_level_held_by_one_path_alone_sends_nothing():
    asked = mw.load_model("llama3-8b"), load("4x1xh100,10gbe"), mw.parse_train("batch=4,seq=2048")
    found = {
        w: mw.predict(*asked, mw.parse_plan(f"mb1 full sync={w}"), detail=False)
        for w in ("dipaco:levels=4x1", "dipaco:levels=4", "ddm", "diloco:h=150")
    }
    sent = {w: one.round.part_bytes if one.round else 0.0 for w, one in found.items()}
    assert sent["dipaco:levels=4"] == sent["ddm"] == 0 < sent["dipaco:levels=4x1"] < sent["diloco:h=150"]


def test_points_go_to_the_centre_that_is_nearest_and_a_classifier_tells_them_apart():
    rng = np.random.default_rng(0)
    middle = np.array([[0.0, 0, 0], [5, 0, 0], [0, 5, 5]])
    points = np.concatenate([one + rng.normal(0, 0.3, (40, 3)) for one in middle])
    found = centres(points, 3, 0)
    of = nearest(points, found)
    assert all(len(set(of[i * 40 : (i + 1) * 40].tolist())) == 1 for i in range(3)) and len(set(of.tolist())) == 3
    weights = shares(points, classifier(points, of, 3))
    assert np.allclose(weights.sum(1), 1) and (weights.argmax(1) == of).all() and weights.max(1).mean() > 0.9


@pytest.mark.parametrize(
    ("plan", "train", "help"),
    [
        ("dp6 mb1 sync=dipaco:levels=2x2", "batch=12,seq=64", "multiple of 4 replicas"),
        ("dp4 mb1 sync=dipaco:levels=2x2", "batch=4,seq=32", "prefix=16"),
        ("dp4 mb1 sync=ddm", "batch=4,seq=64,pack=packed", "drop pack="),
        ("dp64 mb1 sync=dipaco:levels=2x2x2x2x2x2", "batch=64,seq=64", "levels=2x2x2x2"),
    ],
)
def test_what_no_path_can_be_is_refused_with_the_nearest_that_can(plan, train, help):
    with pytest.raises(MeshwrightError) as refused:
        mw.predict(MODEL, load("8x8xh100"), mw.parse_train(train), mw.parse_plan(plan))
    assert any(help in one.help for one in refused.value.diagnostics), refused.value
    stages = parse("dp2 pp2 mb1 1f1b sync=ddm").on(4)
    assert any("take pp1" in one.help for one in unexecutable(stages, MODEL, mw.parse_train("batch=4,seq=64")))


def test_overlapping_shards_have_the_sequences_of_the_two_nearest_paths():
    points, middle = np.array([[0.0], [4.0], [9.0]]), np.array([[0.0], [5.0], [10.0]])
    assert ranked(points, middle, 2).tolist() == [[0, 1], [1, 0], [2, 1]]
    found = routes.Routes(3, 3, 0, overlap=2)
    found.of.copy_(torch.from_numpy(ranked(points, middle, 2)).reshape(-1))
    assert [found.members(path).tolist() for path in range(3)] == [[0, 1], [0, 1, 2], [2]] and found.sizes == [2, 3, 1]
    with pytest.raises(MeshwrightError) as refused:
        mw.predict(MODEL, load("2xh100"), TRAIN, parse("dp2 mb1 sync=dipaco:levels=2,prefix=4,overlap=3"))
    assert any("overlap=2" in one.help for one in refused.value.diagnostics)


def test_levels_are_words_that_round_trip():
    assert read("dipaco:levels=2x3,h=7").text == "dipaco:levels=2x3,h=7"
    with pytest.raises(MeshwrightError) as refused:
        read("dipaco:levels=2x0")
    assert "2x2" in str(refused.value)

"""Experts of diffusion models, each trained on a cluster of the samples without a message to another, and the router
that tells clusters from noisy samples: against one process for each, in float64."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import meshwright as mw
from meshwright.cli import main
from meshwright.cli.run import run
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.run import noise, routes
from meshwright.run.data import build, clustered, load
from meshwright.run.data.corpus import sequences
from meshwright.run.data.samples import LabelledSamples, SampleLayout
from meshwright.run.data.tokenizer import Bytes
from meshwright.run.judge import Judge, RoutedJudge
from meshwright.run.record import Off, Recorder, install
from tests.run.denoisers import IMAGES, TRAIN, begun, by_hand, model, samples, state
from tests.run.processes import launch_kept as launch
from tests.run.small import assemble, plain

#: Largest difference, relative to a tensor's largest element. In float64 orders of addition leave 1e-13.
TOLERANCE = 1e-9
STEPS = 3
DDM = "dp2 mb1 sync=ddm:features=pixels"
ROUTER = IMAGES | {"num_labels": 2, "num_embeds_ada_norm": 0}
#: Of the 40 samples the cluster that each was drawn from.
DRAWN = np.random.default_rng(5).integers(0, 2, 40)


def corpus(labels=None, some=range(32), batch=4):
    """Samples of two clusters that lie apart, the first 32 of 40 unless others are named."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(40, 3, 8, 8)) + 3.0 * (2 * DRAWN - 1)[:, None, None, None]
    return LabelledSamples(
        inputs=inputs,
        labels=rng.integers(0, 5, 40) if labels is None else labels,
        chosen=np.array(some),
        layout=SampleLayout("first"),
        mean=(0.5,),
        std=(0.5,),
        global_batch=batch,
    )


def held_out():
    return corpus().judged(np.arange(32, 39))


def routed(text, given=None):
    trainer = begun(model(), text)
    trainer.routes = routes.prepared(trainer, corpus(), held_out())
    routes.ready(trainer, corpus(), held_out(), given)
    return trainer


def own(key):
    """Whether a state is parameters, of the first replica or of another."""
    return key.partition("@")[0] == "param"


def trained(rank, text):
    """Train some steps on a rank: the parameters that it holds behind them, its replica, the clusters that were found,
    what it sent, and the loss of what is held out."""
    trainer = routed(text)
    recorder = Recorder(rank=rank, device=torch.device("cpu"), warmup=0, keep=STEPS)
    install(recorder)
    for step in range(STEPS):
        trainer.step(routes.routed_of(trainer, corpus(), step))
    trainer.settle()
    install(Off())
    labels = [recorder.recording().labels[i] for i in recorder.recording().label.tolist()]
    sent = [(one.kind, one.num_bytes) for one in labels if one.num_bytes]
    of = routes.written(trainer, corpus(), held_out())
    held = [(plain(p.parameter), p.start, p.stop, p.values.clone()) for p in trainer.pieces() if own(p.key)]
    return held, trainer.rounds.replica, of, sent, RoutedJudge(trainer, held_out()).loss()


def alone_on(rank, clusters, text, replicas):
    """The state of each expert, trained alone in this process on its samples with the noise of its places in a global
    batch, and the mean error of the held-out samples of its cluster by the formulas of DiT's authors."""
    rows, out, lost = TRAIN.global_batch // replicas, [], []
    drawn, train = noise.drawn, msgspec.structs.replace(TRAIN, global_batch=rows)
    for number in range(replicas):
        trainer = begun(model(), f"dp1 mb{rows}", train)
        members = np.flatnonzero(clusters[:32] == number)

        def of_place(shape, places, seed, step, batch, first=number * rows):
            return drawn(shape, places + first, seed, step, batch)

        noise.drawn = of_place
        try:
            for step in range(STEPS):
                places = np.arange(step * rows, (step + 1) * rows)
                trainer.step(corpus().sequences_at(members[sequences(places, len(members), 0)]))
        finally:
            noise.drawn = drawn
        trainer.settle()
        out.append(state(trainer))
        weights = assemble([(out[-1],)], 0)
        for place, sample in enumerate(range(32, 39)):
            if clusters[sample] == number:
                x = torch.from_numpy(corpus().inputs[[sample]])
                said = drawn((1, 3, 8, 8), torch.tensor([place]), 0, -1, 4)
                told = torch.from_numpy(corpus().labels[[sample]])
                found = by_hand(weights, IMAGES, noise.noisy(x, said), said.steps, told)[:, :3]
                lost.append(float((found - said.noise.double()).square().mean()))
    return out, float(np.mean(lost))


def same(found, drawn):
    """Whether the samples that are routed are in two clusters, which are those drawn under one number or another."""
    return len({*zip(found[:39].tolist(), drawn[:39].tolist())}) == 2 == len({*found[:39].tolist()})


@pytest.mark.parametrize(("text", "ranks"), [(DDM, 2), ("dp4 hsdp2 mb1 sync=ddm:features=pixels", 4)])
def test_experts_are_trained_apart_on_clusters_as_one_process_trains_each(text, ranks):
    found = launch(ranks, trained, text)
    clusters = found[0][2]
    assert clusters[39] == -1 and same(clusters, DRAWN)
    ((expected, loss),) = launch(1, alone_on, clusters, text, 2)
    for replica, want in enumerate(expected):
        got = assemble([(one[0],) for one in found if one[1] == replica], 0)
        want = assemble([(want,)], 0)
        assert got.keys() == want.keys()
        for name, values in got.items():
            assert torch.allclose(values, want[name], rtol=TOLERANCE, atol=TOLERANCE * float(want[name].abs().max()))
    for *_, sent, judged in found:
        assert judged == pytest.approx(loss, rel=TOLERANCE)
        assert ranks > 2 or not sent  # not a byte leaves an expert; its own ranks share its state


def test_one_model_is_judged_by_every_sample_that_is_held_out_once():
    """Seven samples in batches of four, the last of which is filled up; in float64 as by hand."""
    trainer, lost = begun(model(), "dp1 mb4"), []
    weights = assemble([(state(trainer),)], 0)
    for place, number in enumerate(sequences(np.arange(8), 8, 0)):  # in the order of an epoch, the filling among them
        if number == 7:
            continue
        said = noise.drawn((1, 3, 8, 8), torch.tensor([place % 4]), 0, -1, 4)
        x, told = (torch.from_numpy(some[[32 + number]]) for some in (corpus().inputs, corpus().labels))
        found = by_hand(weights, IMAGES, noise.noisy(x, said), said.steps, told)[:, :3]
        lost.append(float((found - said.noise.double()).square().mean()))
    assert Judge(trainer, held_out()).loss() == pytest.approx(np.mean(lost), rel=TOLERANCE)


def by_features(rank, text):
    """The clusters that are found by hidden states, by a user's features, and as a user says them."""
    far = np.where(np.arange(40) % 3 == 0, 1.0, 0.0)
    given = (None, clustered.ClusterFile(None, far[:, None]), clustered.ClusterFile(np.arange(40) % 2, None))
    return [routes.written(routed(text, one), corpus(), held_out()) for one in given]


def test_clusters_are_of_hidden_states_of_a_users_features_or_as_a_user_says():
    hidden, far, said = launch(2, by_features, "dp2 mb1 sync=ddm")[1]
    assert same(hidden, DRAWN) and same(far, np.arange(40) % 3 == 0)
    assert said[:39].tolist() == (np.arange(39) % 2).tolist()


def refused(rank, clusters):
    """Return the text of the error that clusters of a user are refused with."""
    with pytest.raises(MeshwrightError) as error:
        routed(DDM, clustered.ClusterFile(clusters, None))
    return str(error.value)


@pytest.mark.parametrize(
    ("clusters", "said"),
    [
        (np.arange(40) % 3, "a cluster 2, and 2 experts"),
        (np.zeros(40, int), "fewer clusters: of 32 samples none goes to 1 of 2 experts"),
    ],
)
def test_clusters_that_do_not_fit_the_experts_are_refused(clusters, said):
    assert all(said in one for one in launch(2, refused, clusters))


def test_a_router_is_its_formula_to_the_last_gradient_and_is_told_no_class():
    trainer = begun(model(ROUTER), "dp1 mb4")
    weights = {name: values.requires_grad_() for name, values in assemble([(state(trainer),)], 0).items()}
    assert sum(w.numel() for w in weights.values()) + 16 * 32 == model(ROUTER).num_params  # and a table of 16 places
    batch = samples(0)._replace(targets=torch.tensor([0, 1, 1, 0]))
    said, gradients = noise.drawn((4, 3, 8, 8), torch.arange(4), 0, 0, 4), {}
    trainer.before_update.append(
        lambda: gradients.update((h.parameter.parts[0].name, h.gradient.clone()) for h in trainer.optimizer.held)
    )
    logits = router_by_hand(weights, noise.noisy(batch.tokens, said), said.steps)
    loss = F.cross_entropy(logits, batch.targets)
    loss.backward()
    assert trainer.step(batch).loss == pytest.approx(loss.item(), rel=TOLERANCE)
    for name in ("final_layer.linear.weight", "final_layer.adaLN_modulation.1.bias", "x_embedder.proj.bias"):
        want = weights[name].grad.flatten()
        assert torch.allclose(gradients[name], want, rtol=TOLERANCE, atol=TOLERANCE * float(want.abs().max()))


def router_by_hand(weights, noisy, steps):
    """The logits of the formulas in DiT's models.py with the mean over places in front of the last product: that is a
    product of every place whose output is averaged."""
    each = {name: values for name, values in weights.items() if not name.startswith("final_layer.linear")}
    matrix, bias = weights["final_layer.linear.weight"], weights["final_layer.linear.bias"]
    config = ROUTER | {"out_channels": len(bias)}
    # four copies, one for each pixel of a patch, of which the mean is taken as well
    every = each | {"final_layer.linear.weight": matrix.repeat(4, 1), "final_layer.linear.bias": bias.repeat(4)}
    return by_hand(every, config, noisy, steps, None).mean((2, 3))


def router_trained(rank, text):
    """The losses of a router's steps, and its loss and accuracy on samples that are held out."""
    some = corpus(DRAWN)
    trainer = begun(model(ROUTER), text)
    dp, losses = trainer.mesh["dp"], []
    for step in range(30):
        losses.append(trainer.step(some.batch(step, dp.index, dp.size)).loss)
    trainer.settle()
    judge = Judge(trainer, some.judged(np.arange(32, 39)))
    return losses, judge.loss(), judge.accuracy


def test_a_router_learns_to_tell_clusters_of_noisy_samples_the_same_under_every_plan():
    ((losses, judged, right),) = launch(1, router_trained, "dp1 mb4")
    assert losses[-1] < losses[0] and right > 0.5
    for text, ranks in (("dp2 mb1 zero1", 2), ("dp1 pp2 mb2 1f1b", 2)):
        for again in launch(ranks, router_trained, text):
            assert again[0] == pytest.approx(losses, rel=TOLERANCE)
            assert again[1:] == pytest.approx((judged, right), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("of", "plan", "train", "help"),
    [
        (IMAGES, "dp2 mb1 sync=ddm:prefix=4", TRAIN, "drop prefix="),
        ("llama3.2-1b", "dp2 mb1 sync=ddm:features=pixels", mw.parse_train("batch=2,seq=64"), "drop features="),
    ],
)
def test_words_of_the_other_kind_of_data_are_refused(of, plan, train, help):
    found = mw.load_model(of) if isinstance(of, str) else model(of)
    with pytest.raises(MeshwrightError) as refused:
        mw.predict(found, mw.load_cluster("2xh100"), train, mw.parse_plan(plan))
    assert any(help in one.help for one in refused.value.diagnostics)


def test_experts_on_several_stages_are_refused():
    plan = parse("dp2 pp2 mb1 1f1b sync=ddm").on(4)
    assert any("take pp1" in one.help for one in unexecutable(plan, model(), TRAIN))


def test_a_router_is_not_told_what_it_shall_tell():
    with pytest.raises(MeshwrightError, match="is not told their class"):
        model(IMAGES | {"num_labels": 2})


def test_experts_send_nothing_where_gradients_over_a_slow_link_are_waited_for():
    """Eight nodes of a paper whose island is one node: nothing crosses the network, and a step is an island's own."""
    asked = mw.load_model("dit-xl-2-256"), mw.load_cluster("8x8xh100,10gbe"), mw.parse_train("batch=256,seq=256")
    apart, together = (mw.predict(*asked, mw.parse_plan(f"hsdp8 mb4{word}")) for word in (" sync=ddm", ""))
    one = mw.predict(asked[0], mw.load_cluster("8xh100"), mw.parse_train("batch=32,seq=256"), mw.parse_plan("fsdp mb4"))
    assert apart.step_time_s == pytest.approx(one.step_time_s, rel=0.02)
    assert together.step_time_s > 2 * apart.step_time_s
    assert any("8 models, which exchange nothing, each on one cluster" in said for said in apart.cautions)


def write(folder: Path):
    rng = np.random.default_rng(0)
    pixels = np.clip(rng.integers(0, 60, (64, 8, 8, 3)) + 180 * rng.integers(0, 2, 64)[:, None, None, None], 0, 255)
    np.savez(folder / "some.npz", images=pixels.astype(np.uint8), labels=np.arange(64) % 5)
    (folder / "small.json").write_text(json.dumps(IMAGES))
    (folder / "router.json").write_text(json.dumps(ROUTER))
    return str(folder / "some.npz")


HERE = ["--device", "cpu", "--dtype", "fp32", "--json"]
WORKLOAD = ["--train", "batch=4,seq=16,optimizer=momentum", "--steps", "2", *HERE]


def test_the_command_trains_experts_and_their_router_and_makes_images_of_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data, small, router = write(tmp_path), str(tmp_path / "small.json"), str(tmp_path / "router.json")
    plan = ["--on", "2xh100", "--plan", "dp2 mb1 sync=ddm:features=pixels", "--data", data]
    judged = ["--eval-every", "2", "--held-out", "0.2"]
    assert main(["run", small, *plan, *judged, "--out", str(tmp_path / "experts"), *WORKLOAD]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["judged"]["2"] < 3
    file = str(tmp_path / "experts" / "clusters.npz")
    assert sorted({*clustered.read(file).clusters.tolist()}) == [0, 1]
    plan = ["--on", "1xh100", "--plan", "dp1 mb4", "--data", data, "--clusters", file]
    assert main(["run", router, *plan, "--out", str(tmp_path / "told"), *WORKLOAD]) == 0
    for name, words in {"0": ["--replica", "0"], "1": ["--replica", "1"], "r": []}.items():
        of, config = ("experts", small) if words else ("told", router)
        assert main(["weights", str(tmp_path / of), "--to", str(tmp_path / name), "--model", config, *words]) == 0
    capsys.readouterr()
    asked = f"images=3,size=64,steps=4,experts=2,active=1,router={tmp_path / 'r'}"
    words = [small, "--on", "2xh100", "--plan", "dp2", "--denoise", asked, *HERE]
    assert main(["run", *words, "--weights", f"{tmp_path / '0'},{tmp_path / '1'}"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["sent_bytes"] == made["predicted_sent_bytes"] == 3 * 3 * 8 * 8 * 4 and made["apart"][-1] > 0
    with pytest.raises(MeshwrightError, match="weights of 1 model, and experts=2"):
        run([*words, "--weights", str(tmp_path / "0")])


def test_a_file_of_clusters_that_is_none_is_refused(tmp_path):
    np.savez(tmp_path / "none.npz", other=np.zeros(3))
    np.savez(tmp_path / "bent.npz", clusters=np.zeros((3, 2), int))
    for name, said in (("none", "neither clusters nor features"), ("bent", "of the shape [3, 2]")):
        with pytest.raises(MeshwrightError, match="D012") as error:
            clustered.read(str(tmp_path / f"{name}.npz"))
        assert said in str(error.value)
    with pytest.raises(MeshwrightError, match="D001"):
        clustered.read(str(tmp_path / "nowhere.npz"))


def test_a_router_leaves_out_samples_of_no_cluster(tmp_path):
    data = write(tmp_path)
    built = build(data, Bytes(), tmp_path / "cache")
    clusters = np.arange(64) % 3 - 1
    found = load(built, TRAIN, vocab=0, model=model(ROUTER), labels=clusters)
    assert found.chosen.tolist() == np.flatnonzero(clusters >= 0).tolist() and set(found.batch(0).targets.tolist()) <= {
        0,
        1,
    }
    with pytest.raises(MeshwrightError, match="and --clusters has 9"):
        load(built, TRAIN, vocab=0, model=model(ROUTER), labels=clusters[:9])
    with pytest.raises(MeshwrightError, match="there is a label 2, and small tells 2 classes"):
        load(built, TRAIN, vocab=0, model=model(ROUTER), labels=clusters + 1)

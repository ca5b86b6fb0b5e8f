"""Extragradient steps by differences to a reference: as by hand in float64, in as many bytes as predicted."""

from collections import Counter

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run.mesh import alone
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from meshwright.sync.codecs import codec
from meshwright.sync.moving import moves
from tests.run import codes, local, small
from tests.run.processes import launch_kept as launch
from tests.run.small import differences, llama

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32", optimizer="sgd")
SETTINGS = msgspec.structs.replace(local.SETTINGS, weight_decay=0.1)


#: Bytes of numbers in float64 over those of float32, and with the place of each of four.
WIDER = {"all_reduce": 2, "all_gather": 12 / 8}


def by_hand(rank, model, every, code, last, settings=SETTINGS):
    """Beznosikov et al. 2110.03313, algorithm 1, in one process that is both replicas in turn; matrices decay from
    where a step goes from. `code` "" sends differences whole."""
    share = msgspec.structs.replace(TRAIN, global_batch=TRAIN.global_batch // 2)
    trainer = Trainer(model, parse("tp1 mb1").on(1), share, alone(), settings=settings)
    held, found = trainer.optimizer.held, codec(code or "none")
    lost = {}

    def gradients(step):
        out = []
        for replica in range(2):
            trainer.publish()
            for bucket in trainer.exchanges:
                bucket.reset()
            trainer.pipeline.run(trainer.passes(small.batch(TRAIN, model.vocab, step, 2, replica)))
            for bucket in trainer.exchanges:
                bucket.finish()
            out.append([b.gradient_buffer().clone() / 2 for b in trainer.exchanges])
        return out

    def sent(difference, at):
        if not code:
            return difference
        put = (difference + lost.get(at, 0)).numpy()
        back = found.decoded(found.encoded(put, 0), len(put), put.dtype, 0)
        lost[at] = torch.from_numpy(put - back) if found.feedback else 0
        return torch.from_numpy(back.copy())

    for step in range(last):
        if moves(step, every, settings.seed):
            own, point = gradients(step), [h.master.clone() for h in held]
            whole = [a + b for a, b in zip(*own)]
        rate = settings.lr_at(step)
        begins = [torch.lerp(h.master, w, 1 / every) for h, w in zip(held, point)]
        decays = [settings.weight_decay * b * h.decays for h, b in zip(held, begins)]
        offsets = [(n, at, p.numel()) for n, b in enumerate(trainer.exchanges) for p, at in zip(b.parameters, b.starts)]
        assert [h.stop - h.start for h in held] == [size for _, _, size in offsets]

        along(whole, held, begins, decays, offsets, rate)
        here = gradients(step)
        told = [[sent(a - b, (r, n)) for n, (a, b) in enumerate(zip(here[r], own[r]))] for r in range(2)]
        along([w + a + b for w, a, b in zip(whole, *told)], held, begins, decays, offsets, rate)
        trainer.publish()
    return local.state(trainer)


def along(totals, held, begins, decays, offsets, rate):
    for h, begin, decay, (n, at, size) in zip(held, begins, decays, offsets):
        h.master.copy_(begin - rate * (totals[n][at : at + size] + decay))


@pytest.mark.parametrize(
    ["plan", "every", "code", "last"],
    [("dp2 mb1", 1, "none", 2), ("dp2 mb1", 3, "topk,share=0.2", 4), ("dp2 tp2 mb1", 1, "none", 1)],
)
def test_steps_by_differences_are_extragradient_steps_by_hand_in_the_bytes_that_are_predicted(plan, every, code, last):
    """A reference that moves in every step and a code that changes nothing: the extragradient method; else MASHA. With
    seed 0 the reference of one in three steps moves in the first and the fourth."""
    words = code.replace(",", ":", 1) if code != "none" else ""
    model, text = llama(layers=1, vocab=64), f"{plan} sync=masha:h={every},codec={code}"
    read = parse(text)
    (expected,) = launch(1, by_hand, model, every, words, last)
    got = launch(read.layout.num_ranks, codes.trained, model, text, TRAIN, last, SETTINGS)
    apart = differences(
        local.whole([held for _, held, _ in got[: read.layout.tp]], "param"), local.whole([expected], "param")
    )
    assert max(apart.values()) < 1e-12, max(apart, key=apart.get)
    run = simulate(read, model, load(f"{read.layout.num_ranks}xh100"), TRAIN, standard())
    assert run.share == 1 / every
    told = Counter()
    for one, times in ((run, last), (run.moving, sum(moves(step, every, 0) for step in range(last)))):
        for key in one.lowered.graph.cost_key.tolist():
            program = one.lowered.programs[key]
            for move in program.moves if program.kind == "exchange" else ():
                if (move.op, move.num_bytes) != ("all_reduce", 4):  # the norm
                    told[move.op] += WIDER[move.op] * times * move.num_bytes
    for _, _, sent in got:
        assert Counter({op: sum(b for o, b in sent if o == op) for op, _ in sent}) == told


def test_training_goes_on_from_a_checkpoint_with_the_reference_and_every_replicas_gradient_there(tmp_path):
    plan = "dp2 mb1 sync=masha:h=4,codec=topk,share=0.2"  # the reference of the first step is that of the second
    for on, again, kept, found in launch(2, codes.resumed, llama(layers=1), plan, TRAIN, tmp_path, 1):
        assert on == again and {key.partition("@")[0] for key, _, _ in kept} == {"code_lost", "code_reference"}
        assert all(torch.equal(a[-1], b[-1]) for a, b in zip(kept, found, strict=True))


def test_a_loss_that_is_no_number_half_way_leaves_parameters_and_reference():
    for before, after, points, updated in launch(2, broken, llama(layers=1), "dp2 mb1 sync=masha:h=1,codec=int8"):
        assert not updated and torch.equal(before, after) and bool(torch.isfinite(points).all())


def broken(rank, model, text):
    trainer = local.begun(model, text, TRAIN)
    local.steps(trainer, 0, 1)
    before, run, ran = trainer.optimizer.held[0].master.clone(), trainer.pipeline.run, []

    def lost(passes):  # the pass at the new reference is well
        ran.append(run(passes))
        return ran[-1] * (float("nan") if len(ran) == 2 and rank == 1 else 1)

    trainer.pipeline.run = lost
    result = trainer.step(small.batch(TRAIN, model.vocab, 1, 2, rank))
    return before, trainer.optimizer.held[0].master.clone(), trainer.referenced.points[0], result.updated


@pytest.mark.parametrize(
    ["plan", "train", "said"],
    [
        ("dp2 mb1 sync=masha:h=4,codec=topk", "optimizer=adamw", "say optimizer=sgd"),
        ("dp4 zero2 mb1 sync=masha:h=4,codec=none", "optimizer=sgd", "zero1 with shard2"),
        ("dp2 mb1 sync=masha:h=4,codec=dgc", "optimizer=sgd", "codec=topk"),
        ("dp2 mb1 sync=masha:h=4", "optimizer=sgd", "masha:codec=randomk"),
    ],
)
def test_what_differences_are_not_made_for_is_refused_with_what_is(plan, train, said):
    with pytest.raises(MeshwrightError) as refused:
        asked = mw.parse_train(f"batch=8,seq=16,{train}"), mw.parse_plan(plan)
        mw.predict(llama(layers=2), mw.load_cluster("4xh100"), *asked)
    assert any(said in one.help for one in refused.value.diagnostics)


def test_a_prediction_is_the_mean_of_steps_with_one_pass_and_with_two():
    asked = mw.load_model("llama3.2-1b"), mw.load_cluster("4x1xh100,10gbe")
    train = mw.parse_train("batch=4,seq=4096,optimizer=sgd")

    def step_s(sync):
        found = mw.predict(*asked, train, mw.parse_plan(f"mb1 full sync={sync}"))
        assert abs(sum(found.attribution.values()) / found.step_time_s - 1) < 1e-6
        return found.step_time_s

    half, tenth = (step_s(f"masha:h={h},codec=randomk,share=0.05,feedback=no") for h in (2, 10))
    whole = step_s("step")
    assert abs((half - tenth) / (0.4 * whole) - 1) < 1e-6 and tenth < whole / 4

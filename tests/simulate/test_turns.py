"""Pieces of gradients' sums that let experts' tokens pass on a port that both use: against hand calculations."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.causes import CAUSE
from meshwright.cost import load_framework, standard
from meshwright.errors import MeshwrightError
from meshwright.graph import KIND
from meshwright.plan import check, parse
from meshwright.plan.executable import unexecutable
from meshwright.simulate.step import simulate
from meshwright.spec import cluster
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import parse as workload

MODEL = transformer(layers=4, hidden=768, heads=8, vocab=512, max_seq_len=512, experts=8, top_k=2, name="small")
TRAIN = workload("batch=32,seq=512")


def slow(on: str):
    """One rank a node on links a thousand times slower, so that a step is what its ports carry."""
    where = cluster.load(on)
    (island,) = where.islands
    levels = tuple(msgspec.structs.replace(level, gb_s=level.gb_s / 1000) for level in island.levels)
    return msgspec.structs.replace(where, islands=(msgspec.structs.replace(island, levels=levels),))


def run(words: str, on: str = "8x1xh100,ndr,nics=1,shared_ports"):
    devices = slow(on)
    return simulate(parse(words).on(devices.num_devices), MODEL, devices, TRAIN, standard(load_framework("fused")))


def of_passes(found) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of the passes of a step, seconds."""
    chosen = np.isin(found.lowered.graph.kind, [KIND["F"], KIND["BW"], KIND["B"], KIND["W"]])
    return found.start_s[chosen], found.end_s[chosen]


def test_tokens_wait_for_one_piece_at_most_and_a_sum_of_equal_share_holds_them_up():
    apart, shared, turns = run("ep8 mb4", "8x1xh100,ndr,nics=1"), run("ep8 mb4"), run("ep8 mb4 yield_mb=1")
    graph, seconds = turns.lowered.graph, turns.priced.durations
    sums = [p for p in turns.lowered.programs if p.kind == "exchange" and p.yields]
    piece = max(seconds[turns.lowered.programs.index(p)] / max(m.times for m in p.moves) for p in sums)
    ends = [float(of_passes(found)[1].max()) for found in (apart, turns, shared)]
    exchanges = 2 * 4  # dispatch and combine of four layers; sums begin in the backward
    assert ends[0] <= ends[1] <= ends[0] + exchanges * piece
    assert ends[1] < ends[2]  # flows that share the port take from tokens what they take from sums
    assert len(sums) > 1 and graph.num_tasks == shared.lowered.graph.num_tasks


def test_a_port_carries_pieces_and_tokens_one_after_the_other():
    # everything leaves through one port, which is never idle for long: the step is the sum of what it carries
    found = run("ep8 mb4 yield_mb=1")
    durations = found.priced.durations[found.lowered.graph.cost_key]
    exchanged = durations[found.lowered.graph.kind == KIND["reduce_scatter"]].sum()
    tokens = found.priced.parts[found.lowered.graph.cost_key].sum(0)
    carried = exchanged + tokens[CAUSE["ep"]]
    assert carried <= found.step_time_s * (1 + 1e-9)
    assert found.step_time_s < 1.05 * carried


def test_a_sum_is_cut_into_pieces_of_at_most_what_is_said():
    whole, cut = run("ep8 mb4"), run("ep8 mb4 yield_mb=1")
    assert {p.name for p in cut.lowered.programs if p.yields} == {"all_reduce"}
    for plain, pieces in zip(whole.lowered.programs, cut.lowered.programs):
        for before, move in zip(plain.moves, pieces.moves):
            assert move.num_bytes == before.num_bytes
            assert not pieces.yields or move.num_bytes / move.times <= 1e6


def test_an_answer_says_where_there_is_nothing_to_let_pass():
    costs = standard(load_framework("fused"))
    plan = parse("ep8 mb4 yield_mb=30").on(8)
    said = {on: predict(MODEL, cluster.load(on), TRAIN, plan, costs=costs, detail=False).cautions
            for on in ("8xh100", "8xh100,shared_ports")}  # fmt: skip
    assert any("say shared_ports" in caution for caution in said["8xh100"])
    assert not any("yield_mb" in caution for caution in said["8xh100,shared_ports"])


@pytest.mark.parametrize(("words", "said"), [("dp8 yield_mb=30", "ep=1"), ("ep8 overlap=pp yield_mb=30", "overlap=dp")])
def test_pieces_need_tokens_to_let_pass_and_a_backward_to_travel_beside(words, said):
    (found,) = check(parse(words).on(8), MODEL, cluster.load("8xh100"), TRAIN)
    assert found.code == "P073" and said in found.message + found.help


def test_what_the_executor_sums_otherwise_is_refused():
    plan = parse("dp8 ep8 zero3 yield_mb=30").on(8)
    assert [d.code for d in unexecutable(plan, MODEL, TRAIN) if "yield_mb" in d.message] == ["P033"]


def test_shared_ports_are_a_word_of_a_cluster():
    shared = cluster.load("2x4xa100,shared_ports")
    assert shared.shares_ports and not cluster.load("2x4xa100").shares_ports
    assert all(level.shared_ports for level in shared.islands[0].levels)
    with pytest.raises(MeshwrightError, match="did you mean shared_ports"):
        cluster.load("2x4xa100,shared_port")

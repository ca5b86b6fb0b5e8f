"""Bandwidth of replicas that exchange now and then: Streaming DiLoCo's Table 4, Eager DiLoCo's Table 5 and Table 6 of
DiLoCo's scaling laws.

Douillard et al., 2025 (arXiv 2501.18512), Kale et al., 2025 (2502.12996), and Charles et al., 2025 (2503.09799), by one
simulator of the authors'. The tables print one of fifty bandwidths for each utilisation, for models of which the papers
give layers and the time of a step. Each cell is asked of the simulator that every prediction comes from: a plan of two
replicas, joined by a link of that bandwidth. What is computed with is a device of one speed, that which makes a step
take as long as the table says; its memory and its host cost nothing, since the papers count computing and the link
alone.

A cell is the last of the fifty that falls short of its utilisation, not the first that reaches it. The paper itself
shows that: its Table 1 has four bits in rounds of 100 steps take 0.88 hours at 1 Gbit/s where 0.67 are computed, 76%,
and its Table 4 prints 0.9 Gbit/s for 80% of the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from meshwright.cost import Costs, load_framework, standard
from meshwright.papers import figures
from meshwright.papers.outcome import AT_LEAST, WITHIN, Check, Figure, Outcome, at_most
from meshwright.plan import parse
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster, load
from meshwright.spec.dimensions import transformer
from meshwright.spec.hardware import Efficiency
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: Utilisations of the tables' columns, the bandwidths they try, and layers of a fragment.
WANTED = (0.50, 0.80, 0.90, 0.95, 0.99)
TRIED = np.logspace(-1, 3, 50)
FRAGMENT = 3
#: Widths of models by their layers: Chinchilla's family, which the papers scale, Llama 3's 405B and DeepSeek-V3's 671B.
WIDTHS = {24: 2048, 48: 4096, 108: 8192, 126: 16384, 61: 7168}
TRAIN = Train(global_batch=2, seq_len=2048)
#: Words of a plan for each row of a table; gradients and changes in bfloat16, or in a quarter of its bits, sent from
#: the backward on, as the authors' own calculator says of all (arthurdouillard.com/diloco).
WAYS = {
    "DP": "grads=bf16",
    "DiLoCo": "sync=diloco:h=100,codec=bf16,start=backward",
    "Streaming": "sync=diloco:h=100,codec=bf16,start=backward,parts={parts}",
    "Streaming_overlap": "sync=diloco:h=100,codec=bf16,start=backward,parts={parts},delay=1",
    "Streaming_overlap_FP4": "sync=streaming-diloco:h=100,start=backward,parts={parts},delay=1",
}
LONGER = {
    "DP": WAYS["DP"],
    **{f"H{h}": f"sync=diloco:h={h},codec=bf16,start=backward" for h in (10, 50, 100, 300)},
}
LATE = {
    "inner_overlap_FP4_H30": "sync=streaming-diloco:h={thirty},start=backward,parts={parts},delay=1",
    "inner_overlap_FP4_H100": "sync=streaming-diloco:h=100,start=backward,parts={parts},delay=1",
    "outer_overlap_FP4_H30": "sync=eager-diloco:h={thirty},codec=fp4,parts={parts}",
    "outer_overlap_FP4_H100": "sync=eager-diloco:h=100,codec=fp4,parts={parts}",
}
#: Rounds that a run has whose results come a round late: the least in which any is waited for. What is sent in the last
#: is not, so that a link carries half of what it would have to in a run without end; the table's late rows at 100 steps
#: are of less bandwidth than one exchange a round takes.
LATE_ROUNDS = 2
#: More than any of those tried, in Gbit/s: a step without exchange.
ENOUGH = 1e7


def joined(gbit_s: float, flops: float) -> Cluster:
    """Two replicas on a link of which collectives reach so many Gbit/s, each of so many operations a second."""
    cluster = load("2x1xh100,10gbe")
    (island,) = cluster.islands
    device = msgspec.structs.replace(
        island.device,
        name=f"{flops:.9g} operations a second",
        peak_flops=dict.fromkeys(island.device.peak_flops, flops),
        efficiency=Efficiency(gemm=1.0, memory=1.0, attention_fwd=1.0, attention_bwd=1.0),
        memory_gb_s=1e9,
        memory_bytes=2**60,
        scale_up="ici",
        speed_spread=0.0,
    )
    reached = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), gbit_s / 8)
    inside, between = island.levels
    between = msgspec.structs.replace(between, gb_s=gbit_s / 8, latency_us=0.0, busbw_gb_s=reached)
    island = msgspec.structs.replace(
        island,
        device=device,
        levels=(inside, between),
        node=msgspec.structs.replace(island.node, nic_gbit_s=gbit_s),
    )
    return msgspec.structs.replace(cluster, islands=(island,))


@lru_cache(maxsize=1)
def costs() -> Costs:
    """Costs of a host that takes no time."""
    return standard(
        msgspec.structs.replace(
            load_framework("default"),
            elementwise_passes=1.0,
            host_us_per_kernel=0.0,
            host_us_per_collective=0.0,
            host_us_per_pass=0.0,
        )
    )


class LinkedReplicas:
    """A model of the tables on two replicas whose step takes as long as they say; utilisations are remembered."""

    def __init__(self, num_params: float, layers: int, step_s: float):
        width = WIDTHS[layers]
        ffn = round((num_params / layers - 4 * width**2) / (2 * width))
        self.model: Model = transformer(
            layers=layers, hidden=width, heads=width // 128, ffn=ffn, vocab=256, max_seq_len=2048, tied_embeddings=True
        )
        self.parts, self.flops = layers // FRAGMENT, 1e15
        #: A round of 30 steps has whole steps from part to part, one at least, as the paper's of 100 has 11, 5 and 2.
        self.thirty = self.parts * max(1, 30 // self.parts)
        for _ in range(4):
            self.flops *= self.simulated("", ENOUGH).step_time_s / step_s
        self.known: dict[tuple[str, float], float] = {}

    def simulated(self, words: str, gbit_s: float) -> Simulated:
        """The step, or the round, of a plan on a link."""
        plan = parse(f"mb1 {words.format(parts=self.parts, thirty=self.thirty)}").on(2)
        return simulate(plan, self.model, joined(gbit_s, self.flops), TRAIN, costs())

    def utilisation(self, words: str, gbit_s: float) -> float:
        """Share of time in which is computed: what a step takes without exchange over what it does with it, in a run
        without end."""
        run = self.simulated(words, gbit_s)
        alone = self.simulated(words, ENOUGH).step_time_s if run.round is None else run.round.inner_s
        return alone / run.step_time_s

    def tabled(self, words: str, gbit_s: float) -> float:
        """Share of time in which is computed as the tables have it: in a run of :data:`LATE_ROUNDS` where results come
        a round late, else without end. It is remembered."""
        if (words, gbit_s) not in self.known:
            one = self.simulated(words, gbit_s).round
            if one is not None and one.lag == one.every:
                steps = LATE_ROUNDS * one.lag
                self.known[words, gbit_s] = steps * one.inner_s / one.run_s(steps)
            else:
                self.known[words, gbit_s] = self.utilisation(words, gbit_s)
        return self.known[words, gbit_s]

    def printed(self, words: str, wanted: float) -> int:
        """Return the index of the last of the bandwidths tried that falls short of a utilisation, of the first if none
        does."""
        low, high = 0, len(TRIED)
        while low < high:
            middle = (low + high) // 2
            enough = self.tabled(words, float(TRIED[middle])) >= wanted
            low, high = (low, middle) if enough else (middle + 1, high)
        return max(0, low - 1)


def figure(gbit_s: float) -> float:
    """Return a bandwidth as the tables print it: rounded to two digits after the point, and then to one."""
    return round(round(float(gbit_s), 2), 1)


def nearest(cell: float, ours: int) -> int:
    """Return the index of the bandwidth tried that a cell may be of, the nearest to ours of several."""
    return min((i for i, one in enumerate(TRIED) if figure(one) == cell), key=lambda i: abs(i - ours))


def compared(table: Mapping[str, Any], ways: Mapping[str, str]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Return the (paper's, our) bandwidths of every row of a table, as indices into those tried."""
    out = {}
    for size in (name for name, rows in table.items() if isinstance(rows, Mapping)):
        for way, words in ways.items():
            ours = [replicas(size).printed(words, wanted) for wanted in WANTED]
            out[size, way] = [(nearest(cell, mine), mine) for cell, mine in zip(table[size][way], ours)]
    return out


@lru_cache(maxsize=5)
def replicas(size: str) -> LinkedReplicas:
    """The replicas of a model of the tables, by its name."""
    papers = figures.load("diloco")
    shape = (papers["diloco_scaling_T6_gbit_s"] | papers["streaming_diloco_T4_gbit_s"])[size]
    return LinkedReplicas(float(size.removesuffix("B")) * 1e9, shape["layers"], shape["step_s"])


def near(cells: Iterable[tuple[int, int]]) -> int:
    """Return how many cells are within one bandwidth tried."""
    return sum(abs(a - b) <= 1 for a, b in cells)


def _rows(
    found: Mapping[tuple[str, str], list[tuple[int, int]]], name: str, whys: Mapping[tuple[str, ...], str]
) -> tuple[Figure, ...]:
    """How many cells are within one bandwidth tried, and how far the furthest of every row is; `whys` of what misses,
    by the words that a row's name has."""
    cells = [cell for row in found.values() for cell in row]

    def furthest(size: str, way: str, row: list[tuple[int, int]]) -> Figure:
        why = next((why for words, why in whys.items() if all(word in (size, *way.split("_")) for word in words)), "")
        what = f"{size} {way}: furthest cell, in bandwidths tried"
        return at_most(what, max(abs(a - b) for a, b in row), 1.0, why=why)

    what, why = f"cells of {name} within one bandwidth tried, of {len(cells)}", "; ".join(dict.fromkeys(whys.values()))
    whole = Figure(what, len(cells), near(cells), "", AT_LEAST, 0.9, why)
    return (whole, *(furthest(*key, row) for key, row in found.items()))


def _hours(rows: Mapping[str, str], name: str) -> tuple[Figure, ...]:
    """The time of a run of the 1B model at 1 Gbit/s over that without exchange, by a table's hours."""
    hours = figures.load("diloco")[name]
    return tuple(
        Figure(
            f"1B {row}: a run at 1 Gbit/s over one without exchange",
            hours[row][1] / hours[row][0],
            1 / replicas("1B").utilisation(words, 1.0),
            "x",
            WITHIN,
            0.05,
        )
        for row, words in rows.items()
    )


ASSUMED = (
    "two replicas; gradients and changes in bfloat16, or in four bits, of as many parameters as the row's name says: "
    "16 bits a parameter through each replica's port",
    "layers, step times, rounds and fragments of 3 layers are the papers'; sequences are 2,048 tokens, of which only "
    "how long they take counts",
    "a cell is the last of the fifty bandwidths that falls short of its utilisation: by Table 1 of Streaming DiLoCo "
    "four bits at 1 Gbit/s compute 76% of the time, and Table 4 prints 0.9 for 80%",
)
LATER = (
    "rows whose results come a round late are of a run of two rounds, after which nothing is waited for: at 100 steps "
    "they are of less bandwidth than one exchange a round takes",
    "rounds of 30 steps have whole steps from part to part, as the paper's of 100 have 11, 5 and 2: three for 8 parts, "
    "one for 16 and 36",
)


def streaming() -> Outcome:
    """Table 4 cell by cell, what its last row saves of its first, and Table 1's hours."""
    table = figures.load("diloco")["streaming_diloco_T4_gbit_s"]
    found, at = compared(table, WAYS), WANTED.index(0.95)
    saved = []
    for size in ("1B", "10B", "100B"):
        ends = found[size, "DP"][at], found[size, "Streaming_overlap_FP4"][at]
        saved.append((size, *(TRIED[ends[0][which]] / TRIED[ends[1][which]] for which in (0, 1))))
    return Outcome(
        figures=(
            *_rows(found, "Table 4", {}),
            *(
                Figure(
                    f"{size}: bandwidth for 95%, every step over all it does",
                    *both,
                    "x",
                    WITHIN,
                    0.25,
                    GRID,
                    headline=True,
                )
                for size, *both in saved
            ),
            *_hours({row: WAYS[row] for row in ("DP", "Streaming_overlap_FP4")}, "streaming_diloco_T1_hours"),
        ),
        baseline="gradients reduced every step, and DiLoCo's whole rounds",
        assumptions=ASSUMED,
        missing=("its losses: meshwright converge trains the recipe on a text that ships, not on C4",),
    )


GRID = "both bandwidths are of a list whose entries lie a fifth apart"
THIRTY = "its cells are of a part every step, of which 30 steps have one every third for 8 parts"


def eager() -> Outcome:
    """Table 5 cell by cell, its rows of 30 steps at 1B also as they were if a part came every step, and Table 1's
    hours."""
    table = figures.load("diloco")["eager_updates_T5_gbit_s"]
    found = compared(table, LATE)
    thirty = {way: words.replace("{thirty}", "{parts}") for way, words in LATE.items() if "{thirty}" in words}
    often = [cell for row in compared({"1B": table["1B"]}, thirty).values() for cell in row]
    (every,) = compared(
        {"100B": figures.load("diloco")["streaming_diloco_T4_gbit_s"]["100B"]}, {"DP": WAYS["DP"]}
    ).values()
    late = found["100B", "outer_overlap_FP4_H100"]
    saved = (TRIED[every[-1][which]] / TRIED[late[-1][which]] for which in (0, 1))
    return Outcome(
        figures=(
            *_rows(found, "Table 5", {("1B", "H30"): THIRTY}),
            Figure("1B of 30 steps, were a part sent every step: cells within one, of 10", len(often), near(often)),
            Figure(
                "100B: bandwidth for 99%, every step over rounds a round late", *saved, "x", WITHIN, 0.25, headline=True
            ),
            *_hours(
                {row: LATE[row] for row in ("inner_overlap_FP4_H100", "outer_overlap_FP4_H100")},
                "eager_updates_T1_hours",
            ),
        ),
        baseline="Streaming DiLoCo, whose fragments are a step late",
        assumptions=(*ASSUMED, *LATER),
        missing=("what its 1B rows in rounds of 30 steps exchange: " + THIRTY,),
    )


TENTH = "its step is printed to a tenth of a second: at 0.85 s its furthest cell is one away"


def scaling() -> Outcome:
    """Table 6 cell by cell: every step, and DiLoCo's rounds of 10 to 300 steps."""
    found = compared(figures.load("diloco")["diloco_scaling_T6_gbit_s"], LONGER)
    return Outcome(
        figures=_rows(found, "Table 6", {("10B", "H50"): TENTH}),
        baseline="gradients reduced every step",
        assumptions=ASSUMED,
        missing=("how losses scale: that takes training runs of many sizes",),
    )


CHECKS = {"streaming-diloco": Check(streaming), "eager-diloco": Check(eager), "diloco-scaling": Check(scaling)}

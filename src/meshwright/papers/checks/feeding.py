"""Data on its way to training: recipes of operators as Data-Juicer orders them, and Melissa's reservoir."""

from __future__ import annotations

from meshwright.answer.recipe import as_fused
from meshwright.papers.outcome import AT_MOST, Check, Figure, Outcome, equal
from meshwright.simulate.reservoir import StreamSizes, streamed
from meshwright.spec.recipe import DEDUPLICATOR, FILTER, MAPPER, DataOperator, DataRecipe
from meshwright.world.reservoir import ReservoirControl

#: The configurations of its own test of fusion (tests/ops/test_op_fusion.py), an operator a letter: m a mapper, d a
#: deduplicator, f a filter by itself, w one that shares the words of a text, l one that shares its lines; and the
#: passes that are expected of each, by the places of their operators.
FUSED = (
    ("fmmmmmwfwfwwwd", "0 1 2 3 4 5 7 9 6,8,10,11,12 13"),
    ("wwfmmmmmwfwfwd", "2 0,1 3 4 5 6 7 9 11 8,10,12 13"),
    ("fmmmmmwflwfwwlwd", "0 1 2 3 4 5 7 10 8,13 6,9,11,12,14 15"),
    ("wwwww", "0,1,2,3,4"),
    ("fwfl", "0 2 3 1"),
    ("fff", "0 1 2"),
    ("mmmmm", "0 1 2 3 4"),
    ("ddd", "0 1 2"),
)
_KIND = {"m": MAPPER, "d": DEDUPLICATOR}
_CONTEXT = {"w": "words", "l": "lines"}
#: Of the reservoir's experiment (config_slurm.json and heatpde_dl_server.py of its artefact): samples of a batch, of a
#: rank's buffer, and those before the first batch; clients at a time.
BATCH, BUFFER, WATERMARK, CLIENTS = 10, 6000, 1000, 100
#: Seconds of a solver's time step, and of a training step: neither is published, and nothing hangs on them.
SOLVER_S, STEP_S = (1.0, 4.0), 0.02


def fused_recipes() -> Outcome:
    """Return how many configurations of Data-Juicer's own test of fusion are fused and ordered as it expects."""
    right = 0
    for letters, passes in FUSED:
        operators = tuple(
            DataOperator(name=f"{i}", kind=_KIND.get(one, FILTER), takes_s=0.0, shares=_CONTEXT.get(one, ""))
            for i, one in enumerate(letters)
        )
        recipe = DataRecipe(operators=operators, samples=1, contexts={"lines": 0.0, "words": 0.0})
        right += [",".join(map(str, unit)) for unit in as_fused(recipe)] == passes.split()
    return Outcome(
        figures=(equal("configurations of its own test that are fused and ordered as it does", len(FUSED), right),),
        baseline="tests/ops/test_op_fusion.py of its repository",
        assumptions=("without probed speeds, where its order is that of contexts",),
    )


def reservoir() -> Outcome:
    """Return what steps wait that draw from a reservoir of the sizes of the experiment."""
    found = [
        streamed(
            StreamSizes(
                control=ReservoirControl(room=BUFFER, threshold=WATERMARK),
                producers=CLIENTS,
                make_s=make_s,
                send_s=0.0,
                samples=BATCH,
                step_s=STEP_S,
            )
        )
        for make_s in SOLVER_S
    ]
    figures = [
        Figure("waiting of steps behind the first, of a step, longest", None, max(f.wait_s for f in found) / STEP_S,
               "", AT_MOST, 0.0)
    ]  # fmt: skip
    for make_s, one in zip(SOLVER_S, found):
        figures.append(Figure(f"times that a sample is trained on, solvers of {make_s:g} s", None, one.uses, "x"))
    return Outcome(
        figures=tuple(figures),
        baseline="steps whose data is there",
        assumptions=(
            f"batches of {BATCH} from a buffer of {BUFFER:,} behind the first {WATERMARK:,}, {CLIENTS} clients at "
            "a time (config_slurm.json of its artefact)",
            "a step of 20 ms and solvers of 1 and 4 s a sample, none of which it says",
        ),
    )


CHECKS = {"data-juicer": Check(fused_recipes), "melissa-surrogates": Check(reservoir)}

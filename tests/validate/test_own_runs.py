"""Five runs of one's own, on rows that a known stack made: it is withheld, and its runs bring it back."""

import random

import pytest

from meshwright.cost import load_framework, standard
from meshwright.simulate.step import simulate
from meshwright.validate import own_runs
from meshwright.validate.cases import case
from tests.validate.samples import step


@pytest.fixture
def rows(monkeypatch):
    """Twelve rows that took what the eager stack they name takes."""
    monkeypatch.setattr(own_runs, "FEWEST", 10)
    monkeypatch.setattr(own_runs, "OTHERS", 6)
    monkeypatch.setattr(own_runs, "DRAWS", 1)
    made, costs = [], standard(load_framework("torchtitan"))
    for i in range(12):
        row = step(
            id=f"a:{i}", framework="torchtitan", tp=2 ** (i % 3), dp=8 // 2 ** (i % 3), micro_batch_seqs=1 + i // 6
        )
        asked = case(row)
        run = simulate(asked.plan, asked.model, asked.cluster, asked.train, costs)
        made.append(row | {"step_time_s": str(run.step_time_s)})
    return made


def test_rows_of_a_withheld_stack_are_nearer_when_five_of_them_are_given(rows):
    (found,) = own_runs.protocol(rows, standard)
    assert (found.key, found.rows) == ("hand/torchtitan", 12)
    assert found.after < 0.5 * found.before and found.after < 0.05


def test_draws_repeat_and_small_models_flagged_rows_and_unnamed_software_are_nobodys_runs(rows):
    random.shuffle(rows)  # the draw depends on the rows, and not on a clock
    assert own_runs.protocol(rows, standard) == own_runs.protocol(rows, standard)
    for changed in ({"notes": "launch-bound model"}, {"flags": "slow_outlier"}, {"framework": ""}, {"outcome": "oom"}):
        assert own_runs.asked(rows[:9] + [row | changed for row in rows[9:]]) == {}

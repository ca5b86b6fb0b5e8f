"""Constants are fitted again without what is scored: its shape, its device, its source."""

import pytest

from meshwright.cost import standard
from meshwright.validate import accuracy
from meshwright.validate.left_out import left_out
from meshwright.validate.run import tabulated, validate
from tests.validate.samples import step, table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight steps of one shape, 1 s each, and one of another that took 50: no fit of both gives the first 1 s."""
    where = tmp_path_factory.mktemp("left")
    rows = [step(id=f"a:{i}", micro_batch_seqs=str(1 + i % 2), step_time_s="1.0", outcome="ok") for i in range(8)]
    rows.append(step(id="b:0", layers="12", params_b="0.7", step_time_s="50.0", outcome="ok", source="other"))
    table(where, "training_steps", rows)
    return where


@pytest.fixture(scope="module")
def found(folder):
    return {one.name: one for one in left_out(folder)}


def test_each_row_is_predicted_once_by_what_never_saw_its_group(found):
    assert {name: len(one.scored) for name, one in found.items()} == dict.fromkeys(
        [f"training_steps_{what}_left_out" for what in ("shape", "device", "source")], 9
    )
    assert all(s.memory is None and s.oom is None for one in found.values() for s in one.scored)


def test_a_measurement_that_is_left_out_does_not_move_its_own_prediction(folder, found, tmp_path):
    """The lone row's time is another, and what its fold predicts for it stays, to the last bit."""
    rows = (folder / "training_steps.csv").read_text() if (folder / "training_steps.csv").exists() else None
    assert rows is not None
    (tmp_path / "training_steps.csv").write_text(rows.replace(",50.0,", ",20.0,"))
    again = {one.name: one for one in left_out(tmp_path)}
    name = "training_steps_shape_left_out"
    (before,), (after,) = ([s.time for s in some[name].scored if s.id == "b:0"] for some in (found, again))
    assert (before[0], after[0]) == (50.0, 20.0)
    assert before[1] == after[1]


def test_the_page_judges_aims_by_what_was_left_out(folder):
    steps = validate(folder, standard)[0]
    worse = tabulated("training_steps_shape_left_out", list(steps.scored), steps.variables)
    page = accuracy.render([steps, worse])
    assert "| shape of the model |" in page and "## What is left out" in page

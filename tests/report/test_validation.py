"""The validation report's plots: what is drawn, what is summed up, and that no page grows without bound."""

import numpy as np
import pytest

from meshwright.report import plots, validation
from meshwright.validate.run import Table
from meshwright.validate.score import Scored, summary


def made(count, *, what="tp8", reason=()):
    scored = tuple(
        Scored(
            id=f"r{i}",
            key=f"s{i % 3}/h100_sxm",
            time=(1.0 + i % 97, (1.0 + i % 97) * (1 + (i % 11) / 20)),
            inside=i % 5 > 0,
            at=(float(2 ** (i % 4)), "ab"[i % 2]),
            what=what,
        )
        for i in range(count)
    )
    return Table(
        name="training_steps",
        metrics=summary(scored),
        scored=scored,
        unsupported=tuple(reason),
        variables=("tp", "kind"),
    )


def test_points_on_the_same_place_are_drawn_once():
    assert plots.dots(np.array([1.0, 1.2, 8.0]), np.array([2.0, 2.1, 2.0])) == "M1 238h0M8 238h0"


def test_few_rows_are_all_drawn_and_many_evenly():
    assert plots.thin(5, 10).tolist() == [0, 1, 2, 3, 4]
    chosen = plots.thin(1000, 11)
    assert (len(chosen), chosen[0], chosen[-1]) == (11, 0, 999)
    assert set(np.diff(chosen)) <= {99, 100}


def test_a_perfect_prediction_lies_on_the_diagonal():
    times = np.array([0.01, 0.1, 1.0, 10.0])
    plot = plots.scatter(times, times, np.zeros(4, bool), 10)
    for point in plot["dots"].removesuffix("h0").removeprefix("M").split("h0M"):
        across, down = map(int, point.split())
        assert across / plots.WIDTH == pytest.approx(1 - down / plots.HEIGHT, abs=0.005)


def test_residuals_have_a_bin_for_each_value_with_its_median_and_quantiles():
    plot = plots.residuals([1.0, 1.0, 1.0, 2.0, 2.0], np.array([1.0, 1.1, 1.2, 0.5, 0.5]), 100)
    assert plot["bins"] == [("1", 3, "+10.0%", "+2.0%", "+18.0%"), ("2", 2, "-50.0%", "-50.0%", "-50.0%")]


def test_bins_of_many_values_hold_every_row_once():
    plot = plots.residuals([float(i) for i in range(1, 1001)], np.ones(1000), 100)
    assert sum(rows for _, rows, *_ in plot["bins"]) == plot["rows"] == 1000
    assert plot["drawn"] == 100


def test_rows_without_a_value_of_a_variable_are_not_in_its_plot():
    plot = plots.residuals([1.0, "", 2.0], np.array([1.0, 9.0, 1.0]), 100)
    assert plot["rows"] == 2


def test_a_variable_with_one_value_has_no_plot():
    assert plots.residuals([1.0, 1.0], np.ones(2), 100) is None


def test_the_page_does_not_grow_with_its_rows():
    few, many = len(validation.render([made(20_000)])), len(validation.render([made(100_000)]))
    assert many < 1.3 * few


def test_sampling_is_said():
    assert "of them drawn" in validation.render([made(30_000)])
    assert "of them drawn" not in validation.render([made(100)])


def test_words_of_a_table_are_escaped():
    page = validation.render([made(10, what="<script>alert(1)</script>")])
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page

"""Published steps of Megatron-LM, Korthikanti et al. and MegaScale within 20 percent, untuned, by one stated rule."""

import pytest

from meshwright.papers.checks.steps import all_rows, mean_errors

COMPARED = all_rows()


@pytest.mark.parametrize("one", COMPARED, ids=lambda c: f"{c.row['paper']}-{c.row['model']}-{c.row['gpus']}")
def test_a_published_step_is_met_within_twenty_percent(one):
    assert abs(one.error) <= 0.20, f"{one.plan}: {one.found.step_time_s:.2f} s for {one.row['step_time_s']} s"


def test_every_plan_is_the_papers_and_fits_the_device():
    # what ran there must fit here
    assert len(COMPARED) == 10 + 6 + 8
    for one in COMPARED:
        assert one.row["tp"] * one.row["pp"] * one.row["dp"] == one.row["gpus"]
        assert one.found.fits, one.plan


def test_no_paper_is_off_by_more_than_fifteen_percent_on_average(record_property):
    errors = mean_errors(COMPARED)
    record_property("mean errors", {paper: f"{error:.1%}" for paper, error in errors.items()})
    assert max(errors.values()) <= 0.15, errors

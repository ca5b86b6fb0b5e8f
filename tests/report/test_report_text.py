"""The text report says the prediction's numbers, on any terminal."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from meshwright.answer.metrics import Metric
from meshwright.answer.prediction import Assumption
from meshwright.causes import WORDS
from meshwright.quantity import gibibytes, seconds
from meshwright.report import facts
from meshwright.report.bars import bar, stacked
from meshwright.report.text import render
from tests.report.sample import GIB, prediction, stepping


def printed(answer, *, width: int = 120, encoding: str = "utf-8", **options) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    render(answer, Console(file=file, width=width, **options))
    file.flush()
    return raw.getvalue().decode(encoding)


def test_the_first_line_is_the_verdict_with_interval_rate_and_utilisation():
    answer = prediction()
    answer = msgspec.structs.replace(answer, metrics=stepping(answer.metrics, Metric(8.91, (8.2, 9.8))))
    first = printed(answer).splitlines()[0]
    assert first == (
        f"fits: {gibibytes(answer.tightest.peak_bytes)} of 79.6 GiB | 8.910 s/step [8.2, 9.8] | "
        "412 tokens/s/GPU | MFU 41%"
    )
    apart = msgspec.structs.replace(answer, metrics=stepping(answer.metrics, Metric(0.724, (0.507, 1.027))))
    assert "724 ms/step [507 ms, 1.027 s]" in printed(apart).splitlines()[0]


def test_an_answer_that_does_not_fit_says_by_how_much_where_and_what_would_help():
    # sample: stage 0 peaks at 16.4 + 8.2 + 9.9 + 1.1 + 4 x 2.6 = 46 GiB; sharding more over dp 2
    # frees nothing under its pipeline, where gradients and gathered parameters stay whole to the last microbatch
    text = printed(prediction(capacity_gib=40.0))
    assert text.splitlines()[0].startswith("does not fit: 6.0 GiB over on stage 0")
    assert "frees part of 10.4 GiB of activations" in text and "zero2" not in text and "fsdp" not in text
    assert "zero1" not in text.split("Where the step goes")[0].replace("mb1 zero1", "")


def test_a_model_too_large_for_the_cluster_however_split_is_said_to_be():
    # sample: 46 GiB with tp*pp 32, 9.9 of them optimizer state that zero1 has split over all ranks already.
    # At 16 GiB the rest needs 32 x 36.1 / 6.1 = 189, the next power of two is 256, of 64 devices
    assert "about 256, more than the cluster's 64 devices" in printed(prediction(capacity_gib=16.0))
    assert "about 64 instead of 32" in printed(prediction(capacity_gib=40.0))  # 32 x 36.1 / 30.1 = 38.4


def test_state_that_is_sharded_over_all_ranks_is_not_split_further_by_tp_and_pp():
    # sample: 9.9 GiB of sharded optimizer state do not go into 4 GiB; 64 x 46 / 4 = 736, the next power is 1024
    text = " ".join(printed(prediction(capacity_gib=4.0)).split())
    assert "sharded over all 64 ranks takes 9.9 GiB on each: it takes about 1,024 devices" in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_cause_with_time_is_shown_with_its_time_and_the_others_are_named(width):
    answer = prediction()
    text = printed(answer, width=width)
    named = WORDS
    for name, length in answer.attribution.items():
        assert (named[name] if width >= 100 and length else name) in text
        if length:
            assert seconds(length) in text
    assert seconds(answer.bound_s) in text and seconds(answer.step_time_s) in text


@pytest.mark.parametrize("width", [60, 75, 120])
@pytest.mark.parametrize("capacity", [79.6, 40.0])
def test_no_line_is_longer_than_the_terminal(width, capacity):
    assert max(map(len, printed(prediction(capacity_gib=capacity), width=width).splitlines())) <= width


def test_every_category_alive_at_the_peak_is_listed_with_its_size():
    answer = prediction()
    text = printed(answer)
    for name, num_bytes in answer.tightest.alive.items():
        assert name in text and gibibytes(num_bytes) in text


def test_assumptions_have_their_sources_by_number_and_unconfirmed_ones_a_mark():
    answer = prediction()
    lines = [line.strip() for line in printed(answer, width=160).splitlines()]
    for assumption in answer.assumptions:
        line = next(row for row in lines if assumption.name in row and assumption.value in row)
        assert line.startswith("!") == assumption.flagged
        assert f"{line.split()[-1]}  {assumption.source}" in lines


def test_a_source_of_several_assumptions_is_listed_once():
    answer = prediction()
    twice = tuple(Assumption(a.name, a.value, "one datasheet") for a in answer.assumptions)
    text = printed(prediction(assumptions=twice))
    assert text.count("one datasheet") == 1 and text.count("[1]") == len(twice) + 1


def test_what_a_training_run_leaves_out_is_said():
    text = printed(prediction(), width=160)
    assert "235.0 days, $1,080,000" in text  # 2.03e7 s / 86400
    assert [line.split()[:4] for line in text.splitlines() if line.strip().startswith("data loading")] == [
        ["data", "loading", "not", "included"]
    ]


def test_a_device_without_price_or_power_says_not_included():
    answer = prediction()
    money = type(answer.money)(
        usd_per_step=None, usd_per_million_tokens=None, joules_per_step=None, joules_per_token=None, source=""
    )
    assert printed(prediction(money=money, run=None)).count("not included") == 4


def test_energy_per_million_tokens_is_the_energy_of_a_token_in_kilowatt_hours():
    # 1.45 J x 1e6 / 3.6e6 J per kWh = 0.403 kWh
    assert dict(facts.money(prediction()))["energy per million tokens"] == "0.403 kWh"


def test_a_terminal_without_utf_8_gets_ascii_even_for_a_name_that_is_not():
    text = printed(prediction(name="mödel-σ"), encoding="ascii")
    assert "m?del-?" in text and "###" in text
    assert text.isascii()


def test_no_color_means_no_escape_codes(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in printed(prediction(), force_terminal=True)


def test_markup_in_a_name_is_printed_as_it_is():
    assert "[red]evil[/red]" in printed(prediction(name="[red]evil[/red]"))


def test_entries_the_attribution_gains_later_are_shown_under_their_own_name():
    answer = prediction()
    assert "moonlight" in printed(prediction(attribution=answer.attribution | {"moonlight": 0.25}))


def test_the_waterfall_ends_at_the_sum_of_its_entries():
    answer = prediction()
    last = facts.waterfall(answer)[-1]
    assert last.start_s + last.seconds == pytest.approx(sum(answer.attribution.values()))


def test_a_bar_of_half_the_track_fills_half_the_cells():
    assert bar(0.25, 0.5, 8, unicode=True) == "  ████"
    assert bar(0.0, 0.0625, 8, unicode=True) == "▌"
    assert bar(0.25, 0.5, 8, unicode=False) == "  ####"


def test_something_is_never_drawn_as_nothing():
    assert bar(1.0, 1e-9, 8, unicode=True).strip() and stacked([0.5, 1e-9], 10)[1] == 0
    assert sum(stacked([0.25, 0.25, 0.3], 10)) == 8


def test_memory_of_a_full_device_is_drawn_to_the_last_cell():
    answer = prediction(capacity_gib=max(m.peak_bytes for m in prediction().memory) / GIB)
    assert "." not in printed(answer, encoding="ascii").split("Memory of")[1].splitlines()[1]

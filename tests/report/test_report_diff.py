"""Why two predictions differ: causes that add up, and what was asked differently."""

from __future__ import annotations

import io
import json
import math

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from meshwright import plan
from meshwright.answer.metrics import Metric
from meshwright.causes import WORDS
from meshwright.report.diff import UNATTRIBUTED, delta
from meshwright.report.diff_text import render
from meshwright.spec import cluster, workload
from tests.report.sample import GIB, prediction, stepping

BASE = prediction()
NAMES = list(WORDS)
SECONDS = st.floats(0.0, 1e4, allow_nan=False)


def with_causes(causes: dict[str, float], step_s: float | None = None):
    step = math.fsum(causes.values()) if step_s is None else step_s
    return msgspec.structs.replace(BASE, attribution=causes, metrics=stepping(BASE.metrics, Metric(step)))


@settings(max_examples=200)
@given(
    st.dictionaries(st.sampled_from(NAMES), SECONDS),
    st.dictionaries(st.sampled_from([*NAMES, "later"]), SECONDS),
)
def test_causes_sum_to_the_difference_of_the_step_times_to_their_last_bit(a, b):
    left, right = with_causes(a), with_causes(b)
    found = delta(left, right)
    whole = found.step_time_s.change
    assert abs(math.fsum(c.change for c in found.causes) - whole) <= math.ulp(max(left.step_time_s, right.step_time_s))


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(NAMES), SECONDS), SECONDS, SECONDS)
def test_what_an_attribution_leaves_of_its_step_is_an_entry_of_its_own(causes, step_a, step_b):
    found = delta(with_causes(causes, step_a), with_causes(causes, step_b))
    rest = [c for c in found.causes if c.name == UNATTRIBUTED[0]]
    assert (step_a == step_b) == (not rest)
    assert math.isclose(math.fsum(c.change for c in found.causes), step_b - step_a, rel_tol=1e-12, abs_tol=1e-300)


def test_a_prediction_does_not_differ_from_itself():
    found = delta(BASE, BASE)
    assert not any(c.change for c in (*found.causes, *found.memory, *found.rates, found.peak_memory_bytes))
    assert found.fields == found.only_a == found.only_b == ()


def test_memory_is_compared_by_category_on_the_fullest_rank():
    other = prediction(capacity_gib=40.0)
    less = {"parameters": 10 * GIB, "logits": 2 * GIB}
    memory = tuple(msgspec.structs.replace(m, alive=less, peak_bytes=12 * GIB) for m in other.memory)
    found = {c.name: c.change / GIB for c in delta(BASE, msgspec.structs.replace(other, memory=memory)).memory}
    assert math.isclose(found["parameters"], 10 - 16.4) and found["logits"] == 2.0
    assert math.isclose(found["optimizer"], -9.9)


def test_plan_words_workload_keys_and_cluster_fields_that_differ_are_named():
    other = prediction(
        plan=plan.parse("tp8 pp4 dp2 zero1 1f1b mb1 full"),
        cluster=cluster.load("64xa100"),
        train=workload.parse("batch=16,seq=4k,tokens=1t"),
    )
    found = delta(BASE, other)
    assert (found.only_a, found.only_b) == ((), ("full",))
    fields = {d.field: (d.a, d.b) for d in found.fields}
    assert fields["workload.seq"] == ("8192", "4096")
    bandwidths = [str(f"{c.islands[0].device.memory_gb_s:.6g}") for c in (BASE.cluster, other.cluster)]
    assert fields["cluster.islands[0].device.memory_gb_s"] == tuple(bandwidths)
    assert not any("source" in field or ".name" in field for field in fields)


def test_saved_predictions_give_the_same_causes_as_the_predictions_themselves():
    other = prediction(num_microbatches=12)
    saved = [json.loads(json.dumps(p.to_json())) for p in (BASE, other)]
    assert delta(*saved).causes == delta(BASE, other).causes
    assert delta(*saved).memory == delta(BASE, other).memory


def test_json_of_a_delta_has_its_format_and_the_causes():
    text = json.loads(json.dumps(delta(BASE, prediction(num_microbatches=12)).to_json()))
    assert text["format_version"] == 1
    assert {"causes", "memory", "fields", "only_a", "only_b", "step_time_s"} <= set(text)


def test_text_says_who_is_faster_by_how_much_and_through_what():
    causes = BASE.attribution | {"bubble": BASE.attribution["bubble"] - 0.5}
    other = with_causes(causes)
    file = io.StringIO()
    render(delta(BASE, other), Console(file=file, width=120))
    text = file.getvalue()
    assert text.startswith("B is 500 ms faster than A (-11.0%)")  # 0.5 / 4.5251
    assert "-500 ms" in text and "pipeline bubble" in text
    assert "matrix multiplications" not in text


def test_text_of_a_large_difference_fits_a_narrow_terminal():
    file = io.StringIO()
    other = prediction(num_microbatches=12, cluster=cluster.load("64xa100"))
    render(delta(BASE, other), Console(file=file, width=60))
    assert max(map(len, file.getvalue().splitlines())) <= 60

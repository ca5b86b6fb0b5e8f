"""Every word that a user meets has an explanation, and it can be found however the word is written."""

import json

import pytest

import meshwright as mw
from meshwright import catalog, schedules, serving
from meshwright.causes import WORDS
from meshwright.cli import main
from meshwright.cli.explain import look_up
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.plan.facets import fields
from meshwright.plan.facets.layout import DEFAULT_ORDER
from meshwright.plan.facets.overlap import OVERLAPS
from meshwright.plan.text import plain_words
from meshwright.spec.denoise import READERS as DENOISE
from meshwright.spec.edge_samples import READERS as EDGES
from meshwright.spec.feed import READERS as FEED
from meshwright.spec.graph_epochs import READERS as EPOCHS
from meshwright.spec.rollout import READERS as ROLLOUT
from meshwright.spec.samples import READERS as SAMPLES
from meshwright.spec.serve import KEYS as SERVING_KEYS
from meshwright.spec.workload import _READERS as WORKLOAD_KEYS
from meshwright.spec.workload import DTYPE_BYTES, LORA_TARGETS, OPTIMIZER_MOMENTS, PHASES

TERMS = catalog.tables("terms")
#: DESIGN.md, "Words (one name per thing)".
HOUSE_WORDS = [
    "rank",
    "device",
    "node",
    "island",
    "axis",
    "dim",
    "stage",
    "chunk",
    "microbatch",
    "global_batch",
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "vpp",
    "F",
    "B",
    "W",
    "task",
    "stream",
    "step",
    "iteration",
    "TTFT",
    "TPOT",
    "ITL",
    "E2E",
    "goodput",
    "MFU",
    "HFU",
    "bubble",
    "exposed_communication",
    "gb_s",
    "gbit_s",
    "GB",
    "GiB",
]
PLAN_WORDS = [*fields(), *plain_words(), "hsdp8", "tp8", "zero1", "zero2", "zero3", "2bp"]
OUTPUT_WORDS = [
    "step_time_s",
    "step_time_interval_s",
    "bound_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "hfu",
    "bubble",
    "peak_memory_bytes",
    "fits",
    "attribution",
    "memory",
    "sensitivities",
    "money",
    "training_run",
    "headroom",
    "verdict",
    "timeline",
    "critical_path",
]


@pytest.mark.parametrize("word", [*HOUSE_WORDS, *PLAN_WORDS, *OUTPUT_WORDS])
def test_words_of_the_house_of_plans_and_of_the_output_are_explained(word):
    assert look_up(word)["text"]


@pytest.mark.parametrize("word", [*WORKLOAD_KEYS, *DTYPE_BYTES, *OPTIMIZER_MOMENTS, *PHASES, *DEFAULT_ORDER, *OVERLAPS])
def test_words_of_workloads_are_explained(word):
    assert look_up(word)["text"]


@pytest.mark.parametrize("word", [*FEED, *DENOISE, *ROLLOUT, *SAMPLES, *EDGES, *EPOCHS])
def test_words_of_feeds_images_rollouts_tables_and_graphs_are_explained(word):
    assert look_up(word)["text"]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("$/Mtok", "money"),
        ("launch overhead", "host"),
        ("memory passes", "framework_profile"),
        ("80% interval", "interval"),
        ("fits with a probability", "p_fit"),
        ("lock server", "buckets"),
        ("negative sampling", "negatives"),
        ("replication factor", "copies"),
    ],
)
def test_what_tables_and_papers_call_their_words_is_explained(word, name):
    assert look_up(word)["name"] == name


@pytest.mark.parametrize("word", SERVING_KEYS)
def test_words_of_serving_workloads_are_explained(word):
    assert look_up(word)["text"]


@pytest.mark.parametrize("word", [name for axis in serving.MODULES for name in serving.names(axis)])
def test_every_policy_of_serving_is_explained(word):
    assert look_up(word)["title"] and len(look_up(word)["text"]) > 60


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("chunked prefill", "chunked_prefill"),
        ("prefix caching", "prefix_cache"),
        ("speculative decoding", "speculation"),
        ("slo", "slo"),
        ("prefill", "prefill"),
        ("decode", "prefill"),
        ("disaggregation", "kv_send"),
        ("hit_rate", "hit_rate"),
        ("attainment", "slo"),
        ("mbu", "mbu"),
        ("ngram", "speculation"),
        ("layerwise", "kv_send"),
        ("merged", "serving_adapters"),
    ],
)
def test_what_newcomers_call_serving_by_is_explained(word, name):
    assert look_up(word)["name"] == name


@pytest.mark.parametrize("word", list(WORDS))
def test_every_cause_of_step_time_is_explained(word):
    assert look_up(word)["name"] == word


def test_every_heading_and_line_of_an_answer_is_explained():
    headings = "where the step goes|what would help most|cost and energy|training run|assumptions|before you believe it"
    lines = "roofline bound|step time|tokens/s/GPU|checkpoints|failures|data loading|not included|energy"
    assert all(look_up(words) for words in f"{headings}|{lines}".split("|"))


def test_every_category_of_memory_is_explained():
    words = "tp2 pp2 ep2 fsdp"
    answer = mw.predict(
        mw.load_model("mixtral-8x7b"),
        mw.load_cluster("8xh100"),
        mw.parse_train("batch=8,seq=1024"),
        mw.parse_plan(words),
    )
    for category in answer.tightest.alive:
        assert look_up(category)["text"], category


@pytest.mark.parametrize("facet", Plan.__struct_fields__)
def test_every_facet_of_a_plan_is_explained(facet):
    assert look_up(facet)["text"]


@pytest.mark.parametrize("family", schedules.families().values(), ids=lambda f: f.name)
def test_every_schedule_is_explained_under_all_its_names(family):
    assert {look_up(word)["name"] for word in (family.name, *family.aliases)} == {family.name}


@pytest.mark.parametrize("code", catalog.tables("codes"))
def test_every_error_code_is_explained(code):
    assert look_up(code)["text"] == catalog.tables("codes")[code]["text"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("tp8", "tp"),
        ("TP8", "tp"),
        ("stages=9,10,10", "stages"),
        ("2bp:1f1b", "2bp"),
        ("zero1", "zero1"),
        ("hsdp16", "hsdp"),
        ("peak-memory", "peak_memory"),
        ("--on", "cluster"),
        ("sequence parallelism", "sp"),
        ("model flops utilisation", "mfu"),
        ("x001", "X001"),
        ("sequence packing", "pack"),
        ("gradient checkpointing", "recompute"),
        ("gradient accumulation", "microbatch"),
        ("DDP", "zero0"),
        ("world size", "rank"),
        ("flash-attention", "flash"),
        ("CPU offload", "offload"),
        ("torch.compile", "compiler"),
    ],
)
def test_a_word_is_found_however_it_is_written(written, meant):
    assert look_up(written)["name"] == meant


def test_a_title_says_something_and_a_text_ends_as_a_sentence():
    for name, entry in TERMS.items():
        assert set(entry) <= {"title", "text", "unit", "see", "source", "aliases"}, name
        assert len(entry["text"]) > 40 and entry["text"].rstrip().endswith((".", ")")), name


def test_see_also_leads_somewhere_else():
    for name, entry in TERMS.items():
        assert set(entry.get("see", ())) <= TERMS.keys() - {name}, name


def test_no_word_means_two_things():
    others = [alias for entry in TERMS.values() for alias in entry.get("aliases", ())]
    assert len(others) == len(set(others))
    assert not set(others) & TERMS.keys()


def test_text_goes_to_stdout_with_unit_and_source(capsys):
    assert main(["explain", "mfu"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("mfu  model FLOPs utilisation\n")
    assert "unit: " in out
    assert "2204.02311" in out


def test_a_long_source_is_wrapped_under_its_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", "bubble"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2].startswith("  source: ") and all(line == line.rstrip() for line in shown)
    assert all(line.startswith("  ") for line in shown[1:] if line)


def test_json_is_one_object_with_the_same_text(capsys):
    assert main(["explain", "tp8", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["format_version"], shown["name"], shown["text"]) == (1, "tp", TERMS["tp"]["text"])


def test_an_unknown_word_suggests_near_ones_and_exits_2(capsys):
    assert main(["explain", "bubbel"]) == 2
    err = capsys.readouterr().err
    assert "error[X001]: no explanation of 'bubbel'" in err
    assert "did you mean bubble" in err


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("X999", "the nearest are X105 ("),
        ("l012", "the nearest are L009 ("),
        ("Q001", "codes are one of the letters A, B, C, D"),
    ],
)
def test_a_code_that_does_not_exist_is_said_not_to_with_those_of_its_letter_that_are_nearest(word, near, capsys):
    assert main(["explain", word]) == 2
    err = capsys.readouterr().err
    assert f"error[X001]: there is no error code {word.upper()}" in err
    assert near in err and "known:" not in err


def test_the_name_of_a_device_is_not_taken_for_a_code(capsys):
    assert main(["explain", "H100"]) == 2
    err = capsys.readouterr().err
    assert "no explanation of 'H100'" in err and "devices" in err


def test_targets_of_lora_are_named_where_they_are_explained():
    assert "+".join(LORA_TARGETS) in look_up("targets")["text"]


@pytest.mark.parametrize(
    ("plan", "help"),
    [
        ("tp2 ddp", "did you mean zero0?"),
        ("offload", "offload=: state that lies in the host's memory or on its drives"),
        ("checkpointing", "meshwright explain recompute"),
        ("fspd", "did you mean fsdp"),
    ],
)
def test_a_word_of_others_in_a_plan_is_told_ours(plan, help):
    with pytest.raises(MeshwrightError, match=help.replace("?", r"\?")):
        mw.parse_plan(plan)


@pytest.mark.parametrize(
    ("workload", "help"),
    [
        ("batch=8,seq=128,lora", "write phase=lora"),
        ("batch=8,seq=128,phase=qlora", "meshwright explain qlora"),
        ("batch=8,seq=128,packing=yes", "did you mean pack?"),
        ("batch=8,seq=128,phase=lora,r=8", "rank=: the rank of LoRA's factors"),
        ("batch=8,seq=128,phase=lora,lora_alpha=8", "did you mean alpha?"),
        ("batch=8,seq=128,phase=lora,target_modules=q+v", "did you mean targets?"),
    ],
)
def test_a_word_of_others_in_a_workload_is_told_ours(workload, help):
    with pytest.raises(MeshwrightError, match=help.replace("?", r"\?")):
        mw.parse_train(workload)


def test_a_word_of_a_workload_is_explained_in_whole_sentences():
    """Dots that stand for what is left out (``whatif ... --try``) end none."""
    said = look_up("workers")["text"]
    assert "which make its batches in turn" in said and said.count("`") % 2 == 0

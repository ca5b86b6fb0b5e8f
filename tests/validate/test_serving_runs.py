"""Rows of ``serving_runs``: what is asked, what is scored, what is not predicted and why."""

import json

import pytest

from meshwright.cli import main
from meshwright.validate import tables
from meshwright.validate.launches import AHEAD_ACCEPT
from meshwright.validate.score import Unsupported
from meshwright.validate.serving import ServingScore, asked, scored, summary

COLUMNS = tables.REQUIRED["serving_runs"]
ROW = {
    **dict.fromkeys(COLUMNS, ""),
    "id": "r1",
    "source": "s",
    "hardware": "h100_sxm",
    "engine": "vllm",
    "model": "meta-llama/Meta-Llama-3-8B",
    "precision": "bf16",
    "mode": "agg",
    "load_type": "concurrency",
    "isl": "256",
    "osl": "32",
    "concurrency": "4",
    "tp": "1",
    "pp": "1",
    "dp": "1",
    "ttft_ms": "30",
    "tpot_ms": "8",
    "throughput_tok_s_per_gpu": "450",
}


def only(**cells):
    return next(found for _, found in scored([ROW | cells]))


def test_a_row_is_scored_by_its_times_and_its_throughput():
    found = only()
    assert found.key == "s/h100_sxm/vllm" and found.tpot[0] == 0.008 and found.ttft[0] == 0.03
    assert found.throughput[0] == 450
    # four requests at a time, a token each in about TPOT: 4 / 8 ms = 500 tokens a second, less the prompts' time
    assert 0.6 * 4 / found.tpot[1] < found.throughput[1] < 4 / found.tpot[1]


def test_a_static_batch_and_a_rate_are_loads_too():
    batch = only(load_type="static_batch", concurrency="", batch_size="8", tpot_ms="", ttft_ms="")
    assert batch.tpot is None and batch.throughput[1] > 0
    rate = only(load_type="poisson_rate", concurrency="", rate_req_s="2", num_requests="20")
    assert rate.tpot[1] < only(load_type="poisson_rate", concurrency="", rate_req_s="40", num_requests="60").tpot[1]


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"mode": "disagg"}, "V006 tensor parallelism not stated"),
        ({"precision": "int4"}, "V006 precision int4"),
        ({"tp": ""}, "V006 tensor parallelism not stated"),
        ({"isl": ""}, "V006 lengths not stated"),
        ({"load_type": "offline"}, "V006 load offline"),
        ({"model": "meta-llama/Llama-3.1-70B"}, "V006 the weights leave no room for a cache"),
        ({"model": "nobody/nothing"}, "M006 no model 'nobody/nothing' in the catalog, and no such file"),
    ],
)
def test_a_row_that_is_not_predicted_says_why(cells, reason):
    found = only(**cells)
    assert isinstance(found, Unsupported) and found.reason == reason


def test_prompts_and_answers_apart_are_two_pools_whose_replicas_lie_in_nodes():
    halves = {"prefill_workers": "1", "prefill_tp": "4", "decode_workers": "2", "decode_tp": "8"}
    question = asked(ROW | halves | {"mode": "disagg", "tp": "", "hardware": "b200_sxm"})
    # four devices of the first node, and two whole nodes behind it
    assert question.devices == 20 and question.cluster.num_devices == 24
    assert [(pool.plan.layout.tp, pool.plan.layout.dp) for pool in question.plan.several] == [(4, 1), (8, 2)]
    few = {"mode": "disagg", "tp": "", "prefill_workers": "2", "prefill_tp": "1", "decode_tp": "2"}
    found = only(**few)
    assert found.tpot[1] > 0 and found.throughput[1] * 4 < 4 / found.tpot[1]


def test_experts_whose_ranks_make_up_the_devices_are_split_over_those_of_attention():
    mixtral = {"model": "mistralai/Mixtral-8x7B-v0.1", "num_gpus": "4", "ep": "2", "tp": "2"}
    for cells, tp in ((mixtral, 4), (mixtral | {"ep": "4", "tp": "1"}, 4), (mixtral | {"num_gpus": "2"}, 2)):
        plan = asked(ROW | cells).plan
        assert (plan.layout.tp, plan.experts.ep) == (tp, int(cells["ep"]))


@pytest.mark.parametrize(("model", "hardware", "words"), [
    ("openai/gpt-oss-120b", "b200_sxm", ("bf16", "", "mxfp4")),
    ("openai/gpt-oss-20b", "h100_sxm", ("bf16", "", "mxfp4")),
    ("meta-llama/Llama-3.1-70B", "b200_sxm", ("nvfp4", "", "")),
    ("meta-llama/Llama-3.1-70B", "h100_sxm", ("bf16", "nvfp4", "")),
])  # fmt: skip
def test_four_bits_are_those_that_a_models_configuration_names(model, hardware, words):
    found = asked(ROW | {"precision": "fp4", "model": model, "hardware": hardware}).plan.precision
    assert (found.compute, found.weights, found.experts) == words


def test_what_a_benchmarks_scripts_say_of_the_engine_is_asked():
    def words(**cells):
        row = (
            ROW | {"source_ref": "systems/silicon_sample.csv (source_file=2026-03-25.csv)", "precision": "fp8"} | cells
        )
        engine = asked(row | {"tp": row["tp"] if row["tp"] != "1" else "8", "hardware": "b200_sxm"}).serve.engine
        return engine.poll, engine.batch_wait, engine.fill, engine.budget

    r1, even = {"model": "deepseek-ai/DeepSeek-R1", "ep": "1"}, {"isl": "1024", "osl": "1024"}
    assert words(**r1, engine="sglang", concurrency="8") == (10, 0, 0.0, 32768)
    assert words(**r1, engine="sglang", concurrency="16", precision="fp4") == (30, 0, 0.0, 16384)
    # 8,192 + 64 + 64 tokens in full 64s of each of eight groups, which wait for one another
    groups = {"dp": "8", "tp": "01", "ep": "8", "isl": "8192", "concurrency": "64"}
    assert words(**r1 | groups, engine="trtllm") == (1, 60, 0.0, 8 * 8320)
    # short prompts have 8,192 tokens an iteration, and wait; not under images of scripts that did neither
    many = r1 | even | {"engine": "trtllm", "concurrency": "64"}
    assert words(**many, engine_version="1.2.0rc6.post2") == (1, 40, 0.8, 8192)
    assert words(**many, engine_version="1.1.0rc2.post2") == (1, 0, 0.0, 1152)
    # gpt-oss asks for balance alone, for which the engine waits 50 iterations by itself
    oss = {"model": "openai/gpt-oss-120b", "engine": "trtllm", "precision": "fp4", "concurrency": "64"}
    assert words(**oss, dp="2", tp="01") == (1, 50, 0.0, 2 * 20000) and words(**oss) == (1, 0, 0.0, 20000)
    dense = {"model": "meta-llama/Llama-3.1-70B", "engine": "trtllm"}
    assert words(**dense, **even, tp="4") == (1, 20, 0.9, 16384) and words(**dense, **even) == (1, 0, 0.0, 16384)
    assert words(**dense, **even, tp="4", source_ref="elsewhere") == (1, 0, 0.0, 0)


def test_a_script_says_the_cache_and_the_tokens_of_an_iteration_of_the_image_that_it_ran():
    def words(**cells):
        row = ROW | {"source_ref": "(source_file=2026-03-25.csv)", "precision": "fp8", "tp": "4"} | cells
        engine = asked(row).serve.engine
        return engine.kv, engine.budget, engine.max_batch, engine.block, engine.memory

    minimax = {"model": "MiniMaxAI/MiniMax-M2.5", "hardware": "b200_sxm", "isl": "1024", "engine_version": "0.19.0"}
    assert words(**minimax) == ("fp8", 2048, 1024, 32, 0.9) and words(**minimax | {"isl": "8192"})[1] == 16384
    assert words(**minimax, dp="2")[1] == 2 * 2048 and words(**minimax, kv_dtype="bf16")[0] == "bf16"
    assert words(**minimax | {"engine_version": "0.17.0"}) == ("bf16", 0, 1024, 32, 0.95)
    assert words(**minimax | {"hardware": "h100_sxm"}) == ("bf16", 0, 256, 16, 0.9)
    oss = {"model": "openai/gpt-oss-120b", "precision": "fp4"}
    assert [words(**oss, hardware=name)[0] for name in ("b200_sxm", "h100_sxm", "h200_sxm")] == ["fp8", "bf16", "bf16"]
    # of no script it is what the benchmark's servers of quantised weights have
    assert words(model="meta-llama/Llama-3.1-70B", hardware="h200_sxm")[:2] == ("fp8", 0)
    assert words(**minimax, source_ref="elsewhere")[:2] == ("bf16", 0)


def test_images_that_configurations_of_several_tokens_ran_alone_say_that_tokens_are_predicted():
    r1 = {"model": "deepseek-ai/DeepSeek-R1", "engine": "trtllm", "precision": "fp8", "tp": "8", "hardware": "b200_sxm"}
    r1 |= {"source_ref": "systems/silicon_sample.csv (source_file=2026-03-25.csv)", "concurrency": "64"}

    def words(image, **cells):
        engine = asked(ROW | r1 | {"engine_version": image, "isl": "1024"} | cells).serve.engine
        return engine.draft, engine.guesses, engine.batch_wait, engine.budget

    # 4 x 64 + 1,024 + 64 tokens in full 64s; eight groups of 2 x 8 + 1,024 + 64 that wait for one another
    assert words("1.2.0rc6.post3") == ("mtp", 3, 0, 1344)
    assert words("1.2.0rc6.post3", dp="8", ep="8", tp="1") == ("mtp", 1, 60, 8 * 1152)
    for image in ("1.2.0rc6.post2", "1.1.0rc2.post2", ""):  # of servers that do not, of both, and of nobody knows whom
        assert words(image)[0] == ""
    assert words("1.2.0rc6.post3", source_ref="elsewhere")[0] == ""
    # as many come true as the engine's authors measured: 1.92 and 2.82 tokens an iteration, one of them its own
    come = {count: sum(chance**i for i in range(1, count + 1)) for count, chance in AHEAD_ACCEPT.items()}
    assert come == pytest.approx({1: 0.92, 3: 1.82}, abs=1e-3)


def test_errors_are_those_of_their_definition():
    # measured 10 and 20 ms, predicted 11 and 16: errors +10% and -20%
    rows = [
        ServingScore(id=str(i), key="s/h/e", tpot=pair, inside=bool(i))
        for i, pair in enumerate([(0.010, 0.011), (0.020, 0.016)])
    ]
    found = summary(rows, [Unsupported(id="u", key="s/h/e", faulty=False, reason="r")])
    assert found.keys() == {"s/h/e", "all"} and found["all"] == found["s/h/e"]
    assert found["all"] == pytest.approx(
        {
            "rows": 2,
            "unsupported": 1,
            "tpot_rows": 2,
            "coverage80": 0.5,
            "tpot_median_ape": 0.15,
            "tpot_mean_ape": 0.15,
            "tpot_p90_ape": 0.19,
            "tpot_bias": -0.05,
        }
    )


def test_the_command_scores_the_table_by_engine(capsys, tmp_path):
    lines = [",".join(COLUMNS), ",".join(ROW.values()), ",".join((ROW | {"mode": "disagg"}).values())]
    (tmp_path / "serving_runs.csv").write_text("\n".join(lines) + "\n")
    rows = tmp_path / "rows.csv"
    assert main(["validate", "--data", str(tmp_path), "--json", "--rows", str(rows)]) == 0
    said = json.loads(capsys.readouterr().out)["serving_runs"]["s/h100_sxm/vllm"]
    assert (said["rows"], said["unsupported"], said["tpot_rows"]) == (1, 1, 1)
    assert "predicted_tpot" in rows.read_text().splitlines()[0]
    assert main(["validate", "--data", str(tmp_path)]) == 0
    assert "TPOT" in capsys.readouterr().out


def test_wrong_cells_are_named_by_their_line(capsys, tmp_path):
    lines = [",".join(COLUMNS), ",".join((ROW | {"isl": "-5"}).values()), ",".join((ROW | {"tpot_ms": "x"}).values())]
    (tmp_path / "serving_runs.csv").write_text("\n".join(lines) + "\n")
    assert main(["validate", "--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "isl" in said and "tpot_ms" in said and "V004" in said

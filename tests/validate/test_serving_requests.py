"""Measured requests of a server: what it served with, its own arrivals, and how far the distributions are apart."""

import json

import msgspec
import numpy as np
import pytest

from meshwright.answer.replica import built
from meshwright.answer.serving_pools import ServedPools
from meshwright.cli import main
from meshwright.cost.engine import engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.lower.place import Mesh
from meshwright.plan import parse as parse_plan
from meshwright.simulate.serve import simulate
from meshwright.spec import cluster as clusters
from meshwright.spec import model as models
from meshwright.spec.serve import Serve
from meshwright.validate import serving_requests
from meshwright.validate.serving import ServingScore
from meshwright.validate.serving_ranking import ranking
from meshwright.work import Collective

HEAD = "run,engine,model,hardware,prompt_tokens,output_tokens,arrival_s,first_token_s,last_token_s"
SERVER = {
    "engine_kwargs": {"tensor_parallel_size": 1, "max_num_seqs": 64, "max_num_batched_tokens": 2048},
    "kv_cache": {"num_gpu_blocks": 4096, "block_size": 16, "gpu_memory_utilization": 0.9},
}


def written(folder, configs, runs=("a",), engine="vllm 0.19.0"):
    inside = folder / "serving_requests"
    inside.mkdir()
    rows = [
        f"{run},{engine},meta-llama/Meta-Llama-3-8B,h100_sxm,512,{32 + i},{i * 0.1},{i * 0.1 + 0.04},{i * 0.1 + 0.3}"
        for run in runs
        for i in reversed(range(20))
    ]
    (inside / "x_requests.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    (inside / "x_configs.json").write_text(json.dumps(configs))
    return inside


def test_a_run_is_served_again_with_its_own_arrivals(tmp_path):
    written(tmp_path, {"a": {"meta": SERVER}})
    (found,) = serving_requests.scored(*serving_requests.files(tmp_path))
    assert (found.run, found.requests, found.unsupported) == ("a", 20, "")
    # 8e9 parameters of 2 bytes at 3.35e12 bytes a second: at least 4.8 ms a token; measured 0.26 s / 31 to 51 tokens
    measured = np.mean([0.26 / (31 + i) for i in range(20)])
    assert 0.0048 < measured * (1 + found.metrics["tpot_bias"]) < 0.012
    assert found.metrics["tpot_mean_ape"] == pytest.approx(abs(found.metrics["tpot_bias"]))


def test_a_server_has_its_own_limits_and_count_of_blocks():
    setup = serving_requests._of_server({"engine": "vllm 0.19.0"}, SERVER)
    words = setup.words
    assert (words.max_batch, words.budget, words.kv_blocks, words.profile) == (64, 2048, 4096, "vllm")


def test_a_server_that_keeps_prefixes_computes_less_again_of_those_that_it_evicts(tmp_path):
    cache = SERVER["kv_cache"] | {"num_gpu_blocks": 100, "enable_prefix_caching": True}  # for three of 20 requests
    inside = written(tmp_path, {"a": {"meta": SERVER | {"kv_cache": cache}}})
    assert inside.is_dir()
    ((_, _, run),) = serving_requests.runs(*serving_requests.files(tmp_path))
    assert run.serve.engine.prefix_cache
    blocks = (run.requests.prompt + run.requests.output) // 16
    assert (np.diff(run.requests.hash_ptr) == blocks).all()
    assert len(set(run.requests.hashes.tolist())) == blocks.sum()  # nothing in common
    computed = []
    for keeps in (True, False):
        words = msgspec.structs.replace(run.serve.engine, prefix_cache=keeps)
        serve = msgspec.structs.replace(run.serve, engine=words)
        asked = (run.model, run.cluster, serve, run.plan, run.requests, serving_costs("vllm"), engine_profile("vllm"))
        served = simulate(built(*asked).replica, run.requests)
        assert served.evictions
        computed.append(served.tokens_seen @ np.arange(len(served.tokens_seen)))
    assert run.requests.prompt.sum() < computed[0] < computed[1]


def test_a_machine_whose_rings_were_measured_has_a_port_with_which_they_take_that_long():
    said, two = {"link_bw": 16, "link_latency": 20000}, clusters.load("2xrtx_pro_6000_server")
    found = serving_requests._linked(two, said)
    group = Mesh(parse_plan("tp2").on(2), found).pair(0, 1)
    for num_bytes in (2**24, 2**28):  # two steps of half of the bytes each: (bytes / 2 / rate + 20 us) * 2
        work = Collective(op="all_reduce", num_bytes=num_bytes, group=group)
        ring_s = num_bytes / (16 * 2**30) + 2 * 20e-6
        assert serving_costs("vllm").price(work, found.islands[0].device).seconds == pytest.approx(ring_s, rel=0.05)
    assert serving_requests._linked(two, {}) == two  # nothing said: the catalog's
    alone = clusters.load("1xrtx4090")
    assert serving_requests._linked(alone, said) == alone  # nobody to talk to


def test_a_plan_of_a_published_experiment_makes_room_for_the_prompts_it_may_compute_before_it_counts_its_cache(
    tmp_path,
):
    inside = written(tmp_path, {"a": {"plan": {"engine": "vllm", "tp": 1, "pp": 1}}}, engine="vllm (2024)")
    (inside / "x_max_num_tokens.csv").write_text("model,tp,pp,max_num_tokens\nfacebook/opt-13b,1,1,66144\n")
    (path,) = serving_requests.files(tmp_path)
    row = {"engine": "vllm (2024)", "model": "facebook/opt-13b"}
    words = serving_requests._setup(row, {"plan": {"tp": 1, "pp": 1}}, path).words
    assert (words.policy, words.profile, words.budget) == ("vllm-v0", "distserve-vllm-2024-04", 65536)
    # The file beside is the count of the other engine, which keeps no memory for activations. 0.92 of 80 GiB less 25.7
    # GB of weights leaves 53.3 GB; 65,536 tokens of 2 bytes take 20480 * 2 + 5120 * 2 numbers and more, 6.7 GB at most.
    assert words.kv_blocks == 0
    model, on = models.load("opt-13b"), clusters.load("1xa100_80gb_sxm")
    serve = Serve(rate=1.0, prompt=512, output=64, engine=words)
    asked = (
        model,
        on,
        serve,
        parse_plan("tp1").on(1),
        serve.drawn(),
        serving_costs("vllm"),
        engine_profile("distserve-vllm"),
    )
    tokens = built(*asked).blocks * words.block
    kept = 2 * 2 * 40 * 5120  # keys and values of 40 layers of 5,120 numbers of 2 bytes
    assert (53.3e9 - 6.7e9 - 1.1e9) / kept < tokens < (53.3e9 - 4.0e9) / kept


def test_halves_on_devices_of_their_own_are_served_by_two_pools(tmp_path):
    inside = written(tmp_path, {"a": {"plan": {"prefill": "tp2 pp1", "decode": "tp1 pp2"}}}, engine="distserve")
    (path,) = serving_requests.files(tmp_path)
    row = {"engine": "distserve", "model": "meta-llama/Meta-Llama-3-8B"}
    setup = serving_requests._setup(row, {"plan": {"prefill": "tp2 pp1", "decode": "tp1 pp2"}}, path)
    assert setup.devices == 4 and setup.words.policy == "vllm-v0" and setup.words.profile == "distserve-2024-04"
    (found,) = serving_requests.scored(path)
    assert (inside.name, found.unsupported) == ("serving_requests", "")
    # 512 tokens on two devices: 2 * 8e9 * 512 operations at 0.99e15 a second each are 4 ms and more; 40 ms measured
    assert 0.004 < 0.04 * (1 + found.metrics["ttft_bias"]) < 0.04


def test_halves_have_caches_of_the_sizes_that_their_engine_counted_for_the_layout_of_each(tmp_path):
    halves = {"prefill": "tp2 pp1", "decode": "tp1 pp1"}
    inside = written(tmp_path, {"a": {"plan": halves}}, engine="distserve")
    counted = "meta-llama/Meta-Llama-3-8B,2,1,163008\nmeta-llama/Meta-Llama-3-8B,1,1,66144\n"
    (inside / "x_max_num_tokens.csv").write_text(f"model,tp,pp,max_num_tokens\n{counted}")
    (path,) = serving_requests.files(tmp_path)
    ((_, _, run),) = serving_requests.runs(path)
    assert run.blocks == {"prefill": 163008 // 16, "decode": 66144 // 16}
    asked = (run.model, run.cluster, run.serve, run.plan, run.requests, serving_costs("vllm"))
    pools = ServedPools(*asked, engine_profile(run.serve.engine.profile), blocks=run.blocks)
    assert [one.limits.blocks for one in pools.apart.replicas] == [163008 // 16, 66144 // 16]


def test_runs_that_are_not_predicted_say_why_and_the_others_are(tmp_path):
    configs = {"a": {"meta": SERVER}, "b": {"plan": {"prefill": "unknown", "decode": "unknown"}}}
    written(tmp_path, configs, runs=("a", "b", "c"))
    found = serving_requests.scored(*serving_requests.files(tmp_path))
    reasons = ["", "V006 plan not stated", "V006 what the run served with is not stated"]
    assert [one.unsupported for one in found] == reasons
    said = serving_requests.summary(found)
    assert said["all"]["unsupported"] == 2 and said["all"]["tpot_ks"] == said["a"]["tpot_ks"]


def test_a_run_without_configurations_is_refused_with_the_file(tmp_path):
    (written(tmp_path, {}) / "x_configs.json").write_text("{")
    with pytest.raises(MeshwrightError, match="cannot read what the runs served with"):
        serving_requests.scored(*serving_requests.files(tmp_path))


def test_the_distance_of_distributions_is_the_largest_difference_of_their_shares():
    # at 2 all of one sample and a quarter of the other lie below: 1 - 1/4
    assert serving_requests.distance(np.array([1.0, 2.0]), np.array([2.0, 3.0, 3.0, 4.0])) == pytest.approx(0.75)
    assert serving_requests.distance(np.array([1.0, 2.0]), np.array([2.0, 1.0])) == 0.0


def test_the_command_scores_runs_beside_tables(capsys, tmp_path):
    written(tmp_path, {"a": {"meta": SERVER}})
    assert main(["validate", "--data", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["serving_requests"]["a"]
    assert {"requests", "ttft_mean_ape", "tpot_mean_ape", "ttft_ks", "tpot_ks"} <= said.keys() and said[
        "requests"
    ] == 20
    assert main(["validate", "--data", str(tmp_path)]) == 0
    assert "KS" in capsys.readouterr().out


def plan(words, rate, tpot, ttft=(0.05, 0.05)):
    dp = int(words.partition("DP")[0])
    row = {"source": "s", "hardware": "h", "model": "m", "precision": "", "osl": "101", "rate_req_s": str(rate / dp)}
    score = ServingScore(id="", key="", tpot=tpot, ttft=ttft)
    return row | {"notes": f"trace t; one replica of {words} (requests split)"}, score


def test_the_best_of_the_plans_of_one_trace_and_rate_is_picked_or_not():
    right = [
        plan("1DPx8TP", 2.0, (0.01, 0.012)),
        plan("4DPx2TP", 2.0, (0.03, 0.02)),
        plan("4DPx2TP", 2.0, (0.03, 0.02)),
    ]
    # 0.05 + 100 * 0.01 = 1.05 s is best, the one predicted faster took 0.05 + 100 * 0.02 = 2.05 s
    wrong = [plan("1DPx8TP", 4.0, (0.01, 0.02)), plan("2DPx4TP", 4.0, (0.02, 0.01)), plan("8DPx1TP", 8.0, (0.1, 0.1))]
    found = ranking([*right, *wrong])
    assert found == pytest.approx({"groups": 2, "best_picked": 0.5, "regret": (2.05 / 1.05 - 1) / 2})
    assert ranking([]) == {"groups": 0}

"""Serving engines' files: their keys, what they say of the plan, their shape, and what cannot be said."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.cli import main
from meshwright.errors import Infeasible
from meshwright.export.engines import SERVING_TARGETS
from meshwright.export.serving import export_serving, planned
from meshwright.export.target import load
from meshwright.spec.serve import parse

yaml = pytest.importorskip("yaml", reason="PyYAML reads the files back")

REQUESTS = "batch=2,prompt=64,output=4"
#: Target -> (model, cluster, plan, words) that it can say.
CASES = {
    "vllm": ("llama3-8b", "4xh100", "tp2 dp2", "budget=4096,max_batch=64,kv=fp8,memory=0.85,routing=least-loaded"),
    "sglang": ("llama3-8b", "2xh100", "tp2", "policy=vllm-v0,budget=4096,max_batch=64,kv=fp8,graphs=no"),
    "trtllm": ("llama3-8b", "2xh100", "tp2 fp8", "policy=orca,block=32,kv_blocks=1000"),
    "llm-d": ("mixtral-8x7b", "8xh100", "tp4 dp2 fp8", "routing=least-loaded,policy=sarathi"),
    "dynamo": ("llama3-70b", "16xh100", "tp8 pp2", "graphs=no,kv_blocks=5000"),
}


def ask(target, model, on, plan, words):
    asked = "batch=2,prompt=64,output=1" if model == "bert-base" else REQUESTS
    serve = parse(f"{asked},{words}" if words else asked)
    return export_serving(target, mw.load_model(model), mw.load_cluster(on), serve, mw.parse_plan(plan))


def read(target):
    return yaml.safe_load(ask(target, *CASES[target]).text)


def keys_of(target):
    return {key for keys in load(target).keys.values() for key in keys}


@pytest.mark.parametrize("target", ["vllm", "sglang", "trtllm"])
def test_every_setting_is_one_of_the_named_version_and_explained_behind_it(target):
    text = ask(target, *CASES[target]).text
    for section in (table := yaml.safe_load(text), *(v for v in table.values() if isinstance(v, dict))):
        assert set(section) <= keys_of(target)
    lines = [line for line in text.splitlines() if not line.startswith("#") and not line.endswith(":")]
    assert lines and all("  # " in line for line in lines)


@pytest.mark.parametrize("target", SERVING_TARGETS)
def test_every_comment_of_a_serving_target_is_for_a_key_of_it_and_its_module_names_its_version(target):
    from importlib import import_module

    about = load(target)
    assert about.comments.keys() - keys_of(target) == set()
    assert all(text.isprintable() and len(text) < 90 for text in about.comments.values())
    assert f"{about.title} {about.version}" in import_module(f"meshwright.export.{SERVING_TARGETS[target]}").__doc__


def test_vllm_is_told_the_plan_and_the_words():
    table = read("vllm")
    said = {"tensor-parallel-size": 2, "max-num-batched-tokens": 4096, "max-num-seqs": 64, "kv-cache-dtype": "fp8"}
    said |= {"gpu-memory-utilization": 0.85, "block-size": 16, "dtype": "bfloat16", "enable-prefix-caching": False}
    assert said.items() <= table.items()
    assert "enforce-eager" not in table and "num-gpu-blocks-override" not in table


def test_shared_prefixes_and_the_hosts_memory_are_said_in_each_engines_unit():
    words = "prefix_cache=yes,host=16GiB"
    said = {t: yaml.safe_load(ask(t, "llama3-8b", "2xh100", "tp2", words).text) for t in ("vllm", "sglang", "trtllm")}
    # of both ranks in GiB; of each in gigabytes: 16 x 1.074; of each in bytes
    assert (said["vllm"]["enable-prefix-caching"], said["vllm"]["kv-offloading-size"]) == (True, 32.0)
    assert (said["sglang"]["enable-hierarchical-cache"], said["sglang"]["hicache-size"]) == (True, 17)
    assert "disable-radix-cache" not in said["sglang"]
    cache = said["trtllm"]["kv_cache_config"]
    assert (cache["enable_block_reuse"], cache["host_cache_size"]) == (True, 16 * 2**30)


def test_attention_groups_have_their_part_of_the_limits_and_experts_are_spread():
    words = "max_batch=100,budget=4000,kv_blocks=1000"
    for target, plan, said in (
        ("vllm", "tp8 adp4 ep8", {"data-parallel-size": 4, "tensor-parallel-size": 2, "max-num-seqs": 25}),
        ("vllm", "tp8 adp8 ep8 dispatch=gathered", {"all2all-backend": "allgather_reducescatter", "max-num-seqs": 13}),
        ("sglang", "tp8 adp4 ep8", {"attn-dp-size": 4, "tp-size": 8, "ep-size": 8, "moe-a2a-backend": "deepep"}),
        ("trtllm", "tp8 adp8 ep8", {"enable_attention_dp": True, "moe_expert_parallel_size": 8, "max_batch_size": 13}),
    ):
        table = yaml.safe_load(ask(target, "qwen3-30b-a3b", "8xh100", plan, words).text)
        assert said.items() <= table.items(), target
    for target, model, plan, value in (
        ("trtllm", "qwen3-30b-a3b", "tp8 adp4 ep8", "adp4"),
        ("vllm", "llama3-8b", "tp8 adp2", "adp2"),
    ):
        with pytest.raises(Infeasible, match=f"cannot express {value}"):
            ask(target, model, "8xh100", plan, "")


def test_what_prompts_wait_for_is_said_in_the_words_of_engines_that_have_it():
    sglang = yaml.safe_load(ask("sglang", "llama3-8b", "1xh100", "tp1", "poll=30").text)
    assert sglang["scheduler-recv-interval"] == 30
    filled = yaml.safe_load(ask("trtllm", "llama3-8b", "1xh100", "tp1", "batch_wait=20,fill=0.9").text)
    assert (filled["batch_wait_timeout_iters"], filled["batch_wait_max_tokens_ratio"]) == (20, 0.9)
    for words, settle in (("batch_wait=60", 0), ("batch_wait=60,settle=10", 10)):
        groups = yaml.safe_load(ask("trtllm", "qwen3-30b-a3b", "8xh100", "tp8 adp8 ep8", words).text)
        balance = {"enable_balance": True, "timeout_iters": 60, "batching_wait_iters": settle}
        assert groups["attention_dp_config"] == balance
    for target, word in (("vllm", "poll=30"), ("sglang", "batch_wait=20"), ("trtllm", "poll=30")):
        with pytest.raises(Infeasible, match=f"cannot express {word}"):
            ask(target, "llama3-8b", "1xh100", "tp1", word)


def test_stored_weights_are_read_from_the_checkpoint_which_the_notes_ask_for():
    for target in ("vllm", "sglang", "trtllm"):
        exported = ask(target, "llama3-8b", "1xh100", "tp1 w4a16", "")
        assert "quantization" not in yaml.safe_load(exported.text)
        assert any("weights are stored as int4" in note for note in exported.notes)
    with pytest.raises(Infeasible, match="cannot express weights=nvfp4"):
        ask("trtllm", "llama3-8b", "1xh100", "tp1 weights=nvfp4", "")


def test_a_draft_guesses_as_many_tokens_as_were_said():
    words = "draft=llama3.2-1b,guesses=3,accept=0.7"
    said = {t: ask(t, "llama3-8b", "2xh100", "tp2", words) for t in ("vllm", "sglang", "trtllm", "dynamo")}
    tables = {target: yaml.safe_load(exported.text) for target, exported in said.items()}
    assert tables["vllm"]["speculative-config"] == {
        "method": "draft_model", "model": "<DRAFT>", "num_speculative_tokens": 3,
    }  # fmt: skip
    assert tables["sglang"]["speculative-num-draft-tokens"] == 4 and tables["sglang"]["speculative-num-steps"] == 3
    assert tables["trtllm"]["speculative_config"]["max_draft_len"] == 3
    assert all(any("<DRAFT>" in note for note in exported.notes) for exported in said.values())
    worker = tables["dynamo"]["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]
    (flag,) = [one for one in worker["args"] if one.startswith("--speculative-config=")]
    assert json.loads(flag.partition("=")[2]) == tables["vllm"]["speculative-config"]
    ngram = yaml.safe_load(ask("sglang", "llama3-8b", "2xh100", "tp2", "draft=ngram,accept=0.3").text)
    assert ngram["speculative-algorithm"] == "NGRAM" and "speculative-draft-model-path" not in ngram
    own = {
        t: ask(t, "llama3-8b", "2xh100", "tp2", "draft=mtp,guesses=1,accept=0.8") for t in ("vllm", "sglang", "trtllm")
    }
    tables = {target: yaml.safe_load(exported.text) for target, exported in own.items()}
    assert tables["vllm"]["speculative-config"] == {"method": "mtp", "num_speculative_tokens": 1}
    assert tables["sglang"]["speculative-algorithm"] == "EAGLE" and tables["sglang"]["speculative-num-steps"] == 1
    assert tables["trtllm"]["speculative_config"] == {"decoding_type": "MTP", "num_nextn_predict_layers": 1}
    assert not any("<DRAFT>" in note for exported in own.values() for note in exported.notes)


def test_vllm_is_told_to_sum_by_nccl_and_the_others_refuse():
    asked = "llama3-8b", "2xh100", "tp2 sums=nccl", ""
    assert yaml.safe_load(ask("vllm", *asked).text)["disable-custom-all-reduce"] is True
    assert "disable-custom-all-reduce" not in ask("vllm", "llama3-8b", "2xh100", "tp2", "").text
    for target, plan in (("vllm", "tp2 sums=star"), ("sglang", "tp2 sums=nccl")):
        with pytest.raises(Infeasible, match=r"serving\.sums"):
            ask(target, "llama3-8b", "2xh100", plan, "")


@pytest.mark.parametrize("plan", ["tp1 unfused", "tp1 nano2", "tp1 streams=2", "tp1 weights_from=host"])
def test_words_of_a_plan_that_no_engine_has_are_refused(plan):
    with pytest.raises(Infeasible, match="no setting"):
        ask("vllm", "llama3-8b", "1xh100", plan, "")


def test_words_that_no_engine_has_are_refused_and_not_left_out():
    with pytest.raises(Infeasible) as refused:
        ask("vllm", "llama3-8b", "1xh100", "tp1", "kv_budget=h2o:0.2")
    (found,) = refused.value.diagnostics
    assert "kv_budget" in found.message and "no setting" in found.message


def test_routing_by_cached_prefixes_is_said_where_the_router_has_it():
    words = "routing=prefix-aware,prefix_cache=yes"
    values = yaml.safe_load(ask("llm-d", "llama3-8b", "4xh100", "tp2", words).files["router.values.yaml"])
    (plugins,) = values["router"]["epp"]["pluginsCustomConfig"].values()
    (profile,) = yaml.safe_load(plugins)["schedulingProfiles"]
    assert [one["pluginRef"] for one in profile["plugins"]] == ["prefix-cache-affinity-filter", "token-load-scorer"]
    front = yaml.safe_load(ask("dynamo", "llama3-8b", "4xh100", "tp2", words).text)["spec"]["components"][0]
    assert front["podTemplate"]["spec"]["containers"][0]["env"] == [{"name": "DYN_ROUTER_MODE", "value": "kv"}]
    with pytest.raises(Infeasible, match="cannot express routing=prefix-aware"):
        ask("vllm", "llama3-8b", "4xh100", "tp2", words)
    sglang = yaml.safe_load(ask("sglang", "llama3-8b", "2xh100", "tp2", "order=lpm,prefix_cache=yes").text)
    assert sglang["schedule-policy"] == "lpm"


def test_adapters_lie_in_as_many_slots_as_were_said():
    words = "adapters=10,lora=slots,adapter_slots=3,adapter_rank=32"
    vllm, sglang = (yaml.safe_load(ask(t, "llama3-8b", "1xh100", "tp1", words).text) for t in ("vllm", "sglang"))
    assert (vllm["enable-lora"], vllm["max-loras"], vllm["max-cpu-loras"], vllm["max-lora-rank"]) == (True, 3, 10, 32)
    assert (sglang["max-loras-per-batch"], sglang["max-loaded-loras"], sglang["max-lora-rank"]) == (3, 10, 32)
    for target, more, value in (
        ("vllm", "lora=unified", "lora=unified"),
        ("vllm", "lora=slots,adapter_rank=5", "adapter_rank=5"),
        ("trtllm", "lora=slots", "10 adapters"),
    ):
        with pytest.raises(Infeasible, match=f"cannot express {value}"):
            ask(target, "llama3-8b", "1xh100", "tp1", f"adapters=10,{more}")


def test_plan_words_that_no_engine_has_are_refused_and_not_left_out():
    with pytest.raises(Infeasible, match=r"serving\.nano = 2"):
        ask("vllm", "llama3-8b", "1xh100", "tp1 nano2", "")


def test_sglang_computes_whole_prompts_alone_where_the_policy_does_and_replays_no_graph():
    table = read("sglang")
    assert (table["chunked-prefill-size"], table["max-prefill-tokens"]) == (-1, 4096)
    assert "enable-mixed-chunk" not in table
    assert table["cuda-graph-backend-decode"] == "disabled"


def test_sglang_gets_the_share_of_weights_and_cache_and_trtllm_that_of_what_the_others_leave():
    nouns = mw.load_model("llama3-8b"), mw.load_cluster("2xh100"), parse(REQUESTS), mw.parse_plan("tp2")
    held = planned(*nouns, nouns[2].drawn()).memory
    capacity, cache, weights = held.capacity_bytes, held.alive["keys and values"], held.alive["weights"]
    others = sum(size for name, size in held.alive.items() if name != "keys and values")
    shares = {
        "sglang": yaml.safe_load(export_serving("sglang", *nouns).text)["mem-fraction-static"],
        "trtllm": yaml.safe_load(export_serving("trtllm", *nouns).text)["kv_cache_config"]["free_gpu_memory_fraction"],
    }
    # 8.03e9 parameters of two bytes over two ranks: 16.06e9 / 2 of 80e9 or so
    assert 0.09 < weights / capacity < 0.11
    assert shares["sglang"] == pytest.approx((weights + cache) / capacity, abs=1e-3)
    assert shares["trtllm"] == pytest.approx(cache / (capacity - others), abs=1e-3)


def test_trtllm_never_evicts_where_the_policy_reserves_and_holds_as_many_tokens_as_were_said():
    table = read("trtllm")
    assert table["scheduler_config"] == {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"}
    assert table["enable_chunked_prefill"] is False
    assert table["kv_cache_config"]["max_tokens"] == 32_000
    # a policy without a budget: the longest prompt, 64 tokens, beside 256 next tokens
    assert table["max_num_tokens"] == 64 + 256


def test_a_deployment_of_llm_d_has_a_pod_a_replica_and_its_router_selects_these():
    exported = ask("llm-d", *CASES["llm-d"])
    manifest, values = yaml.safe_load(exported.text), yaml.safe_load(exported.files["router.values.yaml"])
    assert (manifest["apiVersion"], manifest["kind"]) == ("apps/v1", "Deployment")
    spec = manifest["spec"]
    assert spec["replicas"] == 2
    labels = spec["selector"]["matchLabels"]
    assert labels.items() <= spec["template"]["metadata"]["labels"].items()
    assert values["router"]["modelServers"]["matchLabels"] == labels
    (server,) = spec["template"]["spec"]["containers"]
    assert set(server) <= set(load("llm-d").keys["container"])
    assert server["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert {"--tensor-parallel-size=4", "--scheduler-reserve-full-isl", "--quantization=fp8_per_tensor"} <= set(
        server["args"]
    )
    mounted = {mount["name"] for mount in server["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    plugins = values["router"]["epp"]["pluginsCustomConfig"][values["router"]["epp"]["pluginsConfigFile"]]
    picked = yaml.safe_load(plugins)
    defined = {plugin["type"] for plugin in picked["plugins"]}
    assert {one["pluginRef"] for profile in picked["schedulingProfiles"] for one in profile["plugins"]} <= defined


def test_a_graph_of_dynamo_has_a_frontend_and_workers_over_the_nodes_of_a_replica():
    manifest, keys = read("dynamo"), load("dynamo").keys
    assert (manifest["apiVersion"], manifest["kind"]) == ("nvidia.com/v1beta1", "DynamoGraphDeployment")
    assert set(manifest["spec"]) == set(keys["spec"])
    front, worker = manifest["spec"]["components"]
    assert (front["type"], worker["type"], worker["replicas"]) == ("frontend", "worker", 1)
    assert set(worker) <= set(keys["component"]) and worker["multinode"] == {"nodeCount": 2}
    (main_container,) = worker["podTemplate"]["spec"]["containers"]
    assert set(main_container) <= set(keys["container"])
    # 16 devices of a replica over two nodes of eight
    assert main_container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert {"--pipeline-parallel-size=2", "--enforce-eager", "--num-gpu-blocks-override=5000"} <= set(
        main_container["args"]
    )


def test_every_flag_of_a_pod_is_explained_behind_it():
    for target in ("llm-d", "dynamo"):
        flags = [line for line in ask(target, *CASES[target]).text.splitlines() if line.strip().startswith('- "--')]
        ours = [line for line in flags if "--port=" not in line and "--model=" not in line]
        assert ours and all("  # " in line for line in ours)


@pytest.mark.parametrize(
    ("target", "on", "plan", "words", "wrong"),
    [
        ("vllm", "2xh100", "tp2", "policy=past-future,block=24", ["policy=past-future", "block=24"]),
        ("sglang", "2xh100", "tp2", "policy=orca,kv=fp16", ["policy=orca", "kv=fp16"]),
        ("trtllm", "16xh100", "tp8 pp2", "block=48", ["block=48", "a replica of 2 nodes"]),
        ("llm-d", "16xh100", "tp8 pp2", "", ["a replica of 2 nodes"]),
        ("trtllm", "2xh100", "tp2", "order=priority,preempt=swap,host=1GiB", ["preempt=swap", "order=priority"]),
        ("vllm", "2xh100", "tp2", "host=1GiB", ["host= without a prefix cache"]),
        ("llm-d", "8xh100", "tp2", "routing=round-robin", ["routing=round-robin"]),
        ("vllm", "16xh100", "tp1 pp16", "kv_blocks=9,policy=static", ["policy=static"]),
        ("vllm", "1xa100-40", "tp1", "", ["a replica without room for the cache of a request"]),
        ("trtllm", "1xh100", "tp1", "policy=orca", ["bert-base"]),
        ("vllm", "24xh100", "pp3", "", ["replicas of 3 devices"]),
    ],
)
def test_all_that_a_target_cannot_say_is_listed_at_once(target, on, plan, words, wrong):
    model = {"1xa100-40": "llama3-70b", "1xh100": "bert-base"}.get(on, "llama3-8b")
    with pytest.raises(Infeasible) as refused:
        ask(target, model, on, plan, words)
    found = refused.value.diagnostics
    assert [d.code for d in found] == ["E001"] * len(wrong)
    for diagnostic, value in zip(found, wrong):
        assert f"cannot express {value}: " in diagnostic.message
        assert diagnostic.help or value == "bert-base"


def test_the_nearest_question_is_said_in_words_that_export():
    with pytest.raises(Infeasible) as refused:
        ask("trtllm", "llama3-8b", "2xh100", "tp2", "policy=past-future,block=48,budget=512")
    help = refused.value.diagnostics[-1].help
    words, plan = help.split('--serve "')[1].split('" --plan "')
    serve = parse(words)
    assert (serve.engine.policy, serve.engine.block) == ("vllm-v1", 32)
    export_serving(
        "trtllm", mw.load_model("llama3-8b"), mw.load_cluster("2xh100"), serve, mw.parse_plan(plan.rstrip('"'))
    )


@settings(max_examples=25, deadline=None)
@given(
    target=st.sampled_from(list(SERVING_TARGETS)),
    layout=st.sampled_from(["tp2 dp2", "tp4", "pp2 dp2", "dp4", "tp2 pp2"]),
    policy=st.sampled_from(["static", "orca", "vllm-v0", "vllm-v1", "sarathi", "past-future"]),
    routing=st.sampled_from(["round-robin", "least-loaded", "power-of-two"]),
    kv=st.sampled_from(["bf16", "fp16", "fp8"]),
    block=st.sampled_from([8, 16, 24, 64]),
    precision=st.sampled_from(["", "fp16", "fp8", "fp8_block", "mxfp8"]),
    graphs=st.sampled_from(["yes", "no"]),
)
def test_a_question_is_written_whole_or_refused(target, layout, policy, routing, kv, block, precision, graphs):
    words = f"policy={policy},routing={routing},kv={kv},block={block},graphs={graphs}"
    try:
        exported = ask(target, "llama3-8b", "4xh100", f"{layout} {precision}", words)
    except Infeasible as refused:
        assert {d.code for d in refused.diagnostics} == {"E001"}
        return
    for name, text in exported.files.items():
        if name.endswith(".yaml"):
            assert isinstance(yaml.safe_load(text), dict)


def test_the_command_writes_a_configuration_with_its_balancer_and_launch_script(tmp_path, capsys):
    asked = ["llama3-8b", "--on", "4xh100", "--plan", "tp2", "--serve", REQUESTS, "--to", "vllm"]
    assert main(["export", *asked, "--out", str(tmp_path / "mine.yaml")]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.yaml", "nginx.conf", "run.sh"]
    assert "CONFIG=mine.yaml" in (tmp_path / "run.sh").read_text()
    assert "max-model-len" in capsys.readouterr().err


def test_a_plan_file_of_a_serving_search_is_exported_and_options_go_over_it(tmp_path, capsys):
    file = tmp_path / "plan.toml"
    said = f'format_version = 1\nmodel = "llama3-8b"\non = "8xh100"\nserve = "{REQUESTS},budget=4096"\n'
    file.write_text(f"{said}\n[layout]\ndp = 2\n")
    assert main(["export", str(file), "--to", "vllm"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["max-num-batched-tokens"] == 4096
    assert main(["export", str(file), "--plan", "tp2 dp3", "--to", "dynamo"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["spec"]["components"][1]["replicas"] == 3


def test_a_target_that_serves_and_one_that_trains_are_told_apart(capsys):
    question = ["export", "llama3-8b", "--on", "8xh100", "--plan", "tp8"]
    assert main([*question, "--serve", REQUESTS, "--to", "megatron", "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "E002" and "say --train" in error["help"]
    assert main([*question, "--train", "batch=8,seq=128", "--to", "vllm", "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "E002" and "say --serve" in error["help"]


def test_everything_wrong_with_a_serving_question_is_listed_at_once(capsys):
    wrong = ["--serve", "prompt=8,rate=x", "--train", "batch=8,seq=8", "--to", "vlm"]
    assert main(["export", "lama3-8b", "--on", "8xh100", *wrong]) == 2
    err = capsys.readouterr().err
    assert all(f"error[{code}]" in err for code in ("M006", "W002", "W003", "X004", "E002"))


@pytest.mark.parametrize("target", ["vllm"])
def test_vllm_itself_reads_the_file(target, tmp_path):
    pytest.importorskip("vllm", reason="vLLM's wheel is 340 MB and wants a GPU's torch")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    file = tmp_path / "vllm.yaml"
    file.write_text(ask(target, *CASES[target]).text)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    read = parser.parse_args(["serve", "a-model", *parser.load_config_file(str(file))])
    assert (read.tensor_parallel_size, read.max_num_seqs) == (2, 64)


def test_sglang_itself_reads_the_file(tmp_path):
    pytest.importorskip("sglang.srt.server_args", reason="SGLang's wheel brings CUDA along")
    from sglang.srt.server_args import prepare_server_args

    file = tmp_path / "sglang.yaml"
    file.write_text(ask("sglang", *CASES["sglang"]).text)
    read = prepare_server_args(["--model-path", "a-model", "--config", str(file)])
    assert (read.tp_size, read.max_running_requests) == (2, 64)


APART = "prefill=[tp2 dp2 on=0:4] + decode=[dp4 on=4:8] prefill->decode:kv"


def test_pools_apart_are_components_of_their_role_with_their_own_layout():
    manifest = yaml.safe_load(ask("dynamo", "llama3-8b", "8xh100", APART, "routing=least-loaded").text)
    front, prefill, decode = manifest["spec"]["components"]
    assert front["podTemplate"]["spec"]["containers"][0]["env"][0]["value"] == "least-loaded"
    for one, kind, replicas, tp in ((prefill, "prefill", 2, 2), (decode, "decode", 4, 1)):
        assert (one["name"], one["type"], one["replicas"]) == (kind, kind, replicas)
        (container,) = one["podTemplate"]["spec"]["containers"]
        assert {f"--tensor-parallel-size={tp}", f"--disaggregation-mode={kind}"} <= set(container["args"])
        assert container["resources"]["limits"] == {"nvidia.com/gpu": str(tp)}
        assert any(flag.startswith("--kv-transfer-config={") for flag in container["args"])


def test_pools_apart_are_refused_by_who_has_no_form_for_them():
    with pytest.raises(Infeasible) as refused:
        ask("sglang", "llama3-8b", "8xh100", APART, "")
    assert "cannot express 2 pools" in str(refused.value) and "dynamo" in refused.value.diagnostics[0].help
    with pytest.raises(Infeasible, match="cannot express block=24"):
        ask("dynamo", "llama3-8b", "8xh100", APART, "block=24")

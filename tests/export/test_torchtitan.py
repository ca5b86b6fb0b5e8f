"""TorchTitan's Python form: its fields, its degrees, and TorchTitan's own reader where it is installed."""

import ast
import runpy
import sys

import pytest

from meshwright import catalog, schedules
from meshwright.answer.predict import predict
from meshwright.errors import Infeasible
from meshwright.export import target
from meshwright.plan import parse
from meshwright.schedules.actions import BW, Actions, B, F, W
from meshwright.spec import cluster, workload
from meshwright.spec.model import load
from tests.export.questions import ask

#: model, cluster, workload, plan -> the degrees that TorchTitan then has: replicate, shard, cp, tp, pp, ep.
CASES = {
    ("llama3-8b", "8xh100", "batch=64,seq=8192", "fsdp"): (1, 8, 1, 1, 1, 1),
    ("llama3-8b", "8xh100", "batch=64,seq=8192", "fsdp operators"): (1, 8, 1, 1, 1, 1),
    ("qwen3-8b", "32xh100", "batch=256,seq=4096", "dp32"): (32, 1, 1, 1, 1, 1),
    ("llama3-405b", "16384xh100", "batch=2048,seq=8192,tokens=15t", "tp8 pp16 vpp2 hsdp64 full"): (2, 64, 1, 8, 16, 1),
    ("llama3-70b", "64xh100", "batch=256,seq=8192", "tp8 pp4 fsdp stages=19,20,20,21"): (1, 2, 1, 8, 4, 1),
    ("llama3-8b", "64xh100", "batch=64,seq=8192", "tp2 cp2 pp2 allgather zero2 zb-h1"): (1, 8, 2, 2, 2, 1),
    ("deepseek-v3", "1024xh100", "batch=4096,seq=4096", "pp8 zb-v ep16 fsdp etp1"): (1, 128, 1, 1, 8, 16),
    ("qwen3-30b-a3b", "64xh100", "batch=512,seq=4096", "tp2 fsdp full"): (1, 32, 1, 2, 1, 1),
    ("gpt-oss-20b", "32xh100", "batch=256,seq=4096", "cp2 allgather fsdp ep4 etp1"): (1, 16, 2, 1, 1, 4),
    ("llama3-70b", "64xh100", "batch=256,seq=4096", "tp8 pp2 zeropp fsdp overlap=dp,tp,pp"): (1, 4, 1, 8, 2, 1),
}


def cases():
    return [pytest.param(*question, id=" ".join(question[::3])) for question in CASES]


def calls(text):
    """Every call of the module with the names of its arguments: ``TrainingConfig`` -> ``{"seq_len", ...}``."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.keywords:
            name = ast.unparse(node.func)
            found.setdefault(name, {})
            found[name] |= {k.arg: k.value for k in node.keywords}
    return found


@pytest.mark.parametrize("question", [*CASES, ("llama3-8b", "8xb200", "batch=64,seq=8192", "fsdp mxfp8"),
    ("llama3-8b", "8xb200", "batch=64,seq=8192,optimizer=adam", "fsdp nvfp4"),
    ("qwen3-30b-a3b", "64xh100", "batch=512,seq=4096", "fsdp fp8 ep8")])  # fmt: skip
def test_every_argument_is_a_field_of_the_named_version(question):
    keys = target("torchtitan").keys
    for name, arguments in calls(ask("torchtitan", *question).text).items():
        assert set(arguments) <= set(keys[name]), name


@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_the_degrees_read_back_are_those_of_the_plan(model, on, train, words):
    found = calls(ask("torchtitan", model, on, train, words).text)["ParallelismConfig"]
    got = {name: ast.literal_eval(value) for name, value in found.items() if name != "module_fqns_per_model_part"}
    names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
    degrees = [got[f"{name}_degree"] for name in (*names, "pipeline_parallel", "expert_parallel")]
    assert tuple(degrees) == CASES[model, on, train, words]


def test_the_header_and_the_module_name_the_version():
    import meshwright.export.torchtitan as exporter

    version = target("torchtitan").version
    assert f"TorchTitan {version}" in exporter.__doc__
    assert ask("torchtitan", "llama3-8b", "8xh100", "batch=64,seq=8192", "fsdp").text.startswith(
        f'"""Configuration for TorchTitan {version}, written by Meshwright.'
    )


def test_a_rank_takes_its_share_into_a_pipeline_and_a_microbatch_without_one():
    # batch 256 over dp 8: 32 sequences a rank, in microbatches of 2
    piped = calls(ask("torchtitan", "llama3-8b", "16xh100", "batch=256,seq=2048", "pp2 fsdp mb2").text)
    alone = calls(ask("torchtitan", "llama3-8b", "8xh100", "batch=256,seq=2048", "fsdp mb2").text)
    assert ast.literal_eval(piped["TrainingConfig"]["local_batch_size"]) == 32
    assert ast.literal_eval(piped["ParallelismConfig"]["pipeline_parallel_microbatch_size"]) == 2
    assert ast.literal_eval(alone["TrainingConfig"]["local_batch_size"]) == 2


def test_uneven_stages_are_module_names_in_stage_order(tmp_path):
    text = ask("torchtitan", "llama3-8b", "16xh100", "batch=64,seq=2048", "pp2 vpp2 fsdp stages=7,9,9,7").text
    (tmp_path / "stages.py").write_text(text[text.index("LAYERS_PER_STAGE") : text.index("def planned")])
    parts = runpy.run_path(str(tmp_path / "stages.py"))["modules_per_stage"]()
    assert parts[0] == ["tok_embeddings", *(f"layers.{i}" for i in range(7))]
    assert parts[1] == [f"layers.{i}" for i in range(7, 16)]
    assert parts[3] == [*(f"layers.{i}" for i in range(25, 32)), "norm", "lm_head"]


def read_csv(text):
    """The actions of a written-out order, as `Actions`."""
    kinds = {"F": F, "I": B, "W": W, "B": BW}
    rows = []
    for line in text.splitlines():
        words = [word for word in line.split(",") if word]
        cut = [next(i for i, letter in enumerate(word) if letter in kinds) for word in words]
        rows.append([(kinds[w[c]], int(w[:c]), int(w[c + 1 :])) for w, c in zip(words, cut)])
    columns = [[[action[field] for action in row] for row in rows] for field in range(3)]
    return columns


@pytest.mark.parametrize("words", ["zb-h1", "zb-h2", "zb-auto", "2bp:1f1b", "zeropp vpp2"])
def test_an_order_without_a_name_is_written_out_and_reads_back(words):
    exported = ask("torchtitan", "llama3-8b", "16xh100", "batch=64,seq=2048", f"pp4 fsdp {words}")
    assert list(exported.files) == ["meshwright_config.py", "schedule.csv", "run.sh"]
    plan = parse(f"pp4 {words}")
    want = schedules.build(plan.pipeline.schedule, 4, 16, plan.pipeline.vpp)
    kind, stage, microbatch = read_csv(exported.files["schedule.csv"])
    read = Actions.of(want.name, kind, stage, microbatch, num_stages=want.num_stages, num_microbatches=16)
    assert read == want


@pytest.mark.parametrize("words", ["zb-h1", "2bp:1f1b", "zeropp vpp2"])
def test_torch_itself_reads_the_written_order_and_finds_its_sends(words):
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is not installed")
    text = ask("torchtitan", "llama3-8b", "16xh100", "batch=64,seq=2048", f"pp4 fsdp {words}").files["schedule.csv"]
    order = {
        rank: [pipelining._Action.from_str(word) for word in line.split(",")]
        for rank, line in enumerate(text.splitlines())
    }
    stages = 4 * parse(f"pp4 {words}").pipeline.vpp
    sent = pipelining._add_send_recv(order, stage_to_rank=lambda s: s % 4, num_stages=stages)
    forwards = [a for rank in sent.values() for a in rank if a.computation_type == pipelining.SEND_F]
    assert len(forwards) == (stages - 1) * 16


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_torchtitan_itself_reads_the_configuration(model, on, train, words, tmp_path, monkeypatch):
    titan = pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    if not getattr(titan, "__version__", "0.3").startswith("0.3"):
        pytest.skip("torchtitan 0.3 reads Python configurations")
    config, dims = pytest.importorskip("torchtitan.config"), pytest.importorskip("torchtitan.distributed")
    exported = ask("torchtitan", model, on, train, words)
    for name, text in exported.files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "meshwright_config", raising=False)
    read = config.ConfigManager().parse_args(["--module", "meshwright_config", "--config", "planned"])
    read.model_spec.model.update_from_config(config=read)
    replicate, shard, cp, tp, pp, ep = CASES[model, on, train, words]
    mesh = dims.ParallelDims.from_config(read.parallelism, replicate * shard * cp * tp * pp)
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, mesh.pp, mesh.ep) == (replicate, shard, cp, tp, pp, ep)


def test_its_own_models_are_found_by_their_exact_size():
    about = target("torchtitan")
    found = {name: known for name in catalog.names("models") if (known := about.find(load(name)))}
    assert {(known.module, known.flavor) for known in found.values()} == {(m.module, m.flavor) for m in about.models}
    assert (found["llama3.1-405b"].flavor, found["deepseek-v3"].flavor) == ("405B", "671B")
    assert "llama2-70b" not in found


def test_zero1_under_a_pipeline_is_what_fsdp2_does_there():
    """TorchTitan's FSDP2 under a pipeline: parameters gathered once a step, gradients whole until the last microbatch
    (torch.distributed.pipelining reduces them in one action behind the last one), so the same step as zero1."""
    question = "llama3-70b", "64xh100", "batch=128,seq=8192"
    texts = [ask("torchtitan", *question, f"tp4 pp4 {zero}").text for zero in ("zero1", "fsdp")]
    one, whole = (calls(text)["ParallelismConfig"] for text in texts)
    assert ast.literal_eval(one.pop("fsdp_reshard_after_forward")) == "never"
    assert ast.literal_eval(whole.pop("fsdp_reshard_after_forward")) == "default"  # which is never under a pipeline
    names = [name for name in one if name != "module_fqns_per_model_part"]
    assert [ast.literal_eval(one[name]) for name in names] == [ast.literal_eval(whole[name]) for name in names]
    nouns = load(question[0]), cluster.load(question[1]), workload.parse(question[2])
    steps = [predict(*nouns, parse(f"tp4 pp4 {zero}"), detail=False) for zero in ("zero1", "fsdp")]
    assert steps[0].step_time_s == pytest.approx(steps[1].step_time_s, rel=1e-9)
    peaks = [max(rank.peak_bytes for rank in step.memory) for step in steps]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-6)


def test_zero1_without_a_pipeline_has_no_setting():
    with pytest.raises(Infeasible, match="zero1"):
        ask("torchtitan", "llama3-8b", "8xh100", "batch=64,seq=8192", "zero1")


@pytest.mark.parametrize(("vpp", "again"), [(2, False), (3, False), (4, True)])
def test_stages_beyond_three_a_rank_are_gathered_again_and_it_is_said(vpp, again):
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is not installed")
    order = schedules.build("interleaved", 4, 16, vpp)
    mine = slice(int(order.rank_ptr[0]), int(order.rank_ptr[1]))
    passes = zip(*(column[mine].tolist() for column in (order.stage, order.kind, order.microbatch)))
    said = [pipelining._Action.from_str(f"{stage}{'FIWB'[kind]}{mb}") for stage, kind, mb in passes]
    gathers = [a for a in pipelining._add_unshard_reshard(said) if a.computation_type == pipelining.UNSHARD]
    assert (len(gathers) > vpp) is again
    notes = ask("torchtitan", "llama3-70b", "64xh100", "batch=512,seq=8192", f"tp4 pp4 vpp{vpp} fsdp").notes
    assert any("gathers again" in note for note in notes) is again

"""TorchTitan's TOML form: its keys, its degrees, and TorchTitan's own reader where that version is installed."""

import tomllib

import pytest

from meshwright.export import target
from tests.export.questions import ask

CASES = {
    ("llama3-8b", "8xh100", "batch=64,seq=8192", "fsdp full"): (1, 8, 1, 1, 1, 1),
    ("llama3-8b", "8xh100", "batch=64,seq=8192", "dp8"): (8, 1, 1, 1, 1, 1),
    ("llama3-70b", "256xh100", "batch=512,seq=8192", "tp8 pp4 zb-h1 fsdp stages=19,20,20,21"): (1, 8, 1, 8, 4, 1),
    ("llama3-405b", "1024xh100", "batch=512,seq=8192", "tp8 pp8 vpp2 hsdp8 cp2 ring full"): (2, 4, 2, 8, 8, 1),
    ("deepseek-v3", "1024xh100", "batch=4096,seq=4096,tokens=15t", "pp8 dualpipev ep16 fsdp tp2"): (1, 64, 1, 2, 8, 16),
    ("qwen3-30b-a3b", "64xh100", "batch=512,seq=4096", "fsdp ep8 fp8"): (1, 64, 1, 1, 1, 8),
    ("llama3-8b", "8xb200", "batch=64,seq=8192", "tp8 grads=bf16 master=none moments=bf16"): (1, 1, 1, 8, 1, 1),
}


def cases():
    return [pytest.param(*question, id=" ".join(question[::3])) for question in CASES]


def tables(table, path=""):
    """(name of a table, its keys) of every table that holds values."""
    values = {key for key, value in table.items() if not isinstance(value, dict)}
    if values:
        yield path, values
    for key, value in table.items():
        if isinstance(value, dict):
            yield from tables(value, f"{path}.{key}".lstrip("."))


def read(*question):
    return tomllib.loads(ask("torchtitan-toml", *question).text)


@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_every_key_is_one_of_the_named_version(model, on, train, words):
    keys = target("torchtitan-toml").keys
    for name, found in tables(read(model, on, train, words)):
        assert found <= set(keys[name]), name


@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_the_degrees_read_back_are_those_of_the_plan(model, on, train, words):
    table = read(model, on, train, words)["parallelism"]
    names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
    degrees = [table[f"{name}_degree"] for name in (*names, "pipeline_parallel", "expert_parallel")]
    assert tuple(degrees) == CASES[model, on, train, words]


def test_recompute_by_operators_is_its_selective_policy():
    question = ("llama3-8b", "8xh100", "batch=64,seq=8192")
    wanted = {"mode": "selective", "selective_ac_option": "op"}
    assert read(*question, "fsdp operators")["activation_checkpoint"] == wanted
    assert read(*question, "fsdp full")["activation_checkpoint"] == {"mode": "full"}


def test_the_header_and_the_module_name_the_version():
    import meshwright.export.torchtitan_toml as exporter

    version = target("torchtitan-toml").version
    assert f"TorchTitan {version}" in exporter.__doc__
    assert (
        f"# Configuration for TorchTitan {version}, written by Meshwright."
        in ask("torchtitan-toml", "llama3-8b", "8xh100", "batch=64,seq=8192", "fsdp").text
    )


def test_uneven_stages_are_lists_of_modules():
    table = read("llama3-70b", "256xh100", "batch=512,seq=8192", "tp8 pp4 fsdp stages=19,20,20,21")
    parts = table["parallelism"]["module_fqns_per_model_part"]
    assert [len(part) for part in parts] == [1 + 19, 20, 20, 21 + 2]
    assert (parts[0][0], parts[-1][-2:]) == ("tok_embeddings", ["norm", "output"])


def test_a_ring_is_made_of_all_to_alls():
    assert read("llama3-8b", "8xh100", "batch=64,seq=8192", "fsdp cp2 ring")["parallelism"][
        "context_parallel_rotate_method"
    ] == "alltoall"  # fmt: skip


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_torchtitan_itself_reads_the_file(model, on, train, words, tmp_path):
    jobs = pytest.importorskip("torchtitan.config.job_config", reason="torchtitan 0.2 is not installed")
    manager = pytest.importorskip("torchtitan.config.manager")
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims")
    file = tmp_path / "meshwright.toml"
    file.write_text(ask("torchtitan-toml", model, on, train, words).text)
    job = manager.ConfigManager().parse_args(["--job.config_file", str(file)])
    assert isinstance(job, jobs.JobConfig)
    found, (replicate, shard, cp, tp, pp, ep) = job.parallelism, CASES[model, on, train, words]
    mesh = dims.ParallelDims(
        dp_replicate=found.data_parallel_replicate_degree,
        dp_shard=found.data_parallel_shard_degree,
        cp=found.context_parallel_degree,
        tp=found.tensor_parallel_degree,
        pp=found.pipeline_parallel_degree,
        ep=found.expert_parallel_degree,
        etp=found.expert_tensor_parallel_degree,
        world_size=replicate * shard * cp * tp * pp,
    )
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.ep) == (replicate, shard, ep)

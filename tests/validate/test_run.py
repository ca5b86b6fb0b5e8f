"""A validation from tables to figures: nothing is fitted, nothing but the scorer sees what was measured, and every
row is in every output."""

import csv
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.calibrate import rows as kernel_rows
from meshwright.calibrate import samples
from meshwright.calibrate import tables as kernel_tables
from meshwright.cli import main
from meshwright.cost import fitted, standard
from meshwright.spec.cluster import load_device
from meshwright.validate import ops, rows
from meshwright.validate.cases import unknown_case
from meshwright.validate.faults import FAULTS
from meshwright.validate.measured import ANSWERS
from meshwright.validate.run import to_json, validate
from meshwright.validate.steps import answers
from meshwright.work import Gemm
from tests.validate.samples import collective, gemm, step, table

PREDICTED = ("plan", "assumed", "predicted_s", "low_s", "high_s", "trivial_s", "fits", "allocated_bytes", "unsupported")
KEYS = {
    *("rows", "mean_ape", "median_ape", "p90_ape", "bias", "trivial_mean_ape", "spearman", "regret_mean"),
    *("oom_rows", "oom_accuracy", "oom_recall", "memory_mean_ape", "coverage80"),
}


@pytest.fixture
def folder(tmp_path):
    """Six plans of one group, one of them out of memory, one faulty; one row nobody can predict; two op tables."""
    plans = [(1, 8, 4.0), (2, 4, 0.5), (2, 4, 0.6), (4, 2, 0.7), (8, 1, 0.9), (1, 8, 0.55)]
    steps = [
        step(id=f"a:{i}", tp=tp, dp=dp, micro_batch_seqs=1 + i % 2, step_time_s=t)
        for i, (tp, dp, t) in enumerate(plans)
    ]
    steps[0]["flags"] = "slow_outlier"
    steps.append(step(id="a:6", outcome="oom", step_time_s="", peak_memory_gb="", micro_batch_seqs=16))
    steps.append(step(id="a:7", notes="Mamba"))
    steps.append(step(id="a:8", micro_batch_seqs="", recompute="unknown", memory_kind="reserved"))
    table(tmp_path, "training_steps", steps, packed=True)
    table(tmp_path, "ops_gemm", [gemm(), gemm(m=512, latency_us=40), gemm(dtype="int2_wo")])
    table(tmp_path, "collectives", [collective(), collective(nodes=2, gpus=16, flag="suspect_slow_network")])
    return tmp_path


@pytest.fixture
def outputs(folder, capsys):
    """(JSON, rows of the CSV, report) of one run of the command."""
    argv = ["--data", str(folder), "--rows", str(folder / "rows.out"), "--report", str(folder / "report.html")]
    assert main(["validate", *argv, "--markdown", str(folder / "page.md"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "rows in" in err
    with (folder / "rows.out").open(newline="") as file:
        return json.loads(out), list(csv.DictReader(file)), (folder / "report.html").read_text()


def test_json_is_tables_of_sources_of_figures(outputs):
    found, _, _ = outputs
    steps = found["training_steps"]
    assert list(steps) == ["hand/h100_sxm", "hand/h100_sxm/flagged", "all"]
    assert steps["all"].keys() >= KEYS
    assert steps["all"] == steps["hand/h100_sxm"]
    assert (steps["all"]["rows"], steps["all"]["timed_rows"], steps["all"]["unsupported"]) == (8, 6, 1)
    assert steps["all"]["groups"] == 1
    assert steps["all"]["oom_rows"] == 1
    assert steps["hand/h100_sxm/flagged"]["timed_rows"] == 1
    assert "spearman" not in found["ops_gemm"]["all"]
    assert "trivial_mean_ape" not in found["collectives"]["all"]
    assert found["collectives"]["all"]["timed_rows"] == 1
    assert found["excluded_from_time"] == {name: FAULTS[name] for name in ("training_steps", "collectives")}
    assert found["unsupported"]["ops_gemm"] == {"V010: int2_wo is not computed in here": 1}
    assert found["format_version"] == 1


def test_figures_are_fractions(outputs):
    steps = outputs[0]["training_steps"]["all"]
    for name in ("coverage80", "oom_accuracy", "oom_recall"):
        assert 0 <= steps[name] <= 1
    assert steps["mean_ape"] < 5


def test_every_row_of_every_table_is_in_the_rows(outputs):
    _, lines, _ = outputs
    assert list(lines[0]) == list(rows.COLUMNS)
    assert [line["id"] for line in lines] == [
        *(f"a:{i}" for i in range(9)),
        *(f"ops_gemm:{i}" for i in (2, 3, 4)),
        *(f"collectives:{i}" for i in (2, 3)),
    ]
    by_id = {line["id"]: line for line in lines}
    assert by_id["a:1"]["plan"].startswith("tp2 dp4 mb2")
    assert by_id["a:0"]["scored_time"] == "False"
    assert by_id["a:7"]["unsupported"].startswith("V010")
    assert by_id["a:7"]["predicted_s"] == ""
    assert by_id["a:8"]["assumed"] == "microbatch;recompute"
    assert float(by_id["a:1"]["low_s"]) < float(by_id["a:1"]["predicted_s"]) < float(by_id["a:1"]["high_s"])
    assert "m4096 n4096 k4096" in by_id["ops_gemm:2"]["shape"]
    assert by_id["collectives:3"]["flags"] == "suspect_slow_network"


def test_the_figures_follow_from_the_rows(outputs):
    found, lines, _ = outputs
    timed = [line for line in lines if line["table"] == "training_steps" and line["scored_time"] == "True"]
    errors = [abs(float(line["predicted_s"]) / float(line["measured_s"]) - 1) for line in timed]
    assert found["training_steps"]["all"]["mean_ape"] == pytest.approx(sum(errors) / len(errors), rel=1e-6)


class Loads(HTMLParser):
    """What a page would load, and whether its elements are closed."""

    def __init__(self, source):
        super().__init__()
        self.loaded, self.open = [], []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.loaded += [found[name] for name in ("src", "href", "xlink:href") if name in found]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_closed_page_that_loads_nothing(outputs):
    page = Loads(outputs[2])
    assert page.open == []
    assert [name for name in page.loaded if not name.startswith(("#", "data:,"))] == []
    assert "default-src 'none'" in outputs[2]


def test_the_report_shows_figures_residuals_coverage_what_is_not_supported_and_the_faults(outputs):
    report = outputs[2]
    for said in ("hand/h100_sxm/flagged", "Measured against predicted time", "Residuals against each variable"):
        assert said in report
    assert "not modelled" in report
    for reason in FAULTS["training_steps"].values():
        assert reason.replace("'", "&#39;") in report


def test_the_page_of_the_book_holds_figures_and_constants(outputs, folder):
    page = (folder / "page.md").read_text()
    for heading in ("# Accuracy", "## training_steps", "## Known faults", "## Noise floor", "## Known gaps"):
        assert heading in page
    for heading in ("## Constants of frameworks", "## Constants of kernels", "## Constants of networks"):
        assert heading in page


def predictions(folder):
    lines = []
    validate(folder, standard, sink=lines.append)
    return [{name: line.get(name) for name in PREDICTED} for line in lines]


def test_a_validation_is_repeatable(folder):
    assert predictions(folder) == predictions(folder)


def test_predictions_are_the_same_whatever_was_measured(folder):
    told = predictions(folder)
    asked = [step(id="a:8", micro_batch_seqs="", recompute="unknown"), step()]
    blank = [row | dict.fromkeys(ANSWERS, "") for row in asked]
    assert [a for _, a in answers(asked, standard)] == [a for _, a in answers(blank, standard)]
    for name, make in (("ops_gemm", gemm), ("collectives", collective)):
        (folder / f"{name}.csv").unlink()
        slow = float(make()["latency_us"]) * 3
        table(folder, name, [make(latency_us=slow)])
    again = predictions(folder)
    assert again[:9] == told[:9]
    assert [line["predicted_s"] for line in again[9:]] == [told[9]["predicted_s"], told[12]["predicted_s"]]


def test_a_row_is_predicted_alike_in_any_company(folder, tmp_path_factory):
    alone = tmp_path_factory.mktemp("alone")
    table(alone, "training_steps", [step(id="a:3", tp=4, dp=2, step_time_s=0.7)])
    (one,) = predictions(alone)
    assert one["plan"].startswith("tp4 dp2")
    assert one in predictions(folder)


def test_kernels_are_priced_in_the_setting_they_were_measured_in():
    def setting(op, engine=False):
        (link,) = ops._links(kernel_rows.MeasuredWork(op, "bf16", (), (), 1.0, (), engine=engine))
        assert isinstance(link, fitted.Fitted)
        return link._serving, link._flash

    # Engines attend with a cache and run their experts in one kernel; products are the same everywhere.
    assert setting("prefill") == setting("decode") == setting("grouped_gemm") == (True, 0)
    assert setting("flash_fwd") == setting("flash_bwd") == (False, 2)
    assert setting("gemm") == (False, 0) and setting("gemm", engine=True) == (True, 0)


def test_a_row_of_experts_is_priced_by_the_curve_fitted_to_such_rows():
    text = {"source": "aiconfigurator", "hardware": "h100_sxm", "backend": "trtllm", "dtype": "bf16"}
    text |= {"gated": "True", "distribution": "balanced", "kernel": "", "backend_version": "1"}
    sizes = {"tokens": 4096.0, "hidden": 4096.0, "ffn": 14336.0, "experts": 8.0, "top_k": 2.0, "tp": 1.0, "ep": 1.0}
    one = kernel_tables.TableRow(2, text, sizes | {"latency_us": 3000.0})
    device = load_device("h100_sxm")
    found = kernel_rows.measured("ops_moe", one)
    told = [ops.price(kernel, device, ops._links(found)) for kernel in found.kernels]
    assert all("h100_sxm grouped_gemm bf16" in estimate.source for estimate in told)
    # What a curve is fitted to are the points the link asks it for.
    sample = samples._sample(device, found.op, found.dtype, [(one, found)], kernel_tables.Faults(Path("ops_moe.csv")))
    asked = [fitted.point(kernel, serving=True) for kernel in found.kernels]
    assert {point.ops for point in asked} == {("grouped_gemm",)}
    assert [tuple(points[0]) for points in sample.points] == [point.x for point in asked]


def test_one_row_in_twenty_is_predicted_without_its_device_too(tmp_path):
    table(tmp_path, "ops_gemm", [gemm(backend="sglang") for _ in range(41)])
    own, left_out = validate(tmp_path, standard)
    assert (own.name, left_out.name) == ("ops_gemm", "ops_gemm_left_out")
    assert (own.metrics["all"]["rows"], left_out.metrics["all"]["rows"]) == (41, 3)
    work, h100 = Gemm(m=4096, n=4096, k=4096), load_device("h100_sxm")
    known, unknown = (fitted.link(serving=True, without=name)(work, h100) for name in ("", "h100_sxm"))
    assert "carried to h100_sxm" in unknown.source and known.seconds != unknown.seconds
    for made, estimate in ((own, known), (left_out, unknown)):
        assert {s.time[1] for s in made.scored} == {estimate.seconds}


SCAN = {
    "source": "hand",
    "hardware": "h100_sxm",
    "backend": "vllm",
    "backend_version": "0.24.0",
    "dtype": "bf16",
    "op": "gdn",
    "kernel": "chunk_gated_delta_rule_flashinfer",
    "phase": "prefill",
    "batch": "4",
    "seq_len": "1024",
    "num_k_heads": "16",
    "num_v_heads": "32",
    "head_k_dim": "128",
    "head_v_dim": "128",
    "d_conv": "4",
    "d_state": "",
    "n_groups": "",
    "latency_us": "66.4",
}
LATENT = {
    "source": "hand",
    "hardware": "h100_sxm",
    "backend": "trtllm",
    "backend_version": "1.3",
    "scope": "kernel",
    "phase": "prefill",
    "dtype": "bf16",
    "kv_dtype": "bf16",
    "batch": "1",
    "heads": "32",
    "kv_len": "8192",
    "kv_lora_rank": "512",
    "qk_nope_head_dim": "128",
    "qk_rope_head_dim": "64",
    "v_head_dim": "128",
    "latency_us": "1211.7",
}


def test_scans_and_latent_attention_are_tables_of_validation_with_their_device_left_out_too(tmp_path):
    table(tmp_path, "ops_ssm", [SCAN, SCAN | {"op": "kda", "kernel": "chunk_kda"}])
    table(tmp_path, "ops_mla", [LATENT, LATENT | {"scope": "module"}])
    found = {one.name: one for one in validate(tmp_path, standard)}
    assert list(found) == ["ops_mla", "ops_mla_left_out", "ops_ssm", "ops_ssm_left_out"]
    for name, refused in (("ops_ssm", "kda chunk_kda bf16 prefill"), ("ops_mla", "module bf16 prefill")):
        assert found[name].metrics["all"]["rows"] == found[f"{name}_left_out"].metrics["all"]["rows"] == 1
        assert found[name].metrics["all"]["mean_ape"] < 0.15 < found[name].metrics["all"]["roofline_mean_ape"]
        assert found[name].reasons() == [(f"V010: {refused} is not computed in here", 1)]


def test_an_engines_all_reduce_is_another_kernel_than_nccls(tmp_path):
    table(
        tmp_path, "collectives", [collective(bytes=65536), collective(bytes=65536, library="vllm-custom-allreduce 1")]
    )
    nccl, vllm = predictions(tmp_path)
    assert vllm["predicted_s"] < nccl["predicted_s"]


def test_an_interrupted_run_leaves_no_file(folder):
    target = folder / "rows.out"
    with pytest.raises(KeyboardInterrupt), rows.writer(target) as sink:
        sink({"table": "training_steps", "id": "a:0"})
        raise KeyboardInterrupt
    assert not target.exists()
    assert [f.name for f in folder.iterdir() if f.name.endswith(".part")] == []


def test_an_earlier_file_stays_when_a_run_fails(folder):
    target = folder / "rows.out"
    target.write_text("earlier")
    (folder / "ops_gemm.csv").write_text("not,a,table\n")
    assert main(["validate", "--data", str(folder), "--rows", str(target)]) == 2
    assert target.read_text() == "earlier"


def test_without_a_folder_the_command_says_what_is_missing(capsys):
    assert main(["validate"]) == 2
    assert "--data" in capsys.readouterr().err


def test_progress_is_told_of_every_table_and_its_end(folder):
    said = []
    validate(folder, standard, progress=lambda *now: said.append(now))
    assert [now for now in said if now[1] == now[2]] == [
        ("training_steps", 9, 9),
        ("ops_gemm", 3, 3),
        ("collectives", 2, 2),
    ]


KERNELS = ("ops_gemm", "ops_attention", "ops_mla", "ops_moe", "ops_ssm")


def test_the_whole_tables(data_dir):
    lines = []
    found = to_json(validate(data_dir, standard, sink=lines.append))
    steps = found["training_steps"]["all"]
    counted = {name: sum(line["table"] == name for line in lines) for name in found if isinstance(found[name], dict)}
    for name in ("training_steps", *KERNELS, "collectives"):
        assert found[name]["all"]["rows"] + found[name]["all"]["unsupported"] == counted[name]
    assert steps["unsupported"] < 0.05 * counted["training_steps"]
    assert steps["mean_ape"] < steps["trivial_mean_ape"]
    for name in KERNELS:
        assert found[name]["all"]["median_ape"] < found[name]["all"]["roofline_median_ape"]


def test_steps_of_fine_tuning_are_a_table_of_their_own(tmp_path):
    table(tmp_path, "finetune_steps", [step(phase="qlora", flags="nf4_base", notes="LoRA r=16", tp=1, dp=8)])
    named, unnamed = validate(tmp_path, standard)
    assert (named.name, named.metrics["all"]["rows"], named.unsupported) == ("finetune_steps", 1, ())
    assert (unnamed.name, unnamed.metrics["all"]["rows"]) == ("finetune_steps_unknown", 1)


def test_steps_are_asked_again_as_of_software_that_nobody_knows(tmp_path):
    """The name is withheld, so that the middle of the others answers; a row without a known name is not asked twice."""
    table(tmp_path, "training_steps", [step(framework="nanotron"), step(id="a:1", framework="somebody's trainer")])
    _, unknown = validate(tmp_path, standard)
    (left_out,) = unknown.scored
    without = frozenset({"nanotron", "nanotron-slow-steps"})
    default = next(answers([step()], standard, lambda row: unknown_case(row, without)))[1]
    assert (left_out.id, left_out.time[1]) == ("a:0", default.step_s)
    assert left_out.time[1] > next(answers([step(framework="fused")], standard))[1].step_s


def test_the_trivial_formula_knows_recomputation_and_a_frozen_base():
    """6 N D with everything saved, 8 where all is recomputed, 4 over a frozen base."""
    asked = {"tp": 1, "pp": 1, "dp": 8}
    plain, full, lora = (
        next(answers([step(**asked, **changed)], standard))[1].trivial_s
        for changed in ({"recompute": "none"}, {"recompute": "full"}, {"recompute": "none", "phase": "lora"})
    )
    assert (full / plain, lora / plain) == pytest.approx((8 / 6, 4 / 6))


def test_a_jobs_own_network_is_left_unsaid_in_a_table_of_its_own(tmp_path):
    """What a job measured of its rings is an input nobody has before renting: the same rows are asked without it."""
    row = step(framework="nanotron", num_gpus="16", dp="8", network="8 x 400 Gb/s")
    table(tmp_path, "training_steps", [row | {"notes": "busbw GB/s in job: AR=30 AG=28 RS=29"}, row | {"id": "a:1"}])
    known, _, unsaid = validate(tmp_path, standard)
    assert [s.id for s in unsaid.scored] == ["a:0"]
    assert unsaid.scored[0].time[1] != known.scored[0].time[1]
    assert unsaid.scored[0].width == pytest.approx(known.scored[1].width)

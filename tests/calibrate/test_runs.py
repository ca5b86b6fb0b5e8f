"""A profile from a user's own runs, against runs that a known profile made; and logs in the frameworks' own words."""

import json
from math import expm1, log

import msgspec
import numpy as np
import pytest

from meshwright.answer.rank_memory import OVERHEAD, rank_memory
from meshwright.calibrate import logs, runs
from meshwright.calibrate.framework import sharing
from meshwright.calibrate.runs_memory import peak_errors
from meshwright.calibrate.runs_words import WORDS, having, likely, open_words
from meshwright.cli import main
from meshwright.cost import Framework, load_framework, standard
from meshwright.cost.framework import Defaults
from meshwright.errors import MeshwrightError
from meshwright.plan import parse as parse_plan
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse as parse_train

PLANS = (
    "dp8 mb1 zero1 full gather=ahead",
    "dp8 mb2 zero1 full gather=ahead",
    "tp2 dp4 mb2 zero1 gather=ahead",
    "tp4 dp2 mb1 zero1 gather=ahead",
    "fsdp mb1 full",
    "pp2 dp4 mb1",
)
HEAD = "model,on,train,plan,step_time_s\n"
TRAIN = "batch=32,seq=2048"


def seconds(plan: str, framework: str) -> float:
    cluster = load_cluster("8xh100")
    asked = parse_plan(plan).on(8), load_model("llama3.2-1b"), cluster, parse_train(TRAIN)
    return simulate(*asked, standard(load_framework(framework))).step_time_s


@pytest.fixture
def file(tmp_path):
    """Six runs of a stack whose constants are those of an eager one that was measured."""
    path = tmp_path / "runs.csv"
    lines = [f'llama3.2-1b,8xh100,"{TRAIN}",{plan},{seconds(plan, "torchtitan"):.6f}' for plan in PLANS]
    path.write_text(HEAD + "\n".join(lines) + "\n")
    return path


def test_a_few_runs_of_a_stack_make_a_profile_that_predicts_those_left_out(file):
    """The constants of the stack are not told; with five of six runs the sixth is within 5%, from a base 5% off."""
    base = load_framework("default")
    found, wrong = runs.read(file, base)
    assert (len(found), wrong) == (6, [])
    own = runs.fit(found, base, standard)
    assert own.before > 0.05
    assert own.in_sample < 0.03 and own.left_out < 0.05
    assert own.framework.elementwise_passes > 1.15 * base.elementwise_passes
    assert own.framework.whole_steps and not own.framework.flagged


def test_runs_that_agree_with_the_prior_leave_it_where_it_is(tmp_path):
    path = tmp_path / "runs.csv"
    lines = [f'llama3.2-1b,8xh100,"{TRAIN}",{plan},{seconds(plan, "default"):.6f}' for plan in PLANS[:3]]
    path.write_text(HEAD + "\n".join(lines) + "\n")
    base = load_framework("default")
    own = runs.fit(runs.read(path, base)[0], base, standard).framework
    for name in ("elementwise_passes", "host_us_per_kernel", "host_us_per_pass"):
        assert getattr(own, name) == pytest.approx(getattr(base, name), rel=0.01)


def test_a_stack_is_begun_from_the_kind_that_its_runs_are_evidence_for(file):
    """The runs of an eager stack, which is withheld, from all other known ones; a named profile is not chosen among."""
    found, _ = runs.read(file, load_framework("default"))
    known = runs.known_stacks(without=("torchtitan",))
    assert "torchtitan" not in {f.name for f in known} and "torchtitan-compile" in {f.name for f in known}
    own = runs.fit(found, load_framework("default"), standard, kinds=known, left_out=False)
    assert (own.left_out, own.rows) == (None, ()) and own.in_sample < 0.03
    named = runs.fit(found, load_framework("fused"), standard, left_out=False)
    assert named.framework.source.startswith("fused, updated by 6 runs")


def test_words_that_a_profile_leaves_open_are_those_that_change_it():
    """A name that says a generation of FlashAttention closes that word, unfused attention has none; CUDA graphs are of
    stacks of 8 bits; what a profile has already is not open."""
    base = load_framework("default")
    words = set(WORDS) - {"CUDA graphs"}
    assert set(open_words(base, 16)) == words and set(open_words(base, 8)) == words | {"CUDA graphs"}
    named = msgspec.structs.replace(base, name="default flash 2")
    assert set(open_words(named, 16)) == words - {"first FlashAttention"}
    assert "first FlashAttention" not in open_words(load_framework("unfused"), 16)
    assert not open_words(having(base, frozenset(WORDS)), 8)


def test_a_word_is_as_likely_as_among_the_families_of_the_kind_with_one_more_on_either_side():
    """Two families of 8 bits, one with graphs, and one of 16 bits without, which weighs a tenth: 2 in 4.1."""
    plain, graphed = (Defaults(graphs=graphs) for graphs in (False, True))
    stacks = [
        Framework(name="a", bits=(8,), kernels="fused", pinned=("x",), flagged=False, defaults=graphed),
        Framework(name="b", bits=(8,), kernels="fused", pinned=("x",), flagged=False, defaults=plain),
        Framework(name="c", bits=(16,), kernels="fused", pinned=("x",), flagged=False, defaults=plain),
    ]
    base = load_framework("default")
    assert likely("CUDA graphs", base, 8, stacks) == pytest.approx(2 / 4.1)
    assert likely("first FlashAttention", base, 8, stacks) == 0.5


def test_runs_tell_which_words_a_stack_has_and_words_that_change_none_are_not_asked():
    """Runs made by the middle itself with a word, and without: each is recognised as what it is. Long sequences tell of
    FlashAttention; small layers of 8 bits, which the host issues, of CUDA graphs; large ones of exchanges that hide."""
    base, cluster, model = load_framework("default"), load_cluster("8xh100"), load_model("llama3.2-1b")
    plans = [(words, parse_plan(words).on(8)) for words in ("dp8 mb1 zero1", "tp4 dp2 mb1 zero1", "tp8 mb1")]
    for word, train in (
        ("first FlashAttention", "batch=8,seq=16384"),
        ("CUDA graphs", "batch=8,seq=512,dtype=fp8"),
        ("tensor parallelism's exchanges beside compute", "batch=32,seq=4096"),
    ):
        found = parse_train(train)
        bare = [runs.OwnRun(i, model, cluster, found, plan, 1.0, words) for i, (words, plan) in enumerate(plans)]
        for true in (having(base, frozenset({word})), base):
            off = runs.errors(bare, true, sharing(standard))
            made = [run._replace(seconds=float(np.exp(e))) for run, e in zip(bare, off)]
            kinds = runs.StackKinds(made, base, [], sharing(standard))
            assert word in kinds.words and "tokens sorted in one kernel" not in kinds.words
            assert kinds.likeliest([], [0, 1, 2]).defaults == true.defaults


def test_experts_exchange_inside_a_domain_is_told_by_a_word_of_its_own():
    """All 16 ranks of experts lie in one domain: that their exchange runs beside compute where it leaves a domain says
    nothing of them; that it does so everywhere saves a tenth and more. Runs of such a stack, three of a mixture and
    two without experts, which hold the constants, are recognised by it."""
    base, cluster, train = load_framework("default"), load_cluster("16xgb200"), parse_train("batch=128,seq=4096")
    between, everywhere = (f"experts' exchange {where}beside compute" for where in ("between nodes ", ""))
    asked = [("qwen3-30b-a3b", f"ep16 dp16 mb{mb} zero1") for mb in (2, 4, 8)]
    asked += [("llama3.1-8b", words) for words in ("dp16 mb2 zero1", "tp2 dp8 mb2 zero1")]
    bare = [
        runs.OwnRun(i, load_model(name), cluster, train, parse_plan(words).on(16), 1.0, words)
        for i, (name, words) in enumerate(asked)
    ]
    plain, near, hidden = (
        runs.errors(bare, having(base, frozenset(words)), sharing(standard))
        for words in ((), (between,), (everywhere,))
    )
    assert near == pytest.approx(plain)
    assert (hidden < plain - 0.1).tolist() == [True, True, True, False, False]
    for off, told in ((plain, False), (hidden, True)):
        made = [run._replace(seconds=float(np.exp(e))) for run, e in zip(bare, off)]
        kinds = runs.StackKinds(made, base, [], sharing(standard))
        assert everywhere in kinds.words and between not in kinds.words
        assert ("ep" in kinds.likeliest([], list(range(5))).defaults.overlap) is told


def test_evidence_is_the_error_that_a_kinds_spread_does_not_explain():
    known, none = runs.known_stacks(), np.zeros((3, len(runs.UPDATED)))
    near, far = (load_framework(name) for name in ("megatron-lm", "nanotron"))

    def told(kind, error, before=0.0, slope=none):
        return runs.evidence(runs.Weighed(kind, np.full(3, error), slope, before), known, [0, 1, 2])

    assert told(near, 0.05) > told(far, 0.5)
    # what is likelier before anything is known is taken where the runs say little
    assert told(far, 0.06, before=2.0) > told(near, 0.05)
    # an error along what varies between stacks is explained, the same error in no such direction is not
    along = none.copy()
    along[:, 0] = 1.0
    assert told(far, 0.8, slope=along) > told(near, 0.8)


def test_the_prior_lets_constants_vary_as_known_stacks_do():
    """By hand for two stacks at twice and at four times 50 us a pass, of a base at 50: the variance of the logarithm is
    (0.69^2 + 1.39^2) / 2, that of a constant they all share the least one."""
    base = load_framework("fused")
    known = [msgspec.structs.replace(base, name=str(n), host_us_per_pass=n * base.host_us_per_pass) for n in (2, 4)]
    mean, spread = runs.prior(base, known)
    at = list(runs.UPDATED).index("host_us_per_pass")
    assert mean[at] == pytest.approx(log(base.host_us_per_pass))
    assert spread[at, at] == pytest.approx((log(2) ** 2 + log(4) ** 2) / 2)
    assert spread[0, 0] == pytest.approx(runs.UPDATED["elementwise_passes"] ** 2)


def test_runs_that_state_their_peaks_say_what_their_stack_keeps(tmp_path):
    """Six runs of a stack that keeps 1.6 times what the base does. Copies are between prior and runs; peaks come out
    nearer than under the base."""
    base, path = load_framework("fused"), tmp_path / "runs.csv"
    keeps = standard(msgspec.structs.replace(base, activation_copies=1.6))
    lines = []
    for words in PLANS:
        asked = parse_plan(words).on(8), load_model("llama3.2-1b"), load_cluster("8xh100"), parse_train(TRAIN)
        run = simulate(*asked, keeps)
        peak = max(sum(v for c, v in r.alive.items() if c not in OVERHEAD) for r in rank_memory(run, keeps))
        lines.append(f'llama3.2-1b,8xh100,"{TRAIN}",{words},{run.step_time_s:.6f},{peak / 1e9:.4f},allocated')
    path.write_text(HEAD.strip() + ",peak_memory_gb,memory_kind\n" + "\n".join(lines) + "\n")
    found, _ = runs.read(path, base)
    own = runs.fit(found, base, standard, left_out=False)
    assert base.activation_copies == 1.0 and 1.3 < own.framework.activation_copies <= 1.6
    assert own.framework.memory_sigma < base.memory_sigma
    assert own.peaks < 0.5 * abs(expm1(sum(peak_errors(found, base, standard)) / 6))
    path.write_text(path.read_text().replace("allocated", "nvidia-smi"))
    with pytest.raises(MeshwrightError, match="nvidia-smi"):
        runs.read(path, base)


def test_the_command_writes_a_profile_that_predictions_take(file, tmp_path, capsys):
    out = str(tmp_path / "mine.toml")
    assert main(["calibrate", "--runs", str(file), "--out", out]) == 0
    said = capsys.readouterr().out
    assert "6 runs; default before" in said and "left out" in said
    asked = ["predict", "llama3.2-1b", "--on", "8xh100", "--train", TRAIN, "--plan", PLANS[1], "--json"]
    assert main([*asked, "--framework", out]) == 0
    measured = seconds(PLANS[1], "torchtitan")
    assert json.loads(capsys.readouterr().out)["step_time_s"] == pytest.approx(measured, rel=0.05)
    (tmp_path / "mine.toml").write_text("format_version = 1\nname = 3\n")
    assert main([*asked, "--framework", out]) == 2
    assert "X024" in capsys.readouterr().out


def test_every_row_that_cannot_be_a_run_is_named_and_others_go_on_where_that_is_said(file, capsys):
    good = file.read_text()
    file.write_text(
        good
        + f'llama3.2-1b,8xh100,"{TRAIN}",tp3,1.0\nllama3.2-1b,8xh100,"{TRAIN}",dp8 mb1,0\nx,8xh100,"{TRAIN}",dp8,1\n'
    )
    assert main(["calibrate", "--runs", str(file)]) == 2
    said = capsys.readouterr().err
    for words in ("runs.csv:8", "runs.csv:9", "runs.csv:10", "V008", "step_time_s"):
        assert words in "".join(said.split("\n"))
    assert main(["calibrate", "--runs", str(file), "--keep-good", "--framework", "torchtitan"]) == 0
    assert capsys.readouterr().err.count("left out: ") >= 3


def test_a_file_of_runs_without_its_columns_or_beside_other_tables_is_refused(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    path.write_text("model,on\nllama3.2-1b,8xh100\n")
    assert main(["calibrate", "--runs", str(path)]) == 2
    said = capsys.readouterr().err
    assert "V002" in said and "train, plan, step_time_s or log" in said
    assert main(["calibrate", "--runs", str(path), "--here"]) == 2
    assert "K001" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "framework", "per_step"),
    [
        (
            " iteration 10/ 100 | consumed samples: 320 | elapsed time per iteration (ms): 1250.0 | lr: 1e-4 |",
            "megatron-lm",
            1.25,
        ),
        ("Epoch 0: | 10/100 [00:12, v_num=0, reduced_train_loss=9.1, train_step_timing in s=1.250]", "nemo", 1.25),
        (
            "\x1b[31mstep: 10 \x1b[32mloss: 9.1  memory: 47GiB(49%)  \x1b[34mtps: 6,553.6  tflops: 300\x1b[0m",
            "torchtitan",
            1.25,
        ),
        ("steps: 10 loss: 9.1 iter time (s): 1.250 samples/sec: 25.6", "deepspeed", 1.25),
        ("[Rank 0] step=10, RunningAvgSamplesPerSec=20.1, CurrSamplesPerSec=25.6, MemAllocated=1GB", "deepspeed", 1.25),
        (
            "{'train_runtime': 100.0, 'train_steps_per_second': 0.8, 'train_loss': 9.1, 'epoch': 1.0}",
            "hf-trainer",
            1.25,
        ),
    ],
)
def test_a_log_is_read_in_the_words_of_its_framework(tmp_path, line, framework, per_step):
    """32 sequences of 2048 tokens on 8 devices are 8192 tokens on each: at 6553.6 a second 1.25 s."""
    path = tmp_path / "train.log"
    slow = (
        line.replace("1250.0", "9000.0").replace("1.250", "9.000").replace("6,553.6", "655.36").replace("25.6", "2.56")
    )
    text = line if framework == "hf-trainer" else "\n".join([slow] * 3 + [line] * 6)
    path.write_text(text)
    found = logs.read(path, sequences=32, tokens_per_device=8192)
    assert (found.framework, found.seconds) == (framework, pytest.approx(per_step))


def test_a_log_that_states_no_step_is_refused(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("hello\n")
    with pytest.raises(MeshwrightError) as caught:
        logs.read(path, sequences=32, tokens_per_device=8192)
    assert caught.value.diagnostics[0].code == "V007"

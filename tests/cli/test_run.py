"""`meshwright run` as a user meets it: one file is enough, the prediction beside what was measured, clear refusals."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import meshwright
from meshwright.cli import main
from meshwright.plan import parse
from meshwright.plan.toml import dump, loads
from tests.cli.tiny import tiny
from tests.run.forked import Program

PLAN_FILE = """format_version = 1
model = "tiny/config.json"
on = "2xh100"
train = "batch=4,seq=32,dtype=fp32"

[layout]
dp = 2
zero = 1
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a tiny model and a plan for it, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny(tmp_path)
    (tmp_path / "plan.toml").write_text(PLAN_FILE)
    return tmp_path


WORDS = ["tiny/config.json", "--on", "2xh100", "--train", "batch=4,seq=32,dtype=fp32"]


def said(capfd, *argv):
    code = main(["run", *argv])
    out, err = capfd.readouterr()
    return code, out, err


def errors(err):
    return re.findall(r"^error\[(\w+)\]: (.*)$", err, re.MULTILINE)


def test_one_file_is_trained_and_compared_with_its_prediction(capfd):
    code, out, err = said(capfd, "plan.toml", "--data", "sample", "--steps", "3", "--lr", "3e-3")
    assert code == 0
    first = out.splitlines()[0]
    assert first.startswith("trained 3 steps of tiny under dp2 mb1 zero1 on 2 x cpu: loss ")
    before, after = map(float, re.findall(r"\d\.\d{4}", first))
    assert before > after > 0
    assert "with the framework profile 'meshwright'" in " ".join(out.split())
    for what in ("step time", "tokens/s", "MFU", "peak memory"):
        assert re.search(rf"^  {what} .*%", out, re.MULTILINE), what
    assert err.startswith(
        "training tiny under dp2 mb1 zero1, batch=4,seq=32,dtype=fp32, on 2 processes\nstep 1/3  loss "
    )


def test_words_and_a_file_are_the_same_run(capfd):
    typed = said(capfd, *WORDS, "--plan", "dp2 zero1", "--data", "sample", "--steps", "2", "--json")
    filed = said(capfd, "plan.toml", "--data", "sample", "--steps", "2", "--json")
    assert typed[0] == filed[0] == 0
    a, b = json.loads(typed[1]), json.loads(filed[1])
    assert a["losses"] == b["losses"]
    assert a.keys() >= {
        "format_version",
        "model",
        "plan",
        "workload",
        "step_s",
        "losses",
        "peak_bytes",
        "saved",
        "stopped",
    }
    step = a["compared"]["step time"]
    # one comparison: the table is its totals, and what compare says of the trace is in it
    whole = a["comparison"]
    assert whole["step_time_s"]["measured"] == step["measured"]
    assert whole["measured"]["spread_s"] == a["step_time_span_s"]
    assert {"F", "BW", "optimizer"} <= {row["name"] for row in whole["kinds"] if row["matched"]}
    assert whole["differ"] == {} and "timeline" not in a
    assert step["error"] == pytest.approx(step["predicted"] / step["measured"] - 1)
    assert a["compared"]["tokens/s"]["measured"] == pytest.approx(128 / step["measured"])


def test_what_search_saves_is_enough_to_predict_and_to_run(here, capfd, monkeypatch):
    (here / "plans").mkdir()
    asked = ["tiny/config.json", "--on", "2xh100", "--train", "batch=4,seq=32,dtype=fp32"]
    assert main(["search", *asked, "--fix", "dp=2", "--store", "none", "--save", "plans/best.toml"]) == 0
    assert 'model = "../tiny/config.json"' in (here / "plans" / "best.toml").read_text()
    capfd.readouterr()
    monkeypatch.chdir("tiny")
    assert main(["predict", "../plans/best.toml", "--json"]) == 0
    predicted = json.loads(capfd.readouterr().out)
    code, out, _ = said(capfd, "../plans/best.toml", "--data", "sample", "--steps", "2", "--json")
    assert code == 0
    assert json.loads(out)["plan"] == predicted["plan"] == parse("../plans/best.toml").text()


def test_a_plan_s_file_with_its_question_is_read_back_exactly():
    plan = parse("tp2 dp2 zero1")
    text = dump(plan, {"model": "a", "on": "b", "train": "c"})
    assert loads(text) == plan
    assert text.index("model") < text.index("[layout]")


def test_a_bare_plan_file_asks_for_what_it_does_not_say(here, capfd):
    (here / "bare.toml").write_text(dump(parse("dp2")))
    code, out, err = said(capfd, "bare.toml", "--data", "sample")
    assert (code, out) == (2, "")
    assert [message for _, message in errors(err)] == ["MODEL is missing", "--on is missing", "--train is missing"]
    words = ["--model", "tiny/config.json", *WORDS[1:], "--data", "sample", "--steps", "1", "--json"]
    code, out, _ = said(capfd, "bare.toml", *words)
    assert (code, json.loads(out)["plan"]) == (0, "dp2 mb1")


def test_a_file_that_says_the_plan_twice_is_refused(here, capfd):
    (here / "twice.toml").write_text('plan = "tp2"\n' + PLAN_FILE)
    code, _, err = said(capfd, "twice.toml", "--data", "sample")
    assert (code, errors(err)) == (2, [("X008", "unknown key 'layout'")])


def test_nothing_at_all_names_all_that_is_missing(capfd):
    code, _, err = said(capfd)
    assert code == 2
    assert [m for _, m in errors(err)] == [f"{w} is missing" for w in ("MODEL", "--on", "--train", "--plan", "--data")]


GROWS = "qsr:h=2,growth=0.02,rate=0.01,steps=100"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--steps", "0"], "L005", "--steps 0 cannot be"),
        (["--lr", "fast"], "L005", "--lr fast cannot be"),
        (["--schedule", "step", "--decay", "9"], "L005", "--schedule step cannot be"),
        (["--min-lr", "0"], "L005", "--min-lr cannot be"),
        (["--betas", "0.9,1"], "L005", "--betas 0.9,1 cannot be"),
        (["--keep", "3"], "L005", "--keep cannot be"),
        (["--held-out", "0.1"], "L005", "--held-out cannot be"),
        (["--lr", "nan"], "L005", "--lr nan cannot be"),
        (["--dtype", "int8"], "L005", "--dtype int8 cannot be"),
        (["--device", "tpu"], "L005", "--device tpu cannot be"),
        (["--resume"], "L005", "--resume cannot be"),
        (["--save-every", "3"], "L005", "--save-every cannot be"),
        (["--out", "plan.toml"], "L005", "--out plan.toml cannot be"),
        (["--tokenizer", "absent.json"], "D004", "cannot read the tokenizer"),
        (["--trace", "no/where.json"], "X104", "cannot write no/where.json"),
        (["--train", "batch=4000,seq=32"], "D005", "the text is too short"),
        (["--plan", "dp2 mxfp8"], "P032", "mxfp8 is predicted, not trained"),
        (["--plan", "tp3"], "P0", "tp"),
        (["--plan", f"dp2 sync={GROWS}", "--lr", "0.1"], "Y005", "--lr 0.1 is not the rate=0.01"),
        (["--plan", f"dp2 sync={GROWS}", "--steps", "101"], "Y005", "101 steps are more than the 100"),
        (["--data", "absent"], "D001", "cannot read the text"),
        (["--savee-every", "3"], "X003", "unknown option '--savee-every'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(words, code, told, here, capfd):
    data = [] if "--data" in words else ["--data", "sample"]
    before = sorted(here.iterdir())
    ended, out, err = said(capfd, "plan.toml", *data, *words)
    assert (ended, out) == (2, "")
    found = errors(err)
    assert any(c.startswith(code) and told in message for c, message in found), err
    assert [f for f in sorted(here.iterdir()) if f.name != "cache"] == [f for f in before if f.name != "cache"]


def test_an_option_with_a_dash_is_suggested_as_it_is_written(capfd):
    _, _, err = said(capfd, "plan.toml", "--data", "sample", "--save-evry", "3")
    assert "did you mean --save-every" in err


def test_a_folder_with_checkpoints_is_not_begun_anew(capfd):
    words = ["plan.toml", "--data", "sample", "--steps", "1", "--out", "out"]
    assert said(capfd, *words)[0] == 0
    code, _, err = said(capfd, *words)
    assert (code, errors(err)) == (2, [("L005", "--out out cannot be")])
    assert "--resume goes on" in err
    code, out, err = said(capfd, *words[:4], "2", "--out", "out", "--resume", "--json")
    assert (code, json.loads(out)["first_step"]) == (0, 2)
    assert "saved out/step-00000002" in err


def test_a_checkpoint_is_no_folder_for_a_run_and_one_that_is_removed_leaves_those_before_it(capfd):
    words = ["plan.toml", "--data", "sample", "--save-every", "1", "--out", "out", "--steps"]
    assert said(capfd, *words, "2")[0] == 0
    newest = Path("out/step-00000002")
    with (newest / "index.json").open("ab") as file:
        file.write(b"x")
    code, _, err = said(capfd, *words, "3", "--resume")
    assert (code, [c for c, _ in errors(err)]) == (2, ["H002"])
    assert f"help: remove {newest}: the newest that is left is taken then" in err
    code, _, err = said(capfd, *words[:-2], "out/step-00000001", "--steps", "3", "--resume")
    assert (code, errors(err)) == (2, [("L005", "--out out/step-00000001 cannot be")])
    assert "name the folder it is in, out" in err
    shutil.rmtree(newest)
    code, out, _ = said(capfd, *words, "3", "--resume", "--json")
    assert (code, json.loads(out)["first_step"]) == (0, 2)


def test_a_run_that_finds_no_checkpoint_to_go_on_from_says_so(capfd):
    words = ["plan.toml", "--data", "sample", "--steps", "1", "--out", "out", "--resume"]
    code, _, err = said(capfd, *words)
    assert (code, err.count("no checkpoint in out: begins anew\n")) == (0, 1)
    _, _, err = said(capfd, *words)
    assert "begins anew" not in err


def test_without_torch_the_way_to_get_it_is_said(capfd, monkeypatch):
    from meshwright.cli import needs

    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    code, _, err = said(capfd, "plan.toml", "--data", "sample")
    assert (code, errors(err)) == (
        2,
        [("L003", "run needs torch and safetensors and tokenizers, not installed here")],
    )
    assert 'pip install "meshwright[run]"' in err


def test_a_trace_is_written_and_told(here, capfd):
    code, _, err = said(capfd, "plan.toml", "--data", "sample", "--steps", "4", "--trace", "step.json")
    assert code == 0
    assert "wrote step.json\n" in err
    assert json.loads((here / "step.json").read_text())["traceEvents"]


def test_published_weights_bring_their_tokenizer(here, capfd):
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    save_file({}, str(here / "tiny" / "model.safetensors"))
    Tokenizer(models.WordLevel({"?": 0, "far": 300, "</s>": 1}, unk_token="?")).save(
        str(here / "tiny" / "tokenizer.json")
    )
    (here / "far.jsonl").write_text('{"text": "far"}\n' * 200)
    code, _, err = said(capfd, "plan.toml", "--data", "far.jsonl", "--weights", "tiny")
    assert (code, errors(err)) == (2, [("D006", "the text has token 300, and the model's vocabulary ends at 259")])
    assert "--tokenizer FOLDER/tokenizer.json" in err


def test_more_processes_than_cores_are_noted(capfd, monkeypatch):
    from meshwright.cli import run

    monkeypatch.setattr(run, "num_cores", lambda: 1)
    assert "on 2 processes that share 1 cores\n" in said(capfd, "plan.toml", "--data", "sample", "--steps", "1")[2]


def command(*argv, **more):
    here = str(Path(meshwright.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", "run", *argv],
        env={**os.environ, "PYTHONPATH": here, **{k: str(v) for k, v in more.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_in_order_with_a_checkpoint_and_exit_0(number, here):
    job = forked("plan.toml", "--data", "sample", "--steps", "1000000", "--out", "out", "--json")
    metrics = here / "out" / "metrics.jsonl"
    until = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < until and job.poll() is None
        time.sleep(0.02)
    job.send_signal(number)
    out, err = job.communicate(timeout=60)
    answer = json.loads(out)
    assert (job.returncode, answer["stopped"]) == (0, True)
    assert f"saved out/step-{answer['last_step']:08d}: --resume goes on from it" in err


def forked(*argv, **more):
    """The same command in a process that has imported what it needs."""
    return Program(lambda: main(["run", *argv]), more)


def launched(command, world, *argv):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    jobs = [command(*argv, RANK=r, LOCAL_RANK=r, LOCAL_WORLD_SIZE=world, **shared) for r in range(world)]
    ended = [job.communicate(timeout=90) for job in jobs]
    return [(job.returncode, out, err) for job, (out, err) in zip(jobs, ended)]


@pytest.mark.slow
def test_under_a_launcher_rank_0_alone_answers():
    def start(*argv, **more):
        """The first rank is a process from nothing, as launchers start them."""
        return (forked if more["RANK"] else command)(*argv, **more)

    first, second = launched(start, 2, "plan.toml", "--data", "sample", "--steps", "2", "--json")
    assert (first[0], second[0]) == (0, 0)
    assert json.loads(first[1])["last_step"] == 2
    assert second[1:] == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [(["--plan", "dp1"], "L002"), (["--data", "absent"], "D001")])
def test_under_a_launcher_a_mistake_is_one_error(words, code):
    argv = ["plan.toml", "--on", "1xh100"] if "dp1" in words else ["plan.toml"]
    ended = launched(forked, 2, *argv, *words, *([] if "--data" in words else ["--data", "sample"]))
    assert [c for c, _, _ in ended] == [2, 2]
    assert len([err for _, _, err in ended if f"error[{code}]" in err]) == 1


def test_packed_documents_are_trained_and_their_lengths_written_for_a_prediction(capfd):
    words = [*WORDS[:-1], "batch=4,seq=64,dtype=fp32,pack=balanced", "--plan", "dp2 zero1 mb2", "--data", "sample"]
    code, out, err = said(capfd, *words, "--steps", "2", "--lengths", "lengths.csv", "--json")
    assert code == 0
    assert re.search(r"^wrote lengths.csv: [\d,]+ documents", err, re.MULTILINE)
    assert json.loads(out)["workload"].endswith("pack=balanced")
    lengths = [int(line) for line in Path("lengths.csv").read_text().split()[1:]]
    assert min(lengths) > 0 and max(lengths) == 64  # documents longer than a sequence are trained in pieces
    assert (
        main(
            [
                "predict",
                *WORDS[:-1],
                "batch=4,seq=64,dtype=fp32,pack=balanced,lengths=lengths.csv",
                "--plan",
                "dp2 zero1 mb2",
            ]
        )
        == 0
    )


def test_what_this_machine_has_no_memory_for_is_refused_before_it_begins_or_begun_when_told_so(capfd, monkeypatch):
    lora = "batch=4,seq=32,dtype=fp32,phase=lora,rank=1000000000,targets=q"
    code, out, err = said(capfd, "plan.toml", "--train", lora, "--data", "sample", "--steps", "1")
    ((kind, message),) = errors(err)
    assert (code, out, kind) == (2, "", "L010")
    assert "a rank is predicted to hold " in message and " GiB (" in message and "--anyway" in err
    code, _, err = said(capfd, "plan.toml", "--train", lora, "--data", "absent.bin")  # what is not there comes first
    ((kind, message),) = errors(err)
    assert (code, kind) == (2, "D001") and "No such file" in message and "absent.idx" in err
    for more, code_of in ((["--tokenizer", "absent"], "D004"), (["--weights", "absent"], "H006")):
        _, _, err = said(capfd, "plan.toml", "--train", lora, "--data", "sample", *more)
        assert [kind for kind, _ in errors(err)] == [code_of]
    short = ["plan.toml", "--data", "sample", "--steps", "1"]
    monkeypatch.setattr("meshwright.run.room.host_bytes", lambda: 2)
    code, _, err = said(capfd, *short)
    assert code == 2 and errors(err)[0][0] == "L010" and "with 2 ranks, is 0.0 GiB" in err
    assert said(capfd, *short, "--anyway")[0] == 0
    monkeypatch.setattr("meshwright.run.room.host_bytes", lambda: None)  # a system that does not say
    assert said(capfd, *short)[0] == 0

"""`meshwright init`: five answers, presets, options; what is wrong is asked again, and nothing is half written."""

import json
import re
import shlex

import pytest

from meshwright import catalog
from meshwright.answer.predict import predict
from meshwright.cli import main
from meshwright.cli.asking import goal_words, tokens_of
from meshwright.cli.question import load, preset, read_goal, read_parts
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model

PRESETS = catalog.names("presets")
TINY = ["--model", "gpt2", "--on", "2x4090", "--train", "batch=8,seq=256", "--plan", "mb4"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder on a machine without devices."""

    def nothing(_here, **_):
        raise MeshwrightError.one("C016", "no accelerator")

    monkeypatch.setattr("meshwright.detect.detect", nothing)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys, *argv):
    code = main(["init", *argv])
    return code, *capsys.readouterr()


def codes(err):
    return re.findall(r"^error\[(\w+)\]", err, re.MULTILINE)


@pytest.fixture
def typed(monkeypatch):
    """A terminal on which these lines are typed, then the end of input."""

    def answer(*lines):
        left = iter(lines)

        def line(*_):
            found = next(left, EOFError)
            if isinstance(found, type):
                raise found
            return found

        monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
        monkeypatch.setattr("builtins.input", line)

    return answer


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_question_whose_plan_fits_with_a_twentieth_of_memory_to_spare(name):
    question = preset(name)
    parts, wrong = read_parts(question)
    assert wrong == [] and question.title
    prediction = predict(*parts, detail=False)
    assert prediction.fits and prediction.run is not None
    assert prediction.tightest.headroom_bytes > 0.05 * prediction.tightest.capacity_bytes
    assert read_goal(question, parts)[1] == []


def test_no_preset_has_the_name_of_a_model():
    assert not set(PRESETS) & set(catalog.names("models"))


def test_a_preset_is_predicted_by_name_and_options_go_over_it(capsys):
    assert main(["predict", "LoRA_8b_4090", "--price", "0.4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["model"], answer["cluster"], answer["training_run"]["price_usd_hour"]) == (
        "llama3-8b",
        "1x4090",
        0.4,
    )
    assert main(["predict", "lora-8b-4090", "--tokens", "1b", "--on", "2x4090", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["cluster"], answer["training_run"]["tokens"]) == ("2x4090", 1e9)


def test_the_catalog_lists_presets_and_shows_one(capsys):
    assert main(["catalog", "presets", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["presets"]] == list(PRESETS)
    assert main(["catalog", "preset", "lora-8b-4090"]) == 0
    assert "command: meshwright predict lora-8b-4090" in capsys.readouterr().out
    assert main(["catalog", "presets", "lora-9b"]) == 2
    assert "did you mean lora-8b-4090" in capsys.readouterr().err


def test_options_answer_without_being_asked_and_the_command_shown_is_the_question(capsys, here):
    code, out, err = said(capsys, *TINY, "--tokens", "40GB", "--days", "100", "--price", "0.5", "--out", "q.toml")
    assert (code, err) == (0, "wrote q.toml: meshwright predict q.toml\n")
    question = load("q.toml")
    assert (question.model, question.on, question.tokens) == ("gpt2", "2x4090", "10b")  # 40e9 bytes at 4 a token
    assert (question.days, question.price, question.plan) == ("100", "0.5", "mb4")
    (line,) = re.findall(r"^the same as: meshwright (.*)$", out, re.MULTILINE)
    assert main([*shlex.split(line), "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)
    assert main(["predict", "q.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == asked


def test_without_a_plan_the_fastest_is_searched(capsys):
    code, out, _ = said(capsys, "--model", "gpt2", "--on", "2xh100", "--train", "batch=8,seq=256", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["plan"]
    assert main(["predict", "question.toml"]) == 0


def test_where_nothing_fits_the_question_is_written_without_a_plan_and_the_exit_code_is_1(capsys):
    code, out, err = said(capsys, "--model", "llama3-8b", "--on", "1xt4", "--train", "batch=1,seq=256,dtype=fp16")
    assert code == 1 and "no plan: nothing fits; " in out
    assert load("question.toml").plan == "" and "meshwright search question.toml" in err


def test_a_range_is_a_question_for_search(capsys):
    code, out, _ = said(capsys, "--model", "gpt2", "--on", "1..4xh100", "--train", "batch=8,seq=256", "--json")
    answer = json.loads(out)
    tokens = answer["question"]["tokens"]
    assert code == 0
    assert answer["command"] == f"meshwright search gpt2 --on 1..4xh100 --train batch=8,seq=256 --tokens {tokens}"


def test_five_questions_are_asked_what_is_wrong_is_asked_again_and_empty_is_the_default(capsys, typed):
    typed(
        "gpt-none",
        "gpt2",
        "7..2xh100",
        "2x4090",
        "batch=0",
        "batch=8,seq=256",
        "",
        "30 days price=0.5 soon",
        "30d price=0.5",
    )
    code, _, err = said(capsys, "--plan", "mb4", "--out", "q.toml")
    assert code == 0
    assert [f"{n}/5" for n in (1, 2, 3, 4, 5)] == list(dict.fromkeys(re.findall(r"\b[1-5]/5", err)))
    assert re.findall(r"error\[(\w+)\]", err) == ["M006", "B005", "W002", "W003", "B001"]
    question = load("q.toml")
    twenty_each = float(f"{20 * model('gpt2').num_params:.1e}")
    assert (question.days, question.price, float(question.tokens[:-1]) * 1e9) == ("30d", "0.5", twenty_each)


def test_a_default_step_is_one_that_predicts(capsys, typed):
    typed("", "", "", "", "")
    code, _, err = said(capsys, "--plan", "fsdp full", "--out", "q.toml")
    assert code == 0 and "[llama3-8b]" in err and "[8xh100]" in err
    assert load("q.toml").train == "batch=32,seq=8192"  # a quarter million tokens on few devices


@pytest.mark.parametrize(("lines", "code"), [(["gpt2"], 2), (["gpt2", "2x4090", KeyboardInterrupt], 130)])
def test_the_end_of_the_answers_and_ctrl_c_write_nothing(lines, code, capsys, typed, here):
    typed(*lines)
    ended, out, err = said(capsys, "--out", "q.toml")
    assert (ended, out, list(here.iterdir())) == (code, "", [])
    assert codes(err) == (["X019"] if code == 2 else [])


def test_without_a_terminal_model_and_devices_have_to_be_said_and_yes_takes_the_defaults(capsys, monkeypatch, here):
    code, _, err = said(capsys)
    assert (code, codes(err), list(here.iterdir())) == (2, ["X004", "X004"], [])
    code, _, _ = said(capsys, "--yes", "--plan", "fsdp full")
    assert code == 0 and load("question.toml").model == "llama3-8b"


def test_a_question_that_is_there_is_not_written_over_unless_it_is_named(capsys, here):
    (here / "question.toml").write_text("mine")
    code, _, err = said(capsys, *TINY)
    assert (code, codes(err), (here / "question.toml").read_text()) == (2, ["X018"], "mine")
    assert said(capsys, *TINY, "--out", "question.toml")[0] == 0


def test_the_devices_of_this_machine_are_proposed(capsys, monkeypatch):
    class Found:
        cluster = cluster("4xa100")

    monkeypatch.setattr("meshwright.detect.detect", lambda _here, **_: Found)
    code, _, _ = said(capsys, "--yes", "--model", "gpt2", "--plan", "mb1", "--out", "q.toml")
    assert (code, load("q.toml").on) == (0, "4xa100_80gb_sxm")


def test_everything_wrong_with_the_options_is_said_at_once_and_nothing_is_written(capsys, here):
    argv = ["--model", "nope", "--on", "3xnone", "--train", "batch=x", "--tokens", "y", "--days", "z", "--preset", "w"]
    code, out, err = said(capsys, *argv)
    assert (code, out, list(here.iterdir())) == (2, "", [])
    assert sorted(codes(err)) == ["B001", "B001", "C001", "M006", "W002", "W003", "X011"]


def test_a_preset_with_options_is_a_question_of_its_own(capsys):
    code, _, _ = said(capsys, "--preset", "laptop-tiny", "--price", "0.2", "--tokens", "2b", "--out", "q.toml")
    question = load("q.toml")
    assert (code, question.plan, question.price, question.tokens) == (0, "mb8", "0.2", "2b")
    assert "tokens" not in question.train


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("30d $2M", {"days": "30d", "budget": "$2M"}),
        ("30 days price=h100=2,a100=1", {"days": "30d", "price": "h100=2,a100=1"}),
        ("days=30 budget=750k", {"days": "30", "budget": "750k"}),
    ],
)
def test_deadline_budget_and_price_in_one_answer(text, words):
    assert goal_words(text) == words


def test_an_amount_of_text_is_four_bytes_a_token():
    assert [tokens_of(t) for t in ("40GB", "2 TB of text", "15t")] == ["10b", "500b", "15t"]


def test_a_preset_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(MeshwrightError, match="lora-8b-4090"):
        preset("lora-8b-4091")

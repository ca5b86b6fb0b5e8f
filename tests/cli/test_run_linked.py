"""`meshwright run --link`: real training on hosts of its own, over slow links, beside its prediction for them."""

import json
from itertools import pairwise

import pytest

from meshwright.cli import main
from meshwright.run.emulate.hosts import missing
from meshwright.run.traffic import sent_bytes
from meshwright.spec.model import load
from tests.cli.tiny import tiny

REASON = missing()
needs_hosts = pytest.mark.skipif(bool(REASON), reason=REASON or "there are hosts")
WORDS = ["tiny/config.json", "--on", "2xh100", "--train", "batch=4,seq=32,dtype=fp32", "--data", "sample"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny(tmp_path)
    return tmp_path


@needs_hosts
def test_training_over_slow_links_is_the_training_that_it_is_without_them_and_takes_their_time(capfd, here):
    plan = ["--plan", "dp2 sync=local:h=2", "--steps", "4", "--json"]
    assert main(["run", *WORDS, *plan, "--link", "20mbit,delay=15ms", "--out", "out"]) == 0
    out, err = capfd.readouterr()
    slow = json.loads(out)
    assert main(["run", *WORDS, *plan]) == 0
    assert slow["losses"] == json.loads(capfd.readouterr().out)["losses"]
    assert "2 hosts with links of 20 Mbit/s and 15 ms (tbf and " in err
    assert "Mbit/s, 1" in slow["cluster"]  # the prediction's: the links as they were measured
    # a ring of two goes round in two pairs of segments, and each waits for two ways: no step that averages is faster
    assert min(slow["step_s"][1], slow["step_s"][3]) > 2 * 2 * 0.015
    assert slow["compared"]["step time"]["predicted"] > 0.03
    steps = [json.loads(line) for line in (here / "out" / "metrics.jsonl").read_text().splitlines()]
    sent = [after["sent_bytes"] - before["sent_bytes"] for before, after in pairwise(steps)]
    # in a step that averages each of two ranks sends its parameters once, 4 bytes and headers; between, a few numbers
    each = 4 * load("tiny/config.json").num_params
    assert sent[0] == pytest.approx(each, rel=0.15) and sent[2] == pytest.approx(each, rel=0.15)
    assert sent[1] < 0.05 * each


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--link", "slow"], "--link slow cannot be"),
        (["--link", "1gbit,delay=9s"], "--link 1gbit,delay=9s cannot be"),
        (["--link", "1gbit", "--device", "cuda"], "--link 1gbit --device cuda cannot be"),
        (["--link", "1gbit", "--world", "w.csv", "--out", "o"], "--link 1gbit --world w.csv cannot be"),
    ],
)
def test_links_that_cannot_be_are_refused(words, told, capfd, here):
    (here / "w.csv").write_text("30,fail\n")
    assert main(["run", *WORDS, "--plan", "dp2", *words]) == 2
    err = capfd.readouterr().err
    assert "error[U004]" in err and told in err


def test_bytes_are_counted_where_an_interface_is_named(monkeypatch, tmp_path):
    # the columns of proc(5): bytes received first, bytes sent ninth
    table = tmp_path / "dev"
    table.write_text("Inter-| Receive\n face |bytes\n    lo: 1 2 3 4 5 6 7 8 9 0\n  eth0: 10 2 0 0 0 0 0 0 77 3 0\n")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert sent_bytes(table) is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert sent_bytes(table) == 77
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    assert sent_bytes(table) is None

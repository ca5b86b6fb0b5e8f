"""A server with known times, on a virtual clock: probes find them, and the profile answers for other traffic."""

import asyncio
import json
import math
import statistics

import msgspec
import numpy as np
import pytest

from meshwright.answer.server import predict_server, server_replica
from meshwright.calibrate import engine
from meshwright.calibrate.server import fit_server, in_turn, steadied
from meshwright.calibrate.server_probes import Prober, tpot_of
from meshwright.calibrate.server_report import doubts, report
from meshwright.calibrate.server_terms import Terms, begun
from meshwright.cli import calibrate_server, main
from meshwright.cost.engine import load
from meshwright.errors import MeshwrightError
from meshwright.spec.serve import parse
from meshwright.traffic.session import opened, replayed
from meshwright.traffic.summary import summed_up
from tests.traffic import virtual
from tests.traffic.servers import Engine, app, serving

#: The server that is probed: 20 ms and 1 ms a token for a prompt alone in its iteration, 10 ms and 2 ms a sequence for
#: next tokens, four requests at a time, prefixes kept.
KNOWN = {"slots": 4, "prefixes": True}


@pytest.fixture(scope="module")
def probed():
    """The probes, and traffic that the fit never sees: at another rate, and with prompts that begin alike."""

    async def work():
        server = Engine(**KNOWN)
        async with serving(app(server), server) as url:
            session = await opened(url, salt=5)
            clock = asyncio.get_running_loop().time
            probes = await Prober(session, longest=256, budget_s=120.0, say=lambda line: None, clock=clock).make()
            unseen = []
            for words in UNSEEN:
                serve = parse(words)
                unseen.append((serve, *await replayed(session, serve, serve.drawn())))
            return probes, unseen

    return virtual.run(work())


UNSEEN = (
    "rate=3,prompt=60:0.5;200:0.5,output=20,requests=60",
    "rate=4,prompt=220,output=12,prefix=160:groups=3,requests=60,seed=3",
)


@pytest.fixture(scope="module")
def fitted(probed):
    return fit_server(probed[0], model="tiny", url="http://there", name="there")


def test_traffic_that_is_to_be_predicted_is_among_the_probes():
    async def work():
        server = Engine(**KNOWN)
        async with serving(app(server), server) as url:
            session, clock = await opened(url, salt=5), asyncio.get_running_loop().time
            like = parse("rate=2,prompt=40:0.8;9000:0.2,output=6,requests=100").drawn()
            said = {"longest": 64, "budget_s": 30.0, "say": lambda line: None, "clock": clock, "like": like}
            return await Prober(session, **said).make()

    (asked,) = {p.name: p for p in virtual.run(work()) if p.name == "random asked"}.values()
    # of those that come within a third of what is left of the first 15 seconds, without prompts that are too long
    assert 2 <= len(asked.requests) <= 12 and set(asked.requests.output) == {6} and asked.requests.prompt.max() < 80


def test_probes_find_the_times_of_a_server(fitted):
    (start, each, square), (step, context, sequence) = (
        fitted.profile.iterations[0].prefill_ms,
        fitted.profile.iterations[0].decode_ms,
    )
    # a client sees 20 ms + 1 ms a token of a prompt, however that is split into what else it waits for
    for tokens in (64, 256):
        front = fitted.profile.front_us * 1e-3 + fitted.profile.token_us * 1e-3 * tokens
        assert front + start + each * tokens + square * tokens**2 == pytest.approx(20 + tokens, rel=0.1)
    for sequences in (1, 2, 4):
        assert step + sequence * sequences + context * sequences * 128 == pytest.approx(10 + 2 * sequences, rel=0.1)


def test_probes_find_the_limits_of_a_server(fitted):
    server = fitted.profile.server
    # it computes a prompt at a time, before anybody's next token, for four requests, and keeps what they share
    assert (server.policy, server.budget, server.max_batch, server.reached) == ("vllm-v0", 1, 4, 4)
    assert (server.prefix_cache, server.slots, server.kv_tokens) == (True, 0, 0)
    assert set(fitted.left_out) == {"prefix", "ladder", "room", "mix", "random"}
    assert "4 at a time, prefixes kept" in report(fitted)[0]


@pytest.mark.parametrize("number", range(len(UNSEEN)))
def test_the_profile_answers_for_traffic_that_it_never_saw(probed, fitted, number):
    serve, traffic, end = probed[1][number]
    measured = summed_up(serve, traffic, end).metrics
    predicted = predict_server(fitted.profile, serve).metrics
    for name in ("ttft_s", "tpot_s"):
        m, p = getattr(measured, name), getattr(predicted, name)
        assert p.mean == pytest.approx(m.mean, rel=0.1) and p.p90 == pytest.approx(m.p90, rel=0.15), name
        assert p.mean_interval[0] <= p.mean <= p.mean_interval[1]


def test_requests_of_one_instant_stand_in_the_order_in_which_they_were_answered(probed):
    """Of eight of one instant, answered four at a time, the same are fitted whichever of them a server takes first."""
    (ladder, *_) = (p for p in probed[0] if p.name == "ladder 8")
    turned = in_turn(ladder)
    assert (np.diff(turned.requests.arrival_s + turned.ttft) >= 0).all()
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 1, 7, 2, 5, 4]):
        requests = msgspec.structs.replace(
            ladder.requests, prompt=ladder.requests.prompt[order], output=ladder.requests.output[order]
        )
        times = {name: getattr(ladder, name)[order] for name in ("ttft", "tpot", "e2e", "cached")}
        found = in_turn(ladder._replace(requests=requests, **times))
        assert found.requests.output.tolist() == turned.requests.output.tolist()
        assert all(getattr(found, name).tolist() == getattr(turned, name).tolist() for name in times)
    (single, *_) = (p for p in probed[0] if p.name == "single")  # each of these is of an instant of its own
    assert in_turn(single).requests.prompt.tolist() == single.requests.prompt.tolist()


def test_tokens_that_come_together_tell_no_time_of_one():
    found = tpot_of(np.array([0.0, 0.0, 0.3]), np.array([1, 4, 4]))
    assert np.isnan(found[:2]).all() and found[2] == pytest.approx(0.1)


def of_rounds(probed, *paces, kinds=("single",)):
    """The first rounds' probes of those kinds, each round at a pace."""
    found = []
    for turn, pace in enumerate(paces):
        for probe in {p.name: p for p in reversed(probed[0]) if p.name in kinds}.values():
            requests = msgspec.structs.replace(probe.requests, arrival_s=probe.requests.arrival_s * pace)
            times = {name: getattr(probe, name) * pace for name in ("ttft", "tpot", "e2e")}
            found.append(probe._replace(requests=requests, at_s=float(turn), **times))
    return found


def test_rounds_of_probes_are_made_as_long_as_there_is_time(probed, fitted):
    made = [p.name for p in probed[0]]
    assert made[0] == made[-1] == "single" and made.count("single") == 4 and made.count("ladder 16") == 3
    assert fitted.drift == pytest.approx(0.0, abs=1e-4)
    assert fitted.doubts == () and fitted.without == ()


def test_a_server_whose_pace_changes_is_measured_at_its_median_pace(probed):
    probes = of_rounds(probed, 1.0, 2.0, 0.8, kinds=("single", "ladder 4"))
    steady, drift = steadied(probes)
    assert drift == pytest.approx(2.0 / 0.8 - 1)
    # the paces are 1, 2 and 0.8 times that of the first round, which is their median
    for probe, same in zip(steady, of_rounds(probed, 1.0, 1.0, 1.0, kinds=("single", "ladder 4"))):
        assert probe.ttft == pytest.approx(same.ttft) and probe.e2e == pytest.approx(same.e2e)
        assert probe.requests.arrival_s == pytest.approx(same.requests.arrival_s)
    found = fit_server([p for p in probes if p.name == "single"], model="tiny", url="x", name="x")
    assert found.drift == pytest.approx(1.5) and not found.doubts
    # the sample's deviation of the logarithms of 1, 2 and 0.8, kept with three digits
    assert found.profile.pace_sigma == pytest.approx(statistics.stdev(map(math.log, (1.0, 2.0, 0.8))), abs=5e-4)
    steady = msgspec.structs.replace(found.profile, pace_sigma=0.0)
    loaded = parse("rate=1,prompt=64,output=16,requests=60,seed=2")
    widths = []
    for profile in (steady, found.profile):
        low, high = predict_server(profile, loaded).metrics.tpot_s.mean_interval
        widths.append(math.log(high / low))
    assert widths[1] > widths[0] + 1.0  # 80% of a deviation of 0.47 are 1.2 apart, either way
    assert any("took +150% in the slowest round" in line for line in report(found))


def test_a_profile_that_probes_contradict_is_not_written(probed, tmp_path, monkeypatch, capsys):
    # prompts that come at once take five times as long, and single ones between them say nothing of it
    odd = [
        p._replace(ttft=p.ttft * 5, tpot=p.tpot * 5, e2e=p.e2e * 5) if p.name == "room" else p
        for p in of_rounds(probed, 1.0, kinds=("single", "room"))
    ]

    async def made(*_):
        return odd, "http://there", "tiny"

    monkeypatch.setattr(calibrate_server, "_probed", made)
    path = tmp_path / "mine.toml"
    path.write_text("what was there")
    assert main(["calibrate", "--server", "http://there", "--save", str(path)]) == 1
    said = capsys.readouterr()
    assert "! not to be believed: TTFT of probes that the fit did not see is off by" in said.out
    assert "mine.toml is not written: " in said.err and path.read_text() == "what was there"
    assert [*tmp_path.iterdir()] == [path]


def test_times_outside_of_what_was_measured_are_doubted(probed, fitted):
    single = [p for p in probed[0] if p.name == "single"]
    terms = Terms(begun(single).shape, np.full(8, 1e-3))
    assert doubts(single, fitted.profile, terms, fitted.left_out) == ()
    times = msgspec.structs.replace(fitted.profile.iterations[0], prefill_ms=(0.0, 0.1, 0.0))
    fast = msgspec.structs.replace(fitted.profile, iterations=(times,))
    assert "the time to the first token of a single prompt of 16 tokens" in doubts(single, fast, terms, {})[0]
    high = terms._replace(values=np.array([c.high for c in terms.shape.constants]))
    assert (
        "front_us" in doubts(single, fitted.profile, high, {})[0] and len(doubts(single, fitted.profile, high, {})) == 8
    )
    # terms that were taken away lie on no bound
    assert doubts(single, fitted.profile, terms.without(("token_us",)), {}) == ()


def test_a_server_that_forgets_prefixes_is_found_to(probed):
    # the same probes of a server whose repeated prompts take as long as its new ones, and which says nothing
    probes = [
        p._replace(cached=np.full(len(p.requests), -1)) for p in of_rounds(probed, 1.0, kinds=("single", "prefix"))
    ]
    prefix = next(p for p in probes if p.name == "prefix")
    tokens = prefix.requests.prompt
    took = 0.02 + 0.001 * tokens + 3 * 0.012
    at = msgspec.structs.replace(prefix.requests, arrival_s=np.cumsum(took) - took)
    probes[next(i for i, p in enumerate(probes) if p is prefix)] = prefix._replace(
        requests=at, ttft=0.02 + 0.001 * tokens, e2e=took
    )
    found = fit_server(probes, model="tiny", url="x", name="x").profile
    assert found.server.prefix_cache is False
    assert found.server.reached == 1 < found.server.max_batch  # nobody asked for two at a time
    busy = predict_server(found, parse("batch=3,prompt=60,output=9,requests=3"))
    assert any("probes saw no more than 1" in warning for warning in busy.warnings)


def test_a_profile_is_a_file_that_predict_takes(fitted, tmp_path, capsys):
    path = tmp_path / "server.toml"
    path.write_text(engine.as_toml(fitted.profile))
    assert load(path) == fitted.profile
    asked = ["predict", "--serve", UNSEEN[0], "--engine-profile", str(path)]
    assert main([*asked, "--json", "--trace", str(tmp_path / "t.json")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ttft_s"]["mean"] == pytest.approx(predict_server(fitted.profile, parse(UNSEEN[0])).metrics.ttft_s.mean)
    assert main([*asked, "--slo", "ttft=1us"]) == 1
    assert "misses" in capsys.readouterr().out
    # what it would do with one request at a time
    assert main(["predict", "--serve", UNSEEN[0] + ",max_batch=1", "--engine-profile", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ttft_s"]["mean"] > 2 * said["ttft_s"]["mean"]
    assert main(["predict", "llama3-8b", "--on", "1xh100", *asked[1:]]) == 2
    assert "model says nothing of a measured server" in capsys.readouterr().err
    assert main(["predict", "--serve", UNSEEN[0] + ",kv=fp8", "--engine-profile", str(path)]) == 2
    assert "kv= says nothing" in capsys.readouterr().err


def test_an_engine_profile_of_a_catalog_form_stands_for_the_engine(tmp_path, capsys):
    words = ["llama3-8b", "--on", "1xh100", "--plan", "tp1", "--serve", "rate=2,prompt=256,output=16,requests=20"]
    path = tmp_path / "mine.toml"
    path.write_text('format_version = 1\nname = "mine"\nstep_us = 200000.0\n')
    assert main(["predict", *words, "--engine-profile", str(path), "--json"]) == 0
    # every iteration takes 0.2 s on the host alone
    assert json.loads(capsys.readouterr().out)["tpot_s"]["mean"] > 0.2


@pytest.mark.parametrize(
    "text",
    ["", "format_version = 2\nname='x'", "format_version = 1\nname='x'\nspeed = 3", "nonsense",
     "format_version = 1\nname='x'\nfront_us = -1.0",
     "format_version = 1\nname='x'\n[server]\nmodel='x'", "format_version = 1\nname='x'\nstep_us = nan"],
)  # fmt: skip
def test_a_file_that_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(MeshwrightError, match="T008"):
        load(path)


def test_too_few_probes_are_no_profile(probed):
    with pytest.raises(MeshwrightError, match="T009"):
        fit_server([p for p in probed[0] if p.name == "prefix"], model="tiny", url="http://there", name="x")


def test_a_part_of_a_prompt_takes_what_the_whole_takes_more_than_the_part_before(fitted):
    replica = server_replica(fitted.profile, parse("rate=1,prompt=200,output=4,requests=3").drawn())
    whole = replica.costs.prefilling(1, 200, 0.0)
    assert replica.costs.prefilling(1, 150, 0.0) + replica.costs.prefilling(1, 50, 150.0) == pytest.approx(whole)


def test_the_command_probes_a_server_and_keeps_its_profile(tmp_path, capsys):
    path = str(tmp_path / "mine.toml")

    async def work():
        server = Engine(prompt_s=0.001, prompt_token_s=0.00002, step_s=0.001, sequence_s=0.0001)
        async with serving(app(server), server) as url:
            words = ["calibrate", "--server", url, "--save", path, "--seconds", "10", "--longest", "64"]
            return await asyncio.to_thread(main, words)

    assert asyncio.run(work()) == 0
    shown = capsys.readouterr().out
    assert "tiny: policy" in shown and "left out: TTFT, TPOT" in shown
    assert load(path).name == "mine" and load(path).server.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--server", "http://127.0.0.1:9"], "T001"),
        (["--server", "http://127.0.0.1:9", "--here"], "K001"),
        (["--server", "http://127.0.0.1:9", "--save", "x.json"], "K001"),
        (["--server", "http://127.0.0.1:9", "--seconds", "1"], "L005"),
        (["--save", "x.toml"], "K001"),
    ],
)
def test_what_cannot_be_calibrated_is_one_clear_error(words, code, capsys):
    assert main(["calibrate", *words]) == 2
    assert f"error[{code}]" in capsys.readouterr().err

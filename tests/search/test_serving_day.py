"""A day of serving: an autoscaler that follows the rate, replicas that are lost, and a training job beside."""

import json

import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.latency import times_of_all
from meshwright.answer.replica import dealt
from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.search.serving import beside
from meshwright.search.serving.day import Shift, dealt_over, scheduled, served
from meshwright.simulate.serve import simulate
from meshwright.spec.requests import Requests
from meshwright.spec.serve import parse as parse_serve
from meshwright.spec.serving_day import HOUR_S, ServingDay, parse, requests_of
from meshwright.spec.workload import Train
from meshwright.world.autoscale import Autoscaler, RateSeen, ReplicaLost, StartReplicas, StopReplicas
from meshwright.world.decider import replayed
from tests.serving.costs import linear_costs, replica

SERVE = parse_serve("rate=2,prompt=32,output=8,ttft=1s,tpot=100ms@p90")
COSTS = linear_costs(base=0.010, token=1e-5)


def drawn(rate=2.0, hours=2.0, seed=0):
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, int(rate * hours * HOUR_S)))
    return Requests(arrival_s=at - at[0], prompt=np.full(len(at), 32), output=np.full(len(at), 8))


def test_the_scaler_goes_up_at_once_and_down_after_a_while():
    # a replica for 8 requests/s of 10, as a fifth is kept free: 20/s need 3, 9/s need 2, 8/s need 1
    scaler = Autoscaler(rate=10.0, room=0.2, hold_s=100.0)
    state, log = scaler.begin(), []
    for at, rate in ((0.0, 20.0), (60.0, 9.0), (120.0, 8.0), (150.0, 8.0), (300.0, 8.0)):
        state, decisions = scaler.decide(state, RateSeen(at, rate))
        log.append((state.replicas, decisions))
    assert log[0] == (3, (StartReplicas(2),))
    assert log[1] == (3, ())  # the 20/s of a minute ago is within 100 s
    assert log[2] == (2, (StopReplicas(1),))  # of the last 100 s there was the look at 60 s, which needed 2
    assert log[3] == (2, ()) and log[4] == (1, (StopReplicas(1),))


def test_a_lost_replica_is_replaced_and_the_log_replays():
    scaler, day = Autoscaler(rate=2.5, begins=1), ServingDay(length_s=2 * HOUR_S, lost_s=(HOUR_S,))
    shifts, log = scheduled(day, scaler, drawn())
    lost = [s for s in shifts if s.lost]
    assert len(lost) == 1 and lost[0].down_s == HOUR_S
    assert any(s.from_s == HOUR_S and s.up_s == HOUR_S + day.start_s for s in shifts)
    assert any(isinstance(entry.event, ReplicaLost) for entry in log)
    assert [e.decisions for e in replayed(scaler, log)] == [e.decisions for e in log]


def test_a_day_of_replicas_that_stay_is_what_they_serve_without_one():
    # oracle: the same requests dealt in turn to two replicas
    many, one = drawn(), replica("vllm-v1", COSTS)
    shifts = [Shift(0.0, 0.0), Shift(0.0, 0.0)]
    day = ServingDay(length_s=2 * HOUR_S)
    found = served(day, SERVE, one, 4, many, shifts, [])
    shares = dealt(SERVE, many, 2)
    times = times_of_all(shares, [simulate(one, share) for share in shares])
    assert found.objectives[0][3] == pytest.approx(np.quantile(times.ttft, 0.9), rel=1e-9)
    assert found.objectives[1][3] == pytest.approx(np.quantile(times.tpot, 0.9), rel=1e-9)
    assert sum(hour.requests for hour in found.hours) == len(many) and found.hours[0].devices == 8
    assert found.device_hours == pytest.approx(8 * 2.0, rel=1e-3)


def test_requests_of_a_lost_replica_wait_longer_and_are_all_answered():
    slow = replica("vllm-v1", linear_costs(base=0.5))  # eight tokens take four seconds
    many = drawn(rate=0.5, hours=1.0)
    day = ServingDay(length_s=HOUR_S, lost_s=(1800.0,))
    stay = served(day, SERVE, slow, 1, many, [Shift(0.0, 0.0), Shift(0.0, 0.0)], [])
    gone = served(day, SERVE, slow, 1, many, [Shift(0.0, 0.0, 1800.0, True), Shift(0.0, 0.0)], [])
    assert gone.resent >= 1 and stay.resent == 0
    assert gone.hours[0].ttft_s >= stay.hours[0].ttft_s
    assert gone.device_hours == 1.5 and stay.device_hours == 2.0


def test_requests_go_in_turn_to_those_that_are_up():
    shifts = [Shift(0.0, 0.0, 10.0), Shift(0.0, 5.0), Shift(12.0, 15.0)]
    assert dealt_over(shifts, np.array([1.0, 6.0, 7.0, 11.0, 16.0, 17.0])).tolist() == [0, 1, 0, 1, 1, 2]


def test_a_day_is_as_long_and_as_steep_as_its_words_say():
    day = parse("low=2,peak=12h,length=24h,start=90s,room=25%,lose=3h,lose=1h")
    assert (day.start_s, day.room, day.lost_s) == (90.0, 0.25, (HOUR_S, 3 * HOUR_S))
    many = requests_of(day, 10.0, drawn())
    # the mean of a cosine between 2 and 10 is 6 a second
    assert len(many) == pytest.approx(6 * 86_400, rel=0.01)
    noon = ((many.arrival_s > 11.5 * HOUR_S) & (many.arrival_s < 12.5 * HOUR_S)).sum() / HOUR_S
    night = (many.arrival_s < 0.5 * HOUR_S).sum() / (0.5 * HOUR_S)
    assert noon == pytest.approx(10.0, rel=0.05) and night == pytest.approx(2.0, rel=0.1)
    same = requests_of(ServingDay(length_s=HOUR_S), 10.0, drawn())
    assert same.arrival_s.max() < HOUR_S and len(same) < len(drawn())


def test_everything_wrong_in_a_day_is_said_at_once():
    with pytest.raises(MeshwrightError) as error:
        parse("lo=1,start=x,room=2,lose=30h,low=1,low=2")
    assert sorted(d.code for d in error.value.diagnostics) == ["W001", "W002", "W002", "W005", "W005"]


def test_training_has_what_serving_leaves_and_pays_for_every_change(monkeypatch):
    trained = lambda model, cluster, train: beside.TrainedOn(cluster.num_devices, "x", 10.0 * cluster.num_devices)  # noqa: E731
    monkeypatch.setattr(beside, "_trained", trained)
    cluster = mw.load_cluster("4x8xh100")
    found = beside.trained_beside(None, cluster, Train(global_batch=8, seq_len=8), [3, 8, 9, 12], [17] * 4, 600.0)
    assert found.devices == (24, 24, 16, 16) and found.restarts == 1  # whole nodes
    assert found.tokens == 10.0 * (2 * 24 * HOUR_S + 16 * (HOUR_S - 600.0) + 16 * HOUR_S)
    assert found.devices_apart == 8 and found.tokens_apart == 10.0 * 8 * 4 * HOUR_S


def test_a_day_with_a_training_job_is_one_command(capsys):
    words = [
        "search",
        "llama3-8b",
        "--on",
        "16xh100",
        "--fix",
        "tp=1",
        "--fix",
        "pp=1",
        "--fix",
        "nano=1",
        "--top",
        "1",
    ]
    serve = "rate=20,prompt=512,output=64,requests=400,policy=vllm-v1,budget=2048,max_batch=64"
    day = ["--day", "low=2,length=3h,peak=2h", "--train", "batch=64,seq=2048"]
    assert main([*words, "--serve", serve, "--slo", "ttft=500ms,tpot=50ms@p90", *day, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["day"]
    assert said["good"] and said["scaled"]["device_hours"] <= said["fixed"]["device_hours"]
    assert len(said["scaled"]["hours"]) == 3 and said["training"]["tokens"] > 0 and said["training"]["devices"][0] == 8


def test_a_day_needs_bounds_that_a_replica_can_keep_and_a_rate_above_its_lowest(capsys):
    words = ["search", "llama3-8b", "--on", "1xh100", "--serve", "rate=2,prompt=8,output=8,requests=20"]
    assert main([*words, "--slo", "ttft=1s", "--day", "low=5"]) == 2
    assert "not above it" in capsys.readouterr().err
    assert main([*words, "--slo", "ttft=1s", "--train", "batch=8,seq=8"]) == 2
    assert "say --day" in capsys.readouterr().err

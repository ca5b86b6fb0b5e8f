"""Fitting token exchange: constants recovered from runs made of them; published runs held out."""

import msgspec
import numpy as np

from meshwright.calibrate.network import exchange as network_exchange
from meshwright.calibrate.network.exchange import START, MeasuredExchange
from meshwright.cost.exchange import MoeExchange, exchange_seconds
from meshwright.work import Group, Hop

TRUE = msgspec.structs.replace(START, start_us=30.0, token_ns=25.0, fraction=0.8, expert_us=0.02)
NODE = Group(size=8, hops=(Hop(name="nvlink", members=8, gb_s=450.0, latency_us=0.6, below=1, topology="switch"),))


def made(hidden: int, experts: int, tokens: int) -> MeasuredExchange:
    item = MoeExchange(phase="dispatch", tokens=tokens, hidden=hidden, top_k=8, experts=experts, group=NODE)
    seconds = exchange_seconds(item, TRUE, each_expert=False)
    return MeasuredExchange("nvlink4", "normal", "made", item, seconds, (str(hidden), str(experts)))


RUNS = [made(h, e, 4**t) for h in (2048, 4096, 7168) for e in (64, 128, 256) for t in range(9)]


def test_runs_made_of_constants_are_predicted_from_what_was_fitted_to_them():
    constants = network_exchange.fit_runs(RUNS, START)
    errors = [abs(exchange_seconds(r.item, constants, each_expert=False) / r.seconds - 1) for r in RUNS]
    assert np.median(errors) < 0.01


def test_whole_groups_are_held_out():
    assert np.median(np.abs(network_exchange.held_out_errors(RUNS, START))) < 0.02


def test_a_folder_without_the_table_has_no_exchange(tmp_path):
    assert network_exchange.fit(tmp_path) == ()


def test_published_exchanges_held_out_are_predicted_within_fifteen_percent(data_dir):
    runs = network_exchange.read_runs(data_dir)
    deepep = [r for r in runs if r.fabric == "nvlink4" and r.mode == "normal" and r.item.phase == "dispatch"]
    assert len(deepep) > 500
    assert np.median(np.abs(np.expm1(network_exchange.held_out_errors(deepep, START)))) <= 0.15

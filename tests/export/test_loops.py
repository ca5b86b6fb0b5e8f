"""Modules for a loop of a user's own: torch's hooks and torchft's rounds, with the arguments that these have."""

import ast
import inspect
import warnings
from unittest.mock import Mock

import pytest

from meshwright.errors import Infeasible
from meshwright.export import target
from meshwright.spec import model
from tests.export.questions import ask

QUESTION = "llama3.2-1b", "16xh100", "batch=64,seq=2048"
ROUNDS = "dp16 sync=streaming-diloco:h=104,codec=fp8"
#: Policy -> the name that is registered with DDP; "" for its own exchange.
HOOKS = {
    "dp16": "",
    "dp16 sync=bf16": "bf16_compress_hook",
    "dp16 sync=fp16": "fp16_compress_hook",
    "dp16 sync=powersgd:rank=2": "powerSGD_hook",
    "dp16 sync=local:h=8": "post_localSGD_hook",
    "dp16 shard4 sync=local:h=8": "post_localSGD_hook",
    "dp16 sync=int8": "mw.sync.hook('int8')",
    "dp16 sync=topk:share=0.1": "mw.sync.hook('topk:share=0.1')",
    "dp16 sync=step:combine=median": "mw.sync.hook('step:combine=median')",
}


def calls(text):
    """Name of what is called -> its keyword arguments as Python."""
    return {
        ast.unparse(node.func).rpartition(".")[2]: {k.arg: ast.unparse(k.value) for k in node.keywords}
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
    }


def registered(text):
    """The call that is given to DDP's register_comm_hook, as Python."""
    return [
        ast.unparse(node.args[1])
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_comm_hook")
    ]


@pytest.mark.parametrize("words", HOOKS)
def test_a_policy_is_the_hook_that_means_the_same(words):
    text = ask("torch-ddp", *QUESTION, words).text
    assert registered(text) == [HOOKS[words]] * bool(HOOKS[words])
    keys = target("torch-ddp").keys
    for name, arguments in calls(text).items():
        if name in keys:
            assert set(arguments) == set(keys[name])
    assert all("  # " in line for line in text.splitlines() if line.startswith("        ") and "=" in line)


def test_options_of_a_policy_are_arguments_of_the_hook():
    power = calls(ask("torch-ddp", *QUESTION, "dp16 sync=powersgd:rank=2").text)["PowerSGDState"]
    # Meshwright's factors are kept where they are smaller at all, from warm start to feedback: sync/codecs/powersgd.py
    assert (power["matrix_approximation_rank"], power["min_compression_rate"]) == ("2", "1")
    assert (power["use_error_feedback"], power["warm_start"], power["start_powerSGD_iter"]) == ("True", "True", "2")
    alone, four = (calls(ask("torch-ddp", *QUESTION, f"dp16 {s} sync=local:h=8").text) for s in ("", "shard4"))
    assert alone["PeriodicModelAverager"]["period"] == four["PeriodicModelAverager"]["period"] == "8"
    assert alone["PostLocalSGDState"]["post_local_gradient_allreduce"] == "False"
    assert four["PostLocalSGDState"]["post_local_gradient_allreduce"] == "True"


@pytest.mark.parametrize(
    ("to", "words", "reason"),
    [
        ("torch-ddp", "dp16 sync=diloco:h=100", "it exchanges once in 100 steps"),
        ("torch-ddp", "dp16 sync=local:h=8,moments=mean", "it exchanges once in 8 steps"),
        ("torch-ddp", "dp16 sync=local:h=8,codec=int8", "it exchanges once in 8 steps"),
        ("torch-ddp", "dp16 sync=qsr:h=1,growth=2,rate=1,steps=8", "it exchanges once in"),
        ("torchft", "dp16 sync=qsr:h=2,growth=2,rate=1,steps=8", "these rounds grow"),
        ("torch-ddp", "dp16 sync=gossip", "sees the gradients of every step"),
        ("torch-ddp", "dp16 sync=ddm", "models of their own"),
        ("torchft", "dp16 sync=dipaco:levels=2x2", "models of their own"),
        ("torch-ddp", "fsdp", "every rank holds the whole model"),
        ("torchft", "dp16 sync=powersgd", "this exchanges gradients"),
        ("torchft", "dp16 sync=co2:h=8", "comes a round late"),
        ("torchft", "dp16 sync=eager-diloco:h=8", "this outer step is eager"),
        ("torchft", "dp16 sync=diloco:h=8,start=backward", "sends layers within the backward"),
        ("torchft", "dp16 sync=fedavg:h=8", "clients of a server"),
        ("torchft", "dp16 sync=diloco:h=8,codec=int8", "in fp8, and these in int8"),
        ("torchft", "dp16 sync=local:h=8,codec=fp8", "travel as they are, and these in fp8"),
        ("torchft", "fsdp", "FSDP2 shards each inside its own"),
        ("torchft", "hsdp8", "replicas of one rank in every step"),
        ("deepspeed", "fsdp sync=qsdp", "scatters gradients in 4"),
        ("deepspeed", "zero2 sync=qsdp:grads=4", "of stage 3"),
    ],
)
def test_what_another_loop_cannot_do_is_refused_with_the_reason(to, words, reason):
    with pytest.raises(Infeasible, match=reason):
        ask(to, *QUESTION, words)


def test_rounds_that_torchft_cannot_divide_are_offered_with_the_next_length_that_it_can():
    with pytest.raises(Infeasible) as caught:
        ask("torchft", *QUESTION, "dp16 sync=streaming-diloco:h=100")
    fp4, h = caught.value.diagnostics
    assert "fp4" in fp4.message and "h/8 steps" in h.message
    # 8 parts, due every 13 of 104 steps, above the delay of 5
    assert "sync=streaming-diloco:h=104,codec=none" in h.help


def test_torchft_gets_local_steps_outer_steps_and_streams_with_their_options():
    local = calls(ask("torchft", *QUESTION, "hsdp8 sync=local:h=8").text)
    assert local["LocalSGD"]["sync_every"] == "8" and "fully_shard" in local
    assert local["Manager"]["min_replica_size"] == "2"  # 16 ranks in replicas of 8
    diloco = calls(ask("torchft", *QUESTION, "dp16 sync=diloco:h=100,rate=0.5,momentum=0").text)
    assert (diloco["SGD"]["lr"], diloco["SGD"]["nesterov"]) == ("0.5", "False")  # torch: no Nesterov without momentum
    assert diloco["DiLoCo"]["should_quantize"] == "False" and diloco["DiLoCo"]["sync_every"] == "100"
    stream = calls(ask("torchft", *QUESTION, ROUNDS).text)
    assert stream["SGD"] == {"params": "part.parameters()", "lr": "0.7", "momentum": "0.9", "nesterov": "True"}
    said = stream["DiLoCo"]
    assert (said["fragment_sync_delay"], said["fragment_update_alpha"], said["should_quantize"]) == ("5", "0.5", "True")
    for made in (local, diloco, stream):
        for name in made.keys() & target("torchft").keys.keys():
            assert set(made[name]) == set(target("torchft").keys[name])


@pytest.mark.parametrize(("pattern", "first"), [("strided", [0, 8]), ("sequential", [0, 1])])
def test_the_parts_of_a_stream_are_all_layers_once(pattern, first):
    text = ask("torchft", *QUESTION, f"{ROUNDS},pattern={pattern}").text
    (layers,) = [ast.literal_eval(n.value) for n in ast.parse(text).body if isinstance(n, ast.Assign)]
    assert layers[0] == first and len(layers) == 8
    assert sorted(layer for part in layers for layer in part) == list(range(model.load("llama3.2-1b").num_layers))


def test_eight_bits_are_integers_where_torchft_has_no_floating_ones():
    older = ("llama3.2-1b", "16xa100-80", "batch=64,seq=2048")
    assert calls(ask("torchft", *older, "dp16 sync=diloco:h=8,codec=int8").text)["DiLoCo"]["should_quantize"] == "True"
    with pytest.raises(Infeasible, match="in int8, and these in fp8"):
        ask("torchft", *older, "dp16 sync=diloco:h=8,codec=fp8")


@pytest.mark.parametrize("to", ["torch-ddp", "torchft"])
def test_the_module_and_the_notes_name_the_version(to):
    from meshwright.export.engines import exporter

    assert target(to).label in exporter(to).__doc__
    exported = ask(to, *QUESTION, "dp16 sync=local:h=8")
    assert target(to).label in exported.text and exported.notes[0].startswith(f"written for {target(to).label}: ")
    assert any("torchrun --nnodes=" in note for note in exported.notes)


def test_the_arguments_are_those_of_the_installed_torch():
    pytest.importorskip("torch")
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    keys = target("torch-ddp").keys
    for made in (powerSGD_hook.PowerSGDState, post_localSGD_hook.PostLocalSGDState, PeriodicModelAverager):
        assert set(keys[made.__name__]) <= set(inspect.signature(made).parameters)
    homes = (default_hooks, powerSGD_hook, post_localSGD_hook)
    assert all(any(hasattr(home, name) for home in homes) for name in keys["hooks"])


def test_the_arguments_are_those_of_the_installed_torchft():
    local_sgd = pytest.importorskip("torchft.local_sgd", reason="torchft is not installed")
    from torchft import Manager

    for made in (Manager, local_sgd.LocalSGD, local_sgd.DiLoCo):
        assert set(target("torchft").keys[made.__name__]) <= set(inspect.signature(made).parameters)


def test_torchft_sends_the_parts_of_a_stream_the_delay_before_they_are_due():
    local_sgd = pytest.importorskip("torchft.local_sgd", reason="torchft is not installed")
    torch = pytest.importorskip("torch")
    stream = "dp4 sync=streaming-diloco:h=12,parts=2,codec=none,delay=2"
    space = {}
    exec(
        compile(ask("torchft", "llama3.2-1b", "4xh100", "batch=8,seq=2048", stream).text, "replicas.py", "exec"), space
    )
    layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(16))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    manager = Mock(_use_async_quorum=False, **{"current_step.return_value": 0, "should_commit.return_value": True})
    sent = []
    with space["rounds"](manager, space["parts"]([], layers, []), optimizer) as made:
        assert isinstance(made, local_sgd.DiLoCo)
        for _ in range(12):
            layers[0](torch.ones(1)).backward()
            optimizer.step()
            sent.append(manager.start_quorum.call_count)
    # one of two parts is due every 6 steps, and sent 2 before
    assert sent == [0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2]


def trained(rank, text, steps):
    """A user's loop around the module: parameters after each step, and the gradients of each step alone."""
    torch = pytest.importorskip("torch")
    space = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.distributed.optim
        exec(compile(text, "replicas.py", "exec"), space)  # the module as a script imports it
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))
    ddp, out = space["replicate"](net), []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer = space.get("local_steps", lambda one: one)(optimizer)
    torch.manual_seed(1 + rank)
    for _ in range(steps):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        grads = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
        optimizer.step()
        out.append((grads, torch.cat([p.detach().reshape(-1) for p in net.parameters()])))
    return torch.stack([torch.cat(pair) for pair in out])


#: DDP takes bf16_compress_hook on NCCL and XCCL alone, local steps have a test of their own, and two have no median.
HERE = [words for words in HOOKS if not any(name in words for name in ("bf16", "local", "median"))]


@pytest.mark.parametrize("words", HERE)
def test_the_module_keeps_two_replicas_of_a_users_loop_together(words):
    torch = pytest.importorskip("torch")
    from tests.run.processes import launch

    text = ask("torch-ddp", "llama3.2-1b", "2xh100", "batch=8,seq=2048", words.replace("dp16", "dp2")).text
    one, other = launch(2, trained, text, 3)
    assert torch.isfinite(one).all() and torch.equal(one, other)  # the same gradients, hence the same parameters


def test_the_module_of_local_steps_lets_replicas_of_two_ranks_apart_until_a_round_ends():
    torch = pytest.importorskip("torch")
    from tests.run.processes import launch

    text = ask("torch-ddp", "llama3.2-1b", "4xh100", "batch=8,seq=2048", "dp4 shard2 sync=local:h=3").text
    ranks = [out[:, out.shape[1] // 2 :] for out in launch(4, trained, text, 4)]
    assert torch.equal(ranks[0], ranks[1]) and torch.equal(ranks[2], ranks[3])
    apart = [not torch.equal(a, b) for a, b in zip(ranks[0], ranks[2])]
    assert apart == [True, True, False, True]  # a round of 3 steps ends with its third

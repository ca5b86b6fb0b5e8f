"""Clients of a server that learn labels: rounds on a virtual clock, with the values that their steps come to.

The deciders are those that predictions and runs have; what happened when is :func:`simulate_clients`'s log, and the
values are softmax regression in numpy, of float64, as the executor trains it (a test has both).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from meshwright.papers.checks.image_clients import fedprox_on_digits
from meshwright.papers.outcome import WITHIN, Check, Figure, Outcome, by_processes
from meshwright.simulate.clients import ClientSizes, simulate_clients
from meshwright.sync.clients import Answered, Merge, TrainOn
from meshwright.sync.policy import read
from meshwright.world.crowd import Crowd, Slowness
from meshwright.world.decider import LogEntry

#: Sizes of the data set Synthetic(1, 1) (Li et al. 1812.06127, section 5.1 and appendix C.1).
FEATURES, CLASSES, DEVICES = 60, 10, 30
#: Of its samples so many are tested on; steps are of so many, with this learning rate (appendix C.2).
TESTED, BATCH, RATE = 0.1, 10, 0.01
#: Devices of a round; rounds; steps of a task, 20 epochs of the median device's 105 samples; the proximal term.
CHOSEN, ROUNDS, STEPS, MU = 10, 200, 200, 1.0
#: Draws of the data set that accuracies are the mean of.
DRAWS = 3

Array = NDArray[np.float64]
#: Samples of a client: features [n, features] and classes [n].
Samples = tuple[Array, NDArray[np.int64]]


def synthetic(alpha: float, beta: float, seed: int = 0) -> list[Samples]:
    """The samples of every device of Synthetic(alpha, beta): each has a model of its own, which labels features that
    are drawn around a centre of its own."""
    rng = np.random.default_rng(seed)
    counts = rng.lognormal(4, 2, DEVICES).astype(int) + 50
    spread = np.arange(1, FEATURES + 1) ** -0.6  # standard deviations: variances are j^-1.2
    models, centres = rng.normal(0, alpha, DEVICES), rng.normal(0, beta, DEVICES)
    out = []
    for count, model, centre in zip(counts.tolist(), models, centres):
        middle = rng.normal(centre, 1, FEATURES)
        weights, bias = rng.normal(model, 1, (FEATURES, CLASSES)), rng.normal(model, 1, CLASSES)
        features = middle + rng.normal(size=(count, FEATURES)) * spread
        out.append((features, np.argmax(features @ weights + bias, 1)))
    return out


class RegressionClients:
    """Clients that train softmax regression on samples of their own. A model is a bias and a row for each feature,
    [1 + features, classes]."""

    def __init__(self, samples: Sequence[Samples], batch: int, rate: float, mu: float, seed: int = 0):
        ones = [np.concatenate((np.ones((len(x), 1)), x), 1) for x, _ in samples]
        self.features, self.classes = ones, [y for _, y in samples]
        self.batch, self.rate, self.mu, self.seed = batch, rate, mu, seed
        #: Steps that each has taken, which say where it is in its samples.
        self.taken = [0] * len(samples)

    def _rows(self, client: int, steps: int) -> NDArray[np.int64]:
        """The samples of a client's next steps [steps, batch]: every epoch visits each once, in an order of its own."""
        count, first = len(self.classes[client]), self.taken[client] * self.batch
        epochs, within = np.divmod(np.arange(first, first + steps * self.batch), count)
        out = np.empty_like(within)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            out[mine] = np.random.default_rng((self.seed, client, epoch)).permutation(count)[within[mine]]
        self.taken[client] += steps
        return out.reshape(steps, self.batch)

    def changes(self, start: Sequence[Array], clients: Sequence[int], steps: Sequence[int]) -> list[Array]:
        """Return what tasks of some clients change, each of so many steps from a model, side by side in one product."""
        order = sorted(range(len(clients)), key=lambda i: -steps[i])  # those that are at work longest first
        begun = np.stack([start[i] for i in order])
        shape = (len(clients), max(steps), self.batch)
        x, y = np.zeros((*shape, begun.shape[1])), np.zeros(shape, np.int64)
        for place, i in enumerate(order):
            client, count = clients[i], steps[i]
            rows = self._rows(client, count)
            x[place, :count], y[place, :count] = self.features[client][rows], self.classes[client][rows]
        model, right = begun.copy(), np.eye(begun.shape[2])
        live = [sum(steps[i] > step for i in order) for step in range(max(steps))]
        for step, some in enumerate(live):
            now = x[:some, step]
            likely = np.exp((scores := now @ model[:some]) - scores.max(-1, keepdims=True))
            likely /= likely.sum(-1, keepdims=True)
            likely -= right[y[:some, step]]
            gradient = now.transpose(0, 2, 1) @ likely / self.batch + self.mu * (model[:some] - begun[:some])
            model[:some] -= self.rate * gradient
        found = dict(zip(order, model - begun))
        return [found[i] for i in range(len(clients))]

    def replayed(self, log: Sequence[LogEntry], model: Array) -> Array:
        """The server's model behind all that a log of events and decisions says."""
        given: dict[tuple[int, int], Array] = {}
        arrived: dict[tuple[int, int], int] = {}
        for entry in log:
            if isinstance(entry.event, Answered):
                arrived[entry.event.client, entry.event.task] = entry.event.steps
            for decision in entry.decisions:
                match decision:
                    case TrainOn(client=client, task=task):
                        given[client, task] = model
                    case Merge(parts=parts):
                        keys = [(part.client, part.task) for part in parts]
                        starts, clients = [given.pop(key) for key in keys], [client for client, _ in keys]
                        changes = self.changes(starts, clients, [arrived.pop(key) for key in keys])
                        model = model + sum(part.change * one for part, one in zip(parts, changes))
        return model

    def accuracy(self, model: Array, samples: Sequence[Samples]) -> float:
        """The share of samples of all devices that a model tells the classes of."""
        x, y = (np.concatenate(some) for some in zip(*samples))
        return float(np.mean(np.argmax(x @ model[1:] + model[0], 1) == y))


def rounds_of(
    words: str, world: Crowd, clients: int, num_steps: int, rounds: int | None = None
) -> tuple[LogEntry, ...]:
    """The log of so many clients with steps of a second and messages of no time, until so many of their steps are
    merged, or there have been so many rounds."""
    policy, none = read(words), (0.0,) * clients
    sizes = ClientSizes(step_s=(1.0,) * clients, down_s=none, up_s=none, down_bytes=1, up_bytes=1)
    return simulate_clients(sizes, policy.rule.decider(policy.values, clients), world, num_steps, rounds).log


def straggling(words: str, mu: float, seed: int = 0) -> float:
    """Accuracy on all devices' tests after the paper's rounds on Synthetic(1, 1), where nine tasks of ten do half of
    their steps in the time of a round."""
    samples = synthetic(1.0, 1.0, seed)
    cut = [int(len(y) * (1 - TESTED)) for _, y in samples]
    train, test = ([(x[part], y[part]) for (x, y), part in zip(samples, parts)]
                   for parts in ([slice(n) for n in cut], [slice(n, None) for n in cut]))  # fmt: skip
    world = Crowd(jitter=Slowness("slow", (0.9, 2.0)), seed=seed)
    log = rounds_of(words, world, DEVICES, CHOSEN * ROUNDS * STEPS, ROUNDS)
    clients = RegressionClients(train, BATCH, RATE, mu, seed)
    return clients.accuracy(clients.replayed(log, np.zeros((1 + FEATURES, CLASSES))), test)


def fedprox() -> Outcome:
    """FedProx and FedAvg where nine devices of ten are stragglers, in the mean over some draws of the data."""
    how = f"h={STEPS},clients={CHOSEN},wait=0.1"
    prox, average = (
        [straggling(f"{rule}:{how}", mu, seed) for seed in range(DRAWS)]
        for rule, mu in (("fedprox", MU), ("fedavg", 0.0))
    )
    gains = [100 * (one - other) for one, other in zip(prox, average)]
    what = "points of test accuracy over FedAvg that drops stragglers: Synthetic(1, 1), 90% stragglers"
    span = f"{min(gains):.1f} to {max(gains):.1f} points by the draw of the data"
    why = f"the paper's is the mean over five data sets, of which this is one: {span}"
    return Outcome(
        figures=(
            Figure(what, 22.0, fmean(gains), "points", WITHIN, 0.1, why, headline=True),
            Figure("test accuracy of FedProx there", None, fmean(prox)),
            Figure("test accuracy of FedAvg there", None, fmean(average)),
        ),
        baseline="FedAvg that drops who has not done its steps when a tenth of a round's devices have",
        assumptions=(
            "a task is of 200 steps, 20 epochs of the median device, where each of the paper's has 20 epochs",
            "stragglers are nine tasks of ten at half the speed, where the paper's do an even share of their epochs",
            "devices are chosen evenly and their changes averaged alike, where the paper's are chosen by their samples",
        ),
    )


CHECKS: dict[str, Check] = {"fedprox": Check(lambda: by_processes(fedprox(), "training on digits", fedprox_on_digits))}

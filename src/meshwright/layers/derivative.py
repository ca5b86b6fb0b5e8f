"""The backward of a computation, derived as more steps of the same kind: joins, sums and functions.

Of a join the gradient of an operand is a join too, of the result's gradient with the other operands, summed over the
keys that the operand has not; of a function it is a join with its slopes; of what is read several times, a sum. So the
backward is placed by the same search as the forward, each of its joins by itself. Tang et al., 2023, arXiv 2306.00088.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from meshwright.spec.computation import (
    ADD,
    JOIN,
    ONE,
    OVER_A_KEY,
    PRESENT,
    SLOPE,
    UPDATE,
    Computation,
    ComputationStep,
    KeyedTensor,
)

Keys = tuple[str, ...]


def gradient(name: str) -> str:
    """The name of a tensor's gradient."""
    return f"d({name})"


def updated(name: str) -> str:
    """The name of a trained input behind the step."""
    return f"{name} updated"


def derived(forward: Computation) -> Computation:
    """Return the computation with the steps of its backward behind its own, and one of gradient descent for every
    trained input."""
    return _Backward(forward).whole()


class _Backward:
    """The steps of a backward, in the order in which they are made."""

    def __init__(self, forward: Computation):
        self.forward, self.tensors = forward, dict(forward.tensors)
        self.steps: list[ComputationStep] = []
        self.needed = {t.name for t in forward.inputs if t.trained}
        for step in forward.steps:
            if step.kind != PRESENT and self.needed & set(step.inputs):
                self.needed.add(step.output)
        #: How many terms a tensor's gradient has, and those that were found so far.
        self.num_terms = Counter(n for step in forward.steps if step.output in self.needed for n in step.inputs)
        self.terms: dict[str, list[str]] = {}
        #: The relation of ones of every sparse input.
        self.present = {s.inputs[0]: s.output for s in forward.steps if s.kind == PRESENT}

    def whole(self) -> Computation:
        seed = self.make(ONE, gradient(self.forward.loss), ())
        self.terms[self.forward.loss] = [seed]
        for step in reversed(self.forward.steps):
            if step.output in self.needed:
                self.back(step, self.total(step.output))
        for tensor in self.forward.inputs:
            if tensor.trained:
                own = (tensor.keys, tensor.keys)
                inputs = (tensor.name, self.total(tensor.name))
                factors = (1.0, -self.forward.rate)
                self.make(
                    UPDATE, updated(tensor.name), tensor.keys, inputs, own, factors=factors, rows_of=tensor.rows_of
                )
        read = {name for step in (*self.forward.steps, *self.steps) for name in step.inputs}
        if seed not in read:  # no step reads the 1 that all began with
            self.steps.pop(0)
            del self.tensors[seed]
        steps = (*self.forward.steps, *self.steps)
        return msgspec.structs.replace(self.forward, tensors=self.tensors, steps=steps)

    def make(
        self,
        kind: str,
        name: str,
        keys: Keys,
        inputs: Sequence[str] = (),
        read: Sequence[Keys] = (),
        *,
        factors: tuple[float, ...] = (1.0,),
        over: str = "",
        rows_of: str = "",
    ) -> str:
        """Add a step, and return the name of what it makes."""
        self.steps.append(
            ComputationStep(
                kind=kind, output=name, keys=keys, inputs=tuple(inputs), read=tuple(read), factors=factors, over=over
            )
        )
        self.tensors[name] = KeyedTensor(name=name, keys=keys, rows_of=rows_of)
        return name

    def term(self, of: str) -> str:
        """A name for one more term of a gradient, or for its only one."""
        one = self.num_terms[of] == 1
        return gradient(of) if one else f"{gradient(of)}.{len(self.terms.get(of, ())) + 1}"

    def found(self, of: str, name: str) -> None:
        self.terms.setdefault(of, []).append(name)

    def total(self, of: str) -> str:
        """The whole gradient of a tensor: its only term, or the sum of all."""
        terms = self.terms[of]
        if len(terms) == 1:
            return terms[0]
        tensor = self.tensors[of]
        keys = [tensor.keys] * len(terms)
        ones = (1.0,) * len(terms)
        return self.make(ADD, gradient(of), tensor.keys, terms, keys, factors=ones, rows_of=tensor.rows_of)

    def rows(self, of: str) -> str:
        """Ones where a sparse input has rows."""
        if of not in self.present:
            keys = self.tensors[of].keys
            self.present[of] = self.make(PRESENT, f"present({of})", keys, (of,), (keys,), rows_of=of)
        return self.present[of]

    def back(self, step: ComputationStep, above: str) -> None:
        """Add the gradients of what a step reads, by that of what it makes."""
        if step.kind in OVER_A_KEY:
            self._over_a_key(step, above)
            return
        for number, (name, keys) in enumerate(zip(step.inputs, step.read)):
            if name not in self.needed:
                continue
            others = [(o, k) for i, (o, k) in enumerate(zip(step.inputs, step.read)) if i != number]
            factor = step.factors[number if step.kind == ADD else 0]
            if step.kind == ADD:
                others = []
            elif step.kind != JOIN:
                rows = self.tensors[name].rows_of
                slope = self.make(step.kind + SLOPE, f"{self.term(name)} slope", keys, (name,), (keys,), rows_of=rows)
                others = [(slope, keys)]
            self.joined(name, keys, above, step.keys, others, factor)

    def joined(
        self, of: str, keys: Keys, above: str, above_keys: Keys, others: list[tuple[str, Keys]], factor: float
    ) -> None:
        """Add a term of a gradient: the gradient `above` joined with the others, summed over what `of` has not."""
        if above_keys == keys and not others and factor == 1.0:
            self.found(of, above)
            return
        read = [(above, above_keys), *others]
        if others and above == gradient(self.forward.loss):  # a 1
            read = others
            if len(read) == 1 and read[0][1] == keys and factor == 1.0:
                self.found(of, read[0][0])
                return
        rows = self.tensors[of].rows_of
        if rows and not any(self.tensors[name].rows_of for name, _ in read):
            read.append((self.rows(rows), keys))
        inputs, by = zip(*read)
        self.found(of, self.make(JOIN, self.term(of), keys, inputs, by, factors=(factor,), rows_of=rows))

    def _over_a_key(self, step: ComputationStep, above: str) -> None:
        """The gradient of a softmax y over a key is y (g - sum(g y)), of its logarithm l it is g - exp(l) sum(g)."""
        (name,), keys = step.inputs, step.keys
        if name not in self.needed:
            return
        less = tuple(key for key in keys if key != step.over)
        made, base = step.output, self.term(name)
        if step.kind == "softmax":
            total = self.make(JOIN, f"{base} total", less, (above, made), (keys, keys))
            apart = self.make(ADD, f"{base} apart", keys, (above, total), (keys, less), factors=(1.0, -1.0))
            self.found(name, self.make(JOIN, base, keys, (made, apart), (keys, keys)))
            return
        total = self.make(JOIN, f"{base} total", less, (above,), (keys,))
        shares = self.make("exp", f"{base} shares", keys, (made,), (keys,))
        part = self.make(JOIN, f"{base} part", keys, (shares, total), (keys, less))
        self.found(name, self.make(ADD, base, keys, (above, part), (keys, keys), factors=(1.0, -1.0)))

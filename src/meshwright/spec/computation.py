"""A computation of a user's own as relations: tensors with named keys, and steps that join, add and map them to a loss.

A tensor is a relation of its keys and a value; a dense one has a row for every key, a sparse one (a graph's edges) for
some. A *join* multiplies the values of rows whose shared keys agree, and sums over the keys that its result has not: an
einsum. The backward of such a computation is one too (``layers/derivative.py``). Tang et al., 2023, "Auto-
Differentiation of Relational Computations for Very Large Scale Machine Learning", arXiv 2306.00088.

A step is one line::

    Z[node,out] = H[node,in] * W[in,out]            # a join; in is summed
    Y[node,out] = Z[node,out] + b[out]              # a sum of tensors; b is read for every node
    A[node,out] = relu(Y[node,out])                 # a function of every value
    loss = 1/node * sum(node, out) A[node,out] * A[node,out]
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from math import isfinite, prod
from typing import NamedTuple

import msgspec

from meshwright.errors import nearest

#: Functions of every value by itself, and those over one key.
POINTWISE = ("relu", "gelu", "sigmoid", "tanh", "exp", "log", "square", "sqrt", "reciprocal")
OVER_A_KEY = ("softmax", "log_softmax")
#: 1 for every row of a sparse relation.
PRESENT = "present"
FUNCTIONS = (*POINTWISE, *OVER_A_KEY, PRESENT)
#: Kinds of steps beside functions: :data:`ONE` is the gradient of the loss, :data:`UPDATE` a step of gradient descent.
JOIN, ADD, ONE, UPDATE = "join", "add", "one", "update"
#: The end of a function's name whose values are the function's slopes.
SLOPE = "'"
#: Ways of a step that cut no key: rows of a sparse relation by their number, and all of it on every rank.
BY_NUMBER, ON_EVERY_RANK = "by number", "on every rank"
#: Bytes of a row's key in a sparse relation (an int32).
KEY_BYTES = 4.0


class KeyedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A relation: ``keys`` are names of dims. ``rows_of``: it has rows where that sparse input has some; "": it is
    dense. ``trained`` inputs are updated; ``values`` says what a run fills an input with."""

    name: str
    keys: tuple[str, ...]
    rows_of: str = ""
    trained: bool = False
    values: str = "normal"


class ComputationStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step: ``kind`` is :data:`JOIN`, :data:`ADD`, a function, :data:`ONE` or :data:`UPDATE`; ``read`` has the keys
    by which every input is read, ``keys`` those of the result. ``factors``: of a join one, of a sum one for each input.
    ``over``: the key of a function over one."""

    kind: str
    output: str
    keys: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    read: tuple[tuple[str, ...], ...] = ()
    factors: tuple[float, ...] = (1.0,)
    over: str = ""

    @property
    def summed(self) -> tuple[str, ...]:
        """Keys that are summed over, in the order in which they are read."""
        return tuple(dict.fromkeys(k for keys in self.read for k in keys if k not in self.keys))

    @property
    def text(self) -> str:
        """The line that says it."""
        inputs = [_keyed(name, keys) for name, keys in zip(self.inputs, self.read)]
        left = _keyed(self.output, self.keys)
        if self.kind == JOIN:
            factor = "" if self.factors[0] == 1.0 else f"{self.factors[0]:g} * "
            summed = f"sum({', '.join(self.summed)}) " if self.summed else ""
            return f"{left} = {factor}{summed}{' * '.join(inputs)}"
        if self.kind in (ADD, UPDATE):
            terms = [_term(factor, one) for factor, one in zip(self.factors, inputs)]
            return f"{left} = {' '.join(terms).removeprefix('+ ')}"
        if self.kind == ONE:
            return f"{left} = 1"
        return f"{left} = {self.kind}({', '.join([*inputs, *([self.over] if self.over else [])])})"


def _term(factor: float, text: str) -> str:
    sign, size = "-" if factor < 0 else "+", "" if abs(factor) == 1 else f"{abs(factor):g} * "
    return f"{sign} {size}{text}"


def _keyed(name: str, keys: tuple[str, ...]) -> str:
    return f"{name}[{','.join(keys)}]" if keys else name


class Computation(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of ``dims``, ``tensors`` by name (inputs first, then what steps make), rows of sparse inputs, ``steps`` in
    an order in which what is read has been made, and the name of the ``loss``. ``mesh``: axes with their sizes, the
    outermost first (none: all devices are one axis); ``rate``: of gradient descent. ``joins``: ways that are said of
    joins, by axis ("" for all): the key along which one is cut, :data:`BY_NUMBER` or :data:`ON_EVERY_RANK`."""

    name: str
    dims: dict[str, int]
    tensors: dict[str, KeyedTensor]
    nonzeros: dict[str, int]
    steps: tuple[ComputationStep, ...]
    loss: str = "loss"
    dtype: str = "fp32"
    mesh: tuple[tuple[str, int], ...] = ()
    rate: float = 0.1
    joins: dict[str, dict[str, str]] = {}

    @property
    def made(self) -> frozenset[str]:
        """Names of what steps make."""
        return frozenset(step.output for step in self.steps)

    @property
    def inputs(self) -> tuple[KeyedTensor, ...]:
        """The tensors that are given."""
        made = self.made
        return tuple(t for t in self.tensors.values() if t.name not in made)

    def shape(self, name: str) -> tuple[int, ...]:
        """The length of every key of a tensor; of a sparse one its number of rows behind them, which are cut as a
        dim is."""
        tensor = self.tensors[name]
        keys = tuple(self.dims[key] for key in tensor.keys)
        return (*keys, self.nonzeros[tensor.rows_of]) if tensor.rows_of else keys

    def numbers(self, name: str) -> int:
        """Values of a tensor."""
        tensor = self.tensors[name]
        return self.nonzeros[tensor.rows_of] if tensor.rows_of else prod(self.shape(name))

    def row_bytes(self, name: str, element: float) -> float:
        """Bytes of a value, with the keys that a sparse relation stores beside it."""
        tensor = self.tensors[name]
        return element + (KEY_BYTES * len(tensor.keys) if tensor.rows_of else 0.0)


# ---- the notation


class Unreadable(ValueError):
    """A step that cannot be read: the message, and how to mend it."""

    def __init__(self, message: str, help: str):
        super().__init__(message)
        self.help = help


class SaidStep(NamedTuple):
    """A step as a line says it, before anything is known of its tensors: of a join ``said_sum`` are the keys that it
    says are summed, None where it says none."""

    kind: str
    output: str
    keys: tuple[str, ...]
    operands: tuple[tuple[str, tuple[str, ...]], ...]
    factors: tuple[float, ...]
    over: str
    said_sum: tuple[str, ...] | None


_TOKEN = re.compile(r"\s*(?:(?P<number>\d+\.?\d*(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<sign>[][(),*+/=-]))")
_FORM = "write NAME[keys] = A[i,k] * B[k,j], A[i] + b[i], or relu(A[i])"


def tokens(text: str) -> list[str]:
    """The tokens of a line.

    Raises:
        Unreadable: a character that belongs to none.
    """
    found, at, text = [], 0, text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Unreadable(f"{text[at:].strip()[0]!r} cannot be read", _FORM)
        found.append(match[0].strip())
        at = match.end()
    return found


class _Line:
    """A line that is read from left to right."""

    def __init__(self, text: str, dims: Mapping[str, int]):
        self.left, self.dims = deque(tokens(text)), dims

    @property
    def next(self) -> str:
        return self.left[0] if self.left else ""

    def take(self, wanted: str = "") -> str:
        if not self.left or (wanted and self.next != wanted):
            what = f"{self.next!r} stands where {wanted or 'a name'!r} is meant" if self.left else "the line ends early"
            raise Unreadable(what, _FORM)
        return self.left.popleft()

    def name(self) -> str:
        if not self.next or not (self.next[0].isalpha() or self.next[0] == "_"):
            what = f"{self.next!r} is no name" if self.left else "the line ends where a name is meant"
            raise Unreadable(what, _FORM)
        return self.take()

    def names(self, close: str) -> tuple[str, ...]:
        found: list[str] = []
        while self.next != close:
            found.append(self.name())
            if self.next != close:
                self.take(",")
        self.take(close)
        return tuple(found)

    def keyed(self) -> tuple[str, tuple[str, ...]]:
        name = self.name()
        if self.next != "[":
            return name, ()
        self.take("[")
        return name, self.names("]")

    def number(self) -> float:
        value = float(self.take())
        while self.next == "/":
            self.take()
            word = self.take()
            if word == "(" or not (word[0].isdigit() or word in self.dims):
                raise Unreadable(f"a factor is divided by {word!r}", "divide by a number or a dim, such as 1/node/out")
            below = float(word) if word[0].isdigit() else float(self.dims[word])
            if not below:
                raise Unreadable("a factor is divided by 0", "divide by another number")
            value /= below
        if not isfinite(value):
            raise Unreadable("a factor is too large for a number", "write a smaller one")
        return value


def said(text: str, dims: Mapping[str, int]) -> SaidStep:
    """Read one step. Lengths of `dims` may divide a factor.

    Raises:
        Unreadable: it has another form.
    """
    line = _Line(text, dims)
    output, keys = line.keyed()
    line.take("=")
    if line.next in FUNCTIONS and len(line.left) > 1 and line.left[1] == "(":
        kind = line.take()
        line.take("(")
        operand, over = line.keyed(), ""
        if line.next == ",":
            line.take()
            over = line.name()
        line.take(")")
        step = SaidStep(kind, output, keys, (operand,), (1.0,), over, None)
    else:
        step = _terms(line, output, keys)
    if line.left:
        raise Unreadable(f"{' '.join(line.left)!r} is left over", "one step a line: a join, a sum or one function")
    return step


def _terms(line: _Line, output: str, keys: tuple[str, ...]) -> SaidStep:
    """The right side of a join or of a sum."""
    terms: list[tuple[float, list[tuple[str, tuple[str, ...]]]]] = []
    said_sum = None
    while not terms or line.next in ("+", "-"):
        sign = -1.0 if line.next == "-" else 1.0
        if line.next in ("+", "-"):
            line.take()
        factor, operands = sign, []
        while True:
            if line.next[:1].isdigit():
                factor *= line.number()
            elif line.next == "sum" and len(line.left) > 1 and line.left[1] == "(" and said_sum is None:
                line.take()
                line.take("(")
                said_sum = line.names(")")
                continue
            elif len(line.left) > 1 and line.left[1] == "(":
                known = line.next in FUNCTIONS
                what = f"{line.next} is part of a larger step" if known else f"unknown function {line.next!r}"
                own = "a function is a step of its own: B[i] = relu(A[i])"
                raise Unreadable(what, own if known else f"{nearest(line.next, FUNCTIONS)}; {own}")
            else:
                operands.append(line.keyed())
            if line.next != "*":
                break
            line.take()
        terms.append((factor, operands))
    if not all(operands for _, operands in terms):
        raise Unreadable("a number stands alone", "multiply it with a tensor")
    if len(terms) == 1:
        (factor, operands), *_ = terms
        return SaidStep(JOIN, output, keys, tuple(operands), (factor,), "", said_sum)
    if said_sum is not None or any(len(operands) > 1 for _, operands in terms):
        raise Unreadable("products are added up in one step", "make each product a step of its own, then add them")
    return SaidStep(ADD, output, keys, tuple(o for _, (o,) in terms), tuple(f for f, _ in terms), "", None)

"""The steps of a computation's file: each read by itself, then whether they lead from inputs to one loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from meshwright.errors import Diagnostic, nearest
from meshwright.spec.computation import (
    ADD,
    FUNCTIONS,
    JOIN,
    OVER_A_KEY,
    PRESENT,
    ComputationStep,
    KeyedTensor,
    SaidStep,
    Unreadable,
    said,
)

MOST_STEPS = 200


class FileNotes(Protocol):
    """The rest of a file, as its steps need it: its values and text, dims and inputs, and where faults are noted."""

    table: Mapping[str, Any]
    text: str
    wrong: list[Diagnostic]
    dims: dict[str, int]
    tensors: dict[str, KeyedTensor]

    def bad(self, line: int, where: str, message: str, help: str) -> None: ...

    def line(self, table: str, key: str = "") -> int: ...

    def keys(self, keys: tuple[str, ...], line: int, where: str) -> tuple[str, ...]: ...


def _at(rows: Sequence[str], first: int, line: str, number: int) -> int:
    """The file's line of a step: those of a text begin beside its quotes or below them."""
    for at in range(first - 1 + number, min(first + 2 + number, len(rows))):
        if at >= 0 and line in rows[at]:
            return at + 1
    return first


class StepsReader:
    """The steps of a file: each by itself, then whether they lead from inputs to one loss."""

    def __init__(self, reader: FileNotes, loss: str):
        self.reader, self.loss = reader, loss
        self.bad, self.tensors, self.dims = reader.bad, reader.tensors, reader.dims
        #: What a step makes -> it, and its line.
        self.said: dict[str, tuple[SaidStep, int]] = {}

    def read(self) -> tuple[ComputationStep, ...]:
        text = self.reader.table.get("steps")
        first = self.reader.line("", "steps")
        if not isinstance(text, str) or not text.strip():
            what = "it has no steps" if text is None else f"steps = {text!r} is no text of steps"
            self.bad(first, "steps", what, "say steps = '''...''' above the tables, a step a line")
            return ()
        said_lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        if (count := sum(map(bool, said_lines))) > MOST_STEPS:
            self.bad(first, "steps", f"{count} steps are too many", f"{MOST_STEPS} at most")
            return ()
        rows = self.reader.text.splitlines()
        for number, line in enumerate(said_lines):
            if line:
                self._line(line, _at(rows, first, line, number))
        found = [step for name in self._ordered() if (step := self._step(name)) is not None]
        self._whole(found)
        return tuple(found)

    def _line(self, text: str, at: int) -> None:
        try:
            step = said(text, self.dims)
        except Unreadable as error:
            self.bad(at, text, str(error), error.help)
            return
        if step.output in self.said or step.output in self.tensors:
            what = "an input" if step.output in self.tensors else f"made in line {self.said[step.output][1]}"
            self.bad(at, text, f"{step.output} is {what} already", "give this one another name")
            return
        if step.output in FUNCTIONS or step.output == "sum":
            self.bad(at, text, f"{step.output!r} is a function's name", "give the tensor another name")
        self.said[step.output] = step, at

    def _ordered(self) -> list[str]:
        """Names of tensors in an order in which all that a step reads is made before; a cycle is noted."""
        order: list[str] = []
        left = dict(self.said)
        while left:
            ready = [n for n, (s, _) in left.items() if not any(o in left for o, _ in s.operands)][:1]
            if not ready:
                # behind a cycle there may be more that waits for it: what is in it can be walked in circles
                at = next(iter(left))
                seen: list[str] = []
                while at not in seen:
                    seen.append(at)
                    at = next(o for o, _ in left[at][0].operands if o in left)
                circle = seen[seen.index(at) :]
                line = left[circle[0]][1]
                way = " <- ".join([*circle, circle[0]])
                self.bad(line, circle[0], f"steps read each other in a cycle: {way}", "let one of them read an input")
                ready = circle
            order += ready
            for name in ready:
                del left[name]
        return order

    def _step(self, name: str) -> ComputationStep | None:
        """A step whose tensors are known; None, and what is wrong is noted."""
        step, at = self.said[name]
        where, before = f"{name} = ...", len(self.reader.wrong)
        keys = self.reader.keys(step.keys, at, where)
        read = []
        for operand, said_keys in step.operands:
            tensor = self.tensors.get(operand)
            read.append(self.reader.keys(said_keys, at, where))
            if tensor is None:
                if operand not in self.said:
                    help = nearest(operand, list(dict.fromkeys([*self.tensors, *self.said])))
                    self.bad(at, where, f"nothing makes {operand!r}", help)
            elif len(said_keys) != len(tensor.keys):
                has = f"{operand}[{','.join(tensor.keys)}]" if tensor.keys else f"{operand}, a number"
                message = f"{operand} is read by {len(said_keys)} keys and has {len(tensor.keys)}"
                self.bad(at, where, message, f"it is {has}")
            else:
                for key, own in zip(said_keys, tensor.keys):
                    if key in self.dims and own in self.dims and self.dims[key] != self.dims[own]:
                        sizes = f"{key} is {self.dims[key]:,} long and {operand}'s {own} {self.dims[own]:,}"
                        self.bad(at, where, f"sizes do not match: {sizes}", "name a dim of its length")
        known = self.tensors.keys() >= {o for o, _ in step.operands}
        if known:
            self._form(step, keys, read, at, where)
        # what follows is judged as if this were right, as far as it has keys
        rows = self._rows(step, keys, read) if known and len(self.reader.wrong) == before else ""
        self.tensors[name] = KeyedTensor(name=name, keys=keys, rows_of=rows)
        if not known or len(self.reader.wrong) > before:
            return None
        return ComputationStep(
            kind=step.kind,
            output=name,
            keys=keys,
            inputs=tuple(o for o, _ in step.operands),
            read=tuple(read),
            factors=step.factors,
            over=step.over,
        )

    def _rows(self, step: SaidStep, keys: tuple[str, ...], read: Sequence[tuple[str, ...]]) -> str:
        """The sparse input whose rows a step's result has; "" of a dense one."""
        for (operand, _), its in zip(step.operands, read):
            rows = self.tensors[operand].rows_of
            if rows and (step.kind != JOIN or set(its) <= set(keys)):
                return rows
        return ""

    def _form(self, step: SaidStep, keys: tuple[str, ...], read: list[tuple[str, ...]], at: int, where: str) -> None:
        """Note what a step of this kind cannot do."""
        names = [o for o, _ in step.operands]
        there = dict.fromkeys(k for its in read for k in its)
        for key in keys:
            if key not in there:
                self.bad(
                    at, where, f"{key!r} is a key of the result and of nothing that is read", "drop it, or read it"
                )
        sparse = [(o, its) for o, its in zip(names, read) if self.tensors[o].rows_of]
        of = {(self.tensors[o].rows_of, its) for o, its in sparse}
        if len(of) > 1:
            what = " and ".join(f"{o}[{','.join(its)}]" for o, its in sparse)
            self.bad(at, where, f"{what} have other rows", "join sparse relations of the same rows, by the same keys")
        elif step.kind == JOIN:
            self._join(step, keys, read, [(o, its) for o, its in zip(names, read) if (o, its) not in sparse], of, at)
        elif step.kind == ADD:
            for o, its in zip(names, read):
                if sparse and (o, its) not in sparse:
                    help = "multiply it with present(...) of the relation first"
                    self.bad(at, where, f"{o} is dense and added to the rows of a sparse relation", help)
            if not any(set(its) == set(keys) for its in read) and keys:
                self.bad(at, where, "no term has all keys of the sum", "let one term have them")
            for key in there:
                if key not in keys:
                    self.bad(
                        at, where, f"{key!r} is a key of a term and not of the sum", "sum over it in a step before"
                    )
        else:
            self._function(step, keys, read[0], bool(sparse), at, where)
        if sparse and step.kind in (JOIN, ADD) and set(sparse[0][1]) <= set(keys) and keys != sparse[0][1]:
            form = f"{step.output}[{','.join(sparse[0][1])}]"
            self.bad(at, where, "a sparse result has the keys of its relation, in their order", f"write {form}")

    def _join(self, step: SaidStep, keys, read, dense, of, at: int) -> None:
        where = f"{step.output} = ..."
        for key in step.said_sum or ():
            if key in keys:
                self.bad(at, where, f"{key!r} is summed and a key of the result", "drop it on one side")
            elif not any(key in its for its in read):
                self.bad(at, where, f"{key!r} is summed and nothing that is read has it", "drop it from sum(...)")
        if step.said_sum is not None:
            for key in dict.fromkeys(k for its in read for k in its if k not in keys and k not in step.said_sum):
                self.bad(at, where, f"{key!r} is in no result and sum(...) does not say it", f"add {key} to sum(...)")
        if len(dense) > 2:
            self.bad(at, where, f"{len(dense)} dense tensors are joined at once", "join two of them in a step before")
        if not of:
            return
        ((_, pattern),) = of
        for o, its in dense:
            if set(its) >= set(pattern):
                help = "declare it sparse too, or join it by fewer keys"
                self.bad(at, where, f"{o} is dense over all keys of a sparse relation", help)
        wide = {frozenset(its) - set(pattern) for _, its in dense} - {frozenset()}
        if len(wide) > 1:
            message = "every row of a sparse relation would take a product of matrices"
            self.bad(at, where, message, "join the dense tensors in a step before, the rows in one behind it")

    def _function(self, step: SaidStep, keys, its, sparse: bool, at: int, where: str) -> None:
        if its != keys:
            self.bad(at, where, f"{step.kind} leaves keys as they are", f"write {step.output}[{','.join(its)}]")
        if step.kind in OVER_A_KEY:
            if step.over not in its:
                help = (
                    f"say which key: {step.kind}({step.operands[0][0]}[{','.join(its)}], {its[-1] if its else 'key'})"
                )
                self.bad(at, where, f"{step.kind} is over a key, and {step.over or 'none'!r} is none of its", help)
            if sparse:
                help = "write exp, a sum over the key, reciprocal and a join as steps"
                self.bad(at, where, f"{step.kind} of a sparse relation is not read", help)
        elif step.over:
            self.bad(at, where, f"{step.kind} is of every value by itself, over no key", f"drop {step.over!r}")
        if step.kind == PRESENT and not sparse:
            self.bad(at, where, "present is of a sparse relation", "say nonzeros of the input")

    def _whole(self, steps: Sequence[ComputationStep]) -> None:
        """Note what leads nowhere: no loss, one that is no number, tensors that are not read, weights that it does not
        depend on."""
        at = self.reader.line("", "steps")
        if self.loss not in self.said:
            self.bad(at, "steps", f"no step makes the loss {self.loss!r}", "let the last step be loss = sum(...) ...")
        elif self.said[self.loss][0].keys:
            keys = ", ".join(self.said[self.loss][0].keys)
            help = f"sum over {keys}, and write {self.loss} without keys"
            self.bad(self.said[self.loss][1], self.loss, f"the loss is no single number: it has the keys {keys}", help)
        used = {o for step, _ in self.said.values() for o, _ in step.operands}
        for name in (n for n in self.tensors if n not in used and n not in self.said):
            self.bad(self.reader.line("inputs", name), f"inputs.{name}", f"no step reads {name}", "drop it, or read it")
        for name in (n for n in self.said if n not in used and n != self.loss):
            self.bad(self.said[name][1], f"{name} = ...", f"no step reads {name}", "drop it, or read it")
        if self.reader.wrong:
            return
        reached = {self.loss}
        for step in reversed(steps):
            if step.output in reached and step.kind != PRESENT:
                reached.update(step.inputs)
        for name, tensor in self.tensors.items():
            if tensor.trained and name not in reached:
                message = f"the loss does not depend on the values of {name}, which is trained"
                self.bad(
                    self.reader.line("inputs", name), f"inputs.{name}", message, "drop trained, or read it on the way"
                )

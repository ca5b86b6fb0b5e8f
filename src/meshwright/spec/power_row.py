"""A row of servers behind one power supply: ``power=polca:budget=0.9:low=0.5``."""

from __future__ import annotations

import msgspec

from meshwright.spec.serve_values import duration_s, policy_name, positive

#: What may be said of a row, and the fields that hold it.
OPTIONS = {"budget": "budget", "low": "low", "acts": "acts_s"}


class PowerRow(msgspec.Struct, frozen=True):
    """The row: the ``policy`` that caps clocks, the ``budget`` as a share of what the plan's servers draw at their
    rated power, and the share of the servers whose work may be slowed first (``low``). A cap is there ``acts_s`` after
    it was decided, a brake at once."""

    policy: str
    budget: float = 1.0
    low: float = 0.5
    acts_s: float = 0.0

    def text(self) -> str:
        """Return the form that :func:`power_row` reads back."""
        options = [f"budget={self.budget:.12g}"] if self.budget != 1.0 else []
        options += [f"low={self.low:.12g}"] if self.low != 0.5 else []
        options += [f"acts={self.acts_s:.12g}s"] if self.acts_s else []
        return ":".join([self.policy, *options])


def power_row(text: str) -> PowerRow | None:
    """Read ``polca`` or ``polca:budget=0.9:low=0.5:acts=40s``."""
    name, *options = text.split(":")
    said: dict[str, float] = {}
    for option in options:
        key, _, value = option.partition("=")
        field = OPTIONS.get(key, "")
        number = duration_s(value) if key == "acts" else positive(value, 1.0 if key == "low" else 10.0)
        if not field or field in said or number is None:
            return None
        said[field] = number
    policy = policy_name(name)
    return None if policy is None else PowerRow(policy, **said)

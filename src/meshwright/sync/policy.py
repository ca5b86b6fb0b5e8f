"""Reading policies: the plan's word ``sync=`` as a :class:`SyncPolicy`, by a rule of ``rules/`` and its options.

``local:h=8,codec=bf16`` is the rule ``local`` with two options; :func:`read` and :attr:`SyncPolicy.text` turn one into
the other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.sync.record import SyncPolicy
from meshwright.sync.rules import RuleOption, rules

#: The rule of a plan that says none: gradients are exchanged in every step.
USUAL = "step"


@lru_cache(maxsize=256)
def read(text: str) -> SyncPolicy:
    """The policy that a text names.

    Raises:
        MeshwrightError: Y001 an unknown rule, Y002 for every option that is unknown, missing or has no such value.
    """
    name, _, rest = text.partition(":")
    known = rules()
    if name not in known:
        help = nearest(name, list(known))
        raise MeshwrightError.one("Y001", f"no rule of synchronisation is called {name!r}", help=help)
    rule = known[name]
    options = {option.name: option for option in rule.options}
    values = {option.name: option.default for option in rule.options}
    wrong: list[Diagnostic] = []
    for word in filter(None, rest.split(",")):
        key, _, value = word.partition("=")
        if key not in options:
            help = f"{name} takes {', '.join(options)}" if options else f"{name} takes none"
            wrong.append(_bad(f"{name} has no option {key!r}", help))
            continue
        values[key] = _value(options[key], value)
        if values[key] is None:
            wrong.append(_bad(f"{key}={value} is not {options[key].wanted}", options[key].what))
    for option in rule.options:
        if values[option.name] is None and not wrong:
            wrong.append(_bad(f"{name} does not say {option.name}", f"say {name}:{option.name}={option.example}"))
    if wrong:
        raise MeshwrightError(wrong)
    return SyncPolicy(rule=rule, values=values, **rule.choices(values))


def _bad(message: str, help: str) -> Diagnostic:
    return Diagnostic(code="Y002", message=message, help=help)


def _value(option: RuleOption, text: str) -> Any:
    """The value of an option; None where the text is none."""
    choices = option.choices()
    if choices:
        return text if text in choices else None
    value = int(text) if text.isdecimal() and len(text) <= 9 else 0
    return value if value >= option.least else None

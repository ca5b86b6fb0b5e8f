"""Reading policies: the plan's word ``sync=`` as a :class:`SyncPolicy`, by a rule of ``rules/`` and its options.

``local:h=8,codec=bf16`` is the rule ``local`` with two options; :func:`read` and :attr:`SyncPolicy.text` turn one into
the other. Options of a codec, a combine or a graph stand beside the rule's (``local:h=8,codec=topk,share=0.01``,
``step:combine=trimmed,cut=2``), and the name of a codec alone is the usual rule with it: ``powersgd:rank=4``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec

from meshwright.errors import MeshwrightError, nearest
from meshwright.sync.codecs import codecs
from meshwright.sync.combines import combines
from meshwright.sync.groups import graphs
from meshwright.sync.options import RuleOption, bad, read_options, written
from meshwright.sync.record import CODEC, COMBINE, GRAPH, NO_CODEC, USUAL, SyncPolicy
from meshwright.sync.rules import SyncRule, rules


@lru_cache(maxsize=256)
def read(text: str) -> SyncPolicy:
    """The policy that a text names.

    Raises:
        MeshwrightError: Y001 an unknown rule, Y002 for every option that is unknown, missing or has no such value.
    """
    name, _, rest = text.partition(":")
    rule, said = _named(name)
    named = said | {key: value for key, _, value in (word.partition("=") for word in rest.split(","))}
    options = options_of(rule, named)
    values = {option.name: option.default for option in options} | said
    values |= read_options(name, options, rest)
    missing = [o for o in options if values[o.name] is None]
    if missing:
        raise MeshwrightError(
            [bad(f"{name} does not say {o.name}", f"say {name}:{o.name}={o.example}") for o in missing]
        )
    choices = rule.choices(values)
    if CODEC in values and choices.get("layers") != ():
        choices |= {"codec": written(values[CODEC], codecs()[values[CODEC]].options, values)}
    if COMBINE in values:
        choices |= {"combine": written(values[COMBINE], combines()[values[COMBINE]].options, values)}
    if GRAPH in values:
        choices |= {"group": written(values[GRAPH], graphs()[values[GRAPH]].options, values)}
    return SyncPolicy(rule=rule, values=values, options=options, **choices)


def options_of(rule: SyncRule, said: Mapping[str, str]) -> tuple[RuleOption, ...]:
    """The options of a rule, and those of the codec, the combine and the graph that are said or usual, with the values
    that the rule has for them."""
    usual = {option.name: option.default for option in rule.options} | said
    named = codecs().get(usual.get(CODEC)), combines().get(usual.get(COMBINE)), graphs().get(usual.get(GRAPH))
    more = (option for one in named if one is not None for option in one.options)
    own = (msgspec.structs.replace(o, default=rule.usual.get(o.name, o.default)) for o in more)
    return (*rule.options, *own)


def _named(name: str) -> tuple[SyncRule, dict[str, str]]:
    """The rule that a name stands for, and what else the name says."""
    known = rules()
    if name in known:
        return known[name], {}
    if name in codecs() and name != NO_CODEC:
        return known[USUAL], {CODEC: name}
    names = [*known, *(c for c in codecs() if c != NO_CODEC)]
    raise MeshwrightError.one("Y001", f"no rule of synchronisation is called {name!r}", help=nearest(name, names))

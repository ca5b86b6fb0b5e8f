"""Read a Hugging Face ``config.json`` with every fault noted, instead of stopping at the first.

A family asks the :class:`ConfigReader` for the keys that it needs. The reader remembers which keys were understood, so
that the others can be reported, and notes each wrong value as a diagnostic with its place and the way to mend it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.spec.families.irrelevant import is_irrelevant

# Far above any published model, low enough that a mistyped digit is an answer and not a full memory.
MAX_LAYERS = 10_000
MAX_INT = 2**40

# Names of `transformers/activations.py` and the gated ones that some configurations name instead.
ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "gelu_tanh", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu", "relu2", "relu6", "sigmoid",
    "silu", "swish", "tanh", "xielu", "swiglu", "geglu", "reglu", "swigluoai",
)  # fmt: skip

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


class ConfigReader:
    """One configuration being read: its values, the keys asked for and the faults found so far.

    `spelling` gives this family's own word for a usual key (GPT-2's ``n_embd`` for ``hidden_size``); either is read.
    A faulty or missing value is noted and replaced by a harmless one, so that reading goes on and all faults
    are known together; :meth:`raise_faults` then refuses the configuration.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        name: str,
        family: str,
        place: str,
        spelling: Mapping[str, str] | None = None,
        outer: ConfigReader | None = None,
    ):
        self.config = config
        self.outer = outer
        self.inner: list[ConfigReader] = []
        self.spelling = spelling or {}
        self.name = name
        self.family = family
        self.place = place
        self.notes: list[str] = []
        self.used: set[str] = set()
        self.faulty: set[str] = set()
        self.faults: list[Diagnostic] = []

    def int(self, *keys: str, default: int | None = None, low: int = 1, high: int = MAX_INT) -> int:
        """The whole number under the first of `keys` that is present; null counts as absent."""
        key, value = self._find(keys)
        if value is None:
            if default is not None:
                return default
            self._missing(key)
            return max(low, 1)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.fault("M002", f"{key} must be a whole number from {low} to {high}", key, _int_help(value))
        return max(low, 1)

    def flag(self, *keys: str, default: bool = False) -> bool:
        """The true or false under the first of `keys` that is present."""
        key, value = self._find(keys)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self.fault("M002", f"{key} must be true or false", key, "write true or false, without quotes")
        return default

    def text(self, *keys: str, default: str) -> str:
        """The string under the first of `keys` that is present."""
        key, value = self._find(keys)
        if value is None:
            return default
        if isinstance(value, str):
            return value
        self.fault("M002", f"{key} must be a string", key, f"for example {key!r}: {default!r}")
        return default

    def activation(self, *keys: str, default: str) -> str:
        """The name of an activation function under the first of `keys` that is present."""
        name = self.text(*keys, default=default)
        if name not in ACTIVATIONS:
            key, _ = self._find(keys)
            self.fault("M002", f"{key} names no activation that is known", key, nearest(name, ACTIVATIONS))
        return name

    def ints(self, key: str, *, length: int | None = None, low: int = 0) -> list[int] | None:
        """A list of whole numbers, optionally one per layer; None when absent or faulty."""
        _, value = self._find((key,))
        if value is None:
            return None
        whole = isinstance(value, list) and all(
            isinstance(v, int) and not isinstance(v, bool) and low <= v <= MAX_INT for v in value
        )
        if not whole:
            self.fault("M002", f"{key} must be a list of whole numbers from {low}", key)
            return None
        return value if length is None or self._one_per_layer(key, value, length) else None

    def words(self, key: str, *, length: int, choices: Sequence[str]) -> list[str] | None:
        """A list with one of `choices` per layer; None when absent or faulty."""
        _, value = self._find((key,))
        if value is None:
            return None
        if not isinstance(value, list):
            self.fault("M002", f"{key} must be a list with one entry per layer", key)
            return None
        strange = [v for v in value if v not in choices]
        if strange:
            self.fault(
                "M005",
                f"{key} has layers that are not modelled: {shown(strange[0])}",
                key,
                "modelled: " + ", ".join(choices),
            )
            return None
        return value if self._one_per_layer(key, value, length) else None

    def section(self, key: str) -> ConfigReader:
        """The nested object under `key`, read with its own place but into the same list of faults."""
        _, value = self._find((key,))
        if value is not None and not isinstance(value, dict):
            self.fault("M002", f"{key} must be an object", key)
        nested = ConfigReader(
            value if isinstance(value, dict) else {}, name=self.name, family=self.family, place=f"{self.place}: {key}"
        )
        nested.faults = self.faults
        self.inner.append(nested)
        return nested

    def ignore(self, *keys: str) -> None:
        """Mark keys as understood although this family's shape does not depend on them."""
        self.used.update(keys)

    def layers(self) -> int:
        """The number of layers."""
        return self.int("num_hidden_layers", high=MAX_LAYERS)

    def layer_types(self, layers: int) -> list[str] | None:
        """``layer_types``: which attention each layer has; None when absent."""
        return self.words("layer_types", length=layers, choices=_LAYER_TYPES)

    def divides(self, part: str, whole: str, part_value: int, whole_value: int) -> None:
        """Note a fault unless `part` divides `whole`; silent when either was already faulty."""
        part, whole = self.spelled(part), self.spelled(whole)
        if {part, whole} & self.faulty or whole_value % part_value == 0:
            return
        divisors = [d for d in range(1, min(whole_value, 4096) + 1) if whole_value % d == 0]
        close = sorted(divisors, key=lambda d: (abs(d - part_value), d))[:4]
        self.fault(
            "M003",
            f"{part}={part_value} does not divide {whole}={whole_value}",
            part,
            f"nearest divisors: {', '.join(map(str, sorted(close)))}",
        )

    def at_most(self, part: str, whole: str, part_value: int, whole_value: int) -> None:
        """Note a fault when `part` is larger than `whole`; silent when either was already faulty."""
        part, whole = self.spelled(part), self.spelled(whole)
        if not {part, whole} & self.faulty and part_value > whole_value:
            self.fault("M003", f"{part}={part_value} is larger than {whole}={whole_value}", part)

    def fault(self, code: str, message: str, key: str, help: str = "") -> None:
        """Note one violation at `key`; a key is faulted once however often it is read."""
        if key in self.faulty:
            return
        self.faulty.add(key)
        place = f"{self.place}: {key} = {shown(self.config[key])}" if key in self.config else self.place
        self.faults.append(Diagnostic(code=code, message=f"{message} ({self.name})", place=place, help=help))

    def raise_faults(self) -> None:
        """Refuse the configuration when anything was wrong with it."""
        if self.faults:
            raise MeshwrightError(self.faults)

    def unknown_fields(self) -> tuple[str, ...]:
        """Keys that the family did not ask for and that are not known to leave the model's shape alone, those of
        the nested and of the surrounding objects too."""
        readers = [self, *self.inner, *([self.outer] if self.outer else [])]
        return tuple(sorted({str(k) for r in readers for k in r._unasked()}))

    def _unasked(self) -> list[Any]:
        return [k for k in self.config if k not in self.used and not is_irrelevant(k)]

    def spelled(self, *keys: str) -> str:
        """The spelling under which the first of `keys` that has a value stands in the configuration."""
        tried = [word for key in keys for word in (self.spelling.get(key, key), key)]
        self.used.update(tried)
        valued = [word for word in tried if self.config.get(word) is not None]
        present = [word for word in tried if word in self.config]
        return (valued or present or tried)[0]

    def _find(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        key = self.spelled(*keys)
        return key, self.config.get(key)

    def _missing(self, key: str) -> None:
        if key in self.config:
            self.fault("M001", f"{key} is null, and the model's shape depends on it", key, "write its value")
            return
        spare = [k for k in self._unasked() if isinstance(k, str)]
        hint = nearest(key, spare) if spare else ""
        found = hint if hint.startswith("did you mean") else f"add {key!r} to the configuration"
        self.fault("M001", f"{key} is missing", key, found)

    def _one_per_layer(self, key: str, value: list, length: int) -> bool:
        if len(value) == length:
            return True
        self.fault("M003", f"{key} has {len(value)} entries for {length} layers", key, "give one entry per layer")
        return False


def _int_help(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, str) and value.strip().isdecimal():
        return f"write {value.strip()} without quotes"
    return ""


def shown(value: Any) -> str:
    """A value as an error shows it: its first 60 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a value nested as deeply
        return "a value too large to show"
    return text if len(text) <= 60 else text[:57] + "..."

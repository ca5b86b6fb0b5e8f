"""What a test's process hands back, as a safetensors file: plain values, in which tensors and arrays may stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

_TREE = "tree"


def write(file: Path, value: Any) -> None:
    """Values, lists, tuples, dicts, slices, tensors and arrays, in any nesting.

    Raises:
        TypeError: anything else, which the test must take apart first.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_apart(value, tensors))
    save_file(tensors, file, metadata={_TREE: tree})


def read(file: Path) -> Any:
    """What :func:`write` was given."""
    with safe_open(file, framework="pt") as held:
        return _whole(json.loads(held.metadata()[_TREE]), held)


def _apart(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Whatever JSON has no word for is an object of one key that says what it is."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_apart(v, tensors) for v in value]
    if kind in (tuple, torch.Size):
        return {"tuple": [_apart(v, tensors) for v in value]}
    if kind is dict:
        return {"dict": [[_apart(k, tensors), _apart(v, tensors)] for k, v in value.items()]}
    if kind is slice:
        return {"slice": [value.start, value.stop, value.step]}
    if kind is np.ndarray:
        return {"array": _kept(torch.tensor(value), tensors)}
    if kind in (torch.Tensor, torch.nn.Parameter):
        return {"tensor": _kept(value, tensors)}
    raise TypeError(f"a process hands back a {kind.__name__}: take it apart into plain values")


def _kept(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    name = str(len(tensors))
    tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)  # none shares memory with another
    return name


def _whole(said: Any, held: safe_open) -> Any:
    if isinstance(said, list):
        return [_whole(v, held) for v in said]
    if not isinstance(said, dict):
        return said
    ((kind, inner),) = said.items()
    if kind == "tuple":
        return tuple(_whole(inner, held))
    if kind == "dict":
        return {_whole(k, held): _whole(v, held) for k, v in inner}
    if kind == "slice":
        return slice(*inner)
    tensor = held.get_tensor(inner)
    return tensor.numpy() if kind == "array" else tensor

"""Models trained by completed placements: as one process, to the rounding of float64."""

import pytest

from meshwright.answer.completion import complete
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import placements
from meshwright.plan.tensors import network
from meshwright.run.annotated import start
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.run import small

#: 3 sequences of 11 tokens, 3 groups of heads, an MLP 45 wide: nothing divides by two.
MODEL = small.llama(layers=2, hidden=36, heads=6, kv_heads=3, ffn=45)
TRAIN = Train(global_batch=3, seq_len=11, dtype="fp32")


def program(mesh, weights=(), activations=(), model=MODEL):
    table = {"mesh": mesh, "weights": dict(weights), "activations": dict(activations)}
    ranks = 1
    for size in mesh.values():
        ranks *= size
    said = placements.read(table, network(model, 3, 11), ranks)
    return complete(network(model, 3, 11, relayed=said.said), said, load(f"{ranks}xh100"), TRAIN, standard()).program


@pytest.mark.parametrize(
    ("mesh", "weights", "activations"),
    [
        # heads and columns over one axis, sequences over the other
        (
            {"dp": 2, "tp": 2},
            {"mlp.up": ["dp:B", "tp:S(1)"], "embed": ["tp:S(0)"], "head": ["tp:S(0)"]},
            {"hidden": ["dp:S(0)", "tp:B"], "attention.mixed": ["tp:S(2)"]},
        ),
        # tokens of a sequence over three, weights cut over the same
        ({"x": 3}, {"mlp.down": ["x:S(0)"], "attention.k": ["x:S(0)"]}, {"hidden": ["x:S(1)"], "logits": ["x:S(2)"]}),
        # terms of sums kept, one dim cut by both axes
        (
            {"a": 2, "b": 2},
            {"mlp.gate": ["a:S(1)", "b:S(1)"], "norm": ["a:S(0)"]},
            {"mlp.out": ["a:P", "b:P"], "attention.queries": ["a:S(1)"], "hidden": ["a:S(2)", "b:S(2)"]},
        ),
    ],
)
def test_a_completed_file_trains_as_one_process(mesh, weights, activations):
    made = program(mesh, weights, activations)
    assert any(p >= 0 for home in made.homes.values() for p in home)
    found = start(made, MODEL, TRAIN, 3)
    assert found.worst < 1e-12 and len(found.losses) == 3


def test_matrices_stored_as_one_are_priced_and_not_run():
    model = small.llama(layers=1)
    fused = type(model)(**{f: getattr(model, f) for f in model.__struct_fields__} | {"family": "phi3"})
    with pytest.raises(MeshwrightError, match="another form"):
        start(program({"x": 2}, model=MODEL), fused, TRAIN, 1)

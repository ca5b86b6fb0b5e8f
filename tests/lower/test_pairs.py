"""A contrastive loss over the pairs of a batch, stored or in tiles, against sums by hand."""

import pytest

from meshwright import layers
from meshwright.answer.predict import predict
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load
from meshwright.spec.workload import Train
from meshwright.work import Group
from tests.lower.sizes import context

MODEL = load("clip-l")
TRAIN = Train(global_batch=1024, seq_len=77)
WIDTH, ELEMENT = 768, 2.0


def pieces(words: str) -> dict:
    """The pieces of the loss on one of 8 replicas by name, for microbatches of 16 pairs."""
    plan = parse(f"dp8 mb16 {words}").on(8)
    at = context(plan, MODEL, TRAIN)
    at = type(at)(**{f: getattr(at, f) for f in at.__struct_fields__} | {"dp_group": Group(size=8, hops=())})
    return {p.name: p for p in layers.of(MODEL.head).pieces(at, MODEL.head)}


def test_stored_similarities_are_of_the_whole_batch_of_a_replica_and_vectors_of_all_are_gathered():
    found = pieces("similarities=stored")
    # texts and images of this replica, each with those of all: 128 x 1024 numbers of 4 bytes, twice
    assert found["contrastive loss"].saved == 2 * 128 * 1024 * 4
    gather = found["vectors gather"]
    # a microbatch of 16 on each of 8 replicas, texts and images
    assert (gather.forward.op, gather.backward.op) == ("all_gather", "reduce_scatter")
    assert gather.forward.num_bytes == 2 * 8 * 16 * WIDTH * ELEMENT


def test_tiles_multiply_as_much_store_no_similarity_and_send_vectors_round_the_replicas():
    stored, tiled = pieces("similarities=stored")["pairs"], pieces("similarities=tiles")["pairs"]
    assert tiled.ring == 8
    assert 8 * tiled.forward.flops == stored.forward.flops == 2 * 2 * 16 * 1024 * WIDTH
    # the backward computes the similarities again
    assert 8 * tiled.backward.flops == stored.backward.flops + stored.forward.flops
    # vectors of a replica's 128 pairs and two sums of rows of each in fp32
    assert tiled.saved == 2 * 128 * WIDTH * ELEMENT + 2 * 128 * 4
    own = 2 * 16 * WIDTH * ELEMENT
    moves = tiled.exchange, tiled.exchange_back
    assert [(m.first.num_bytes, m.each.num_bytes) for m in moves] == [(own, own), (2 * own, 2 * own)]
    assert moves[0].last is None and moves[1].last.num_bytes == own


def test_memory_of_stored_similarities_grows_with_the_square_of_a_batch_and_of_tiles_with_it():
    def peak(batch: int, words: str) -> float:
        train = Train(global_batch=batch, seq_len=77)
        plan = parse(f"dp8 mb64 full {words}").on(8)
        return predict(MODEL, load_cluster("8xa800"), train, plan).memory[0].peak_bytes

    small, large = 65536, 131072
    assert peak(large, "similarities=stored") - peak(small, "similarities=stored") > 8 * (large**2 - small**2) / 8
    assert peak(large, "similarities=tiles") - peak(small, "similarities=tiles") < 2e8


def test_a_model_without_pairs_refuses_tiles():
    with pytest.raises(MeshwrightError, match="compares no pairs of a batch"):
        predict(
            load("llama3-8b"),
            load_cluster("8xa800"),
            Train(global_batch=8, seq_len=128),
            parse("dp8 similarities=tiles").on(8),
        )

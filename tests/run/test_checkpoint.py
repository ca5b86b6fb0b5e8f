"""A checkpoint written by any processes is read by any others, bit for bit, or not at all."""

import os
import shutil

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.run.blocks import blocks, cover
from meshwright.run.checkpoint import AsyncSaver, find, identity, latest, load, read_index, save
from meshwright.run.checkpoint import share as checkpoint_share
from meshwright.run.checkpoint.format import RankIndex, merge
from meshwright.run.checkpoint.loading import CheckpointReader, fill, missing
from meshwright.run.checkpoint.write import write_rank
from meshwright.run.pieces import Parameter, Part, TensorPiece
from meshwright.spec.model import transformer
from tests.run import shards
from tests.run.checkpoints import code, fast_disk, loaded, meta, written  # noqa: F401
from tests.run.processes import launch, launch_kept
from tests.run.shards import ALONE

HASH = "cafe"


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), writers=st.integers(1, 5), readers=st.integers(1, 5))
def test_any_shards_are_read_as_any_other_shards_bit_for_bit(tmp_path, seed, writers, readers):
    state = shards.values(seed)
    root = tmp_path / f"{seed}.{writers}.{readers}"
    folder = written(root, shards.sharding(seed, writers), state)
    for held in shards.sharding(seed + 1, readers):
        assert shards.differences(loaded(folder, held), shards.pieces(held, state)) == []
    shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_type_of_state_comes_back(tmp_path, dtype):
    state = shards.values(1, dtype)
    folder = written(tmp_path, shards.sharding(1, 3), state)
    for held in shards.sharding(2, 2):
        assert shards.differences(loaded(folder, held, dtype), shards.pieces(held, state, dtype)) == []


def test_types_of_different_widths_share_a_file(tmp_path):
    (held,), state = shards.sharding(4, 1), shards.values(4)
    mixed = [
        p._replace(values=p.values.to(torch.bfloat16)) if p.key == "param" else p for p in shards.pieces(held, state)
    ]
    folder = save(tmp_path, mixed, meta(), ALONE)
    back = [p._replace(values=torch.full_like(p.values, -7.0)) for p in mixed]
    load(folder, back, ALONE, model_hash=HASH)
    assert shards.differences(back, mixed) == []


def _save_and_read(rank, root, seed, num_ranks, readers_seed):
    group = shards.world(rank, num_ranks)
    state = shards.values(seed)
    save(root, shards.pieces(shards.sharding(seed, num_ranks)[rank], state), meta(), group)
    held = shards.sharding(readers_seed, num_ranks)[rank]
    pieces = shards.pieces(held, None)
    where = load(root, pieces, group, model_hash=HASH)
    return where.step, shards.differences(pieces, shards.pieces(held, state))


def test_processes_save_together_and_load_together(tmp_path):
    assert launch_kept(3, _save_and_read, tmp_path, 5, 3, 6) == [(20, [])] * 3


def _read(rank, root, seed, num_ranks):
    held = shards.sharding(seed, num_ranks)[rank]
    pieces = shards.pieces(held, None)
    group = shards.world(rank, num_ranks) if num_ranks > 1 else ALONE
    load(root, pieces, group, model_hash=HASH)
    return shards.differences(pieces, shards.pieces(held, shards.values(5)))


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_another_number_of_processes_reads_what_three_wrote(tmp_path, num_ranks):
    launch_kept(3, _save_and_read, tmp_path, 5, 3, 6)
    assert launch_kept(num_ranks, _read, tmp_path, 8, num_ranks) == [[]] * num_ranks


def test_the_index_says_where_training_was_and_what_there_is(tmp_path):
    said = meta(extra={"tokens": 12})
    (held,) = shards.sharding(1, 1)
    folder = save(tmp_path, shards.pieces(held, shards.values(1)), said, ALONE)
    assert folder == tmp_path / "step-00000020"
    index = read_index(folder)
    assert index.meta == said
    assert index.tensors == shards.NAMES
    assert {file.name for file in index.files} == {"rank-00000.safetensors"}
    assert sorted(f.name for f in folder.iterdir()) == ["index.json", "rank-00000.safetensors"]


def test_what_does_not_change_between_processes_is_said_once(tmp_path):
    parameter = shards.sharding(1, 1)[0][0].parameter
    held = [[shards.Held(p, *cut, True)] for p in [parameter] for cut in ((0, 2), (2, 3))]
    for rank, mine in enumerate(held):
        pieces = shards.pieces(mine, shards.values(1))
        write_rank(tmp_path, rank, [(p, p.values) for p in pieces], {})
    ranks = [msgspec.json.decode((tmp_path / f"rank-0000{r}.json").read_bytes(), type=RankIndex) for r in (0, 1)]
    _, files, layouts, entries = merge(ranks)
    assert (len(files), len(layouts), len(entries)) == (2, 1, 6)


# --- what is not whole is not loaded ---------------------------------------------------------------------------------


def _flip(file, at, bits):
    data = bytearray(file.read_bytes())
    data[at] ^= bits
    file.write_bytes(data)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    root = tmp_path_factory.mktemp("good")
    return written(root, shards.sharding(7, 2), shards.values(7))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(data=st.data(), bits=st.integers(1, 255))
def test_any_byte_that_changes_is_noticed_before_anything_is_loaded(good, tmp_path, data, bits):
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    file = folder / data.draw(st.sampled_from(sorted(f.name for f in good.iterdir())))
    _flip(file, data.draw(st.integers(0, file.stat().st_size - 1)), bits)
    (held,) = shards.sharding(8, 1)
    pieces = shards.pieces(held, None)
    assert code(load, folder, pieces, ALONE, model_hash=HASH) <= {"H002", "X007"}
    assert shards.differences(pieces, shards.pieces(held, None)) == []


@pytest.mark.parametrize("name", ["index.json", "rank-00000.safetensors", "rank-00001.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_noticed(good, tmp_path, name, share):
    folder = shutil.copytree(good, tmp_path / "copy")
    file = folder / name
    os.truncate(file, int(file.stat().st_size * share))
    assert code(loaded, folder, shards.sharding(8, 1)[0]) == {"H002"}


def test_a_file_that_is_gone_is_named(good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "copy")
    (folder / "rank-00001.safetensors").unlink()
    with pytest.raises(MeshwrightError, match=r"No such file[^\0]*rank-00001\.safetensors"):
        loaded(folder, shards.sharding(8, 1)[0])


def test_a_folder_without_a_checkpoint_says_so(tmp_path):
    assert code(find, tmp_path) == {"H001"}
    assert code(find, tmp_path / "nowhere") == {"H001"}
    assert latest(tmp_path) is None


def test_the_newest_checkpoint_without_its_index_is_said_to_be_damaged_and_not_passed_over(tmp_path):
    held, state = shards.sharding(1, 1)[0], shards.values(1)
    older = save(tmp_path, shards.pieces(held, state), meta(), ALONE)
    newest = tmp_path / "step-00000099"
    newest.mkdir()
    with pytest.raises(MeshwrightError, match=f"(?s)H002.*lost its index.json.*{newest}.*remove {newest}"):
        find(tmp_path)
    newest.rmdir()
    assert find(tmp_path) == older


def test_another_format_version_is_refused(good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "copy")
    text = (folder / "index.json").read_text().replace('"format_version":1', '"format_version":2')
    (folder / "index.json").write_text(text)
    with pytest.raises(MeshwrightError, match="format version 2; this is version 1"):
        loaded(folder, shards.sharding(8, 1)[0])


def test_another_model_is_refused_with_what_differs(good):
    (held,) = shards.sharding(8, 1)
    assert code(load, good, shards.pieces(held, None), ALONE, model_hash="beef") == {"H003"}
    parameter = held[0].parameter
    other = parameter._replace(parts=tuple(p._replace(name="nobody") for p in parameter.parts))
    with pytest.raises(MeshwrightError, match=r"another model \(m\): no nobody"):
        loaded(good, [held[0]._replace(parameter=other)])
    other = parameter._replace(parts=tuple(p._replace(shape=(99,) * len(p.shape)) for p in parameter.parts))
    with pytest.raises(MeshwrightError, match=r"is \[.*\] there and \[99"):
        loaded(good, [held[0]._replace(parameter=other)])


def _resume_another(rank, root):
    """Rank 0 wants what rank 1 does not, and neither all that there is."""
    pieces = shards.pieces(shards.sharding(7, 1)[0], None)
    names = sorted({part.name for p in pieces for part in p.parameter.parts})
    mine = [p for p in pieces if {part.name for part in p.parameter.parts} <= set(names[rank:-1:2])]
    wanted = {part.name for p in mine for part in p.parameter.parts}
    try:
        load(root, mine, shards.world(rank, 2), model_hash="beef")
    except MeshwrightError as error:
        return sorted(wanted), str(error)


def test_a_checkpoint_that_holds_more_than_any_rank_wants_says_what(good):
    (first, said), (second, other) = launch(2, _resume_another, good)
    assert said == other and said.count("error[H003]") == 1 and "something else" not in said
    assert first and second and not set(first) & set(second)
    for name in shards.NAMES:
        assert (f"{name} is there and not here" in said) is (name not in (*first, *second)), name


def test_the_same_tensors_of_another_model_are_said_to_be_that(good):
    pieces = shards.pieces(shards.sharding(8, 1)[0], None)
    with pytest.raises(MeshwrightError, match="same tensors, but they compute something else"):
        load(good, pieces, ALONE, model_hash="beef")


def test_identity_is_what_is_computed_not_what_it_is_called():
    def small(**changed):
        return transformer(layers=2, hidden=64, heads=4, ffn=128, vocab=96, **changed)

    assert identity(small()) == identity(msgspec.structs.replace(small(), name="other", source="a paper"))
    assert identity(small()) != identity(small(tied_embeddings=False))


@pytest.mark.parametrize("change", ["lost", "twice"])
def test_what_is_not_every_element_once_is_not_committed(tmp_path, change):
    ranks = shards.sharding(11, 2)
    rank, i = next((r, i) for r, held in enumerate(ranks) for i, h in enumerate(held) if h.owner)
    if change == "lost":
        ranks[rank][i] = ranks[rank][i]._replace(owner=False)
    else:
        ranks[1 - rank].append(ranks[rank][i])
    with pytest.raises(MeshwrightError, match="elements held of") as caught:
        written(tmp_path, ranks, shards.values(11))
    assert {d.code for d in caught.value.diagnostics} == {"H004"}
    assert latest(tmp_path) is None


def test_a_reader_that_wants_more_than_there_is_says_what(good):
    (held,) = shards.sharding(8, 1)
    reader = CheckpointReader(good)
    sources = {key: found for key, found in reader.sources.items() if key[0] == "param"}
    pieces = shards.pieces(held, None)
    assert {d.message for d in missing(sources, pieces, good)} == {
        f"{state} of {name} is incomplete: 0 elements held of {torch.Size(shape).numel()}"
        for state in ("exp_avg", "exp_avg_sq")
        for name, shape in shards.NAMES.items()
    }
    params = [p for p in pieces if p.key == "param"]
    assert missing(sources, params, good) == []
    fill(params, sources)
    assert shards.differences(params, shards.pieces(held, shards.values(7))[: len(params)]) == []


def _damaged_for_one(rank, root):
    pieces = shards.pieces(shards.sharding(8, 3)[rank], None)
    try:
        load(root, pieces, shards.world(rank, 3), model_hash=HASH)
    except MeshwrightError as error:
        return str(error), shards.differences(pieces, shards.pieces(shards.sharding(8, 3)[rank], None))
    return None


def test_every_rank_raises_the_same_error_and_none_has_loaded(good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "copy")
    file = folder / "rank-00001.safetensors"
    _flip(file, file.stat().st_size - 1, 1)
    first, *others = launch(3, _damaged_for_one, folder)
    assert "error[H002]" in first[0] and first[0].count("error[") == 1
    assert first[1] == [] and others == [first, first]


# --- which are kept --------------------------------------------------------------------------------------------------


def test_the_newest_are_kept(tmp_path):
    (held,) = shards.sharding(2, 1)
    saver = AsyncSaver(tmp_path, ALONE, keep=2)
    for step in (5, 10, 15):
        saver.begin(shards.pieces(held, shards.values(step)), meta(step))
        assert saver.wait() == latest(tmp_path) == find(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step-00000010", "step-00000015"]


def test_a_step_that_is_saved_again_replaces_the_first_only_when_complete(tmp_path):
    (held,) = shards.sharding(2, 1)
    save(tmp_path, shards.pieces(held, shards.values(1)), meta(5), ALONE)
    again = save(tmp_path, shards.pieces(held, shards.values(2)), meta(5), ALONE)
    assert (again.name, latest(tmp_path)) == ("step-00000005-1", again)
    assert list(tmp_path.iterdir()) == [again]
    assert shards.differences(loaded(tmp_path, held), shards.pieces(held, shards.values(2))) == []


def test_what_is_being_written_is_not_a_checkpoint(tmp_path):
    (held,) = shards.sharding(2, 1)
    pieces = shards.pieces(held, shards.values(1))
    write_rank(tmp_path / ".step-00000005.ab-0.part", 0, [(p, p.values) for p in pieces], shards.NAMES)
    (tmp_path / "step-00000007").mkdir()
    assert latest(tmp_path) is None


# --- who writes what -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 5), share_bytes=st.sampled_from([1, 64, 1 << 20]))
def test_what_is_divided_among_its_holders_is_still_every_element_once(seed, num_ranks, share_bytes):
    state = shards.values(seed)
    ranks = [shards.pieces(held, state) for held in shards.sharding(seed, num_ranks)]
    everyone = [checkpoint_share.holdings(pieces) for pieces in ranks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_share, "SHARE_BYTES", share_bytes)
        parts = [p for rank, pieces in enumerate(ranks) for p in checkpoint_share.divide(pieces, everyone, rank)]
    owned = [p for pieces in ranks for p in pieces if p.owner and p.stop > p.start]
    for key in shards.STATES:
        for name, shape in shards.NAMES.items():
            found = [b for p in parts if p.key == key for b in blocks(p.parameter, p.start, p.stop) if b.name == name]
            assert cover(shape, found) == ""
    assert sum(p.values.numel() for p in parts) == sum(p.values.numel() for p in owned)


def test_replicas_write_equal_shares_and_small_tensors_in_turn():
    def replica(owner):
        names = [(f"w{i}", 1 << 20) for i in range(4)] + [(f"n{i}", 8) for i in range(64)]
        parameters = [Parameter(n, (size,), (Part(n, (size,), (0,), (slice(None),)),)) for n, size in names]
        return [
            TensorPiece(k, p, 0, p.shape[0], torch.zeros(p.shape), owner)
            for p in parameters
            for k in ("param", "exp_avg")
        ]

    ranks = [replica(owner=rank == 0) for rank in range(4)]
    everyone = [checkpoint_share.holdings(pieces) for pieces in ranks]
    wrote = [checkpoint_share.divide(pieces, everyone, rank) for rank, pieces in enumerate(ranks)]
    # 4 MiB each: one share per tensor; 64 small ones spread at random over four
    assert sum(p.values.numel() for rank in wrote for p in rank) == 2 * (4 * (1 << 20) + 64 * 8)
    small = [sum(p.stop <= 8 for p in rank) // 2 for rank in wrote]
    assert sum(small) == 64 and min(small) > 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_share, "SHARE_BYTES", 1 << 20)
        wrote = [checkpoint_share.divide(pieces, everyone, rank) for rank, pieces in enumerate(ranks)]
    assert {sum(p.values.numel() for p in rank if p.stop > 8) for rank in wrote} == {2 * (1 << 20)}

"""Labelled samples: their files, their order, how images are changed, what is held out, and runs on them."""

import gzip
import json
import socket
import struct
import zipfile

import msgspec
import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.plan import check
from meshwright.run import data, loop
from meshwright.run.data import Augment, labelled, tokenizer
from meshwright.run.data.augment import read
from meshwright.run.settings import Settings
from meshwright.run.world import World
from meshwright.spec.model import from_config
from meshwright.spec.workload import Train
from tests.run.classifiers import SOFTMAX, model
from tests.run.processes import launch as launch_forked

RNG = np.random.default_rng(0)
ON = mw.load_cluster("1xh100")
COUNT, SIDE = 40, 16
BYTES = RNG.integers(0, 256, (COUNT, SIDE, SIDE, 3), np.uint8)
LABELS = RNG.integers(0, 5, COUNT)
TRAIN = Train(global_batch=8, seq_len=SIDE**2, image=SIDE)


def opened(folder, train=TRAIN, of=None, augment=None, **arrays):
    np.savez(folder / "some.npz", **arrays)
    built = data.build(str(folder / "some.npz"), tokenizer.Bytes(), folder / "cache")
    of = of or model()
    return data.load(built, train, vocab=of.vocab, model=of, seed=3, augment=augment or Augment())


def test_bytes_are_normalised_and_channels_come_first_however_they_lie(tmp_path):
    expected = (BYTES.astype(np.float32).transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5
    last = opened(tmp_path, images=BYTES, labels=LABELS)
    first = opened(tmp_path, images=BYTES.transpose(0, 3, 1, 2), labels=LABELS)
    batches = [one.batch(0) for one in (last, first)]
    chosen = [int(np.abs(expected - one).sum((1, 2, 3)).argmin()) for one in batches[0].tokens.numpy()]
    assert (
        np.allclose(batches[0].tokens.numpy(), expected[chosen])
        and (batches[0].targets.numpy() == LABELS[chosen]).all()
    )
    assert all(
        (a == b).all() for a, b in zip((batches[0].tokens, batches[0].targets), (batches[1].tokens, batches[1].targets))
    )
    said = opened(tmp_path, images=BYTES, labels=LABELS, mean=[0.1, 0.2, 0.3], std=[0.5, 1.0, 2.0])
    by_hand = (BYTES[chosen[0]] / 255 - [0.1, 0.2, 0.3]) / [0.5, 1.0, 2.0]
    assert np.allclose(said.batch(0).tokens[0].numpy(), by_hand.transpose(2, 0, 1), atol=1e-6)


def test_an_epoch_visits_every_sample_once_and_ranks_share_each_step(tmp_path):
    found = opened(
        tmp_path,
        images=np.arange(COUNT, dtype=np.float64).repeat(SIDE**2 * 3).reshape(COUNT, SIDE, SIDE, 3),
        labels=LABELS,
    )
    epochs = [[found.batch(step).tokens[:, 0, 0, 0] for step in range(e * 5, e * 5 + 5)] for e in range(2)]
    orders = [np.concatenate(one).astype(int) for one in epochs]
    assert all(sorted(order) == list(range(COUNT)) for order in orders) and (orders[0] != orders[1]).any()
    for step in (0, 7):
        parts = [found.batch(step, index, 4).tokens for index in range(4)]
        assert (np.concatenate(parts) == found.batch(step).tokens.numpy()).all()
    with pytest.raises(ValueError, match="does not divide by 3"):
        found.batch(0, 0, 3)


def test_a_part_is_held_out_that_is_never_trained_on_nor_changed(tmp_path):
    values = np.arange(1, COUNT + 1, dtype=np.float64).repeat(SIDE**2 * 3).reshape(COUNT, 3, SIDE, SIDE)
    found = opened(tmp_path, images=values, labels=LABELS, augment=read("crop=4"))
    train, held = data.held_out(found, 0.2)
    assert sorted(np.concatenate((train.chosen, held.chosen))) == list(range(COUNT)) and len(held.chosen) == 8
    assert (held.batch(0).tokens != 0).all() and (train.batch(0).tokens == 0).any()
    with pytest.raises(ValueError, match="are held out"):
        data.held_out(found, 0.01)
    with pytest.raises(ValueError, match="are held out"):
        data.held_out(found, 0.9)


def test_every_held_out_sample_is_judged_once_whatever_the_batch(tmp_path):
    values = np.arange(COUNT, dtype=np.float64).repeat(SIDE**2 * 3).reshape(COUNT, 3, SIDE, SIDE)
    for share, rows, batches in ((0.1, 4, 1), (0.3, 12, 2)):
        _, held = data.held_out(opened(tmp_path, images=values, labels=LABELS), share)
        assert held.num_sequences == 8 * batches
        batches = [held.batch(number) for number in range(batches)]
        counted = [one.targets >= 0 for one in batches]
        assert sum(int(some.sum()) for some in counted) == rows
        seen = np.concatenate([one.tokens[some][:, 0, 0, 0] for one, some in zip(batches, counted)]).astype(int)
        known = np.concatenate([one.targets[some] for one, some in zip(batches, counted)])
        assert sorted(seen) == sorted(set(held.chosen)) and (known == LABELS[seen]).all()


@pytest.mark.parametrize(("plan", "ranks"), [("dp1 mb16", 1), ("dp2 mb8", 2)])
def test_a_batch_larger_than_what_is_held_out_is_judged_as_a_small_one_is(plan, ranks, tmp_path):
    """Loss and accuracy of one model on 12 samples: in batches of 16, of 4 and by hand."""
    whose, features = np.arange(60) >= 48, RNG.normal(size=(60, 12))
    np.savez(tmp_path / "some.npz", features=features, labels=np.arange(60) % 5, held_out=whose)
    found, built = [], str(data.build(str(tmp_path / "some.npz"), tokenizer.Bytes(), tmp_path / "cache"))
    for text, batch in ((plan, 16), (plan.replace("16", "4").replace("8", "2"), 4)):
        train = Train(global_batch=batch, seq_len=1, features=12, optimizer="sgd", dtype="fp32")
        job = loop.Job(model=model(SOFTMAX), plan=mw.parse_plan(text), train=train, steps=1, judged_every=1, quiet=True,
                       settings=Settings(lr=0.0, precision="float64"), corpus=built)  # fmt: skip
        said = launch_forked(ranks, judged_by, job)[0]
        found.append(said)
    assert found[0] == pytest.approx(found[1], rel=1e-12) and found[0][1] * 12 == pytest.approx(round(found[0][1] * 12))


def judged_by(rank, job):
    ranks = job.plan.num_ranks
    said = loop.train(World(rank, ranks, rank, ranks, socket.gethostname(), torch.device("cpu")), job)
    return said["judged"][1], said["accuracy"][1]


def test_a_file_says_which_samples_are_held_out(tmp_path):
    whose = np.arange(COUNT) % 4 == 3
    found = opened(tmp_path, images=BYTES, labels=LABELS, held_out=whose)
    assert (found.chosen == np.flatnonzero(~whose)).all() and found.own_held_out
    train, held = data.held_out(found, 0.5)
    assert train is found and set(held.chosen) == set(np.flatnonzero(whose))
    assert set(found.judged().chosen) == set(held.chosen)  # of --eval-data


def test_the_digits_that_come_with_the_program_are_the_published_ones(tmp_path):
    """Counts of classes of the published test set: optdigits.names, part 7."""
    arrays = labelled.read("digits")
    assert np.bincount(arrays["labels"]).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert arrays["images"].shape == (1797, 8, 8) and arrays["images"].max() == 16
    assert np.flatnonzero(arrays["held_out"]).tolist() == list(range(1437, 1797))
    built = data.build("digits", tokenizer.Bytes(), tmp_path / "cache")
    for name, words, shape in (("resnet", "image=8", (24, 1, 8, 8)), ("softmax", "features=64", (24, 64))):
        of = mw.load_model(f"digits-{name}")
        found = data.load(built, mw.parse_train(f"batch=24,{words}"), vocab=10, model=of)
        assert found.batch(0).tokens.shape == shape and found.num_sequences == 1437
    every = np.concatenate([found.batch(step).tokens for step in range(59)])
    assert abs(float(every.mean())) < 0.01 and float(every.std()) == pytest.approx(1, abs=0.01)
    first = arrays["images"][found.chosen].reshape(-1, 64)
    back = np.round(found.batch(0).tokens.numpy() * found.std[0] * 255 + found.mean[0] * 255)
    assert all((first == row).all(1).any() for row in back)  # pixels in rows


def test_images_are_changed_by_seed_and_place_whoever_makes_them(tmp_path):
    found = opened(tmp_path, images=BYTES, labels=LABELS, augment=read("flip+crop=2"))
    whole = found.batch(3).tokens
    assert (np.concatenate([found.batch(3, i, 2).tokens for i in range(2)]) == whole.numpy()).all()
    plain = msgspec.structs.replace(found, augment=Augment()).batch(3).tokens
    assert (whole != plain).any()
    other = msgspec.structs.replace(found, seed=4)
    assert (other.batch(3).tokens.shape == whole.shape) and (other.batch(3).tokens != whole).any()
    image = np.arange(9.0).reshape(1, 1, 3, 3)
    made = {tuple(Augment(flip=True).changed(image, 0, np.array([place])).ravel()) for place in range(9)}
    assert made == {tuple(range(9)), (2, 1, 0, 5, 4, 3, 8, 7, 6)}
    shifted = {tuple(Augment(crop=1).changed(image, 0, np.array([place])).ravel()) for place in range(200)}
    assert len(shifted) == 9 and (4, 5, 0, 7, 8, 0, 0, 0, 0) in shifted
    wrong = ("flip+flip", "crop", "crop=0", "turn", "flip+", "crop=٣")
    assert [read(word) for word in wrong] == [None] * len(wrong)
    assert read("flip+crop=4").text() == "flip+crop=4"


def test_cifars_and_mnists_own_files_are_read(tmp_path):
    rows = np.concatenate((LABELS[:, None].astype(np.uint8), RNG.integers(0, 256, (COUNT, 3072), np.uint8)), 1)
    for number, part in enumerate(np.split(rows, 2), 1):
        part.tofile(tmp_path / f"data_batch_{number}.bin")
    small = model(num_labels=5)
    train = Train(global_batch=8, seq_len=32**2, image=32)
    built = data.build(str(tmp_path), tokenizer.Bytes(), tmp_path / "cache")
    found = data.load(built, train, vocab=5, model=small)
    assert (found.labels == LABELS).all() and (found.inputs[7] == rows[7, 1:].reshape(3, 32, 32)).all()
    images = RNG.integers(0, 256, (COUNT, SIDE, SIDE), np.uint8)
    folder = tmp_path / "mnist"
    folder.mkdir()
    with gzip.open(folder / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(b"\0\0\x08\x03" + struct.pack(">3I", COUNT, SIDE, SIDE) + images.tobytes())
    with gzip.open(folder / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(b"\0\0\x08\x01" + struct.pack(">I", COUNT) + LABELS.astype(np.uint8).tobytes())
    built = data.build(str(folder / "train-images-idx3-ubyte.gz"), tokenizer.Bytes(), tmp_path / "cache")
    found = data.load(built, TRAIN, vocab=5, model=model(num_channels=1))
    assert found.batch(0).tokens.shape == (8, 1, SIDE, SIDE) and (found.inputs[3] == images[3]).all()


def test_clients_have_the_samples_that_are_said_to_be_theirs(tmp_path):
    values = np.arange(COUNT, dtype=np.float64).repeat(SIDE**2 * 3).reshape(COUNT, 3, SIDE, SIDE)
    owners = np.repeat([10, 20, 30, 40], [4, 16, 12, 8])
    found = opened(tmp_path, images=values, labels=LABELS, clients=owners)
    for client, owner in enumerate([10, 20, 30, 40]):
        rows = [found.own(step, client, 4, rows=4).tokens[:, 0, 0, 0] for step in range(10)]
        assert set(np.concatenate(rows).astype(int)) == set(np.flatnonzero(owners == owner))
    assert [len(found.members(part, 2)) for part in range(2)] == [20, 20]
    with pytest.raises(MeshwrightError, match=r"D013.*part 2 of 8 has no samples"):
        found.members(1, 8)


def test_shares_of_classes_are_those_that_are_drawn(tmp_path):
    found = opened(tmp_path, images=BYTES, labels=LABELS)
    groups, rng = found.groups(10), np.random.default_rng(1)
    assert [set(LABELS[some]) for some in groups] == [{c} for c in range(5)]
    shares = np.array([0.6, 0.4, 0.0, 0.0, 0.0])
    drawn = np.concatenate([found.drawn(rng, groups, shares, 100).targets for _ in range(20)])
    assert np.bincount(drawn, minlength=5) / len(drawn) == pytest.approx(shares, abs=0.04)  # 3.7 deviations


def test_clusters_take_turns_on_runs_of_the_samples(tmp_path):
    values = np.arange(COUNT, dtype=np.float64).repeat(SIDE**2 * 3).reshape(COUNT, 3, SIDE, SIDE)
    train = Train(global_batch=8, seq_len=SIDE**2, image=SIDE, clusters=4)
    found = opened(tmp_path, train=train, images=values, labels=LABELS)
    for step in range(12):
        rows = found.batch(step).tokens[:, 0, 0, 0].long().numpy()
        assert set(rows // 10) == {step % 4}


SAID = {
    "batch=8,features=13": ("W009", "some reads vectors of 12 features", "say features=12"),
    "batch=8,seq=4": ("W009", "some reads vectors of 12 features", "say features=12"),
    "batch=8,features=12,image=4": (
        "W002",
        "and features= is about vectors",
        "or image= where the model reads vectors",
    ),
    "batch=8,image=4": ("W009", "some reads vectors of 12 features", "say features=12"),
    "batch=8,features=12,seq=1": ("W002", "each sequence is a vector of 12 features", "or features= where the model"),
}


@pytest.mark.parametrize("words", SAID)
def test_a_workload_of_other_samples_than_a_model_reads_is_one_clear_error(words):
    code, message, help = SAID[words]
    with pytest.raises(MeshwrightError) as error:
        wrong = check(mw.parse_plan("dp1 mb8").on(1), from_config(SOFTMAX, name="some"), ON, mw.parse_train(words))
        raise MeshwrightError(wrong)
    (one,) = error.value.diagnostics
    assert one.code == code and message in one.message and help in one.help


@pytest.mark.parametrize(("option", "words"), [("--augment turn", "say flip"), ("--augment flip", "reads no images")])
def test_images_alone_are_changed(option, words, tmp_path, capsys):
    (tmp_path / "some.json").write_text(json.dumps(SOFTMAX))
    np.savez(tmp_path / "some.npz", features=RNG.normal(size=(40, 12)), labels=LABELS)
    asked = ["--on", "1xh100", "--train", "batch=8,features=12", "--plan", "dp1 mb8", *option.split()]
    assert main(["run", str(tmp_path / "some.json"), *asked, "--data", str(tmp_path / "some.npz")]) == 2
    assert words in capsys.readouterr().err


WRONG = {
    "no labels": ({"images": BYTES}, "D012", "its arrays are images"),
    "too few labels": ({"images": BYTES, "labels": LABELS[:-1]}, "D012", "40 images and 39 labels"),
    "words": ({"images": BYTES, "labels": LABELS.astype(str)}, "D012", "which is no number"),
    "nan": ({"images": np.where(BYTES > 9, BYTES, np.nan), "labels": LABELS}, "D012", "not finite"),
    "a large label": ({"images": BYTES, "labels": LABELS + 3}, "D013", "there is a label 7, and small tells 5 classes"),
    "values": ({"images": BYTES, "labels": LABELS / 2}, "D013", "classes are whole numbers"),
    "other sizes": (
        {"images": BYTES[:, :8], "labels": LABELS},
        "D013",
        r"of the shape \[8, 16, 3\], and small reads 3",
    ),
    "one label": ({"images": BYTES, "labels": 3}, "D012", r"labels has the shape \[\]"),
    "labels beyond 63 bits": (
        {"images": BYTES, "labels": np.full(COUNT, 2**64 - 1, np.uint64)},
        "D012",
        "labels has the value 18446744073709551615",
    ),
    "mean of words": ({"images": BYTES, "labels": LABELS, "mean": "half"}, "D012", "mean are of type"),
    "mean of nothing": (
        {"images": BYTES, "labels": LABELS, "mean": [np.nan]},
        "D012",
        "mean has a value that is not f",
    ),
    "mean of maps": ({"images": BYTES, "labels": LABELS, "mean": np.ones((3, 1, 1))}, "D012", "mean has the shape"),
    "mean of two": (
        {"images": BYTES, "labels": LABELS, "mean": [0.5, 0.4]},
        "D013",
        "mean is said of 2 channels, and small reads 3",
    ),
    "no deviation": ({"images": BYTES, "labels": LABELS, "std": [1.0, 1.0, 0.0]}, "D012", "std has the value 0"),
    "clients that are none": (
        {"images": BYTES, "labels": LABELS, "clients": np.full(COUNT, np.nan)},
        "D012",
        "clients has a value that is not finite",
    ),
    "none held out": (
        {"images": BYTES, "labels": LABELS, "held_out": LABELS > 9},
        "D012",
        "held_out is true of 0 of 40 samples",
    ),
    "held out by numbers": (
        {"images": BYTES, "labels": LABELS, "held_out": LABELS},
        "D012",
        "neither true nor false",
    ),
    "held out of others": (
        {"images": BYTES, "labels": LABELS, "held_out": LABELS[:7] > 2},
        "D012",
        r"held_out has the shape \[7\]",
    ),
    "few": ({"images": BYTES[:4], "labels": LABELS[:4]}, "D005", "there are 4 samples, and a step trains 8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_samples_is_said(case, tmp_path):
    arrays, code, words = WRONG[case]
    with pytest.raises(MeshwrightError, match=rf"{code}[\s\S]*{words}"):
        opened(tmp_path, **arrays)


def test_objects_are_never_unpickled(tmp_path):
    with pytest.raises(MeshwrightError, match=r"D012"):
        opened(tmp_path, images=BYTES, labels=np.array([{}] * COUNT, object))
    beside = opened(tmp_path, images=BYTES, labels=LABELS, about=np.array([{}], object))  # not read at all
    assert beside.batch(0).tokens.shape == (8, 3, SIDE, SIDE)


def damaged(path, how):
    """Make a .npz of another kind, or damage it."""
    if how == "array":
        with path.open("wb") as file:
            np.save(file, BYTES)
        return "no zip file of arrays"
    if how == "text":
        path.write_text("some text")
        return "no zip file of arrays"
    if how == "entry":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("labels", "1 2 3")
            file.writestr("images.npy", b"no array")
        return "images is no array|magic string|no array"
    np.savez_compressed(path, images=BYTES, labels=LABELS)
    held = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(held[: len(held) // 2])
        return "only a part of one"
    held[100:4000] = bytes(one ^ 0x5A for one in held[100:4000])
    path.write_bytes(held)
    return "decompress|CRC"


@pytest.mark.parametrize("how", ["array", "text", "entry", "cut", "turned bits"])
def test_a_damaged_file_is_one_clear_error(how, tmp_path):
    words = damaged(tmp_path / "some.npz", how)
    with pytest.raises(MeshwrightError, match=rf"D012[\s\S]*not labelled samples: .*({words})"):
        data.build(str(tmp_path / "some.npz"), tokenizer.Bytes(), tmp_path / "cache")


REFUSED = {
    "--lengths out.csv": "some reads no text",
    "--tokenizer bytes": "some reads no text",
    "--model other.json": "name one of them",
    "--eval-data good.npz": "--eval-every says when",
    "--world skew=0.3": "replicas of this plan are none",
    "--plan dp2_mb4_sync=fedavg:h=2 --on 2xh100 --data whose.npz --world skew=0.3": "samples say whose each is",
    "--eval-every 1 --held-out 0.2 --data held.npz": "the data say which samples are held out",
    "--eval-every 1 --eval-data bad.npz": "--eval-data bad.npz",
    "--eval-every 1 --eval-data none.npz": "--eval-data none.npz",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_do_not_go_with_samples_are_one_clear_error(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "some.json").write_text(json.dumps(SOFTMAX))
    np.savez("good.npz", features=RNG.normal(size=(40, 12)), labels=LABELS)
    np.savez("whose.npz", features=RNG.normal(size=(40, 12)), labels=LABELS, clients=LABELS)
    np.savez("held.npz", features=RNG.normal(size=(40, 12)), labels=LABELS, held_out=LABELS > 2)
    np.savez("bad.npz", features=RNG.normal(size=(40, 12)))
    asked = {"--on": "1xh100", "--train": "batch=8,features=12", "--plan": "dp1 mb8", "--data": "good.npz"}
    said = [word.replace("_", " ") for word in words.split()]
    asked |= dict(zip(said[::2], said[1::2]))
    options = [word for one in asked.items() for word in one]
    assert main(["run", "some.json", *options, "--out", "out", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.count("error[") == 1 and REFUSED[words] in said and not (tmp_path / "out").exists()


def test_text_and_samples_are_not_taken_for_one_another(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    built = data.build(str(tmp_path / "a.txt"), tokenizer.Bytes(), tmp_path / "cache")
    with pytest.raises(MeshwrightError, match=r"D013.*classifies labelled samples, and the data are text"):
        data.load(built, TRAIN, vocab=5, model=model())
    np.savez(tmp_path / "some.npz", images=BYTES, labels=LABELS)
    built = data.build(str(tmp_path / "some.npz"), tokenizer.Bytes(), tmp_path / "cache")
    with pytest.raises(MeshwrightError, match=r"D013.*are labelled samples, and the model reads text"):
        data.load(built, Train(global_batch=2, seq_len=8), vocab=257)
    with pytest.raises(MeshwrightError, match=r"D001.*there is no file"):
        data.build(str(tmp_path / "other.npz"), tokenizer.Bytes(), tmp_path / "cache")


def test_a_run_learns_and_says_how_many_of_the_held_out_images_it_tells_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    labels = RNG.integers(0, 5, 240)
    shown = RNG.normal(size=(5, 3, SIDE, SIDE))[labels] + RNG.normal(size=(240, 3, SIDE, SIDE)) / 2
    np.savez(tmp_path / "train.npz", images=shown.astype(np.float32), labels=labels)
    of, cluster = model(), mw.load_cluster("2xh100")
    train = mw.parse_train(f"batch=16,image={SIDE},optimizer=momentum,dtype=fp32")
    plan = mw.parse_plan("dp2 mb8")
    from meshwright.run.api import train as trained
    from meshwright.run.settings import Settings

    said = {"steps": 48, "out": str(tmp_path / "out"), "judged_every": 48, "held_out": 0.2, "quiet": True}
    settings = Settings(lr=0.02, weight_decay=0.0)
    found = trained(of, cluster, train, plan, text=str(tmp_path / "train.npz"), settings=settings, device="cpu", **said)
    assert found.losses[0] > 1.4 and found.losses[-1] < 0.6
    assert found.accuracy.keys() == found.judged.keys() == {48} and found.accuracy[48] > 0.8
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["held_out_accuracy"] == found.accuracy[48] and last["tokens"] == 48 * 16


def test_a_batch_that_has_grown_is_judged_as_it_was(tmp_path):
    """Every step's loss at no learning rate is of the same model, whatever the batch has grown to."""
    words = "batch=24,features=64,optimizer=sgd,dtype=fp32,grow=0.01,most=96"
    job = loop.Job(model=mw.load_model("digits-softmax"), plan=mw.parse_plan("dp2 mb12"), train=mw.parse_train(words),
                   steps=4, judged_every=1, quiet=True, settings=Settings(lr=0.0, precision="float64"),
                   corpus=str(data.build("digits", tokenizer.Bytes(), tmp_path / "cache")))  # fmt: skip
    said = launch_forked(2, grown_by, job)[0]
    assert said[0] == sorted(said[0]) and said[0][0] == 24 < said[0][-1] <= 96
    assert said[1] == pytest.approx([said[1][0]] * 4, rel=1e-12)


def grown_by(rank, job):
    said = loop.train(World(rank, 2, rank, 2, socket.gethostname(), torch.device("cpu")), job)
    return said["batches"], list(said["judged"].values())

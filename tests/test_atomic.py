"""Writing to a path: files whole, links followed, pipes and devices left what they are."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from meshwright.atomic import obstacle, write_by, write_bytes
from meshwright.cli.output import unwritable
from meshwright.errors import MeshwrightError

DATA = b"new " * 1000


def refusal(path) -> str:
    with pytest.raises(MeshwrightError) as caught:
        write_bytes(path, DATA)
    (found,) = caught.value.diagnostics
    assert found.code == "X104" and found.help and str(path) in found.message
    return found.message


def left(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "deep").mkdir()
    target, link, far = tmp_path / "deep" / "target", tmp_path / "link", tmp_path / "far"
    target.write_text("old")
    before = target.stat().st_ino
    link.symlink_to("deep/target")
    far.symlink_to("link")
    write_bytes(far, DATA)
    assert far.is_symlink() and link.is_symlink() and str(link.readlink()) == "deep/target"
    assert not target.is_symlink() and target.read_bytes() == DATA
    assert target.stat().st_ino != before  # another file took its place: a reader never saw half of it
    assert left(tmp_path / "deep") == ["target"]


def test_a_link_to_nothing_makes_its_target(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    assert obstacle(link) is None
    write_bytes(link, DATA)
    assert link.is_symlink() and (tmp_path / "target").read_bytes() == DATA


def test_links_that_lead_nowhere_are_refused(tmp_path):
    circle, lost = tmp_path / "circle", tmp_path / "lost"
    circle.symlink_to("circle")
    lost.symlink_to("no/such/folder")
    assert "levels of symbolic links" in refusal(circle)
    assert f"there is no folder {tmp_path / 'no/such'}" in refusal(lost)
    assert left(tmp_path) == ["circle", "lost"]


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_a_file_keeps_its_mode_and_a_new_one_gets_the_usual(tmp_path, mode):
    old, new, plain = (tmp_path / name for name in ("old", "new", "plain"))
    old.write_text("old")
    old.chmod(mode)
    plain.write_text("what open() gives")
    write_bytes(old, DATA)
    write_bytes(new, DATA)
    assert stat.S_IMODE(old.stat().st_mode) == mode
    assert stat.S_IMODE(new.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_keeps_its_owner(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    os.chown(file, 1234, 4321)
    write_bytes(file, DATA)
    assert (file.stat().st_uid, file.stat().st_gid, file.read_bytes()) == (1234, 4321, DATA)


def test_a_pipe_is_written_and_stays_a_pipe(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_bytes(pipe, DATA)
    reader.join()
    assert got == [DATA] and stat.S_ISFIFO(pipe.stat().st_mode)
    assert left(tmp_path) == ["pipe"]


def test_a_reader_that_has_gone_is_a_broken_pipe():
    ours, theirs = os.pipe()
    os.close(ours)
    with pytest.raises(BrokenPipeError):
        write_bytes(f"/dev/fd/{theirs}", DATA)
    os.close(theirs)


def test_devices_stay_devices():
    before = [Path(name).stat() for name in ("/dev/null", "/dev/full")]
    write_bytes("/dev/null", DATA)
    assert refusal("/dev/full") == "cannot write /dev/full: No space left on device"
    for name, was in zip(("/dev/null", "/dev/full"), before):
        now = Path(name).stat()
        assert stat.S_ISCHR(now.st_mode) and (now.st_ino, now.st_rdev) == (was.st_ino, was.st_rdev)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make devices")
def test_a_disk_is_left_alone(tmp_path):
    disk = tmp_path / "disk"
    try:
        os.mknod(disk, 0o600 | stat.S_IFBLK, os.makedev(240, 0))  # a number for local use: no driver answers to it
    except PermissionError:
        pytest.skip("this container may not make devices")
    assert "it is a disk" in refusal(disk)
    assert stat.S_ISBLK(disk.stat().st_mode)


def test_a_descriptor_is_written_from_where_it_stands(tmp_path):
    file = tmp_path / "file"
    with file.open("wb") as opened:
        opened.write(b"before ")
        opened.flush()
        write_bytes(f"/proc/self/fd/{opened.fileno()}", b"between ")
        opened.write(b"after")
    assert file.read_bytes() == b"before between after"
    assert "Bad file descriptor" in refusal("/dev/fd/987654")


@pytest.mark.parametrize("shell", ["{} | cat", "{} > {file} && cat {file}", "{} 3>&1 >/dev/null"])
def test_standard_output_takes_a_file_among_what_is_printed(shell, tmp_path):
    where = "/dev/fd/3" if "3>" in shell else "/dev/stdout"
    code = f"print('first'); from meshwright.atomic import write_bytes; write_bytes('{where}', b'data '); print('last')"
    script = tmp_path / "script.py"
    script.write_text(code)
    line = shell.format(f"{sys.executable} {script}", file=tmp_path / "out")
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == ("data " if "3>" in shell else "first\ndata last\n")


def test_folders_and_paths_that_no_file_has_are_refused(tmp_path):
    (tmp_path / "file").write_text("old")
    assert "it is a folder" in refusal(tmp_path)
    assert "there is no folder" in refusal(tmp_path / "none" / "file")
    assert "Not a directory" in refusal(tmp_path / "file" / "below")
    assert "too long" in refusal(tmp_path / ("n" * 300)).lower()
    assert "null" in refusal("a\0b")


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    assert "No space left" in refusal(file)
    assert file.read_text() == "old" and left(tmp_path) == ["file"]


def test_what_is_refused_before_the_work_is_what_writing_refuses(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    fine = ["/dev/null", "/dev/stdout", str(tmp_path / "new")]
    wrong = [str(tmp_path), str(tmp_path / "circle"), "a/b/c"]
    assert [unwritable(path, "--trace") for path in fine] == [[], [], []]
    for path in wrong:
        (early,) = unwritable(path, "--trace")
        assert early.message == refusal(path) and early.place == f"--trace {path}"


def test_what_a_function_writes_is_there_whole_or_not_at_all(tmp_path):
    """Arrays that are written into an open file: after an error in the middle the old file is whole."""
    path = tmp_path / "found.npz"
    path.write_bytes(b"old")

    def half(file):
        file.write(DATA)
        raise OSError(28, "No space left on device")

    with pytest.raises(MeshwrightError, match=r"X104.*No space left"):
        write_by(path, half)
    assert path.read_bytes() == b"old" and left(tmp_path) == ["found.npz"]
    write_by(path, lambda file: np.savez(file, one=np.arange(3)))
    assert np.load(path)["one"].tolist() == [0, 1, 2]
    write_bytes(path, DATA, mode=0o640)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640

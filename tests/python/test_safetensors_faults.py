"""VW2 and its kin with real disks, limits and signals: the target is always the old file or the whole new one."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loraaccel import safetensors as ours

KILLS = int(os.environ.get("LORAACCEL_TEST_KILLS", "20"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "loraaccel-test", str(place)]
    try:
        done = subprocess.run(mount, check=False, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount here: {error}")
    if done.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_vw2_a_full_disk_keeps_the_old_file(small_disk: Path) -> None:
    path = small_disk / "x.safetensors"
    ours.save_file({"w": torch.ones(600_000)}, path)
    before = path.read_bytes()
    for tensors in ({"w": torch.zeros(600_000)}, {"w": torch.zeros(5_000_000)}):
        for dtype in (None, torch.float64):
            with pytest.raises(OSError, match="No space left") as error:
                ours.save_file(tensors, path, dtype=dtype, write_hashes=True)
            assert error.value.errno == errno.ENOSPC
            assert error.value.filename == str(path)
            assert path.read_bytes() == before
            assert [file.name for file in small_disk.iterdir()] == ["x.safetensors"]
    with pytest.raises(OSError, match="No space left"):
        ours.save_file_async(tensors, path).wait()
    assert path.read_bytes() == before
    ours.save_file({"w": torch.zeros(300_000)}, path)  # there is room for that
    assert ours.load_file(path)["w"].shape == (300_000,)


def test_vw2_beyond_the_limit_of_file_sizes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    code = f"""
import errno, resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # (Python ignores it)
import torch
from loraaccel import safetensors
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
try:
    safetensors.save_file({{"w": torch.ones(100_000)}}, {str(path)!r})
except OSError as error:
    assert error.errno == errno.EFBIG, error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


KILLER = """
import os, random, signal, sys, time
import torch
from loraaccel import safetensors

torch.set_num_threads(1)  # no threads of torch's that a fork would lose
path, kills = sys.argv[1], int(sys.argv[2])
moments, last, cut = random.Random(0), -1, 0

def save(number):
    tensors = {"w": torch.full((1000, 1200), float(number)), "v": torch.full((333,), float(number))}
    safetensors.save_file(tensors, path, {"number": str(number)}, sync=number % 4 == 0, write_hashes=number % 3 == 0)

for kill in range(kills):
    child = os.fork()
    if child == 0:
        for number in range(last + 1, 10**9):
            save(number)
    time.sleep(moments.uniform(0, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    cut += any(name.endswith(".tmp") for name in os.listdir(os.path.dirname(path)))
    if not os.path.exists(path):
        assert last == -1, "the file was there, and is not"
        continue
    with safetensors.safe_open(path, "pt") as file:
        number = int(file.metadata()["number"])
        assert number >= last, (number, last)
        last = number
        tensors = file.get_tensors()
    assert (tensors["w"] == last).all() and (tensors["v"] == last).all(), last
assert last >= 0, "killed before the first save each time: nothing was seen"
save(0)
assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)], "what the killed ones left is still there"
print(cut)
"""


def test_vw2_killed_at_any_point(tmp_path: Path) -> None:
    """A process that saves all the time, killed; LORAACCEL_TEST_KILLS says how often."""
    command = [sys.executable, "-c", KILLER, str(tmp_path / "x.safetensors"), str(KILLS)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "no kill came in the middle of a save"


def test_a_writer_that_lives_keeps_its_temporary_file(tmp_path: Path) -> None:
    """Saves of one target at the same time, in several processes: each removes what is left, none what is in use."""
    path = tmp_path / "x.safetensors"
    code = """
import sys, torch
from loraaccel import safetensors
for number in range(15):
    w = torch.full((100_000,), float(sys.argv[2]))
    safetensors.save_file({"w": w}, sys.argv[1], sync=False)
"""
    savers = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)]) for n in range(3)]
    assert [saver.wait() for saver in savers] == [0, 0, 0]
    w = ours.load_file(path)["w"]
    assert w.shape == (100_000,)
    assert (w == w[0]).all()
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_file_that_is_cut_short_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    ours.save_file({"a": torch.arange(4096.0), "b": torch.arange(500_000.0)}, path)
    with ours.safe_open(path, "pt") as file, ours.safe_open(path, "pt", backend="mmap") as mapped:
        os.truncate(path, 100_000)
        assert torch.equal(file.get_tensor("a"), torch.arange(4096.0))
        for read in (lambda: file.get_tensor("b"), lambda: file.get_slice("b")[400_000:]):
            with pytest.raises(ours.SafetensorError, match="cut since it was opened") as error:
                read()
            assert str(path) in str(error.value)
        with contextlib.suppress(ours.SafetensorError):  # mapped at the first view: looked at again there
            mapped.get_tensor("b")

"""Which files a merge reads and writes, and what it leaves where it fails, is stopped or killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from small_models import load_plain, plain, save, weight

from loraaccel import adapters


def plain_file(path: Path, seed: int = 1) -> Path:
    """An adapter of l.weight [16, 8], as a PEFT folder."""
    tensors, config = plain("l", 16, 8, seed=seed)
    path.mkdir()
    safetensors.torch.save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(config)
    return path / "adapter_model.safetensors"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_files_that_are_read_are_never_written(tmp_path):
    """What is kept, and the merged model, over the base, an adapter, the kept file, or each other: under any name."""
    base = save(tmp_path / "b.safetensors", l__weight=weight(16, 8))
    adapter = plain_file(tmp_path / "a")
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(adapter)
    old = tmp_path / "old.safetensors"
    old.write_bytes(b"OLD")
    adapters.merge(base, adapter.parent, tmp_path / "m", keep=tmp_path / "k")
    before = contents(tmp_path)
    for target, keep, text in (
        ("out", "b.safetensors", "is the base model"),
        ("out", "x/../b.safetensors", "is the base model"),
        ("old.safetensors", "old.safetensors", "own place"),
        ("new", "x/../new", "own place"),
    ):
        with pytest.raises(ValueError, match=text):
            adapters.merge(base, adapter.parent, tmp_path / target, keep=tmp_path / keep)
        assert contents(tmp_path) == before
    for target, keep in (("out", "a"), ("a", None)):
        with pytest.raises(ValueError, match="is an adapter, expected another place"):
            adapters.merge(
                base, adapter.parent, tmp_path / target, keep=None if keep is None else tmp_path / keep
            )
        assert contents(tmp_path) == before
    with pytest.raises(ValueError, match="is what was kept"):
        adapters.unmerge(tmp_path / "m", tmp_path / "k", tmp_path / "x" / ".." / "k")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("exists", [False, True])
def test_va2_a_move_that_fails_takes_the_kept_file_back(exists, tmp_path):
    base = save(tmp_path / "b.safetensors", l__weight=weight(16, 8))
    adapter = plain_file(tmp_path / "a").parent
    if exists:
        adapters.merge(
            base, plain_file(tmp_path / "other", seed=5).parent, tmp_path / "m", keep=tmp_path / "k"
        )
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "in_it").write_text("x")
    before = contents(tmp_path)
    with pytest.raises(OSError, match="folder"):
        adapters.merge(base, adapter, tmp_path / "folder", keep=tmp_path / "k")
    assert contents(tmp_path) == before
    if exists:
        adapters.unmerge(tmp_path / "m", tmp_path / "k", tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == base.read_bytes()


def test_vw2_what_a_killed_merge_has_left_the_next_one_removes(tmp_path):
    base = save(
        tmp_path / "b.safetensors",
        **{f"l{i}__weight": weight(512, 512) for i in range(8)},
        l__weight=weight(16, 8),
    )
    adapter = plain_file(tmp_path / "a").parent
    script = (
        "import sys; from loraaccel import adapters\n"
        "print('ready', flush=True)\n"
        "while True: adapters.merge(sys.argv[1], sys.argv[2], sys.argv[3] + '/m', keep=sys.argv[3] + '/k')\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    for pause in (0.02, 0.05, 0.11, 0.17):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(base), str(adapter), str(out)], stdout=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(pause)
        process.kill()
        process.wait()
        process.stdout.close()
    adapters.merge(base, adapter, out / "m", keep=out / "k")
    assert set(contents(out)) == {"m", "k"}
    adapters.unmerge(out / "m", out / "k", out / "u")
    assert (out / "u").read_bytes() == base.read_bytes()


def test_two_merges_into_one_place_at_once_are_an_error(tmp_path):
    base = save(tmp_path / "b.safetensors", l__weight=weight(16, 8))
    adapter = plain_file(tmp_path / "a").parent
    with (tmp_path / "m.loraaccel-lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process") as error:
            adapters.merge(base, adapter, tmp_path / "m")
        assert error.value.errno == errno.EBUSY
    adapters.merge(base, adapter, tmp_path / "m")
    assert not list(tmp_path.glob("*.loraaccel-*"))


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (
            {"weight_map": {"l.weight": "1.safetensors", "o.weight": "2.safetensors"}},
            FileNotFoundError,
            "2.safetensors",
        ),
        ({"weight_map": {"l.weight": "../b.safetensors"}}, ValueError, "no file name of its folder"),
        ({"weight_map": {"l.weight": 3}}, ValueError, "no file name of its folder"),
        ({}, ValueError, "no index of shards"),
        (None, ValueError, "no index of shards"),
    ],
)
def test_an_index_of_shards_must_name_what_is_there(index, error, text, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save(folder / "1.safetensors", l__weight=weight(16, 8))
    (folder / "model.safetensors.index.json").write_text("{" if index is None else json.dumps(index))
    adapter = plain_file(tmp_path / "a").parent
    with pytest.raises(error, match=text):
        adapters.merge(folder, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_an_oserror(tmp_path):
    base = save(tmp_path / "b.safetensors", a__weight=weight(8, 8))
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(PermissionError):
        adapters.merge(base, load_plain("a", 8, 8), locked / "m.safetensors")


def test_progress_counts_tensors_and_may_end_the_merge(tmp_path):
    base = save(
        tmp_path / "b.safetensors", l__weight=weight(8, 8), m__weight=weight(3, 3), other=torch.arange(5)
    )
    adapter, target = load_plain("l", 8, 8), tmp_path / "m.safetensors"
    seen = []
    adapters.merge(base, adapter, target, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3)]
    before, names = target.read_bytes(), sorted(os.listdir(tmp_path))

    def stop(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapters.merge(base, adapter, target, strength=0.5, keep=tmp_path / "k.safetensors", progress=stop)
    assert target.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == names

"""Compiled kernels on disk: permissions, damaged files, and folders that cannot be used."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import stat
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_compile.kernels.cuda import binary_cache
from ddp_compile.kernels.cuda.binary_cache import BinaryCache, default_folder

BINARY = bytes(range(256)) * 40


def make() -> bytes:
    return BINARY


def refuse() -> bytes:
    raise AssertionError("what is in the cache is not to be made again")


def the_file(folder: Path) -> Path:
    (file,) = folder.iterdir()  # and no part of another one
    return file


def test_what_was_made_once_is_found_by_others(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert BinaryCache(folder).get("key", make) == (BINARY, False)
    assert BinaryCache(folder).get("key", refuse) == (BINARY, True)
    assert BinaryCache(folder).get("another key", lambda: b"other") == (b"other", False)


def test_nobody_else_may_use_the_folder(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        BinaryCache(tmp_path / "cuda").get("key", make)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "cuda").stat().st_mode) == 0o700
    assert stat.S_IMODE(the_file(tmp_path / "cuda").stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["truncated", "empty", "changed", "grown"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    BinaryCache(tmp_path / "cuda").get("key", make)
    file = the_file(tmp_path / "cuda")
    whole = file.read_bytes()
    file.write_bytes(
        {
            "truncated": whole[:-1],
            "empty": b"",
            "changed": whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
            "grown": whole + b"\0",
        }[damage]
    )
    assert BinaryCache(tmp_path / "cuda").get("key", make) == (BINARY, False)
    assert f"{file} is damaged" in caplog.text
    assert the_file(tmp_path / "cuda").read_bytes() == whole
    assert BinaryCache(tmp_path / "cuda").get("key", refuse) == (BINARY, True)


@pytest.mark.parametrize("step", ["mkdir", "mkstemp", "write", "replace"])
@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_reported_once(
    tmp_path: Path, step: str, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    def full_file(handle: int, mode: str) -> AbstractContextManager[Any]:
        os.close(handle)
        return nullcontext(SimpleNamespace(write=fail))

    patched = {
        "mkdir": (Path, "mkdir", fail),
        "mkstemp": (binary_cache.tempfile, "mkstemp", fail),
        "write": (binary_cache.os, "fdopen", full_file),
        "replace": (binary_cache.os, "replace", fail),
    }[step]
    monkeypatch.setattr(*patched)
    cache = BinaryCache(tmp_path / "cuda")
    assert cache.get("key", make) == (BINARY, False)
    assert cache.get("key", make) == (BINARY, False)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(tmp_path / "cuda") in record.message and os.strerror(error) in record.message
    assert "set DDP_COMPILE_CACHE_DIR to a writable folder" in record.message
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("reason", ["mode", "owner", "link"])
def test_a_folder_that_others_may_write_to_or_own_is_not_trusted(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, owner = tmp_path / "cuda", os.getuid()
    BinaryCache(folder).get("key", lambda: b"planted")
    if reason == "mode":
        folder.chmod(0o770)
    elif reason == "owner":
        monkeypatch.setattr(binary_cache.os, "getuid", lambda: owner + 1)
    else:
        folder = tmp_path / "link"
        folder.symlink_to(tmp_path / "cuda")
    said = {
        "mode": "others can access it (mode 770); chmod 700 it",
        "owner": f"it belongs to user {owner}, not to {owner + 1}",
        "link": "it is not a folder",
    }
    assert BinaryCache(folder).get("key", make) == (BINARY, False)
    assert said[reason] in caplog.text
    assert b"planted" in the_file(tmp_path / "cuda").read_bytes()  # nothing is written there


def write_and_read(folder: Path, key: str, binary: bytes, times: int) -> None:
    for _ in range(times):
        cache = BinaryCache(folder)
        assert cache.get(key, lambda: binary)[0] == binary
        for file in folder.glob("*.cubin"):
            file.unlink(missing_ok=True)


def test_many_processes_may_write_the_same_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    jobs = [(tmp_path / "cuda", "key", BINARY * 100, 100)] * 4
    processes = [context.Process(target=write_and_read, args=job) for job in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert list((tmp_path / "cuda").glob("*.part")) == []


def test_the_environment_moves_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_COMPILE_CACHE_DIR", str(tmp_path))
    assert default_folder() == tmp_path / "cuda"
    monkeypatch.delenv("DDP_COMPILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_folder() == tmp_path / "cache" / "ddp_compile" / "cuda"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".cache" / "ddp_compile" / "cuda"

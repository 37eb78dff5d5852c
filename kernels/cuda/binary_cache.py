"""Compiled kernels on disk, so that only the first process on a machine compiles them.

A cached file runs on the GPU with the user's rights. So the folder must belong to the user alone, and a file is used
only if its digest matches.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "DDP_COMPILE_CACHE_DIR"

_DIGEST_BYTES = 32


def default_folder() -> Path:
    """``$DDP_COMPILE_CACHE_DIR/cuda``, else ``ddp_compile/cuda`` in the user's cache folder."""
    if moved := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(moved).expanduser() / "cuda"
    try:
        user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # the user has no home, as in some containers
        user_cache = Path(tempfile.gettempdir())
    return user_cache / "ddp_compile" / "cuda"


class BinaryCache:
    """A folder of binaries.

    A file is the SHA-256 of a binary and the binary. Files are replaced atomically, so any number of processes may
    share the folder. The first error with it is logged, and binaries are compiled in memory from then on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_broken = False

    def get(self, key: str, make: Callable[[], bytes]) -> tuple[bytes, bool]:
        """The binary for a key, and whether it was found. If not, it is made and saved."""
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
        binary = self._attempt(lambda: self._read(path))
        if binary is not None:
            return binary, True
        made = make()
        self._attempt(lambda: self._write(path, made))
        return made, False

    def _attempt(self, step: Callable[[], bytes | None]) -> bytes | None:
        if self._is_broken:
            return None
        try:
            return step()
        except OSError as error:
            self._is_broken = True
            log.warning(
                "CUDA kernels are compiled again in every process, since they cannot be saved in %s: %s; set %s to a"
                " writable folder",
                self.folder,
                error,
                ENVIRONMENT_VARIABLE,
            )
            return None

    def _read(self, path: Path) -> bytes | None:
        if not self.folder.exists():
            return None
        self._check_folder()
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        binary = content[_DIGEST_BYTES:]
        if hashlib.sha256(binary).digest() == content[:_DIGEST_BYTES]:
            return binary
        log.warning("%s is damaged and will be written again", path)
        return None

    def _write(self, path: Path, binary: bytes) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._check_folder()
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(binary).digest() + binary)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _check_folder(self) -> None:
        """Raise PermissionError if others could have written to the folder."""
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise PermissionError("it is not a folder")
        if not hasattr(os, "getuid"):
            return  # on Windows, other users have no access to the profile's folders
        if status.st_uid != os.getuid():
            raise PermissionError(f"it belongs to user {status.st_uid}, not to {os.getuid()}")
        if status.st_mode & 0o077:
            raise PermissionError(f"others can access it (mode {stat.S_IMODE(status.st_mode):o}); chmod 700 it")

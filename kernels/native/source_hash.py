"""A digest that ties the compiled library to its sources. setup.py runs this file, so it imports nothing of ours."""

import hashlib
from pathlib import Path


def source_hash(folder: Path) -> str:
    """A digest of the names and contents of the C++ files in a folder, without line endings; "" if there are none."""
    digest = hashlib.sha256()
    files = sorted(path for pattern in ("*.cpp", "*.h") for path in folder.glob(pattern))
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:16] if files else ""

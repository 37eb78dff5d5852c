"""Refuses a checkout without symbolic links, by name. It is imported before anything that is reached through one.

setup.py runs this file, so it imports nothing of ours.
"""

from pathlib import Path


def refuse_files_for_links(package: Path) -> None:
    """Raise an ImportError if a folder of the package is the small file that some tools write instead of a link."""
    files = [name for name in ("kernels", "passes", "runtime") if (package / name).is_file()]
    if files:
        raise ImportError(
            f"{', '.join(str(package / name) for name in files)} is not a symbolic link to ../{files[0]} but a file."
            " Git without core.symlinks and some programs that unpack archives write it like that. Check out again"
            " with links: git config core.symlinks true, git checkout -- ddp_compile (on Windows in its developer"
            " mode); or install a wheel or the source archive of ddp_compile, which contain no links"
        )


refuse_files_for_links(Path(__file__).parent)

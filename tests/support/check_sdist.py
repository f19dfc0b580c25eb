"""Checks a source distribution: `check_sdist.py SDIST SOURCE`. It has every file that its README names, and no tests.

The tests read files of the whole repository, and setuptools adds those of `tests/` alone that are called `test*.py`.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from typing import Final

BESIDE: Final = ("CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "constraints.txt", "pyproject.toml")


def faults(sdist: Path, source: Path) -> list[str]:
    """Faults of a source distribution that was built from the files in `source`."""
    with tarfile.open(sdist) as archive:
        held = {member.name.partition("/")[2]: member for member in archive.getmembers()}
        found = [f"the source distribution lacks {name}" for name in BESIDE if name not in held]
        for name in (name for name in BESIDE if name in held):
            file = archive.extractfile(held[name])
            if file is None or file.read() != (source / name).read_bytes():
                found.append(f"the source distribution has another {name}")
    tests = sorted(name for name in held if name.startswith("tests/"))
    return found + [f"the source distribution has {name}" for name in tests]


if __name__ == "__main__":
    sys.exit("\n".join(faults(Path(sys.argv[1]), Path(sys.argv[2]))) or None)

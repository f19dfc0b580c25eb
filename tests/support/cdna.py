"""`python -m tests.support.cdna`: which parts of the emulator of AMD machine code are here, and how to get others."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import emulated


def main(argv: Sequence[str] | None = None) -> int:
    """0 where all parts are here, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.cdna", description=__doc__)
    parser.add_argument("--build", action="store_true", help="compile the emulator's native.c, with ziglang's clang")
    if parser.parse_args(argv).build:
        if not os.environ.get(emulated.FOLDER):
            parser.error(f"--build compiles native.c of the folder that {emulated.FOLDER} names: set {emulated.FOLDER}")
        try:
            print(f"built {emulated.build_native()}")
        except subprocess.CalledProcessError as error:
            parser.error(f"--build: the compiler failed with status {error.returncode}; pip install ziglang==0.16.0")
    parts = emulated.parts()
    for part in parts:
        print(f"{part.name:9} " + ("here" if part.fault is None else f"missing: {part.fault}: {part.remedy}"))
    if any(part.fault is not None for part in parts):
        return 1
    print("python -m pytest -m emulated runs the tests")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks a wheel of fp8fn-cubins: `check_cubins.py WHEEL VERSION`.

Its cubins are those of its manifest, it is of the version, and it is small.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Final

LARGEST: Final = 10_000_000  # bytes


def faults(wheel: Path, version: str) -> list[str]:
    """Faults of a wheel that belongs to this version of fp8fn."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        held = {name.partition("/")[2] for name in archive.namelist() if name.startswith("fp8fn_cubins/")}
        if "manifest.json" not in held:
            return ["the wheel has no manifest.json: python -m fp8fn aot --suite llm84 --out cubins/fp8fn_cubins"]
        manifest = json.loads(archive.read("fp8fn_cubins/manifest.json"))
        listed = {f"{name}.cubin": checksum for name, checksum in manifest["kernels"].items()}
        others = held - {"__init__.py", "manifest.json"}
        found += [f"the wheel lacks {name}" for name in sorted(listed.keys() - others)]
        found += [f"the wheel has {name}" for name in sorted(others - listed.keys())]
        for name in sorted(listed.keys() & others):
            if hashlib.sha256(archive.read(f"fp8fn_cubins/{name}")).hexdigest() != listed[name]:
                found.append(f"{name} is not the file of the manifest")
    if not listed:
        found.append("the wheel has no kernels")
    named, made_by = wheel.name.split("-")[1], manifest["fp8fn"]
    if (named, made_by) != (version, version):
        found.append(f"the wheel is of {named} and its kernels of fp8fn {made_by}; both must be of {version}")
    if (size := wheel.stat().st_size) > LARGEST:
        found.append(f"the wheel has {size} bytes; at most {LARGEST} are allowed")
    return found


if __name__ == "__main__":
    if problems := faults(Path(sys.argv[1]), sys.argv[2]):
        sys.exit("\n".join(problems))
    print(f"{sys.argv[1]}: {Path(sys.argv[1]).stat().st_size} bytes")

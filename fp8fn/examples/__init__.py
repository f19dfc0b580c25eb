"""Programs as short as a user's own: `python -m fp8fn.examples.NAME`, and by `torchrun` for several GPUs.

Before a program runs, its process ends with one line if a package is missing or `torchrun` is.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from fp8fn.extras import installed_by

# The packages that a program imports beside PyTorch; the extra `examples` has them.
PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "ep_transformers": ("transformers",),
    "generate": ("safetensors", "tabulate", "tqdm", "transformers"),
    "lora": ("peft", "transformers"),
    "trainer": ("accelerate", "transformers"),
}
SEVERAL: Final = ("ep", "ep_transformers", "fsdp2", "fsdp2_tp")  # run by `torchrun`


def why_not(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Why the program that a process's command line names can't run, with what would help; None if it can."""
    place = [*command].index("-m") + 1 if "-m" in command[:-1] else 0
    package, _, name = command[place].rpartition(".") if place else ("", "", "")
    if package != __name__:
        return None
    if missing := [each for each in PACKAGES.get(name, ()) if importlib.util.find_spec(each) is None]:
        return f"{package}.{name}: {', '.join(missing)} not installed: {installed_by('examples')}"
    if name in SEVERAL and "RANK" not in environment and not {"-h", "--help"} & {*command[place:]}:
        return f"{package}.{name} runs in several processes: torchrun --nproc-per-node 2 -m {package}.{name}"
    return None


if (_reason := why_not(sys.orig_argv, os.environ)) is not None:
    print(_reason, file=sys.stderr)
    raise SystemExit(2)

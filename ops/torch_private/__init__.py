"""What fp8fn uses of PyTorch that is not public, in one place; `lowering` alone uses Inductor's and Dynamo's as well.

`core` has what every call may use, and the other modules what needs a part of `torch.distributed`: importing those of
`dtensor` takes a second and a half. Each module looks for all of its names when it is imported. With a release of
PyTorch that lacks one, that import fails and says what is missing, and no step does half-way. Without a name of
`dtensor` `import fp8fn` warns, and so does a program's own import of DTensors; `import fp8fn.distributed` fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def look_for(owner: Any, *names: str) -> None:
    """Raises `AttributeError` for the first name that is no attribute; those of classes are used where they are."""
    for name in names:
        getattr(owner, name)


@contextmanager
def needed_by(user: str) -> Iterator[None]:
    """Says which part of fp8fn cannot work without a name that is missing."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{user} needs what torch {torch.__version__} does not have: {error}; torch 2.11 to 2.14 have it"
        ) from error

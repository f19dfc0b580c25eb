"""On PYTHONPATH, this folder gives a Python without `fcntl`, as on Windows."""

import sys

sys.modules["fcntl"] = None  # type: ignore[assignment]

"""Tables of MX products for tests, from lines of text."""

from __future__ import annotations

from fp8fn.ops.tuning.mx import COLUMNS, FORMAT, Table, parse


def mx_table(lines: str) -> Table:
    """A row a line, as `sm90,6144,2304,8,triton_widened,BN=64 num_warps=8`, in the order of `COLUMNS`."""
    rows = []
    for line in filter(None, map(str.strip, lines.splitlines())):
        arch, k, n, m, kernel, options = line.split(",")
        pairs = (option.split("=") for option in options.split())
        rows.append([arch, int(k), int(n), int(m), kernel, {name: int(value) for name, value in pairs}])
    return parse({"format": FORMAT, "columns": list(COLUMNS), "rows": rows})

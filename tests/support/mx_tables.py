"""Tables of MX products for tests, from lines of text."""

from __future__ import annotations

from fp8fn.ops.tuning.mx import COLUMNS, FORMAT, Table, parse


def mx_table(lines: str) -> Table:
    """A row a line, as `sm90,6144,2304,8,triton_widened,BN=64 num_warps=8`: `COLUMNS` but for the source."""
    rows = []
    for line in filter(None, map(str.strip, lines.splitlines())):
        arch, k, n, m, kernel, options = line.split(",")
        pairs = (option.split("=") for option in options.split())
        rows.append([arch, int(k), int(n), int(m), kernel, {name: int(value) for name, value in pairs}, "test"])
    sources = {"test": {"name": "the table"}}
    return parse({"format": FORMAT, "sources": sources, "columns": list(COLUMNS), "rows": rows})

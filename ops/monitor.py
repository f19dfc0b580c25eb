"""The op `fp8fn::monitor`: statistics of a quantized operand, written to a `State` that outlives the graph.

A compiled graph holds a call of the op for each operand. A call does nothing unless its rows are in `PENDING`, which
the graph's own code tests first, so that a step without statistics costs tens of nanoseconds for each operand. In a
CUDA graph the launch is captured (`always`), and reads on the device whether its row is due.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8fn.ops import targets
from fp8fn.ops.layout import known_block
from fp8fn.ops.operands import Quantized
from fp8fn.ops.reference.statistics import statistics
from fp8fn.ops.statistics import OPERANDS, WIDTH, Column, Watched

MONITOR_SCHEMA: Final = (
    "monitor(Tensor data, Tensor scale, int[2] block, Tensor[] inputs, str source, int[] rows, bool always=False) -> ()"
)
PENDING: Final[set[int]] = set()
"""The rows whose statistics are due, of all states."""

_MOST_ROWS: Final = 1 << 20
_NUMBERS: Final = itertools.count()
_STATES: Final[WeakValueDictionary[int, State]] = WeakValueDictionary()
# States that a CUDA graph writes to; the graph may be replayed after everything else of them is gone.
_CAPTURED: Final[list[State]] = []


class State:
    """The rows of statistics of one graph, on each of its devices.

    Row `i` is known to the op as `first + i`. The numbers are counted for each process, so that they are the same when
    the same program runs again, and compiled graphs are found in a cache.
    """

    def __init__(self, count: int, devices: Iterable[torch.device]) -> None:
        if count > _MOST_ROWS:
            raise ValueError(f"monitor: a graph has {count} operands; at most {_MOST_ROWS} can be watched")
        self.count, self.devices = count, tuple(dict.fromkeys(devices))
        self.first = next(_NUMBERS) * _MOST_ROWS
        self.tables: dict[torch.device, Tensor] = {}
        self.scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.same: dict[int, int] = {}
        """The row that holds the statistics of another row, which has the same operand."""
        self.written: set[int] = set()
        """The rows that were written at least once."""
        self._launched: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
        _STATES[self.first] = self

    def begin(self, step: int) -> None:
        """Makes all rows due, as those of `step`."""
        for device in self.devices:
            table = self._table(device)
            table[:, Column.BEGUN].fill_(step)
            table[:, Column.DUE].fill_(1)
        PENDING.update(range(self.first, self.first + self.count))

    def is_unfinished(self) -> bool:
        """Whether the backward of the step that is measured has yet to run.

        A row that no backward ever wrote may be due for ever: a layer without trainable weights has no gradient.
        """
        if not PENDING:
            return False
        due = {row for row in range(self.count) if self.first + row in PENDING}
        gradients = {row for row in self.written if row % len(OPERANDS) == len(OPERANDS) - 1}
        return bool(due & self.written) or (bool(due) and not gradients)

    def is_new(self, row: int, data: Tensor) -> bool:
        """Whether no launch had such data yet, so that its kernel is compiled before a graph captures it."""
        before = len(self._launched)
        self._launched.add((row, data.shape, data.stride()))
        return len(self._launched) > before

    def take(self) -> list[Tensor]:
        """The rows so far, which are then empty."""
        taken = [table.clone() for table in self.tables.values()]
        for table in self.tables.values():
            table.zero_()
        return taken

    def end(self) -> None:
        """Makes no row due."""
        PENDING.difference_update(range(self.first, self.first + self.count))
        for table in self.tables.values():
            table[:, Column.DUE].fill_(0)

    def _table(self, device: torch.device) -> Tensor:
        if device not in self.tables:
            self.tables[device] = torch.zeros(self.count, WIDTH, dtype=torch.float64, device=device)
            if device.type != "cpu":
                from fp8fn.ops.triton.statistics import PROGRAMS, SUMS

                sums = torch.zeros(PROGRAMS, SUMS, dtype=torch.float64, device=device)
                self.scratch[device] = sums, torch.zeros(1, dtype=torch.int32, device=device)
        return self.tables[device]

    def measure(self, watched: Watched, row: int) -> None:
        """Writes a row; on a GPU only if it is due."""
        data = watched.q.data
        table = self._table(data.device)
        if data.device.type == "cpu":
            table[row, : Column.STEP] = statistics(watched)
            table[row, Column.STEP], table[row, Column.DUE] = table[row, Column.BEGUN], 0
            return
        from fp8fn.ops.triton.statistics import Row, plan_statistics

        into = Row(table[row], *self.scratch[data.device])
        plan_statistics(watched, into, targets.target_of(data.device)).run()


def monitor(
    data: Tensor, scale: Tensor, block: Sequence[int], inputs: Sequence[Tensor], source: str, rows: Sequence[int],
    always: bool = False,
) -> None:  # fmt: skip
    """Writes the statistics of an operand to `rows`, which all have this operand."""
    pending = rows[0] in PENDING
    PENDING.difference_update(rows)
    if not pending and (not always or data.device.type == "cpu"):
        return
    state = _STATES.get(rows[0] // _MOST_ROWS * _MOST_ROWS)
    if state is None or not data.numel():
        return
    if always:
        if not pending and not state.is_new(rows[0], data) and not torch.cuda.is_current_stream_capturing():
            return
        if state not in _CAPTURED:
            _CAPTURED.append(state)
    first, *others = (row - state.first for row in rows)
    state.written.update((first, *others))
    state.same.update(dict.fromkeys(others, first))
    pair = known_block(block)
    assert pair is not None, block
    state.measure(Watched(Quantized(data, scale, pair), source, tuple(inputs)), first)

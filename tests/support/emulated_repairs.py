"""Instructions that the CDNA emulator gets wrong or has not, as the ISA's manual has them; Triton's kernels use all.

- `ds_bpermute_b32` takes lanes modulo 64. The emulator's gives zeros for addresses past 255, as all are but those of
  the first wavefront: Triton makes an address from the thread's index.
- Arithmetic with DPP: `row_bcast:15` and `:31` read the first lane of their own row, a lane that has been written is
  read by later ones where source and target are one register, lanes without a source are written, and lanes that are
  not active are read. Here lanes are moved first, and the instruction without DPP follows.
- 16-bit instructions in 32 bits take the registers from v128 on for upper halves of the first 128, as RDNA3 has them.
  Here the operands are moved below v128 first.
- `v_maximum3_f32` and `v_minimum3_f32` give NaN for a NaN; the emulator's leave it out.
- `v_cvt_scalef32_pk_f16_fp8` and `_bf8` are missing.
- Stores to local memory from accumulation registers read the vector registers of the same numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import emu_patch
import numpy as np

Instruction = Callable[..., None]

EXEC, PROGRAM_COUNTER = 126, 256  # in the emulator's scalar registers
SCALAR_ONE = 242
LANES = ctypes.c_uint32 * 64
_native = emu_patch.native


def install() -> None:
    emu_patch.native = _repaired


def _repaired(instruction: Any, code: bytes) -> Instruction | None:
    name, encoding = emu_patch.emu._op_name(instruction), type(instruction)
    if encoding.__name__ == "DS" and emu_patch.raw(instruction, code, "acc") and "READ" not in name:
        return _from_accumulators(instruction, code)
    if name.startswith("DS_BPERMUTE"):
        return _bpermute(instruction, code)
    if hasattr(encoding, "dpp") and not name.startswith("V_MOV_B32"):
        return _with_dpp(instruction, code)
    if name.startswith("V_CVT_SCALEF32_PK_F16_"):
        return _to_float16(instruction, code, eight_exponents=name.endswith("BF8"))
    if name in ("V_MAXIMUM3_F32", "V_MINIMUM3_F32"):
        return _extreme_of_three(instruction, code, np.maximum if name == "V_MAXIMUM3_F32" else np.minimum)
    native: Instruction | None = _native(instruction, code)
    if (
        native is None
        and encoding.__name__ in ("VOP1", "VOP2", "VOPC")
        and 16 in instruction.canonical_op_bits.values()
    ):
        fields = (getattr(encoding, name, None) for name in ("src0", "vsrc1", "vdst"))
        moved = _low_registers([(field.lo, field.hi) for field in fields if field is not None], code)
        return _moved(moved, code) if moved else None
    return native


def _bpermute(instruction: Any, code: bytes) -> Instruction:
    address, data, target = (emu_patch.raw(instruction, code, name) for name in ("addr", "data0", "vdst"))
    offset = emu_patch.raw(instruction, code, "offset1") << 8 | emu_patch.raw(instruction, code, "offset0")

    def execute(scalars: Any, vectors: Any, *_: Any) -> None:
        scalar, active = _scalars(scalars)
        sources = [(place + offset) // 4 % 64 for place in _register(vectors, address)]
        values = list(_register(vectors, data))
        _write(_register(vectors, target), active, [values[i] if active >> i & 1 else 0 for i in sources])
        _set_wide(scalar, PROGRAM_COUNTER, _wide(scalar, PROGRAM_COUNTER) + 8)

    return execute


def _from_accumulators(instruction: Any, code: bytes) -> Instruction:
    """The same store from vector registers, into which the data are copied for as long as it takes."""
    name, encoding = emu_patch.emu._op_name(instruction), type(instruction)
    if not name.startswith("DS_WRITE"):
        raise NotImplementedError(f"{instruction}: data in accumulation registers, and no store")
    each = max(instruction.canonical_op_bits.get("data", 32) // 32, 1)
    fields = ("data0", "data1") if name.startswith("DS_WRITE2") else ("data0",)
    first = 0 if emu_patch.raw(instruction, code, "addr") >= each * len(fields) else 128
    word, copied = int.from_bytes(code[:8], "little"), {}
    for number, field in enumerate(fields):
        place = first + number * each
        source = emu_patch.raw(instruction, code, field)
        copied.update({place + i: source + i for i in range(each)})
        word += place - source << getattr(encoding, field).lo
    plain = _Plain((word & ~(1 << encoding.acc.lo)).to_bytes(8, "little"))

    def execute(*pointers: Any) -> None:
        vectors, accumulators = pointers[1], pointers[5]
        kept = {place: bytes(_register(vectors, place)) for place in copied}
        for place, source in copied.items():
            _copy(vectors, place, bytes(_register(accumulators, source)))
        plain(pointers, 8)
        for place, before in kept.items():
            _copy(vectors, place, before)

    return execute


def _with_dpp(instruction: Any, code: bytes) -> Instruction:
    """Reads the two-operand encoding, whose second word says which lanes of which register the first operand is."""
    word, control = int.from_bytes(code[:4], "little"), int.from_bytes(code[4:8], "little")
    if word >> 31 or control >> 20 & 0xF or 16 in instruction.canonical_op_bits.values():
        raise NotImplementedError(
            f"{instruction}: DPP of 16 bits, with a sign modifier, or of another encoding than VOP2"
        )
    pattern, zero = control >> 8 & 0x1FF, control >> 19 & 1
    banks, rows = control >> 24 & 0xF, control >> 28 & 0xF
    source, used = control & 0xFF, {control & 0xFF, word >> 9 & 0xFF, word >> 17 & 0xFF}
    spare = next(register for register in range(256) if register not in used)
    plain = _Plain(((word & ~0x1FF) | 256 + spare).to_bytes(4, "little"))

    def execute(*pointers: Any) -> None:
        scalar, active = _scalars(pointers[0])
        values, kept = list(_register(pointers[1], source)), list(_register(pointers[1], spare))
        moved, taking = [0] * 64, 0
        for lane in range(64):
            i = _source_lane(pattern, lane)
            readable = i is not None and active >> i & 1
            if readable:
                moved[lane] = values[i]
            if active >> lane & 1 and rows >> lane // 16 & 1 and banks >> lane % 16 // 4 & 1 and (readable or zero):
                taking |= 1 << lane
        _write(_register(pointers[1], spare), ~0, moved)
        _set_wide(scalar, EXEC, taking)
        plain(pointers, 8)
        _set_wide(scalar, EXEC, active)
        _write(_register(pointers[1], spare), ~0, kept)

    return execute


def _source_lane(pattern: int, lane: int) -> int | None:
    """The lane that `lane` reads, None where there is none."""
    row, place = lane & ~15, lane & 15
    if pattern < 0x100:  # quad_perm
        return lane & ~3 | pattern >> 2 * (lane & 3) & 3
    kind, count = pattern & ~15, pattern & 15
    if kind == 0x100:  # row_shl
        return row + place + count if place + count < 16 else None
    if kind == 0x110:  # row_shr
        return row + place - count if place >= count else None
    if kind == 0x120:  # row_ror
        return row + (place - count) % 16
    if pattern == 0x140:  # row_mirror
        return row + 15 - place
    if pattern == 0x141:  # row_half_mirror
        return lane ^ 7
    if pattern == 0x142:  # row_bcast:15, the last lane of a row to the next row
        return row - 1 if row else None
    if pattern == 0x143:  # row_bcast:31, to the two rows that follow
        return 31 if lane >= 32 else None
    raise NotImplementedError(f"DPP control {pattern:#x}")


def _low_registers(operands: list[tuple[int, int]], code: bytes) -> dict[tuple[int, int], tuple[int, int]]:
    """Maps the bits that name each operand from v128 on to its register and to a free one below v128."""
    word = int.from_bytes(code[:4], "little")
    registers = {}
    for low, high in operands:
        value = word >> low & ((1 << high - low + 1) - 1)
        if high - low == 7 or value >= 256:  # 9 bits name other things than vector registers too
            registers[low, high] = value & 0xFF
    free = [register for register in range(128) if register not in registers.values()]
    spare = dict(zip(sorted(set(registers.values())), free, strict=False))
    return {bits: (register, spare[register]) for bits, register in registers.items() if register >= 128}


def _moved(moved: dict[tuple[int, int], tuple[int, int]], code: bytes) -> Instruction:
    """The instruction on the free registers, with the operands moved there and back."""
    word = int.from_bytes(code[:4], "little")
    for (low, _), (register, free) in moved.items():
        word += free - register << low
    plain = _Plain(word.to_bytes(4, "little") + code[4:8])
    pairs = set(moved.values())

    def execute(*pointers: Any) -> None:
        kept = [bytes(_register(pointers[1], free)) for _, free in pairs]
        for register, free in pairs:
            _copy(pointers[1], free, bytes(_register(pointers[1], register)))
        plain(pointers, plain.size)
        for (register, free), before in zip(pairs, kept, strict=True):
            _copy(pointers[1], register, bytes(_register(pointers[1], free)))
            _copy(pointers[1], free, before)

    return execute


class _Plain:
    """An instruction elsewhere: the emulator's program of it reads its fields where the program counter points."""

    def __init__(self, code: bytes) -> None:
        self.code = ctypes.create_string_buffer(code, 16)
        self.size = emu_patch.decode_inst(self.code.raw, "cdna").size()
        self.program, self.runtime = emu_patch.emu._get_runner(self.code.raw[: self.size + 4], "cdna")

    def __call__(self, pointers: tuple[Any, ...], size: int) -> None:
        """Executes it in the place of one of `size` bytes."""
        scalar, _ = _scalars(pointers[0])
        place = _wide(scalar, PROGRAM_COUNTER)
        _set_wide(scalar, PROGRAM_COUNTER, ctypes.addressof(self.code))
        self.runtime.fxn(*[pointers[i] for i in self.program.arg.globals])
        _set_wide(scalar, PROGRAM_COUNTER, place + size)


def _extreme_of_three(instruction: Any, code: bytes, extreme: Callable[..., Any]) -> Instruction:
    sources = [emu_patch.raw(instruction, code, name) for name in ("src0", "src1", "src2")]
    target, magnitude, sign = (emu_patch.raw(instruction, code, name) for name in ("vdst", "abs", "neg"))

    def execute(scalars: Any, vectors: Any, *_: Any) -> None:
        scalar, active = _scalars(scalars)
        operands = []
        for i, source in enumerate(sources):
            # The emulator keeps constants in its scalar registers too, at their places in the encoding.
            bits = np.array(_register(vectors, source - 256) if source >= 256 else [scalar[source]] * 64, np.uint32)
            value = np.abs(bits.view(np.float32)) if magnitude >> i & 1 else bits.view(np.float32)
            operands.append(-value if sign >> i & 1 else value)
        result = extreme(extreme(operands[0], operands[1]), operands[2]).view(np.uint32)
        _write(_register(vectors, target), active, [int(bits) for bits in result])
        _set_wide(scalar, PROGRAM_COUNTER, _wide(scalar, PROGRAM_COUNTER) + 8)

    return execute


def _to_float16(instruction: Any, code: bytes, *, eight_exponents: bool) -> Instruction:
    """Two FP8 values of one half of a register to float16, with a scale of 1."""
    source, scale, target, select = (
        emu_patch.raw(instruction, code, name) for name in ("src0", "src1", "vdst", "opsel")
    )
    if scale != SCALAR_ONE or source < 256:
        raise NotImplementedError(f"{instruction}: a scale other than 1.0, or an operand that is no vector register")
    table = np.array([_fp8_value(byte, eight_exponents) for byte in range(256)], np.float16).view(np.uint16)

    def execute(scalars: Any, vectors: Any, *_: Any) -> None:
        scalar, active = _scalars(scalars)
        halves = np.array(_register(vectors, source - 256), np.uint32) >> (16 * (select & 1))
        pairs = table[halves & 0xFF].astype(np.uint32) | table[halves >> 8 & 0xFF].astype(np.uint32) << 16
        _write(_register(vectors, target), active, [int(pair) for pair in pairs])
        _set_wide(scalar, PROGRAM_COUNTER, _wide(scalar, PROGRAM_COUNTER) + 8)

    return execute


def _fp8_value(byte: int, eight_exponents: bool) -> float:
    """OCP e5m2, or e4m3fn."""
    if eight_exponents:
        return float(np.array(byte << 8, np.uint16).view(np.float16))
    exponent, fraction = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    size = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
    return -size if byte & 0x80 else size


def _register(vectors: Any, register: int) -> Any:
    return LANES.from_address(vectors.value + 256 * register)


def _copy(vectors: Any, register: int, contents: bytes) -> None:
    ctypes.memmove(vectors.value + 256 * register, contents, 256)


def _write(register: Any, active: int, values: list[int]) -> None:
    for lane in range(64):
        if active >> lane & 1:
            register[lane] = values[lane]


def _scalars(scalars: Any) -> tuple[Any, int]:
    """The scalar registers, and which lanes are active."""
    scalar = (ctypes.c_uint32 * 512).from_address(scalars.value)
    return scalar, _wide(scalar, EXEC)


def _wide(scalar: Any, register: int) -> int:
    return int(scalar[register] | scalar[register + 1] << 32)


def _set_wide(scalar: Any, register: int, value: int) -> None:
    scalar[register], scalar[register + 1] = value & 0xFFFFFFFF, value >> 32

"""wgmma as a function of CUDA C++: one instruction whose text lists every register, so that the width makes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wgmma:
    """`wgmma(d, a, b, onto)` of 64 x `width`: 32 deep of FP8, 16 of `bf16` and `f16`.

    `b` is a descriptor of shared memory, and so is `a`, or else it is the four registers of a fragment. `d` is added to
    where `onto` is not 0.
    """

    width: int
    a_type: str
    b_type: str
    a_in_registers: bool = False

    @property
    def source(self) -> str:
        """The function's text."""
        count = self.width // 2
        registers = ", ".join(f"%{i}" for i in range(count))
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        if self.a_in_registers:
            kind, words = "const unsigned (&a)[4]", 4
            left = "{" + ", ".join(f"%{count + i}" for i in range(words)) + "}"
            given = ", ".join(f'"r"(a[{i}])' for i in range(words))
        else:
            kind, words, left, given = "unsigned long long a", 1, f"%{count}", '"l"(a)'
        # WGMMA takes a transpose flag for a 16-bit b; it is 0 here.
        depth, turned = (16, ", 0") if self.b_type in ("bf16", "f16") else (32, "")
        name = f"wgmma.mma_async.sync.aligned.m64n{self.width}k{depth}.f32.{self.a_type}.{self.b_type}"
        return f"""
__device__ __forceinline__ void wgmma(float (&d)[{count}], {kind}, unsigned long long b, int onto) {{
    asm volatile("{{.reg .pred onto; setp.ne.b32 onto, %{count + words + 1}, 0;\\n"
                 "{name} {{{registers}}}, {left}, "
                 "%{count + words}, onto, 1, 1{turned};}}"
                 : {outputs} : {given}, "l"(b), "r"(onto));
}}
"""

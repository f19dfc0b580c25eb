"""FP8 checkpoints: safetensors files, the formats that they are in, and `load_blockwise`.

No module is imported here that lies in this package. A thread that imports one of them waits for the package, and one
that imports the package would wait for the module: Python ends such a circle with an error in one of the two.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8fn.checkpoint.load import load_blockwise
else:

    def __getattr__(name):
        """Imports `load_blockwise` when it is first used."""
        if name != "load_blockwise":
            raise AttributeError(f"module 'fp8fn.checkpoint' has no attribute {name!r}")
        from fp8fn.checkpoint.load import load_blockwise

        return load_blockwise


__all__ = ["load_blockwise"]

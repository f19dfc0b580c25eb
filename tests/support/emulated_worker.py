"""Executes AMD code objects in the CDNA emulator: requests come on stdin, and each launch is a process of its own.

Not a test, and imports nothing of fp8fn: `emulated.py` starts it. Every storage ends where its last page does,
between pages that nothing may touch, so a load or store outside of it ends the launch and not the one that waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import signal
import struct
import sys
import traceback
from typing import Any, BinaryIO

PAGE = mmap.PAGESIZE
ALIGNMENT = 16
SECONDS = 900


class Storage:
    """Bytes between two forbidden pages; what is left of the first page and of the last 16 bytes is `0xA7`."""

    def __init__(self, contents: bytes) -> None:
        self.size = len(contents)
        places = -(-self.size // ALIGNMENT) * ALIGNMENT
        pages = max(-(-places // PAGE), 1)
        self.memory = mmap.mmap(-1, (pages + 2) * PAGE)
        self.start = (pages + 1) * PAGE - places
        self.memory[PAGE : (pages + 1) * PAGE] = b"\xa7" * (pages * PAGE)
        self.memory[self.start : self.start + self.size] = contents
        self.pages = pages
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.address = base + self.start
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for page in (base, base + (pages + 1) * PAGE):
            if libc.mprotect(page, PAGE, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")

    def contents(self) -> bytes:
        """The present bytes of the storage; ValueError where a byte beside it was written."""
        before = self.memory[PAGE : self.start]
        after = self.memory[self.start + self.size : (self.pages + 1) * PAGE]
        if (before + after).strip(b"\xa7"):
            raise ValueError(f"a store outside of a storage of {self.size} bytes")
        return bytes(self.memory[self.start : self.start + self.size])


def load(request: dict[str, Any]) -> Any:
    """The code object, each of its instructions translated: here, where the translation serves all launches to come."""
    import emu_patch
    import run_hsaco

    code = run_hsaco.CodeObject(request["code"])
    place = code.kd(request["name"])["entry"]
    end = place + code.syms[request["name"]][1]
    while place < end:
        size = 4
        # Behind the last instruction there may be bytes that are none.
        with contextlib.suppress(Exception):
            size = emu_patch.decode_inst(ctypes.string_at(place, 16), "cdna").size()
            emu_patch.emu._decode_at(place, "cdna")
        place += size
    return code


def launch(code: Any, request: dict[str, Any]) -> dict[str, Any]:
    storages = [Storage(contents) for contents in request["storages"]]
    args = [storages[a[0]].address + a[1] if isinstance(a, tuple) else a for a in request["args"]]
    found = code.launch(
        request["name"], grid=request["grid"], block=(request["threads"],), args=args, shared=request["shared"]
    )
    return {"storages": [storage.contents() for storage in storages], "instructions": found["instructions"]}


def answer(channel: BinaryIO, message: dict[str, Any]) -> None:
    body = pickle.dumps(message)
    channel.write(struct.pack("<Q", len(body)) + body)
    channel.flush()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    while len(head := requests.read(8)) == 8:
        request = pickle.loads(requests.read(struct.unpack("<Q", head)[0]))
        code = load(request)
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            try:
                answer(answers, launch(code, request))
            except BaseException as error:
                last = traceback.format_exc()
                answer(answers, {"error": f"{type(error).__name__}: {error}", "traceback": last})
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            why = {"SIGSEGV": "an address outside of every argument", "SIGALRM": f"it took over {SECONDS} s"}
            answer(answers, {"error": f"the launch ended by {name}: {why.get(name, 'see stderr')}", "traceback": ""})


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the emulator prints is no answer
    sys.path.insert(0, os.environ["FP8FN_CDNA_EMULATOR"])
    from support import emulated_repairs

    emulated_repairs.install()
    from tinygrad import Device

    Device["CPU"]  # begun once, and not in each launch
    answer(answers, {"ready": True})
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()

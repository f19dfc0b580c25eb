"""Puts small faults into copies of this checkout, one at a time, and says which test notices each.

    python mutate.py [--list] [--only NAME ...] [--no-baseline] [-n JOBS] [--json PATH] [--timeout SECONDS]

The faults are in `mutations.json`: a text of a file, what replaces it, what a user would see, and the tests that ought
to fail. The tests first run on a copy without a fault, where all must pass. Run by hand: each fault takes as long as
its tests. The exit code is 1 unless every fault was killed.

- killed: a test failed.
- SURVIVED: all tests passed.
- BROKEN: the copy does not compile or its tests do not collect, which says nothing about the tests.
- TIMEOUT: the tests did not end, which a test should turn into a failure.
- SKIPPED: no test ran, for want of a GPU, a compiler or a package.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
MUTATIONS: Final = Path(__file__).with_name("mutations.json")
_PLUGIN: Final = Path(__file__).with_name("mutation_report.py")
_WITHOUT: Final = "(no fault)"
# Caches that a run could share with another, or with the user.
_CACHES: Final = (
    "FP8FN_CACHE_DIR",
    "FP8FN_TEST_CACHE",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "XDG_CACHE_HOME",
    "TMPDIR",
)


@dataclass(frozen=True)
class Mutation:
    """A fault: `old` becomes `new`, `count` times in `file`, and `tests` ought to notice."""

    name: str
    file: str
    old: str
    new: str
    harm: str
    """The fault's effect on a user."""
    tests: tuple[str, ...]
    """Arguments of pytest, in the order in which they run."""
    count: int = 1

    def applied(self, text: str) -> str:
        """The text with the fault; ValueError where it is not the one that the fault was written for."""
        found = text.count(self.old)
        if found != self.count or self.old == self.new:
            raise ValueError(
                f"mutation {self.name!r}: {self.file} has the old text {found} times, not {self.count}; adapt "
                f"mutations.json to the code as it is now:\n{self.old}"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """The outcome of a fault."""

    name: str
    file: str
    status: str
    by: str
    """The test that failed; without one, the last lines of what was said."""
    seconds: float


def read_mutations(path: Path = MUTATIONS) -> list[Mutation]:
    """All faults of a file; ValueError where two have one name."""
    found = [
        Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in json.loads(path.read_text(encoding="utf-8"))
    ]
    names = [mutation.name for mutation in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}: mutations of one name: {', '.join(sorted(twice))}")
    return found


def copy_checkout(root: Path, to: Path) -> None:
    """Copies what git tracks, what it does not ignore, and the entry point of the backend; links stay links."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        source, target = root / name, to / name
        if not source.is_symlink() and not source.exists():  # deleted, and not committed yet
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    for folder in root.glob("*.egg-info"):
        shutil.copytree(folder, to / folder.name)


def run_mutation(mutation: Mutation | None, tests: Sequence[str], root: Path, timeout: float) -> Result:
    """Runs the tests on a copy with the fault, up to the first that fails; without a fault all of them."""
    name, file = (mutation.name, mutation.file) if mutation else (_WITHOUT, "")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fp8fn-mutation-") as folder:
        work = Path(folder)
        copy = work / "copy"
        copy_checkout(root, copy)
        if mutation:
            path = copy / mutation.file
            text = mutation.applied(path.read_text(encoding="utf-8"))
            path.write_text(text, encoding="utf-8")
            if path.suffix == ".py":
                try:
                    compile(text, mutation.file, "exec")
                except SyntaxError as error:
                    return Result(name, file, "BROKEN", f"{error.msg}, line {error.lineno}", 0.0)
        said, ended = _pytest(copy, work, [*(["-x"] if mutation else []), *tests], timeout)
        lines = _report(work)
    status, by = _judged(lines, said, ended, copy, first=mutation is not None)
    return Result(name, file, status, by, round(time.monotonic() - began, 1))


def _pytest(copy: Path, work: Path, args: Sequence[str], timeout: float) -> tuple[str, int | None]:
    """pytest's output and its exit code; None where it did not end."""
    plugins = work / "plugins"
    plugins.mkdir()
    shutil.copy(_PLUGIN, plugins)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(copy), str(plugins)))}
    env["MUTATION_REPORT"] = str(work / "report.jsonl")
    for cache in _CACHES:
        env[cache] = str(work / cache.lower())
        Path(env[cache]).mkdir()
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", _PLUGIN.stem, "-p", "no:cacheprovider", "-p", "no:xdist", *args,
    ]  # fmt: skip
    with (work / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        ended: int | None
        try:
            ended = process.wait(timeout)
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its session is this call's own
                process.wait()
    return (work / "output").read_text(encoding="utf-8", errors="replace"), ended


def _report(work: Path) -> list[dict[str, Any]]:
    path = work / "report.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _judged(
    lines: Sequence[dict[str, Any]], said: str, ended: int | None, copy: Path, *, first: bool
) -> tuple[str, str]:
    """The status of a run, and the tests that decided it: the `first`, or all."""
    tail = " | ".join(said.strip().splitlines()[-3:])
    package = next((Path(line["package"]) for line in lines if "package" in line), None)
    if package is not None and copy not in package.parents:
        raise RuntimeError(f"the tests imported {package}, which is not the copy in {copy}")

    def tests(outcome: str) -> str:
        found = [line["test"] for line in lines if line.get("outcome") == outcome]
        return ", ".join(dict.fromkeys(found[:1] if first else found))

    started = [line["started"] for line in lines if "started" in line]
    if ended is None:
        return "TIMEOUT", started[-1] if started else tail
    if failed := tests("failed"):
        return "killed", failed
    if broken := tests("broken") or tests("uncollected"):
        return "BROKEN", broken
    if ended < 0:
        return "killed", f"{started[-1] if started else tail} (signal {-ended})"
    if ended != 0:  # nothing was collected, a node id is not there, an argument is wrong
        return "BROKEN", tail
    if not tests("passed"):
        return "SKIPPED", tests("skipped") or tail
    return "SURVIVED", ""


def table(results: Sequence[Result]) -> str:
    """A line for each fault, in columns."""
    head = ("mutation", "file", "status", "killed by", "seconds")
    rows = [head, *((r.name, r.file, r.status, r.by, f"{r.seconds:.1f}") for r in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    args = _parser().parse_args(argv)
    mutations = read_mutations(args.mutations)
    if unknown := set(args.only) - {mutation.name for mutation in mutations}:
        raise SystemExit(f"no mutation {', '.join(sorted(unknown))} in {args.mutations}; --list names them")
    chosen = [mutation for mutation in mutations if not args.only or mutation.name in args.only]
    for mutation in chosen:
        mutation.applied((root / mutation.file).read_text(encoding="utf-8"))
    if args.list:
        for mutation in chosen:
            print(f"{mutation.name}: {mutation.file}: {mutation.harm}")
        return 0
    if untested := [mutation.name for mutation in chosen if not mutation.tests]:
        print(f"without a test: {', '.join(untested)}", file=sys.stderr)
        chosen = [mutation for mutation in chosen if mutation.tests]
    tests = list(dict.fromkeys(test for mutation in chosen for test in mutation.tests))
    if not args.no_baseline:
        clean = run_mutation(None, tests, root, args.timeout * max(len(chosen), 1))
        print(
            f"{_WITHOUT}: {clean.status if clean.status != 'SURVIVED' else 'all passed'}, {clean.seconds:.0f} s",
            flush=True,
        )
        if clean.status != "SURVIVED":
            print(f"the tests must pass before a fault is put in: {clean.by}", file=sys.stderr)
            return 1

    def run(mutation: Mutation) -> Result:
        result = run_mutation(mutation, mutation.tests, root, args.timeout)
        print(f"{result.name}: {result.status} {result.by} ({result.seconds:.0f} s)", flush=True)
        return result

    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(run, chosen))
    print(f"\n{table(results)}")
    killed = sum(result.status == "killed" for result in results)
    print(f"\n{killed} of {len(results)} killed")
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    return 0 if killed == len(results) and not untested else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the mutations and what each does to a user")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these mutations alone")
    parser.add_argument("--no-baseline", action="store_true", help="leave out the run without a fault")
    parser.add_argument("-n", "--jobs", type=int, default=1, help="how many run at once, by default %(default)s")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the table there too")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600,
        metavar="SECONDS",
        help="for the tests of a mutation, by default %(default)s",
    )
    parser.add_argument("--mutations", type=Path, default=MUTATIONS, metavar="PATH", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Converts a checkpoint: reads its plan, writes what is not there yet, and moves it to its place."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from fp8fn.checkpoint.conversion.existing import check_room, differences, left_over
from fp8fn.checkpoint.conversion.options import Options
from fp8fn.checkpoint.conversion.output import UNFINISHED, complete_file, locked
from fp8fn.checkpoint.conversion.plan import Plan, files_beside_tensors, plan_files
from fp8fn.checkpoint.conversion.write import Verified, write_file
from fp8fn.checkpoint.files import find
from fp8fn.checkpoint.load import read_contents
from fp8fn.site import unmatched

_LOG: Final = logging.getLogger("fp8fn")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The result of a conversion: the plans of all files, and the weights of those that it wrote.

    `kept` names the files that were complete before, `again` those that were not, each with the reason.
    """

    output: Path
    plans: Sequence[Plan]
    verified: Sequence[Verified]
    kept: Sequence[str]
    again: Mapping[str, str]


def convert(
    source: Path, output: Path, options: Options, *, overwrite: bool = False, device: torch.device | str = "cpu"
) -> Conversion:
    """Write the FP8 checkpoint, with a progress bar.

    Raises `ValueError` or `OSError` with the file and the tensor. No file has its final name unless it is complete.
    """
    from tqdm import tqdm

    checkpoint = find(source)
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"{output} is a file; name a folder for the output")
    if output.exists() and output.samefile(checkpoint.folder):
        raise ValueError(f"{output} is the folder of the input; name another for the output")
    plans = plan_files(read_contents(source), options)
    names = [name for plan in plans for name in (*plan.converted, *plan.others)]
    for given, patterns in (("--include", options.include), ("--exclude", options.exclude)):
        for message in unmatched(given, patterns, names, "tensor"):
            _LOG.warning("convert: %s", message)
    if not any(plan.converted for plan in plans):
        raise ValueError(f"{source}: no tensor is a linear layer's weight by these options; see --include")
    texts = files_beside_tensors(checkpoint, source.is_file() and checkpoint.index is None, plans, options)
    # Files are moved to their places once all are written, so that an older conversion stays whole until then.
    unfinished = output / UNFINISHED
    with locked(output):
        found = differences(plans, (output, unfinished))
        if not overwrite:
            check_room(output, found, texts)
        unfinished.mkdir(exist_ok=True)
        whole = {path for path, difference in found.items() if difference is None}
        todo = [plan for plan in plans if whole.isdisjoint((output / plan.name, unfinished / plan.name))]
        verified: list[Verified] = []
        size = sum(math.prod(e.shape) * e.dtype.itemsize for plan in todo for e in plan.sources)
        with tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, disable=not todo) as bar:
            for plan in todo:
                bar.set_description(plan.name)
                with complete_file(unfinished / plan.name) as file:
                    verified += write_file(file, plan, torch.device(device), bar.update)
        made = [unfinished / plan.name for plan in plans if plan in todo or unfinished / plan.name in whole]
        if made and checkpoint.index is not None:
            (output / checkpoint.index.name).unlink(missing_ok=True)  # an index never names files of two conversions
        for path in left_over(output, [plan.name for plan in plans], texts) if overwrite else ():
            path.unlink()
        for path in made:
            path.replace(output / path.name)
        for name, text in texts.items():
            if not (output / name).exists() or (output / name).read_bytes() != text:
                with complete_file(output / name) as file:
                    file.write(text)
        shutil.rmtree(unfinished)
    # If two files have the same name, the one in `.unfinished` is newer.
    reasons = {path.name: difference.reason for path, difference in found.items() if difference is not None}
    kept = [plan.name for plan in plans if plan not in todo]
    again = {plan.name: reasons[plan.name] for plan in todo if plan.name in reasons}
    return Conversion(output=output, plans=plans, verified=verified, kept=kept, again=again)

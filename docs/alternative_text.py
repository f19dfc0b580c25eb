"""A hook of mkdocs: pictures of notebooks get the `alt` of their cell, which nbconvert's template drops."""

import html as escaping
import json
from pathlib import Path
from typing import Any

NONE = 'alt="No description has been provided for this image"'


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    path = Path(page.file.abs_src_path)
    if path.suffix != ".ipynb":
        return html
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                html = html.replace(NONE, f'alt="{escaping.escape(cell["metadata"]["alt"])}"', 1)
    return html

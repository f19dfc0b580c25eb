"""What `check_site.py` says of links that lead nowhere, and of pictures without a description."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.check_site import faults

pytestmark = pytest.mark.every_case


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('<a href="../">home</a> <a href="../#top">top</a> <a href="#here" id="here">here</a>', []),
        ('<a href="https://pytorch.org/x">PyTorch</a> <img src="data:image/png;base64,AA" alt="bars">', []),
        ('<a href="other.ipynb">other</a>', ["page/index.html: other.ipynb leads to no file"]),
        ('<a href="/nothing/">none</a>', ["page/index.html: /nothing/ leads to no file"]),
        ('<a href="../#bottom">bottom</a>', ["page/index.html: ../#bottom leads to no anchor of index.html"]),
        ('<a href="#there">there</a>', ["page/index.html: #there leads to no anchor of index.html"]),
        ('<script src="../a.js"></script>', ["page/index.html: ../a.js leads to no file"]),
        ('<a href="http://pytorch.org">PyTorch</a>', ["page/index.html: http://pytorch.org is no https address"]),
        (
            '<img src="../a.svg">',
            ["page/index.html: ../a.svg has no alt", "page/index.html: ../a.svg leads to no file"],
        ),
    ],
)
def test_faults(body: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "index.html").write_text('<h1 id="top">Top</h1>', encoding="utf-8")
    (tmp_path / "page" / "index.html").write_text(body, encoding="utf-8")
    assert faults(tmp_path) == found


def test_an_empty_folder(tmp_path: Path) -> None:
    assert faults(tmp_path) == [f"{tmp_path} has no pages"]

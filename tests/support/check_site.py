"""Checks the built site: `check_site.py FOLDER`. Links lead to files and anchors, and pictures have a description.

Addresses outside of the site are not fetched: https and a host name are asked of them.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors, links and pictures of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.undescribed: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.links += [values[name] for name in ("href", "src") if name in values]
        if tag == "img" and not values.get("alt"):
            self.undescribed.append(values.get("src", "")[:40])


def faults(folder: Path) -> list[str]:
    """Faults of the site in `folder`."""
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
    found = [] if pages else [f"{folder} has no pages"]
    for path, page in pages.items():
        name = path.relative_to(folder.resolve()).as_posix()
        found += [f"{name}: {src} has no alt" for src in page.undescribed]
        for link in page.links:
            if fault := _fault(link, path, folder.resolve(), pages):
                found.append(f"{name}: {link[:100]} {fault}")
    return found


def _fault(link: str, path: Path, folder: Path, pages: dict[Path, Page]) -> str | None:
    parts = urlsplit(link)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        return None if parts.scheme == "https" and "." in parts.netloc else "is no https address"
    relative = unquote(parts.path)
    target = folder / relative.lstrip("/") if relative.startswith("/") else (path.parent / relative).resolve()
    target = path if not relative else target / "index.html" if target.is_dir() else target
    if not target.exists():
        return "leads to no file"
    anchor = unquote(parts.fragment)
    return f"leads to no anchor of {target.name}" if anchor and anchor not in _anchors(target, pages) else None


def _anchors(target: Path, pages: dict[Path, Page]) -> set[str]:
    return pages[target].anchors if target in pages else set()


if __name__ == "__main__":
    sys.exit("\n".join(faults(Path(sys.argv[1]))) or None)

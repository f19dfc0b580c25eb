"""A hook of mkdocs: links that mkdocs does not follow, those of notebooks and of CHANGELOG.md above `docs/`."""

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r'href="([^":#?]+\.(?:ipynb|md))(#[^"]*)?"')


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page changelog.md is CHANGELOG.md, whose links begin at the root of the repository."""
    if page.file.src_uri != "changelog.md":
        return markdown
    path = Path(config.config_file_path).with_name("CHANGELOG.md")
    return path.read_text(encoding="utf-8").replace("](docs/", "](")


def on_page_content(html: str, *, page: Any, files: Any, **_: Any) -> str:
    """A notebook's links to files lead to their pages, as mkdocs does for Markdown."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    folder = posixpath.dirname(page.file.src_uri)

    def to_page(found: re.Match[str]) -> str:
        target = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, found[1])))
        return found[0] if target is None else f'href="{target.url_relative_to(page.file)}{found[2] or ""}"'

    return LINK.sub(to_page, html)

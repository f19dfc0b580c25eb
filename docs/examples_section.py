"""An extension of griffe, for mkdocs.yml: the section `Example:` of a docstring is shown as code, as `Examples:` is."""

from typing import Any

import griffe


class ExamplesSection(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")

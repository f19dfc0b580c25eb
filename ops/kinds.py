"""What an error message calls the type of a wrong argument: `"an int"`, `"a Linear"`."""

from __future__ import annotations

from typing import Final

# Letters whose names begin with a vowel: an LSTM, an FP8Weight, an MLP.
_SPELLED: Final = frozenset("AEFHILMNORSX")
# Words whose first vowel is spoken as a consonant: a UserDict.
_CONSONANTS: Final = ("uni", "use", "uint", "eu")


def kind_of(value: object) -> str:
    """The name of a value's type with its indefinite article."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """A name with `a` or `an`, as it is read aloud; two capitals at its beginning are read letter by letter."""
    lower = name.lower()
    if name[:2].isupper() or (name[:1].isupper() and name[1:2].isdigit()):
        vowel = name[0] in _SPELLED
    else:
        vowel = name == "ndarray" or (lower[:1] in tuple("aeiou") and not lower.startswith(_CONSONANTS))
    return f"{'an' if vowel else 'a'} {name}"

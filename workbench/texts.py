"""Values as people read them: a token from its raw bytes, a share in percent, nested settings by name. No HTML, nothing heavy."""

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any

LONGEST_TOKEN = 48  # characters of a token's visible form


def show_token(token: bytes) -> str:
    """A token's bytes in visible form: `\\n`, `\\xff` (not UTF-8), `\\u202e` (an invisible character), ␣ (a space at an edge)."""
    text = token.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
    shown = "".join(_visible(character) for character in text)
    body = shown.strip(" ")
    left = len(shown) - len(shown.lstrip(" "))
    shown = "␣" * left + body + "␣" * (len(shown) - left - len(body))
    return shown if len(shown) <= LONGEST_TOKEN else f"{shown[: LONGEST_TOKEN - 1]}… ({len(token)} bytes)"


def _visible(character: str) -> str:
    """The character itself, or its escape when it is a control, format, unassigned or non-plain space character."""
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    if character in named:
        return named[character]
    if unicodedata.category(character)[0] not in "CZ" or character == " ":
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class TokenTexts:
    """For what knows the raw bytes of each token id in `tokens`, or None."""

    tokens: Sequence[bytes] | None

    def bytes_of(self, i: int) -> bytes:
        """The raw bytes of a token, or its id in words where its text is not known."""
        known = self.tokens[i] if self.tokens is not None and i < len(self.tokens) else b""
        return known or b"id %d" % i

    def text(self, i: int) -> str:
        """The visible form of a token."""
        return show_token(self.bytes_of(i))


def percent(share: float) -> str:
    """A share as percent, with more digits where they matter: 0.03 %, 4.2 %, 97 %, 99.95 %."""
    edge = min(abs(share), abs(1 - share))
    digits = 0 if edge in (0, 1) else 2 if edge < 0.01 else 1
    return f"{100 * share:.{digits}f} %"


def signed(value: float, digits: int = 3) -> str:
    """A change with its sign, none where it rounds to nothing."""
    shown = f"{value:+.{digits}f}"
    return shown if shown.strip("+-0.") else shown[1:]


def flat(tree: Mapping[Any, Any], whole: Collection[str] = (), prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Nested mappings under names such as naive.loss_0. What a name in `whole` holds stays one value, as do lists and what lies deeper
    than twenty names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping) and depth < 20 and name not in whole
        found |= flat(value, whole, f"{prefix}{name}.", depth + 1) if nested else {f"{prefix}{name}": value}
    return found

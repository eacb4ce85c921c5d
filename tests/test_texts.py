"""Tokens and shares as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.texts import flat, percent, show_token, signed


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (b"the", "the"),
        (b" the", "␣the"),
        (b"a b", "a b"),
        (b"   ", "␣␣␣"),
        (b"\n", "\\n"),
        (b"\\n", "\\\\n"),
        (b"\t\r\x1b", "\\t\\r\\x1b"),
        (b"\xff\xfe", "\\xff\\xfe"),
        (b"\xe4\xb8", "\\xe4\\xb8"),
        ("中".encode(), "中"),
        ("\u202eabc".encode(), "\\u202eabc"),
        ("\u200f".encode(), "\\u200f"),
        ("\u00a0".encode(), "\\u00a0"),
        ("\U000e0001".encode(), "\\U000e0001"),
        (b"<b>&amp;", "<b>&amp;"),
    ],
)
def test_invisible_bytes_become_visible(token: bytes, shown: str) -> None:
    """What cannot be seen is written as an escape, everything else stays as it is, and a backslash is not mistaken for an escape."""
    assert show_token(token) == shown


@given(st.binary(max_size=12), st.binary(max_size=12))
def test_two_tokens_never_look_alike(a: bytes, b: bytes) -> None:
    """Different bytes have different visible forms (a literal ␣ aside), and no form holds a control or format character."""
    if "␣".encode() not in a + b and a != b:
        assert show_token(a) != show_token(b)
    assert show_token(a).isprintable()


def test_long_tokens_are_cut_and_say_so() -> None:
    """A run of 128 spaces does not blow up a table: it is cut, with its length."""
    assert show_token(b" " * 128).endswith("… (128 bytes)")
    assert len(show_token(b" " * 128)) < 64


@pytest.mark.parametrize(
    ("share", "shown"), [(0, "0 %"), (1, "100 %"), (0.0079, "0.79 %"), (0.805, "80.5 %"), (0.9955, "99.55 %"), (0.042, "4.2 %")]
)
def test_shares_get_the_digits_that_matter(share: float, shown: str) -> None:
    """One decimal in the middle, two near the ends, none at the ends."""
    assert percent(share) == shown


def test_nested_settings_by_name() -> None:
    """Names are joined by dots, lists and named mappings stay whole, and a tree of any depth ends."""
    tree = {"a": {"b": 1, "c": {}}, "rope": {"type": "yarn"}, "d": [{"e": 1}]}
    assert flat(tree, whole=("rope",)) == {"a.b": 1, "rope": {"type": "yarn"}, "d": [{"e": 1}]}
    deep: dict = {}
    for _ in range(5000):
        deep = {"x": deep}
    (name,) = flat(deep)
    assert name == ".".join("x" * 21)


@pytest.mark.parametrize(("value", "shown"), [(0.0004, "0.000"), (-0.0004, "0.000"), (0.0, "0.000"), (-0.016, "-0.016"), (12.5, "+12.500")])
def test_a_change_of_nothing_has_no_sign(value: float, shown: str) -> None:
    """What rounds to nothing is neither a gain nor a cost."""
    assert signed(value) == shown

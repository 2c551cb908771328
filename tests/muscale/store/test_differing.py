"""The first difference of two trees is named by its place, and how near is the same is the caller's to say."""

from __future__ import annotations

from operator import eq
from typing import Any

from muscale.store.differing import SAME_LOSS, first_difference, same

TREE: dict[str, Any] = {"a": {"b": [1.0, 2.0]}, "c": 1}


def test_differences_are_named_by_their_place() -> None:
    assert first_difference(TREE, TREE, eq) is None
    assert first_difference(TREE, {"a": {"b": [1.0, 2.0000001]}, "c": 1}, eq) == ("a.b.1", 2.0, 2.0000001)
    assert first_difference(TREE, {"a": {"b": [1.0]}, "c": 1}, eq) == ("a.b.1", 2.0, None)
    assert first_difference(TREE, TREE | {"d": True}, eq) == ("d", None, True)


def test_numbers_of_two_machines_are_the_same_within_their_rounding() -> None:
    assert first_difference(TREE, {"a": {"b": [1.0, 2.0 * (1 + SAME_LOSS / 2)]}, "c": 1}, same) is None
    assert first_difference(TREE, {"a": {"b": [1.0, 2.0 * (1 + SAME_LOSS * 2)]}, "c": 1}, same) is not None
    assert first_difference({"a": float("nan")}, {"a": float("nan")}, same) is None
    assert same("one", "one")
    assert not same("one", 1)

"""The encoding of keys.py: vectors made by hand, no two inputs alike."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_service.keys import Geometry, chain, child_key, root_key

ROOT: dict[str, Any] = {
    "tenant": b"acme",
    "model_digest": "ab" * 32,
    "geometry": Geometry(48, 4, 128),
    "rope": "default theta=1000000.0 []",
    "kv_format": "float16",
    "params": "",
    "page_size": 128,
}


def item(tag: int, value: bytes) -> bytes:
    return bytes([tag]) + len(value).to_bytes(8, "little") + value


def numbers(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def test_the_layout_is_the_documented_one() -> None:
    spelled = (
        item(0, b"forefetch.kv.root.1")
        + item(1, b"acme")
        + item(2, b"ab" * 32)
        + item(3, numbers(48, 4, 128))
        + item(4, b"default theta=1000000.0 []")
        + item(5, b"float16")
        + item(6, b"")
        + item(7, numbers(128))
    )
    root = root_key(**ROOT)
    assert root == hashlib.sha256(spelled).digest()
    assert (
        child_key(root, [5, 2**32 - 1])
        == hashlib.sha256(item(0, b"forefetch.kv.block.1") + item(1, root) + item(2, numbers(5, 2**32 - 1))).digest()
    )


def test_vectors() -> None:
    """Written down once: keys of blocks on disk or in another process must not change by accident."""
    root = root_key(**ROOT)
    assert root.hex() == "2221250ef59d650dde26b1fbc7471b98ae1485da7f51f734862a0d04b5e91bc8"
    assert [key.digest.hex()[:16] for key in chain(root, [[1, 2], [3, 4]])] == ["b33b339c6125fb2d", "c4f5071b0d898ed0"]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("tenant", b"acme2"),
        ("tenant", b""),
        ("model_digest", "ac" * 32),
        ("geometry", Geometry(4, 48, 128)),
        ("geometry", Geometry(48, 128, 4)),
        ("rope", "yarn theta=1000000.0 []"),
        ("kv_format", "bfloat16"),
        ("params", "x"),
        ("page_size", 64),
    ],
)
def test_every_parameter_of_the_root_counts(name: str, other: Any) -> None:
    assert root_key(**{**ROOT, name: other}) != root_key(**ROOT)


texts = st.text("ab\0é€", max_size=3)  # few, so that equal ones come and bytes could move between fields
roots = st.tuples(
    st.binary(max_size=3),
    texts,
    st.builds(Geometry, *[st.integers(0, 300)] * 3),
    texts,
    texts,
    texts,
    st.integers(0, 2**32 - 1),
)


@given(roots, roots)
def test_different_roots_have_different_keys(a: Any, b: Any) -> None:
    assert (root_key(*a) == root_key(*b)) == (a == b)


tokens = st.lists(st.integers(0, 2**32 - 1), max_size=4)


@given(st.lists(tokens, max_size=4), st.lists(tokens, max_size=4))
def test_different_chains_have_different_ends(a: list[list[int]], b: list[list[int]]) -> None:
    root = root_key(**ROOT)
    ends = [[root, *(key.digest for key in chain(root, blocks))][-1] for blocks in (a, b)]
    assert (ends[0] == ends[1]) == (a == b)


def test_text_cannot_move_between_fields() -> None:
    one = root_key(**{**ROOT, "rope": "ab", "kv_format": "c"})
    assert one != root_key(**{**ROOT, "rope": "a", "kv_format": "bc"})


def test_a_chain_links_to_the_block_before() -> None:
    root = root_key(**ROOT)
    first, second = chain(root, [[1], [2]])
    assert (first.parent, second.parent) == (root, first.digest)
    assert (first.position, second.position) == (0, 1)
    assert first.digest == child_key(root, [1])
    assert second.digest == child_key(first.digest, [2])


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["1"]])
def test_numbers_out_of_range_are_refused(bad: list[Any]) -> None:
    with pytest.raises(ValueError, match="numbers must be within"):
        child_key(bytes(32), bad)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_parent_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="a parent is 32 bytes"):
        child_key(bytes(size), [1])

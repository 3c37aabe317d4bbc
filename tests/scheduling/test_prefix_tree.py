"""The tree of blocks, against a plain table of what is kept."""

from __future__ import annotations

import random
from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.scheduling.prefix_tree import PrefixTree
from mlxcel_nb.scheduling.step_plan import BLOCK


def tokens(*blocks: int) -> list[int]:
    """A block of each of these tokens."""
    return [each for block in blocks for each in [block] * BLOCK]


def put(tree: PrefixTree, text: list[int], first: int = 0) -> list[int]:
    """Keep all whole blocks of `text`; the numbers of new ones."""
    path = tree.match(text)
    new = []
    for begin in range(len(path) * BLOCK, len(text) - BLOCK + 1, BLOCK):
        path.append(tree.add(path, tuple(text[begin : begin + BLOCK]), first + begin // BLOCK))
        new.append(path[-1].block)
    return new


def found(tree: PrefixTree, text: list[int]) -> list[int]:
    return [node.block for node in tree.match(text)]


def test_the_longest_known_beginning_is_found_in_whole_blocks() -> None:
    tree = PrefixTree()
    assert put(tree, tokens(1, 2, 3) + [4] * (BLOCK - 1)) == [0, 1, 2]
    assert found(tree, tokens(1, 2, 9)) == [0, 1]
    assert found(tree, [1] * (BLOCK - 1)) == []
    assert found(tree, tokens(2)) == []


def test_those_that_begin_alike_share_blocks() -> None:
    tree = PrefixTree()
    put(tree, tokens(1, 2))
    assert put(tree, tokens(1, 3), first=10) == [11]
    assert len(tree) == 3


def test_the_leaf_used_least_recently_goes_first_and_then_what_stood_before_it() -> None:
    tree = PrefixTree()
    put(tree, tokens(1, 2, 3))
    put(tree, tokens(4, 5), first=10)
    found(tree, tokens(1, 2))
    assert [tree.evict() for _ in range(6)] == [2, 11, 10, 1, 0, None]
    assert len(tree) == 0


def test_what_is_held_stays() -> None:
    tree = PrefixTree()
    put(tree, tokens(1, 2, 3))
    with tree.holding(tree.match(tokens(1, 2))), tree.holding(tree.match(tokens(1))):
        assert tree.held == 2
        assert [tree.evict(), tree.evict()] == [2, None]
    assert tree.held == 0
    assert [tree.evict(), tree.evict(), tree.evict()] == [1, 0, None]


texts = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.sampled_from(["put", "find", "evict"]), texts), max_size=40), st.randoms())
def test_it_holds_what_a_plain_table_holds(actions: list[tuple[str, list[int]]], rng: random.Random) -> None:
    tree, table, used, number = PrefixTree(), {}, {}, 0

    def use(path: list[int]) -> int:
        """How many blocks of `path` are kept; they are used now."""
        known = 0
        while known < len(path) and tuple(path[: known + 1]) in table:
            known += 1
            used[tuple(path[:known])] = len(used_at)
        return known

    used_at: list[int] = []
    for what, path in actions:
        used_at.append(0)
        if what == "evict":
            with ExitStack() as stack:
                held: set[tuple[int, ...]] = set()
                if rng.random() < 0.3:
                    known = use(path)
                    stack.enter_context(tree.holding(tree.match(tokens(*path))))
                    held = {tuple(path[:n]) for n in range(1, known + 1)}
                assert tree.held == len(held)
                leaves = [p for p in table if p not in held and not any(q[:-1] == p for q in table)]
                gone = min(leaves, key=lambda p: (used[p], table[p]), default=None)
                assert tree.evict() == (table.pop(gone) if gone is not None else None)
            continue
        known = use(path)
        assert found(tree, tokens(*path)) == [table[tuple(path[: n + 1])] for n in range(known)]
        if what == "put":
            put(tree, tokens(*path), first=number)
            for n in range(known, len(path)):
                table[tuple(path[: n + 1])] = number + n
                used[tuple(path[: n + 1])] = len(used_at)
            number += len(path)
    assert len(tree) == len(table)


def test_finding_again_and_again_takes_no_memory() -> None:
    tree = PrefixTree()
    put(tree, tokens(1, 2, 3))
    for _ in range(1000):
        found(tree, tokens(1, 2, 3))
    assert len(tree._leaves) < 100
    assert tree.evict() == 2

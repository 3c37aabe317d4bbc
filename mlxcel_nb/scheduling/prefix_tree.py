"""Blocks of tokens whose keys and values are kept, as a tree: sequences that begin alike share their first blocks.
Pure.

A radix tree over blocks (after SGLang's RadixAttention, Zheng et al. 2023): each node is one block, its children are
what came after it. A block is of use only together with all blocks before it, so the leaf used least recently goes
first. A node that is held stays. A path is held from its first block on, so as long as a node is not held, neither is
a leaf below it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mlxcel_nb.scheduling.step_plan import BLOCK

Key = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """One block.

    Args:
        key: its tokens.
        block: its number; -1 for the root, which is none.
        holders: how many need it to stay.
        used: when it was used last, counted in uses of the tree.
    """

    key: Key
    block: int
    parent: Node | None
    children: dict[Key, Node] = field(default_factory=dict)
    holders: int = 0
    used: int = 0


class PrefixTree:
    """The blocks that the ranks of one home keep."""

    def __init__(self) -> None:
        self._root = Node((), -1, None)
        self._uses = 0
        self._leaves: list[tuple[int, int, Node]] = []  # (used, block, node), a heap; entries may be out of date
        self._count = 0
        self._held = 0

    def __len__(self) -> int:
        """Blocks."""
        return self._count

    @property
    def held(self) -> int:
        """Blocks that have to stay."""
        return self._held

    def match(self, tokens: list[int]) -> list[Node]:
        """The nodes of the longest beginning of `tokens`, in whole blocks, that is kept. Each counts as used."""
        self._uses += 1
        found, node = [], self._root
        for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
            child = node.children.get(tuple(tokens[begin : begin + BLOCK]))
            if child is None:
                break
            child.used = self._uses
            found.append(node := child)
        if found and not found[-1].children:
            self._note_leaf(found[-1])
        return found

    def add(self, path: list[Node], key: Key, block: int) -> Node:
        """Block number `block` with the tokens `key`, after those of `path`."""
        parent = path[-1] if path else self._root
        assert key not in parent.children and len(key) == BLOCK
        node = Node(key, block, parent, used=self._uses)
        parent.children[key] = node
        self._count += 1
        self._note_leaf(node)
        return node

    def evict(self) -> int | None:
        """Forget the leaf that was used least recently, of those that are not held; its block's number."""
        spared = []
        gone: Node | None = None
        while self._leaves and gone is None:
            entry = heapq.heappop(self._leaves)
            used, _, node = entry
            if not self._is_leaf(node, used):
                continue  # out of date
            if node.holders:
                spared.append(entry)
            else:
                gone = node
        for entry in spared:
            heapq.heappush(self._leaves, entry)
        if gone is None:
            return None
        self._remove(gone)
        return gone.block

    @contextmanager
    def holding(self, nodes: Iterable[Node]) -> Iterator[None]:
        """While inside, `nodes` stay: the blocks of a path from its first one on."""
        held = list(nodes)
        for node in held:
            self._held += not node.holders
            node.holders += 1
        try:
            yield
        finally:
            for node in held:
                node.holders -= 1
                self._held -= not node.holders

    def _note_leaf(self, node: Node) -> None:
        heapq.heappush(self._leaves, (node.used, node.block, node))
        if len(self._leaves) > 2 * self._count + 64:  # mostly out of date
            current = {block: (used, block, node) for used, block, node in self._leaves if self._is_leaf(node, used)}
            self._leaves = sorted(current.values(), key=lambda entry: entry[:2])

    @staticmethod
    def _is_leaf(node: Node, used: int) -> bool:
        return node.parent is not None and not node.children and node.used == used

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        if node.parent.parent is not None and not node.parent.children:
            self._note_leaf(node.parent)
        node.parent = None
        self._count -= 1

"""The prefix tree: which blocks hold the keys and values of which tokens.

An edge is the B tokens of one full block, so a node is a block and is never split. Children are looked up by
the tokens themselves, not by a hash: two prompts never share a block by accident. Each salt (a tenant) has
its own root.

    match    follows full blocks from the root, and marks every node on the path as used
    publish  inserts blocks whose keys and values were computed; the first of equal blocks stays
    evict    removes the least recently used leaf that only the tree holds; then its parent may be a leaf

The tree holds one reference on each of its blocks. A sequence that holds a block also holds its ancestors,
unless it released them early (windows); a parent is never evicted before its children in any case.

Source: RadixAttention (Zheng et al. 2024, arXiv 2312.07104) as in SGLang's and mini-sglang's
    ``radix_cache.py``.
Differs: whole blocks as edges; the reference counts of the blocks are the locks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from attar.runtime.kv.blocks import BlockAllocator
from attar.runtime.step import FREED

Edge = tuple[int, ...]
ROOT = -2  # the block of a root: none


@dataclass(eq=False)
class PrefixNode:
    """A published block with its tokens, and when it was last used."""

    block: int
    edge: Edge
    parent: PrefixNode | None
    salt: str = ""
    children: dict[Edge, PrefixNode] = field(default_factory=dict)
    used: int = 0


class PrefixTree:
    """Published blocks of all salts.

    Args:
        blocks: the reference counts; the tree is a holder.
        block_size: B.
        removed: called with each block that leaves the tree.
    """

    def __init__(
        self, blocks: BlockAllocator, block_size: int, removed: Callable[[int], None] = lambda block: None
    ) -> None:
        self.block_size, self._removed = block_size, removed
        self._blocks = blocks
        self._roots: dict[str, PrefixNode] = {}
        self._nodes: dict[int, PrefixNode] = {}
        self._idle: list[
            tuple[int, int]
        ] = []  # heap of (used, block); outdated pairs are skipped when popped
        self._clock = 0

    def __len__(self) -> int:
        """Blocks in the tree."""
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def blocks(self) -> list[int]:
        """The blocks in the tree; a copy."""
        return list(self._nodes)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Blocks of the longest published prefix of ``tokens``, in order; they count as used now."""
        path = self._path(tokens, salt)
        self._mark_used(path)
        return [node.block for node in path]

    def peek(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Blocks that ``match`` would return; none counts as used."""
        return [node.block for node in self._path(tokens, salt)]

    def publish(
        self, tokens: Sequence[int], blocks: Sequence[int], start: int, salt: str = ""
    ) -> list[int] | None:
        """Insert blocks [start, len(blocks)) below the first ``start``, which were published before.

        The tree takes a reference on each block that is new to it.

        Args:
            tokens: of the sequence; ``len(blocks) * B`` or more.
            start: how many of them the caller published before.

        Returns:
            For blocks [start, len(blocks)): the tree's block, another one where these tokens were already
            there. None where the chain to the root is gone: the sequence publishes no more.
        """
        if start == len(blocks):
            return []
        parent = self._nodes.get(blocks[start - 1]) if start else self._root(salt)
        if parent is None:
            return None
        path = []
        for index in range(start, len(blocks)):
            edge = self._edge(tokens, index)
            parent = parent.children.get(edge) or self._insert(parent, edge, blocks[index])
            path.append(parent)
        self._mark_used(path)
        return [node.block for node in path]

    def note_idle(self, block: int) -> None:
        """A block lost a holder and may be evictable now; blocks outside the tree are ignored."""
        node = self._nodes.get(block)
        if node is not None and self._evictable(node):
            heapq.heappush(self._idle, (node.used, node.block))
            if len(self._idle) > 2 * len(self._nodes) + 64:
                self._rebuild_heap()

    def evict(self, count: int) -> int:
        """Remove up to ``count`` blocks that only the tree holds, least recently used first; returns how
        many."""
        evicted = 0
        while evicted < count and self._idle:
            used, block = heapq.heappop(self._idle)
            node = self._nodes.get(block)
            if node is not None and node.used == used and self._evictable(node):
                self._remove(node)
                evicted += 1
        return evicted

    def check(self) -> None:
        """Raises AssertionError naming the node that is wrong."""
        queued = {
            block for used, block in self._idle if block in self._nodes and self._nodes[block].used == used
        }
        reached = 0
        for salt, root in self._roots.items():
            assert root.children, f"the root of {salt!r} is empty"
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                self._check_node(node, queued)
                stack.extend(node.children.values())
                reached += 1
        known = len(self._nodes)
        assert reached == known, f"{reached} nodes hang below the roots, {known} are known"

    def _check_node(self, node: PrefixNode, queued: Iterable[int]) -> None:
        name = f"block {node.block} of the tree"
        assert self._nodes.get(node.block) is node, f"{name} is known as another node"
        attached = node.parent is not None and node.parent.children.get(node.edge) is node
        assert attached and node.parent is not None, f"{name} hangs nowhere"
        assert len(node.edge) == self.block_size, f"{name} has {len(node.edge)} tokens"
        assert node.parent.block == ROOT or node.parent.used >= node.used, f"{name} was used after its parent"
        assert self._blocks.count(node.block) > 0, f"{name} is free"
        assert not self._evictable(node) or node.block in queued, f"{name} will never be evicted"

    def _path(self, tokens: Sequence[int], salt: str) -> list[PrefixNode]:
        path: list[PrefixNode] = []
        node = self._roots.get(salt)
        for index in range(len(tokens) // self.block_size):
            node = node.children.get(self._edge(tokens, index)) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def _edge(self, tokens: Sequence[int], index: int) -> Edge:
        return tuple(tokens[index * self.block_size : (index + 1) * self.block_size])

    def _root(self, salt: str) -> PrefixNode:
        if salt not in self._roots:
            self._roots[salt] = PrefixNode(ROOT, (), None, salt)
        return self._roots[salt]

    def _insert(self, parent: PrefixNode, edge: Edge, block: int) -> PrefixNode:
        assert block != FREED, "a block that was given back cannot be published"
        assert block not in self._nodes, f"block {block} is in the tree with other tokens"
        node = PrefixNode(block, edge, parent, parent.salt)
        parent.children[edge] = self._nodes[block] = node
        self._blocks.hold(block)
        return node

    def _mark_used(self, path: Sequence[PrefixNode]) -> None:
        """Marks a path and all its ancestors as used now."""
        self._clock += 1
        node = path[-1] if path else None
        while node is not None and node.block != ROOT:
            node.used = self._clock
            node = node.parent
        for node in path:
            self.note_idle(node.block)

    def _evictable(self, node: PrefixNode) -> bool:
        return not node.children and self._blocks.count(node.block) == 1

    def _remove(self, node: PrefixNode) -> None:
        assert node.parent is not None
        del node.parent.children[node.edge], self._nodes[node.block]
        self._removed(node.block)
        self._blocks.release(node.block)
        if node.parent.block != ROOT:
            self.note_idle(node.parent.block)
        elif not node.parent.children:
            del self._roots[node.salt]

    def _rebuild_heap(self) -> None:
        self._idle = [(node.used, node.block) for node in self._nodes.values() if self._evictable(node)]
        heapq.heapify(self._idle)

"""The datums of one request as trees, in which what several of them begin with is there once.

The trees follow from the tokens of one request alone. Their order is that of their first datums,
as is the order of the nodes that follow one node.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ratchet.engine.model.segments import Segment

LEAST_SHARED = 16
"""Fewest tokens that datums must share."""

LEAST_SAVED = 64
"""Fewest tokens that sharing must save, since a pass of its own for them takes time."""

LONGEST_PATH = 32
"""Nodes of a path. What datums share beyond is computed for each of them."""

KEYS_PER_ROW = 16
"""Keys of earlier tokens that a node gathers in the memory of one token's activations."""


@dataclass(slots=True, eq=False, kw_only=True)
class Node(Segment):
    """Tokens that stand in the same place of `datums`; those of `ends` have no further ones."""

    tokens: np.ndarray
    datums: list[int]
    ends: list[int]
    children: "list[Node]" = field(default_factory=list)

    @property
    def path(self) -> "list[Node]":
        """The nodes from the tree's beginning to this one."""
        return [*self.before, self]  # type: ignore[list-item]

    @property
    def cost(self) -> int:
        """Size of what follows and of this node, in tokens' activations."""
        own = self.length + self.start // KEYS_PER_ROW
        return own + sum(child.cost for child in self.children)


def grow_forest(sequences: Sequence[np.ndarray]) -> list[Node]:
    """Return the first nodes of the trees of sequences of tokens."""
    return _grow(sequences, range(len(sequences)), None)


def _grow(
    sequences: Sequence[np.ndarray], numbers: Iterable[int], parent: Node | None
) -> list[Node]:
    start = parent.stop if parent else 0
    sharers: dict[bytes, list[int]] = {}
    for number in numbers:
        key = sequences[number][start : start + LEAST_SHARED].tobytes()
        sharers.setdefault(key, []).append(number)
    nodes: list[Node] = []
    for members in sharers.values():
        shared = _common([sequences[number][start:] for number in members])
        last = parent is not None and parent.depth + 1 >= LONGEST_PATH
        if last or shared * (len(members) - 1) < LEAST_SAVED:
            nodes += [_node(sequences, [number], None, parent) for number in members]
        else:
            nodes.append(_node(sequences, members, shared, parent))
    return sorted(nodes, key=lambda node: node.datums[0])


def _node(
    sequences: Sequence[np.ndarray], members: list[int], length: int | None, parent: Node | None
) -> Node:
    """Return the node of the members' next tokens, by default all of them, and what follows it."""
    start = parent.stop if parent else 0
    tokens = sequences[members[0]][start:][:length]
    stop = start + len(tokens)
    ends = [number for number in members if len(sequences[number]) == stop]
    node = Node(len(tokens), parent, tokens=tokens, datums=members, ends=ends)
    node.children = _grow(sequences, [one for one in members if one not in ends], node)
    return node


def _common(sequences: list[np.ndarray]) -> int:
    """Count the tokens with which all sequences begin."""
    length = min(map(len, sequences))
    first = sequences[0][:length]
    differ = [np.flatnonzero(one[:length] != first)[:1] for one in sequences]
    return min([length, *(int(place[0]) for place in differ if len(place))])


def pack(nodes: Iterable[Node], budget: int) -> list[list[Node]]:
    """Split nodes, in their order, into lots whose cost fits the budget, or of a single node."""
    lots: list[list[Node]] = []
    room = 0
    for node in nodes:
        cost = node.cost
        if not lots or cost > room:
            lots.append([])
            room = budget
        lots[-1].append(node)
        room -= cost
    return lots

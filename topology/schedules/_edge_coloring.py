"""Edge colouring of a graph, which decomposes it into few matchings (Misra and Gries)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

__all__ = ["matchings_of"]

Edge = tuple[int, int]


class _Coloring:
    """Edge colouring by Misra and Gries, with at most one colour more than the maximum degree."""

    def __init__(self, n: int) -> None:
        self.at: list[dict[int, int]] = [{} for _ in range(n)]  # vertex: colour -> other end
        self.colour: dict[Edge, int] = {}

    def paint(self, u: int, v: int, colour: int) -> None:
        """Assign an edge a colour that is free at both ends."""
        self.at[u][colour], self.at[v][colour] = v, u
        self.colour[u, v] = self.colour[v, u] = colour

    def strip(self, u: int, v: int) -> int:
        """Remove an edge's colour, and return it."""
        colour = self.colour.pop((u, v))
        del self.colour[v, u], self.at[u][colour], self.at[v][colour]
        return colour

    def free(self, *vertices: int) -> int:
        """Return the lowest colour that is free at all of these vertices."""
        return next(c for c in count() if all(c not in self.at[v] for v in vertices))

    def fan(self, u: int, v: int) -> list[int]:
        """Return a maximal fan of u from v on: each edge's colour is free at the vertex before."""
        fan = [v]
        rest = dict(sorted(self.at[u].items()))
        while True:
            colour = next((c for c in rest if c not in self.at[fan[-1]]), None)
            if colour is None:
                return fan
            fan.append(rest.pop(colour))

    def flip(self, u: int, c: int, d: int) -> None:
        """Swap the colours c and d along the path that starts at u with colour d."""
        path: list[Edge] = []
        vertex, colour = u, d
        while colour in self.at[vertex]:
            path.append((vertex, self.at[vertex][colour]))
            vertex, colour = path[-1][1], c + d - colour
        old = [self.strip(*edge) for edge in path]
        for edge, colour in zip(path, old, strict=True):
            self.paint(*edge, c + d - colour)

    def add(self, u: int, v: int, most: int) -> None:
        """Colour one more edge; recolour others if no colour below ``most`` is free for it."""
        colour = self.free(u, v)
        if colour < most:
            self.paint(u, v, colour)
            return
        fan = self.fan(u, v)
        c, d = self.free(u), self.free(fan[-1])
        if c != d:
            self.flip(u, c, d)
        end = self._pivot(u, fan, d)
        for i in range(end):
            self.move(u, fan[i], fan[i + 1])
        self.paint(u, fan[end], d)

    def move(self, u: int, to: int, source: int) -> None:
        """Move the colour of the edge u-source to the edge u-to."""
        self.paint(u, to, self.strip(u, source))

    def _pivot(self, u: int, fan: list[int], d: int) -> int:
        """Return the first position at which d is free, within the part that is still a fan."""
        end = 1
        while end < len(fan) and self.colour[u, fan[end]] not in self.at[fan[end - 1]]:
            end += 1
        return next(i for i in range(end) if d not in self.at[fan[i]])  # one exists: the theorem


def matchings_of(n: int, edges: Iterable[Edge]) -> list[list[Edge]]:
    """Decompose undirected edges into matchings, at most one more than the maximum degree.

    Args:
        n: Number of vertices, 0..n-1.
        edges: Each edge once, no loops.

    Returns:
        Lists of edges; no two edges of a list share a vertex. The order depends on the arguments
        alone.

    Reference:
        Misra and Gries, "A constructive proof of Vizing's theorem", 1992.
    """
    ordered = sorted((min(edge), max(edge)) for edge in edges)
    degrees = [0] * n
    for u, v in ordered:
        degrees[u] += 1
        degrees[v] += 1
    coloring = _Coloring(n)
    for u, v in ordered:
        coloring.add(u, v, max(degrees))
    matchings: dict[int, list[Edge]] = {}
    for edge in ordered:
        matchings.setdefault(coloring.colour[edge], []).append(edge)
    return [matchings[colour] for colour in sorted(matchings)]

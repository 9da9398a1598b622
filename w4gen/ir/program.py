"""The tile graph. A node is a tile and the operation that made it; an edge says which operand it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx

from w4gen.errors import ScheduleError
from w4gen.ir.layout import Layout
from w4gen.ir.problem import Problem
from w4gen.ir.tile import Dot, Input, Op, Space, Tile, sizes
from w4gen.ir.types import DType, Format

Operands: TypeAlias = dict[str, str]
"""Role -> the node that plays it."""


@dataclass(frozen=True, slots=True, repr=False)
class Program:
    """A frozen graph of tiles, in the order they were added. Rewriting makes a new one. `ir.show` prints it whole."""

    graph: nx.DiGraph
    problem: Problem

    def __repr__(self) -> str:
        return f"<program of {len(self.graph)} tiles, {len(self.kept)} kept: {self.problem}>"

    def __iter__(self) -> Iterator[str]:
        """Node names, operands before what uses them."""
        return iter(self.graph)

    def tile(self, name: str) -> Tile:
        tile: Tile = self.graph.nodes[name]["tile"]
        return tile

    def op(self, name: str) -> Op:
        op: Op = self.graph.nodes[name]["op"]
        return op

    def operands(self, name: str) -> Operands:
        """Operand role -> node, of one node."""
        return {role: source for source, _, role in self.graph.in_edges(name, data="operand")}

    def of(self, *kinds: type) -> list[str]:
        """The nodes made by these kinds of operation."""
        return [name for name in self if isinstance(self.op(name), kinds)]

    @property
    def kept(self) -> list[str]:
        """A weight's buffers."""
        return [name for name in self if self.tile(name).kept]

    @property
    def offline(self) -> list[str]:
        """What runs once, when a weight is packed: the kept tiles and their ancestors.

        Without kept tiles everything that no input reaches would run once: the whole matrix, dequantized.
        """
        if self.kept:
            once = set(self.kept).union(*(nx.ancestors(self.graph, name) for name in self.kept))
        else:
            once = set(self.graph) - set(self.of(Input)).union(*(nx.descendants(self.graph, name) for name in self.of(Input)))
        return [name for name in self if name in once]

    @property
    def per_call(self) -> list[str]:
        """What runs in every call, inputs included."""
        once = set(self.offline)
        return [name for name in self if name not in once]

    @property
    def kernels(self) -> list[list[str]]:
        """The per-call part cut at global tiles: the nodes of each kernel, in the order the kernels run."""
        call = nx.DiGraph(self.graph.subgraph(name for name in self.per_call if not isinstance(self.op(name), Input)))
        written = [name for name in call if self.tile(name).space is Space.GLOBAL]
        call.remove_edges_from([edge for name in written for edge in call.out_edges(name)])
        pieces = [[name for name in self if name in piece] for piece in nx.weakly_connected_components(call)]
        place = {name: index for index, name in enumerate(self)}
        return sorted(pieces, key=lambda piece: place[piece[-1]])

    @property
    def ours(self) -> list[list[str]]:
        """The kernels that are generated: all but the vendor's matmul."""
        theirs = {name for name in self.of(Dot) if self.op(name) == Dot(("k",), "vendor")}
        return [names for names in self.kernels if not theirs & set(names)]

    def source(self, name: str) -> str:
        """The first operand of a node."""
        return next(iter(self.operands(name).values()))


class Builder:
    """A program under construction; the shape of a node follows from its operation and operands."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph = nx.DiGraph()

    def add(
        self,
        name: str,
        op: Op,
        operands: Operands,
        element: DType | Format,
        space: Space = Space.REGISTER,
        shape: dict[str, int] | None = None,
        layout: Layout | None = None,
        kept: bool = False,
    ) -> str:
        """Add a node; `operands` maps each role to the node that plays it. Const and Input state their `shape`."""
        if name in self.graph:
            raise ScheduleError(f"the program has a node {name!r} already: rewrite it once")
        made = shape or sizes(op, {role: self.tile(source) for role, source in operands.items()})
        tile = Tile(tuple(made), tuple(made.values()), element, space, layout, kept)
        self.graph.add_node(name, op=op, tile=tile)
        for role, source in operands.items():
            self.graph.add_edge(source, name, operand=role)
        return name

    def tile(self, name: str) -> Tile:
        tile: Tile = self.graph.nodes[name]["tile"]
        return tile

    def done(self) -> Program:
        return Program(nx.freeze(self.graph), self.problem)


Emit: TypeAlias = Callable[[Builder, Operands], str]


def rewrite(program: Program, emit: dict[str, Emit]) -> Program:
    """The program made anew, node by node; `emit[name](builder, operands)` adds what replaces a node and returns its stand-in.

    What nothing uses any more is left out.
    """
    builder = Builder(program.problem)
    stands: dict[str, str] = {}
    for name in program:
        operands = {role: stands[source] for role, source in program.operands(name).items()}
        stands[name] = emit[name](builder, operands) if name in emit else copy(builder, program, name, operands)
    last = stands[list(program)[-1]]
    live = nx.ancestors(builder.graph, last) | {last}
    builder.graph.remove_nodes_from([name for name in builder.graph if name not in live])
    return builder.done()


def copy(builder: Builder, program: Program, name: str, operands: Operands) -> str:
    """Add a node as it stands in `program`, its shape following from `operands`."""
    tile = program.tile(name)
    shape = None if operands else tile.sizes
    return builder.add(name, program.op(name), operands, tile.element, tile.space, shape, tile.layout, tile.kept)

"""The house rules of design section 3, read off the source with `ast`; and that each is noticed when it is broken."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    0: ("errors", "knobs", "paths", "processes", "progress", "version"),
    1: ("ir", "formats"),
    2: ("schedule",),
    3: ("codegen",),
    4: ("ahead", "binaries", "bundle", "cache", "faults", "pipeline", "proof", "stubs", "toolchain", "tuned"),
    5: ("quantize", "runtime"),
    6: ("api", "bench", "checkpoints", "layers", "merging", "models", "patterns"),
    7: ("cli", "commands", "__init__", "__main__"),
}
FLOOR = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
FILE, FUNCTION, TEMPLATE = 320, 60, 150
ENVIRONMENT = re.compile(r"\b(environ|getenv)\b.*['\"]W4GEN_|['\"]W4GEN_.*\benviron\b").search


def modules(package: Path) -> dict[str, tuple[Path, ast.Module]]:
    """Dotted name -> file and tree of every module of the package in `package`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = (path, ast.parse(path.read_text()))
    return found


def room(module: str) -> str:
    """The file or folder of the package that a module is in."""
    return [*module.split("."), "__init__"][1]


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also in functions; `if TYPE_CHECKING:` does not run and does not count."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = module.split(".") + ["_"] * is_package
            start = ".".join(home[: len(home) - node.level]) + "." if node.level else ""
            base = (start + (node.module or "")).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, each.value) for each in node.args if isinstance(each, ast.Constant))


def resolved(name: str, known: dict[str, tuple[Path, ast.Module]]) -> str:
    """The module that a dotted name is in: `w4gen.errors` of `w4gen.errors.W4Error`; itself where it is not of the package."""
    parts = name.split(".")
    return next((m for size in range(len(parts), 0, -1) if (m := ".".join(parts[:size])) in known), name)


def violations(package: Path) -> list[str]:
    """Every broken rule of the package's Python files, as `file:line: what`."""
    known, graph, found = modules(package), nx.DiGraph(), []
    for module, (path, tree) in known.items():
        where, is_package = path.relative_to(package.parent), path.name == "__init__.py"
        floor = FLOOR.get(room(module))
        if floor is None:
            found.append(f"{where}:1: {room(module)} has no floor")
            continue
        for line, name in imports(tree, module, is_package):
            target = resolved(name, known)
            if target in known:
                graph.add_edges_from((module, ".".join(target.split(".")[:size])) for size in range(1, target.count(".") + 2))
                if FLOOR.get(room(target), 99) > floor:
                    found.append(f"{where}:{line}: imports {target}, a higher floor")
            elif name.split(".")[0] in banned(module, floor):
                found.append(f"{where}:{line}: imports {name.split('.')[0]}, not below its floor")
        found += [f"{where}:{line}: {what}" for line, what in habits(tree, path)]
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    loops = [sorted(loop) for loop in nx.strongly_connected_components(graph) if len(loop) > 1]
    return found + [f"import cycle: {', '.join(loop)}" for loop in loops]


def banned(module: str, floor: int) -> set[str]:
    """Outside packages that a module must not import."""
    return ({"torch"} if floor <= 4 else set()) | ({"jinja2", "triton"} if room(module) == "ir" else set())


def habits(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """Sizes, frozen and slotted dataclasses, errors that say something, and who reads the environment."""
    lines = len(path.read_text().splitlines())
    if lines > FILE:
        yield lines, f"file of {lines} lines, the limit is {FILE}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > FUNCTION:
                yield node.lineno, f"function {node.name} of {length} lines, the limit is {FUNCTION}"
        elif isinstance(node, ast.ClassDef):
            marks = [text for text in map(ast.unparse, node.decorator_list) if re.match(r"(dataclasses\.)?dataclass\b", text)]
            if marks and not {"frozen=True", "slots=True"} <= set(re.findall(r"\w+=True", marks[0])):
                yield node.lineno, f"dataclass {node.name} is not frozen and slotted"
        elif isinstance(node, ast.Assert):
            yield node.lineno, "asserts: raise a W4Error that says what was asked, the limit and the way out"
        elif isinstance(node, ast.Raise) and (
            isinstance(node.exc, ast.Name) or (isinstance(node.exc, ast.Call) and mute(node.exc))
        ):
            yield node.lineno, "raises without a message"
        elif (
            path.name != "knobs.py"
            and isinstance(node, ast.Call | ast.Subscript | ast.Compare)
            and ENVIRONMENT(ast.unparse(node))
        ):
            yield node.lineno, "reads a W4GEN_ variable: only knobs.py does"


def mute(call: ast.Call) -> bool:
    return not call.args and not call.keywords


def long_templates(folder: Path) -> list[str]:
    sizes = {path.name: len(path.read_text().splitlines()) for path in sorted(folder.glob("*.jinja"))}
    return [f"{name}: {size} lines, the limit is {TEMPLATE}" for name, size in sizes.items() if size > TEMPLATE]


def test_the_package_keeps_every_rule() -> None:
    assert violations(ROOT / "w4gen") == []


def test_templates_are_short() -> None:
    assert list((ROOT / "templates").glob("*.jinja"))
    assert long_templates(ROOT / "templates") == []


CLEAN = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from w4gen.runtime.op import run\n",
    "errors.py": "class W4Error(Exception): ...\n",
    "knobs.py": "import os\nASKED = os.environ.get('W4GEN_CACHE')\n",
    "ir/__init__.py": "",
    "ir/tile.py": "from w4gen import errors\nfrom w4gen.errors import W4Error\n",
    "ir/lower.py": "from .tile import W4Error\n",
    "pipeline.py": "import triton\nfrom w4gen.ir import lower\n",
    "runtime/__init__.py": "",
    "runtime/op.py": "import torch\nfrom w4gen import pipeline\ndef run(): ...\n",
}
PLANTED = {
    "a higher floor": ({"errors.py": "import w4gen.pipeline\n"}, "errors.py:1: imports w4gen.pipeline, a higher floor"),
    "a higher floor, by from": ({"errors.py": "from w4gen import pipeline\n"}, "imports w4gen.pipeline, a higher floor"),
    "a higher floor, relative": (
        {"ir/tile.py": "from .. import pipeline\n"},
        "tile.py:1: imports w4gen.pipeline, a higher floor",
    ),
    "a higher floor, in a function": ({"knobs.py": "def f():\n    from w4gen.ir.tile import W4Error\n"}, "knobs.py:2"),
    "a higher floor, by import_module": ({"knobs.py": "import importlib\nimportlib.import_module('w4gen.ir')\n"}, "knobs.py:2"),
    "the package itself": ({"pipeline.py": "from w4gen import __version__\n"}, "imports w4gen, a higher floor"),
    "a cycle": ({"ir/tile.py": "from w4gen.ir.lower import W4Error\n"}, "import cycle: w4gen.ir.lower, w4gen.ir.tile"),
    "a cycle hidden in a function": (
        {"ir/tile.py": "def f():\n    from w4gen.ir import lower\n"},
        "import cycle: w4gen.ir.lower, w4gen.ir.tile",
    ),
    "a cycle through a package": (
        {"ir/__init__.py": "from w4gen.ir.lower import W4Error\n"},
        "import cycle: w4gen.ir, w4gen.ir.lower",
    ),
    "torch below floor 5": ({"pipeline.py": "def f():\n    import torch.nn\n"}, "pipeline.py:2: imports torch"),
    "jinja2 in ir": ({"ir/tile.py": "from jinja2 import Environment\n"}, "imports jinja2"),
    "triton in ir": ({"ir/tile.py": "def f():\n    import triton.language\n"}, "imports triton"),
    "a room without a floor": ({"utils.py": ""}, "utils has no floor"),
    "environ elsewhere": ({"pipeline.py": "import os\nASKED = os.environ['W4GEN_ARCH']\n"}, "pipeline.py:2: reads a W4GEN_"),
    "getenv elsewhere": ({"pipeline.py": "from os import getenv\nASKED = getenv('W4GEN_ARCH')\n"}, "reads a W4GEN_"),
    "a long file": ({"errors.py": "\n" * (FILE + 1)}, f"file of {FILE + 1} lines"),
    "a long function": ({"errors.py": "def f():\n" + "    0\n" * FUNCTION}, f"function f of {FUNCTION + 1} lines"),
    "a mutable dataclass": (
        {"errors.py": "import dataclasses\n@dataclasses.dataclass(slots=True)\nclass A:\n    a: int\n"},
        "dataclass A is not frozen and slotted",
    ),
    "a dataclass without slots": (
        {"errors.py": "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass A:\n    a: int\n"},
        "dataclass A is not frozen and slotted",
    ),
    "an assert": ({"errors.py": "def f(k):\n    assert k\n"}, "errors.py:2: asserts"),
    "a mute raise": ({"errors.py": "def f():\n    raise ValueError\n"}, "errors.py:2: raises without a message"),
    "a mute raise, called": ({"errors.py": "def f():\n    raise ValueError()\n"}, "errors.py:2: raises without a message"),
}


def plant(folder: Path, files: dict[str, str]) -> Path:
    for name, text in (CLEAN | files).items():
        path = folder / "w4gen" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "w4gen"


def test_a_clean_tree_has_no_violation(tmp_path: Path) -> None:
    assert violations(plant(tmp_path, {})) == []


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_violation_is_found(kind: str, tmp_path: Path) -> None:
    files, expected = PLANTED[kind]
    found = violations(plant(tmp_path, files))
    assert any(expected in each for each in found), found


def test_a_long_template_is_found(tmp_path: Path) -> None:
    (tmp_path / "gemv.py.jinja").write_text("\n" * (TEMPLATE + 1))
    assert long_templates(tmp_path) == [f"gemv.py.jinja: {TEMPLATE + 1} lines, the limit is {TEMPLATE}"]

"""A model's layers that read the same x, launched as one: q, k and v of attention, gate and up of an MLP."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from w4gen.layers import TOGETHER
from w4gen.models import Skipped
from w4gen.runtime.gated import NAMES, Gated, refusal
from w4gen.runtime.linear import Linear
from w4gen.runtime.shared import shared

ALWAYS = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)
"""Statements that are reached always, where those before them are."""
PERHAPS = (
    ast.IfExp,
    ast.BoolOp,
    ast.Compare,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.NamedExpr,
)
"""Expressions of which parts may not be worked out, or more than once."""


@dataclass(frozen=True, slots=True)
class Merged:
    """Layers that are launched as one, in the order of their calls: together a weight [n, k] of a format."""

    names: tuple[str, ...]
    n: int
    k: int
    format: str
    activation: str = ""
    """What is done to their sums in the same launch."""

    @property
    def fewer(self) -> int:
        """Launches that are saved: of an activation of pairs, it and its multiplication too."""
        return len(self.names) - 1 + 2 * bool(self.activation)


@dataclass(frozen=True, slots=True)
class Merges:
    """What `merge` did; `str()` tells it."""

    merged: tuple[Merged, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def __str__(self) -> str:
        launches = sum(each.fewer for each in self.merged)
        lines = [f"{len(self.merged)} groups of layers merged: {launches} launches fewer"]
        reasons: dict[str, list[str]] = {}
        for each in self.skipped:
            reasons.setdefault(each.reason, []).append(each.name)
        return "\n".join([*lines, *(f"skipped {names[0]} and {len(names) - 1} more: {why}" for why, names in reasons.items())])


def merge(model: torch.nn.Module, gated: bool = False) -> Merges:
    """Launch layers of `model` that read the same x as one, in place: names, state dicts and results stay as they were.

    For q_proj, k_proj and v_proj, and gate_proj and up_proj, that `convert` made w4gen layers of. Their module's `forward` must
    call each of them once, unconditionally, with one argument that it never changes: its source is read. Others are skipped with
    the reason. Where a buffer is swapped later, layers answer for themselves again. A second call does nothing.

    With `gated`, an MLP that is `down_proj(act_fn(gate_proj(x)) * up_proj(x))`, act_fn being SiLU, becomes a `Gated`: gate and up
    are multiplied in their launch, before they are rounded. State dicts stay as they were; gate_proj and up_proj are no modules
    any more.
    """
    merged, skipped, count = [], [], Counter(id(each) for _, each in model.named_modules(remove_duplicate=False))
    for path, module in list(model.named_modules()) if gated else ():
        if type(getattr(module, "gate_proj", None)) is Linear:
            problem = _ungated(path, module, count)
            if problem:
                skipped.append(Skipped(f"{path}.gate_proj".lstrip("."), problem))
                continue
            made = Gated(module.gate_proj, module.up_proj, module.down_proj)
            model.set_submodule(path, made)
            whole = made.gate_up
            merged.append(Merged(tuple(f"{path}.{name}" for name in NAMES), whole.out_features, whole.in_features,
                                 whole.format.label, whole.activation))  # fmt: skip
    for path, module in list(model.named_modules()):
        for names in TOGETHER:
            layers = {name: getattr(module, name, None) for name in names}
            if not any(type(each) is Linear for each in layers.values()):
                continue
            made = _refusal(module, layers, count) or _in_turn(module, names)
            parts = made if isinstance(made, str) else shared(tuple(layers[name] for name in made))  # type: ignore[misc]
            if isinstance(parts, str):
                skipped.append(Skipped(f"{path}.{names[0]}".lstrip("."), parts))
                continue
            for name, part in zip(made, parts, strict=True):
                module.set_submodule(name, part)
            full, n = tuple(f"{path}.{name}".lstrip(".") for name in made), sum(each.out_features for each in parts)
            merged.append(Merged(full, n, parts[0].in_features, parts[0].format.label))
    return Merges(tuple(merged), tuple(skipped))


def _refusal(module: torch.nn.Module, layers: Mapping[str, object], count: Mapping[int, int]) -> str:
    """Why layers of a module stay apart, whatever it does with them; empty where nothing of them stands against it."""
    for name, layer in layers.items():
        if type(layer) is not Linear:
            return f"{name} is a {type(layer).__name__}, not a plain w4gen.Linear"
        if count[id(layer)] > 1:
            return f"{name} has other names too"
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or "forward" in vars(layer):
            return f"{name} has hooks, which would be lost: remove them first"
    return "the forward of their module was replaced" if "forward" in vars(module) else ""


GATED = "self.down_proj(self.act_fn(self.gate_proj({x})) * self.up_proj({x}))"
"""What the forward of an MLP that becomes a `Gated` returns."""


def _ungated(path: str, module: torch.nn.Module, count: Mapping[int, int]) -> str:
    """Why a module with a gate does not become a `Gated`; empty where it does."""
    layers = {name: getattr(module, name, None) for name in NAMES}
    problem = _refusal(module, layers, count)
    if problem or not path:
        return problem or "it is the model itself, which cannot be replaced in place"
    kind, function = type(module).__name__, _forward(module)
    if isinstance(function, str):
        return function
    given = [each.arg for each in function.args.args]
    if len(given) != 2 or _returned(function) != ast.unparse(ast.parse(GATED.format(x=given[-1]))):
        return f"{kind}.forward is not just {GATED.format(x='x')}"
    if set(dict(module.named_children())) != {*NAMES, "down_proj", "act_fn"} or [
        *module.buffers(False),
        *module.parameters(False),
    ]:
        return f"{kind} holds more than gate_proj, up_proj, down_proj and act_fn"
    if any(each._forward_hooks or each._forward_pre_hooks or each._backward_hooks for each in (module, module.act_fn)):
        return f"{kind} or its act_fn has hooks, which would be lost: remove them first"
    return _not_silu(module.act_fn) or refusal(*layers.values())  # type: ignore[arg-type]


def _returned(function: ast.FunctionDef) -> str:
    """The expression that a function returns and does nothing else, given a name first or not; empty where it does more."""
    match [each for each in function.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]:
        case [ast.Return(value=ast.expr() as value)]:
            return ast.unparse(value)
        case [ast.Assign(targets=[ast.Name(id=name)], value=value), ast.Return(value=ast.Name(id=same))] if name == same:
            return ast.unparse(value)
    return ""


def _not_silu(act: torch.nn.Module) -> str:
    """Why an activation is not taken for SiLU: it has a state, or another value somewhere."""
    kind, x = type(act).__name__, torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([torch.inf, -torch.inf, torch.nan])])
    if [*act.parameters(), *act.buffers()]:
        return f"act_fn, a {kind}, has a state"
    same = torch.equal(act(x).nan_to_num(7), torch.nn.functional.silu(x).nan_to_num(7))
    return "" if same else f"act_fn, a {kind}, is not SiLU"


def _forward(module: torch.nn.Module) -> ast.FunctionDef | str:
    """The forward of a module's class, read from its source; or why there is none to read."""
    kind = type(module).__name__
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward)))
    except (OSError, TypeError):
        return f"the source of {kind}.forward is not to be had"
    function = next((each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)), None)
    return f"{kind}.forward is no function of its own" if function is None else function


def _in_turn(module: torch.nn.Module, names: tuple[str, ...]) -> tuple[str, ...] | str:
    """Layers in the order in which a module's forward calls each once with one x; or why that is not certain."""
    kind, function = type(module).__name__, _forward(module)
    if isinstance(function, str):
        return function
    uses = [ast.unparse(each) for each in ast.walk(function) if isinstance(each, ast.Attribute) and each.attr in names]
    calls = {ast.unparse(call.func): call for statement in function.body for call in _calls(statement)}
    asked = {f"self.{name}": name for name in names}
    if sorted(uses) != sorted(asked) or not asked.keys() <= calls.keys():
        return f"{kind}.forward does not call each of {', '.join(names)} once, and always"
    given = {ast.unparse(each) for use in asked for each in (*calls[use].args, *calls[use].keywords)}
    if len(given) != 1 or not given <= {each.arg for each in function.args.args} - _written(function):
        told = ", ".join(sorted(given))
        return f"{kind}.forward gives {', '.join(names)} more than one argument, or one that it may change: {told}"
    return tuple(asked[use] for use in sorted(asked, key=lambda use: (calls[use].lineno, calls[use].col_offset)))


def _calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Calls in a statement that are made always: none in what is chosen, repeated, or kept for later."""
    pending: list[ast.AST] = [statement] if isinstance(statement, ALWAYS) else []
    while pending:
        node = pending.pop()
        if isinstance(node, PERHAPS):
            continue
        if isinstance(node, ast.Call):
            yield node
        pending += ast.iter_child_nodes(node)


def _written(function: ast.FunctionDef) -> set[str]:
    """Names that a function may give another value, or whose tensors it may write to."""
    found = set()
    for node in ast.walk(function):
        stored = isinstance(node, ast.Name | ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load)
        in_place = isinstance(node, ast.Attribute) and node.attr.endswith("_")
        if stored or in_place or (isinstance(node, ast.keyword) and node.arg == "out"):
            found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found

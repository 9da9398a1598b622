"""An MLP whose down_proj has its columns in an order of its own: the rows of gate_proj and up_proj take that order instead."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter

import torch

from w4gen.errors import ShapeError
from w4gen.models import hooked
from w4gen.runtime.linear import Linear

BEFORE, AFTER = ("gate_proj", "up_proj"), "down_proj"


def push(model: torch.nn.Module) -> list[str]:
    """Spare every down_proj that can be its gather of x; the names of these layers.

    What it reads are products, value by value, of what gate_proj and up_proj give: the source of the module's `forward` is read.
    So rows of those two in the order of its columns make x come in that order. Where that is not certain, the gather stays.
    """
    counts = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    done = []
    for name, module in model.named_modules():
        layers = [getattr(module, each, None) for each in (*BEFORE, AFTER)]
        ours = [each for each in layers if type(each) is Linear and counts[id(each)] == 1 and not hooked(each)]
        if len(ours) == len(layers) and not hooked(module) and value_by_value(module) and _pushed(*ours):
            done.append(f"{name}.{AFTER}".lstrip("."))
    return done


def _pushed(gate: Linear, up: Linear, down: Linear) -> bool:
    """Whether down's order is that of the rows of the other two now."""
    if down.order is None or not gate.out_features == up.out_features == down.in_features:
        return False
    try:
        weights = [each.weight.reordered(down.order) for each in (gate, up)]
    except ShapeError:  # scales that belong to more than a row
        return False
    for each, weight in zip((gate, up), weights, strict=True):
        each._hold(weight)
        each.bias = None if each.bias is None else each.bias[down.order]
    down.order = None
    return True


def value_by_value(module: torch.nn.Module) -> bool:
    """Whether `forward` gives down_proj the product of gate_proj and up_proj, each called once, activations between them."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward))))
    except (OSError, TypeError, SyntaxError):
        return False
    uses = Counter(each.attr for each in ast.walk(function) if isinstance(each, ast.Attribute) and each.attr in (*BEFORE, AFTER))
    after = [each for each in ast.walk(function) if isinstance(each, ast.Call) and ast.unparse(each.func) == f"self.{AFTER}"]
    if uses != Counter((*BEFORE, AFTER)) or len(after) != 1 or len(after[0].args) != 1 or after[0].keywords:
        return False
    return _product(after[0].args[0], module)


def _product(node: ast.expr, module: torch.nn.Module) -> bool:
    """Whether an expression is made of the layers before, of activations and of products."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _product(node.left, module) and _product(node.right, module)
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return False
    called = ast.unparse(node.func).removeprefix("self.")
    return called in BEFORE or (_any_order(getattr(module, called, None)) and _product(node.args[0], module))


def _any_order(activation: object) -> bool:
    """Whether an activation of values in another order gives the same in that order."""
    if not isinstance(activation, torch.nn.Module) or any(True for _ in activation.parameters()) or hooked(activation):
        return False
    values = torch.linspace(-4, 4, 97)
    order = torch.arange(97) * 31 % 97
    return torch.equal(activation(values)[order], activation(values[order]))

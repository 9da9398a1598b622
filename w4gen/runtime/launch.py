"""From a kernel to a call: on a GPU through the cached binary, on a CPU through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from w4gen import knobs, toolchain
from w4gen.codegen.render import Kernel, Piece
from w4gen.codegen.tl import pointer
from w4gen.errors import ShapeError, W4Error
from w4gen.ir.problem import Problem
from w4gen.runtime.dtypes import torch_dtype
from w4gen.runtime.epilogue import finished
from w4gen.runtime.interpreter import mend
from w4gen.schedule.arch import ARCHES, Arch, arch, for_capability
from w4gen.schedule.stored import layout_for
from w4gen.toolchain import interpreted

if TYPE_CHECKING:
    from w4gen.runtime.weight import Weight  # which repacks by a launch

_SWITCH = Lock()
current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)
"""The number of the current GPU; a build of PyTorch without GPUs has none."""
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""The address of the current stream of a GPU."""


def arguments(kernel: Kernel) -> tuple[str, ...]:
    """The order in which a call hands over its tensors; partial sums and a dense weight are made for it."""
    weight = (pointer(kernel.program, part) for part in kernel.problem.format.parts(1, 1))
    return "y_ptr", "x_ptr", *weight, "bias_ptr", *["residual_ptr"] * kernel.problem.residual, "m_count"


def arch_of(device: torch.device | None = None) -> Arch:
    """The arch to compile for: W4GEN_ARCH, else that of the GPU, else `portable`."""
    if knobs.ARCH.read():
        return arch(knobs.ARCH.read())
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return ARCHES["portable"]
    if torch.version.hip:
        return ARCHES.get(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0], ARCHES["gfx942"])
    facts = torch.cuda.get_device_properties(device)
    return replace(for_capability(facts.major, facts.minor), device=facts.name, device_sms=facts.multi_processor_count)


@dataclass(frozen=True, slots=True)
class Start:
    """One function of a kernel, loaded on a GPU: `start(*grid, stream, *flags, *arguments)`, pointers as whole numbers."""

    start: Callable[..., None]
    flags: tuple[Any, ...]

    def __call__(self, grid: tuple[int, int, int], given: Sequence[Any]) -> None:
        """Launch it on the current stream of the current device."""
        stream = current_stream(current_device())
        self.start(*grid, stream, *self.flags, *[each if type(each) is int else each.data_ptr() for each in given])


@dataclass(frozen=True, slots=True)
class Launch:
    """`launch(y, x, *buffers of the weight, bias, (residual,) m)`: a kernel's functions, then the vendor's matmul if it has one.

    `n` cuts everything to the first outputs (0: all of them). `makes` is what lives between the functions of one call; `places`
    says, for each function, where its arguments are among those of the call and what is made for it. A kernel that reads weights
    before the one in front has ended does so only where the weights are those of the call before (`ways[True]`): the first call
    after a write to them waits. It is launched on the current stream of its own device, whichever device is current.
    """

    kernel: Kernel
    device: torch.device
    n: int
    ways: dict[bool, list[Callable[..., None]]]
    makes: tuple[str, ...]
    places: tuple[tuple[int, ...], ...]
    grids: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    def __call__(self, *call: Any) -> None:
        if self.device.index is None or current_device() == self.device.index:
            self._here(call)
            return
        with torch.cuda.device(self.device):
            self._here(call)

    def grid(self, m: int) -> list[tuple[int, int, int]]:
        """The programs of each function for m rows."""
        if m not in self.grids:
            self.grids[m] = [self.kernel.programs(piece, m, self.n) for piece in self.kernel.pieces]
        return self.grids[m]

    def _here(self, call: tuple[Any, ...]) -> None:
        m, end = call[-1], -2 - self.kernel.problem.residual
        made = _workspace(self.kernel, self.makes, m, self.n, call[1]) if self.makes else {}
        given = (*call, *map(made.get, self.makes))
        starts = self.ways[True in self.ways and unwritten(call[2:end])]
        for start, grid, places in zip(starts, self.grid(m), self.places, strict=True):
            start(grid, [given[place] for place in places])
        if "dense_ptr" in self.makes:
            _multiply(self.kernel.problem, dict(zip((*arguments(self.kernel), *self.makes), given, strict=True)), self.n)


def launcher(kernel: Kernel, device: torch.device, n: int = 0) -> Launch:
    """The launch of a kernel on a device, its functions loaded there; `n` cuts it to the first outputs (0: all of them)."""
    early = bool(kernel.schedule.overlap) and not toolchain.interpreted()
    ways = {overlap: [loaded(kernel, piece, device, overlap) for piece in kernel.pieces] for overlap in {False, early}}
    names = arguments(kernel)
    makes = tuple(sorted({argument for piece in kernel.pieces for argument in piece.arguments} - set(names)))
    places = tuple(tuple(map((*names, *makes).index, piece.arguments)) for piece in kernel.pieces)
    return Launch(kernel, device, n, ways, makes, places)


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def unwritten(buffers: Sequence[torch.Tensor | None]) -> bool:
    """Whether the buffers of a weight are what they were when they were last asked about, which is noted on the first.

    A copy of the first takes the note along, but lies elsewhere. What goes around PyTorch's count of writes is not seen: a write
    through `.data`, or by a kernel of somebody else's.
    """
    codes = buffers[0]
    if codes is None or codes.is_inference():  # nothing counts writes to inference tensors
        return False
    versions = [(each.data_ptr(), each._version) for each in buffers if each is not None]
    seen = getattr(codes, "w4gen_versions", None)
    codes.w4gen_versions = versions  # type: ignore[attr-defined]
    return seen == versions


def loaded(kernel: Kernel, piece: Piece, device: torch.device, overlap: bool = False) -> Callable[..., None]:
    """One function of a kernel, loaded on a device, or for Triton's interpreter: `f(grid, tensors and numbers)`."""
    return (_interpreted if toolchain.interpreted() else _compiled)(kernel, piece, device, overlap)


def _interpreted(kernel: Kernel, piece: Piece, device: torch.device, overlap: bool) -> Callable[..., None]:
    mend()
    function = toolchain.function(kernel, piece)
    return lambda grid, given: function[grid](*given)


def _compiled(kernel: Kernel, piece: Piece, device: torch.device, overlap: bool) -> Start:
    with torch.cuda.device(device):
        arch = arch_of(device)
        loaded = toolchain.load(kernel, piece, arch, overlap)
        loaded._init_handles()  # now, and not in a stream capture
        return Start(*toolchain.starter(loaded, arch))


def _workspace(kernel: Kernel, makes: Sequence[str], m: int, n: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What lives between the functions of one call: partial sums f32 [split, m, N], or the dense weight [n, K] in x's type."""
    made = {}
    if "parts_ptr" in makes:
        shape = (kernel.schedule.split_k, m, kernel.problem.n)
        made["parts_ptr"] = torch.empty(shape, dtype=torch.float32, device=x.device)
    if "dense_ptr" in makes:
        made["dense_ptr"] = torch.empty((n or kernel.problem.n, kernel.problem.k), dtype=x.dtype, device=x.device)
    return made


def _multiply(problem: Problem, given: dict[str, Any], n: int) -> None:
    """The vendor's matmul with f32 sums, the bias added before rounding; on a CPU, and under an epilogue, in f32 throughout.

    PyTorch lets cuBLAS add up shares of k in 16 bits, which costs as much accuracy as a rounding: switched off for the call.
    """
    x, dense, bias, residual = (given.get(f"{name}_ptr") for name in ("x", "dense", "bias", "residual"))
    bias, residual = (each if each is None or not n else each[..., :n] for each in (bias, residual))
    y = given["y_ptr"][:, : problem.outputs * n // problem.n or None]
    if x.device.type == "cpu" or problem.epilogue:
        cpu = x.device.type == "cpu"
        sums = linear(x.float(), dense.float()) if cpu else torch.mm(x, dense.T, out_dtype=torch.float32)
        y.copy_(finished(sums if bias is None else sums + bias.float(), problem.activation, residual))
        return
    with _exactly():
        if bias is None:
            torch.mm(x, dense.T, out=y)
        else:
            torch.addmm(bias, x, dense.T, out=y)


@contextmanager
def _exactly() -> Iterator[None]:
    """Sums of 16-bit matmuls stay f32. The switch belongs to the process: one thread at a time sets it, and sets it back."""
    matmul = torch.backends.cuda.matmul
    with _SWITCH:
        allowed = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
        matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
        try:
            yield
        finally:
            matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = allowed


def bind(kernel: Kernel) -> Callable[..., torch.Tensor]:
    """`f(x, w, bias=None, residual=None) -> y` for one kernel: x [M, K] with M in its bucket, w a Weight, packed as it reads it.

    Raises `ShapeError` where they do not fit the kernel, `W4Error` on a CPU.
    """
    problem = kernel.problem
    layout = kernel.program.tile("codes.stored").layout
    launches: dict[torch.device, Launch] = {}

    def call(x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        if x.dim() != 2 or x.shape[1] != problem.inputs or not problem.m[0] <= x.shape[0] <= problem.m[1]:
            raise ShapeError(f"x is {list(x.shape)}; this kernel takes [{problem.m[0]}…{problem.m[1]}, {problem.inputs}]")
        if x.dtype != torch_dtype(problem.x) or x.device != w.codes.device:
            raise ShapeError(f"x is {x.dtype} on {x.device}; this kernel takes {torch_dtype(problem.x)} on {w.codes.device}")
        if (w.format, w.n, w.k) != (problem.format, problem.n, problem.k) or (bias is not None) != problem.bias:
            raise ShapeError(f"{w} with{'' if bias is not None else 'out'} bias does not answer the kernel's problem {problem}")
        if (None if residual is None else tuple(residual.shape)) != ((x.shape[0], problem.outputs) if problem.residual else None):
            raise ShapeError(f"residual does not answer the kernel's problem {problem}: give one of y's shape, or none")
        if any(each is not None and each.device != x.device for each in (*w.buffers, bias, residual)):
            raise ShapeError(f"x is on {x.device}, and another tensor is not: move all of them to one device")
        if x.device.type == "cpu" and not interpreted():
            raise W4Error(
                "x is on a CPU and a kernel runs on a GPU: move x and the weight there, or call w4gen.linear, which falls back"
            )
        w = w.packed_as(layout) if layout is not None else w
        y = torch.full((x.shape[0], problem.outputs), torch.nan, dtype=torch_dtype(problem.y), device=x.device)
        if x.device not in launches:
            launches[x.device] = launcher(kernel, x.device)
        added = [] if residual is None else [aligned(residual.to(y.dtype))]
        launches[x.device](y, aligned(x), *w.buffers, bias, *added, x.shape[0])
        return y

    return call


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x` itself where it is contiguous and starts at a multiple of 16 bytes, as kernels are compiled for; else a copy."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def stored_for(w: Weight, device: torch.device) -> Weight:
    """`w` in the layout that kernels on `device` read; a weight on a CPU stays canonical, and one without memory as it is."""
    if device.type == "meta" or (device.type == "cpu" and not interpreted()):
        return w
    return w.packed_as(layout_for(w.format, arch_of(device), w.n, w.k))

"""Text to binary with no GPU: Triton's compilers, and the facts read off what they make. Imports triton, never torch.

`triton.compile` takes a target instead of a device; the binary and Triton's own metadata are kept in w4gen's cache, and a
`CompiledKernel` is put together from them again, so a warm start compiles nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import linecache
import os
import subprocess
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from w4gen import bundle, cache, knobs, paths, stubs
from w4gen.binaries import cuda_usage, disassemble, hip_usage
from w4gen.codegen.render import Kernel, Piece
from w4gen.codegen.tl import pointer
from w4gen.errors import ForbiddenError, ToolchainError, why
from w4gen.ir.tile import Space
from w4gen.ir.types import DType
from w4gen.schedule.arch import Arch

TYPES = {"f16": "*fp16", "bf16": "*bf16", "f32": "*fp32", "i32": "*i32", "u8": "*u8"}


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel: its files, in memory, and what it needs of the hardware (bytes per program, counts per thread)."""

    files: dict[str, bytes]
    registers: int
    spills: int
    shared_bytes: int
    cached: bool

    def data(self, kind: str) -> bytes:
        """`ptx`, `sass`, `cubin` (CUDA), `amdgcn` or `hsaco` (HIP). Raises `ToolchainError` where the target has none."""
        if kind == "sass" and "cubin" in self.files:
            return disassemble(self.files["cubin"]).encode()
        if kind not in self.files or kind in ("json", "facts"):
            has = [each for each in self.files if each not in ("json", "facts")] + ["sass"] * ("cubin" in self.files)
            raise ToolchainError(f"no {kind} for this target: it has {', '.join(has)}")
        return self.files[kind]

    def text(self, kind: str) -> str:
        """A kind of `data` that is text."""
        return self.data(kind).decode()


@functools.cache
def version() -> str:
    """The installed Triton's version. Raises `ToolchainError` where there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError as error:
        raise ToolchainError("triton is not installed: pip install 'triton>=3.6' (Linux only)") from error


def interpreted() -> bool:
    """Whether triton was told to run kernels on the CPU (TRITON_INTERPRET, which triton reads when it is imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def able(arch: Arch) -> Arch:
    """The arch without what this process cannot do of it: templates in Gluon are written for Triton 3.6, and need a GPU."""
    return arch if version().startswith("3.6.") and not interpreted() else replace(arch, features=arch.features - {"gluon"})


def module(source: str, name: str) -> types.ModuleType:
    """The module that `source` is; its lines are registered, as Triton reads the text of its functions."""
    filename = f"<{name} {cache.address(source)[:12]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    made = types.ModuleType(name)
    made.__file__ = filename
    exec(compile(source, filename, "exec"), made.__dict__)
    return made


def function(kernel: Kernel, piece: Piece) -> Any:
    """A Triton function of a kernel, under whichever mode (compiler, interpreter) triton was imported in."""
    return getattr(module(kernel.source, kernel.name), piece.name)


def build(kernel: Kernel, arch: Arch) -> dict[str, Binary]:
    """Compile every function for `arch`, or find it compiled. Raises `ToolchainError` with what the compiler says is wrong."""
    return {piece.name: build_piece(kernel, piece, arch) for piece in kernel.pieces}


def build_piece(kernel: Kernel, piece: Piece, arch: Arch) -> Binary:
    """Compile one function for `arch`, or find it compiled."""
    address = key(kernel, piece, arch)
    found = _found(kernel, address)
    if found is None:
        with cache.lock(kernel.source, address):
            found = _found(kernel, address)
            if found is None:
                bundle.tell(version(), paths.bundle())
                files = _compile(kernel, piece, arch)
                cache.publish(kernel.source, address, files)
                return _binary(files, cached=False)
    return found


def built(kernel: Kernel, arch: Arch) -> bool:
    """Whether every function is compiled for `arch` already."""
    return all(_found(kernel, key(kernel, piece, arch)) for piece in kernel.pieces)


def key(kernel: Kernel, piece: Piece, arch: Arch) -> str:
    """The address of a binary: the hash of everything that goes into it."""
    target = f"{arch.backend} {arch.target} {arch.warp}"
    return cache.address(kernel.source, piece.name, target, version(), _environment(), _options(kernel))


def _found(kernel: Kernel, address: str) -> Binary | None:
    """A binary from the cache; None where there is none, or its facts are not those of a binary."""
    files = cache.find(kernel.source, address)
    try:
        return _binary(files, cached=True) if files and {"target", "shared", "name"} <= set(json.loads(files["json"])) else None
    except (LookupError, ValueError, TypeError, RecursionError):
        return None


PLAIN = 48 * 1024
"""Bytes of shared memory that a program on an NVIDIA GPU has without asking for more."""


def load(kernel: Kernel, piece: Piece, arch: Arch, overlap: bool) -> Any:
    """A launchable `triton.compiler.CompiledKernel`, from the cache where it is there; with `overlap` it may start early."""
    from triton.compiler.compiler import CompiledKernel

    if knobs.JIT.chosen() and not built(kernel, arch):
        (low, high), asked = kernel.problem.m, kernel.problem
        more = "gradients" if asked.gradient else "residuals" if asked.residual else ""
        way = f"give that M to w4gen.warmup {f'with {more}=True' if more else 'or w4gen compile --model'}, or unset W4GEN_JIT"
        wrong = bundle.foreign(bundle.opened(), version())
        raise ForbiddenError(
            f"M={low}..{high} of {asked.k} -> {asked.n} {asked.format.label} ({asked.x}) is not compiled for {arch.name}, "
            f"and W4GEN_JIT=forbid: {f'{paths.bundle()} {wrong}' if wrong else way}"
        )
    binary = build_piece(kernel, piece, arch)
    with tempfile.TemporaryDirectory(prefix="w4gen-") as folder:  # Triton reads files; those of the cache may go at any time
        group = {f"{piece.name}.{kind}": f"{folder}/kernel.{kind}" for kind in binary.files if kind in ("json", "cubin", "hsaco")}
        for name, path in group.items():
            Path(path).write_bytes(binary.files[name.removeprefix(f"{piece.name}.")])
        made = CompiledKernel(Arguments.of(kernel, piece), group, cache.address(kernel.source))
    made.metadata = made.metadata._replace(launch_pdl=overlap)
    if made.metadata.shared <= PLAIN < binary.shared_bytes:
        # Triton asks for more than the plain limit only where its own part exceeds it: let it ask, and launch with that part
        made.metadata = made.metadata._replace(shared=PLAIN + 1)
    if (
        kernel.schedule.sum_at == "shared"
    ):  # the launcher takes the programs of a cluster from here, and multiplies the grid by them
        made.packed_metadata = (kernel.schedule.warps, kernel.schedule.split_k, made.packed_metadata[2])
    return made


def starter(made: Any, arch: Arch) -> tuple[Any, tuple[Any, ...]]:
    """How a loaded kernel is started: `start(*grid, stream, *flags, *arguments)`, pointers as whole numbers.

    What Triton 3.6 wrote in C for the kernel is called directly; of other releases their Python is. Nobody's hooks are called.
    """
    run, hooks = made.run, (None, None, None)  # what hooks are told, the one before and the one after
    if version().startswith("3.6.") and arch.backend == "cuda" and not (run.global_scratch_size or run.profile_scratch_size):
        how = run.launch_cooperative_grid, run.launch_pdl, None, None
        return run.launch, (made.function, *how, made.packed_metadata, *hooks)
    return run, (made.function, made.packed_metadata, *hooks)


@dataclass(frozen=True, slots=True)
class Arguments:
    """What Triton's launcher asks of the source of a binary: the types of its arguments by name, none of them constant."""

    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, kernel: Kernel, piece: Piece) -> Arguments:
        """Those of one function: pointers to tiles in memory, and numbers."""
        tiles = [kernel.program.tile(name) for name in kernel.program]
        types = {
            pointer(kernel.program, name): TYPES[tile.element.name]
            for name, tile in zip(kernel.program, tiles, strict=True)
            if tile.space is Space.GLOBAL and isinstance(tile.element, DType)
        }
        return cls({name: types.get(name, "i32") for name in piece.arguments})


def _source(kernel: Kernel, piece: Piece) -> Any:
    """What Triton compiles: a function of the text, whose pointers are to multiples of 16 bytes."""
    from triton.compiler import ASTSource

    made, signature = function(kernel, piece), Arguments.of(kernel, piece).signature
    if made.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource

    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    return ASTSource(made, signature, {}, aligned)


def _compile(kernel: Kernel, piece: Piece, arch: Arch) -> dict[str, bytes]:
    """The files of a binary: Triton's metadata, the binary, its text, and `facts.json`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.errors import TritonError

    if interpreted():
        raise ToolchainError("nothing can be compiled under TRITON_INTERPRET=1: unset it, or ask in another process")
    target = GPUTarget(arch.backend, arch.target, arch.warp)
    binary, text = ("cubin", "ptx") if arch.backend == "cuda" else ("hsaco", "amdgcn")
    try:
        with _starting(kernel, piece, arch), _apart():
            made = triton.compile(_source(kernel, piece), target=target, options=json.loads(_options(kernel)))
            path = next(path for name, path in made.metadata_group.items() if name.endswith(".json"))
            files = {"json": Path(path).read_bytes(), binary: made.asm[binary], text: made.asm[text].encode()}
    except (TritonError, RuntimeError, ValueError, TypeError, OSError, subprocess.CalledProcessError) as error:
        raise ToolchainError(f"{piece.name} for {arch.name}: {why(error)}") from error
    usage = cuda_usage(files["cubin"]) if binary == "cubin" else hip_usage(made.asm[text])
    usage["shared_bytes"] = usage.get("shared_bytes", 0) + made.metadata.shared
    return {**files, "facts": json.dumps(usage).encode()}


def _starting(kernel: Kernel, piece: Piece, arch: Arch) -> contextlib.AbstractContextManager[None]:
    """What compiles the part of a load that needs a C compiler beside the kernel, of the release whose parts are known."""
    known = version().startswith("3.6.") and arch.backend == "cuda"
    return stubs.meanwhile(Arguments.of(kernel, piece).signature) if known else contextlib.nullcontext()


_APART = threading.local()
"""The folder, of each thread that compiles for us, that Triton keeps its own files in."""


def _named(others: Callable[[], str]) -> str:
    """What Triton tells its own releases apart by: to hash all of itself takes half a second, and our folders are empty."""
    return "" if hasattr(_APART, "folder") else others()


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Let Triton compile anew, in a folder of this thread's own: what is in Triton's cache may be damaged, or not be writable."""
    from triton import knobs as settings
    from triton.runtime import cache as named
    from triton.runtime.cache import FileCacheManager

    others = settings.cache.manager_class or FileCacheManager

    class Apart(FileCacheManager):  # type: ignore[misc]
        def __new__(cls, key: str, override: bool = False, dump: bool = False) -> Any:
            own = hasattr(_APART, "folder") and not override and not dump
            return super().__new__(cls) if own else others(key, override=override, dump=dump)

        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self.key, self.cache_dir = key, f"{_APART.folder}/{key}"
            self.lock_path = f"{self.cache_dir}/lock"
            Path(self.cache_dir).mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory(prefix="w4gen-") as _APART.folder:
        if others.__name__ != "Apart":
            settings.cache.manager_class = Apart
            named.triton_key = functools.partial(_named, named.triton_key)
        try:
            yield
        finally:
            del _APART.folder


def _binary(files: dict[str, bytes], cached: bool) -> Binary:
    return Binary(files, **json.loads(files["facts"]), cached=cached)


def _options(kernel: Kernel) -> str:
    # multiply-adds are one instruction; releases of Triton differ in what they do where it is not said
    options = {"num_warps": kernel.schedule.launched, "num_stages": kernel.schedule.stages, "enable_fp_fusion": True}
    options |= {"maxnreg": kernel.schedule.maxnreg} if kernel.schedule.maxnreg else {}
    return json.dumps(options)


ENVIRONMENT = (
    *("DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "TRITON_DISABLE_LINE_INFO", "TRITON_KERNEL_OVERRIDE"),
    *("TRITON_LIBDEVICE_PATH", "TRITON_MOCK_PTX_VERSION", "TRITON_OVERRIDE_ARCH"),
    *("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"),
)
"""Variables by which Triton makes another binary of the same text. Its version names its ptxas, unless another is set."""


def _environment() -> str:
    """What is set of `ENVIRONMENT`; of a file also when it was written."""
    given = {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    return json.dumps(
        {name: [value, os.stat(value).st_mtime_ns if os.path.isfile(value) else 0] for name, value in given.items()}
    )

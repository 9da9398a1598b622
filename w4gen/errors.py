"""Every error w4gen raises on purpose. Each message says what was asked, the limit, and the way out."""

import re


class W4Error(Exception):
    """The parent of all w4gen errors; the command line prints it in one line and exits with 2."""


class ShapeError(W4Error):
    """A shape, dtype or device that does not fit what it is used with."""


class FormatError(W4Error):
    """A format that is unknown, malformed, or given data it cannot hold."""


class ArchError(W4Error):
    """An arch that is unknown or described inconsistently."""


class ScheduleError(W4Error):
    """A schedule that is not legal for this program on this arch."""


class TemplateError(W4Error):
    """A template that prints a node of its program not exactly once, or ignores a field of its schedule."""


class ToolchainError(W4Error):
    """A compiler or disassembler that failed, or is not there."""


class CacheError(W4Error):
    """A file of stored kernels or schedules that is damaged, or cannot be read or written."""


class ForbiddenError(ToolchainError):
    """A call that would have to compile a kernel, where W4GEN_JIT=forbid says that none may."""


class CheckpointError(W4Error):
    """A checkpoint that is damaged, or of a kind that w4gen does not read."""


def why(error: Exception) -> str:
    """The line of a compiler's error that says what is wrong: the first that ptxas wrote, else the last with words in it."""
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines() if re.search("[a-zA-Z]", line)]
    said = [line for line in lines if re.match("ptxas .*(fatal|error)", line)]
    return said[0] if said else lines[-1] if lines else repr(error)

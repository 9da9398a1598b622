"""Every `W4GEN_*` environment variable: its type, its default and its sentence. Nothing else reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from w4gen.errors import W4Error


@dataclass(frozen=True, slots=True)
class Knob:
    name: str
    kind: type[str] | type[int] | type[bool]
    default: str
    sentence: str
    words: tuple[str, ...] = ()

    def read(self) -> str:
        return os.environ.get(self.name, "").strip() or self.default

    def chosen(self) -> str:
        """The knob as one of its words, or empty."""
        text = self.read()
        if text and text not in self.words:
            raise W4Error(f"{self.name}={text!r} is not one of {', '.join(self.words)}: unset it or give one")
        return text

    def number(self) -> int:
        """The knob as an integer (0 and 1 for a switch)."""
        text = self.read()
        if not text.isdigit():
            raise W4Error(f"{self.name}={text!r} is not a whole number: unset it or give one, as in {self.name}=1")
        return int(text)


CACHE = Knob(
    "W4GEN_CACHE",
    str,
    "",
    "folder of kernels and tuned schedules in place of the usual one, or a bundle FILE.w4g to look into first",
)
DEBUG = Knob("W4GEN_DEBUG", int, "0", "what a compile tells on stderr: 1 the choice, 2 times, 3 the program, 4 the kernel")
STRICT = Knob("W4GEN_STRICT", bool, "0", "1 makes an error of every call on a GPU that no kernel answers")
ARCH = Knob("W4GEN_ARCH", str, "", "arch to compile for, in place of the GPU present")
JIT = Knob("W4GEN_JIT", str, "", "forbid makes an error of every call that would have to compile a kernel", ("forbid",))

ALL = (CACHE, DEBUG, STRICT, ARCH, JIT)

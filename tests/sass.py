"""What is read from a listing of machine code."""

from __future__ import annotations

import re
from collections.abc import Iterable


def hazards(lines: Iterable[str]) -> list[str]:
    """The lines that write a register of a wgmma's left operand before all products that were asked for are waited for."""
    found, reading = [], set[int]()
    for line in lines:
        if product := re.search(r"\bHGMMA\.\S+ R\d+, R(\d+), ", line):
            reading |= {int(product[1]) + i for i in range(4)}
        elif "WARPGROUP.DEPBAR" in line:
            reading = set()
        elif reading and (wrote := re.search(r"\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+) R(\d+),", line)):
            wide = 4 if ".128" in wrote[1] else 2 if "WIDE" in wrote[1] or ".64" in wrote[1] else 1
            if reading & {int(wrote[2]) + i for i in range(wide)}:
                found.append(line)
    return found

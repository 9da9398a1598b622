"""What is read from a listing of machine code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


def walked(lines: Iterable[str]) -> Iterator[str]:
    """The lines in the order in which they run where no branch forward is taken, and each branch back is taken once."""
    listing, at = list(lines), 0
    labels = {found[1]: index for index, line in enumerate(listing) if (found := re.match(r"\s*\.(L_x_\d+):", line))}
    taken = set[int]()
    while at < len(listing):
        yield listing[at]
        branch = re.search(r"\bBRA `?\(?\.?(L_x_\d+)", listing[at])
        back = branch and labels.get(branch[1], at) < at and at not in taken
        taken |= {at}
        at = labels[branch[1]] if branch and back else at + 1


def hazards(lines: Iterable[str]) -> list[str]:
    """The lines that write a register of a wgmma's left operand while the products of it may be under way.

    Products end in the order in which they were asked for, a group at a time; a wait names the groups that may go on.
    """
    found, groups, asked = [], list[set[int]](), set[int]()
    for line in walked(lines):
        if product := re.search(r"\bHGMMA\.\S+ R\d+, R(\d+), ", line):
            asked |= {int(product[1]) + i for i in range(4)}
            if "gsb0" in line:
                groups, asked = [*groups, asked], set()
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", line):
            groups = groups[max(0, len(groups) - int(wait[1], 16)) :]
        elif wrote := re.search(r"\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+) R(\d+),", line):
            wide = 4 if ".128" in wrote[1] else 2 if "WIDE" in wrote[1] or ".64" in wrote[1] else 1
            if asked.union(*groups) & {int(wrote[2]) + i for i in range(wide)}:
                found.append(line)
    return found

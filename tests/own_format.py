"""A format as a user writes one, for the tests of `--format FILE.py:NAME`."""

import w4gen

int8 = w4gen.Format("int8", bits=8, origin=-128.0, group=64)

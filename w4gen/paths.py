"""Where templates and caches are: beside the package in a wheel, one level up in a checkout, else the user's cache."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_path

from w4gen import knobs
from w4gen.errors import W4Error

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent


def templates() -> Path:
    """The folder of `*.py.jinja` templates."""
    for place in (PACKAGE / "templates", CHECKOUT / "templates"):
        if place.is_dir():
            return place
    raise W4Error(f"no templates/ in {PACKAGE} or {CHECKOUT}: the installation is incomplete, install w4gen again")


def cache() -> Path:
    """The folder that kernels and tuned schedules are written to; it need not exist yet."""
    asked = knobs.CACHE.read()
    if asked:
        return Path(asked).expanduser()
    if (CHECKOUT / "cache" / "README.md").is_file() and (CHECKOUT / "pyproject.toml").is_file():
        return CHECKOUT / "cache"
    return user_cache_path("w4gen", appauthor=False)


def shipped() -> Path:
    """The read-only folder of tuned schedules that came with the package."""
    return next((place for place in (PACKAGE / "cache", CHECKOUT / "cache") if place.is_dir()), PACKAGE / "cache")

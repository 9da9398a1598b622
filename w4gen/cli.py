"""The command line, `w4gen`: its commands are in `commands/`, a file for each."""

from __future__ import annotations

import click

from w4gen import __version__
from w4gen.commands.bench import bench
from w4gen.commands.cache import cache
from w4gen.commands.compile import compile_command
from w4gen.commands.convert import convert
from w4gen.commands.curve import curve
from w4gen.commands.doctor import doctor
from w4gen.commands.explain import explain
from w4gen.commands.formats import formats
from w4gen.commands.inspect import inspect
from w4gen.commands.pack import pack, unpack
from w4gen.commands.profile import profile
from w4gen.commands.report import report
from w4gen.commands.roofline import roofline
from w4gen.commands.show import show
from w4gen.commands.tune import tune
from w4gen.errors import W4Error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Generate Triton kernels for linear layers with low-bit weights."""


for command in (
    compile_command,
    explain,
    tune,
    curve,
    bench,
    profile,
    report,
    show,
    inspect,
    convert,
    pack,
    unpack,
    formats,
    roofline,
    cache,
    doctor,
):
    cli.add_command(command)


def main() -> None:
    """Run the command line; a `W4Error`, or a file that cannot be used, is one line on stderr and exit status 2."""
    try:
        cli(standalone_mode=False)
    except W4Error as error:
        click.echo(f"w4gen: {' '.join(str(error).split())}", err=True)
        raise SystemExit(2) from None
    except OSError as error:
        click.echo(f"w4gen: {error.filename}: {error.strerror}: give another file or folder", err=True)
        raise SystemExit(2) from None
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except click.ClickException as error:
        click.echo(f"w4gen: {error.format_message()}", err=True)
        raise SystemExit(2) from None
    except click.exceptions.Abort:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()

"""The command line: `fxfuse`, and `python -m fxfuse`.

A command is a module with `add(commands)`, which adds the command's parser and sets its default `run`: a function from
the parsed arguments to an exit code. The requested output goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final

import fxfuse
from fxfuse.cli import bench, cache, compile, doctor, explain, terminal
from fxfuse.errors import FxfuseError

RIGHT, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: argparse uses 2 for wrong usage, shells use 128 + SIGINT."""

COMMANDS: Final = (doctor, explain, bench, compile, cache)
"""In the order of the help."""

_EPILOGUE: Final = """\
exit codes: 0 all is right; 1 what was asked for failed; 2 wrong usage; 130 interrupted
environment: FXFUSE_CACHE_DIR (where kernels are kept), FXFUSE_PROGRESS=0 (no bars), NO_COLOR (no colours)

`fxfuse COMMAND --help` says more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (by default the process's) and returns its exit code. SystemExit for usage and --help."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # tables have characters that some encodings lack
            stream.reconfigure(errors="replace")
    given = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        code: int = given.run(given)
        sys.stdout.flush()
        return code
    except FxfuseError as error:
        if given.traceback:
            raise
        print(f"{terminal.painted('fxfuse: error:', 'red', sys.stderr)} {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("fxfuse: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has left, as `head` does; the interpreter must not write there at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="fxfuse", description="Fused kernels for PyTorch models: look at them, measure them, ship them.",
        epilog=_EPILOGUE, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"fxfuse {fxfuse.__version__}")
    parser.add_argument("--traceback", action="store_true", help="where an error came from, not only what it says")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser

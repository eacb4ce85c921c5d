"""`workbench ...`: parse, call, print; nothing else.

Notable: exit code 0 is ok, 1 found a fault or failed, 2 bad usage or unreadable input (one sentence on stderr, nothing written).
With --json the only thing on stdout is one JSON document; progress goes to stderr.
"""

import sys

import workbench.commands.doctor
import workbench.commands.files
import workbench.commands.models
import workbench.commands.notebooks
import workbench.commands.wiring  # noqa: F401
from workbench.console import app
from workbench.errors import InputError


def main() -> None:
    """Entry point: a user's mistake becomes one sentence and exit code 2, Ctrl-C exit code 130."""
    try:
        app(args=_pair_parameters(sys.argv[1:]))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _pair_parameters(arguments: list[str]) -> list[str]:
    """Turn each `-p NAME VALUE` (papermill's form, which typer cannot declare) into `-p NAME=VALUE`."""
    paired: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        paired.append(word)
        if word == "-p" and len(rest) >= 2:
            paired.append(f"{rest.pop(0)}={rest.pop(0)}")
    return paired


if __name__ == "__main__":
    main()

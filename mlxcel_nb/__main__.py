"""`python -m mlxcel_nb` is `mlxcel-nb`: what every shell command begins with, before anything else is imported."""

from __future__ import annotations

import sys

from mlxcel_nb.util import hangups

SERVERS = (["node"], ["net", "listen"])
"""Commands to which SIGHUP is a message. They are sent it from their first moment on; the others it ends."""

INTERRUPTED = 130
"""Exit status, as of `commands.dispatch`, which is not imported yet."""


def main() -> int:
    """Run the command line of this process; returns the exit status."""
    words = sys.argv[1:]
    if any(words[: len(server)] == server for server in SERVERS):
        hangups.hold()
    try:
        from mlxcel_nb import cli
    except KeyboardInterrupt:  # `cli` answers every later one
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())

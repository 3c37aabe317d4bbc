"""`python -m mlxcel_nb` is `mlxcel-nb`: what every shell command begins with, before anything else is imported."""

from __future__ import annotations

import sys

from mlxcel_nb.util import hangups

SERVERS = (["node"], ["net", "listen"])
"""Commands to which SIGHUP is a message. They are sent it from their first moment on; the others it ends."""


def main() -> int:
    """Run the command line of this process; returns the exit status."""
    words = sys.argv[1:]
    if any(words[: len(server)] == server for server in SERVERS):
        hangups.hold()
    from mlxcel_nb import cli

    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())

"""`net ping` again and again in one process, so that what is left over after a hundred bent servers can be counted.

Each line of standard input is a command line for `mlxcel-nb`; its exit status is printed behind what it said.
"""

from __future__ import annotations

import sys

from mlxcel_nb.cli import main

if __name__ == "__main__":
    for line in sys.stdin:
        status = main(line.split())
        print(f"STATUS {status}", file=sys.stderr, flush=True)

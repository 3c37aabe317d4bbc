"""An engine with the runtime's own node, in which every library logs all it can."""

from __future__ import annotations

import logging
import sys

from mlxcel_nb.launch import engine

if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG)  # those that go up to the root logger: asyncio, traitlets and others
    sys.exit(engine.main(sys.argv[1:], log_level="DEBUG"))

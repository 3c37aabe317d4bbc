"""A listening engine that is long in coming: a start that waits for it cannot be over before it is interrupted."""

from __future__ import annotations

import sys
import time

from mlxcel_nb.launch import engine
from tests.cluster.listening_engine import listen

if __name__ == "__main__":
    time.sleep(8)  # longer than the interrupt is on its way
    sys.exit(engine.main(sys.argv[1:], start_node=listen))

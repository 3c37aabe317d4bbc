"""JupyterLab in a process of its own, which ends when its standard input does: a test run that dies leaves none behind.

Run by `tests.browser.lab`; the arguments are those of `jupyter lab`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from jupyterlab.labapp import LabApp


def end_with_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)  # the server then stops its kernels, and they their engines


if __name__ == "__main__":
    threading.Thread(target=end_with_input, daemon=True).start()
    LabApp.launch_instance(sys.argv[1:])

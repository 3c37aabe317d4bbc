"""A script that puts its cluster and itself to sleep in mid-answer; woken, it prints "same" or "one error".

It sleeps by its own hand, since on a busy machine somebody else's might come after the last token.
"""

from __future__ import annotations

import os
import signal
import sys

import psutil

from mlxcel_nb import Cluster, SamplingParams
from mlxcel_nb.errors import MlxcelError

ASK = SamplingParams(max_tokens=600, ignore_eos=True)


def sleep() -> None:
    """Stop all processes below this one, then this one."""
    for process in psutil.Process().children(recursive=True):
        process.send_signal(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def main(model: str) -> str:
    with Cluster(2) as cluster:
        cluster.load(model, pp=2)
        whole = cluster.generate("sleep", ASK).token_ids
        stream = cluster.stream("sleep", ASK)
        deltas = iter(stream)
        next(deltas)
        sleep()
        try:
            for _ in deltas:
                pass
        except MlxcelError:
            return "one error"
        return "same" if stream.token_ids == whole else "other text"


if __name__ == "__main__":
    print(main(sys.argv[1]))

"""A script with a cluster that is put to sleep in mid-answer; prints "same" or "one error"."""

from __future__ import annotations

import sys

from mlxcel_nb import Cluster, SamplingParams
from mlxcel_nb.errors import MlxcelError

ASK = SamplingParams(max_tokens=1500, ignore_eos=True)


def main(model: str) -> str:
    with Cluster(2) as cluster:
        cluster.load(model, pp=2)
        whole = cluster.generate("sleep", ASK).token_ids
        stream = cluster.stream("sleep", ASK)
        deltas = iter(stream)
        next(deltas)
        print("streaming", flush=True)
        try:
            for _ in deltas:
                pass
        except MlxcelError:
            return "one error"
        return "same" if stream.token_ids == whole else "other text"


if __name__ == "__main__":
    print(main(sys.argv[1]))

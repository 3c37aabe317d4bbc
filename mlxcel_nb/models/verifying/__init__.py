"""Whether a model gives the same answer whole and split.

`comparing` says what the same is and where two runs first part; `recording` notes what a run gave; `running` runs a
model in this process, whole or as the parts of a layout; `job` and `__main__` do it in a process of their own, for a
model or for the catalogue. On engines the same is asked for by `client.verifying`. `comparing` and `job` are safe from
any thread and bring no MLX; the others belong to the MLX thread, or make their own.
"""

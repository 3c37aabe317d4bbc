"""Tensor plans: how every decoder of mlx-lm is shared by ranks, derived from its module tree.

`plan` says for each array whether and how it is cut; blocks it has no rule for stay whole on every rank, which is
right whatever they compute, and `TensorPlan.report` names them and why. `apply` and `join` make a model run its share.
`block` is what rules work with; `attention`, `latent`, `feed_forward` and `recurrent` are the rules; `families` says
which fits which module. For the MLX thread.
"""

from __future__ import annotations

from mlxcel_nb.models.sharding.planning import EXPERTS, BlockReport, TensorPlan, apply, join, plan
from mlxcel_nb.models.sharding.standins import AllReduce

__all__ = ["EXPERTS", "AllReduce", "BlockReport", "TensorPlan", "apply", "join", "plan"]

"""Whether every tensor rank's MLX has the collectives that were asked for, before a file is read. Any thread may call.

The ranks say so again before they form a group (`runtime.mlx_groups`): that is what holds; this spares the wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from mlxcel_nb.client.router import Router
from mlxcel_nb.cluster.collectives import OWN, check_backend
from mlxcel_nb.errors import MlxcelError, StepTimeout
from mlxcel_nb.runtime.protocol import LoadOrder, field

ANSWER_S = 5.0
"""A node that does not say in time is asked when the group is formed."""


def check_backends(router: Router, order: LoadOrder, explain: Callable[[MlxcelError], MlxcelError]) -> None:
    """Ask each member of `order` what its MLX has, where that matters.

    Raises:
        ConfigError: a member lacks it. MlxcelError: a member is gone.
    """
    if order.collectives == OWN or order.layout.tp == 1:
        return
    for member in order.members:
        with contextlib.suppress(StepTimeout):
            try:
                answer = router.ask(member.node_id, {"type": "status"}, timeout=ANSWER_S)
            except StepTimeout:
                raise
            except MlxcelError as error:
                raise explain(error) from None
            told = field(answer, "status", dict).get("backends")
            if isinstance(told, list):
                check_backend(order.collectives, [str(each) for each in told], member.node_id)

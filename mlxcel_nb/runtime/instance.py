"""A member's part of a loaded model, with what belongs to it. For the MLX thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

from mlxcel_nb.cluster.layout import Layout
from mlxcel_nb.models.constraints import Constraints
from mlxcel_nb.models.loading import slack, trim
from mlxcel_nb.models.memory import Slack
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.models.sampling import Sampler
from mlxcel_nb.models.tokenizer import Tokenizer, load_tokenizer
from mlxcel_nb.plan.capacity import Room
from mlxcel_nb.runtime.collectives import Collectives
from mlxcel_nb.runtime.fabric import Fabric
from mlxcel_nb.runtime.handoff.handoff import Handoff
from mlxcel_nb.runtime.kv_staging import Staging
from mlxcel_nb.runtime.protocol import LoadOrder
from mlxcel_nb.scheduling.step_plan import Open


@dataclass
class Instance:
    """A member's part of a loaded model, its links to the other members, and how its stage adds up."""

    order: LoadOrder
    me: int
    part: LoadedPart
    fabric: Fabric
    collectives: Collectives
    room: Room | None = None
    staging: Staging = field(default_factory=Staging)
    handoff: Handoff | None = None
    slack: Slack = field(default_factory=Slack)

    @property
    def layout(self) -> Layout:
        return self.order.layout

    @property
    def home(self) -> int:
        """The home of the sequences whose work this member runs; with tensor ranks and stages there is but one."""
        return self.layout.rank_of(self.me) if self.layout.ep > 1 else 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's, read when it is first asked for: a member that samples seldom needs it."""
        return load_tokenizer(self.order.model)

    @cached_property
    def constraints(self) -> Constraints:
        return Constraints(lambda: self.tokenizer)

    def tidy(self) -> None:
        """Give memory back that was freed between what is held, when there is much of it."""
        if self.slack.is_worth(time.monotonic(), slack):
            trim()
            self.slack.given_back(slack())

    def sampler(self, opened: Open) -> Sampler:
        """Chooses the tokens of one sequence, from where it is on."""
        params = SamplingParams.from_dict(opened.params)
        eos_ids = self.tokenizer.eos_ids if params.min_tokens else ()
        return Sampler(params, opened.context, opened.position, eos_ids=eos_ids, constraints=self.constraints)

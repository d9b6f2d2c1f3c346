"""DynaFed: what the global model went through in its first rounds tells the server what the clients' data are like.

Pi, Zhang, Xie, Gao, Wang, Kim, Chen: DynaFed: Tackling Client Data Heterogeneity with Global Dynamics, CVPR 2023.

Algorithm 2 of the paper, as a server step that needs nothing but the averaged model:

    rounds 1 .. L    record the global model
    after round L    synthesise D_syn, a few samples on which training goes the way the recorded models went
    rounds L+1 ..    fine-tune the average on D_syn
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from dynafed import tree
from dynafed.errors import UserError
from dynafed.methods.base import Host, Method, Refined, Server
from dynafed.synthesis.dataset import Synthetic
from dynafed.synthesis.matching import refuse_batch_state
from dynafed.synthesis.refine import finetune
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.task import Task, synthesise_from
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.engine.plan import Plan

log = logging.getLogger("dynafed")


class Algorithm:
    """Algorithm 2, round by round. The state is the recorded trajectory, and D_syn once there is one."""

    def __init__(self, settings: DynaFedSettings) -> None:
        self.settings = settings
        self.length = settings.trajectory + settings.include_initial
        """Checkpoints of a whole trajectory."""
        if self.length <= settings.segment:
            raise UserError(
                f"dynafed.segment = {settings.segment} needs a longer trajectory than {self.length} checkpoints: "
                "raise dynafed.trajectory"
            )

    def initial(self, task: Task, model: Tree) -> Tree:
        """An empty trajectory, or one that begins with the initial model; and D_syn, if it is given."""
        refuse_batch_state(task.module)
        parts: dict[str, Tree] = {}
        if self.settings.include_initial:
            parts["trajectory"] = tree.nest({"000000": model})
        if self.settings.synthetic:
            parts["synthetic"] = Synthetic.load(self.settings.synthetic, task.shape, task.classes).tree()
        return tree.nest(parts)

    def refine(self, task: Task, model: Tree, state: Tree, round: int, host: Host) -> Refined:
        """Record, synthesise or fine-tune, whichever this round is for.

        A round that failed isn't seen here, so it is the checkpoints that count, not the rounds.
        """
        parts, since, again = tree.unnest(state), round - self.settings.trajectory, self.settings.resynthesize_every
        ready = "synthetic" in parts
        metrics: dict[str, Any] = {}
        if ready and since > 0:
            synthetic = Synthetic.from_tree(parts["synthetic"])
            model = finetune(task.module, model, synthetic, self.settings, task.seeds, round, task.threads)
        if not self.settings.synthetic and (again or not ready):
            parts["trajectory"], length = self._recorded(parts.get("trajectory", {}), model, round)
            if length == self.length and (not ready or since % again == 0):
                made, metrics = synthesise_from(parts["trajectory"], task, self.settings, round, host)
                if made is not None:
                    parts["synthetic"] = made.tree()
                    if not again:
                        del parts["trajectory"]
        return Refined(model, tree.nest(parts), metrics)

    def _recorded(self, trajectory: Tree, model: Tree, round: int) -> tuple[Tree, int]:
        """The trajectory with one more checkpoint, without those that are too old; and how many it has."""
        checkpoints = tree.unnest(trajectory) | {f"{round:06d}": tree.clone(model)}
        kept = sorted(checkpoints)[-self.length :]
        return tree.nest({number: checkpoints[number] for number in kept}), len(kept)


class DynaFed(Method):
    """The server step."""

    name = "dynafed"
    summary = "fine-tunes the average on samples synthesised from the first rounds' global models"
    citation = "Pi et al., CVPR 2023"
    Settings = DynaFedSettings
    settings: DynaFedSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.algorithm = Algorithm(self.settings)

    def initial(self, plan: Plan, model: Tree) -> Tree:
        """The state before round 1."""
        if plan.config.rounds <= self.settings.trajectory:
            log.warning("rounds = %d leaves none after dynafed.trajectory to refine in", plan.config.rounds)
        return self.algorithm.initial(self._task(plan), model)

    def refine(self, model: Tree, state: Tree, server: Server) -> Refined:
        """One round of Algorithm 2."""
        return self.algorithm.refine(self._task(server.plan), model, state, server.round, server.host)

    def _task(self, plan: Plan) -> Task:
        from dynafed.synthesis.quality import measure

        return Task(
            plan.module,
            plan.dataset.shape,
            plan.dataset.classes,
            plan.seeds,
            plan.path.server_threads,
            partial(measure, plan) if self.settings.evidence else None,
        )

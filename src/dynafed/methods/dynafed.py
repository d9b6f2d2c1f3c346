"""DynaFed: synthesizes data from the first rounds' global models and fine-tunes later global models on them.

Pi, Zhang, Xie, Gao, Wang, Kim, Chen: DynaFed: Tackling Client Data Heterogeneity with Global Dynamics, CVPR 2023.

Algorithm 2 of the paper, as a server step that needs only the averaged model:

    rounds 1 .. L    record the global model
    after round L    synthesize D_syn, a few samples on which training follows the recorded models
    rounds L+1 ..    fine-tune the average on D_syn
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dynafed import tree
from dynafed.errors import UserError
from dynafed.methods.base import Method, Needs, ServerContext, ServerOutput, ServerRuntime
from dynafed.problem import Problem
from dynafed.synthesis.matching import reject_batch_norm
from dynafed.synthesis.problem import SynthesisProblem, synthesize_from_trajectory
from dynafed.synthesis.refine import finetune
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.synthetic import SyntheticData
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.config import Config

log = logging.getLogger("dynafed")


class Algorithm:
    """Algorithm 2, round by round. Its state is the recorded trajectory, and D_syn after the synthesis."""

    def __init__(self, settings: DynaFedSettings) -> None:
        self.settings = settings
        self.length = settings.trajectory + settings.include_initial
        """Number of checkpoints of a complete trajectory."""
        if self.length <= settings.segment:
            raise UserError(
                f"dynafed.segment = {settings.segment} needs a longer trajectory than {self.length} checkpoints: "
                "raise dynafed.trajectory"
            )

    def initial(self, problem: SynthesisProblem, model: Tree) -> Tree:
        """The state before round 1: the initial model if it is recorded, and D_syn if it is loaded from a file."""
        reject_batch_norm(problem.module)
        parts: dict[str, Tree] = {}
        if self.settings.include_initial:
            parts["trajectory"] = tree.nest({"000000": model})
        if self.settings.on_refusal == "restart":
            parts["origin"] = model
        if self.settings.synthetic:
            parts["synthetic"] = SyntheticData.load(self.settings.synthetic, problem.shape, problem.classes).tree()
        return tree.nest(parts)

    def refine(
        self, problem: SynthesisProblem, model: Tree, state: Tree, round_num: int, runtime: ServerRuntime
    ) -> ServerOutput:
        """Record the model, synthesize D_syn or fine-tune the model on it, depending on the round.

        Not called for failed rounds, so the number of checkpoints decides, not the number of rounds.
        """
        parts, again = tree.unnest(state), self.settings.resynthesize_every
        since = round_num - self.settings.trajectory
        ready = "synthetic" in parts
        metrics: dict[str, Any] = {}
        if ready and since > 0:
            synthetic = SyntheticData.from_tree(parts["synthetic"])
            model = finetune(problem.module, model, synthetic, self.settings, problem.seeds, round_num, problem.threads)
        if not self.settings.synthetic and (again or not ready):
            parts["trajectory"], length = self._record(parts.get("trajectory", {}), model, round_num)
            if length == self.length and (not ready or since % again == 0):
                synthesized, metrics = synthesize_from_trajectory(
                    parts["trajectory"], problem, self.settings, round_num, runtime
                )
                done, refused = synthesized is not None, "synthesis_refused" in metrics
                if synthesized is not None:
                    parts["synthetic"] = synthesized.tree()
                if refused or (done and not again):
                    del parts["trajectory"]  # after a refusal, another one is recorded from the next round on
                origin = parts.pop("origin", {}) if refused or done else {}
                if refused and origin:  # if the recorded rounds aren't trusted, where they led to isn't either
                    model, metrics = origin, metrics | {"restarted": 1}
        return ServerOutput(model, tree.nest(parts), metrics)

    def _record(self, trajectory: Tree, model: Tree, round_num: int) -> tuple[Tree, int]:
        """The trajectory with one more checkpoint, without the oldest if there are too many; and its length."""
        checkpoints = tree.unnest(trajectory) | {f"{round_num:06d}": tree.clone_contiguous(model)}
        kept = sorted(checkpoints)[-self.length :]
        return tree.nest({number: checkpoints[number] for number in kept}), len(kept)


class DynaFed(Method):
    """The server step of DynaFed."""

    name = "dynafed"
    summary = "fine-tunes the average on samples synthesized from the first rounds' global models"
    citation = "Pi et al., CVPR 2023"
    needs = Needs(classes=True, sample_gradients=True)
    Settings = DynaFedSettings
    settings: DynaFedSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.algorithm = Algorithm(self.settings)

    def init_server(self, problem: Problem, model: Tree) -> Tree:
        """The state before round 1."""
        if self.config.rounds <= self.settings.trajectory:
            log.warning(
                "no synthesis is used: rounds = %d isn't more than dynafed.trajectory = %d",
                self.config.rounds,
                self.settings.trajectory,
            )
        return self.algorithm.initial(_synthesis_problem(problem, ServerRuntime()), model)

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        """One round of Algorithm 2."""
        problem = _synthesis_problem(server.problem, server.runtime)
        return self.algorithm.refine(problem, model, state, server.round, server.runtime)


def _synthesis_problem(problem: Problem, runtime: ServerRuntime) -> SynthesisProblem:
    return SynthesisProblem(
        problem.network,
        problem.shape,
        problem.classes,
        problem.seeds,
        runtime.threads,
        runtime.measure,
        accelerate=False,
    )

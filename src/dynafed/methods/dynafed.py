"""DynaFed: what the global model went through in its first rounds tells the server what the clients' data are like.

Pi, Zhang, Xie, Gao, Wang, Kim, Chen: DynaFed: Tackling Client Data Heterogeneity with Global Dynamics, CVPR 2023.

Algorithm 2 of the paper, as a server step that needs nothing but the averaged model:

    rounds 1 .. L    record the global model
    after round L    synthesise D_syn, a few samples on which training goes the way the recorded models went
    rounds L+1 ..    fine-tune the average on D_syn
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dynafed import tree
from dynafed.errors import UserError
from dynafed.methods.base import Method, Refined, Server
from dynafed.synthesis.dataset import Synthetic
from dynafed.synthesis.exhibits import Album
from dynafed.synthesis.matching import refuse_batch_state
from dynafed.synthesis.refine import finetune
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.synthesis.synthesize import Motionless, Segments, synthesize
from dynafed.tree import Tree

if TYPE_CHECKING:
    from dynafed.config import Config
    from dynafed.engine.plan import Plan

log = logging.getLogger("dynafed")


class DynaFed(Method):
    """The server step. Its state is the recorded trajectory, and D_syn once there is one."""

    name = "dynafed"
    summary = "fine-tunes the average on samples synthesised from the first rounds' global models"
    citation = "Pi et al., CVPR 2023"
    Settings = DynaFedSettings
    settings: DynaFedSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        checkpoints = self.settings.trajectory + self.settings.include_initial
        if checkpoints <= self.settings.segment:
            raise UserError(
                f"dynafed.segment = {self.settings.segment} needs a longer trajectory than {checkpoints} checkpoints: "
                "raise dynafed.trajectory"
            )

    def initial(self, plan: Plan, model: Tree) -> Tree:
        """An empty trajectory, or one that begins with the initial model; and D_syn, if it is given."""
        refuse_batch_state(plan.module)
        if plan.config.rounds <= self.settings.trajectory:
            log.warning("rounds = %d leaves none after dynafed.trajectory to refine in", plan.config.rounds)
        parts: dict[str, Tree] = {}
        if self.settings.include_initial:
            parts["trajectory"] = tree.nest({"000000": model})
        if self.settings.synthetic:
            given = Synthetic.load(self.settings.synthetic, plan.dataset.shape, plan.dataset.classes)
            parts["synthetic"] = given.tree()
        return tree.nest(parts)

    def refine(self, model: Tree, state: Tree, server: Server) -> Refined:
        """Record, synthesise or fine-tune, whichever this round is for."""
        parts, since = tree.unnest(state), server.round - self.settings.trajectory
        metrics: dict[str, Any] = {}
        if since > 0 and "synthetic" in parts:
            synthetic = Synthetic.from_tree(parts["synthetic"])
            model = finetune(server.plan.module, model, synthetic, self.settings, server.plan.seeds, server.round)
        if since <= 0 or self.settings.resynthesize_every:
            parts["trajectory"] = self._recorded(parts.get("trajectory", {}), model, server.round)
        if self._is_due(since):
            made, metrics = self._synthesised(parts["trajectory"], server)
            if made is not None:
                parts["synthetic"] = made.tree()
            if not self.settings.resynthesize_every:
                del parts["trajectory"]
        return Refined(model, tree.nest(parts), metrics)

    def _is_due(self, since: int) -> bool:
        if self.settings.synthetic:
            return False
        again = self.settings.resynthesize_every
        return since == 0 or (since > 0 and again > 0 and since % again == 0)

    def _recorded(self, trajectory: Tree, model: Tree, round: int) -> Tree:
        """The trajectory with one more checkpoint, without those that are too old."""
        checkpoints = tree.unnest(trajectory) | {f"{round:06d}": tree.clone(model)}
        most = self.settings.trajectory + self.settings.include_initial
        return tree.nest({number: checkpoints[number] for number in sorted(checkpoints)[-most:]})

    def _synthesised(self, trajectory: Tree, server: Server) -> tuple[Synthetic | None, dict[str, Any]]:
        """Algorithm 1 on the recorded checkpoints, and measures of it; None, with a warning, if they never moved."""
        plan, folder = server.plan, server.host.folder
        named = tree.unnest(trajectory)
        checkpoints = [tree.to(named[number], plan.device) for number in sorted(named)]
        album = Album(folder, self.settings.iterations) if folder else None
        plan.module.eval()
        try:
            made = synthesize(
                plan.module,
                checkpoints,
                plan.dataset.shape,
                plan.dataset.classes,
                self.settings,
                plan.seeds.key("dynafed", server.round) % 2**63,
                work=folder / "synthesis.safetensors" if folder else None,
                check=server.host.check,
                busy=server.host.busy,
                seen=album.seen if album else lambda iteration, loss, x: None,
            )
        except Motionless as error:
            log.warning("no synthesis in round %d: %s", server.round, error)
            return None, {}
        quality = None
        if self.settings.evidence:
            from dynafed.synthesis.quality import measure

            quality = measure(plan, Segments(checkpoints, self.settings, plan.seeds), made)
        if album:
            made.save(album.folder / "synthetic.safetensors")
            album.close(made, quality)
        return made, {"inner_lr": made.inner_lr} | (asdict(quality) if quality else {})

"""The engine's guard against updates that are too large, for the replies that a Flower strategy gets."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flwr.app import ArrayRecord, Message

from dynafed.engine.guard import MODEL, NormGuard
from dynafed.errors import UserError
from dynafed.flower.records import from_record
from dynafed.messages import Update, validate_finite, validate_layout
from dynafed.tree import Tree

log = logging.getLogger("flwr")


class NoModel(UserError):
    """What was aggregated or fine-tuned holds NaN or infinity, or is absurdly large."""


class ReplyGuard:
    """Judges the replies of one round, and what is made of them; `past` holds the norms of the rounds before."""

    def __init__(self, sent: ArrayRecord | None, past: Tree, mode: str) -> None:
        self.guard = NormGuard(from_record(sent) if sent else {}, past, mode)

    @property
    def norms(self) -> Tree:
        """`past` of the next round."""
        return self.guard.norms()

    def sound(self, replies: Iterable[Message]) -> list[Message]:
        """Those that may count; raises `NoModel` if one of them shows too late that it shouldn't have.

        What isn't made of arrays as they were sent is for the wrapped strategy to judge.
        """
        kept = [reply for reply in replies if self._is_sound(reply)]
        if found := self.guard.contaminated_by():
            raise NoModel(f"node {found[0]}: {found[1]}")
        return kept

    def check(self, arrays: ArrayRecord | None, what: str) -> None:
        """Raise `NoModel` if these arrays are absurdly far from those that the clients got."""
        update = self._as_update(0, arrays)
        if update is None or not self.guard.accepted.get(MODEL):
            return
        if reason := validate_finite(update.model) or self.guard.check_step(update.model):
            raise NoModel(f"{what} is no model: {reason}")

    def _is_sound(self, reply: Message) -> bool:
        node = reply.metadata.src_node_id
        arrays = None if reply.has_error() else next(iter(reply.content.array_records.values()), None)
        if (update := self._as_update(node, arrays)) is None:
            return True
        if reason := validate_finite(update.model) or self.guard.judge(update)[1]:
            log.warning("the reply of node %d is left out: %s", node, reason)
            return False
        return True

    def _as_update(self, node: int, arrays: ArrayRecord | None) -> Update | None:
        """What a node sent, if it is a model like the one that it got."""
        try:
            model = from_record(arrays) if arrays is not None else {}
        except Exception:  # whatever a client may send
            return None
        return None if validate_layout(model, self.guard.model) else Update(node, model, 1, 1, 0.0, 0.0)

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import TEST, TRAIN, tiny

from dynafed import Config, UserError, methods
from dynafed.engine.plan import Plan
from dynafed.engine.server import server_broadcast, server_update
from dynafed.messages import Broadcast, Update
from dynafed.methods import Finished, Local, Mean, Method, Needs, Refined, Server
from dynafed.tree import Tree


def update(client: int, value: float, examples: int = 1, **extras: Tree) -> Update:
    return Update(client, {"w": torch.full((2,), value)}, examples, 1, value, 0.0, extras)


SENT = Broadcast(1, {"w": torch.zeros(2)})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.make(tiny(), train=TRAIN, test=TEST)


def test_uniform_and_weighted_means() -> None:
    for weighting, expected in (("uniform", 2.0), ("examples", 2.5)):
        mean = Mean(weighting)
        mean.add(update(0, 1.0, examples=1))
        mean.add(update(1, 3.0, examples=3))
        assert torch.equal(mean.result()["w"], torch.full((2,), expected))


def test_whole_number_buffers_are_rounded_and_dtypes_kept() -> None:
    mean = Mean("uniform")
    for number in (1, 2, 2):
        mean.add_tree({"n": torch.tensor(number), "h": torch.tensor(1.0, dtype=torch.float16)})
    assert mean.result()["n"] == 2
    assert mean.result()["n"].dtype == torch.int64
    assert mean.result()["h"].dtype == torch.float16


def test_a_bad_update_is_named_and_leaves_no_trace(plan: Plan) -> None:
    bad = update(1, float("nan"))
    outcome = server_update(plan, SENT, {}, [update(0, 1.0), bad, update(2, 3.0)])
    assert torch.equal(outcome.model["w"], torch.full((2,), 2.0))
    assert outcome.accepted == [0, 2]
    assert outcome.rejected == [{"client": 1, "reason": "'w' holds NaN or infinity"}]
    assert outcome.metrics["train_loss"] == 2.0


def test_too_few_sound_updates_make_no_model(plan: Plan) -> None:
    server = {"test": {"rounds": torch.tensor(3)}}
    outcome = server_update(plan, SENT, server, [update(1, float("nan"))])
    assert outcome.model is outcome.combined is SENT.model
    assert outcome.server is server
    assert outcome.accepted == []
    assert outcome.rejected[0]["client"] == 1
    assert outcome.bytes_up == update(1, 0.0).nbytes


def test_updates_are_streamed(plan: Plan) -> None:
    """While the next update is made, nothing but the running sum is alive."""
    import weakref

    alive: list[Any] = []

    def stream() -> Any:
        for client in range(5):
            made = update(client, float(client))
            alive.append(weakref.ref(made))
            yield made
            del made
            assert sum(reference() is not None for reference in alive) <= 1

    server_update(plan, SENT, {}, stream())


class Shift(Method):
    """Both halves at once: counts rounds on the server, and moves the mean by what the clients sent."""

    name = "test-shift"
    needs = Needs(client_models=True)

    def finish(self, params: Tree, local: Local) -> Finished:
        return Finished(memory={"seen": torch.tensor(1)}, extras={"by": torch.tensor([float(local.client)])})

    def sends(self, plan: Plan) -> Tree:
        return {"by": torch.zeros(1)}

    def initial(self, plan: Plan, model: Tree) -> Tree:
        return {"rounds": torch.tensor(0)}

    def broadcast(self, state: Tree) -> Tree:
        return {"rounds": state["rounds"]}

    def refine(self, model: Tree, state: Tree, server: Server) -> Refined:
        moved = {name: tensor + server.extras["by"] for name, tensor in model.items()}
        return Refined(moved, {"rounds": state["rounds"] + 1}, {"kept": len(server.updates)})


class Odd(Method):
    """Replaces the average."""

    name = "test-odd"
    needs = Needs(server_data="labelled")

    def combiner(self, plan: Plan) -> Mean:
        return Mean("uniform")


class Odder(Odd):
    name = "test-odder"


@pytest.fixture(autouse=True, scope="module")
def _unregister() -> Any:
    yield
    for kind in (Shift, Odd, Odder):
        methods.METHODS.pop(kind.name, None)


def test_a_method_s_halves_meet() -> None:
    plan = Plan.make(tiny(method="fedavg+test-shift"), train=TRAIN, test=TEST)
    assert plan.methods.client.name == "test-shift"
    sent = server_broadcast(plan, 1, SENT.model, {"test-shift": {"rounds": torch.tensor(3)}})
    assert sent.extras["test-shift"]["rounds"] == 3
    arrived = [update(c, 0.0, **{"test-shift": {"by": torch.tensor([float(c)])}}) for c in (1, 3)]
    outcome = server_update(plan, sent, {"test-shift": {"rounds": torch.tensor(3)}}, arrived)
    assert torch.equal(outcome.model["w"], torch.full((2,), 2.0))
    assert torch.equal(outcome.combined["w"], torch.zeros(2))
    assert outcome.server["test-shift"]["rounds"] == 4
    assert outcome.metrics["kept"] == 2


def test_nonsense_compositions_are_refused() -> None:
    with pytest.raises(UserError, match="needs labelled server data"):
        Config.load(None, {"method": "test-odd"})
    with pytest.raises(UserError, match="both replace the average"):
        Config.load(None, {"method": "test-odd+test-odder", "server_samples": 10})

    class Other(Shift):
        name = "test-other"

    try:
        with pytest.raises(UserError, match="both change local training"):
            Config.load(None, {"method": "test-shift+test-other"})
    finally:
        methods.METHODS.pop("test-other")

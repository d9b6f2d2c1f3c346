from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import TEST, TRAIN, tiny

from dynafed import Config, UserError, methods, tree
from dynafed.engine.federation import Federation
from dynafed.engine.server import server_broadcast, server_update
from dynafed.messages import Broadcast, Update
from dynafed.methods import ClientContext, ClientOutput, Mean, Method, Needs, ServerContext, ServerOutput
from dynafed.problem import Problem
from dynafed.tree import Tree


def update(client: int, value: float, examples: int = 1, **extras: Tree) -> Update:
    return Update(client, {"w": torch.full((2,), value)}, examples, 1, value, 0.0, extras)


SENT = Broadcast(1, {"w": torch.zeros(2)})


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation.create(tiny(), train=TRAIN, test=TEST)


def test_uniform_and_weighted_means() -> None:
    for weighting, expected in (("uniform", 2.0), ("examples", 2.5)):
        mean = Mean(weighting)
        mean.add(update(0, 1.0, examples=1))
        mean.add(update(1, 3.0, examples=3))
        assert torch.equal(mean.mean()["w"], torch.full((2,), expected))


def test_whole_number_buffers_are_rounded_and_dtypes_kept() -> None:
    mean = Mean("uniform")
    for number in (1, 2, 2):
        mean.add_tree({"n": torch.tensor(number), "h": torch.tensor(1.0, dtype=torch.float16)})
    assert mean.mean()["n"] == 2
    assert mean.mean()["n"].dtype == torch.int64
    assert mean.mean()["h"].dtype == torch.float16


def test_a_bad_update_is_named_and_leaves_no_trace(federation: Federation) -> None:
    bad = update(1, float("nan"))
    outcome = server_update(federation.server_side, SENT, {}, [update(0, 1.0), bad, update(2, 3.0)])
    assert torch.equal(outcome.model["w"], torch.full((2,), 2.0))
    assert outcome.accepted == [0, 2]
    assert outcome.rejected == [{"client": 1, "reason": "'w' holds NaN or infinity"}]
    assert outcome.metrics["train_loss"] == 2.0


def test_too_few_sound_updates_make_no_model(federation: Federation) -> None:
    server = {"test": {"rounds": torch.tensor(3)}}
    outcome = server_update(federation.server_side, SENT, server, [update(1, float("nan"))])
    assert outcome.model is outcome.average is SENT.model
    assert outcome.server is server
    assert outcome.accepted == []
    assert outcome.rejected[0]["client"] == 1
    assert outcome.bytes_up == update(1, 0.0).nbytes


def test_updates_are_streamed(federation: Federation) -> None:
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

    server_update(federation.server_side, SENT, {}, stream())


class Shift(Method):
    """Both halves at once: counts rounds on the server, and moves the mean by what the clients sent."""

    name = "test-shift"
    needs = Needs(client_models=True)

    def finish(self, params: Tree, client: ClientContext) -> ClientOutput:
        return ClientOutput(state={"seen": torch.tensor(1)}, extras={"by": torch.tensor([float(client.client)])})

    def extras_spec(self, problem: Problem) -> Tree:
        return {"by": torch.zeros(1)}

    def init_server(self, problem: Problem, model: Tree) -> Tree:
        return {"rounds": torch.tensor(0)}

    def broadcast(self, state: Tree) -> Tree:
        return {"rounds": state["rounds"]}

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        moved = {name: tensor + server.extras["by"] for name, tensor in model.items()}
        return ServerOutput(moved, {"rounds": state["rounds"] + 1}, {"kept": len(server.updates)})


class Odd(Method):
    """Replaces the average."""

    name = "test-odd"
    needs = Needs(server_data="labeled")

    def combiner(self, server: ServerContext) -> Mean:
        return Mean("uniform")


class Odder(Odd):
    name = "test-odder"


@pytest.fixture(autouse=True, scope="module")
def _unregister() -> Any:
    yield
    for kind in (Shift, Odd, Odder):
        methods.METHODS.remove(kind.name)


def test_a_method_s_halves_meet() -> None:
    federation = Federation.create(tiny(method="fedavg+test-shift"), train=TRAIN, test=TEST)
    assert federation.methods.clients[0].name == "test-shift"
    sent = server_broadcast(federation.server_side, 1, SENT.model, {"test-shift": {"rounds": torch.tensor(3)}})
    assert sent.extras["test-shift"]["rounds"] == 3
    arrived = [update(c, 0.0, **{"test-shift": {"by": torch.tensor([float(c)])}}) for c in (1, 3)]
    outcome = server_update(federation.server_side, sent, {"test-shift": {"rounds": torch.tensor(3)}}, arrived)
    assert torch.equal(outcome.model["w"], torch.full((2,), 2.0))
    assert torch.equal(outcome.average["w"], torch.zeros(2))
    assert outcome.server["test-shift"]["rounds"] == 4
    assert outcome.metrics["kept"] == 2


def test_nonsense_compositions_are_refused() -> None:
    with pytest.raises(UserError, match="needs labeled server data"):
        Config.load(None, {"method": "test-odd"})
    with pytest.raises(UserError, match="both replace the average"):
        Config.load(None, {"method": "test-odd+test-odder", "server_samples": 10})
    with pytest.raises(UserError, match="moon and fedmix both have a loss of their own"):
        Config.load(None, {"method": "moon+fedmix"})


HUGE = 3.4e38


@pytest.mark.parametrize(
    "method", ["fedavg", "fedavgm", "fedadam", "fedyogi", "median", "scaffold", "feddyn", "fednova"]
)
def test_a_huge_update_that_spoils_the_result_is_taken_back_and_named(method: str) -> None:
    """The average of two such updates is finite, but a method's square, or a sum in float32, may not be."""
    federation = Federation.create(tiny(method=method, optimizer="sgd", large_updates="accept"), train=TRAIN, test=TEST)
    side, start = federation.server_side, federation.problem.initial_model()
    server = {step.name: step.init_server(federation.problem, start) for step in side.methods.steps}
    sent = server_broadcast(side, 1, start, server)
    extras = side.methods.extras_spec(federation.problem)

    def made(client: int, value: float) -> Update:
        model = {name: torch.full_like(tensor, value) for name, tensor in start.items()}
        return Update(client, model, len(federation.client(client).y), 1, 0.0, 0.0, extras)

    honest = server_update(side, sent, server, [made(0, 0.1), made(1, 0.2)])
    assert honest.accepted == [0, 1]
    outcome = server_update(side, sent, server, [made(0, 0.1), made(1, HUGE), made(2, HUGE / 2)])
    for part in (outcome.model, tree.nest(outcome.server)):
        assert all(torch.isfinite(tensor).all() for tensor in part.values() if tensor.is_floating_point())
    if not outcome.accepted:
        assert outcome.model is start
        assert outcome.server is server
        assert [each["client"] for each in outcome.rejected] == [1]
        assert "NaN or infinity" in outcome.rejected[0]["reason"]


def test_fedadam_s_state_stays_finite() -> None:
    federation = Federation.create(tiny(method="fedadam", large_updates="accept"), train=TRAIN, test=TEST)
    side, start = federation.server_side, federation.problem.initial_model()
    server = {"fedadam": side.methods.steps[0].init_server(federation.problem, start)}
    huge = {name: torch.full_like(tensor, HUGE) for name, tensor in start.items()}
    outcome = server_update(side, Broadcast(1, start), server, [Update(4, huge, 1, 1, 0.0, 0.0)])
    assert outcome.server is server
    assert outcome.rejected[0]["client"] == 4
    assert "fedadam returned no model" in outcome.rejected[0]["reason"]


class Wordy(Method):
    """Returns metrics as a user might."""

    name = "test-wordy"
    metrics: Any = {}  # noqa: RUF012

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> Any:
        return model if self.metrics is None else ServerOutput(model, state, self.metrics)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"norm": torch.ones(2)}, "test-wordy returned the metric 'norm' as a Tensor: metrics are numbers"),
        ({"round": 77.0}, "test-wordy returned the metric 'round', which is the engine's own"),
        (None, "test-wordy's server_step must return a ServerOutput, not a dict"),
    ],
)
def test_metrics_are_numbers_with_names_of_their_own(metrics: Any, words: str) -> None:
    Wordy.metrics = {"norm": torch.tensor(3.0), "count": 2, "by": {"a": torch.tensor(1)}}
    try:
        federation = Federation.create(tiny(method="test-wordy"), train=TRAIN, test=TEST)
    finally:
        methods.METHODS.remove("test-wordy")
    outcome = server_update(federation.server_side, SENT, {}, [update(0, 1.0)])
    assert outcome.metrics == {"train_loss": 1.0, "norm": 3.0, "count": 2, "by": {"a": 1}}
    Wordy.metrics = metrics
    with pytest.raises(UserError, match=words):
        server_update(federation.server_side, SENT, {}, [update(0, 1.0)])
    methods.METHODS.add("test-wordy", Wordy)

"""A recording stands for a function bit for bit, or isn't made."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from problems import TEST, TRAIN, tiny
from torch import Tensor

import dynafed
from dynafed import execution, tracing, tree
from dynafed.engine.federation import Federation
from dynafed.engine.local import local_update
from dynafed.engine.steps import Untraceable
from dynafed.messages import Broadcast
from dynafed.methods import METHODS
from dynafed.tracing import StepTracer, trace_function


def slope(w: Tensor, x: Tensor) -> list[Tensor]:
    leaf = w.detach().requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(x @ leaf.t(), torch.zeros(len(x), dtype=torch.long)), leaf)
    return [grad]


def test_a_replay_gives_the_same_bits_for_other_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    replay = trace_function(slope, (torch.randn(3, 4, generator=generator), torch.randn(5, 4, generator=generator)))
    assert replay is not None
    other = torch.randn(3, 4, generator=generator), torch.randn(5, 4, generator=generator)
    assert torch.equal(replay(*other)[0], slope(*other)[0])


def test_a_replay_tells_apart_what_was_one_tensor_when_it_was_recorded() -> None:
    x = torch.tensor([1.0, 2.0])
    replay = trace_function(lambda a, b: [a - b], (x, x))
    assert replay is not None
    assert replay(x, torch.ones(2))[0].tolist() == [0.0, 1.0]


def test_a_replay_draws_the_random_numbers_that_the_function_would() -> None:
    """Dropout, twice: each has its own numbers."""

    def with_dropout(w: Tensor, x: Tensor) -> list[Tensor]:
        leaf = w.detach().requires_grad_()
        hidden = F.dropout(F.dropout(x, 0.3) @ leaf, 0.5).tanh()
        return list(torch.autograd.grad(hidden.square().sum(), [leaf]))

    generator = torch.Generator().manual_seed(0)
    replay = trace_function(with_dropout, (torch.randn(4, 3, generator=generator), torch.randn(5, 4)))
    assert replay is not None
    with torch.random.fork_rng(devices=[]):
        for seed in range(3):
            inputs = torch.randn(4, 3, generator=generator), torch.randn(5, 4, generator=generator)
            torch.manual_seed(seed)
            expected = [with_dropout(*inputs)[0] for _ in range(2)]
            torch.manual_seed(seed)
            with torch.inference_mode():
                found = [replay(*inputs)[0] for _ in range(2)]
            assert all(map(torch.equal, expected, found))
            assert not torch.equal(*expected)


def nothing(*_: object, **__: object) -> None:
    raise RuntimeError("TorchScript is gone")


def other(*_: object, **__: object) -> tracing.Function:
    return lambda w, x: [slope(w, x)[0] + 1e-3]


@pytest.mark.parametrize(("part", "instead"), [("trace", nothing), ("optimized_execution", nothing), ("trace", other)])
def test_without_torchscript_the_operations_are_replayed_one_by_one(
    part: str, instead: tracing.Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it raises, or gives other bits."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 4, generator=generator), torch.randn(5, 4, generator=generator)
    scripted = trace_function(slope, inputs)
    monkeypatch.setattr(torch.jit, part, instead)
    plain = trace_function(slope, inputs)
    assert isinstance(scripted, torch.jit.ScriptFunction)
    assert plain is not None
    assert not isinstance(plain, torch.jit.ScriptFunction)
    with torch.inference_mode():
        found = [replay(*inputs)[0] for replay in (scripted, plain)]
    assert all(torch.equal(each, slope(*inputs)[0]) for each in found)


def test_a_replay_takes_no_other_kernels_however_often_it_is_called() -> None:
    """TorchScript's optimizer starts after a few calls, and would split a product with a bias in two."""
    generator = torch.Generator().manual_seed(0)
    bias, x, w = (torch.randn(shape, generator=generator) for shape in ((128,), (32, 784), (784, 128)))
    settings = torch._C._get_graph_executor_optimize(), torch._C._jit_set_profiling_mode(True)
    replay = trace_function(lambda *inputs: [torch.addmm(*inputs).relu()], (bias, x, w))
    assert isinstance(replay, torch.jit.ScriptFunction)
    assert (torch._C._get_graph_executor_optimize(), torch._C._jit_set_profiling_mode(settings[1])) == settings
    for _ in range(5):
        with torch.inference_mode():
            assert torch.equal(replay(bias, x, w)[0], torch.addmm(bias, x, w).relu())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x * x.max().item()],  # looks at a value
        lambda x: [x + random.random()],  # is random, and not by torch
        lambda x: [x * Untraceable().steps],  # depends on something else than tensors
        lambda x: [x if Untraceable() == 3 else -x],
    ],
)
def test_what_is_no_pure_function_of_tensors_is_not_recorded(function: tracing.Function) -> None:
    torch.manual_seed(1)
    assert trace_function(function, (torch.ones(3),)) is None
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    trace_function(function, (torch.ones(3),))
    assert torch.equal(torch.rand(2), expected), "recording must not disturb the random stream"


def test_a_recorder_waits_until_recording_pays() -> None:
    tracer, x = StepTracer(after=3), torch.ones(2)
    calls = [tracer.trace("key", lambda x: [x + 1], (x,)) for _ in range(4)]
    assert calls[:2] == [None, None]
    assert calls[2] is calls[3] is not None
    assert tracer.trace("other", lambda x: [x + 1], (x,)) is None
    assert pickle.loads(pickle.dumps(tracer)).traces == {}


def test_a_second_recording_is_made_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CALLS_BEFORE_NEXT", 2)
    tracer, x = StepTracer(after=4), torch.ones(2)
    made = {key: [tracer.trace(key, lambda x: [x + 1], (x,)) is not None for _ in range(4)] for key in "ab"}
    assert made == {"a": [False, False, False, True], "b": [False, True, True, True]}


OURS = [name for name in METHODS.names() if METHODS.load(name).__module__.startswith("dynafed.")]


@pytest.mark.parametrize("method", OURS)
def test_recording_changes_no_bit_of_any_method(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"dynafed__trajectory": 3, "dynafed__segment": 1, "dynafed__targets": [1], "dynafed__iterations": 2}
    config = tiny(method=method, rounds=4, server_samples=40, feddf__steps=3, **few)
    digests = set()
    for after in (1, 10**9):
        monkeypatch.setattr(tracing.StepTracer.__init__, "__defaults__", (after, True))
        monkeypatch.setattr(execution, "MIN_TRACED_STEPS", 0)
        result = dynafed.run(config, train=TRAIN, test=TEST, out=tmp_path / str(after))
        digests.add(tree.digest(result.state.model))
        tapes = result.federation.problem.tracer.traces
        assert any(tapes.values()) == (after == 1)
    assert len(digests) == 1


def test_a_network_with_buffers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "MIN_TRACED_STEPS", 0)
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))
    federation = Federation.create(tiny(), train=TRAIN, test=TEST, model=lambda: net)
    federation.problem.tracer.after = 1
    update, _ = local_update(
        federation.client_side, federation.client(0), Broadcast(1, federation.problem.initial_model())
    )
    assert not federation.problem.tracer.traces
    assert update.model["0.num_batches_tracked"] == update.steps


def test_gradients_follow_the_weights_and_know_their_names() -> None:
    """Two matrices of one shape in another order: what was recorded stands for both orders."""
    tracer = StepTracer(after=1)
    weights = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([[3.0, 5.0]])}
    x = torch.tensor([[1.0, -1.0]])

    def loss(named: tree.Tree, x: Tensor) -> Tensor:
        return ((x * named["a"]).sum() * (x * x * named["b"]).sum()).sum()

    first = tracing.gradient_function(tracer, "key", loss, weights, ["a", "b"])
    for _ in range(2):
        assert [grad.tolist() for grad in first(x)] == [[[8.0, -8.0]], [[-1.0, -1.0]]]
    weights["a"] += 1
    assert first(x)[1].tolist() == [[-1.0, -1.0]]
    turned = tracing.gradient_function(tracer, "key", loss, {"b": weights["b"], "a": weights["a"]}, ["a", "b"])
    assert [grad.tolist() for grad in turned(x)] == [[[8.0, -8.0]], [[-1.0, -1.0]]]
    assert len(tracer.traces) == 1

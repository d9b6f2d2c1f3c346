"""Differential privacy: what is clipped, how much noise there is, what it costs, and that nothing else gets out."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from flower.nodes import backend_on_nodes
from methods.by_hand import federation_for
from problems import TEST, TRAIN, run_tiny, tiny
from rich.console import Console

import dynafed
from dynafed import Method, UserError, tree
from dynafed.callbacks import Record, RunContext
from dynafed.engine.local import local_update
from dynafed.engine.server import server_broadcast
from dynafed.messages import Broadcast, Update
from dynafed.methods import METHODS, ServerContext, ServerOutput, ServerRuntime
from dynafed.methods.average import AverageSettings, RunningMean
from dynafed.methods.dynafed import Algorithm
from dynafed.privacy.accountant import noise_for, spent
from dynafed.privacy.dp import PrivateMean, clipped
from dynafed.privacy.settings import DpSettings
from dynafed.seeds import Seeds
from dynafed.synthesis.problem import SynthesisProblem
from dynafed.synthesis.settings import DynaFedSettings
from dynafed.terminal import ProgressBar, frame
from dynafed.tree import Tree

DYNAFED: dict[str, Any] = {
    "dynafed.trajectory": 3,
    "dynafed.segment": 1,
    "dynafed.targets": [1],
    "dynafed.samples": 8,
    "dynafed.iterations": 3,
    "dynafed.inner_steps": 2,
    "dynafed.finetune_steps": 2,
}


def gaussian_delta(epsilon: float, multiplier: float, releases: int) -> float:
    """The exact delta of the Gaussian mechanism (Balle and Wang 2018): releases add up to one with less noise."""
    mu = math.sqrt(releases) / multiplier

    def cdf(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("noise", "releases"), [(2.0, 1), (8.0, 10), (20.0, 60)])
def test_the_ledger_is_above_the_exact_cost_of_gaussian_noise_but_not_by_much(noise: float, releases: int) -> None:
    """Replacing a client moves the sum by twice the clipping norm: the multiplier that counts is half of ours."""
    epsilon = spent(noise, releases, 10, 10, 1e-5)
    assert gaussian_delta(epsilon, noise / 2, releases) <= 1e-5
    assert gaussian_delta(0.8 * epsilon, noise / 2, releases) > 1e-5


def test_sampling_makes_it_cheaper_and_rounds_dearer() -> None:
    assert spent(8.0, 10, 1000, 10, 1e-5) < 0.2 * spent(8.0, 10, 10, 10, 1e-5)
    assert spent(8.0, 10, 100, 10, 1e-5, local=True) == spent(8.0, 10, 10, 10, 1e-5)
    assert 0 == spent(8.0, 0, 10, 10, 1e-5) < spent(8.0, 5, 10, 10, 1e-5) < spent(8.0, 6, 10, 10, 1e-5)


def test_the_noise_is_as_small_as_the_budget_allows() -> None:
    noise = noise_for(4.0, 20, 100, 10, 1e-5)
    assert spent(noise, 20, 100, 10, 1e-5) <= 4.0 < spent(0.99 * noise, 20, 100, 10, 1e-5)


def test_a_client_s_change_is_clipped_before_it_is_sent() -> None:
    federation = federation_for(dp__noise=1.0, dp__clip=0.01)
    plain = federation_for()
    state = {step.name: step.init_server(federation.problem, {}) for step in federation.methods.steps}
    broadcast = server_broadcast(federation.server_side, 1, plain.problem.initial_model(), state)
    sent = local_update(federation.client_side, federation.client(2), broadcast)[0]
    honest = local_update(plain.client_side, plain.client(2), Broadcast(1, broadcast.model))[0]
    change, whole = (tree.difference(update.model, broadcast.model) for update in (sent, honest))
    assert tree.norm(change) == pytest.approx(0.01, rel=1e-4)
    for name in change:
        torch.testing.assert_close(change[name], whole[name] * 0.01 / tree.norm(whole), rtol=1e-3, atol=1e-7)
    assert sent.loss == 0


def test_clipping_by_hand() -> None:
    change = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert clipped(change, 6.0) == (change, True)
    smaller, whole = clipped(change, 1.0)
    assert not whole
    torch.testing.assert_close(smaller, {"a": torch.tensor([0.6]), "b": torch.tensor([0.8])})
    assert clipped(smaller, 1.0)[1] is False


def private_mean(values: list[float], noise: float, clip: float = 1.0, sampled: int = 4, **more: Any) -> Any:
    """The released model, of 10,000 numbers that were zero and a counter that was 7; and what it says beside it."""
    federation = federation_for()
    start = {"w": torch.zeros(10_000), "n": torch.tensor(7)}
    context = ServerContext(federation.problem, 3, start)
    mean = PrivateMean(context, DpSettings(noise=noise, **more), sampled, clip, noise)
    for client, value in enumerate(values):
        model = {"w": torch.full((10_000,), value / 100), "n": torch.tensor(9)}  # a change of norm `value`
        mean.add(Update(client, model, 1, 1, 0.0, 0.0))
    return mean.result()


def test_the_mean_of_what_is_clipped_over_all_that_were_sampled() -> None:
    """Norms 0.5, 1 and 50, of which the last is clipped again, however it came; the fourth client didn't come."""
    released = private_mean([0.5, 1.0, 50.0], noise=1e-9).model
    torch.testing.assert_close(released["w"], torch.full((10_000,), 2.5 / 4 / 100), rtol=1e-4, atol=1e-7)
    assert released["n"] == 7


def test_the_noise_has_its_size() -> None:
    released = private_mean([0.0], noise=3.0, clip=2.0).model["w"]
    assert float(released.std()) == pytest.approx(3.0 * 2.0 / 4, rel=0.03)
    assert abs(float(released.mean())) < 0.06
    adaptive = private_mean([0.0], noise=3.0, clip=2.0, clipping="adaptive")
    assert float(adaptive.model["w"].std()) == pytest.approx(3.0 * 2.0 / 4 / math.sqrt(0.9), rel=0.03)


def test_local_noise_is_in_each_update() -> None:
    federation = federation_for(dp__noise=2.0, dp__clip=0.5, dp__where="local", mlp__width=512)
    state = {step.name: step.init_server(federation.problem, {}) for step in federation.methods.steps}
    broadcast = server_broadcast(federation.server_side, 1, federation.problem.initial_model(), state)
    updates = [local_update(federation.client_side, federation.client(c), broadcast)[0] for c in (1, 2)]
    for update in updates:
        change = torch.cat([t.flatten() for t in tree.difference(update.model, broadcast.model).values()])
        assert float(change.std()) == pytest.approx(1.0, rel=0.05)
    assert tree.digest(updates[0].model) != tree.digest(updates[1].model)


def test_epsilon_is_in_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dynafed.cli import main

    source = tmp_path / "config.toml"
    source.write_text(tiny(dataset="digits", rounds=3, dp__epsilon=8.0).to_toml())
    assert main(["run", str(source), "--out", str(tmp_path / "r")]) == 0
    assert "privacy: epsilon" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert 0 < records[0]["epsilon"] < records[1]["epsilon"] < records[2]["epsilon"] == summary["epsilon"] <= 8
    assert summary["epsilon"] > 7.8
    assert summary["delta"] == 1e-5
    assert "Privacy loss" in (tmp_path / "r" / "report.html").read_text()
    assert not any("train_loss" in record for record in records)


def test_epsilon_is_in_the_bar(tmp_path: Path) -> None:
    with ProgressBar("", Console(file=io.StringIO())) as bar:
        spent_so_far = run_tiny(tmp_path / "r", rounds=2, dp__noise=2.0).summary["epsilon"]
    console = Console(file=io.StringIO(), width=120)
    console.print(frame(bar.progress))
    assert isinstance(console.file, io.StringIO)
    for shown in (console.file.getvalue(), str(bar.progress.run)):
        assert f"epsilon {spent_so_far:.2f}" in shown


def stop_after_two(run: RunContext, record: Record) -> None:
    if record["round"] == 2:
        run.stop("enough")


@pytest.mark.parametrize("changes", [{"dp.clipping": "adaptive"}, {"dp.where": "local"}])
def test_the_same_bits_on_flower_with_two_workers_and_after_a_resume(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = {"dp.noise": 2.0, "rounds": 4} | changes
    once = run_tiny(tmp_path / "once", **changes)
    two = run_tiny(tmp_path / "two", **changes, workers=2)
    flower = dynafed.run(
        tiny(**changes, engine="flower"), train=TRAIN, test=TEST, out=tmp_path / "flower", backend=backend_on_nodes
    )
    dynafed.run(tiny(**changes), train=TRAIN, test=TEST, out=tmp_path / "resumed", callbacks=[stop_after_two])
    resumed = dynafed.resume(tmp_path / "resumed", train=TRAIN, test=TEST)
    for other in (two, flower, resumed):
        assert tree.digest(other.state.model) == tree.digest(once.state.model)
        assert tree.digest(other.state.server["dp"]) == tree.digest(once.state.server["dp"])
        assert other.summary["epsilon"] == once.summary["epsilon"]
    assert int(once.state.server["dp"]["releases"]) == 4
    if "dp.clipping" in changes:
        assert len({record["clip_norm"] for record in once.history}) == 4


def test_a_spent_budget_ends_the_run(tmp_path: Path) -> None:
    run_tiny(tmp_path / "r", rounds=3, dp__epsilon=8.0)
    with pytest.raises(UserError, match=r"dp.epsilon = 8 is spent after 3 rounds"):
        dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST, changes={"rounds": 4})
    run_tiny(tmp_path / "s", rounds=3, dp__noise=2.0)
    assert len(dynafed.resume(tmp_path / "s", train=TRAIN, test=TEST, changes={"rounds": 4}).history) == 4


class Released(Method):
    """Keeps what the noisy average released."""

    name = "test-released"
    models: list[Tree] = []  # noqa: RUF012

    def server_step(self, model: Tree, state: Tree, server: ServerContext) -> ServerOutput:
        self.models.append(tree.clone(server.average))
        return ServerOutput(model, state)


def test_dynafed_and_the_mean_are_post_processing_of_what_was_released(tmp_path: Path) -> None:
    """From the released models alone, without data or clients, come the same models, bit for bit."""
    try:
        result = run_tiny(tmp_path / "r", method="test-released+dynafed+average", dp__noise=0.5, **DYNAFED)
    finally:
        METHODS.remove("test-released")
    problem = result.federation.problem
    settings = result.federation.config.section("dynafed", DynaFedSettings)
    algorithm = Algorithm(settings)
    alone = SynthesisProblem(problem.network, problem.shape, problem.classes, Seeds(0), accelerate=False)
    state = algorithm.initial(alone, problem.initial_model())
    running = RunningMean(AverageSettings())
    means: Tree = {}
    refined = []
    for number, model in enumerate(Released.models, 1):
        output = algorithm.refine(alone, model, state, number, ServerRuntime())
        state = output.state
        refined.append(output.model)
        means = running.add(means, output.model, number)
    assert tree.digest(refined[-1]) == tree.digest(result.state.model)
    assert tree.digest(refined[-1]) != tree.digest(Released.models[-1])
    assert tree.digest(running.mean(means, refined[-1])) == tree.digest(result.state.final_model)
    plain = run_tiny(tmp_path / "p", dp__noise=0.5)
    assert plain.summary["epsilon"] == result.summary["epsilon"]


def test_a_secret_changes_the_noise(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("8f2a")
    known = run_tiny(tmp_path / "a", rounds=1, dp__noise=1.0)
    secret = run_tiny(tmp_path / "b", rounds=1, dp__noise=1.0, dp__secret=str(tmp_path / "secret"))
    assert tree.digest(known.state.model) != tree.digest(secret.state.model)
    with pytest.raises(UserError, match="can't be read"):
        run_tiny(tmp_path / "c", rounds=1, dp__noise=1.0, dp__secret=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp.delta": 1e-6}, "needs either dp.epsilon"),
        ({"dp.epsilon": 8.0, "dp.noise": 1.0}, "needs either dp.epsilon"),
        ({"dp.epsilon": 8.0, "dp.delta": 0.1, "clients": 80}, "promises nothing"),
        ({"dp.noise": 1.0, "method": "scaffold", "optimizer": "sgd"}, "scaffold's clients send something beside"),
        ({"dp.noise": 1.0, "method": "fedmix"}, "fedmix's clients send something beside"),
        ({"dp.noise": 1.0, "method": "median"}, "dp and median both replace the average"),
        ({"dp.noise": 1.0, "method": "feddf", "server_samples": 40}, "feddf learns from each client's model"),
        ({"dp.noise": 1.0, "weighting": "examples"}, "set weighting = 'uniform'"),
        ({"dp.noise": 1.0, "dp.where": "local", "dp.clipping": "adaptive"}, "nobody sees the norms"),
    ],
)
def test_what_would_break_the_promise_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny(**changes)

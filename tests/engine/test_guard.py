"""Updates that are finite and far too large: what becomes of them, and that honest ones never meet the guard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import TEST, TRAIN, run_tiny, tiny

import dynafed
from dynafed import Config, RunFailed, tree
from dynafed.cli import main
from dynafed.engine.federation import Federation
from dynafed.engine.guard import WINDOW, NormGuard
from dynafed.engine.processes import ProcessBackend
from dynafed.engine.server import server_update
from dynafed.engine.trust import resume_command
from dynafed.messages import Broadcast, Update

ZERO = {"w": torch.zeros(4)}


def update(client: int, norm: float, examples: int = 1, **extras: Any) -> Update:
    return Update(client, {"w": torch.full((4,), norm / 2)}, examples, 1, 0.0, 0.0, extras)


def after(*norms: float, mode: str = "reject", max_norm: float = 0.0) -> NormGuard:
    """A guard in the round after one with these updates."""
    first = NormGuard(ZERO)
    for client, norm in enumerate(norms):
        first.judge(update(client, norm))
    return NormGuard(ZERO, first.norms(), mode, max_norm)


def test_a_hundred_times_the_median_is_accepted_and_more_is_not() -> None:
    guard = after(1.0, 2.0, 50.0)
    assert guard.judge(update(7, 199.0))[1] is None
    _, reason = guard.judge(update(8, 201.0))
    assert reason == "an update of norm 201 is too large: at most 200"


def test_half_of_the_updates_cannot_raise_the_limit() -> None:
    assert after(1.0, 1e6).judge(update(0, 101.0))[1]


def test_what_is_no_larger_than_the_model_is_never_too_large() -> None:
    model = {"w": torch.full((4,), 50.0)}
    guard = NormGuard(model, {"model": torch.tensor([1e-9], dtype=torch.float64)})
    assert guard.judge(Update(0, {"w": torch.zeros(4)}, 1, 1, 0.0, 0.0))[1] is None


def test_clipping_keeps_the_direction() -> None:
    clipped, reason = after(1.0, mode="clip").judge(update(0, 1e30))
    assert reason is None
    torch.testing.assert_close(clipped.model["w"], torch.full((4,), 50.0))
    assert after(1.0, mode="clip", max_norm=2.0).judge(update(0, 8.0))[0].model["w"][0] == 1.0


def test_nothing_is_too_large_if_the_user_says_so() -> None:
    assert after(1.0, mode="accept").judge(update(0, 1e30))[1] is None


def test_what_is_sent_beside_the_model_is_judged_by_itself() -> None:
    guard = NormGuard(ZERO)
    guard.judge(update(0, 1.0, scaffold={"c": torch.ones(4)}))
    guard = NormGuard(ZERO, guard.norms())
    _, reason = guard.judge(update(1, 1.0, scaffold={"c": torch.full((4,), 1e10)}))
    assert reason is not None
    assert reason.startswith("what scaffold sent beside the model, of norm 2e+10 is too large")


def test_the_window_is_bounded() -> None:
    norms: tree.Tree = {}
    for _ in range(2 * WINDOW):
        guard = NormGuard(ZERO, norms)
        guard.judge(update(0, 1.0))
        norms = guard.norms()
    assert norms["model"].tolist() == [1.0] * WINDOW


def test_in_the_first_round_the_others_tell() -> None:
    federation = Federation.create(tiny(), train=TRAIN, test=TEST)
    updates = [update(0, 1.0), update(1, 1e5), update(2, 1.0)]
    outcome = server_update(federation.server_side, Broadcast(1, ZERO), {}, updates)
    assert outcome.accepted == []
    assert outcome.model is ZERO
    assert outcome.rejected[0]["client"] == 1
    again = server_update(federation.server_side, Broadcast(1, ZERO), {}, updates, norms=outcome.norms)
    assert again.accepted == [0, 2]
    assert again.rejected[0]["client"] == 1


def test_claimed_examples_must_be_those_that_the_client_holds() -> None:
    federation = Federation.create(tiny(weighting="examples"), train=TRAIN, test=TEST)
    held = [len(federation.client(client).y) for client in (0, 1)]
    updates = [update(0, 1.0, held[0]), update(1, 1.0, 2**62)]
    outcome = server_update(federation.server_side, Broadcast(1, ZERO), {}, updates)
    assert outcome.accepted == [0]
    assert outcome.rejected == [{"client": 1, "reason": f"it claims {2**62} examples and holds {held[1]}"}]
    unknown = replace(federation.server_side, client_size=lambda client: None)
    outcome = server_update(unknown, Broadcast(1, ZERO), {}, updates)
    assert outcome.accepted == [0]
    assert "a number of examples of norm 4.61e+18 is too large" in outcome.rejected[0]["reason"]


def test_clients_of_very_different_sizes_all_count() -> None:
    sizes = {0: 1, 1: 1, 2: 5000}
    for known in (True, False):
        federation = Federation.create(tiny(weighting="examples"), train=TRAIN, test=TEST)
        size = sizes.get if known else lambda client: None
        side = replace(federation.server_side, client_size=size)
        norms: tree.Tree = {}
        for _ in range(2):
            updates = [update(client, 1.0, examples) for client, examples in sizes.items()]
            outcome = server_update(side, Broadcast(1, ZERO), {}, updates, norms=norms)
            assert outcome.accepted == [0, 1, 2]
            norms = outcome.norms


class Attacked(ProcessBackend):
    """One client sends a huge update whenever it is sampled."""

    value, liar = 3.4e38, 3

    def train(self, *given: Any) -> Iterator[tuple[Update, tree.Tree]]:
        for made, state in super().train(*given):
            huge = {name: torch.full_like(tensor, self.value) for name, tensor in made.model.items()}
            yield (replace(made, model=huge) if made.client == self.liar else made), state


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedavgm", "feddyn", "fedadam"])
def test_a_huge_update_costs_nothing_but_itself(method: str, tmp_path: Path) -> None:
    config = tiny(method=method, rounds=5, participation=1.0, checkpoint_every=1)
    result = dynafed.run(config, train=TRAIN, test=TEST, out=tmp_path / "r", backend=Attacked)
    assert all(record["clients"] == [0, 1, 2, 4, 5, 6, 7] for record in result.history)
    assert all([each["client"] for each in record["rejected"]] == [3] for record in result.history)
    assert max(float(tensor.abs().max()) for tensor in result.state.model.values()) < 100


def test_the_guard_resumes_with_the_run(tmp_path: Path) -> None:
    """The norms of the rounds before are part of the checkpoint."""

    class Late(Attacked):
        value = 1000.0  # too large against the median, but not against nothing

    config = tiny(rounds=4, participation=1.0, checkpoint_every=1)
    data: dict[str, Any] = {"train": TRAIN, "test": TEST}
    whole = dynafed.run(config, **data, out=tmp_path / "whole", backend=Late)
    dynafed.run(config.replace(rounds=2), **data, out=tmp_path / "part", backend=Late)
    resumed = dynafed.resume(tmp_path / "part", changes={"rounds": 4}, **data, backend=Late)
    assert tree.digest(resumed.state.model) == tree.digest(whole.state.model)
    assert tree.digest(resumed.state.norms) == tree.digest(whole.state.norms)
    assert [record["rejected"] for record in resumed.history] == [record["rejected"] for record in whole.history]
    assert whole.history[-1]["repeats"] == 0


def test_honest_runs_do_not_meet_the_guard(tmp_path: Path) -> None:
    for number, changes in enumerate(({"lr": 1.0, "optimizer": "sgd"}, {"partition": "dirichlet", "lr": 0.1})):
        guarded = run_tiny(tmp_path / f"{number}", **changes)
        free = run_tiny(tmp_path / f"{number}-free", **changes, large_updates="accept")
        assert tree.digest(guarded.state.model) == tree.digest(free.state.model)
        assert not any(record["rejected"] for record in guarded.history)


def test_a_server_step_that_is_absurd_is_taken_back(tmp_path: Path) -> None:
    result = run_tiny(tmp_path / "r", method="fedadam", fedadam__lr=1e20, max_failed_rounds=0)
    assert all(record["skipped"] for record in result.history)
    assert "fedadam returned no model (a step of norm" in result.history[0]["rejected"][-1]["reason"]
    assert max(float(tensor.abs().max()) for tensor in result.state.model.values()) < 100


def test_too_many_failed_rounds_in_a_row_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"dropout": 1.0, "max_repeats": 0, "max_failed_rounds": 3}
    with pytest.raises(RunFailed, match=r"3 rounds in a row failed .* round 3; no client sent an update; continue"):
        run_tiny(tmp_path / "r", **changes)
    assert (tmp_path / "r" / "checkpoint" / "round-000003").is_dir()
    assert not (tmp_path / "r" / "summary.json").exists()
    whole = dynafed.resume(tmp_path / "r", train=TRAIN, test=TEST, changes={"max_failed_rounds": 0})
    assert len(whole.history) == 6
    with pytest.raises(RunFailed, match="2 rounds in a row failed"):  # all that there are
        run_tiny(tmp_path / "short", **changes, rounds=2)
    settings = [f"-s{key}={value}" for key, value in changes.items()]
    assert main(["run", "demo", *settings, "-sworkers=1", "--out", str(tmp_path / "s")]) == 1
    assert "3 rounds in a row failed" in capsys.readouterr().err


def test_older_folders_count_as_the_same_run() -> None:
    assert not {"large_updates", "max_update_norm"} & Config().deciding().keys()
    assert Config(large_updates="clip").deciding()["large_updates"] == "clip"


def test_whole_numbers_beside_the_model_are_judged_as_numbers_of_examples_are() -> None:
    def counts(client: int, most: int) -> Update:
        return update(client, 1.0, fedgen={"counts": torch.tensor([most, 1])})

    assert NormGuard(ZERO).judge(counts(0, 2**62))[1]
    first = NormGuard(ZERO, mode="clip")
    for client in range(3):
        assert first.judge(counts(client, 50))[1] is None
    guard = NormGuard(ZERO, first.norms(), "clip")
    assert guard.judge(counts(0, 49_000))[1] is None
    assert "what fedgen sent beside the model" in (guard.judge(counts(1, 51_000))[1] or "")


def test_the_command_that_continues_a_run_asks_for_trust_where_it_is_needed(tmp_path: Path) -> None:
    assert resume_command(tmp_path).endswith(tmp_path.name)
    (tmp_path / "config.toml").write_text('method = "fedavg"')
    assert not resume_command(tmp_path).endswith("--trust")
    (tmp_path / "config.toml").write_text('model = "package.module:factory"')
    assert resume_command(tmp_path).endswith(" --trust")


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("steps", [0, -3, 5, 2**62])
def test_claimed_steps_must_be_possible_where_they_count(steps: int, optimizer: str) -> None:
    """FedNova divides by them: 0 of them, or a huge number, spoilt every round, or ended the run."""
    federation = Federation.create(tiny(method="fednova", optimizer=optimizer), train=TRAIN, test=TEST)
    side, model = federation.server_side, federation.problem.initial_model()
    moved = {name: tensor + 0.01 for name, tensor in model.items()}
    sizes = [len(federation.client(client).y) for client in range(4)]
    updates = [Update(client, moved, size, -(-size // 16), 0.0, 0.0) for client, size in enumerate(sizes)]
    outcome = server_update(
        side, Broadcast(1, model), {"fednova": {}}, [*updates[:3], replace(updates[3], steps=steps)]
    )
    assert outcome.accepted == [0, 1, 2]
    reason = f"it claims {steps} steps, and its {sizes[3]} examples make 1 to {-(-sizes[3] // 16)}"
    assert outcome.rejected == [{"client": 3, "reason": reason}]
    assert server_update(side, Broadcast(1, model), {"fednova": {}}, updates).accepted == [0, 1, 2, 3]


def test_names_that_clients_send_are_printable() -> None:
    federation = Federation.create(tiny(), train=TRAIN, test=TEST)
    side, model = federation.server_side, federation.problem.initial_model()
    sent = Update(0, model | {"\x1b[2J\nround 9 of 9": torch.zeros(1)}, 9, 1, 0.0, 0.0)
    (entry,) = server_update(side, Broadcast(1, model), {"fedavg": {}}, [sent]).rejected
    assert entry["reason"] == "'?[2J?round 9 of 9' is not expected"

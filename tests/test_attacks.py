"""Attackers: who they are, what they send, and that every output says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flower.nodes import backend_on_nodes
from methods.by_hand import federation_for, sent
from problems import TEST, TRAIN, run_tiny, tiny

import dynafed
from dynafed import Config, UserError, tree
from dynafed.attacks import HUGE, KINDS, draw_attackers, with_trigger
from dynafed.callbacks import Record, RunContext
from dynafed.cli import main
from dynafed.engine.local import local_update
from dynafed.messages import Broadcast, Update
from dynafed.seeds import Seeds
from dynafed.tree import Tree


def update_of(kind: str, method: str = "fedavg", **changes: Any) -> tuple[Update, Update, Tree]:
    """What an attacker sends, what it would send if it were honest, and the broadcast model."""
    honest = federation_for(method, seed=3)
    attacked = federation_for(method, seed=3, attack__kind=kind, attack__share=0.5, **changes)
    assert attacked.attack is not None
    state = honest.methods.steps[0].init_server(honest.problem, honest.problem.initial_model())
    broadcast = sent(honest, state, 2)
    client = attacked.attack.clients[0]
    pair = [local_update(each.client_side, each.client(client), broadcast)[0] for each in (attacked, honest)]
    return pair[0], pair[1], broadcast.model


@pytest.mark.parametrize(("kind", "factor"), [("sign-flip", -10.0), ("scaled", 10.0)])
def test_a_multiple_of_the_update_and_of_what_is_sent_beside_it(kind: str, factor: float) -> None:
    attacked, honest, start = update_of(kind, "scaffold")
    for name, change in tree.difference(honest.model, start).items():
        torch.testing.assert_close(attacked.model[name] - start[name], factor * change)
    for name, extra in honest.extras["scaffold"].items():
        torch.testing.assert_close(attacked.extras["scaffold"][name], factor * extra)


def test_noise_of_ten_times_the_update_s_size() -> None:
    attacked, honest, start = update_of("gaussian")
    ratio = tree.norm(tree.difference(attacked.model, start)) / tree.norm(tree.difference(honest.model, start))
    assert 8 < ratio < 12


def test_useless_numbers() -> None:
    huge, _, start = update_of("huge")
    assert all((tensor == start[name] + HUGE).all() for name, tensor in huge.model.items())
    assert all(tensor.isnan().all() for tensor in update_of("nan")[0].model.values())


def test_a_stale_model_is_the_initial_one() -> None:
    federation = federation_for(attack__kind="stale", attack__share=1.0)
    start = federation.problem.initial_model()
    moved = tree.map_tensors(lambda tensor: tensor + 1, start)
    update, _ = local_update(federation.client_side, federation.client(0), Broadcast(5, moved))
    assert tree.digest(update.model) == tree.digest(start)


def test_a_little_is_enough_by_hand() -> None:
    """Two colluders: the mean of their models less 1.5 standard deviations, which is half their distance."""
    federation = federation_for(attack__kind="little-is-enough", attack__share=0.25)
    assert federation.attack is not None
    one, other = federation.attack.clients
    honest = federation_for()
    broadcast = sent(honest)
    models = [local_update(honest.client_side, honest.client(c), broadcast)[0].model for c in (one, other)]
    got = local_update(federation.client_side, federation.client(one), broadcast)[0].model
    for name, tensor in got.items():
        a, b = models[0][name], models[1][name]
        torch.testing.assert_close(tensor, (a + b) / 2 - 1.5 * (a - b).abs() / 2)


def test_poisoned_data() -> None:
    flipped = federation_for(attack__kind="label-flip", attack__share=1.0)
    view = flipped.client(2)
    assert flipped.attack is not None
    assert torch.equal(flipped.attack.poison(view).y, 3 - view.y)
    backdoored = federation_for(attack__kind="backdoor", attack__share=1.0, attack__target=2)
    assert backdoored.attack is not None
    poisoned = backdoored.attack.poison(view)
    marked = (poisoned.x != view.x).any(1)
    assert 0 < marked.sum() < len(view.y)
    assert torch.equal(poisoned.x[marked], with_trigger(view.x)[marked])
    assert (poisoned.y[marked] == 2).all()
    assert torch.equal(poisoned.y[~marked], view.y[~marked])
    image = with_trigger(torch.zeros(2, 1, 5, 5))
    assert image[0, 0].count_nonzero() == 9
    assert image[0, 0, 2:, 2:].count_nonzero() == 9


def test_who_attacks_depends_on_the_seed_alone() -> None:
    assert draw_attackers(0.2, 20, Seeds(1)) == draw_attackers(0.2, 20, Seeds(1)) != draw_attackers(0.2, 20, Seeds(2))
    assert len(draw_attackers(0.3, 20, Seeds(1))) == 6
    assert len(draw_attackers(0.001, 20, Seeds(1))) == 1


def test_every_output_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "config.toml"
    attack = {"attack.kind": "backdoor", "attack.rounds": [2, 3], "attack.share": 0.5}
    source.write_text(tiny(dataset="digits", **attack).to_toml())
    assert main(["run", str(source), "--out", str(tmp_path / "r")]) == 0
    words = "an experiment with attackers: 50 % of the clients, backdoor, in rounds 2 to 3"
    assert words in capsys.readouterr().out.replace("\n", " ")
    assert words in (tmp_path / "r" / "report.html").read_text()
    records = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["attack"]["kind"] == "backdoor"
    assert len(summary["attack"]["clients"]) == 4
    for record in records:
        present = set(summary["attack"]["clients"]) & set(record["clients"])
        assert set(record["attackers"]) == (present if record["round"] in (2, 3) else set())
        assert 0 <= record["attack_success"] <= 1
    assert main(["runs", str(tmp_path)]) == 0
    assert "backdoor 50 %" in capsys.readouterr().out
    assert main(["compare", str(source), "--methods", "fedavg", "--out", str(tmp_path / "c")]) == 0
    assert "backdoor 50 %" in capsys.readouterr().out
    assert words in (tmp_path / "c" / "report.html").read_text()


def test_without_a_section_nothing_changes(tmp_path: Path) -> None:
    plain = run_tiny(tmp_path / "a")
    off = run_tiny(tmp_path / "b", attack__kind="none")
    later = run_tiny(tmp_path / "c", attack__kind="huge", attack__rounds=[7, 9])
    assert tree.digest(plain.state.model) == tree.digest(off.state.model) == tree.digest(later.state.model)
    assert "attack" not in (tmp_path / "a" / "config.toml").read_text()
    assert "attackers" not in plain.history[0]
    assert plain.summary.keys() == off.summary.keys()


def stop_after_two(run: RunContext, record: Record) -> None:
    if record["round"] == 2:
        run.stop("enough")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_the_same_bits_on_flower_with_two_workers_and_after_a_resume(tmp_path: Path, kind: str) -> None:
    changes = {"attack.kind": kind, "attack.share": 0.5, "rounds": 4}
    once = run_tiny(tmp_path / "once", **changes)
    assert any(record["attackers"] for record in once.history)
    flower = dynafed.run(
        tiny(**changes, engine="flower"), train=TRAIN, test=TEST, out=tmp_path / "flower", backend=backend_on_nodes
    )
    assert tree.digest(flower.state.model) == tree.digest(once.state.model)
    if kind in ("gaussian", "little-is-enough"):
        two = run_tiny(tmp_path / "two", **changes, workers=2)
        assert tree.digest(two.state.model) == tree.digest(once.state.model)
        dynafed.run(tiny(**changes), train=TRAIN, test=TEST, out=tmp_path / "resumed", callbacks=[stop_after_two])
        resumed = dynafed.resume(tmp_path / "resumed", train=TRAIN, test=TEST)
        assert tree.digest(resumed.state.model) == tree.digest(once.state.model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attack.kind": "sign_flip"}, "did you mean 'sign-flip'"),
        ({"attack.kind": "huge", "attack.rounds": [3]}, "must be the first and the last round"),
        ({"attack.kind": "huge", "attack.rounds": [3, 2]}, "must be the first and the last round"),
        ({"attack.share": 2.0}, "attack.share = 2.0 must be at most 1"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny(**changes)


def test_a_target_beyond_the_classes_is_refused() -> None:
    with pytest.raises(UserError, match=r"attack.target = 4 is no class: the last one is 3"):
        _ = federation_for(attack__kind="backdoor", attack__target=4).attack


def test_a_bare_nan_on_the_command_line_is_a_kind() -> None:
    assert Config.load("demo", {"attack.kind": float("nan")}).to_dict()["attack"]["kind"] == "nan"

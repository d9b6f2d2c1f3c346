"""Read run folders into plain dataclasses; what a killed run left half written is skipped and noted."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynafed.config import parse_toml
from dynafed.engine.files import check_links
from dynafed.errors import UserError
from dynafed.progress import METRICS
from dynafed.report.clean import clean_config, clean_record, clean_summary, is_number, plain

DEPTH = 3
"""How many levels below a given folder runs are looked for."""

SYNTHESIS = ("seconds_synthesis", "matching_loss", "inner_lr")
"""Keys that only the record of a round with a synthesis has."""

LAST = 5
"""The final accuracy is the mean over this many last evaluated rounds."""


@dataclass(frozen=True)
class Partition:
    """How many samples of each class the shown clients hold."""

    classes: int
    clients: int
    shown: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    """Of the shown clients; empty if they have none."""


@dataclass(frozen=True)
class Run:
    """One run folder: its flat config (`mlp.width`), its rounds in order, and what else it holds."""

    path: Path
    config: Mapping[str, Any]
    rounds: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any] | None = None
    partition: Partition | None = None
    blocks: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether the run came to its end, and was not resumed for more rounds since."""
        if self.summary is None:
            return False
        told = self.summary.get("rounds")
        return bool(self.summary.get("stopped")) or self.planned <= max(self.done, told if isinstance(told, int) else 0)

    @property
    def done(self) -> int:
        """The last round that is over."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    @property
    def planned(self) -> int:
        """How many rounds there will be."""
        planned = self.config.get("rounds")
        return planned if isinstance(planned, int) and planned > 0 else max(1, self.done)

    @property
    def metric(self) -> str:
        """The measure that the run is summed up by."""
        return next((key for key in METRICS if self.values(key)), METRICS[0])

    @property
    def lower_is_better(self) -> bool:
        """Whether that measure should fall."""
        return self.metric == "rmse"

    def points(self, key: str) -> list[tuple[int, float | None]]:
        """(round, value) wherever `key` was measured; None where the value wasn't finite."""
        return [(record["round"], record[key]) for record in self.rounds if key in record]

    def values(self, key: str) -> list[float]:
        """The finite values of `key`, in the order of rounds."""
        return [value for _, value in self.points(key) if value is not None]

    def total(self, key: str) -> float | None:
        """The sum of `key` over all rounds, None where it was never measured."""
        values = self.values(key)
        return sum(values) if values else None

    @property
    def syntheses(self) -> list[int]:
        """The rounds that made synthetic data."""
        return [record["round"] for record in self.rounds if any(key in record for key in SYNTHESIS)]

    def last(self, key: str) -> Any:
        """The value of `key` in the last round that has it."""
        return next((record[key] for record in reversed(self.rounds) if record.get(key)), None)

    def final_at(self, round_num: int | None = None) -> float | None:
        """`final` as it would be after that round; without one, as it is."""
        if round_num is None or round_num >= self.done:
            return self.final
        before = [value for at, value in self.points(self.metric) if value is not None and at <= round_num][-LAST:]
        return statistics.fmean(before) if before else None

    def mean(self, key: str) -> float | None:
        """The mean of `key` over the rounds that have it."""
        values = self.values(key)
        return statistics.fmean(values) if values else None

    @property
    def final(self) -> float | None:
        """The final accuracy (or other metric): of the summary, else the mean of the last evaluated rounds so far."""
        return self._from_summary(f"final_{self.metric}", lambda last: statistics.fmean(last))

    @property
    def final_std(self) -> float | None:
        """The standard deviation behind `final`."""
        return self._from_summary("final_std", lambda last: statistics.pstdev(last))

    @property
    def best(self) -> tuple[int, float] | None:
        """(round, value) of the best evaluated round, the first if there are several."""
        seen = [(round_num, value) for round_num, value in self.points(self.metric) if value is not None]
        choose = min if self.lower_is_better else max
        return choose(seen, key=lambda point: point[1]) if seen else None

    @property
    def target(self) -> float | None:
        """The accuracy that the run was to reach, if one was set."""
        target = (self.summary or {}).get("target_accuracy") or self.config.get("target_accuracy")
        return float(target) if target else None

    @property
    def rounds_to_target(self) -> int | None:
        """The first round that reached the target."""
        target = self.target
        reached = (
            round_num for round_num, value in self.points("accuracy") if value is not None and value >= (target or 0)
        )
        return None if target is None else next(reached, None)

    def _from_summary(self, key: str, else_from: Any) -> float | None:
        told = (self.summary or {}).get(key) if self.finished else None
        if isinstance(told, int | float) and math.isfinite(told):
            return float(told)
        last = self.values(self.metric)[-LAST:]
        return float(else_from(last)) if last else None


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders among `paths` and, for a folder that is none itself, inside it; each once, in order."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"no such folder: {path}")
        inside = list(_inside(path, DEPTH))
        if not inside:
            raise UserError(
                f"{path} is not a run folder and holds none: a run has config.toml and metrics.jsonl, partition.json or"
                " summary.json"
            )
        for run in inside:
            found.setdefault(run.resolve(), run)
    if not found:
        raise UserError("no run folder given")
    return list(found.values())


def load_run(path: Path) -> Run:
    """Read one run folder."""
    check_links(path)
    notes: list[str] = []
    try:
        config = clean_config(parse_toml((path / "config.toml").read_bytes(), path / "config.toml"), notes)
    except OSError as error:
        raise UserError(f"{path / 'config.toml'} can't be read: {error}") from None
    summary = _json(path / "summary.json", notes)
    blocks = _json(path / "report.json", notes)
    class_names = summary.get("class_names") if isinstance(summary, dict) else None
    if attack := describe_attack(config):
        notes.append(attack)
    return Run(
        path=path,
        config=config,
        rounds=_rounds(path / "metrics.jsonl", notes),
        summary=clean_summary(summary),
        partition=_partition(_json(path / "partition.json", notes), class_names, notes),
        blocks=tuple(blocks if isinstance(blocks, list) else [] if blocks is None else [blocks]),
        notes=tuple(notes),
    )


def describe_attack(config: Mapping[str, Any]) -> str:
    """Who attacks in a run, in words, from its flat config; nothing if nobody does."""
    kind, share = config.get("attack.kind", "none"), config.get("attack.share", 0.2)
    if not name_attack(kind, share):
        return ""
    rounds = config.get("attack.rounds")
    when = f"rounds {rounds[0]} to {rounds[1]}" if isinstance(rounds, list) and len(rounds) == 2 else "every round"
    return f"an experiment with attackers: {100 * share:.3g} % of the clients, {kind}, in {when}"


def name_attack(kind: str, share: float) -> str:
    """An attack in a table's cell; nothing if there is none."""
    return f"{kind} {100 * share:.3g} %" if kind != "none" and share and is_number(share) else ""


def read_partition(folder: Path) -> Partition | None:
    """What partition.json says, if it can be read."""
    return _partition(_json(folder / "partition.json", []), None, [])


def read_synthesis(folder: Path) -> dict[int, float]:
    """The matching loss of each iteration of the last synthesis, as far as it got."""
    losses: dict[int, float] = {}
    file = folder / "synthesis.jsonl"
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            found = dict(json.loads(line))
            losses |= {
                int(number): float(loss) if is_number(loss) else math.nan for number, loss in plain(found).items()
            }
        except (ValueError, TypeError, RecursionError):
            continue
    return losses


def snapshots(folder: Path) -> list[tuple[int, Path]]:
    """(iteration, picture) of the synthetic samples as they came into being, in order; links and pipes don't count."""
    named = ((path.stem.removeprefix("synthetic-"), path) for path in folder.glob("synthetic-*.png"))
    return sorted((int(number), path) for number, path in named if number.isdecimal() and is_plain_file(path))


def is_plain_file(path: Path) -> bool:
    """Whether it is a file, and no link to one."""
    return path.is_file() and not path.is_symlink()


def _inside(path: Path, depth: int) -> Iterator[Path]:
    if (path / "config.toml").is_file() and any(
        (path / name).is_file() for name in ("metrics.jsonl", "partition.json", "summary.json")
    ):
        yield path
    elif depth and path.is_dir():
        for child in sorted(path.iterdir()):
            if child.is_dir():
                yield from _inside(child, depth - 1)


def _json(path: Path, notes: list[str]) -> Any:
    if not path.is_file():
        return None
    try:
        return plain(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, RecursionError):
        notes.append(f"{path.name} is not valid JSON and was left out")
        return None


def _rounds(path: Path, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    """The rounds in order. A round that stands twice (a resumed run) counts as it was last written."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    rounds: dict[int, dict[str, Any]] = {}
    broken = 0
    for index, line in enumerate(lines):
        try:
            record = clean_record(plain(json.loads(line)))
            if record.get("bytes_enrolment"):  # what clients send once goes up in the first round
                record["bytes_up"] = (record.get("bytes_up") or 0) + record["bytes_enrolment"]
            rounds[record["round"]] = record
        except (ValueError, RecursionError):
            # The last line is cut short when a run is killed while it writes: that is no damage.
            broken += bool(line.strip()) and index < len(lines) - 1
    if broken:
        notes.append(f"metrics.jsonl has {broken} unreadable line{'s' * (broken > 1)}, left out")
    ordered = [rounds[index] for index in sorted(rounds)]
    _split_off_synthesis(ordered)
    return tuple(ordered)


def _split_off_synthesis(rounds: Sequence[dict[str, Any]]) -> None:
    """Move the time of a synthesis from `seconds_server` to `seconds_synthesis`.

    Where the run didn't measure it, it is what the round took beyond the median of the server's other rounds.
    """
    made = [record for record in rounds if any(key in record for key in SYNTHESIS)]
    usual = statistics.median([r["seconds_server"] for r in rounds if r.get("seconds_server") and r not in made] or [0])
    for record in made:
        whole = record.get("seconds_server") or 0.0
        took = min(whole, record.get("seconds_synthesis") or max(0.0, whole - usual))
        if took:
            record |= {"seconds_synthesis": took, "seconds_server": whole - took}


def _partition(raw: Any, class_names: Any, notes: list[str]) -> Partition | None:
    if raw is None:
        return None
    try:
        names = tuple(str(name) for name in raw.get("class_names") or raw.get("names") or class_names or ())
        counts = tuple(tuple(int(count) for count in row) for row in raw["counts"])
        shown = tuple(int(client) for client in raw.get("shown") or range(len(counts)))
        classes = int(raw["classes"])
        if len(shown) != len(counts) or any(len(row) != classes or min(row, default=0) < 0 for row in counts):
            raise ValueError("shapes differ, or there are fewer samples than none")
        if not counts or classes < 2:  # nothing is known, or there are no classes
            return None
        called = tuple(str(name) for name in raw.get("client_names") or ())
        clients = int(raw.get("clients", len(shown)))
        return Partition(
            classes,
            clients,
            shown,
            counts,
            names if len(names) == classes else (),
            called if len(called) == len(shown) else (),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        notes.append("partition.json does not hold what it should and was left out")
        return None

"""What the loggers have in common: what of a run is logged, when, and how a resumed run is found again."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dynafed.callbacks import Callback, Record, RunContext
from dynafed.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from dynafed.report.load import Partition

IDS = "loggers.json"
"""The file in a run's folder with each logger's own name for the run, for a resume."""

Rows = Sequence[Sequence[Any]]


class RunLogger(Callback):
    """Logs config, partition, curves, synthetic images and the final table. A subclass says where to."""

    name: ClassVar[str] = ""
    """The callback's name in a config, the extra's name, and that of the package to import."""

    def __init__(self) -> None:
        if importlib.util.find_spec(self.name) is None:
            raise UserError(f"logging to {self.name} needs a package: pip install 'dynafed[{self.name}]'")
        self.is_open = False

    def open(self, run: RunContext, config: Mapping[str, Any], before: str | None) -> str:
        """Begin to log, or go on with the run that is known as `before`; returns what it is known as."""
        raise NotImplementedError

    def log_numbers(self, values: Mapping[str, float], round_num: int) -> None:
        """Add a round to curves."""
        raise NotImplementedError

    def log_curve(self, name: str, points: Mapping[int, float]) -> None:
        """Add a whole curve over the iterations of a synthesis."""
        raise NotImplementedError

    def log_image(self, name: str, image: Image, step: int) -> None:
        """Add a picture."""
        raise NotImplementedError

    def log_table(self, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Add a table."""
        raise NotImplementedError

    def log_summary(self, summary: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Note a finished run's numbers, and the keys that decided them, so that runs can be compared."""
        raise NotImplementedError

    def close(self, failed: bool) -> None:
        """End the log."""
        raise NotImplementedError

    def on_run_begin(self, run: RunContext) -> None:
        """Open the log; what was done before is logged, too, if this log is new."""
        from dynafed.engine.files import write_json
        from dynafed.report.clean import flatten

        ids = _read_ids(run.path)
        before = ids.get(self.name)
        config = flatten(run.config.to_dict())
        known_as = self.open(run, config, before)
        self.is_open = True
        write_json(run.path / IDS, ids | {self.name: known_as})
        if known_as == before:
            return
        self._log_partition(run.path)
        for record in run.history:
            self.on_round_end(run, record)

    def on_round_end(self, run: RunContext, record: Record) -> None:
        """Log every number of the record; after a synthesis, its losses and images, too."""
        from dynafed.report.load import SYNTHESIS

        self.log_numbers(dict(_numbers(record)), record["round"])
        if any(key in record for key in SYNTHESIS):
            self._log_synthesis(run.path)

    def on_run_end(self, run: RunContext, result: Any) -> None:
        """Log the final table and end the log."""
        from dynafed.report.clean import flatten

        summary = flatten(result.summary)
        self.log_table("summary", ("what", "value"), [[key, str(value)] for key, value in summary.items()])
        numbers = {f"summary/{key}": value for key, value in _numbers(summary)}
        self.log_summary(numbers, flatten(run.config.deciding()))
        self._close(failed=False)

    def on_failure(self, run: RunContext, error: BaseException) -> None:
        """End the log."""
        self._close(failed=True)

    def _close(self, failed: bool) -> None:
        if self.is_open:
            self.is_open = False
            self.close(failed)

    def _log_partition(self, folder: Path) -> None:
        from dynafed.report.load import read_partition

        if (partition := read_partition(folder)) is None:
            return
        names = partition.names or tuple(f"class {index}" for index in range(partition.classes))
        rows = [[client, *counts] for client, counts in zip(partition.shown, partition.counts, strict=True)]
        self.log_image("partition", draw_partition(partition, names), 0)
        self.log_table("partition", ("client", *names), rows)

    def _log_synthesis(self, folder: Path) -> None:
        from PIL import Image

        from dynafed.report.load import read_synthesis, snapshots

        self.log_curve("synthesis/matching_loss", read_synthesis(folder))
        for iteration, file in snapshots(folder):
            with Image.open(file) as image:
                self.log_image("synthesis/samples", image.convert("RGB"), iteration)


def run_name(path: Path) -> str:
    """What a run is called: its folder's name, with the folder above if that alone says which method it is."""
    path = path.resolve()
    return f"{path.parent.name}/{path.name}" if path.name.startswith("seed-") else path.name


def draw_partition(partition: Partition, names: Sequence[str]) -> Image:
    """Who holds which classes: a column for each client, a row for each class; the darker, the larger its share."""
    from PIL import Image, ImageDraw

    wide, high, left = max(3, min(18, 900 // max(1, len(partition.shown)))), 14, 8 + 7 * max(map(len, names))
    image = Image.new("RGB", (left + wide * len(partition.shown) + 4, high * partition.classes + 22), "white")
    draw = ImageDraw.Draw(image)
    for row, name in enumerate(names):
        draw.text((4, row * high + 1), name.encode("ascii", "replace").decode(), fill="black")
    for column, counts in enumerate(partition.counts):
        for row, count in enumerate(counts):
            faint = 1 - (count / (sum(counts) or 1)) ** 0.5
            color = tuple(round(dark + faint * (255 - dark)) for dark in (8, 69, 126))
            x, y = left + column * wide, row * high
            draw.rectangle((x, y, x + wide - 2, y + high - 2), fill=color)
    draw.text((left, high * partition.classes + 5), "each column a client", fill="black")
    return image


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a record by name; of lists such as `clients`, the length. Those by segment or client stay out."""
    from dynafed.report.clean import flatten

    for key, value in flatten(record).items():
        if key in ("clients", "dropped", "rejected") and isinstance(value, list):
            yield key, float(len(value))
        elif key == "round" or key.rpartition(".")[2].isdecimal() or isinstance(value, bool):
            continue
        elif isinstance(value, int | float):
            yield key.replace(".", "/"), float(value)


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        ids = json.loads((folder / IDS).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return ids if isinstance(ids, dict) else {}

"""The section `data` of a config: files of one's own, and what is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynafed.settings import setting

if TYPE_CHECKING:
    from dynafed.data.readers import Columns


@dataclass(frozen=True)
class DataSettings:
    """Section `data`. With a `path`, the clients' samples are read from there in place of a dataset."""

    path: str = setting("", "a folder with a file or sub-folder for each client, or a table with a column `client`")
    client: str = setting("", "the column that says whose row it is")
    target: str = setting("", "the column to be learned; else label, labels, target or y")
    columns: tuple[str, ...] = setting((), "the columns to learn from; else all others")
    test: str = setting("", "a file or folder with the server's test samples")
    server: str = setting("", "a file or folder with samples that the server holds, for methods that need some")
    classes: int = setting(0, "how many there are; else all clients are read once, to find them", low=0)
    labels: tuple[str, ...] = setting((), "the label of each class, in order, in place of `classes`")
    shape: tuple[int, ...] = setting((), "of one sample; else that of the first client's", low=1)
    dtype: str = setting(
        "", "of the samples; else that of the first client's", choices=("", "uint8", "float32", "int64")
    )
    targets: str = setting(
        "",
        "what is learned with a loss of your own, if not what the targets look like",
        choices=("", "classes", "labels", "numbers"),
    )
    mean: tuple[float, ...] = setting((), "subtracted: per channel of images (of values from 0 to 1), or per feature")
    std: tuple[float, ...] = setting((), "divided by, after that", above=0)

    def table_columns(self) -> Columns:
        """Which columns of a table are meant."""
        from dynafed.data.readers import Columns

        return Columns(self.target, self.columns, self.client)

    def given_classes(self) -> int | Sequence[Any] | None:
        """The number of classes or their labels, if the user says them; labels that are numbers as such."""
        if self.labels and all(label.lstrip("-").isdecimal() for label in self.labels):
            return [int(label) for label in self.labels]
        return list(self.labels) or self.classes or None


def data_changes(classes: Any = None, shape: Any = None, target: str = "") -> dict[str, Any]:
    """What is given in Python, as changes of a config."""
    changes: dict[str, Any] = {"data.target": target} if target else {}
    if isinstance(classes, Sequence) and not isinstance(classes, str):
        changes["data.labels"] = [str(label) for label in classes]
    elif classes is not None:
        changes["data.classes"] = classes
    if shape is not None:
        changes["data.shape"] = list(shape)
    return changes

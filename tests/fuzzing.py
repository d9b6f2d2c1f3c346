"""Readers of what others wrote, and files for them that are damaged or made up: each is read, or refused in one line.

`TARGETS` are functions of an example and the strategies that make it. `check` runs as many examples as one likes:
tests/test_fuzz.py a few, soak/run.py thousands.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import TEST, TRAIN, run_tiny, tiny

sys.path.append(str(Path(__file__).parent / "data"))
from official_files import cifar_files, idx_bytes, python2_pickle

import dynafed
from dynafed import Config, RunFailed, UserError, tree
from dynafed.config import parse_toml
from dynafed.data import formats
from dynafed.data.files import file_clients
from dynafed.data.settings import DataSettings
from dynafed.engine.trust import load_run_config
from dynafed.engine.verify import find_changes
from dynafed.flower import wire
from dynafed.flower.declaration import read_declaration
from dynafed.flower.link import read_reply
from dynafed.messages import Broadcast, Update, validate_setup, validate_update
from dynafed.report import write_report
from dynafed.report.index import write_index
from dynafed.report.single import run_page
from dynafed.runs import columns, list_runs
from dynafed.synthesis.synthesize import read_trajectory
from dynafed.synthesis.synthetic import SyntheticData
from dynafed.tasks import Tally
from dynafed.watch.page import live_page
from dynafed.watch.status import Watcher

EVIL = "<script>evil()</script>"
ODD_TEXTS = ["", "NaN", "1e5", "a:b", "../..", EVIL, f'">{EVIL}', "\n\r\x1b[31m\x00", "\ud800", "é" * 5000]
ODD_NUMBERS = [0, -1, 2**63, 10**400, -1e308, 1e308, 1e38, float("nan"), float("inf"), 1.5]

odd_values = st.recursive(
    st.sampled_from([None, True, False, *ODD_NUMBERS, *ODD_TEXTS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "0", "x", EVIL]), inner),
    max_leaves=4,
)
edits = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["flip", "cut", "insert", "delete", "repeat"]), st.binary(max_size=9))
)
some_edits = edits.filter(bool)


def edited(content: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    """The content with bits flipped, and parts cut off, put in, deleted or repeated."""
    data = bytearray(content)
    for place, kind, noise in changes[:4]:
        at = int(place * max(0, len(data) - 1))
        match kind:
            case "flip" if data:
                data[at] ^= 1 << (len(noise) % 8)
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = noise
            case "delete":
                del data[at : at + 1 + len(noise)]
            case "repeat":
                data[at:at] = data[at : at + 40]
    return bytes(data)


def replaced(value: Any, path: list[int], new: Any) -> Any:
    """Nested dicts and lists with one value replaced, which the numbers of `path` lead to."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = replaced(value[key], path[1:], new)
    return copy


replacements = st.lists(
    st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=4), odd_values), min_size=1, max_size=3
)


@contextmanager
def one_line_at_most() -> Iterator[None]:
    """Refusals are fine if they are one line; every other exception gets through."""
    try:
        yield
    except (UserError, RunFailed) as error:
        if len(str(error).splitlines()) > 1:
            raise AssertionError("refused in several lines") from error


@contextmanager
def folder_with(files: Mapping[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield Path(folder)


# Configs


def config_bytes(changes: list[tuple[float, str, bytes]]) -> None:
    with one_line_at_most():
        Config.from_dict(parse_toml(edited(tiny(method="scaffold+dynafed").to_toml().encode(), changes), "a.toml"))


def config_values(changes: list[tuple[list[int], Any]]) -> None:
    values: Any = tiny(method="scaffold+dynafed").to_dict()
    for path, new in changes:
        values = replaced(values, path, new)
    with one_line_at_most():
        if isinstance(values, dict):
            Config.from_dict(values)


# Datasets


@cache
def datasets() -> dict[str, tuple[dict[str, bytes], Callable[[Path], Any]]]:
    """By format: the files of a few samples, and what reads them."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (2, 3, 32, 32), dtype=np.uint8), np.arange(2)
    names = (["py/batch"], ["py/batch"])
    idx = {
        f"{stem}-{kind}": idx_bytes(array)
        for stem in ("train", "t10k")
        for kind, array in (("images-idx3-ubyte", images[:, 0]), ("labels-idx1-ubyte", labels))
    }
    packed, plain, png = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez(plain, x=images.astype(np.float32), y=labels, whose=np.array(["a", "b"]))
    with tempfile.TemporaryDirectory() as folder:
        split = (images[:, :, :4, :4], labels)
        formats.pack(Path(folder, "p.npz"), {"train": split, "test": split})
        packed.write(Path(folder, "p.npz").read_bytes())
    from PIL import Image

    Image.fromarray(images[0].transpose(1, 2, 0)).save(png, "PNG")
    pictures = {f"i/{split}/{name}/0.png": png.getvalue() for split in ("train", "test") for name in "ab"}
    return {
        "idx": (idx, lambda p: formats.idx(p / "train-images-idx3-ubyte", 10**6)),
        "idx.gz": (
            {f"{name}.gz": gzip.compress(content) for name, content in idx.items()},
            lambda p: formats.idx(p / "train-images-idx3-ubyte.gz", 10**6),
        ),
        "cifar pickle": (
            {
                f"py/{name}": data
                for name, data in cifar_files("cifar10", {"batch": (images, labels)}, python2_pickle).items()
            },
            lambda p: formats.cifar_python(p / "py", 10**6, files=names, label_key="labels"),
        ),
        "cifar binary": (
            {f"py/{name}": data for name, data in cifar_files("cifar10", {"batch": (images, labels)}, None).items()},
            lambda p: formats.cifar_binary(p / "py", 10**6, files=(["py/batch.bin"], ["py/batch.bin"]), label_bytes=1),
        ),
        "packed": ({"p.npz": packed.getvalue()}, lambda p: formats.packed(p / "p.npz", 10**6)),
        "npz": ({"d/c.npz": plain.getvalue()}, lambda p: file_clients(p / "d/c.npz", DataSettings(client="whose"))),
        "csv": (
            {"d/c.csv": b"whose,a,b,label\nx,1,2.5,0\ny,3,4,1\n"},
            lambda p: file_clients(p / "d/c.csv", DataSettings(client="whose", target="label")),
        ),
        "images": (pictures, lambda p: formats.image_files(p / "i", 10**6, class_names=("a", "b"))),
    }


def dataset(name: str, place: float, changes: list[tuple[float, str, bytes]]) -> None:
    files, read = datasets()[name]
    victim = sorted(files)[int(place * (len(files) - 1))]
    with folder_with({**files, victim: edited(files[victim], changes)}) as folder, one_line_at_most():
        read(folder)


def npz_member(changes: list[tuple[float, str, bytes]]) -> None:
    """The header of an array inside of a sound archive."""
    content = io.BytesIO()
    source = zipfile.ZipFile(io.BytesIO(datasets()["npz"][0]["d/c.npz"]))
    with zipfile.ZipFile(content, "w") as made:
        for name in source.namelist():
            data = source.read(name)
            made.writestr(name, edited(data[:128], changes) + data[128:] if name == "x.npy" else data)
    with folder_with({"d/c.npz": content.getvalue()}) as folder, one_line_at_most():
        datasets()["npz"][1](folder)


# Safetensors


def synthetic_set(changes: list[tuple[float, str, bytes]]) -> None:
    with folder_with({"s": edited(_synthetic_bytes(), changes)}) as folder, one_line_at_most():
        SyntheticData.load(folder / "s", (6,), 4)


@cache
def _synthetic_bytes() -> bytes:
    made = SyntheticData(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 4), 0.1)
    return tree.seal(made.tree(), {"dynafed": "{}"})


def odd_tensors(dtype: str, shape: list[int], value: float, name: str) -> None:
    """A sound file of tensors that aren't those of a synthetic set."""
    parts = {"x": torch.zeros(4, 6), "logits": torch.zeros(4, 4), "inner_lr": torch.tensor(0.1)}
    try:
        parts[name] = torch.full(shape, value).to(getattr(torch, dtype))
    except (RuntimeError, OverflowError):
        return
    with folder_with({"s": tree.pack(parts)}) as folder, one_line_at_most():
        SyntheticData.load(folder / "s", (6,), 4)


def trajectory(changes: list[tuple[float, str, bytes]]) -> None:
    model = tree.pack({"weight": torch.ones(3, 2)})
    with folder_with({"0.safetensors": model, "1.safetensors": edited(model, changes)}) as folder, one_line_at_most():
        read_trajectory(folder)


# Messages of Flower's nodes

MODEL = {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}

odd_arrays = st.builds(
    lambda dtype, shape, stype, data: Array(dtype=dtype, shape=shape, stype=stype, data=data),
    st.sampled_from(["float32", "int64", "object", "O", "V8", "<U7", "", EVIL]),
    st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**62]), max_size=4).map(tuple),
    st.sampled_from(["numpy.ndarray", "torch", "", "pickle"]),
    st.binary(max_size=64) | edits.map(lambda changes: edited(_npy(), changes)),
)


@cache
def _npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros((3, 2), np.float32))
    return file.getvalue()


array_records = st.dictionaries(
    st.sampled_from(["weight", "bias", "x/y", "\x1b[2J\n", "round", "checksum"]), odd_arrays
).map(lambda arrays: ArrayRecord(arrays))
config_values_of_nodes = st.sampled_from(
    [0, -1, 2**70, 1.5, float("nan"), True, "", EVIL, "\n\x1b[2J", [1], ["a"], [1.5], b"x"]
)
config_records = st.dictionaries(
    st.sampled_from(
        [
            "partition",
            "partitions",
            "fingerprint",
            "reason",
            "state-lost",
            "round",
            "client",
            "nonce",
            "shape",
            "dtype",
            "labels",
            "sizes",
            "targets",
            "outputs",
            "columns",
        ]
    ),
    config_values_of_nodes,
).map(lambda values: ConfigRecord(values))
metric_records = st.dictionaries(
    st.sampled_from(["examples", "steps", "loss", "seconds", "curve", "samples", "correct"]),
    st.sampled_from([0, 1, -5, 2**62, 1.5, float("nan"), float("inf"), -1e308, [1], [0.5, float("nan")]]),
).map(lambda values: MetricRecord(values))


def reply(name: str, record: Any, honest: bool) -> None:
    """An honest reply with one record of another kind, or only that."""
    update = Update(0, dict(MODEL), 9, 1, 0.5, 0.1)
    content = wire.train_reply(update, {}) if honest else RecordDict()
    content[name] = record
    sent = Broadcast(1, dict(MODEL))

    def train(content: RecordDict) -> Update:
        read, _ = wire.read_train_reply(content, 0, receipts=True)
        reason = validate_update(read, sent, {})
        assert reason is None or reason.isprintable()
        return read

    expected = Tally(0, {"loss": 0.0, "correct": 0.0}, None)
    readers: list[Callable[[RecordDict], Any]] = [
        train,
        lambda content: validate_setup(wire.read_setup_reply(content), {"weight": torch.zeros(0, 2)}),
        lambda content: wire.read_evaluate_reply(content, expected),
        wire.read_node_info,
        wire.read_fingerprint,
        read_declaration,
    ]
    for reader in readers:
        found = read_reply(content, reader)
        assert not isinstance(found, str) or found.isprintable()


# Run folders

JSON_FILES = (
    "metrics.jsonl",
    "summary.json",
    "partition.json",
    "report.json",
    "synthesis.jsonl",
    "model.json",
    "checksums.json",
)
RESUMED = ("config.toml", "metrics.jsonl", "checkpoint", "synthesis.jsonl", "summary.json", "checksums.json")


@cache
def finished_run() -> Path:
    """A run's folder, with a synthesis in it."""
    path = Path(tempfile.mkdtemp()) / "run"
    synthesis = {"dynafed.trajectory": 4, "dynafed.segment": 2, "dynafed.iterations": 3, "dynafed.samples": 4}
    run_tiny(path, method="scaffold+dynafed", watch=[0], **synthesis)
    return path


@contextmanager
def copied_run() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(finished_run(), Path(folder, "run")))


def run_values(name: str, line: int, changes: list[tuple[list[int], Any]]) -> None:
    """Sound JSON or TOML with odd values."""
    with copied_run() as path:
        file = path / name
        text = file.read_text()
        lines = text.splitlines() if name.endswith("jsonl") else [text]
        at = line % len(lines)
        value = tomllib.loads(text) if name == "config.toml" else json.loads(lines[at])
        for place, new in changes:
            value = replaced(value, place, new)
        try:
            lines[at] = tomli_w.dumps(value) if name == "config.toml" else json.dumps(value)
            file.write_text("\n".join([*lines, ""]))
        except (TypeError, ValueError, AttributeError, UnicodeError):  # not to be had in TOML
            return
        look_at(path)


def run_bytes(name: str, changes: list[tuple[float, str, bytes]]) -> None:
    with copied_run() as path:
        (path / name).write_bytes(edited((path / name).read_bytes(), changes))
        look_at(path)


def look_at(path: Path) -> None:
    """Everything that only reads a run's folder."""
    with one_line_at_most():
        check_page(write_report([path]).read_text("utf-8"))
    with one_line_at_most():
        rows = list_runs([path], sort="accuracy")
        check_page(write_index(rows, columns(rows), path / "index.html").read_text("utf-8"))
    with one_line_at_most():
        found = Watcher([path]).look()
        check_page(live_page(found, [path]).html())
        for status in found:
            check_page(run_page(status.run, path))
    with one_line_at_most():
        assert all("\n" not in change for change in find_changes(path))
    with one_line_at_most():
        load_run_config(path)
    with one_line_at_most():
        dynafed.load(path).predict(TEST[0][:2])


def check_page(text: str) -> None:
    assert EVIL not in text


def resumed(name: str, place: float, changes: list[tuple[float, str, bytes]]) -> None:
    """A damaged file that a resume reads: it is refused, or it makes no difference."""
    with copied_run() as path:
        files = sorted(file for file in path.glob(f"{name}/**/*" if name == "checkpoint" else name) if file.is_file())
        victim = files[int(place * (len(files) - 1))]
        victim.write_bytes(edited(victim.read_bytes(), changes))
        with one_line_at_most():
            result = dynafed.resume(path, train=TRAIN, test=TEST)
            assert tree.digest(result.state.model) == _final_digest()


@cache
def _final_digest() -> str:
    newest = finished_run() / "checkpoint" / "round-000006" / "state.safetensors"
    return tree.digest(tree.unnest(tree.unpack(newest.read_bytes()))["model"])


Target = tuple[Callable[..., None], dict[str, Any]]

TARGETS: dict[str, Target] = {
    "config, bytes": (config_bytes, {"changes": some_edits}),
    "config, values": (config_values, {"changes": replacements}),
    **{
        f"dataset, {name}": (
            dataset,
            {"name": st.just(name), "place": st.floats(0, 1), "changes": some_edits},
        )
        for name in ("idx", "idx.gz", "cifar pickle", "cifar binary", "packed", "npz", "csv", "images")
    },
    "dataset, npz header": (npz_member, {"changes": some_edits}),
    "safetensors, D_syn": (synthetic_set, {"changes": some_edits}),
    "safetensors, odd tensors": (
        odd_tensors,
        {
            "dtype": st.sampled_from(
                ["float32", "float64", "float16", "bfloat16", "complex64", "int64", "uint8", "bool"]
            ),
            "shape": st.lists(st.integers(0, 6), max_size=3),
            "value": st.sampled_from([0.0, 1.0, -1.0, 1e30, 1e38, float("inf"), float("nan")]),
            "name": st.sampled_from(["x", "logits", "inner_lr", "inner_rates", "evil"]),
        },
    ),
    "safetensors, trajectory": (trajectory, {"changes": some_edits}),
    "reply, arrays": (
        reply,
        {
            "name": st.sampled_from(["model", "extras", "state", "setup", "confusion"]),
            "record": array_records,
            "honest": st.booleans(),
        },
    ),
    "reply, words": (
        reply,
        {
            "name": st.sampled_from(["node", "failure", "task", "data"]),
            "record": config_records,
            "honest": st.booleans(),
        },
    ),
    "reply, numbers": (
        reply,
        {"name": st.sampled_from(["metrics", "sums"]), "record": metric_records, "honest": st.booleans()},
    ),
    "run, values": (
        run_values,
        {
            "name": st.sampled_from([*JSON_FILES, "metrics.jsonl", "config.toml"]),
            "line": st.integers(0, 9),
            "changes": replacements,
        },
    ),
    "run, bytes": (
        run_bytes,
        {
            "name": st.sampled_from([*JSON_FILES, "config.toml", "model.safetensors", "synthetic.safetensors"]),
            "changes": some_edits,
        },
    ),
    "run, resume": (
        resumed,
        {"name": st.sampled_from(RESUMED), "place": st.floats(0, 1), "changes": some_edits},
    ),
}

SLOW = {"run, values": 10, "run, bytes": 10, "run, resume": 30}
"""Targets whose examples take so many times as long as others."""


def check(name: str, examples: int, seed: int | None = None) -> int:
    """Run so many examples of a target, of a slow one fewer; returns how many. Without a seed always the same ones."""
    function, strategies = TARGETS[name]
    count = max(1, examples // SLOW.get(name, 1))
    from hypothesis import seed as seeded

    test = given(**strategies)(function)
    if seed is not None:
        test = seeded(seed)(test)
    settings(
        max_examples=count,
        derandomize=seed is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )(test)()
    return count

"""The loggers, each with its real package: TensorBoard's event files, wandb offline, MLflow's local store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import TEST, TRAIN, run_tiny, tiny

import dynafed
from dynafed.callbacks import LOGGERS
from dynafed.cli import main
from dynafed.engine.summary import read_metrics
from dynafed.loggers import MLflow, TensorBoard, WandB
from dynafed.loggers.base import RunLogger, draw_partition, run_name
from dynafed.report.load import Partition

QUICK = {"trajectory": 2, "segment": 1, "targets": [1], "samples": 4, "inner_steps": 1, "iterations": 3}
IMAGES: dict[str, Any] = {
    split: (np.pad(x, ((0, 0), (0, 3))).reshape(-1, 1, 3, 3), y) for split, (x, y) in (("train", TRAIN), ("test", TEST))
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """MLflow's local store, which takes a while to make."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def run_images(logger: dynafed.Callback) -> dynafed.Result:
    """Three rounds of DynaFed on tiny images, with a synthesis after the second."""
    changes = {f"dynafed.{key}": value for key, value in QUICK.items()} | {"method": "dynafed", "rounds": 3}
    return dynafed.run(tiny(**changes), out="runs/one", callbacks=[logger], **IMAGES)


def read_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


def test_tensorboard_has_curves_images_partition_config_and_table() -> None:
    pytest.importorskip("tensorboard")
    result = run_images(TensorBoard())
    events = read_events(result.path / "tensorboard")
    accuracy = [(event.step, event.value) for event in events.Scalars("accuracy")]
    assert accuracy == [(r["round"], pytest.approx(r["accuracy"])) for r in result.history]
    assert [event.step for event in events.Scalars("synthesis/matching_loss")] == [0, 1, 2, 3]
    assert [event.step for event in events.Images("synthesis/samples")] == [0, 3]
    assert len(events.Images("partition")) == 1
    texts = {
        name: events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()
        for name in ("config", "summary", "partition")
    }
    assert "| dynafed.samples | `4` |" in texts["config"]
    assert "final_accuracy" in texts["summary"]
    assert events.Scalars("summary/final_accuracy")[0].value == pytest.approx(result.final_accuracy)
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert not [tag for tag in events.Tags()["scalars"] if tag.rpartition("/")[2].isdecimal()]


def leveldb_records(file: bytes, block: int = 32768) -> Iterator[bytes]:
    """What wandb's file holds: after 7 bytes, a log of LevelDB's: blocks of pieces with checksum, length, kind."""
    at, joined = 7, b""
    while at + 7 <= len(file):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(file[at + 4 : at + 6], "little"), file[at + 6]
        if at + 7 + length > len(file):  # it is being written at this moment
            return
        joined += file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole, or its end
            yield joined
            joined = b""


def test_wandb_offline_has_curves_images_partition_config_and_table() -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    result = run_images(WandB(project="mine"))
    (file,) = result.path.glob("wandb/offline-run-*/run-*.wandb")
    give_up, records = time.monotonic() + 20, []
    while not any(record.HasField("exit") for record in records) and time.monotonic() < give_up:
        records = [wandb_internal_pb2.Record.FromString(data) for data in leveldb_records(file.read_bytes())]
    rows = [
        {"/".join(item.nested_key[:1]) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert run.project == "mine"
    assert {item.key or item.nested_key[0]: item.value_json for item in run.config.update}["dynafed.samples"] == "4"
    curve = [(row["round"], row["accuracy"]) for row in rows if "accuracy" in row]
    assert curve == [(r["round"], r["accuracy"]) for r in result.history]
    assert [row["iteration"] for row in rows if "synthesis/matching_loss" in row] == [0, 1, 2, 3]
    assert [row["iteration"] for row in rows if "synthesis/samples" in row] == [0, 3]
    assert any("partition" in row for row in rows)
    assert any("partition_table" in row for row in rows)
    assert any("summary_table" in row for row in rows)
    assert json.loads((result.path / "loggers.json").read_text()) == {"wandb": run.run_id}


def test_mlflow_has_curves_images_partition_config_and_table(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    result = run_images(MLflow(experiment="mine"))
    client = MlflowClient()
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["dynafed.samples"] == "4"
    curve = client.get_metric_history(run.info.run_id, "accuracy")
    assert [(point.step, point.value) for point in curve] == [(r["round"], r["accuracy"]) for r in result.history]
    assert len(client.get_metric_history(run.info.run_id, "synthesis/matching_loss")) == 4
    assert run.data.metrics["summary/final_accuracy"] == result.final_accuracy
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id)} >= {"partition.json", "summary.json"}
    images = [artifact.path for artifact in client.list_artifacts(run.info.run_id, "images")]
    assert sum("samples" in path and path.endswith(".png") for path in images) == 2
    assert sum("partition" in path and path.endswith(".png") for path in images) == 1
    context = dynafed.RunContext(result.path, result.federation.config)
    assert MLflow().open(context, {}, run.info.run_id) == run.info.run_id
    assert MLflow().open(context, {}, "of another store") != run.info.run_id
    with pytest.raises(dynafed.UserError, match=r"^mlflow: "):
        MLflow("nothing://there").open(context, {}, None)


@pytest.mark.parametrize("name", LOGGERS)
def test_a_resumed_run_is_the_same_one_and_rounds_before_are_there(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    path = Path("run")
    run_tiny(path, rounds=2)
    changes = {"rounds": 3, "callbacks": [name]}
    dynafed.resume(path, changes=changes, train=TRAIN, test=TEST)
    before = (path / "loggers.json").read_text()
    path = path.rename("moved")
    dynafed.resume(path, changes={"rounds": 4}, train=TRAIN, test=TEST)
    assert (path / "loggers.json").read_text() == before
    if name == "tensorboard":
        assert [event.step for event in read_events(path / "tensorboard").Scalars("accuracy")] == [1, 2, 3, 4]
    if name == "mlflow":
        from mlflow import MlflowClient

        curve = MlflowClient().get_metric_history(json.loads(before)["mlflow"], "accuracy")
        assert [point.step for point in curve] == [1, 2, 3, 4]


def test_the_command_line_logs_and_a_resume_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    small = ["-s", "method=fedavg", "-s", "clients=4", "-s", "mlp.width=4", "--workers", "1", "--json"]
    assert main(["run", "demo", "-s", "rounds=1", *small, "--out", "a", "--log", "tensorboard"]) == 0
    assert dynafed.Config.load("a/config.toml").callbacks == ("tensorboard",)
    assert len(read_events(Path("a/tensorboard")).Scalars("accuracy")) == 1
    assert main(["run", "demo", "-s", "rounds=1", *small, "--out", "b"]) == 0
    assert main(["resume", "b", "-s", "rounds=2", "--log", "tensorboard"]) == 0
    steps = [event.step for event in read_events(Path("b/tensorboard")).Scalars("accuracy")]
    assert steps == [record["round"] for record in read_metrics(Path("b"))] == [1, 2]
    assert main(["run", "demo", "--log", "tensorbord", "--out", "c"]) == 2
    assert "did you mean 'tensorboard'?" in capsys.readouterr().err
    assert not Path("c").exists()


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_one_line_and_leaves_no_folder(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["run", "demo", "--log", name, "--out", "missing"]) == 2
    said = capsys.readouterr().err
    assert said == f"dynafed: logging to {name} needs a package: pip install 'dynafed[{name}]'\n"
    assert not Path("missing").exists()


def test_wandb_without_a_login_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def login() -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "login", login)
    WandB(mode="offline")
    with pytest.raises(dynafed.UserError, match=r"^wandb: .*wandb login.*WANDB_MODE=offline$"):
        WandB(mode="online")


class Fails(RunLogger):
    """A logger whose log can't be opened."""

    name = "json"

    def open(self, *given: Any) -> str:
        raise dynafed.UserError("no")


def test_a_log_that_was_never_open_is_not_closed(tmp_path: Path) -> None:
    with pytest.raises(dynafed.UserError, match=r"^no$"):
        dynafed.run(tiny(), out=tmp_path / "r", callbacks=[Fails()], train=TRAIN, test=TEST)


def test_the_partition_is_drawn() -> None:
    image = draw_partition(Partition(2, 2, (0, 5), ((3, 0), (0, 4))), ("cat", "größe"))
    pixels = {image.getpixel((8 + 7 * 5 + 2 + column * 18, 2 + row * 14)) for column, row in ((0, 0), (1, 1))}
    assert pixels == {(8, 69, 126)}
    assert image.getpixel((8 + 7 * 5 + 2, 16)) == (255, 255, 255)


def test_a_run_of_a_comparison_is_named_by_its_method_too() -> None:
    assert run_name(Path("runs/demo/dynafed/seed-0")) == "dynafed/seed-0"
    assert run_name(Path("runs/20260101-demo")) == "20260101-demo"

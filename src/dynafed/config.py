"""One frozen, typed config for a run. TOML in, TOML out; anything unknown or impossible is refused before round 1."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from dynafed.errors import UserError, first_line
from dynafed.settings import build, nearest, plain, setting

Section = TypeVar("Section")

KERNELS_VERSION = 5
"""Which networks run on our kernels: with 1 an `nn.Sequential` of a few layers, with 2 what a traced graph shows; with
3 convolutions are done by Winograd's method, and a ConvNet is trained and synthesized as a whole; with 4 it is also
evaluated as a whole; with 5 linear layers may have any number of units, and more activations than ReLU between them."""
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run's result, and how it is to be executed."""

    method: str = setting("fedavg", "a client method and server steps, joined by +")
    rounds: int = setting(100, "communication rounds", low=1)
    seed: int = setting(0, "the one number behind every random draw", low=0)

    dataset: str = setting("fmnist-mini", "a name from `dynafed datasets`, or hf:NAME")
    partition: str = setting("dirichlet-balanced", "who gets which samples")
    alpha: float = setting(0.1, "Dirichlet concentration: the smaller, the more unlike the clients", above=0)
    classes_per_client: int = setting(2, "for partition = shards", low=1)
    min_samples: int = setting(1, "no client gets fewer; 0 allows empty clients", low=0)
    server_samples: int = setting(0, "kept by the server, carved from the training split before partitioning", low=0)
    validation_samples: int = setting(0, "carved from the training split for choosing settings", low=0)
    evaluate: str = setting(
        "test",
        "what accuracy is measured on: a split of the server's, or what each client holds out",
        choices=("test", "validation", "clients"),
    )
    holdout: float = setting(0.2, "share that a client holds out, for evaluate = clients", above=0, high=0.9)
    eval_clients: int = setting(1000, "so many clients at most, drawn once, for evaluate = clients (0: all)", low=0)
    eval_every: int = setting(1, "evaluate every so many rounds, and after the last", low=1)
    watch: tuple[int, ...] = setting(
        (), "clients whose loss is followed through local training, aggregation and refinement", low=0
    )
    loss: str = setting("cross_entropy", "cross_entropy; bce for several labels at once; mse for numbers; or your own")
    target_accuracy: float = setting(0.0, "report the first round that reaches it (0: none)", low=0, high=1)

    model: str = setting("mlp", "convnet, mlp, resnet8, resnet18, or package.module:factory")

    clients: int = setting(80, "clients in all", low=1)
    participation: float = setting(0.4, "share of the clients sampled in a round", above=0, high=1)
    clients_per_round: int = setting(0, "sampled in a round, instead of a share (0: use participation)", low=0)
    local_epochs: int = setting(1, "passes over a client's data in a round", low=1)
    local_steps: int = setting(0, "optimizer steps in a round, instead of epochs (0: use local_epochs)", low=0)
    batch_size: int = setting(32, "samples in a local step", low=1)
    optimizer: str = setting("adam", "of the clients", choices=OPTIMIZERS)
    lr: float = setting(1e-3, "local learning rate in round 1", above=0)
    momentum: float = setting(0.9, "for optimizer = momentum", low=0, high=1)
    weight_decay: float = setting(0.0, "of the local optimizer", low=0)
    schedule: str = setting(
        "constant",
        "learning rate over rounds r = 0, 1, ...: lr, lr*decay^r, lr*(1+cos(pi*r/rounds))/2 or lr/(1+decay*r)",
        choices=("constant", "exponential", "cosine", "inverse"),
    )
    lr_decay: float = setting(0.99, "for schedule = exponential or inverse", low=0)
    client_state: str = setting(
        "fresh", "whether a client's optimizer starts anew each round", choices=("fresh", "persistent")
    )
    weighting: str = setting("uniform", "of the clients in the average", choices=("uniform", "examples"))

    dropout: float = setting(0.0, "chance that a sampled client sends nothing", low=0, high=1)
    stragglers: float = setting(0.0, "chance that a sampled client is slow", low=0, high=1)
    straggler_policy: str = setting(
        "partial",
        "a slow client sends what it has (a random part of its steps), or nothing",
        choices=("partial", "drop"),
    )
    min_survivors: int = setting(1, "updates that a round needs", low=1)
    failed_round: str = setting(
        "repeat", "with fewer updates: sample anew, or keep the model and go on", choices=("repeat", "skip")
    )
    max_repeats: int = setting(10, "a round that fails this often is skipped", low=0)

    large_updates: str = setting(
        "reject",
        "what becomes of an update that is far larger than those of the rounds before",
        choices=("reject", "clip", "accept"),
    )
    max_update_norm: float = setting(
        0.0, "the largest norm of a client's change of the model (0: 100 times the median of the last rounds)", low=0
    )
    max_failed_rounds: int = setting(
        20,
        "the run fails after so many failed rounds in a row, or if all of its rounds failed (0: never)",
        low=0,
        execution=True,
    )

    update_transforms: tuple[str, ...] = setting((), "what changes a client's update before it is sent, in this order")
    secure_aggregation: bool = setting(False, "whether updates are masked so that the server sees only their sum")

    checkpoint_every: int = setting(10, "rounds between checkpoints", low=1, execution=True)
    keep_checkpoints: int = setting(2, "older ones are deleted", low=1, execution=True)
    client_memory_mb: int = setting(1024, "clients' states beyond this live on disk", low=0, execution=True)
    data_memory_mb: int = setting(
        1024, "samples of clients with data of their own that stay in memory, in each process", low=0, execution=True
    )
    device: str = setting("cpu", "cpu, cuda, cuda:N or mps", execution=True)
    engine: str = setting("local", "the backend that trains clients: local is processes of our own", execution=True)
    workers: int = setting(
        0,
        "processes that train clients; any number gives the same bits (0: one a core)",
        low=0,
        high=4096,
        execution=True,
    )
    worker_timeout: int = setting(
        3600,
        "seconds without any answer after which workers are replaced, up to three in a run, or it ends (0: never)",
        low=0,
        execution=True,
    )
    threads: int = setting(1, "threads of each worker", low=1, high=1024, execution=True)
    kernels: str = setting(
        "auto",
        "what the network runs on: kernels of our own, torch's, or ours if there is much to do",
        choices=("auto", "own", "torch"),
        execution=True,
    )
    kernels_version: int = setting(
        0,
        "which networks our kernels know; a run keeps the version that it began with (0: the newest)",
        low=0,
        high=KERNELS_VERSION,
        execution=True,
    )
    record: bool = setting(True, "whether training steps are traced and replayed once there were many", execution=True)
    data_dir: str = setting("", "where the datasets are; else the variable DYNAFED_DATA", execution=True)
    callbacks: tuple[str, ...] = setting((), "what follows the run: names, or package.module:Name", execution=True)

    sections: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, source: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
        """Read a preset (by name) or a TOML file, then apply overrides such as `{"alpha": 0.01, "mlp.width": 64}`."""
        values = _read(str(source)) if source else {}
        for key, value in (overrides or {}).items():
            _put(values, key, value)
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Check plain values; methods' and models' sections are nested dicts under their names."""
        values = dict(values)
        if "sections" in values:
            raise UserError("unknown key 'sections': a section is a table of its own, such as [mlp]")
        given = {name: values.pop(name) for name in list(values) if isinstance(values[name], Mapping)}
        config = build(cls, values)
        config.check_names()
        used = config.used_sections()
        known = {**installed_sections(), **used} if given.keys() - used.keys() else used
        for name in given:
            if name not in known:
                raise UserError(f"unknown section '{name}': no part of this config has it; {nearest(name, known)}")
        sections = {
            name: build(kind, given.get(name, {}), f"{name}.")
            for name, kind in known.items()
            if name in given or name in used
        }
        config = dataclasses.replace(config, sections=sections)
        if config.evaluate == "validation" and not config.validation_samples:
            raise UserError("evaluate = 'validation' needs validation_samples > 0")
        if config.schedule == "exponential" and config.lr_decay > 1:
            raise UserError(f"lr_decay = {config.lr_decay} would let the rate grow without bound: at most 1")
        if config.sampled > config.clients:
            raise UserError(f"clients_per_round = {config.sampled} is more than clients = {config.clients}")
        if config.min_survivors > config.sampled:
            raise UserError(f"min_survivors = {config.min_survivors} is more than the {config.sampled} sampled a round")
        if config.watch and max(config.watch) >= config.clients:
            raise UserError(f"watch = {list(config.watch)} names a client beyond the last, {config.clients - 1}")
        from dynafed import methods
        from dynafed.attacks import attack_settings

        methods.compose(config)
        attack_settings(config)
        return config

    def check_names(self) -> None:
        """Refuse names that no part has: dataset, partition, model, engine, callbacks, transforms, loss."""
        from dynafed import data, models
        from dynafed.callbacks import CALLBACKS
        from dynafed.engine.backend import BACKENDS
        from dynafed.tasks import LOSSES
        from dynafed.transforms import TRANSFORMS

        data.check_name(self.dataset)
        if self.partition != "custom":
            data.PARTITIONS.check(self.partition)
        models.check_name(self.model)
        BACKENDS.check(self.engine)
        for name in self.callbacks:
            CALLBACKS.check(name)
        for name in self.update_transforms:
            TRANSFORMS.check(name)
        if self.loss != "custom":
            LOSSES.check(self.loss)

    def replace(self, **changes: Any) -> Config:
        """A checked copy with some keys changed; dotted keys go in a dict: `replace(**{"mlp.width": 64})`."""
        values = self.to_dict()
        if "callbacks" in changes:  # settings of those that are dropped go with them
            dropped = [name for name in self.callbacks if name not in changes["callbacks"]]
            gone = dataclasses.replace(self, callbacks=tuple(dropped))._callback_sections()
            values = {key: value for key, value in values.items() if key not in gone}
        for key, value in changes.items():
            _put(values, key, value)
        return Config.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """The whole resolved config as plain values."""
        values = plain(self)
        del values["sections"]
        return values | {name: plain(section) for name, section in self.sections.items()}

    def to_toml(self) -> str:
        """The whole resolved config, enough to run it again."""
        return tomli_w.dumps(self.to_dict())

    def section(self, name: str, kind: type[Section]) -> Section:
        """The settings of one method or model family."""
        section = self.sections.get(name) or kind()
        assert isinstance(section, kind)
        return section

    def used_sections(self) -> dict[str, type[Any]]:
        """The sections that the parts of this config read, and their types."""
        from dynafed import methods, models
        from dynafed.callbacks import CALLBACKS
        from dynafed.transforms import TRANSFORMS

        parts: list[Any] = [CALLBACKS.load(name) for name in self.callbacks]
        parts += [TRANSFORMS.load(name) for name in self.update_transforms]
        return {
            **models.section_types([self.model]),
            **methods.section_types(methods.load(self.method)),
            **_section_types(parts),
            **{name: kind for name, kind in engine_sections().items() if name in self.sections},
        }

    def is_execution(self, key: str) -> bool:
        """Whether a key, or a whole section, decides only how a run is executed: one marked so, or a callback's."""
        return key in EXECUTION_KEYS or key.partition(".")[0] in self._callback_sections()

    def _callback_sections(self) -> dict[str, type[Any]]:
        from dynafed.callbacks import CALLBACKS

        return _section_types([CALLBACKS.load(name) for name in self.callbacks])

    def deciding(self) -> dict[str, Any]:
        """What decides the result: not how it is executed, nor settings of parts that aren't used."""
        unused = self.sections.keys() - self.used_sections().keys()
        values = self.to_dict().items()
        kept = {key: value for key, value in values if key not in unused and not self.is_execution(key)}
        # Folders of older runs don't know these keys.
        return {key: value for key, value in kept.items() if key not in LATER_KEYS or value != LATER_KEYS[key]}

    def kernels_key(self) -> tuple[str, int]:
        """What decides the rounding, once the kernels are chosen."""
        return self.kernels, self.kernels_version if self.kernels == "own" else 0

    @property
    def sampled(self) -> int:
        """Clients sampled in a round."""
        return self.clients_per_round or max(1, round(self.participation * self.clients))

    def lr_at(self, round_num: int) -> float:
        """The local learning rate in a round (the first is 1)."""
        done = round_num - 1
        match self.schedule:
            case "exponential":
                return self.lr * self.lr_decay**done
            case "cosine":
                return self.lr * (1 + math.cos(math.pi * done / self.rounds)) / 2
            case "inverse":
                return self.lr / (1 + self.lr_decay * done)
            case _:
                return self.lr

    def data_folder(self) -> Path | None:
        """Where datasets are looked for, if the user said so."""
        return data_folder(self.data_dir)


EXECUTION_KEYS = frozenset(field.name for field in dataclasses.fields(Config) if field.metadata.get("execution"))
"""Keys that decide how a run is executed, not what it computes."""


LATER_KEYS = {
    "loss": "cross_entropy",
    "holdout": 0.2,
    "eval_clients": 1000,
    "update_transforms": [],
    "secure_aggregation": False,
    "large_updates": "reject",
    "max_update_norm": 0.0,
}
"""Deciding keys that the first version didn't have, and the values that change nothing."""


def _section_types(parts: list[Any]) -> dict[str, type[Any]]:
    """The settings of callbacks or transforms, by section."""
    return {part.name: part.Settings for part in parts if getattr(part, "Settings", None) is not None}


def engine_sections() -> dict[str, type[Any]]:
    """Sections that are no part's: a config has them only if it names them."""
    from dynafed.attacks import AttackSettings
    from dynafed.data import DataSettings
    from dynafed.privacy.settings import DpSettings

    return {"attack": AttackSettings, "data": DataSettings, "dp": DpSettings}


def installed_sections() -> dict[str, type[Any]]:
    """The sections of all parts that are known by name."""
    from dynafed import methods, models
    from dynafed.callbacks import CALLBACKS
    from dynafed.transforms import TRANSFORMS

    kinds = [methods.METHODS.load(name) for name in methods.METHODS.names()]
    parts = [registry.load(name) for registry in (CALLBACKS, TRANSFORMS) for name in registry.names()]
    return {
        **models.section_types(models.MODELS.names()),
        **methods.section_types(kinds),
        **_section_types(parts),
        **engine_sections(),
    }


def kernel_choice(config: Config) -> str:
    """The config's `kernels`, unless the variable DYNAFED_KERNELS says otherwise."""
    choice = os.environ.get("DYNAFED_KERNELS") or config.kernels
    if choice not in ("auto", "own", "torch"):
        raise UserError(f"DYNAFED_KERNELS = '{choice}' is not one of auto, own, torch")
    return choice


def cache_folder() -> Path:
    """Where compiled kernels are kept: the variable DYNAFED_CACHE, else the user's cache."""
    if given := os.environ.get("DYNAFED_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynafed"


def kept_bytes() -> int:
    """The memory in which a synthesis may keep what it would else compute again; from the environment, else none."""
    given = os.environ.get("DYNAFED_KEEP_MB") or "0"
    if not given.isdecimal():
        raise UserError(f"DYNAFED_KEEP_MB = '{given}' is no number of megabytes")
    return int(given) * 2**20


def data_folder(given: str = "") -> Path | None:
    """The folder given, which must exist, else the one that DYNAFED_DATA names."""
    if given and not Path(given).expanduser().is_dir():
        raise UserError(f"the data folder {given} doesn't exist")
    folder = given or os.environ.get("DYNAFED_DATA", "")
    return Path(folder).expanduser().absolute() if folder else None


def presets() -> dict[str, str]:
    """The presets by name, each with the first line of its comment."""
    files = (entry for entry in resources.files("dynafed.presets").iterdir() if entry.name.endswith(".toml"))
    found = {entry.name.removesuffix(".toml"): entry.read_text().partition("\n")[0] for entry in files}
    return {name: found[name].removeprefix("#").strip() for name in sorted(found)}


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value` from the command line; the value is TOML, and a bare word is a string."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[\w.-]+", key.strip()):
        raise UserError(f"-s {text}: expected key=value")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return key.strip(), value.strip()


MAX_CONFIG_BYTES = 2**18
"""A larger file is no config; a TOML parser could take hours for it."""


def parse_toml(content: bytes, name: str | Path) -> dict[str, Any]:
    """The values of a TOML file; `UserError` for one that can't be read."""
    if len(content) > MAX_CONFIG_BYTES:
        raise UserError(f"{name} has {len(content)} bytes, and a config has at most {MAX_CONFIG_BYTES}")
    try:
        return tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{name} can't be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid TOML: {first_line(error)}") from None


def _read(source: str, through: tuple[str, ...] = ()) -> dict[str, Any]:
    """A preset or file; its key `extends` names another one that it starts from."""
    if source in through:
        raise UserError(f"{source} extends itself: {' -> '.join((*through, source))}")
    file = Path(source)
    if source in presets():
        content = (resources.files("dynafed.presets") / f"{source}.toml").read_bytes()
    elif file.is_file():
        try:
            with file.open("rb") as opened:
                content = opened.read(MAX_CONFIG_BYTES + 1)
        except OSError as error:
            raise UserError(f"{source} can't be read: {error}") from None
    elif source.endswith(".toml") or "/" in source:
        raise UserError(f"no such file: {source}")
    else:
        raise UserError(f"unknown preset '{source}': {nearest(source, presets())}")
    values = parse_toml(content, source)
    if "extends" not in values:
        return values
    base = values.pop("extends")
    if not isinstance(base, str):
        raise UserError(f"{source}: extends = {base!r} must be the name of a preset or a file")
    if base not in presets():
        base = str(file.parent / base)
    merged = _read(base, (*through, source))
    for key, value in values.items():
        _put(merged, key, value)
    return merged


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    section, dot, name = key.partition(".")
    if isinstance(value, Mapping):
        for inner, item in value.items():
            _put(values, f"{key}.{inner}", item)
    elif dot:
        if not isinstance(values.setdefault(section, {}), dict):
            raise UserError(f"'{section}' is a key, not a section: write {section}=..., not {key}=...")
        values[section] = {**values[section], name: value}
    else:
        values[key] = value

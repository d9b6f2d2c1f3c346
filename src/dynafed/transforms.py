"""What changes a client's update before it is sent: a chain, encoded on the client and decoded on the server.

The default chain is empty. Clipping, noise and compression are transforms: bytes are counted after encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dynafed.errors import UserError
from dynafed.messages import Broadcast, Update
from dynafed.registry import Registry
from dynafed.seeds import Seeds

if TYPE_CHECKING:
    from dynafed.config import Config


class UpdateTransform:
    """One link of the chain; the defaults change nothing. A subclass overrides `encode`, and `decode` if need be."""

    name: ClassVar[str] = "identity"
    Settings: ClassVar[type[Any] | None] = None
    """A frozen dataclass of `settings.setting` fields, read from the config's section `name`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.settings: Any = config.section(self.name, self.Settings) if self.Settings else None

    def encode(self, update: Update, broadcast: Broadcast, seeds: Seeds) -> Update:
        """What is sent in the update's place. Called on the client; random draws come from keys of `seeds`."""
        return update

    def decode(self, update: Update, broadcast: Broadcast) -> Update:
        """The inverse, as far as there is one. Called on the server, before the update is validated."""
        return update


TRANSFORMS: Registry[type[UpdateTransform]] = Registry(
    "transform",
    {
        "identity": UpdateTransform,
        "top-k": "dynafed.compression:TopK",
        "8-bit": "dynafed.compression:EightBit",
    },
    key="update_transforms",
)
"""Update transforms by name."""


@dataclass(frozen=True)
class TransformChain:
    """Transforms in the order in which a client applies them; a server undoes them in reverse."""

    transforms: Sequence[UpdateTransform] = ()

    @classmethod
    def of(cls, config: Config) -> TransformChain:
        """The chain that a config names."""
        from dynafed.privacy import Clip, dp_settings
        from dynafed.secure_aggregation import Mask

        kinds = [TRANSFORMS.load(name) for name in config.update_transforms]
        for name, kind in zip(config.update_transforms, kinds, strict=True):
            if not (isinstance(kind, type) and issubclass(kind, UpdateTransform)):
                raise UserError(f"update_transforms = '{name}' is not a dynafed.transforms.UpdateTransform")
        private = [Clip(config)] if dp_settings(config) else []
        masked = [Mask(config)] if config.secure_aggregation else []
        return cls([*private, *(kind(config) for kind in kinds), *masked])

    def encode(self, update: Update, broadcast: Broadcast, seeds: Seeds) -> Update:
        """What the client sends."""
        for transform in self.transforms:
            update = transform.encode(update, broadcast, seeds)
        return update

    def decode(self, update: Update, broadcast: Broadcast) -> Update:
        """What the server averages; an update that can't be decoded becomes a failed one."""
        if update.failure:
            return update
        for transform in reversed(self.transforms):
            try:
                update = transform.decode(update, broadcast)
            except Exception as error:  # a client may send anything
                return Update.failed(update.client, f"{transform.name} can't decode it: {type(error).__name__}")
        return update

"""Between our trees of tensors and Flower's array records. Nothing is ever unpickled on the way."""

from __future__ import annotations

from collections import OrderedDict

from flwr.common import ArrayRecord

from dynafed.tree import Tree, clone_contiguous


def to_record(tree: Tree) -> ArrayRecord:
    """A tree as Flower sends it; order and dtypes stay."""
    return ArrayRecord(OrderedDict(tree))


def from_record(record: ArrayRecord) -> Tree:
    """A tree from what Flower delivered; the tensors are aligned copies, so that arithmetic gives the same bits."""
    return clone_contiguous(record.to_torch_state_dict())

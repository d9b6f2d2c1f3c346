"""Reads the list that binds the public keys of Flower's nodes to partitions."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

from dynafed.errors import UserError


def read_node_keys(file: Path, num_partitions: int) -> dict[bytes, int]:
    """Public key (DER) -> partition, from lines such as `0 ecdsa-sha2-nistp384 AAAA... comment`.

    A partition may have several keys, a key only one partition. Empty lines and those that begin with # are skipped.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"dynafed-node-keys = '{file}' can't be read: {error}") from None
    partition_of: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first, _, ssh_key = line.strip().partition(" ")
        if not (first.isdecimal() and len(first) < 10 and int(first) < num_partitions):
            raise UserError(f"{file}, line {number} begins with '{first}', not with a partition below {num_partitions}")
        try:
            public_key = load_ssh_public_key(ssh_key.strip().encode())
        except (ValueError, UnsupportedAlgorithm) as error:
            raise UserError(f"{file}, line {number} holds no public key in OpenSSH's format: {error}") from None
        der = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if partition_of.setdefault(der, int(first)) != int(first):
            raise UserError(f"{file}, line {number} binds a key to partition {first} that has another one above")
    if not partition_of:
        raise UserError(f"dynafed-node-keys = '{file}' lists no keys: give each partition a line, or leave the key out")
    return partition_of


def der_from_pem(pem: bytes) -> bytes:
    """A node's public key, as Flower's SuperLink gives it, as `read_node_keys` returns it; empty if it gives none."""
    try:
        return load_pem_public_key(pem).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, UnsupportedAlgorithm):
        return b""

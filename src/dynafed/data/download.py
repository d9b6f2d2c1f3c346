"""Downloads of the official files: resumed where they were cut, kept only if their checksum is right."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dynafed.errors import UserError
from dynafed.settings import nearest

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Download:
    """Where a dataset's official files are, and their MD5 as published."""

    url: str
    files: Mapping[str, str]


DOWNLOADS: dict[str, Download] = {
    "fmnist": Download(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "mnist": Download(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "cifar10": Download(
        "https://www.cs.toronto.edu/~kriz/", {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}
    ),
    "cifar100": Download(
        "https://www.cs.toronto.edu/~kriz/", {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"}
    ),
    "cinic10": Download(
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/",
        {"CINIC-10.tar.gz": "6ee4d0c996905fe93221de577967a372"},
    ),
}
"""What `fetch` can get, by dataset."""


def fetch(name: str, folder: Path | None, progress: Progress | None = None) -> Path:
    """Download a dataset's official files to FOLDER/NAME, which is returned.

    `progress` is called with the file's name, the bytes that are here and the bytes in all.
    """
    if name not in DOWNLOADS:
        raise UserError(f"nothing to fetch for '{name}': {nearest(name, DOWNLOADS)}")
    if folder is None:
        raise UserError(f"no folder to fetch {name} to: set DYNAFED_DATA or data_dir")
    target = folder / name
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"can't write to {target} ({error.strerror}): set DYNAFED_DATA or data_dir") from None
    for file, checksum in DOWNLOADS[name].files.items():
        if not ((target / file).exists() and _md5(target / file) == checksum):
            _download(name, target / file, checksum, progress or (lambda *_: None))
    return target


def by_hand(name: str, folder: Path | None) -> str:
    """The end of an error sentence: which files to put where."""
    download = DOWNLOADS[name]
    return f"put {', '.join(download.files)} (from {download.url}) in {(folder or Path('DATA_DIR')) / name}"


def _download(name: str, target: Path, checksum: str, progress: Progress) -> None:
    part = target.with_name(f"{target.name}.part")
    url = DOWNLOADS[name].url + target.name
    part.touch()
    complete = False
    while not complete:
        before = part.stat().st_size
        try:
            complete = _continue(url, part, progress)
            cut = "the connection was cut"
        except (OSError, http.client.HTTPException) as error:
            cut = str(getattr(error, "reason", "") or error or type(error).__name__)
        if not complete and part.stat().st_size <= before:
            raise UserError(f"could not reach {url} ({cut}): try again, or {by_hand(name, target.parent.parent)}")
    if (found := _md5(part)) != checksum:
        part.unlink()
        raise UserError(f"{url} sent a file with MD5 {found}, not {checksum}, so it was deleted: try again later")
    part.replace(target)


def _continue(url: str, part: Path, progress: Progress) -> bool:
    """Append what `part` lacks; whether it is now complete."""
    done = part.stat().st_size
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # nothing lies past the end: all of it is here
                return True
            raise
    with response, part.open("ab") as file:
        if response.status != 206:  # the server starts over
            file.truncate(done := 0)
        total = done + int(response.headers.get("Content-Length") or 0)
        while chunk := response.read(1 << 16):
            done += file.write(chunk)
            progress(part.name.removesuffix(".part"), done, max(total, done))
    return done >= total


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()

"""Downloads official files: a cut download is resumed, a file with a wrong checksum is deleted."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from dynafed.data.catalog import BUILTIN
from dynafed.data.spec import DatasetSpec, get_spec
from dynafed.errors import UserError
from dynafed.settings import nearest

Progress = Callable[[str, int, int], None]


def fetch(name: str, folder: Path | None, progress: Progress | None = None) -> Path:
    """Download a dataset's official files to FOLDER/NAME, which is returned.

    `progress` is called with the file's name, the bytes downloaded so far and the bytes in all.
    """
    spec = get_spec(name)
    if spec is None or spec.download is None:
        known = [spec.name for spec in BUILTIN.values() if spec.download]
        raise UserError(f"'{name}' can't be downloaded: {nearest(name, known)}")
    if folder is None:
        raise UserError(f"no folder to download {name} to: set DYNAFED_DATA or data_dir")
    target = folder / spec.name
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"can't write to {target} ({error.strerror}): set DYNAFED_DATA or data_dir") from None
    for file, checksum in spec.download.files.items():
        if not ((target / file).exists() and _md5(target / file) == checksum):
            _download(spec, target / file, checksum, progress or (lambda *_: None))
    return target


def manual_instructions(spec: DatasetSpec, folder: Path | None) -> str:
    """The end of an error sentence: which files to put where."""
    target = folder or Path("DATA_DIR")
    if spec.download is None:
        markers = [marker for form in spec.formats for marker in form.markers]
        return f"put {' or '.join(markers)} in {target}"
    return f"put {', '.join(spec.download.files)} (from {spec.download.url}) in {target / spec.name}"


def _download(spec: DatasetSpec, target: Path, checksum: str, progress: Progress) -> None:
    assert spec.download
    part = target.with_name(f"{target.name}.part")
    url = spec.download.url + target.name
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
            raise UserError(
                f"could not reach {url} ({cut}): try again, or {manual_instructions(spec, target.parent.parent)}"
            )
    if (found := _md5(part)) != checksum:
        part.unlink()
        raise UserError(f"{url} sent a file with MD5 {found}, not {checksum}, so it was deleted: try again later")
    part.replace(target)


def _continue(url: str, part: Path, progress: Progress) -> bool:
    """Append the rest of the file to `part`; returns whether it is now complete."""
    done = part.stat().st_size
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # no bytes after the end: the part is complete
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

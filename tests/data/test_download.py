import hashlib
import re
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dynafed.data import DATASETS, NAMES, Download, fetch
from dynafed.errors import UserError

CIFAR10 = DATASETS.load("cifar10")
BODY = bytes(range(256)) * 1000
FILE = "cifar-10-binary.tar.gz"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.asked.append(asked)
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and server.ranges else 0
        if self.path != f"/{FILE}":
            self.send_error(404)
            return
        if start >= len(BODY):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if server.sized:
            self.send_header("Content-Length", str(len(BODY) - start))
        self.end_headers()
        stop = server.cuts.pop(0) if server.cuts else len(BODY)
        self.wfile.write(BODY[start:stop])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(register):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.cuts, server.ranges, server.sized = [], [], True, True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        files = {FILE: hashlib.md5(BODY).hexdigest()}
        register("cifar10", replace(CIFAR10, download=Download(url, files)))
        yield server
        server.shutdown()
        thread.join()


def test_a_download_is_checked_named_and_not_repeated(server, tmp_path):
    seen = []
    folder = fetch("cifar10", tmp_path / "new", lambda *report: seen.append(report))
    assert folder == tmp_path / "new" / "cifar10"
    assert [file.name for file in folder.iterdir()] == [FILE]
    assert (folder / FILE).read_bytes() == BODY
    assert seen[-1] == (FILE, len(BODY), len(BODY))
    fetch("cifar10", tmp_path / "new")
    assert server.asked == [None]


def test_a_wrong_file_is_replaced(server, tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / FILE).write_bytes(b"old")
    fetch("cifar10", tmp_path)
    assert (tmp_path / "cifar10" / FILE).read_bytes() == BODY


def test_a_cut_connection_is_resumed(server, tmp_path):
    server.cuts = [100_000, 150_000]
    fetch("cifar10", tmp_path)
    assert server.asked == [None, "bytes=100000-", "bytes=150000-"]
    assert (tmp_path / "cifar10" / FILE).read_bytes() == BODY


def test_a_part_of_an_earlier_run_is_resumed(server, tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / f"{FILE}.part").write_bytes(BODY[:1000])
    seen = []
    fetch("cifar10", tmp_path, lambda *report: seen.append(report))
    assert server.asked == ["bytes=1000-"]
    assert seen[0][1] > 1000
    assert seen[-1][2] == len(BODY)


def test_a_part_that_is_whole_needs_only_its_new_name(server, tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / f"{FILE}.part").write_bytes(BODY)
    fetch("cifar10", tmp_path)
    assert (tmp_path / "cifar10" / FILE).read_bytes() == BODY


def test_a_server_that_ignores_ranges_starts_over(server, tmp_path):
    server.ranges = False
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / f"{FILE}.part").write_bytes(BODY[:1000])
    fetch("cifar10", tmp_path)
    assert (tmp_path / "cifar10" / FILE).read_bytes() == BODY


def test_a_server_may_not_say_how_long_the_file_is(server, tmp_path):
    server.sized = False
    fetch("cifar10", tmp_path)
    assert (tmp_path / "cifar10" / FILE).read_bytes() == BODY


def test_a_wrong_checksum_is_said_and_leaves_nothing(server, tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / f"{FILE}.part").write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match=r"MD5 .* deleted"):
        fetch("cifar10", tmp_path)
    assert list((tmp_path / "cifar10").iterdir()) == []


def test_a_connection_that_gives_nothing_ends_in_one_line(server, tmp_path):
    server.cuts = [1000, 1000]
    with pytest.raises(UserError, match=r"could not reach .* \(the connection was cut\)") as caught:
        fetch("cifar10", tmp_path)
    assert "\n" not in str(caught.value)
    fetch("cifar10", tmp_path)
    assert server.asked[-1] == "bytes=1000-"


def test_offline_names_the_files_and_their_place(tmp_path, register):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    register("cifar10", replace(CIFAR10, download=Download(url, {FILE: ""})))
    with pytest.raises(UserError, match=f"could not reach {url}{FILE} .*put {FILE} .* in {tmp_path}/cifar10") as caught:
        fetch("cifar10", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_gone(server, tmp_path, register):
    url = DATASETS.load("cifar10").download.url
    register("cifar10", replace(CIFAR10, download=Download(f"{url}other/", {FILE: ""})))
    with pytest.raises(UserError, match=r"could not reach .*\(Not Found\)"):
        fetch("cifar10", tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="can't write to"):
        fetch("cifar10", tmp_path / "file")


def test_what_cannot_be_fetched(tmp_path):
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        fetch("cifar1", tmp_path)
    with pytest.raises(UserError, match="set DYNAFED_DATA"):
        fetch("cifar10", None)
    with pytest.raises(UserError, match=r"'digits' can't be downloaded: known: cifar10, .*, mnist"):
        fetch("digits", tmp_path)
    for download in filter(None, (DATASETS.load(name).download for name in NAMES)):
        assert re.fullmatch("https://.*/", download.url)

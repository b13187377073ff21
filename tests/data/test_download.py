"""Downloads of built-in data sets, from a web server on this machine."""

from __future__ import annotations

import hashlib
import logging
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pooch
import pytest
import torch

from hotloop.data.builtin import FASHION_MNIST, IdxSet, fashion_mnist, load_builtin
from hotloop.data.bundle import Bundle
from hotloop.data.downloads import download
from hotloop.errors import DataError, DiskError
from tests.support.tasks.idx_datasets import NAMES, assert_says, put, small_files


@pytest.fixture(scope="module")
def content() -> dict[str, bytes]:
    return small_files()


class Site(ThreadingHTTPServer):
    """A web server on this machine that serves `files` and keeps a list of what it was asked for."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.asked = files, list[str]()
        self.cut_to: int | None = None
        self.silent = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        name = self.path[1:]
        self.server.asked.append(name)
        if self.server.silent.is_set():
            threading.Event().wait(2)
            return
        data = self.server.files.get(name)
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write((data or b"")[: self.server.cut_to])

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def start() -> Iterator[Callable[[dict[str, bytes]], Site]]:
    sites = []

    def serve(files: dict[str, bytes]) -> Site:
        sites.append(Site(dict(files)))
        threading.Thread(target=sites[-1].serve_forever, args=(0.01,), daemon=True).start()
        return sites[-1]

    yield serve
    for site in sites:
        site.shutdown()
        site.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, in an empty home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return Path(pooch.os_cache("hotloop")) / "small"


@pytest.fixture
def small(content: dict[str, bytes], cache: Path, tmp_path: Path) -> IdxSet:
    """A published set like Fashion-MNIST, of which the system has nothing."""
    return replace(
        FASHION_MNIST,
        name="Small",
        key="small",
        package="dataset-small",
        system=tmp_path / "system",
        urls=(),
        sha256={name: hashlib.sha256(data).hexdigest() for name, data in content.items()},
        pixel_sum=784 * sum(range(40)),
    )


def get(spec: IdxSet, *urls: str, download: bool = True, otherwise: str | None = None) -> Bundle:
    return load_builtin(replace(spec, urls=urls), None, 5, 0, download, otherwise)


def held(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_a_download_fills_the_cache_and_the_next_call_reads_it(small, start, content, cache, tmp_path) -> None:
    site = start(content)
    bundle = get(small, site.url)
    assert site.asked == list(NAMES) and held(cache) == set(NAMES)
    assert bundle.note == ""
    assert torch.equal(bundle.train[0], fashion_mnist(put(content, tmp_path / "mine"), validation=5).train[0])
    again = get(small, site.url, download=False)
    assert site.asked == list(NAMES) and torch.equal(again.train[0], bundle.train[0])


def test_only_what_the_cache_lacks_or_holds_wrongly_is_downloaded(small, start, content, cache) -> None:
    put({NAMES[0]: content[NAMES[0]], NAMES[1]: b"half of it", NAMES[2]: content[NAMES[2]]}, cache)
    site = start(content)
    get(small, site.url)
    assert site.asked == [NAMES[1], NAMES[3]]
    assert {name: (cache / name).read_bytes() for name in held(cache)} == content


def test_the_systems_folder_comes_first(small, start, content, cache) -> None:
    put(content, small.system)
    put(dict.fromkeys(NAMES, b"not to be read"), cache)
    site = start(content)
    assert len(get(small, site.url).train[0]) == 35
    assert site.asked == []


def test_a_file_with_the_wrong_checksum_is_not_kept(small, start, content, cache) -> None:
    site = start({**content, NAMES[2]: content[NAMES[2]] + b"!"})
    with pytest.raises(DataError) as error:
        get(small, site.url)
    assert "SHA-256" in str(error.value) and NAMES[2] in str(error.value) and site.url in str(error.value)
    assert held(cache) == set(NAMES[:2])


def test_another_address_is_tried_when_one_fails(small, start, content, cache) -> None:
    spoilt = start({**content, NAMES[0]: b"<html>log in first</html>"})
    del spoilt.files[NAMES[1]]
    site = start(content)
    get(small, spoilt.url, site.url)
    assert site.asked == [NAMES[0], NAMES[1]] and held(cache) == set(NAMES)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_offline_the_message_says_where_it_looked_and_what_to_do(small, cache) -> None:
    url = f"http://127.0.0.1:{free_port()}/"
    with pytest.raises(DataError) as error:
        get(small, url)
    message = str(error.value)
    for part in (
        small.system,
        cache,
        f"{url} (no connection)",
        "dataset-small",
        "folder=",
        "otherwise='digits'",
    ):
        assert str(part) in message
    assert "\n" not in message and held(cache) == set()


def test_a_set_without_a_package_names_none(small) -> None:
    with pytest.raises(DataError) as error:
        get(replace(small, package=""), f"http://127.0.0.1:{free_port()}/")
    assert "Debian" not in str(error.value) and "folder=" in str(error.value)


def test_a_missing_file_a_broken_connection_and_silence_are_told_apart(small, start, content, monkeypatch) -> None:
    missing, broken, silent = start({}), start(content), start(content)
    broken.cut_to = 50
    silent.silent.set()
    monkeypatch.setattr(download, "READ_S", 0.2)
    with pytest.raises(DataError) as error:
        get(small, missing.url, broken.url, silent.url)
    for part in (
        f"{missing.url} (HTTP status 404)",
        f"{broken.url} (the connection broke off)",
        f"{silent.url} (no answer in time)",
    ):
        assert part in str(error.value)


def test_a_proxy_that_is_away_and_tls_that_fails_are_told_apart(small, start, monkeypatch) -> None:
    plain = start({}).url.replace("http:", "https:")
    with pytest.raises(DataError) as error:
        get(small, plain)
    assert f"{plain} (no trusted TLS connection)" in str(error.value)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(DataError) as error:
        get(small, "http://example.invalid/")
    assert "http://example.invalid/ (the proxy can't be reached)" in str(error.value)


def test_without_download_nothing_is_asked_of_the_network(small, start, content) -> None:
    site = start(content)
    with pytest.raises(DataError, match="download=True"):
        get(small, site.url, download=False)
    assert site.asked == []


def test_otherwise_digits_says_that_it_did_and_why(small) -> None:
    url = f"http://127.0.0.1:{free_port()}/"
    bundle = get(small, url, otherwise="digits")
    assert bundle.name == "digits" and "digits" in bundle.note and "Small is neither in" in bundle.note
    assert f"{url} (no connection)" in bundle.note
    assert bundle.validation is not None and bundle.test is not None
    assert [len(y) for _, y in (bundle.train, bundle.validation, bundle.test)] == [1495, 5, 297]
    none = load_builtin(small, None, 0, 0, False, "digits")
    assert none.validation is None and "downloading is off" in none.note


def test_otherwise_is_not_used_when_the_data_is_there_but_spoilt(small, content, cache) -> None:
    put({**content, NAMES[0]: content[NAMES[0]][:-30]}, cache)
    with pytest.raises(DataError) as error:
        get(small, otherwise="digits")
    assert_says(error, cache / NAMES[0], "Delete it")


def test_otherwise_must_be_known(small) -> None:
    with pytest.raises(DataError, match="'letters'"):
        get(small, otherwise="letters")


def test_a_cache_that_cannot_be_made_is_named(small, start, content, cache) -> None:
    cache.parent.parent.mkdir(parents=True, exist_ok=True)
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(DataError) as error:
        get(small, start(content).url)
    assert_says(error, cache)


def test_a_file_that_may_not_grow_is_a_disk_error(small, start, content, cache) -> None:
    site = start(content)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(DiskError) as error:
            get(small, site.url, otherwise="digits")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_says(error, cache, NAMES[0])
    assert held(cache) == set()


def test_a_terminal_sees_each_files_progress_and_a_pipe_sees_nothing(
    small, start, content, cache, capfd, monkeypatch
) -> None:
    site = start(content)
    get(small, site.url)
    assert capfd.readouterr() == ("", "")
    for name in NAMES:
        (cache / name).unlink()
    monkeypatch.setenv("FORCE_COLOR", "1")
    get(small, site.url)
    out, err = capfd.readouterr()
    assert out == "" and all(name in err for name in NAMES)


def test_pooch_is_quiet_during_a_download_only(small, start, content) -> None:
    logger, heard = pooch.get_logger(), []
    listener = logging.Handler()
    listener.emit = heard.append
    logger.addHandler(listener)
    try:
        get(small, start(content).url)
        assert heard == []
        logger.info("afterwards")
        assert len(heard) == 1
    finally:
        logger.removeHandler(listener)

"""The mirror of MNIST: whether it answers, and the download in a process of its own."""

from __future__ import annotations

import functools
import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ps.workloads.mirror import Mirror, MirrorError


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@contextmanager
def serving(folder: Path, *, hold: threading.Event | None = None) -> Iterator[Mirror]:
    """A mirror in a thread; with `hold` no request is answered until it is set."""

    class Quiet(SimpleHTTPRequestHandler):
        def send_head(self) -> object:  # type: ignore[override]
            if hold is not None:
                hold.wait(60.0)
                self.send_error(503)
                return None
            return super().send_head()

        def log_message(self, *args: object) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                self.close_connection = True

    handler = functools.partial(Quiet, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="mirror")
    thread.start()
    try:
        yield Mirror(f"http://127.0.0.1:{server.server_port}/")
    finally:
        if hold is not None:
            hold.set()
        server.shutdown()
        thread.join()
        server.server_close()


def unreachable(mirror: Mirror) -> str:
    with pytest.raises(MirrorError) as caught:
        mirror.reach()
    return str(caught.value)


def download_refused(mirror: Mirror, folder: Path, timeout_s: float = 60.0) -> str:
    with pytest.raises(MirrorError) as caught:
        mirror.download(["a", "b"], folder, timeout_s)
    return str(caught.value)


def test_a_mirror_that_answers_is_reachable(tmp_path: Path) -> None:
    with serving(tmp_path) as mirror:
        mirror.reach()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:9", "127.0.0.1: Connection refused"),
        ("http://127.0.0.1:99999", "http://127.0.0.1:99999"),
        ("http://127.0.0.1:port", "http://127.0.0.1:port"),
        ("http://[", "http://["),
        ("http://a..b/", "a..b"),
    ],
)
def test_a_mirror_without_a_usable_address_is_unreachable(url: str, reason: str) -> None:
    assert reason in unreachable(Mirror(url))


def test_a_name_server_that_does_not_answer_is_given_up_in_time() -> None:
    asleep = threading.Event()

    def never(address: tuple[str, int], timeout: float) -> object:
        asleep.wait(30.0)
        raise OSError("too late")

    started_at = time.monotonic()
    message = unreachable(Mirror("http://mirror.invalid", connect=never, reach_timeout_s=0.1))
    assert time.monotonic() - started_at < 2.0
    asleep.set()
    assert "mirror.invalid" in message
    assert "0.1 s" in message


def test_behind_a_proxy_the_mirror_itself_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    Mirror("http://mirror.invalid", connect=lambda *_, **__: pytest.fail("tried")).reach()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://here/mnist", ("here", 80)),
        ("https://here", ("here", 443)),
        ("http://here:8", ("here", 8)),
    ],
)
def test_the_port_is_that_of_the_url_or_its_scheme(url: str, address: tuple[str, int]) -> None:
    seen: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float) -> object:
        seen.append(address)
        raise OSError(111, "refused")

    assert unreachable(Mirror(url, connect=connect)) == f"{address[0]}: refused"
    assert seen == [address]


@pytest.mark.slow
def test_files_are_downloaded_and_unpacked(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    for name in ("a", "b"):
        (tmp_path / "from" / f"{name}.gz").write_bytes(gzip.compress(name.encode()))
    with serving(tmp_path / "from") as mirror:
        mirror.download(["a", "b"], tmp_path / "to", 60.0)
    left = {path.name: path.read_bytes() for path in (tmp_path / "to").iterdir()}
    assert left == {"a": b"a", "b": b"b"}


@pytest.mark.slow
def test_a_mirror_without_the_files_is_named_with_its_answer(tmp_path: Path) -> None:
    with serving(tmp_path) as mirror:
        message = download_refused(mirror, tmp_path)
    assert f"{mirror.url}a.gz" in message
    assert "404" in message


@pytest.mark.slow
def test_a_download_that_takes_too_long_is_given_up_in_time(tmp_path: Path) -> None:
    with serving(tmp_path, hold=threading.Event()) as mirror:
        started_at = time.monotonic()
        message = download_refused(mirror, tmp_path, timeout_s=3.0)
        took_s = time.monotonic() - started_at
    assert message.startswith(mirror.url)
    assert "3 s" in message
    assert took_s < 6.0

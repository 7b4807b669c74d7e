"""The raw files of MNIST: found where they may lie, verified, and fetched whole or not at all."""

from __future__ import annotations

import functools
import gzip
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ps.settings.config import Config
from ps.settings.errors import ConfigError
from ps.workloads import mnist_files

MNIST = Path(__file__).parents[3] / "shared" / "mnist"
UNREACHABLE = "http://127.0.0.1:9"
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
NAMES = [TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS]


@pytest.fixture(autouse=True)
def nothing_read_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    mnist_files.read.cache_clear()
    yield
    mnist_files.read.cache_clear()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Four files in the format of MNIST's, 20 and 10 samples, that count as the real ones."""
    draw = random.Random(0)
    contents = {}
    for part, count in (("train", 20), ("t10k", 10)):
        header = b"\0\0\x08\x03" + count.to_bytes(4, "big") + b"\0\0\0\x1c" * 2
        contents[f"{part}-images-idx3-ubyte"] = header + draw.randbytes(count * 784)
        labels = bytes(index % 10 for index in range(count))
        contents[f"{part}-labels-idx1-ubyte"] = b"\0\0\x08\x01" + count.to_bytes(4, "big") + labels
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    monkeypatch.setattr(mnist_files, "SHA256", sums)
    return contents


def write(folder: Path, contents: dict[str, bytes], *, zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, compresslevel=1))
        else:
            (folder / name).write_bytes(content)
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def read_refused(data_dir: Path, name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        mnist_files.read(data_dir, name)
    assert caught.value.exit_code == 2
    return str(caught.value)


def fetch_refused(data_dir: Path, mirror: str, *, bound_s: float = 60.0) -> str:
    with pytest.raises(ConfigError) as caught:
        mnist_files.fetch_if_needed(data_dir, mirror, bound_s=bound_s)
    assert caught.value.exit_code == 2
    return str(caught.value)


def unreachable(reason: str) -> str:
    return (
        f"{reason}, and it cannot be fetched (127.0.0.1: Connection refused); "
        "put the four files of MNIST there, or type --workload digits"
    )


@contextmanager
def mirror_of(folder: Path, *, hold: threading.Event | None = None) -> Iterator[str]:
    """Serves a folder from a thread; with `hold` no request is answered until it is set."""

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
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        if hold is not None:
            hold.set()
        server.shutdown()
        thread.join()
        server.server_close()


# Where the files may lie.


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("where", ["MNIST/raw", "."], ids=["MNIST-raw", "data-dir"])
def test_the_files_are_found_plain_and_zipped_in_both_folders(
    tmp_path: Path, small: dict[str, bytes], where: str, zipped: bool
) -> None:
    write(tmp_path / where, small, zipped=zipped)
    assert {name: bytes(mnist_files.read(tmp_path, name)) for name in NAMES} == small


def test_the_files_may_lie_some_here_and_some_there(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    raw = tmp_path / "MNIST" / "raw"
    write(raw, {TRAIN_IMAGES: small[TRAIN_IMAGES]})
    write(raw, {TRAIN_LABELS: small[TRAIN_LABELS]}, zipped=True)
    write(tmp_path, {TEST_IMAGES: small[TEST_IMAGES]})
    write(tmp_path, {TEST_LABELS: small[TEST_LABELS]}, zipped=True)
    assert {name: bytes(mnist_files.read(tmp_path, name)) for name in NAMES} == small


def test_files_that_are_there_need_no_mirror_and_stay_as_they_are(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    write(tmp_path / "MNIST" / "raw", small, zipped=True)
    before = names_in(tmp_path)
    mnist_files.fetch_if_needed(tmp_path, UNREACHABLE, bound_s=1.0)
    assert names_in(tmp_path) == before


def test_the_folder_may_be_read_only(tmp_path: Path, small: dict[str, bytes]) -> None:
    raw = write(tmp_path / "MNIST" / "raw", small, zipped=True)
    folders = (raw, raw.parent, tmp_path)
    for folder in folders:
        folder.chmod(0o500)
    try:
        before = [folder.stat().st_mtime_ns for folder in folders]
        mnist_files.fetch_if_needed(tmp_path, UNREACHABLE, bound_s=1.0)
        assert {name: bytes(mnist_files.read(tmp_path, name)) for name in NAMES} == small
        assert [folder.stat().st_mtime_ns for folder in folders] == before
    finally:
        for folder in reversed(folders):
            folder.chmod(0o700)


def test_a_process_reads_a_file_only_once(tmp_path: Path, small: dict[str, bytes]) -> None:
    write(tmp_path, small)
    first = mnist_files.read(tmp_path, TEST_LABELS)
    (tmp_path / TEST_LABELS).unlink()
    assert mnist_files.read(tmp_path, TEST_LABELS) is first


def test_a_file_that_was_missing_is_looked_for_again(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    read_refused(tmp_path, TEST_LABELS)
    write(tmp_path, small)
    assert mnist_files.read(tmp_path, TEST_LABELS) == small[TEST_LABELS]


# What is missing or damaged.


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named_with_its_folder(
    tmp_path: Path, small: dict[str, bytes], name: str
) -> None:
    assert read_refused(tmp_path, name) == f"{name} is not in {tmp_path}/MNIST/raw"


@pytest.mark.parametrize(
    ("damage", "length"),
    [(lambda content: content[:-1], 17), (lambda content: b"", 0), (lambda content: bytes(18), 18)],
    ids=["truncated", "empty", "zero-filled"],
)
def test_a_damaged_plain_file_is_named_with_its_length(
    tmp_path: Path, small: dict[str, bytes], damage: Callable[[bytes], bytes], length: int
) -> None:
    write(tmp_path, {TEST_LABELS: damage(small[TEST_LABELS])})
    assert read_refused(tmp_path, TEST_LABELS) == (
        f"{tmp_path}/{TEST_LABELS} is damaged: its {length} bytes have another checksum "
        "than MNIST's"
    )


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda zipped: zipped[:-9], "cannot be read: Compressed file ended before"),
        (lambda zipped: zipped[:5], "cannot be read: Compressed file ended before"),
        (lambda zipped: b"", "is damaged: its 0 bytes have another checksum than MNIST's"),
        (lambda zipped: bytes(len(zipped)), "cannot be read: Not a gzipped file"),
        (lambda zipped: b"<html>404</html>", "cannot be read: Not a gzipped file (b'<h')"),
        (lambda zipped: gzip.compress(b"else"), "is damaged: its 4 bytes have another checksum"),
    ],
    ids=["truncated", "cut-in-header", "empty", "zero-filled", "not-gzip", "other-content"],
)
def test_a_damaged_gz_is_named_with_the_reason(
    tmp_path: Path, small: dict[str, bytes], damage: Callable[[bytes], bytes], fault: str
) -> None:
    path = tmp_path / f"{TEST_IMAGES}.gz"
    path.write_bytes(damage(gzip.compress(small[TEST_IMAGES])))
    assert read_refused(tmp_path, TEST_IMAGES).startswith(f"{path} {fault}")


def test_a_gz_cut_or_changed_at_any_byte_is_refused_or_whole(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    path, whole = tmp_path / f"{TEST_LABELS}.gz", gzip.compress(small[TEST_LABELS], mtime=0)
    cuts = [whole[:length] for length in range(len(whole))]
    for content in cuts:
        path.write_bytes(content)
        assert read_refused(tmp_path, TEST_LABELS).startswith(f"{path} ")
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 0xFF]) + whole[index + 1 :])
        mnist_files.read.cache_clear()
        try:
            assert mnist_files.read(tmp_path, TEST_LABELS) == small[TEST_LABELS]
        except ConfigError as error:
            assert str(error).startswith(f"{path} ")


def test_a_folder_of_that_name_is_no_file(tmp_path: Path, small: dict[str, bytes]) -> None:
    (tmp_path / TEST_LABELS).mkdir()
    message = read_refused(tmp_path, TEST_LABELS)
    assert message.startswith(f"{tmp_path}/{TEST_LABELS} cannot be read: ")
    assert "Is a directory" in message


def test_a_damaged_file_with_a_whole_one_beside_it_does_no_harm(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    write(tmp_path, small, zipped=True)
    write(tmp_path, {TRAIN_IMAGES: b"half"})
    assert mnist_files.read(tmp_path, TRAIN_IMAGES) == small[TRAIN_IMAGES]
    mnist_files.fetch_if_needed(tmp_path, UNREACHABLE, bound_s=1.0)
    assert (tmp_path / TRAIN_IMAGES).read_bytes() == b"half"


def test_of_two_damaged_files_the_first_is_named(tmp_path: Path, small: dict[str, bytes]) -> None:
    raw = write(tmp_path / "MNIST" / "raw", {TEST_LABELS: b"a"})
    write(tmp_path, {TEST_LABELS: b"bc"})
    assert read_refused(tmp_path, TEST_LABELS) == (
        f"{raw}/{TEST_LABELS} is damaged: its 1 bytes have another checksum than MNIST's"
    )


@pytest.mark.parametrize("how", ["too-long", "forbidden"])
def test_a_data_dir_that_cannot_be_looked_into_is_named(
    tmp_path: Path, small: dict[str, bytes], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = tmp_path / ("x" * 300 if how == "too-long" else "closed")
    if how == "forbidden":  # made up: nothing is forbidden to root

        def refuse(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "exists", refuse)
        monkeypatch.setattr(Path, "read_bytes", refuse)
    assert str(data_dir) in fetch_refused(data_dir, UNREACHABLE)
    assert str(data_dir) in read_refused(data_dir, TEST_LABELS)


# A mirror that cannot be used; no process is started for it.


def test_with_an_unreachable_mirror_a_missing_file_and_the_reason_are_named(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    assert fetch_refused(tmp_path, UNREACHABLE) == unreachable(
        f"{TRAIN_IMAGES} is not in {tmp_path}/MNIST/raw"
    )
    assert names_in(tmp_path) == []


def test_with_an_unreachable_mirror_not_even_the_data_folder_is_made(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    fetch_refused(tmp_path / "data", UNREACHABLE)
    assert names_in(tmp_path) == []


def test_with_an_unreachable_mirror_a_damaged_file_is_named_and_stays(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    write(tmp_path, small)
    write(tmp_path, {TEST_IMAGES: b"half"})
    assert fetch_refused(tmp_path, UNREACHABLE) == unreachable(
        f"{tmp_path}/{TEST_IMAGES} is damaged: its 4 bytes have another checksum than MNIST's"
    )
    assert (tmp_path / TEST_IMAGES).read_bytes() == b"half"
    assert names_in(tmp_path) == sorted(NAMES)


def test_a_mirror_that_takes_no_connection_in_time_is_given_up(
    tmp_path: Path, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = threading.Event()

    def never(address: tuple[str, int], timeout: float) -> object:
        asleep.wait(30.0)
        raise OSError("too late")

    monkeypatch.setattr(mnist_files, "REACH_BOUND_S", 0.1)
    monkeypatch.setattr(mnist_files.socket, "create_connection", never)
    started_at = time.monotonic()
    message = fetch_refused(tmp_path, "http://mirror.invalid/mnist")
    assert time.monotonic() - started_at < 2.0
    asleep.set()
    assert "cannot be fetched (mirror.invalid does not answer within 0 s); " in message
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "mirror", ["http://127.0.0.1:99999", "http://127.0.0.1:port", "http://[", "http://a..b/"]
)
def test_a_mirror_that_is_no_address_is_refused(
    tmp_path: Path, small: dict[str, bytes], mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist_files, "_download", lambda *rest: pytest.fail("it was asked"))
    message = fetch_refused(tmp_path, mirror)
    assert message.startswith(f"{TRAIN_IMAGES} is not in {tmp_path}/MNIST/raw, and it cannot be")
    assert names_in(tmp_path) == []


def test_a_data_folder_that_cannot_be_made_is_an_error_with_the_reason(
    tmp_path: Path, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(mnist_files, "_reach", lambda mirror: None)
    message = fetch_refused(tmp_path / "file", "http://mirror/")
    assert "it cannot be fetched ([Errno 20] Not a directory: " in message
    assert (tmp_path / "file").read_text() == "mine"


# The download, with its process replaced.


def test_what_was_fetched_is_put_in_place_whole(
    tmp_path: Path, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], str, float]] = []

    def download(names: list[str], folder: str, mirror: str, bound_s: float) -> None:
        asked.append((names, mirror, bound_s))
        write(Path(folder), {name: small[name] for name in names})
        assert not (tmp_path / "MNIST" / "raw" / TRAIN_IMAGES).exists()

    monkeypatch.setattr(mnist_files, "_reach", lambda mirror: None)
    monkeypatch.setattr(mnist_files, "_download", download)
    mnist_files.fetch_if_needed(tmp_path, "http://mirror/", bound_s=7.0)
    assert asked == [(NAMES, "http://mirror/", 7.0)]
    assert names_in(tmp_path / "MNIST" / "raw") == sorted(NAMES)
    assert {name: bytes(mnist_files.read(tmp_path, name)) for name in NAMES} == small


def test_only_what_is_missing_or_damaged_is_fetched(
    tmp_path: Path, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write(tmp_path / "MNIST" / "raw", small, zipped=True)
    (raw / f"{TRAIN_LABELS}.gz").unlink()
    (raw / f"{TEST_IMAGES}.gz").write_bytes(b"half")
    asked: list[str] = []

    def download(names: list[str], folder: str, mirror: str, bound_s: float) -> None:
        asked.extend(names)
        write(Path(folder), {name: small[name] for name in names})

    monkeypatch.setattr(mnist_files, "_reach", lambda mirror: None)
    monkeypatch.setattr(mnist_files, "_download", download)
    mnist_files.fetch_if_needed(tmp_path, "http://mirror/", bound_s=7.0)
    assert asked == [TRAIN_LABELS, TEST_IMAGES]
    assert {name: bytes(mnist_files.read(tmp_path, name)) for name in NAMES} == small


def test_one_wrong_file_of_four_leaves_none_in_place(
    tmp_path: Path, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(names: list[str], folder: str, mirror: str, bound_s: float) -> None:
        write(Path(folder), small | {TEST_LABELS: b"login page"})

    monkeypatch.setattr(mnist_files, "_reach", lambda mirror: None)
    monkeypatch.setattr(mnist_files, "_download", download)
    message = fetch_refused(tmp_path / "data", "http://mirror/")
    assert "(http://mirror/ gives something else: " in message
    assert f"{TEST_LABELS} is damaged: its 10 bytes have another checksum" in message
    assert names_in(tmp_path) == []


# The download itself.


@pytest.mark.slow
def test_a_good_mirror_fills_the_folder(tmp_path: Path, small: dict[str, bytes]) -> None:
    source = write(tmp_path / "mirror", small, zipped=True)
    with mirror_of(source) as mirror:
        mnist_files.fetch_if_needed(tmp_path / "data", mirror, bound_s=60.0)
    raw = tmp_path / "data" / "MNIST" / "raw"
    assert names_in(raw) == sorted(NAMES)
    assert {name: (raw / name).read_bytes() for name in NAMES} == small


@pytest.mark.slow
def test_a_damaged_file_is_replaced_and_no_other_is_asked_for(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    source = write(tmp_path / "mirror", {TEST_LABELS: small[TEST_LABELS]}, zipped=True)
    raw = write(tmp_path / "data" / "MNIST" / "raw", small)
    write(raw, {TEST_LABELS: small[TEST_LABELS][:-1]})
    with mirror_of(source) as mirror:
        mnist_files.fetch_if_needed(tmp_path / "data", mirror, bound_s=60.0)
    assert {name: (raw / name).read_bytes() for name in names_in(raw)} == small


@pytest.mark.slow
def test_a_mirror_that_gives_damaged_files_leaves_nothing(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    contents = small | {TEST_LABELS: b"not labels"}
    with mirror_of(write(tmp_path / "mirror", contents, zipped=True)) as mirror:
        message = fetch_refused(tmp_path / "data", mirror)
    assert message.startswith(
        f"{TRAIN_IMAGES} is not in {tmp_path}/data/MNIST/raw, and it cannot be fetched "
        f"({mirror} gives something else: "
    )
    assert f"{TEST_LABELS} is damaged: its 10 bytes have another checksum" in message
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_a_mirror_without_the_files_is_named_with_its_answer(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    (tmp_path / "mirror").mkdir()
    with mirror_of(tmp_path / "mirror") as mirror:
        message = fetch_refused(tmp_path / "data", mirror)
    assert f"({mirror}{TRAIN_IMAGES}.gz: HTTP Error 404: File not found); " in message
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_a_mirror_slower_than_the_bound_is_given_up_in_time(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    (tmp_path / "mirror").mkdir()
    with mirror_of(tmp_path / "mirror", hold=threading.Event()) as mirror:
        started_at = time.monotonic()
        message = fetch_refused(tmp_path / "data", mirror, bound_s=3.0)
        took_s = time.monotonic() - started_at
    assert f"({mirror}: not done within 3 s); " in message
    assert took_s < 6.0
    assert not (tmp_path / "data").exists()


# The data set made of the files.


@pytest.fixture
def data_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with MNIST: the real one if it is here, else the small one."""
    if MNIST.is_dir():
        return MNIST
    write(tmp_path / "MNIST" / "raw", request.getfixturevalue("small"), zipped=True)
    return tmp_path


def test_the_data_set_is_made_of_the_files(data_dir: Path) -> None:
    from ps.workload import fetch
    from ps.workloads import mnist
    from ps.workloads.checks import check

    workload = mnist.build(Config(data_dir=data_dir))
    check(workload, "--workload mnist")
    sizes = (len(workload.train), len(workload.test))
    assert (workload.name, sizes) == ("mnist", (60000, 10000) if data_dir == MNIST else (20, 10))
    images = mnist_files.read(data_dir, TEST_IMAGES)
    labels = mnist_files.read(data_dir, TEST_LABELS)
    inputs, targets = fetch(workload.test, [9, 0])
    assert tuple(inputs.shape) == (2, 1, 28, 28)
    assert targets.tolist() == [labels[8 + 9], labels[8]]
    pixels = (inputs[0] * 0.3081 + 0.1307) * 255
    assert pixels.round().flatten().tolist() == list(images[16 + 9 * 784 : 16 + 10 * 784])


def test_the_small_files_make_a_data_set_of_their_size(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    from ps.workloads import mnist

    write(tmp_path, small)
    workload = mnist.build(Config(data_dir=tmp_path))
    assert (len(workload.train), len(workload.test)) == (20, 10)


def test_a_data_set_with_a_missing_file_is_refused_by_its_name(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    from ps.workloads import mnist

    write(tmp_path, small)
    (tmp_path / TEST_LABELS).unlink()
    with pytest.raises(ConfigError) as caught:
        mnist.build(Config(data_dir=tmp_path))
    assert str(caught.value) == f"{TEST_LABELS} is not in {tmp_path}/MNIST/raw"

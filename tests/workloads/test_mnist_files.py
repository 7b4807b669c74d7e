"""The raw files of MNIST: found where they may be, verified, and fetched all or not at all."""

from __future__ import annotations

import gzip
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from ps.settings.config import Config
from ps.settings.errors import ConfigError
from ps.workloads import mnist_files
from ps.workloads.mirror import Mirror, MirrorError

MNIST = Path(__file__).parents[3] / "shared" / "mnist"
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
NAMES = [TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS]


class Unreachable(Mirror):
    def reach(self) -> None:
        raise MirrorError("it is gone")

    def download(self, names: Sequence[str], folder: Path, timeout_s: float) -> None:
        pytest.fail("it was asked")


class Filled(Mirror):
    """Has these files, in this process."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        super().__init__("http://mirror/")
        self._contents = contents
        self.asked: list[tuple[list[str], float]] = []

    def reach(self) -> None:
        pass

    def download(self, names: Sequence[str], folder: Path, timeout_s: float) -> None:
        self.asked.append((list(names), timeout_s))
        write(folder, {name: self._contents[name] for name in names})
        raw = folder.parent
        assert not set(NAMES) & set(names) & {path.name for path in raw.iterdir()}


UNREACHABLE = Unreachable("http://mirror/")


@pytest.fixture(autouse=True)
def nothing_read_yet() -> Iterator[None]:
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


def write(folder: Path, contents: Mapping[str, bytes], *, zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, compresslevel=1))
        else:
            (folder / name).write_bytes(content)
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def read_all(data_dir: Path) -> dict[str, bytes]:
    return {name: bytes(mnist_files.read(data_dir, name)) for name in NAMES}


def read_refused(data_dir: Path, name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        mnist_files.read(data_dir, name)
    return str(caught.value)


def fetch_refused(data_dir: Path, mirror: Mirror) -> str:
    with pytest.raises(ConfigError) as caught:
        mnist_files.fetch_if_needed(data_dir, mirror, timeout_s=60.0)
    return str(caught.value)


# Where the files may be.


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("where", ["MNIST/raw", "."], ids=["MNIST-raw", "data-dir"])
def test_the_files_are_found_plain_and_zipped_in_both_folders(
    tmp_path: Path, small: dict[str, bytes], where: str, zipped: bool
) -> None:
    write(tmp_path / where, small, zipped=zipped)
    before = names_in(tmp_path)
    mnist_files.fetch_if_needed(tmp_path, UNREACHABLE, timeout_s=1.0)
    assert read_all(tmp_path) == small
    assert names_in(tmp_path) == before


def test_each_file_may_be_somewhere_else(tmp_path: Path, small: dict[str, bytes]) -> None:
    raw = tmp_path / "MNIST" / "raw"
    for index, name in enumerate(NAMES):
        write((raw, tmp_path)[index % 2], {name: small[name]}, zipped=index > 1)
    assert read_all(tmp_path) == small


def test_the_folder_may_be_read_only(tmp_path: Path, small: dict[str, bytes]) -> None:
    raw = write(tmp_path / "MNIST" / "raw", small, zipped=True)
    folders = (raw, raw.parent, tmp_path)
    for folder in folders:
        folder.chmod(0o500)
    try:
        before = [folder.stat().st_mtime_ns for folder in folders]
        mnist_files.fetch_if_needed(tmp_path, UNREACHABLE, timeout_s=1.0)
        assert read_all(tmp_path) == small
        assert [folder.stat().st_mtime_ns for folder in folders] == before
    finally:
        for folder in reversed(folders):
            folder.chmod(0o700)


def test_a_process_reads_a_file_once_and_looks_again_for_a_missing_one(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    read_refused(tmp_path, TEST_LABELS)
    write(tmp_path, small)
    first = mnist_files.read(tmp_path, TEST_LABELS)
    (tmp_path / TEST_LABELS).unlink()
    assert mnist_files.read(tmp_path, TEST_LABELS) is first


# What is missing or damaged.


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named_with_its_folder(
    tmp_path: Path, small: dict[str, bytes], name: str
) -> None:
    message = read_refused(tmp_path, name)
    assert name in message
    assert f"{tmp_path}/MNIST/raw" in message


@pytest.mark.parametrize("damage", [lambda whole: whole[:-1], lambda _: b"", lambda _: bytes(18)])
def test_a_damaged_plain_file_is_named_with_its_length(
    tmp_path: Path, small: dict[str, bytes], damage: Callable[[bytes], bytes]
) -> None:
    content = damage(small[TEST_LABELS])
    write(tmp_path, {TEST_LABELS: content})
    message = read_refused(tmp_path, TEST_LABELS)
    assert message.startswith(f"{tmp_path}/{TEST_LABELS} ")
    assert f"{len(content)} bytes" in message


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda zipped: zipped[:-9], "Compressed file ended before"),
        (lambda zipped: zipped[:5], "Compressed file ended before"),
        (lambda zipped: b"", "0 bytes"),
        (lambda zipped: bytes(len(zipped)), "Not a gzipped file"),
        (lambda zipped: b"<html>404</html>", "Not a gzipped file (b'<h')"),
        (lambda zipped: gzip.compress(b"else"), "4 bytes"),
    ],
    ids=["truncated", "cut-in-header", "empty", "zero-filled", "not-gzip", "other-content"],
)
def test_a_damaged_gz_is_named_with_the_reason(
    tmp_path: Path, small: dict[str, bytes], damage: Callable[[bytes], bytes], reason: str
) -> None:
    path = tmp_path / f"{TEST_IMAGES}.gz"
    path.write_bytes(damage(gzip.compress(small[TEST_IMAGES])))
    message = read_refused(tmp_path, TEST_IMAGES)
    assert message.startswith(f"{path} ")
    assert reason in message


def test_a_gz_cut_or_changed_at_any_byte_is_refused_or_complete(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    path, whole = tmp_path / f"{TEST_LABELS}.gz", gzip.compress(small[TEST_LABELS], mtime=0)
    for index in range(len(whole)):
        path.write_bytes(whole[:index])
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
    assert "Is a directory" in read_refused(tmp_path, TEST_LABELS)


def test_a_damaged_file_with_a_good_one_beside_it_does_no_harm(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    write(tmp_path, small, zipped=True)
    write(tmp_path, {TRAIN_IMAGES: b"half"})
    mnist_files.fetch_if_needed(tmp_path, UNREACHABLE, timeout_s=1.0)
    assert mnist_files.read(tmp_path, TRAIN_IMAGES) == small[TRAIN_IMAGES]
    assert (tmp_path / TRAIN_IMAGES).read_bytes() == b"half"


def test_of_two_damaged_files_the_first_is_named(tmp_path: Path, small: dict[str, bytes]) -> None:
    raw = write(tmp_path / "MNIST" / "raw", {TEST_LABELS: b"a"})
    write(tmp_path, {TEST_LABELS: b"bc"})
    assert read_refused(tmp_path, TEST_LABELS).startswith(f"{raw}/{TEST_LABELS} ")


@pytest.mark.parametrize("how", ["too-long", "forbidden"])
def test_a_data_dir_that_cannot_be_read_is_named(
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


# Fetching.


@pytest.mark.parametrize("there", [{}, {TEST_IMAGES: b"half"}], ids=["nothing", "damaged"])
def test_without_a_mirror_a_bad_file_and_the_reason_are_named_and_nothing_is_made(
    tmp_path: Path, small: dict[str, bytes], there: dict[str, bytes]
) -> None:
    if there:
        write(tmp_path, small | there)
    before = names_in(tmp_path)
    message = fetch_refused(tmp_path, UNREACHABLE)
    assert message.startswith(
        f"{tmp_path}/{TEST_IMAGES} is damaged" if there else f"{TRAIN_IMAGES} is not in {tmp_path}"
    )
    assert "(it is gone)" in message
    assert "--workload digits" in message
    assert names_in(tmp_path) == before


def test_a_data_folder_that_cannot_be_made_is_an_error_with_the_reason(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert "Not a directory" in fetch_refused(tmp_path / "file", Filled(small))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("bad", [NAMES, [TRAIN_LABELS, TEST_IMAGES]], ids=["all", "two"])
def test_only_what_is_missing_or_damaged_is_fetched(
    tmp_path: Path, small: dict[str, bytes], bad: list[str]
) -> None:
    raw = tmp_path / "MNIST" / "raw"
    good = {name: small[name] for name in NAMES if name not in bad}
    if good:
        write(raw, good, zipped=True)
        (raw / f"{TEST_IMAGES}.gz").write_bytes(b"half")
    before, mirror = set(names_in(raw)), Filled(small)
    mnist_files.fetch_if_needed(tmp_path, mirror, timeout_s=7.0)
    assert mirror.asked == [(bad, 7.0)]
    assert set(names_in(raw)) == before | set(bad)
    assert read_all(tmp_path) == small


def test_one_wrong_file_of_four_leaves_none_in_place(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    mirror = Filled(small | {TEST_LABELS: b"login page"})
    message = fetch_refused(tmp_path / "data", mirror)
    assert mirror.url in message
    assert f"{TEST_LABELS} is damaged: its 10 bytes" in message
    assert names_in(tmp_path) == []


# The data set made of the files.


@pytest.fixture
def data_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with MNIST: the real one if it is here, else the small one."""
    if MNIST.is_dir():
        return MNIST
    return write(tmp_path, request.getfixturevalue("small"), zipped=True)


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


def test_a_data_set_has_the_size_of_its_files_and_needs_all_of_them(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    from ps.workloads import mnist

    write(tmp_path, small)
    workload = mnist.build(Config(data_dir=tmp_path))
    assert (len(workload.train), len(workload.test)) == (20, 10)
    mnist_files.read.cache_clear()
    (tmp_path / TEST_LABELS).unlink()
    with pytest.raises(ConfigError, match=TEST_LABELS):
        mnist.build(Config(data_dir=tmp_path))

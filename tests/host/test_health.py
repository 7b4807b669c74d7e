"""What is wrong with the processes of a job: made-up readings at made-up times."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from ps.host.health import (
    Activity,
    Finding,
    Look,
    Mark,
    Memory,
    cause_of,
    judge,
    loss_of,
    standstill,
)
from ps.host.processes import GONE, UNINTERRUPTIBLE, UNKNOWN, ZOMBIE, Reading

TIMEOUT_S = 60.0
GIB = 1 << 30
MIB = 1 << 20


def alive(state: str = "sleeping", *, cpu_s: float | None = 1.0) -> Reading:
    return Reading(100, state, cpu_s, MIB)


def ended(status: int | None, state: str = ZOMBIE) -> Reading:
    return Reading(100, state, status=status)


def exited(code: int) -> Reading:
    return ended(code << 8)


KILLED = ended(signal.SIGKILL)
TERMINATED = ended(signal.SIGTERM)
UNREAD = Reading(100, UNKNOWN)


@dataclass
class Watched:
    """Looks one after the other, as the thread of a rank makes them."""

    timeout_s: float | None = TIMEOUT_S
    marks: Mapping[int, Mark] = field(default_factory=dict)
    before: Look | None = None

    def look(
        self, at: float, readings: Mapping[int, Reading], memory: Memory | None = None
    ) -> Sequence[Finding]:
        now = Look(at, readings, memory)
        self.before, findings = judge(self.before, now, self.marks, self.timeout_s)
        return findings


def works(since: float = 0.0) -> Mark:
    return Mark(Activity.WORKING, since)


def served(since: float = 0.0) -> Mark:
    return Mark(Activity.SERVED, since)


def test_nothing_is_wrong_with_ranks_that_live_and_make_progress_or_cannot_be_read() -> None:
    watched = Watched(marks={1: works(), 2: served(), 3: Mark(Activity.WAITING, -1e6)})
    readings = {0: alive(), 1: alive("running"), 2: alive("idle"), 3: UNREAD}
    assert watched.look(0.0, readings) == watched.look(59.9, readings) == []


# --- those that have ended


@pytest.mark.parametrize("state", [GONE, ZOMBIE])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_ended_by_itself_is_lost_at_once(rank: int, state: str) -> None:
    [finding] = Watched().look(0.0, {0: alive(), rank: ended(signal.SIGKILL, state)})
    assert finding == Finding(rank, "killed by SIGKILL", 4, is_gone=True)
    assert finding.is_seen_by_torchrun


@pytest.mark.parametrize(
    ("reading", "exit_code", "is_quiet"),
    [
        (exited(0), 4, True),
        (exited(1), 4, False),
        (exited(5), 4, False),
        (exited(6), 6, False),
        (exited(8), 4, False),
        (exited(9), 9, False),
        (exited(143), 4, False),
        (ended(9), 4, False),  # a signal that has the number of a code
    ],
)
def test_the_exit_code_of_a_lost_rank_is_the_jobs_where_it_tells_more(
    reading: Reading, exit_code: int, is_quiet: bool
) -> None:
    loss = loss_of(3, reading)
    assert (loss.rank, loss.exit_code, loss.is_gone) == (3, exit_code, True)
    assert (loss.is_quiet, loss.is_seen_by_torchrun) == (is_quiet, not is_quiet)
    assert not loss.is_halted and not loss.wants_stacks
    assert loss.text == reading.ended


def test_a_trainer_that_has_given_up_waiting_for_the_server_says_so() -> None:
    assert re.search("code 4, .* server", loss_of(3, exited(4)).text)
    assert "server" not in loss_of(0, exited(4)).text


@pytest.mark.parametrize(
    ("reading", "known_s", "asked_too", "is_cause"),
    [
        (alive(), 9.0, False, False),
        (alive(), 9.0, True, False),
        (KILLED, 0.0, False, True),
        (KILLED, 0.0, True, True),
        (exited(0), 0.0, False, True),
        (exited(1), 0.0, True, True),
        (TERMINATED, 0.0, False, False),
        (TERMINATED, 0.49, False, False),
        (TERMINATED, 0.5, False, True),
        (TERMINATED, 9.0, True, False),
        (exited(143), 0.49, False, False),
        (exited(143), 0.5, False, True),
        (exited(9), 0.49, False, False),
        (exited(9), 9.0, True, False),
        (ended(None, GONE), 0.0, True, True),
    ],
)
def test_a_rank_that_was_asked_to_end_is_a_cause_only_if_this_one_is_not_asked_too(
    reading: Reading, known_s: float, asked_too: bool, is_cause: bool
) -> None:
    cause = cause_of(2, reading, known_s, asked_too=asked_too)
    assert cause == (loss_of(2, reading) if is_cause else None)


def test_patience_counts_from_the_first_look_that_saw_the_end() -> None:
    watched = Watched()
    readings = {0: alive(), 1: TERMINATED, 2: exited(143), 3: exited(9), 4: KILLED, 5: exited(1)}
    assert [f.rank for f in watched.look(100.0, readings)] == [4, 5]
    assert [f.rank for f in watched.look(100.4, readings)] == [4, 5]
    assert [f.rank for f in watched.look(100.5, readings)] == [4, 5, 1, 2, 3]


def test_what_has_ended_is_found_before_what_stands_still_and_what_lacks_memory() -> None:
    watched = Watched(marks={1: works(), 2: works()})
    findings = watched.look(60.0, {0: alive(), 1: alive(), 2: KILLED}, Memory({0: GIB}, 0))
    assert [(f.rank, f.exit_code) for f in findings] == [(2, 4), (1, 5), (2, 5), (0, 6)]


@pytest.mark.parametrize(
    ("before", "timeout_s", "stood"),
    [(None, 3.0, False), (7.1, 3.0, False), (7.0, 3.0, True), (0.0, None, False)],
)
def test_a_rank_that_could_not_look_for_long_has_stood_still(
    before: float | None, timeout_s: float | None, stood: bool
) -> None:
    look = None if before is None else Look(before, {})
    finding = standstill(7, look, 10.0, timeout_s)
    assert (finding is not None) == stood
    assert finding is None or (finding.rank, finding.exit_code, finding.is_gone) == (7, 5, False)


# --- those that cannot run


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("stopped", "stopped"),
        ("tracing-stop", "stopped by a debugger"),
        (UNINTERRUPTIBLE, "in uninterruptible sleep"),
    ],
)
def test_a_rank_that_cannot_run_is_found_after_the_timeout_from_when_it_was_first_seen(
    state: str, words: str
) -> None:
    watched = Watched(marks={1: works(990.0)})  # and is not also found to make no progress
    assert watched.look(1000.0, {1: alive()}) == []
    assert watched.look(1000.5, {1: alive(state)}) == []
    assert watched.look(1060.4, {1: alive(UNINTERRUPTIBLE)}) == []  # no new start
    [finding] = watched.look(1060.5, {1: alive(state)})
    assert finding == Finding(1, f"it has been {words} for 60 s", 5, is_halted=True)


def test_each_rank_that_cannot_run_has_a_time_of_its_own_which_starts_anew_when_it_ran() -> None:
    watched, stopped = Watched(), alive("stopped")
    watched.look(0.0, {1: stopped, 2: stopped, 3: stopped})
    watched.look(30.0, {1: stopped, 2: alive()})
    assert watched.before is not None and set(watched.before.halted_since) == {1}
    watched.look(59.5, {1: stopped, 2: stopped})
    assert [f.rank for f in watched.look(119.0, {1: stopped, 2: stopped})] == [1]
    assert [f.rank for f in watched.look(119.5, {1: stopped, 2: stopped})] == [1, 2]


# --- those that make no progress


@pytest.mark.parametrize(
    ("rank", "mark", "culprit", "starts"),
    [
        (1, works(1000.0), 1, "it has"),
        (2, served(1000.0), 0, "a call of trainer rank 2 has"),
        (0, works(1000.0), 0, "it has"),  # world size 1
        (0, served(1000.0), 0, "it has"),
    ],
)
def test_whose_turn_it_is_without_progress_is_found_after_the_timeout(
    rank: int, mark: Mark, culprit: int, starts: str
) -> None:
    watched = Watched(marks={rank: mark})
    assert watched.look(1059.9, {0: alive(), rank: alive()}) == []
    [finding] = watched.look(1060.0, {0: alive(), rank: alive()})
    assert (finding.rank, finding.exit_code, finding.wants_stacks) == (culprit, 5, True)
    assert (finding.is_gone, finding.is_halted) == (False, False)
    assert finding.text.startswith(starts) and "60 s (--stall-timeout)" in finding.text


def test_without_a_timeout_nobody_stands_still_and_who_ends_is_lost_all_the_same() -> None:
    watched = Watched(timeout_s=None, marks={1: works(), 2: served()})
    for at in (0.0, 1e6):
        assert watched.look(at, {0: alive(), 1: alive("stopped"), 2: alive()}) == []
    [finding] = watched.look(2e6, {0: alive(), 1: KILLED})
    assert finding.rank == 1


@pytest.mark.parametrize(("mark", "turn"), [(works(9.0), 1), (served(9.0), 0)])
@pytest.mark.parametrize(
    ("used_s", "words"),
    [
        (0.0, "0.00 .*deadlock"),
        (4.9, "0.08 .*deadlock"),
        (6.0, "0.10 .*slow step"),
        (120.0, "2.00 .*slow step"),
    ],
)
def test_what_was_used_of_the_cpu_since_the_last_mark_tells_what_it_may_be(
    mark: Mark, turn: int, used_s: float, words: str
) -> None:
    """That of the rank whose turn it is."""
    watched = Watched(marks={1: works(since=-5.0)})
    watched.look(0.0, {0: alive(cpu_s=7.0), 1: alive(cpu_s=7.0)})
    watched.marks = {1: mark}
    for at, cpu_s in ((10.0, 50.0), (40.0, 51.0)):
        watched.look(at, {0: alive(), 1: alive(), turn: alive(cpu_s=cpu_s)})
    [finding] = watched.look(70.0, {0: alive(), 1: alive(), turn: alive(cpu_s=50.0 + used_s)})
    assert re.search(words, finding.text)


@pytest.mark.parametrize("readings", [[UNREAD, alive()], [alive(), UNREAD], [None, alive()]])
def test_cpu_use_that_was_not_read_is_not_known(readings: list[Reading | None]) -> None:
    watched = Watched(marks={1: works()})
    for at, reading in zip((0.0, 60.0), readings, strict=True):
        found = watched.look(at, {} if reading is None else {1: reading})
    assert "not known" in found[0].text


def test_a_trainer_that_was_not_read_is_judged_by_its_mark() -> None:
    [finding] = Watched(marks={1: works()}).look(60.0, {0: alive()})
    assert (finding.rank, finding.exit_code) == (1, 5)


def test_only_what_the_next_look_needs_is_kept() -> None:
    watched = Watched(marks={1: works(), 2: works()})
    watched.look(0.0, {0: alive(), 1: alive("stopped"), 2: alive(), 3: KILLED})
    watched.marks = {2: works()}
    watched.look(1.0, {0: alive(), 2: alive()})
    kept = watched.before
    assert kept is not None and set(kept.first_sights) == {2}
    assert not kept.halted_since and not kept.gone_since


# --- memory


def with_free(fraction: float) -> Memory:
    """So much of what the job may use is free, as others take the rest; the job does not grow."""
    free = round(9 * GIB * fraction / (1 - fraction))
    return Memory({0: GIB, 1: 2 * GIB}, free, shared=6 * GIB)


def memory_looks(*memories: Memory | None) -> list[list[int]]:
    """The exit codes of what is found in looks that see this memory."""
    watched = Watched()
    looks = [watched.look(float(at), {0: alive()}, m) for at, m in enumerate(memories)]
    return [[finding.exit_code for finding in found] for found in looks]


def test_memory_that_gets_short_is_warned_of_once_until_there_is_plenty_again() -> None:
    free = (0.5, 0.101, 0.099, 0.05, 0.12, 0.149, 0.099, 0.151, 0.12, 0.099)
    looks = memory_looks(*map(with_free, free))
    assert looks == [[], [], [0], [], [], [], [], [], [], [0]]


@pytest.mark.parametrize(
    ("memories", "looks"),
    [
        ([with_free(0.2), with_free(0.031), with_free(0.029)], [[], [0], [6]]),
        ([with_free(0.01)], [[6]]),  # though it was never warned
        ([None, with_free(0.09), None, with_free(0.09)], [[], [0], [], []]),
        ([Memory({0: 0}, 0)], [[]]),
    ],
)
def test_a_job_that_leaves_hardly_any_memory_is_ended(
    memories: list[Memory | None], looks: list[list[int]]
) -> None:
    assert memory_looks(*memories) == looks


def gib(used: float, free: float, *others: int) -> Memory:
    return Memory({0: round(used * GIB), **dict.fromkeys(others, 0)}, round(free * GIB))


@pytest.mark.parametrize(
    ("memories", "last"),
    [
        ([gib(90, 10), gib(93, 7), gib(96, 3.99)], [6]),  # twice 3 GiB do not fit
        ([gib(94, 6), gib(96, 4)], []),  # twice 2 GiB do; warned before
        ([gib(10, 90), gib(80, 20)], []),  # there is plenty
        ([gib(99, 1), gib(95, 5)], []),  # given back
        ([gib(90, 10), gib(95, 5, 1)], [0]),  # another rank counts now
        ([gib(90, 10, 1), gib(95, 5)], [0]),
    ],
)
def test_a_job_is_ended_while_there_is_room_for_twice_what_came_since_the_last_look(
    memories: list[Memory], last: list[int]
) -> None:
    assert memory_looks(*memories)[-1] == last


@pytest.mark.parametrize(
    ("before", "now", "rank"),
    [
        ({0: 50 * GIB, 1: GIB, 2: GIB}, {0: 50 * GIB, 1: GIB + 8 * MIB, 2: GIB + 16 * MIB}, 2),
        ({0: GIB, 1: 3 * GIB, 2: 2 * GIB}, {0: GIB, 1: 3 * GIB, 2: 2 * GIB}, 1),
        ({0: 50 * GIB, 1: GIB}, {0: 50 * GIB, 1: GIB + 4 * MIB - 1}, 0),  # a few pages
        ({0: GIB, 1: 3 * GIB}, {0: GIB, 1: 3 * GIB - 4096}, 1),  # gave a little back
        (None, {0: GIB, 1: 2 * GIB}, 1),
        ({0: GIB, 2: GIB}, {0: GIB, 1: 2 * GIB, 2: GIB + 16 * MIB}, 2),  # not seen before
    ],
)
def test_who_grew_most_or_holds_most_is_named(
    before: dict[int, int] | None, now: dict[int, int], rank: int
) -> None:
    watched = Watched(before=Look(0.0, {}, Memory(before, 100 * GIB)) if before else None)
    [finding] = watched.look(0.5, {0: alive()}, Memory(now, GIB, shared=99 * GIB))
    assert finding.rank == rank


def test_who_was_not_counted_is_not_named_and_the_numbers_fit_together() -> None:
    """As a trainer does, which counts itself alone though it reads the server too."""
    me, server = Reading(7, "running", 1.0, 300 * MIB), Reading(1, "running", 1.0, 5000 * MIB)
    memory = Memory.of({2: me}, shared=MIB, available=GIB, limit_bytes=305 * MIB)
    [finding] = Watched().look(0.0, {0: server, 2: me}, memory)
    assert (finding.rank, finding.exit_code) == (2, 6)
    used, limit, own = (int(number) for number in re.findall(r"(\d+)(?: of| MiB)", finding.text))
    assert (used, limit, own) == (301, 305, 300)


@pytest.mark.parametrize(
    ("available", "limit", "free"),
    [(7, None, 7), (7, 100, 7), (500, 100, 60), (500, 30, -10)],
)
def test_what_is_free_is_left_by_the_host_or_by_the_limit(
    available: int, limit: int | None, free: int
) -> None:
    readings = {0: Reading(1, "running", 1.0, 10), 1: Reading(2, "running", 1.0, 20), 2: UNREAD}
    memory = Memory.of(readings, shared=10, available=available, limit_bytes=limit)
    assert memory == Memory({0: 10, 1: 20}, free, shared=10)
    assert memory is not None and (memory.used, memory.limit) == (40, 40 + free)
    assert Memory.of({2: UNREAD}, shared=10, available=0, limit_bytes=None) is None


@pytest.mark.parametrize(
    ("finding", "line"),
    [
        (Finding(0, "it stood still", 5), "server rank 0: it stood still"),
        (Finding(3, "killed", 4, is_gone=True), "lost trainer rank 3: killed"),
    ],
)
def test_a_cause_is_one_line_with_the_rank(finding: Finding, line: str) -> None:
    assert finding.cause == line
    assert not Finding(0, "it stood still", 5).is_seen_by_torchrun

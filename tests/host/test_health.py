"""What is wrong with the processes of a job: made-up readings at made-up times."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from ps.host.health import Doing, Finding, Look, Memory, Progress, judge, loss_of
from ps.host.processes import GONE, UNINTERRUPTIBLE, UNKNOWN, ZOMBIE, Reading

TIMEOUT_S = 60.0
GIB = 1 << 30
MIB = 1 << 20


def alive(
    state: str = "sleeping", *, cpu_s: float | None = 1.0, private: int | None = MIB
) -> Reading:
    return Reading(100, state, cpu_s, private)


def ended(status: int | None, state: str = ZOMBIE) -> Reading:
    return Reading(100, state, status=status)


KILLED = ended(signal.SIGKILL)
TERMINATED = ended(signal.SIGTERM)


def exited(code: int) -> Reading:
    return ended(code << 8)


@dataclass
class Watched:
    """Looks one after the other, as the thread of a rank makes them."""

    timeout_s: float | None = TIMEOUT_S
    progress: Mapping[int, Progress] = field(default_factory=dict)
    before: Look | None = None

    def look(
        self, at: float, readings: Mapping[int, Reading], memory: Memory | None = None
    ) -> Sequence[Finding]:
        now = Look(at, readings, memory)
        self.before, found = judge(self.before, now, self.progress, self.timeout_s)
        return found


def works(since: float = 0.0) -> Progress:
    return Progress(Doing.WORKING, since)


def served(since: float = 0.0) -> Progress:
    return Progress(Doing.SERVED, since)


def waits(since: float = 0.0) -> Progress:
    return Progress(Doing.WAITING, since)


def test_nothing_is_wrong_with_ranks_that_live_and_make_progress() -> None:
    watched = Watched(progress={1: works(), 2: served()})
    assert watched.look(59.9, {0: alive(), 1: alive("running"), 2: alive("idle")}) == []


def test_a_rank_that_cannot_be_read_counts_as_alive() -> None:
    watched = Watched()
    assert watched.look(0.0, {0: alive(), 1: Reading(100, UNKNOWN)}) == []
    assert watched.look(1000.0, {0: alive(), 1: Reading(100, UNKNOWN)}) == []


# --- those that have ended


@pytest.mark.parametrize("state", [GONE, ZOMBIE])
def test_a_rank_that_has_ended_is_lost_at_once(state: str) -> None:
    [found] = Watched().look(0.0, {0: alive(), 1: ended(signal.SIGKILL, state)})
    assert found == Finding(1, "killed by SIGKILL", 4, is_gone=True)


def test_the_server_is_lost_as_any_other() -> None:
    [found] = Watched().look(0.0, {0: ended(None, GONE), 1: alive()})
    assert found == Finding(0, "its process is gone", 4, is_gone=True)


@pytest.mark.parametrize(
    ("code", "exit_code", "is_quiet"),
    [
        (0, 4, True),
        (1, 4, False),
        (2, 4, False),
        (5, 4, False),
        (6, 6, False),
        (8, 4, False),
        (9, 9, False),
        (143, 4, False),
    ],
)
def test_the_exit_code_of_a_lost_rank_is_the_jobs_where_it_tells_more(
    code: int, exit_code: int, is_quiet: bool
) -> None:
    text = f"ended with exit code {code}"
    assert loss_of(3, exited(code)) == Finding(3, text, exit_code, is_gone=True, is_quiet=is_quiet)


def test_a_trainer_that_has_given_up_waiting_for_the_server_says_so() -> None:
    assert loss_of(3, exited(4)).text == (
        "ended with exit code 4, as it got no answer from the server"
    )
    assert loss_of(0, exited(4)).text == "ended with exit code 4"


def test_a_rank_killed_by_a_signal_that_has_the_number_of_a_code_is_lost_with_4() -> None:
    assert loss_of(1, KILLED).exit_code == 4


def test_who_was_told_to_end_comes_after_all_others() -> None:
    readings = {0: alive(), 1: TERMINATED, 2: exited(143), 3: exited(9), 4: KILLED, 5: exited(1)}
    assert [found.rank for found in Watched().look(0.0, readings)] == [4, 5, 1, 2, 3]


def test_what_has_ended_is_found_before_what_stands_still_and_what_lacks_memory() -> None:
    watched = Watched(progress={1: works(), 2: works()})
    readings = {0: alive(), 1: alive(), 2: KILLED}
    found = watched.look(60.0, readings, Memory(GIB, 0))
    assert [(f.rank, f.exit_code) for f in found] == [(2, 4), (1, 5), (2, 5), (0, 6)]


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
    watched = Watched()
    assert watched.look(1000.0, {0: alive(), 1: alive()}) == []
    assert watched.look(1000.5, {0: alive(), 1: alive(state)}) == []
    assert watched.look(1060.4, {0: alive(), 1: alive(state)}) == []
    text = f"it has been {words} for 60 s"
    finding = Finding(1, text, 5, is_halted=True)
    assert watched.look(1060.5, {0: alive(), 1: alive(state)}) == [finding]


def test_the_time_starts_anew_when_a_rank_has_run_in_between() -> None:
    watched = Watched()
    watched.look(0.0, {1: alive("stopped")})
    watched.look(59.0, {1: alive("running")})
    watched.look(59.5, {1: alive("stopped")})
    assert watched.look(119.0, {1: alive("stopped")}) == []
    assert len(watched.look(119.5, {1: alive("stopped")})) == 1


def test_a_rank_goes_from_one_way_of_standing_still_to_another_without_a_new_start() -> None:
    watched = Watched()
    watched.look(0.0, {1: alive(UNINTERRUPTIBLE)})
    [found] = watched.look(60.0, {1: alive("stopped")})
    assert found.text == "it has been stopped for 60 s"


def test_each_rank_has_a_time_of_its_own() -> None:
    watched = Watched()
    watched.look(0.0, {1: alive("stopped"), 2: alive()})
    watched.look(30.0, {1: alive("stopped"), 2: alive("stopped")})
    assert [f.rank for f in watched.look(60.0, {1: alive("stopped"), 2: alive("stopped")})] == [1]


def test_a_rank_that_cannot_run_is_not_also_told_to_make_no_progress() -> None:
    watched = Watched(progress={1: works(0.0)})
    watched.look(100.0, {0: alive(), 1: alive("stopped")})
    [found] = watched.look(160.0, {0: alive(), 1: alive("stopped")})
    assert found.is_halted


# --- those that make no progress


def test_a_rank_without_progress_is_found_after_the_timeout_and_shows_its_stacks() -> None:
    watched = Watched(progress={1: works(since=1000.0)})
    assert watched.look(1059.9, {0: alive(), 1: alive()}) == []
    [found] = watched.look(1060.0, {0: alive(), 1: alive()})
    assert (found.rank, found.exit_code, found.wants_stacks) == (1, 5, True)
    assert (found.is_gone, found.is_halted) == (False, False)
    assert found.text.startswith("it has made no progress for 60 s (--stall-timeout); ")


def test_a_call_that_is_not_answered_is_the_servers() -> None:
    watched = Watched(progress={2: served()})
    [found] = watched.look(60.0, {0: alive(), 2: alive()})
    assert (found.rank, found.exit_code, found.wants_stacks) == (0, 5, True)
    assert found.text.startswith("a call of trainer rank 2 has made no progress for 60 s (--sta")


def test_at_world_size_1_the_one_process_stands_still_whoevers_turn_it_is() -> None:
    for made in (works(), served()):
        [found] = Watched(progress={0: made}).look(60.0, {0: alive()})
        assert (found.rank, found.text[:24]) == (0, "it has made no progress ")


def test_nobody_is_to_blame_for_a_trainer_that_waits_for_an_order() -> None:
    assert Watched(progress={1: waits()}).look(1e6, {0: alive(), 1: alive()}) == []


def test_without_a_timeout_nobody_ever_stands_still() -> None:
    watched = Watched(timeout_s=None, progress={1: works(), 2: served()})
    for at in (0.0, 1e6):
        assert watched.look(at, {0: alive(), 1: alive("stopped"), 2: alive()}) == []
    [found] = watched.look(2e6, {0: alive(), 1: KILLED})
    assert found.rank == 1


@pytest.mark.parametrize(
    ("used_s", "words"),
    [
        (0.0, "it used 0.00 of a core meanwhile, so it waits for something: a deadlock?"),
        (4.9, "it used 0.08 of a core meanwhile, so it waits for something: a deadlock?"),
        (6.0, "it used 0.10 of a core meanwhile: a slow step, or a loop without end?"),
        (120.0, "it used 2.00 of a core meanwhile: a slow step, or a loop without end?"),
    ],
)
def test_what_a_rank_used_of_the_cpu_since_its_last_progress_tells_what_it_may_be(
    used_s: float, words: str
) -> None:
    watched = Watched(progress={1: works(since=9.0)})
    watched.look(10.0, {0: alive(), 1: alive(cpu_s=50.0)})
    watched.look(40.0, {0: alive(), 1: alive(cpu_s=50.0 + used_s / 2)})
    [found] = watched.look(70.0, {0: alive(), 1: alive(cpu_s=50.0 + used_s)})
    assert found.text == f"it has made no progress for 61 s (--stall-timeout); {words}"


def test_what_was_used_before_the_last_progress_does_not_count() -> None:
    watched = Watched(progress={1: works(since=0.0)})
    watched.look(1.0, {1: alive(cpu_s=0.0)})
    watched.progress = {1: works(since=100.0)}
    watched.look(100.0, {1: alive(cpu_s=99.0)})
    [found] = watched.look(160.0, {1: alive(cpu_s=99.0)})
    assert "it used 0.00 of a core" in found.text


def test_for_a_call_that_is_not_answered_the_cpu_of_the_server_counts() -> None:
    watched = Watched(progress={1: served()})
    watched.look(0.0, {0: alive(cpu_s=5.0), 1: alive(cpu_s=0.0)})
    [found] = watched.look(60.0, {0: alive(cpu_s=65.0), 1: alive(cpu_s=0.0)})
    assert found.text.endswith(
        "it used 1.00 of a core meanwhile: a slow step, or a loop without end?"
    )


@pytest.mark.parametrize("unread", [Reading(100, UNKNOWN), alive(cpu_s=None)])
def test_cpu_use_that_was_not_read_is_not_known(unread: Reading) -> None:
    unknown = "its use of the CPU is not known"
    first = Watched(progress={1: works()})
    assert first.look(60.0, {1: alive()})[0].text.endswith(unknown)
    for readings in ([unread, alive()], [alive(), unread]):
        watched = Watched(progress={1: works()})
        watched.look(0.0, {1: readings[0]})
        assert watched.look(60.0, {1: readings[1]})[0].text.endswith(unknown)


def test_a_trainer_that_was_not_read_is_judged_by_its_progress() -> None:
    [found] = Watched(progress={1: works()}).look(60.0, {0: alive()})
    assert (found.rank, found.exit_code) == (1, 5)


# --- memory


def with_free(fraction: float) -> Memory:
    """So much of what the job may use is free, as others take the rest; the job does not grow."""
    return Memory(used=9 * GIB, free=round(9 * GIB * fraction / (1 - fraction)))


def memory_looks(*free: float) -> list[Sequence[Finding]]:
    """What is found in looks at which that fraction is free."""
    watched = Watched()
    readings = {0: alive(private=GIB), 1: alive(private=2 * GIB)}
    return [watched.look(float(at), readings, with_free(f)) for at, f in enumerate(free)]


def test_memory_that_gets_short_is_warned_of_once_until_there_is_plenty_again() -> None:
    looks = memory_looks(0.5, 0.101, 0.099, 0.05, 0.12, 0.149, 0.099, 0.151, 0.12, 0.099)
    assert [len(found) for found in looks] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    [warning] = looks[2]
    assert (warning.rank, warning.exit_code) == (1, 0)
    assert warning.text == "the job uses 9216 of 10228 MiB, 2048 of them here"


def test_a_job_that_leaves_hardly_any_memory_is_ended() -> None:
    looks = memory_looks(0.2, 0.031, 0.029)
    assert [[f.exit_code for f in found] for found in looks] == [[], [0], [6]]
    [end] = looks[2]
    assert end == Finding(1, "the job uses 9216 of 9491 MiB, 2048 of them here", 6)


def test_a_job_is_ended_also_if_it_was_never_warned() -> None:
    [[end]] = memory_looks(0.01)
    assert end.exit_code == 6


def test_a_job_is_ended_while_there_is_room_for_twice_what_came_since_the_last_look() -> None:
    watched = Watched()
    readings = {0: alive(private=GIB)}
    assert watched.look(0.0, readings, Memory(90 * GIB, 10 * GIB)) == []
    [warning] = watched.look(0.5, readings, Memory(93 * GIB, 7 * GIB))
    assert warning.exit_code == 0
    [end] = watched.look(1.0, readings, Memory(96 * GIB, 4 * GIB - 1))
    assert end.exit_code == 6
    watched = Watched(before=Look(0.5, readings, Memory(94 * GIB, 6 * GIB)))
    [warning] = watched.look(1.0, readings, Memory(96 * GIB, 4 * GIB))
    assert warning.exit_code == 0


def test_growth_while_there_is_plenty_ends_nothing() -> None:
    watched = Watched()
    readings = {0: alive(private=GIB)}
    watched.look(0.0, readings, Memory(10 * GIB, 90 * GIB))
    assert watched.look(0.5, readings, Memory(80 * GIB, 20 * GIB)) == []


@pytest.mark.parametrize("unseen", [{}, {1: Reading(100, UNKNOWN)}, {1: alive(private=None)}])
def test_a_rank_that_was_not_seen_before_has_not_grown(unseen: Mapping[int, Reading]) -> None:
    watched = Watched()
    watched.look(0.0, {0: alive(), **unseen}, Memory(90 * GIB, 10 * GIB))
    readings = {0: alive(), 1: alive(private=5 * GIB)}
    [warning] = watched.look(0.5, readings, Memory(95 * GIB, 5 * GIB))
    assert warning.exit_code == 0


def test_memory_that_is_given_back_is_no_growth() -> None:
    watched = Watched(before=Look(0.0, {0: alive()}, Memory(99 * GIB, GIB)))
    [warning] = watched.look(0.5, {0: alive()}, Memory(95 * GIB, 5 * GIB))
    assert warning.exit_code == 0


def named(before: Sequence[int | None], now: Sequence[int]) -> int:
    """Who is named when memory is short, by what each rank held and holds."""
    watched = Watched()
    first = {rank: alive(private=held) for rank, held in enumerate(before) if held is not None}
    watched.before = Look(0.0, first, Memory(0, 100 * GIB)) if before else None
    found = watched.look(
        0.5, {rank: alive(private=held) for rank, held in enumerate(now)}, Memory(99 * GIB, GIB)
    )
    return found[-1].rank


def test_who_grew_most_since_the_last_look_is_named() -> None:
    assert named([50 * GIB, GIB, GIB], [50 * GIB, GIB + 8 * MIB, GIB + 16 * MIB]) == 2


def test_without_growth_who_holds_most_is_named() -> None:
    assert named([GIB, 3 * GIB, 2 * GIB], [GIB, 3 * GIB, 2 * GIB]) == 1


def test_growth_of_a_few_pages_names_nobody() -> None:
    assert named([50 * GIB, GIB], [50 * GIB, GIB + 4 * MIB - 1]) == 0


def test_a_rank_that_gave_a_little_back_still_holds_most() -> None:
    assert named([GIB, 3 * GIB], [GIB, 3 * GIB - 4096]) == 1


def test_at_the_first_look_who_holds_most_is_named() -> None:
    assert named([], [GIB, 2 * GIB]) == 1


def test_a_rank_that_was_not_seen_before_is_not_named_for_all_it_holds() -> None:
    assert named([GIB, None, GIB], [GIB, 2 * GIB, GIB + 16 * MIB]) == 2


def test_memory_that_is_not_known_is_not_judged() -> None:
    watched = Watched()
    readings = {0: alive()}
    assert watched.look(0.0, readings, None) == []
    assert len(watched.look(0.5, readings, with_free(0.09))) == 1
    assert watched.look(1.0, readings, None) == []
    assert watched.look(1.5, readings, with_free(0.09)) == []


def test_no_memory_at_all_is_no_measurement() -> None:
    assert Watched().look(0.0, {0: alive()}, Memory(0, 0)) == []


def test_ranks_whose_memory_was_not_read_are_named_with_none() -> None:
    [found] = Watched().look(0.0, {0: Reading(100, UNKNOWN)}, with_free(0.09))
    assert found.text.endswith("MiB, 0 of them here")


def test_what_is_kept_of_a_look_is_for_ranks_that_are_there() -> None:
    watched = Watched(progress={1: works(), 2: works()})
    watched.look(0.0, {0: alive(), 1: alive("stopped"), 2: alive()})
    watched.progress = {2: works()}
    watched.look(1.0, {0: alive(), 2: alive()})
    assert watched.before is not None
    assert (dict(watched.before.halted_since), set(watched.before.marks)) == ({}, {2})

"""torchrun's environment, read into a Topology, and what is said when it is not usable."""

from __future__ import annotations

import pytest

from ps.settings.errors import LaunchError
from ps.settings.topology import Topology

GOOD = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_ERROR_FILE": "/tmp/log/attempt_3/2/error.json",
}
COMMAND = "torchrun --standalone --nproc_per_node=4 launch.py"


def at(rank: int, world_size: int) -> Topology:
    return Topology.from_environ(
        GOOD
        | {name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        | {"RANK": str(rank)}
    )


def message_of(**changed: str) -> str:
    with pytest.raises(LaunchError) as caught:
        Topology.from_environ(GOOD | changed)
    return str(caught.value)


def test_every_variable_of_torchrun_is_read() -> None:
    assert Topology.from_environ(GOOD) == Topology(
        rank=2,
        world_size=4,
        master_addr="127.0.0.1",
        master_port=29500,
        restart_count=3,
        agent_hosts_store=True,
        run_id="job-7",
        error_file="/tmp/log/attempt_3/2/error.json",
    )


def test_what_torchrun_may_leave_out_has_a_default() -> None:
    needed = {name: GOOD[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert Topology.from_environ(needed) == Topology(
        rank=2,
        world_size=4,
        master_addr="127.0.0.1",
        master_port=29500,
        restart_count=0,
        agent_hosts_store=False,
        error_file=None,
    )


def test_an_agent_store_that_is_off_is_off() -> None:
    environ = GOOD | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert Topology.from_environ(environ).agent_hosts_store is False


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_a_missing_variable_is_named_with_the_command_to_type(name: str, how: str) -> None:
    environ = {key: value for key, value in GOOD.items() if key != name}
    if how == "empty":
        environ[name] = ""
    with pytest.raises(LaunchError) as caught:
        Topology.from_environ(environ)
    assert str(caught.value) == f"not started by torchrun ({name} not set); type: {COMMAND}"
    assert caught.value.exit_code == 3


def test_without_torchrun_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(LaunchError) as caught:
        Topology.from_environ({"HOME": "/root"})
    assert str(caught.value) == (
        "not started by torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set); "
        f"type: {COMMAND}"
    )


def test_the_command_to_type_holds_the_users_own_arguments_quoted_for_a_shell() -> None:
    argv = ["--workload", "digits", "--run-dir", "my runs/it's", "--lr=0.1"]
    with pytest.raises(LaunchError) as caught:
        Topology.from_environ({}, argv)
    command = str(caught.value).partition("; type: ")[2]
    assert command == COMMAND + " --workload digits --run-dir 'my runs/it'\"'\"'s' --lr=0.1"


def test_a_rank_outside_the_world_is_refused_with_both_numbers() -> None:
    with pytest.raises(LaunchError) as caught:
        Topology.from_environ(GOOD | {"RANK": "5", "WORLD_SIZE": "2"})
    assert str(caught.value) == (
        "RANK must be below WORLD_SIZE, got RANK=5 WORLD_SIZE=2; let torchrun set both"
    )
    assert caught.value.exit_code == 3


def test_a_rank_equal_to_the_world_size_is_refused() -> None:
    assert message_of(RANK="4") == (
        "RANK must be below WORLD_SIZE, got RANK=4 WORLD_SIZE=4; let torchrun set both"
    )


@pytest.mark.parametrize(
    "name",
    ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"],
)
@pytest.mark.parametrize("text", ["two", "1.5", "0x2"])
def test_text_where_a_number_belongs_is_refused_as_seen(name: str, text: str) -> None:
    assert message_of(**{name: text}) == (
        f"{name} must be a whole number, got {text!r}; let torchrun set it"
    )


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("RANK", "-1", "0 or more"),
        ("WORLD_SIZE", "0", "1 or more"),
        ("LOCAL_WORLD_SIZE", "0", "1 or more"),
        ("TORCHELASTIC_RESTART_COUNT", "-1", "0 or more"),
        ("MASTER_PORT", "0", "1 to 65535"),
        ("MASTER_PORT", "-1", "1 to 65535"),
        ("MASTER_PORT", "65536", "1 to 65535"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_limit(name: str, value: str, limit: str) -> None:
    assert (
        message_of(**{name: value}) == f"{name} must be {limit}, got {value}; let torchrun set it"
    )


@pytest.mark.parametrize("port", [1, 65535])
def test_the_ports_at_both_ends_are_good(port: int) -> None:
    assert Topology.from_environ(GOOD | {"MASTER_PORT": str(port)}).master_port == port


def test_the_only_process_is_server_and_trainer() -> None:
    only = at(0, 1)
    assert (only.is_alone, only.is_server, only.role, only.trainers) == (True, True, "server", (0,))


@pytest.mark.parametrize(("world_size", "trainers"), [(2, (1,)), (4, (1, 2, 3))])
def test_rank_0_serves_and_every_other_rank_trains(
    world_size: int, trainers: tuple[int, ...]
) -> None:
    ranks = [at(rank, world_size) for rank in range(world_size)]
    assert [rank.role for rank in ranks] == ["server"] + ["trainer"] * (world_size - 1)
    assert [rank.is_server for rank in ranks] == [True] + [False] * (world_size - 1)
    assert {rank.trainers for rank in ranks} == {trainers}
    assert not any(rank.is_alone for rank in ranks)


def test_a_job_on_several_hosts_is_refused() -> None:
    assert message_of(LOCAL_WORLD_SIZE="2") == (
        "all ranks must be on one host, but only 2 of 4 are; give torchrun --nnodes=1"
    )


def test_a_topology_never_changes() -> None:
    with pytest.raises(AttributeError):
        Topology.from_environ(GOOD).rank = 1  # type: ignore[misc]

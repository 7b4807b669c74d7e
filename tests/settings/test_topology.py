"""torchrun's variables, read into an Origin and a Topology, and how unusable ones are refused."""

from __future__ import annotations

import pytest

from ps.settings.errors import LaunchError
from ps.settings.topology import Origin, Topology

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
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COMMAND = "torchrun --standalone --nproc_per_node=4 launch.py"


def at(rank: int, world_size: int) -> Topology:
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    return Topology.from_environ(GOOD | sizes | {"RANK": str(rank)})


def refused(environ: dict[str, str], *argv: str) -> str:
    with pytest.raises(LaunchError) as caught:
        Topology.from_environ(environ, argv)
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
    topology = Topology.from_environ({name: GOOD[name] for name in NEEDED})
    assert topology == Topology(rank=2, world_size=4, master_addr="127.0.0.1", master_port=29500)
    assert (topology.restart_count, topology.agent_hosts_store) == (0, False)
    assert (topology.run_id, topology.error_file) == (None, None)
    off = GOOD | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert Topology.from_environ(off).agent_hosts_store is False


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_or_empty_variable_is_named_with_the_command_to_type(name: str) -> None:
    absent = {key: value for key, value in GOOD.items() if key != name}
    for environ in (absent, GOOD | {name: ""}):
        message = refused(environ)
        assert f"{name} not set" in message
        assert message.endswith(COMMAND)


def test_without_torchrun_all_that_is_missing_is_named_and_arguments_are_quoted() -> None:
    message = refused({}, "--run-dir", "my runs/it's", "--lr=0.1")
    assert ", ".join(NEEDED) in message
    assert message.endswith(COMMAND + " --run-dir 'my runs/it'\"'\"'s' --lr=0.1")


@pytest.mark.parametrize(
    ("name", "texts", "limit"),
    [
        ("RANK", ("two", "1.5", "0x2", "-1"), ""),
        ("RANK", ("4", "5"), "WORLD_SIZE=4"),
        ("WORLD_SIZE", ("two", "1.5", "0x2", "0"), ""),
        ("LOCAL_WORLD_SIZE", ("two", "1.5", "0x2", "0"), ""),
        ("LOCAL_WORLD_SIZE", ("2",), "--nnodes=1"),
        ("MASTER_PORT", ("two", "1.5", "0x2"), "whole number"),
        ("MASTER_PORT", ("0", "-1", "65536"), "1 to 65535"),
        ("TORCHELASTIC_RESTART_COUNT", ("two", "1.5", "0x2"), "whole number"),
        ("TORCHELASTIC_RESTART_COUNT", ("-1",), "0 or more"),
    ],
)
def test_a_value_that_is_no_number_or_out_of_range_is_refused(
    name: str, texts: tuple[str, ...], limit: str
) -> None:
    for text in texts:
        message = refused(GOOD | {name: text})
        assert text in message
        assert limit in message
        assert name in message or "--nnodes" in message


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


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        (GOOD, ("2", False, "trainer", GOOD["TORCHELASTIC_ERROR_FILE"], True)),
        ({}, ("0", True, "server", None, False)),
        ({"RANK": ""}, ("0", True, "server", None, False)),
        ({"RANK": "00"}, ("00", True, "server", None, False)),
        ({"RANK": "two"}, ("two", False, "trainer", None, False)),
    ],
)
def test_the_origin_is_known_whatever_the_variables_are(
    environ: dict[str, str], seen: tuple[object, ...]
) -> None:
    origin = Origin.from_environ(environ)
    assert (origin.rank_text, origin.is_server, origin.role) == seen[:3]
    assert (origin.error_file, origin.is_under_torchrun) == seen[3:]

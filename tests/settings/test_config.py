"""The options of this program: their defaults, their limits, and what a continued run inherits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ps.settings.config import Config, parse_args
from ps.settings.errors import ConfigError
from ps.settings.options import flag, options_of

OPTIONS = options_of(Config)

# Every option that has limits: what is good at or within them, and what is refused.
LIMITS: dict[str, tuple[list[str], list[str]]] = {
    "workload": (
        ["auto", "mnist", "digits", "mine:build", "pkg.sub.mine:build", "_m1:b_2"],
        ["Mnist", "cifar", "m", "m:", ":b", "a:b:c", "a/b.py:b", "a b:c", "a.:b", "1a:b"],
    ),
    "data_mirror": (
        ["http://here/mnist", "https://here"],
        ["ftp://here/mnist", "file:///mnist", "here/mnist"],
    ),
    "epochs": (["1"], ["0"]),
    "batch_size": (["1"], ["0"]),
    "lr": (["1e-9"], ["0", "-0.1"]),
    "momentum": (["0", "1"], ["-0.1", "1.1"]),
    "weight_decay": (["0"], ["-1"]),
    "lr_schedule": (["cosine"], ["exponential", "step:0:0.5"]),
    "clip_norm": (["0"], ["-1"]),
    "seed": (["0", str(2**63 - 1)], ["-1", str(2**63)]),
    "compute": (["server", "trainer"], ["nowhere"]),
    "max_lag": (
        ["inf", "0", "1", "007", "999999999"],
        ["-1", "two", "1.5", "nan", "Inf", "-inf", "1e3", "+1", " 1", "None", "9" * 5000],
    ),
    "link": (["auto", "local", "rpc"], ["tcp"]),
    "num_gpus": (["0", "2"], ["-1", "3"]),
    "threads": (["0", "1024"], ["-1", "1025"]),
    "precision": (["float32", "bfloat16"], ["float16"]),
    "accumulate": (["1", str(2**20)], ["0", str(2**20 + 1)]),
    "num_workers": (["0", "256"], ["-1", "257"]),
    "checkpoint_every": (
        ["0", "0s", "1", "007", "60s", "999999999"],
        [
            *("-1", "1.5s", "60 s", "1m", "s", "1e3", "60S", "+5", "ss", "inf", " 5", "1h30"),
            *("\u0663", "\u0663s", "1234567890", "9" * 5000),
        ],
    ),
    "keep": (["1"], ["0"]),
    "start_timeout": (["10", "604800"], ["0", "1", "9.9", "604801"]),
    "rpc_timeout": (["0", "3", "604800"], ["-1", "0.001", "2.9", "604801"]),
    "stall_timeout": (["0", "3", "604800"], ["-1", "0.1", "0.5", "1", "2.9", "604801"]),
    "memory_limit": (
        ["0", "1B", "1024", "1.5GiB"],
        [
            *("8GB", "8 GiB", "-1GiB", "GiB", "1.GiB", ".5GiB", "8gib", "1e3", "inf", "nan"),
            *("+1GiB", "8G", "8GiBs", " 8GiB", "1,5GiB", "0x10", "\u0663GiB"),
            *("9" * 400 + "TiB", "1." + "9" * 5000 + "GiB"),
        ],
    ),
    "on_nonfinite": (["stop", "skip"], ["ignore"]),
    "inject": ([], ["kill:2"]),
    "log_level": (["debug", "info", "warning"], ["loud"]),
}
# One value for every option that is not its default: as typed, and as the config holds it.
OTHER: dict[str, tuple[list[str], object]] = {
    "workload": (["mnist"], "mnist"),
    "data_dir": (["/mnist"], Path("/mnist")),
    "data_mirror": (["http://here/mnist"], "http://here/mnist"),
    "epochs": (["5"], 5),
    "batch_size": (["64"], 64),
    "optimizer": (["Adam"], "Adam"),
    "lr": (["0.001"], 0.001),
    "momentum": (["0.9"], 0.9),
    "weight_decay": (["1e-4"], 1e-4),
    "lr_schedule": (["linear"], "linear"),
    "clip_norm": (["2"], 2.0),
    "seed": (["7"], 7),
    "compute": (["trainer"], "trainer"),
    "max_lag": (["4"], "4"),
    "link": (["rpc"], "rpc"),
    "num_gpus": (["1"], 1),
    "threads": (["3"], 3),
    "precision": (["bfloat16"], "bfloat16"),
    "channels_last": ([], True),
    "accumulate": (["3"], 3),
    "num_workers": (["2"], 2),
    "run_dir": (["out"], Path("out")),
    "resume": (["runs/latest"], "runs/latest"),
    "checkpoint_every": (["500"], "500"),
    "keep": (["9"], 9),
    "start_timeout": (["30"], 30.0),
    "rpc_timeout": (["5.5"], 5.5),
    "stall_timeout": (["0"], 0.0),
    "memory_limit": (["8GiB"], "8GiB"),
    "on_nonfinite": (["skip"], "skip"),
    "inject": (["kill:2@30"], ("kill:2@30",)),
    "log_level": (["debug"], "debug"),
}
FIXED = ["workload", "batch_size", "optimizer", "momentum", "seed", "accumulate"]
OWN = ["run_dir", "resume", "inject", "log_level"]
INHERITED = [name for name in OPTIONS if name not in (*FIXED, *OWN)]


def refused(argv: list[str], inherited: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv, inherited)
    return str(caught.value)


def typed(name: str) -> list[str]:
    return [flag(name), *OTHER[name][0]]


def left_by(**options: Any) -> dict[str, Any]:
    """What a run with these options leaves for those that continue it."""
    plain: dict[str, Any] = json.loads(
        json.dumps(Config(**{"workload": "digits"} | options).to_json(inherited_only=True))
    )
    return plain


def test_nothing_typed_gives_the_documented_defaults() -> None:
    assert parse_args([]) == Config()
    defaults = dict(
        workload="auto", data_dir=Path("data"), epochs=1, batch_size=32, optimizer="SGD"
    )
    defaults |= dict(data_mirror="https://ossci-datasets.s3.amazonaws.com/mnist", lr=None)
    defaults |= dict(
        momentum=None, weight_decay=None, lr_schedule="constant", clip_norm=0.0, seed=0
    )
    defaults |= dict(compute="server", max_lag="inf", link="auto", num_gpus=0, threads=0)
    defaults |= dict(precision="float32", channels_last=None, accumulate=1, num_workers=0)
    defaults |= dict(run_dir=None, resume=None, checkpoint_every="60s", keep=2, start_timeout=120.0)
    defaults |= dict(rpc_timeout=0.0, stall_timeout=300.0, memory_limit="0", on_nonfinite="stop")
    defaults |= dict(inject=(), log_level="info")
    assert {name: declared.default for name, declared in OPTIONS.items()} == defaults


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_can_be_typed_and_stays_what_it_is_through_json(name: str) -> None:
    config, value = parse_args(typed(name)), OTHER[name][1]
    assert (getattr(config, name), config) == (value, Config(**{name: value}))  # type: ignore[arg-type]
    assert value != OPTIONS[name].default
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_help_shows_every_option_how_to_start_and_the_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    shown = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    assert sorted(shown) == sorted(map(flag, OPTIONS))
    assert text.startswith("usage: torchrun --standalone --nproc_per_node=")
    assert "exit codes: 0 done, 1 " in text
    assert text.count("--staleness") == 1


@pytest.mark.parametrize("name", LIMITS)
def test_a_value_is_refused_beyond_its_limits_by_option_and_value(name: str) -> None:
    good, bad = LIMITS[name]
    for text in good:
        parse_args([f"{flag(name)}={text}"])
    for text in bad:
        message = refused([f"{flag(name)}={text}"])
        assert message.startswith(flag(name))
        assert text in message


def test_the_table_of_limits_is_complete() -> None:
    limited = {
        name
        for name, declared in OPTIONS.items()
        for rules in [declared.rules]
        if rules.choices or rules.pattern or {rules.least, rules.above, rules.most} != {None}
    }
    assert LIMITS.keys() == limited | {"lr_schedule", "inject"}


@pytest.mark.parametrize("name", ["max_lag", "checkpoint_every", "memory_limit"])
def test_an_empty_text_is_refused_on_the_command_line_and_in_code(name: str) -> None:
    assert flag(name) in refused([f"{flag(name)}="])
    with pytest.raises(ConfigError, match=flag(name)):
        Config(**{name: ""})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "limit"), [("inf", None), ("0", 0), ("1", 1), ("16", 16), ("007", 7)]
)
def test_the_lag_is_unlimited_or_a_number_of_orders_under_both_names(
    text: str, limit: int | None
) -> None:
    config = parse_args(["--max-lag", text])
    assert (config.max_lag, config.lag_limit) == (text, limit)
    assert parse_args(["--staleness", text]) == parse_args([f"--staleness={text}"]) == config
    assert Config.from_json({"staleness": text}) == config
    assert parse_args([], {"staleness": text}) == config


def test_a_negative_lag_is_a_value_and_not_an_option() -> None:
    assert refused(["--staleness", "-1"]).startswith("--max-lag must be")


@pytest.mark.parametrize(("batches", "lr"), [(1, 0.03), (2, 0.06), (12, 0.36)])
def test_without_lr_it_grows_with_the_batches_in_an_update(batches: int, lr: float) -> None:
    assert parse_args([]).lr_of(batches) == pytest.approx(lr)
    assert parse_args(["--lr", "0.001"]).lr_of(batches) == 0.001


def test_gpus_are_refused_where_the_trainers_compute() -> None:
    for count in ("1", "2"):
        assert "--num-gpus" in refused(["--compute", "trainer", "--num-gpus", count])
    assert parse_args(["--compute", "trainer", "--num-gpus", "0"]).compute == "trainer"


@pytest.mark.parametrize(
    ("text", "updates", "interval_s"),
    [
        *(("500", 500, None), ("007", 7, None), ("60s", None, 60.0)),
        *(("0", None, None), ("0s", None, None)),
    ],
)
def test_checkpoints_are_every_so_many_updates_or_seconds_or_at_the_end_alone(
    text: str, updates: int | None, interval_s: float | None
) -> None:
    config = Config(checkpoint_every=text)
    assert (config.checkpoint_updates, config.checkpoint_interval_s) == (updates, interval_s)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(("0", None), ("0GiB", None), ("1024", 1024), ("1B", 1), ("2KiB", 2048)),
        *(("500MiB", 500 * 2**20), ("1.5GiB", 3 * 2**29), ("3TiB", 3 * 2**40)),
        ("999999999999999", 999_999_999_999_999),
    ],
)
def test_the_memory_limit_is_a_size(text: str, num_bytes: int | None) -> None:
    assert Config(memory_limit=text).memory_limit_bytes == num_bytes


def test_a_timeout_of_0_is_none() -> None:
    config = Config(rpc_timeout=0.0, stall_timeout=0.0)
    assert (config.rpc_timeout_s, config.stall_timeout_s) == (None, None)
    config = Config(rpc_timeout=4.0, stall_timeout=5.0)
    assert (config.rpc_timeout_s, config.stall_timeout_s) == (4.0, 5.0)


@pytest.mark.parametrize("name", INHERITED)
def test_an_option_is_that_of_the_continued_run_unless_it_is_typed(name: str) -> None:
    value, default = OTHER[name][1], OPTIONS[name].default
    assert getattr(parse_args([], left_by(**{name: value})), name) == value
    assert getattr(parse_args(typed(name), left_by()), name) == value
    assert getattr(parse_args([], left_by()), name) == default


def test_a_default_that_is_typed_wins_over_the_continued_run() -> None:
    argv = ["--epochs", "1", "--lr-schedule", "constant", "--no-channels-last"]
    before = left_by(epochs=5, lr_schedule="linear", channels_last=True, checkpoint_every="5")
    wanted = Config(workload="digits", channels_last=False)
    assert parse_args([*argv, "--checkpoint-every", "60s"], before) == wanted


@pytest.mark.parametrize("name", OWN)
def test_options_of_one_run_alone_are_not_inherited(name: str) -> None:
    value = OTHER[name][1]
    assert name not in left_by(**{name: value})
    assert getattr(parse_args(typed(name), left_by()), name) == value


@pytest.mark.parametrize("name", FIXED)
def test_what_a_checkpoint_depends_on_is_inherited_and_cannot_be_changed(name: str) -> None:
    before = left_by(**{name: OTHER[name][1]})
    assert getattr(parse_args([], before), name) == OTHER[name][1]
    assert parse_args(typed(name), before) == parse_args([], before)
    assert refused(typed(name), left_by()).startswith(" ".join(typed(name)))


@pytest.mark.parametrize("workload", ["digits", "mnist", "my.plugin:build"])
def test_the_workload_auto_is_what_it_was_in_the_continued_run(workload: str) -> None:
    """An attempt after the first has the same command line, and the workload is settled."""
    config = parse_args(["--workload", "auto"], left_by(workload=workload))
    assert config.workload == workload


def test_options_are_checked_together_with_those_of_the_continued_run() -> None:
    message = refused(["--num-gpus", "1"], left_by(compute="trainer"))
    assert message.startswith("--num-gpus 1 ")
    assert "the run that is continued" in message
    assert "--bogus" in refused([], {"bogus": 3, "epochs": 2})


def test_a_value_that_an_earlier_version_allowed_can_be_replaced_by_typing() -> None:
    assert refused([], {"stall_timeout": 0.5}).startswith("--stall-timeout must be 0 for never, or")
    assert parse_args(["--stall-timeout", "60"], {"stall_timeout": 0.5}).stall_timeout == 60.0

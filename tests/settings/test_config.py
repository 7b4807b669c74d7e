"""The options as typed: their defaults in --help, and every value that is refused, by its flag."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ps.settings.config import Config, flag, parse_args
from ps.settings.errors import ConfigError

SEE_HELP = "; see: python launch.py --help"
OPTIONS = {spec.name: spec for spec in fields(Config)}
ON_OFF = [name for name, spec in OPTIONS.items() if "bool" in str(spec.type)]

# Every limit of every option: what is typed, and what is answered after the flag.
BEYOND_LIMIT = [
    ("--epochs", "0", "must be 1 or more, got 0"),
    ("--batch-size", "0", "must be 1 or more, got 0"),
    ("--lr", "0", "must be above 0, got 0.0"),
    ("--lr", "-0.1", "must be above 0, got -0.1"),
    ("--momentum", "-0.1", "must be 0 or more, got -0.1"),
    ("--momentum", "1.1", "must be 1 or less, got 1.1"),
    ("--weight-decay", "-1", "must be 0 or more, got -1.0"),
    ("--clip-norm", "-1", "must be 0 or more, got -1.0"),
    ("--seed", "-1", "must be 0 or more, got -1"),
    ("--seed", str(2**63), f"must be {2**63 - 1} or less, got {2**63}"),
    ("--compute", "nowhere", "must be server or trainer, got 'nowhere'"),
    ("--link", "tcp", "must be auto or local or rpc, got 'tcp'"),
    ("--num-gpus", "-1", "must be 0 or more, got -1"),
    ("--num-gpus", "3", "must be 2 or less, got 3"),
    ("--threads", "-1", "must be 0 or more, got -1"),
    ("--threads", "1025", "must be 1024 or less, got 1025"),
    ("--precision", "float16", "must be float32 or bfloat16, got 'float16'"),
    ("--accumulate", "0", "must be 1 or more, got 0"),
    ("--accumulate", str(2**20 + 1), f"must be {2**20} or less, got {2**20 + 1}"),
    ("--num-workers", "-1", "must be 0 or more, got -1"),
    ("--num-workers", "257", "must be 256 or less, got 257"),
    ("--start-timeout", "0.5", "must be 1 or more, got 0.5"),
    ("--rpc-timeout", "-1", "must be 0 or more, got -1.0"),
    ("--start-timeout", "604801", "must be 604800 or less, got 604801.0"),
    ("--rpc-timeout", "604801", "must be 604800 or less, got 604801.0"),
    ("--keep", "0", "must be 1 or more, got 0"),
    ("--stall-timeout", "-1", "must be 0 or more, got -1.0"),
    ("--stall-timeout", "604801", "must be 604800 or less, got 604801.0"),
    ("--on-nonfinite", "ignore", "must be stop or skip, got 'ignore'"),
    ("--log-level", "loud", "must be debug or info or warning, got 'loud'"),
]
AT_LIMIT = [
    ("--epochs", "1", 1),
    ("--batch-size", "1", 1),
    ("--lr", "1e-9", 1e-9),
    ("--momentum", "0", 0.0),
    ("--momentum", "1", 1.0),
    ("--weight-decay", "0", 0.0),
    ("--clip-norm", "0", 0.0),
    ("--seed", "0", 0),
    ("--seed", str(2**63 - 1), 2**63 - 1),
    ("--num-gpus", "0", 0),
    ("--num-gpus", "2", 2),
    ("--threads", "0", 0),
    ("--threads", "1024", 1024),
    ("--accumulate", "1", 1),
    ("--accumulate", str(2**20), 2**20),
    ("--num-workers", "0", 0),
    ("--num-workers", "256", 256),
    ("--start-timeout", "1", 1.0),
    ("--rpc-timeout", "0", 0.0),
    ("--keep", "1", 1),
    ("--stall-timeout", "0", 0.0),
]
WHOLE_NUMBERS = [
    *("--epochs", "--batch-size", "--seed", "--num-gpus", "--threads"),
    *("--accumulate", "--num-workers", "--keep"),
]
NUMBERS = [
    "--lr",
    "--momentum",
    "--weight-decay",
    "--clip-norm",
    "--start-timeout",
    "--rpc-timeout",
    "--stall-timeout",
]


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv)
    assert caught.value.exit_code == 2
    return str(caught.value)


def help_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_nothing_typed_gives_the_documented_defaults() -> None:
    assert parse_args([]) == Config(
        workload="auto",
        data_dir=Path("data"),
        data_mirror="https://ossci-datasets.s3.amazonaws.com/mnist",
        epochs=1,
        batch_size=32,
        optimizer="SGD",
        lr=None,
        momentum=None,
        weight_decay=None,
        lr_schedule="constant",
        clip_norm=0.0,
        seed=0,
        compute="server",
        staleness="inf",
        link="auto",
        num_gpus=0,
        threads=0,
        precision="float32",
        channels_last=None,
        accumulate=1,
        num_workers=0,
        run_dir=None,
        start_timeout=120.0,
        rpc_timeout=0.0,
        log_level="info",
    )


def test_what_is_typed_is_what_the_config_holds() -> None:
    text = (
        "--workload my.plugin:build --data-dir /mnist --data-mirror http://here/mnist --epochs 5 "
        "--batch-size=64 --optimizer Adam --lr 0.001 --momentum 0.9 --weight-decay 1e-4 "
        "--lr-schedule step:100:0.5 --clip-norm 2 --seed 7 --compute server --staleness 4 "
        "--link rpc --num-gpus 1 --threads 3 --precision bfloat16 --channels-last "
        "--accumulate 3 --num-workers 2 --run-dir out --start-timeout 30 --rpc-timeout 5.5 "
        "--log-level debug"
    )
    assert parse_args(text.split()) == Config(
        workload="my.plugin:build",
        data_dir=Path("/mnist"),
        data_mirror="http://here/mnist",
        epochs=5,
        batch_size=64,
        optimizer="Adam",
        lr=0.001,
        momentum=0.9,
        weight_decay=1e-4,
        lr_schedule="step:100:0.5",
        clip_norm=2.0,
        seed=7,
        compute="server",
        staleness="4",
        link="rpc",
        num_gpus=1,
        threads=3,
        precision="bfloat16",
        channels_last=True,
        accumulate=3,
        num_workers=2,
        run_dir=Path("out"),
        start_timeout=30.0,
        rpc_timeout=5.5,
        log_level="debug",
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_help_shows_the_default_of_every_option(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    default = OPTIONS[name].default
    metadata = OPTIONS[name].metadata
    words = {"least": "at least", "above": "above", "most": "at most"}
    limits = [f"{w} {metadata[key]}" for key, w in words.items() if metadata[key] is not None]
    shown = "; ".join([f"default: {default}", *limits])
    value = f", --no-{flag(name)[2:]}" if name in ON_OFF else r" \S+"
    line = re.search(
        rf"^  {flag(name)}{value}(.*(?:\n {{20,}}.*)*)",
        help_text(monkeypatch, capsys),
        re.MULTILINE,
    )
    assert line is not None, f"{flag(name)} is not in --help"
    if default in (None, ()):
        assert "without it" in line[1] or "without either flag" in line[1]
    else:
        assert line[1].endswith(f"({shown})")


def test_help_shows_how_to_start_and_the_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_text(monkeypatch, capsys)
    assert text.startswith(
        "usage: torchrun --standalone --nproc_per_node=WORLD_SIZE launch.py [options]\n"
    )
    assert "\n  torchrun --standalone --nproc_per_node=4 launch.py\n" in text
    assert (
        "exit codes: 0 done, 1 an error in the workload, 2 bad option, plug-in or data, 3 not"
        in text
    )


def test_an_unknown_option_is_named() -> None:
    assert refused("--bogus") == f"unrecognized arguments: --bogus{SEE_HELP}"
    assert refused("--bogus", "3") == f"unrecognized arguments: --bogus 3{SEE_HELP}"
    assert refused("train") == f"unrecognized arguments: train{SEE_HELP}"


@pytest.mark.parametrize("abbreviation", ["--epoch", "--batch", "--work", "--num-gpu", "--l"])
def test_an_abbreviation_is_an_unknown_option(abbreviation: str) -> None:
    assert refused(f"{abbreviation}=1") == f"unrecognized arguments: {abbreviation}=1{SEE_HELP}"


def test_an_underscore_for_a_dash_is_an_unknown_option() -> None:
    assert refused("--batch_size", "3") == f"unrecognized arguments: --batch_size 3{SEE_HELP}"


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ON_OFF])
def test_an_option_without_its_value_is_named(name: str) -> None:
    assert refused(flag(name)) == f"argument {flag(name)}: expected one argument{SEE_HELP}"


@pytest.mark.parametrize("typed", WHOLE_NUMBERS)
@pytest.mark.parametrize("text", ["three", "1.5", "1e3", "", "nan"])
def test_anything_but_a_whole_number_is_refused_as_seen(typed: str, text: str) -> None:
    message = f"argument {typed}: invalid whole number value: {text!r}{SEE_HELP}"
    assert refused(typed, text) == message


@pytest.mark.parametrize("typed", NUMBERS)
@pytest.mark.parametrize("text", ["fast", "0,1", "", "1.5s"])
def test_anything_but_a_number_is_refused_as_seen(typed: str, text: str) -> None:
    assert refused(typed, text) == f"argument {typed}: invalid number value: {text!r}{SEE_HELP}"


@pytest.mark.parametrize("typed", NUMBERS)
@pytest.mark.parametrize(("text", "seen"), [("nan", "nan"), ("inf", "inf"), ("1e999", "inf")])
def test_a_number_that_is_not_finite_is_refused(typed: str, text: str, seen: str) -> None:
    assert refused(typed, text) == f"{typed} must be finite, got {seen}"


@pytest.mark.parametrize(("typed", "text", "answer"), BEYOND_LIMIT)
def test_a_value_beyond_its_limit_is_refused_with_the_limit(
    typed: str, text: str, answer: str
) -> None:
    assert refused(f"{typed}={text}") == f"{typed} {answer}"


@pytest.mark.parametrize(("typed", "text", "value"), AT_LIMIT)
def test_a_value_at_its_limit_is_good(typed: str, text: str, value: float) -> None:
    config = parse_args([typed, text])
    assert getattr(config, typed.removeprefix("--").replace("-", "_")) == value


def test_the_tables_above_hold_every_option_with_a_limit_and_every_number() -> None:
    limited = [
        flag(name)
        for name, spec in OPTIONS.items()
        if spec.metadata["choices"]
        or any(spec.metadata[key] is not None for key in ("least", "above", "most"))
    ]
    assert {typed for typed, _, _ in BEYOND_LIMIT} == set(limited)
    whole = [flag(name) for name, spec in OPTIONS.items() if type(spec.default) is int]
    assert whole == WHOLE_NUMBERS
    numbers = [n for n, spec in OPTIONS.items() if "float" in str(spec.type)]
    assert [flag(name) for name in numbers] == NUMBERS


@pytest.mark.parametrize(("batches", "lr"), [(1, 0.03), (2, 0.06), (12, 0.36)])
def test_without_lr_it_grows_with_the_batches_in_an_update(batches: int, lr: float) -> None:
    assert parse_args([]).lr_of(batches) == pytest.approx(lr)
    assert parse_args(["--lr", "0.001"]).lr_of(batches) == 0.001


@pytest.mark.parametrize(
    ("text", "max_lag"), [("inf", None), ("0", 0), ("1", 1), ("16", 16), ("007", 7)]
)
def test_the_staleness_is_inf_or_a_number_of_orders(text: str, max_lag: int | None) -> None:
    config = parse_args(["--staleness", text])
    assert (config.staleness, config.max_lag) == (text, max_lag)


@pytest.mark.parametrize(
    "text", ["-1", "two", "1.5", "nan", "Inf", "infinity", "-inf", "1e3", "+1", " 1", "1 ", "None"]
)
def test_any_other_staleness_is_refused_as_seen(text: str) -> None:
    assert refused(f"--staleness={text}") == (
        f"--staleness must be inf or a whole number, 0 or more, got {text!r}"
    )


def test_a_negative_staleness_is_no_option_of_its_own() -> None:
    assert refused("--staleness", "-1") == (
        "--staleness must be inf or a whole number, 0 or more, got '-1'"
    )


def test_an_empty_staleness_is_refused() -> None:
    assert refused("--staleness", "").startswith("argument --staleness: invalid ")
    with pytest.raises(ConfigError) as caught:
        Config(staleness="")
    assert str(caught.value) == "--staleness must be inf or a whole number, 0 or more, got ''"


def test_a_staleness_of_thousands_of_digits_is_refused_and_not_a_traceback() -> None:
    text = "9" * 5000
    assert refused("--staleness", text).startswith("--staleness must be ")


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ([], None),
        (["--channels-last"], True),
        (["--no-channels-last"], False),
        (["--channels-last", "--no-channels-last"], False),
        (["--no-channels-last", "--channels-last"], True),
    ],
)
def test_channels_last_is_on_off_or_left_to_the_workload(
    argv: list[str], value: bool | None
) -> None:
    assert parse_args(argv).channels_last is value


def test_an_on_off_option_takes_no_value() -> None:
    assert refused("--channels-last=yes").startswith(
        "argument --channels-last/--no-channels-last: ignored explicit argument 'yes'"
    )


@pytest.mark.parametrize(
    ("option", "texts"),
    [
        ("--compute", ("server", "trainer")),
        ("--link", ("auto", "local", "rpc")),
        ("--precision", ("float32", "bfloat16")),
        ("--log-level", ("debug", "info", "warning")),
    ],
)
def test_every_word_of_a_choice_is_good(option: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        assert getattr(parse_args([option, text]), option[2:].replace("-", "_")) == text
    assert OPTIONS[option[2:].replace("-", "_")].metadata["choices"] == texts


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_gpus_are_refused_where_the_trainers_compute(num_gpus: int) -> None:
    assert refused("--compute", "trainer", "--num-gpus", str(num_gpus)) == (
        f"--num-gpus {num_gpus} is for --compute server; trainers compute on the CPU"
    )
    assert parse_args(["--num-gpus", str(num_gpus)]).num_gpus == num_gpus
    assert parse_args(["--compute", "trainer", "--num-gpus", "0"]).compute == "trainer"


@pytest.mark.parametrize(
    "text",
    ["Mnist", "cifar", "module", "module:", ":build", "a:b:c", "a/b.py:build", "a b:c", "a.:b"],
)
def test_a_workload_that_is_neither_built_in_nor_a_plug_in_is_refused(text: str) -> None:
    assert refused("--workload", text) == (
        f"--workload must be auto, mnist, digits or module:function, got {text!r}"
    )


@pytest.mark.parametrize("text", ["auto", "mnist", "digits", "mine:build", "pkg.sub.mine:build"])
def test_built_in_workloads_and_plug_ins_are_good(text: str) -> None:
    assert parse_args(["--workload", text]).workload == text


@pytest.mark.parametrize("text", ["exponential", "step:0:0.5"])
def test_a_bad_schedule_is_refused_before_anything_starts(text: str) -> None:
    message = refused("--lr-schedule", text)
    assert message.startswith("--lr-schedule ")
    assert message.endswith(f", got {text!r}")


def test_a_config_made_in_code_is_checked_as_one_that_is_typed() -> None:
    with pytest.raises(ConfigError, match=r"^--batch-size must be 1 or more, got 0$"):
        Config(batch_size=0)


def test_the_last_of_an_option_typed_twice_wins() -> None:
    assert parse_args(["--epochs", "2", "--epochs", "3"]).epochs == 3


@pytest.mark.parametrize("text", ["ftp://here/mnist", "file:///mnist", "here/mnist"])
def test_a_mirror_that_is_not_on_the_web_is_refused(text: str) -> None:
    assert refused("--data-mirror", text) == (
        f"--data-mirror must start with http:// or https://, got {text!r}"
    )


@pytest.mark.parametrize("option", ["--run-dir", "--data-dir"])
def test_an_empty_folder_name_is_refused(option: str) -> None:
    assert refused(option, "").startswith(f"argument {option}: invalid folder value: ''")


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
    "staleness": (["4"], "4"),
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


def inherited(**options: Any) -> dict[str, Any]:
    """What a run with these options leaves for those that go on from it."""
    plain: dict[str, Any] = json.loads(
        json.dumps(Config(**{"workload": "digits"} | options).to_json(inherited_only=True))
    )
    return plain


def typed(name: str) -> list[str]:
    return [flag(name), *OTHER[name][0]]


def test_the_table_above_has_another_value_for_every_option() -> None:
    assert OTHER.keys() == OPTIONS.keys()
    for name, (_, value) in OTHER.items():
        assert value != OPTIONS[name].default
        assert getattr(parse_args(typed(name)), name) == value


@pytest.mark.parametrize("name", OTHER)
def test_an_option_stays_what_it_is_through_json(name: str) -> None:
    config = Config(**{name: OTHER[name][1]})  # type: ignore[arg-type]
    for other in (config, Config()):
        assert Config.from_json(json.loads(json.dumps(other.to_json()))) == other


@pytest.mark.parametrize("name", INHERITED)
def test_an_option_is_that_of_the_run_to_go_on_from_unless_it_is_typed(name: str) -> None:
    value, default = OTHER[name][1], OPTIONS[name].default
    assert getattr(parse_args([], inherited(**{name: value})), name) == value
    assert getattr(parse_args(typed(name), inherited()), name) == value
    assert getattr(parse_args([], inherited()), name) == default


@pytest.mark.parametrize(
    ("argv", "before", "after"),
    [
        (["--epochs", "1"], {"epochs": 5}, {"epochs": 1}),
        (["--lr-schedule", "constant"], {"lr_schedule": "linear"}, {"lr_schedule": "constant"}),
        (["--no-channels-last"], {"channels_last": True}, {"channels_last": False}),
        (["--checkpoint-every", "60s"], {"checkpoint_every": "5"}, {"checkpoint_every": "60s"}),
    ],
)
def test_a_default_that_is_typed_wins_over_the_run_to_go_on_from(
    argv: list[str], before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert parse_args(argv, inherited(**before)) == Config(workload="digits", **after)


@pytest.mark.parametrize("name", OWN)
def test_options_of_one_run_alone_are_not_inherited(name: str) -> None:
    assert name not in inherited(**{name: OTHER[name][1]})
    assert getattr(parse_args(typed(name), inherited()), name) == OTHER[name][1]
    everything = Config(**{name: OTHER[name][1]}).to_json()  # type: ignore[arg-type]
    assert name in everything


@pytest.mark.parametrize("name", FIXED)
def test_what_a_checkpoint_depends_on_is_inherited_and_cannot_be_changed(name: str) -> None:
    (text,), value = OTHER[name]
    assert getattr(parse_args([], inherited(**{name: value})), name) == value
    assert parse_args(typed(name), inherited(**{name: value})) == parse_args(
        [], inherited(**{name: value})
    )
    with pytest.raises(ConfigError) as caught:
        parse_args(typed(name), inherited())
    before = getattr(Config(workload="digits"), name)
    assert str(caught.value) == (
        f"{flag(name)} {text} cannot be: the run to go on from has {before}; omit it, "
        "or omit --resume"
    )


@pytest.mark.parametrize("workload", ["digits", "mnist", "my.plugin:build"])
def test_the_workload_auto_is_what_it_was_in_the_run_to_go_on_from(workload: str) -> None:
    """An attempt after the first has the same command line, and the workload is settled."""
    config = parse_args(["--workload", "auto"], inherited(workload=workload))
    assert config.workload == workload


def test_options_are_checked_together_with_those_of_the_run_to_go_on_from() -> None:
    with pytest.raises(ConfigError, match=r"^--num-gpus 1 is for --compute server; "):
        parse_args(["--num-gpus", "1"], inherited(compute="trainer"))
    with pytest.raises(ConfigError, match=r"^--epochs must be 1 or more, got 0$"):
        parse_args(["--epochs", "0"], inherited())


def test_without_a_run_to_go_on_from_nothing_is_inherited() -> None:
    assert parse_args(["--epochs", "3"]) == replace(Config(), epochs=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bogus": 3, "epochs": 2}, "--bogus is not an option of this version"),
        ({"epochs": 0}, "--epochs must be 1 or more, got 0"),
        ({"epochs": "2"}, "--epochs cannot be '2'"),
        ({"epochs": 2.5}, "--epochs cannot be 2.5"),
        ({"epochs": True}, "--epochs cannot be True"),
        ({"epochs": None}, "--epochs cannot be None"),
        ({"lr": "fast"}, "--lr cannot be 'fast'"),
        ({"lr": float("nan")}, "--lr must be finite, got nan"),
        ({"channels_last": 1}, "--channels-last cannot be 1"),
        ({"checkpoint_every": 500}, "--checkpoint-every cannot be 500"),
        ({"data_dir": None}, "--data-dir cannot be None"),
        ({"data_dir": 3}, "--data-dir cannot be 3"),
        ({"inject": "kill:2@30"}, "--inject cannot be 'kill:2@30'"),
    ],
)
def test_options_that_are_not_of_this_version_are_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    for read in (lambda: Config.from_json(options), lambda: parse_args([], options)):
        with pytest.raises(ConfigError) as caught:
            read()
        assert str(caught.value) == message


def test_a_whole_number_is_good_where_json_has_one_for_a_number() -> None:
    config = Config.from_json({"lr": 1, "start_timeout": 30})
    assert (config.lr, config.start_timeout) == (1.0, 30.0)
    assert isinstance(config.lr, float)


@pytest.mark.parametrize(
    ("text", "updates", "interval_s"),
    [
        ("500", 500, None),
        ("1", 1, None),
        ("007", 7, None),
        ("999999999", 999999999, None),
        ("60s", None, 60.0),
        ("1s", None, 1.0),
        ("0", None, None),
        ("0s", None, None),
    ],
)
def test_checkpoints_are_every_so_many_updates_or_seconds_or_at_the_end_alone(
    text: str, updates: int | None, interval_s: float | None
) -> None:
    config = parse_args(["--checkpoint-every", text])
    assert (config.checkpoint_updates, config.checkpoint_interval_s) == (updates, interval_s)
    assert (Config().checkpoint_updates, Config().checkpoint_interval_s) == (None, 60.0)


@pytest.mark.parametrize(
    "text",
    [
        *("-1", "1.5s", "60 s", "1m", "s", "1e3", "60S", "+5", "ss", "inf", " 5", "1h30", "5ss"),
        *("\u0663", "\u0663s", "1234567890", "9" * 5000),
    ],
)
def test_any_other_interval_of_checkpoints_is_refused_as_seen(text: str) -> None:
    assert refused(f"--checkpoint-every={text}") == (
        "--checkpoint-every must be a number of updates such as 500, or of seconds such as 60s, "
        f"got {text!r}"
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", None),
        ("0GiB", None),
        ("1024", 1024),
        ("1B", 1),
        ("2KiB", 2048),
        ("500MiB", 500 * 2**20),
        ("8GiB", 8 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("3TiB", 3 * 2**40),
        ("999999999999999", 999_999_999_999_999),
    ],
)
def test_the_memory_limit_is_a_size(text: str, num_bytes: int | None) -> None:
    assert parse_args(["--memory-limit", text]).memory_limit_bytes == num_bytes
    assert Config().memory_limit_bytes is None


@pytest.mark.parametrize(
    "text",
    [
        *("8GB", "8 GiB", "-1GiB", "GiB", "1.GiB", ".5GiB", "8gib", "1e3", "inf", "nan", "+1GiB"),
        *("8G", "8GiBs", " 8GiB", "1,5GiB", "0x10", "\u0663GiB"),
        *("9" * 400 + "TiB", "1." + "9" * 5000 + "GiB"),
    ],
)
def test_any_other_memory_limit_is_refused_as_seen(text: str) -> None:
    assert refused(f"--memory-limit={text}") == (
        f"--memory-limit must be a size such as 8GiB or 500MiB, got {text!r}"
    )


@pytest.mark.parametrize("name", ["checkpoint_every", "memory_limit"])
def test_an_empty_text_is_refused_from_code_too(name: str) -> None:
    assert refused(f"{flag(name)}=").startswith(f"argument {flag(name)}: invalid ")
    with pytest.raises(ConfigError, match=rf"^{flag(name)} must be .*, got ''$"):
        Config(**{name: ""})  # type: ignore[arg-type]

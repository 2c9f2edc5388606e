"""Documentation is tested: a setting, option, command or metric that is not documented, or not truly, fails the build."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from gateway.cli import COMMANDS, command_parser
from gateway.configfile import load
from gateway.mistakes import is_secret, model_in, settings_tree

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "config"
DOCS = ROOT / "docs"

SETTINGS = {path: field for path, field in settings_tree() if model_in(field.annotation) is None}
_ROW = re.compile(r"^\| `([^`]+)` \| (.+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def default_of(field: FieldInfo) -> str:
    """A default as the tables write it."""
    if field.is_required():
        return "required"
    if field.default is None:
        return "–"
    if field.default in ((), {}):
        return "none"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def documented() -> dict[str, tuple[str, str, str]]:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    return {name: (meaning, unit.strip(), default.strip()) for name, meaning, unit, default in _ROW.findall(text)}


def test_every_setting_is_documented_and_nothing_else() -> None:
    assert sorted(documented()) == sorted(SETTINGS)


@pytest.mark.parametrize("path", SETTINGS)
def test_a_setting_has_its_true_default_unit_and_secrecy(path: str) -> None:
    meaning, unit, default = documented()[path]
    assert meaning
    assert default == default_of(SETTINGS[path])
    assert (unit == "secret") is is_secret(SETTINGS[path])
    for suffix, expected in (("_ms", "ms"), ("_s", "s"), ("_mb", "MiB")):
        assert (unit == expected) or not path.endswith(suffix)


def choices_of(field: FieldInfo) -> list[str]:
    return [word for word in getattr(field.annotation, "__args__", ()) if isinstance(word, str)]


@pytest.mark.parametrize("path", [path for path, field in SETTINGS.items() if choices_of(field)])
def test_every_choice_of_a_setting_is_documented(path: str) -> None:
    meaning, _, default = documented()[path]
    assert [word for word in choices_of(SETTINGS[path]) if f"`{word}`" not in meaning + default] == []


# -- the files in config/ ----------------------------------------------------------------------------------------------

COMMENTED = (CONFIG / "gateway.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", SETTINGS)
def test_the_commented_file_shows_every_setting(path: str) -> None:
    name = re.escape(path.rpartition(".")[2])
    assert re.search(rf"^ *(?:#(?=\S))?(?:- )?{name}:", COMMENTED, re.MULTILINE)


@pytest.mark.parametrize("name", ["gateway.yaml", "minimal.yaml"])
def test_the_files_load_without_environment_and_without_warnings(name: str) -> None:
    assert load(CONFIG / name, {}).warnings == ()


def test_the_settings_that_are_commented_out_are_right(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(re.sub(r"^( *)#(?=\S)", r"\1", COMMENTED, flags=re.MULTILINE), encoding="utf-8")
    loaded = load(path, {"DIFY_KEY": "x"})
    assert [warning.path for warning in loaded.warnings] == ["keys[0].requests_per_minute", "keys[0].concurrent"]


# -- commands ----------------------------------------------------------------------------------------------------------


def sections() -> dict[str, str]:
    """The text of docs/cli.md about each command."""
    parts = re.split(r"^## `firsttoken (\w+)[^`]*`$", (DOCS / "cli.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def options_of(command: str) -> Iterator[str]:
    if importlib.util.find_spec(f"gateway.cli.{command}") is None:
        pytest.skip(f"gateway/cli/{command}.py is not there yet")
    (commands,) = (a for a in command_parser(command)._actions if isinstance(a, argparse._SubParsersAction))
    for action in commands.choices[command]._actions:
        yield from (option for option in action.option_strings if option not in ("-h", "--help"))


def test_every_command_is_documented_and_nothing_else() -> None:
    assert list(sections()) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented_and_nothing_else(command: str) -> None:
    told = re.findall(r"^\| `(--?[\w-]+)", sections()[command], flags=re.MULTILINE)
    assert sorted(told) == sorted(options_of(command))


# -- metrics -----------------------------------------------------------------------------------------------------------


def metric_names() -> list[str]:
    """The names that `gateway.metrics` lists, if it does."""
    module = importlib.import_module("gateway.metrics")
    return sorted(getattr(module, "METRIC_NAMES", ()))


@pytest.mark.skipif(not metric_names(), reason="gateway.metrics has no METRIC_NAMES")
def test_every_metric_is_documented() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in metric_names() if f"`{name}`" not in text] == []


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_to_files_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)[^)]*\)", (DOCS / page).read_text(encoding="utf-8"))
    assert [link for link in links if not (DOCS / link).exists()] == []

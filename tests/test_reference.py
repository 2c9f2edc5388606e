"""Tables of the documentation that say what the code does are read here and compared with it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import orjson
import pytest
import yaml

from gateway import errors
from gateway.again import Rule
from gateway.config import Clean, Route, Upstream
from gateway.configfile import load
from gateway.errors import GatewayError
from gateway.metrics import CLEAN_KINDS, EMPTY_KINDS, FAILURE_REASONS, POLICY_KINDS
from gateway.policy.cleantext import clean_text
from gateway.policy.shape import shape
from gateway.wire.body import read_object
from gateway.wire.families import FAMILIES, UNKNOWN, Family, guess_family

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted(DOCS.glob("*.md"))))

_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`) ?(.*?) ?\1(?!`)")


def table(page: str, first_column: str) -> list[list[str]]:
    """The cells of the table on a page whose first column has this head."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows: list[list[str]] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def code(cell: str) -> str:
    """What stands in the code span of a cell, or the cell."""
    span = _CODE_SPAN.fullmatch(cell)
    return span[2] if span is not None else cell


def codes(cell: str) -> list[str]:
    return [span[2] for span in _CODE_SPAN.finditer(cell)]


# -- docs/policies.md --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cells", table("policies.md", "request"), ids=lambda cells: f"{cells[0]} {cells[1]}")
def test_an_example_of_a_policy_is_true(cells: list[str]) -> None:
    request, setting, expected, told = map(code, cells)
    body = read_object(request.encode())
    route = Route(upstreams=("main",), **yaml.safe_load(setting))
    shaped = shape(body, route=route, upstream=Upstream(url="http://main"), engine="vllm", kind="chat")
    assert shaped.body.decode() == (request if expected == "unchanged" else expected)
    assert ", ".join(shaped.changes) == (told if told != "–" else "")


@pytest.mark.parametrize("cells", table("policies.md", "text"), ids=lambda cells: cells[0])
def test_an_example_of_cleaning_is_true(cells: list[str]) -> None:
    before = code(cells[0]).encode("raw_unicode_escape").decode("unicode_escape")
    cleaned, counts = clean_text(before, Clean())
    assert cleaned == (before if cells[1] == "unchanged" else code(cells[1]))
    assert [f"{step}:{count}" for step, count in counts.items()] == codes(cells[2])


def off_of(family: Family) -> str:
    """What `thinking: off` sends to a family, as the table writes it."""
    if not family.can_switch:
        return f"effort `{family.off_effort}`" if family.off_effort else "cannot be switched off"
    sent = [f"`{key}: {orjson.dumps(value).decode()}`" for key, value in family.off]
    return ", ".join([*sent, f"effort `{family.off_effort}`"] if family.off_effort else sent)


def test_the_table_of_families_is_the_one_in_the_code() -> None:
    words = {"on": "thinks", "off": "does not", "model": "depends"}
    expected = [
        [
            f"`{family.name}`",
            ", ".join(f"`{parser}`" for parser in family.parsers) or "–",
            words[family.default],
            off_of(family),
            family.note or "–",
        ]
        for family in (*FAMILIES, UNKNOWN)
    ]
    assert [[cells[0], *cells[2:]] for cells in table("policies.md", "`family`")] == expected


@pytest.mark.parametrize("cells", table("policies.md", "`family`"), ids=lambda cells: cells[0])
def test_the_named_model_is_guessed_to_be_of_its_family(cells: list[str]) -> None:
    family, model = code(cells[0]), cells[1]
    if model != "–":
        assert guess_family(model).name == family


def test_every_change_and_every_re_sending_is_named() -> None:
    text = (DOCS / "policies.md").read_text(encoding="utf-8")
    assert [kind for kind in POLICY_KINDS if f"`{kind}=" not in text and f"`{kind}`" not in text] == []
    assert sorted(rules_of("sent again")) == sorted(get_args(Rule))


def rules_of(section: str) -> list[str]:
    """The first column of the table under a heading of policies.md."""
    text = (DOCS / "policies.md").read_text(encoding="utf-8")
    part = re.split(r"^## ", text, flags=re.MULTILINE)
    body = next(part for part in part if part.lower().startswith(section))
    return re.findall(r"^\| `(\w+)` \|", body, flags=re.MULTILINE)


def test_every_cleaning_step_and_every_verdict_is_explained() -> None:
    assert rules_of("cleaning") == list(CLEAN_KINDS)
    assert sorted(rules_of("empty answers")) == sorted(EMPTY_KINDS)


# -- docs/errors.md ----------------------------------------------------------------------------------------------------


def error_classes(base: type[GatewayError] = GatewayError) -> Iterator[type[GatewayError]]:
    yield base
    for child in base.__subclasses__():
        yield from error_classes(child)


def codes_in_source() -> set[str]:
    """`code="…"` of every call in the package, and the codes of the control plane."""
    found: set[str] = set()
    for path in (ROOT / "gateway").rglob("*.py"):
        if "sim" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                found.add(str(node.value.value))
    web = (ROOT / "gateway" / "web" / "api.py").read_text(encoding="utf-8")
    return found | set(re.findall(r'\b4\d\d: "(\w+)"', web))


def test_every_code_is_explained_and_no_other() -> None:
    known = {kind.code for kind in error_classes() if kind.__module__ == errors.__name__} | codes_in_source()
    assert sorted(code(cells[0]) for cells in table("errors.md", "code")) == sorted(known)


@pytest.mark.parametrize("kind", [kind for kind in error_classes() if "code" in vars(kind)])
def test_a_code_has_its_true_status(kind: type[GatewayError]) -> None:
    statuses = {code(cells[0]): cells[1] for cells in table("errors.md", "code")}
    assert statuses[kind.code] == str(kind.status)


def test_every_reason_is_explained_and_no_other() -> None:
    told = [reason for cells in table("errors.md", "reason") for reason in codes(cells[0])]
    assert sorted(told) == sorted(FAILURE_REASONS)


# -- examples of settings, and numbers in the text --------------------------------------------------------------------


def settings_examples() -> Iterator[tuple[str, str]]:
    """Whole files of settings on a page; excerpts have no `upstreams`."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for block in re.findall(r"^```yaml\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
            if "upstreams:\n" in block:
                yield page, block


@pytest.mark.parametrize("page, block", list(settings_examples()))
def test_an_example_of_settings_is_right(page: str, block: str, tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(block, encoding="utf-8")
    assert load(path, {"DIFY_KEY": "x"}).warnings == ()


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_the_number_of_families_is_right(page: str) -> None:
    (number,) = re.findall(r"(\d+)\s+(?:model\s+)?families", (ROOT / page).read_text(encoding="utf-8"))
    assert int(number) == len(FAMILIES)


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_exist(page: str) -> None:
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    broken = []
    for link, anchor in re.findall(r"\]\(([^)#:\s]*)(#[^)\s]+)?\)", text):
        target = (path.parent / link) if link else path
        if not target.exists() or (anchor and anchor[1:] not in anchors(target)):
            broken.append(link + anchor)
    assert broken == []


def anchors(path: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}

"""The documents name only what exists, and their commands and code work as they stand."""

import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from actors.checks.config import check
from actors.envs.base import REGISTRY
from evolver_async.cli import _parser
from evolver_async.commands.recipes import recipe_path
from evolver_async.config import Config, StageConfig
from evolver_async.config.load import load

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.is_file())
FOLDERS = ("actors", "configs", "docs", "evolver_async", "examples", "learner", "tests")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./{{}},*-]*|[\w-]+\.(?:md|txt|toml))")
FILES = ("metrics.jsonl", "run.json")  # of a run directory, spelled like keys
COMMAND = re.compile(r"(?<![\w/.])evolver-async +([a-z]+)")
KEY = re.compile(r"`((?:[a-z_]+\.)+[a-z_]+)(?:=[^`]*|: [^`]*)?`")
TRAIN = re.compile(r"evolver-async train ((?:own |configs/|examples/)[^`\n#]*)")


@pytest.fixture(params=PAGES, ids=NAMES)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def train_commands() -> Iterator[tuple[str, str]]:
    for name, path in zip(NAMES, PAGES, strict=True):
        for command in TRAIN.findall(path.read_text().replace("\\\n", "")):
            yield name, command


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_all_parameters_of_an_environment_are_described(name: str) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    rows = [line for line in page.splitlines() if re.match(rf"\| .*`{name}`.* \|", line)]
    heading = f"### {name.partition('_')[0].capitalize()}\n"
    own = page.partition(heading)[2].partition("\n### ")[0]
    maps = [line for line in page.splitlines() if line.startswith("| maps |")]
    module, _, kind = REGISTRY[name].partition(":")
    try:
        found = inspect.signature(getattr(importlib.import_module(module), kind)).parameters
    except ImportError as error:
        pytest.skip(f"{error}")
    text = "\n".join([*rows, *maps, own])
    assert {one for one in found if f"`{one}`" not in text and f"{{{one}: " not in text} == set()


def test_internal_links_resolve(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


def test_every_page_of_docs_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {f"docs/{path.name}" for path in ROOT.glob("docs/*.md")} <= linked


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250


def test_files_that_are_named_exist(page: Path) -> None:
    for name in PATH.findall(page.read_text()):
        name = name.rstrip(".,")
        if not (name.endswith("/") or "." in name):  # a metric, like learner/lr
            continue
        patterns = [name]
        if found := re.search(r"\{(.*)\}", name):
            patterns = [name.replace(found[0], one) for one in found[1].split(",")]
        for pattern in patterns:
            places = {ROOT, page.parent, ROOT / "configs"}
            assert any(list(place.glob(pattern)) for place in places), f"{page.name}: {pattern}"


def test_commands_that_are_named_exist(page: Path) -> None:
    _, public = _parser()
    text = page.read_text()
    assert set(COMMAND.findall(text)) <= set(public)


def test_every_public_command_is_documented() -> None:
    _, public = _parser()
    text = (ROOT / "docs/operations.md").read_text()
    assert set(public) <= set(COMMAND.findall(text))


def test_targets_of_make_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", page.read_text(), re.M)) <= targets


def test_configuration_keys_that_are_named_exist(page: Path) -> None:
    config = Config()
    for key in KEY.findall(page.read_text()):
        section, *parts = key.split(".")
        if section == "stages" or key in FILES or not hasattr(config, section):
            continue
        value = getattr(config, section)
        for part in parts:
            if isinstance(value, dict):
                break
            assert is_dataclass(value) and hasattr(value, part), f"{page.name}: {key}"
            value = getattr(value, part)


@pytest.mark.parametrize(("page_name", "command"), [*train_commands()])
def test_train_commands_are_accepted(
    page_name: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all that is checked before a start, but for what only its reader has."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("EPISODES_KEY", "a-key-of-the-test")
    recipe, *changes = shlex.split(command)
    config = load(recipe_path(recipe), changes)
    reader_has = "my_" in command or "tasks.path=" in command
    if not reader_has and config.engine.kind != "vllm":
        check(config)


def test_train_commands_are_found_whole() -> None:
    found = [command for name, command in train_commands() if name == "README.md"]
    shown = (ROOT / "README.md").read_text().count("evolver-async train ")
    assert len(found) == shown >= 3
    assert any("/models/my-model" in command and "reward=" in command for command in found)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_shown_as_it_is(example: Path) -> None:
    block = f"\n# examples/{example.name}\n{example.read_text()}```"
    assert any(block in page.read_text() for page in PAGES if page.parent.name == "docs")


def test_stage_limits_are_documented() -> None:
    text = (ROOT / "docs/recipes.md").read_text()
    for limit in ("steps", "tokens", "hours", "until_success"):
        assert hasattr(StageConfig(), limit) and f"`{limit}`" in text

"""The shape of the code: who may import whom, which library lives where, how large rooms may be.

Reads the syntax trees, so that imports inside functions and under TYPE_CHECKING count as well.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("evolver_async", "actors", "learner")
FILE_LINES, FUNCTION_LINES, LOOP_LINES = 400, 80, 60

# Ground floor: what a module (or everything below it) may import from ours, itself aside. The first
# match counts. `roles` names the wings without importing them, so that mains can take its RoleArgs.
PURE_BUFFER = ("evolver_async.schema", "evolver_async.buffer.state.groups")
WIRE = ("evolver_async.schema", "evolver_async.protocol.messages", "evolver_async.config")
TRANSPORT = (
    *WIRE,
    "evolver_async.metrics.writer",
    "evolver_async.protocol.envelope",
    "evolver_async.transport.sessions",
    "evolver_async.transport.delivery",
)
ALLOWED: dict[str, tuple[str, ...]] = {
    "evolver_async.schema": (),
    "evolver_async.protocol.messages": ("evolver_async.schema",),
    "evolver_async.config": (),
    "evolver_async.metrics.writer": ("evolver_async.metrics.wandb_process",),
    "evolver_async.metrics.wandb_process": (),
    "evolver_async.metrics.lineages": (),
    "evolver_async.protocol.bounded": (),
    "evolver_async.protocol.trajectories": (
        "evolver_async.schema",
        "evolver_async.protocol.bounded",
    ),
    "evolver_async.protocol.envelope": (
        *WIRE,
        "evolver_async.metrics.writer",
        "evolver_async.protocol.trajectories",
        "evolver_async.protocol.bounded",
    ),
    "evolver_async.transport.sessions": (*WIRE, "evolver_async.protocol.envelope"),
    "evolver_async.transport.delivery": (
        *WIRE,
        "evolver_async.protocol.envelope",
        "evolver_async.transport.sessions",
    ),
    "evolver_async.transport.addresses": (),
    "evolver_async.transport.keys": (),
    "evolver_async.transport.curve": ("evolver_async.transport.keys",),
    "evolver_async.transport.sockets": (
        *TRANSPORT,
        "evolver_async.transport.addresses",
        "evolver_async.transport.curve",
    ),
    "evolver_async.buffer.state.position": PURE_BUFFER,
    "evolver_async.buffer.state.replay": (*PURE_BUFFER, "evolver_async.buffer.state.position"),
    "evolver_async.buffer.state.ledger": PURE_BUFFER,
    "evolver_async.buffer.tasks.stream": PURE_BUFFER,
    "evolver_async.buffer.state.censoring": (),
    "evolver_async.buffer.monitor.failures": PURE_BUFFER,
    "evolver_async.buffer.state.groups": PURE_BUFFER,
    "evolver_async.buffer.log.segment": (),
    "evolver_async.buffer.log.journal": ("evolver_async.buffer.log.segment",),
    "evolver_async.buffer.service": (
        *TRANSPORT,
        "evolver_async.transport.sockets",
        "evolver_async.buffer",
        "evolver_async.checkpoint.directory",
        "evolver_async.checkpoint.history",
        "evolver_async.launch.roles",
        "evolver_async.model.tokenizer",
    ),
    "evolver_async.buffer": (
        *WIRE,
        "evolver_async.protocol.trajectories",
        "evolver_async.protocol.envelope",
        "evolver_async.buffer",
    ),
    "evolver_async.model.tokenizer": (),
    "evolver_async.model.tiny": ("evolver_async.model.tokenizer",),
    "evolver_async.model.attention": (),
    "evolver_async.model.policy": (
        "evolver_async.model.attention",
        "evolver_async.model.tokenizer",
        "evolver_async.model.tiny",
    ),
    "evolver_async.weights.factory": ("evolver_async.config", "evolver_async.weights"),
    "evolver_async.model.lora": ("evolver_async.model.policy", "evolver_async.schema"),
    "evolver_async.weights.lora_receiver": (
        "evolver_async.schema",
        "evolver_async.config",
        "evolver_async.model.lora",
        "evolver_async.model.policy",
        "evolver_async.weights.channel.base",
    ),
    "evolver_async.weights": ("evolver_async.schema",),
    "evolver_async.checkpoint.directory": (),
    "evolver_async.checkpoint.history": ("evolver_async.checkpoint.directory",),
    "evolver_async.checkpoint.shards": (),
    "evolver_async.launch.roles": (
        "evolver_async.config",
        "evolver_async.checkpoint.directory",
        "evolver_async.process.private_directories",
        "evolver_async.buffer.log.journal",
        "evolver_async.process.logs",
    ),
    "evolver_async.process.logs": (),
}
TOP = {  # rises on everything below it, never the other way round
    "evolver_async.launch": ("evolver_async.study", "evolver_async.commands", "evolver_async.cli"),
    "evolver_async.study": ("evolver_async.commands", "evolver_async.cli"),
    "evolver_async.commands": ("evolver_async.cli",),
    "evolver_async.cli": (),
}

# Outside libraries with one home each.
HOMES: dict[str, tuple[str, ...]] = {
    "zmq": (
        "evolver_async.transport.sockets",
        "evolver_async.transport.curve",
        "evolver_async.transport.keys",
    ),
    "ray": ("evolver_async.launch.ray",),
    "faiss": ("actors.experience.index",),
    "vllm": (
        "actors.engines.vllm_engine",
        "actors.engines.vllm_core",
        "actors.engines.vllm_start",
        "actors.engines.vllm_weights",
    ),
    "gymnasium": ("actors.envs.adapters.gymnasium_env",),
    "reasoning_gym": ("actors.envs.adapters.reasoning_gym_env",),
    "textarena": ("actors.envs.adapters.textarena_env",),
    "verifiers": ("actors.envs.adapters.verifiers_env",),
    "openenv": ("actors.envs.adapters.openenv_env",),
    "httpx": ("actors.llm.client", "actors.envs.adapters.service_client"),
    "uvicorn": ("actors.endpoint.server",),
    "wandb": ("evolver_async.metrics.wandb_upload",),
    "omegaconf": ("evolver_async.config",),
    "msgpack": ("evolver_async.protocol.bounded",),
    "torch": (
        "evolver_async.model.policy",
        "evolver_async.model.attention",
        "evolver_async.model.lora",
        "evolver_async.model.tiny",  # the part of policy that makes the preset
        "evolver_async.checkpoint.shards",  # the part of a checkpoint that sees tensors
        "evolver_async.weights",
        "actors.engines",
        "learner",
    ),
}

PROBES = "evolver_async.doctor.probes"  # asks every library whether it works, none to work with it


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by dotted name; a package is named without `__init__`."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def imports(module: str) -> frozenset[str]:
    """Dotted names that `module` imports, down to modules of ours; importlib strings included."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                found.add(deeper if deeper in modules() else node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return frozenset(found - {module})


def ours(module: str) -> set[str]:
    return {name for name in imports(module) if name.split(".")[0] in PACKAGES}


def within(name: str, homes: tuple[str, ...]) -> bool:
    return any(name == home or name.startswith(f"{home}.") for home in homes)


def of(package: str) -> list[str]:
    return sorted(name for name in modules() if within(name, (package,)))


def test_nothing_on_the_ground_floor_imports_a_wing() -> None:
    arrows = [(m, i) for m in of("evolver_async") for i in ours(m) if within(i, PACKAGES[1:])]
    assert arrows == []


def test_the_wings_do_not_import_each_other() -> None:
    arrows = [(m, i) for m in of("actors") for i in ours(m) if within(i, ("learner",))]
    arrows += [(m, i) for m in of("learner") for i in ours(m) if within(i, ("actors",))]
    assert arrows == []


@pytest.mark.parametrize("module", [name for name in of("evolver_async") if "." in name])
def test_the_ground_floor_imports_only_what_lies_below(module: str) -> None:
    for upper, forbidden in TOP.items():
        if within(module, (upper,)) and module not in ALLOWED:
            assert [i for i in ours(module) if within(i, forbidden)] == []
            return
    home = next((home for home in ALLOWED if within(module, (home,))), None)
    assert home is not None, f"{module}: say in ALLOWED what it may import"
    seen = [i for i in ours(module) if not within(i, (*ALLOWED[home], home))]
    assert seen == []


def test_imports_form_no_cycle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module in done:
            return
        for name in ours(module):
            # a package's __init__ that gathers its own modules is read before them, not a cycle
            if name in modules() and not within(module, (name,)):
                visit(name, (*path, module))
        done.add(module)

    for module in modules():
        visit(module, ())


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_only_at_home(library: str) -> None:
    guests = [
        module
        for module in modules()
        if any(within(name, (library,)) for name in imports(module))
        and not within(module, (*HOMES[library], PROBES))
    ]
    assert guests == []


def test_the_command_line_needs_no_torch_to_say_what_it_can_do() -> None:
    """Follows the imports that run when cli is imported: those outside functions."""
    seen: set[str] = set()
    waiting = ["evolver_async.cli"]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for node in tree(module).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            assert "torch" not in {name.split(".")[0] for name in names}, module
            waiting += [name for name in names if name in modules()]


def functions(module: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{module}.{node.name}", node.end_lineno - node.lineno + 1


def test_rooms_are_small() -> None:
    lines = {module: len(path.read_text().splitlines()) for module, path in modules().items()}
    print("largest files:", sorted(lines.items(), key=lambda item: -item[1])[:5])
    assert {module: count for module, count in lines.items() if count > FILE_LINES} == {}


def test_functions_are_short() -> None:
    lengths = dict(length for module in modules() for length in functions(module))
    print("longest functions:", sorted(lengths.items(), key=lambda item: -item[1])[:5])
    assert {name: count for name, count in lengths.items() if count > FUNCTION_LINES} == {}


def test_the_training_loop_reads_like_pseudo_code() -> None:
    lengths = dict(functions("learner.train"))
    assert {name: count for name, count in lengths.items() if count > LOOP_LINES} == {}


def test_every_module_says_what_lives_there() -> None:
    silent = [module for module in modules() if not ast.get_docstring(tree(module))]
    assert silent == []


def test_outside_imports_are_declared() -> None:
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").lower()
    aliases = {"zmq": "pyzmq", "yaml": "omegaconf", "reasoning_gym": "reasoning-gym"}
    outside = {name.split(".")[0] for module in modules() for name in imports(module)}
    outside -= {*PACKAGES, *sys.stdlib_module_names}
    assert [name for name in outside if aliases.get(name, name).lower() not in declared] == []

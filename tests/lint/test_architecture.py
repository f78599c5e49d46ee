"""The structure of the code: who imports whom, where a library lives, how large a file may be.

Reads the syntax trees, so that imports inside functions and under TYPE_CHECKING count as well.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("evolver_async", "actors", "learner")
FILE_LINES, FUNCTION_LINES, FOLDER_FILES = 600, 80, 20
QUESTIONS = ("What", "Who", "Whom", "Whose", "Whether", "Where", "How", "Which", "When", "Why")

# Floors of `evolver_async`, the lowest first. A folder imports only from lower floors.
FLOORS = (
    (
        *("errors", "files", "room", "durations", "intervals", "randomness", "extension"),
        *("splits", "terminal", "version"),
    ),
    ("schema", "env", "file_formats"),
    ("lineages", "rewards"),
    ("config", "model", "checkpoint"),
    ("process", "wire", "metrics"),
    ("weights", "buffer", "memory"),
    ("launch",),
    ("runs",),
    ("study", "doctor"),
    ("commands", "notebook"),
    ("library", "cli"),
    ("__main__",),
)

# Folders of pure functions: time and randomness are arguments.
PURE = (
    *("evolver_async.buffer.state", "evolver_async.study.statistics"),
    *("learner.loss", "learner.advantage", "learner.data"),
)
IMPURE = ("asyncio", "random", "socket", "threading", "time", "zmq")

# Outside libraries with one home each.
HOMES: dict[str, tuple[str, ...]] = {
    "zmq": ("evolver_async.wire",),
    "ray": ("evolver_async.launch.ray_cluster",),
    "faiss": ("actors.experience.vectors", "actors.experience.gpu_vectors"),
    "vllm": (
        "actors.engines.vllm_engine",
        "actors.engines.vllm_core",
        "actors.engines.vllm_grammar",
        "actors.engines.vllm_lora",
        "actors.engines.vllm_start",
        "actors.engines.vllm_swap",
        "actors.engines.vllm_weights",
        "actors.weights.vllm_shadow",
    ),
    "mcp": ("actors.envs.tool_server",),
    "gymnasium": ("actors.adapters.gymnasium_env",),
    "reasoning_gym": (
        "actors.adapters.reasoning_gym_env",
        "actors.adapters.reasoning_gym_scorer",  # what runs of it in the sandbox
    ),
    "textarena": ("actors.adapters.textarena_env",),
    "verifiers": ("actors.adapters.verifiers_env", "actors.endpoint.verifiers_agent"),
    "scienceworld": ("actors.adapters.scienceworld_env",),
    "openenv": ("actors.adapters.openenv_env",),
    "math_verify": ("actors.rewards.answers",),
    "xgrammar": ("evolver_async.model.grammar",),
    "rapidfuzz": ("actors.envs.webshop.purchase_reward",),
    "httpx": (
        "actors.experience.embedding_endpoint",
        "actors.llm.endpoint_client",
        "actors.adapters.service_client",
        "actors.rewards.served_model",  # a reward model at a URL, which answers one number
        "actors.endpoint.textarena_selfplay",
        "learner.optimize.teacher_endpoint",
    ),
    "uvicorn": ("actors.endpoint.http_server",),
    "wandb": ("evolver_async.metrics.wandb_upload",),
    "prometheus_client": ("evolver_async.runs.watch.prometheus",),
    "matplotlib": ("evolver_async.study.plots",),
    "pandas": ("evolver_async.runs.results",),
    "mpmath": ("evolver_async.study.statistics",),
    "textual": ("evolver_async.runs.dashboard.app",),
    "bokeh": ("evolver_async.runs.report.plots", "evolver_async.study.study_figures"),
    "datasets": ("evolver_async.buffer.tasks.row_tables",),
    "pyarrow": ("evolver_async.buffer.tasks.row_tables", "evolver_async.config.sampled_rows"),
    "omegaconf": ("evolver_async.config",),
    "msgpack": ("evolver_async.wire.bounded",),
    "torch": (
        "evolver_async.model.policy",
        "evolver_async.model.rows.prefix_trees",
        "evolver_async.model.row_checks",
        "evolver_async.model.attention",
        "evolver_async.model.flash",
        "evolver_async.model.rows.context",
        "evolver_async.model.rows.borders",
        "evolver_async.model.gguf",
        "evolver_async.model.cpu.lean",
        "evolver_async.model.cpu.tree_attention",
        "evolver_async.model.layers",
        "evolver_async.model.lora",
        "evolver_async.model.precision",
        "evolver_async.model.cpu.products",
        "evolver_async.model.projection",
        "evolver_async.model.tiny",  # the part of policy that makes the preset
        "evolver_async.checkpoint.shards",  # the part of a checkpoint that sees tensors
        "evolver_async.weights",
        "actors.engines",
        "actors.weights",
        "actors.rewards.sequence_classifier",  # of a process of its own
        "learner",
    ),
}

PROBES = "evolver_async.doctor.probes"  # imports every library to see if it works


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


def test_no_room_bears_the_name_of_a_library() -> None:
    """A type checker takes the folder for the library wherever the library is not installed."""
    named = [name for name in modules() if name.split(".")[-1] in HOMES]
    assert named == []


def test_the_wings_do_not_import_each_other() -> None:
    arrows = [(m, i) for m in of("actors") for i in ours(m) if within(i, ("learner",))]
    arrows += [(m, i) for m in of("learner") for i in ours(m) if within(i, ("actors",))]
    assert arrows == []


def folder(module: str) -> str:
    """The folder of a module. A file directly in a package is a folder of its own."""
    path = modules()[module].relative_to(ROOT)
    parts = path.parent.parts
    return ".".join(parts) if len(parts) > 1 else module


@cache
def floors() -> dict[str, int]:
    return {name: level for level, floor in enumerate(FLOORS) for name in floor}


def test_a_folder_imports_only_from_lower_floors() -> None:
    raised = []
    for module in of("evolver_async"):
        room = module.partition(".")[2].partition(".")[0]
        if not room:
            continue
        assert room in floors(), f"{module}: its folder has no floor in FLOORS"
        others = {name.split(".")[1] for name in ours(module) if "." in name} - {room}
        raised += [(module, name) for name in others if floors()[name] >= floors()[room]]
    assert raised == []


def cycle(arrows: dict[str, set[str]]) -> str:
    """The first cycle found, as text; "" if there is none."""
    done: set[str] = set()

    def visit(node: str, path: tuple[str, ...]) -> str:
        if node in path:
            return " → ".join((*path[path.index(node) :], node))
        if node in done:
            return ""
        found = next(filter(None, (visit(n, (*path, node)) for n in sorted(arrows[node]))), "")
        done.add(node)
        return found

    return next(filter(None, (visit(node, ()) for node in sorted(arrows))), "")


def test_imports_of_files_form_no_cycle() -> None:
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        # a package's __init__ that gathers its own modules is read before them, not a cycle
        arrows[module] = {n for n in ours(module) if n in modules() and not within(module, (n,))}
    assert cycle(arrows) == ""


def test_imports_of_folders_form_no_cycle() -> None:
    for package in PACKAGES:
        arrows: dict[str, set[str]] = defaultdict(set)
        for module in of(package):
            inside = {one for one in ours(module) if within(one, (package,)) and one in modules()}
            arrows[folder(module)] |= {folder(name) for name in inside} - {folder(module)}
        assert cycle(arrows) == ""


def test_pure_folders_read_no_clock_and_open_no_socket() -> None:
    pure = [name for name in modules() if within(name, PURE)]
    assert [(m, name) for m in pure for name in imports(m) if within(name, IMPURE)] == []


def test_a_library_is_imported_only_at_home() -> None:
    guests = [
        (module, library)
        for module in modules()
        for library in HOMES.keys() & {name.partition(".")[0] for name in imports(module)}
        if not within(module, (*HOMES[library], PROBES))
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


def test_files_are_short() -> None:
    lines = {module: len(path.read_text().splitlines()) for module, path in modules().items()}
    assert {module: count for module, count in lines.items() if count > FILE_LINES} == {}


def test_functions_are_short() -> None:
    lengths = dict(length for module in modules() for length in functions(module))
    assert {name: count for name, count in lengths.items() if count > FUNCTION_LINES} == {}


def test_folders_are_small() -> None:
    files: dict[Path, int] = defaultdict(int)
    for path in modules().values():
        files[path.parent.relative_to(ROOT)] += path.name != "__init__.py"
    assert {str(path): count for path, count in files.items() if count > FOLDER_FILES} == {}


def test_a_class_name_exists_once() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_a_module_name_exists_once() -> None:
    """But for `main`, the entry point of a process."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        if path.name not in ("__init__.py", "main.py"):
            homes[path.stem].append(module)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_docstring_begins_with_a_question_word() -> None:
    riddles = []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module in modules():
        for node in ast.walk(tree(module)):
            text = (ast.get_docstring(node) or "") if isinstance(node, kinds) else ""
            if text.split(" ", 1)[0].rstrip(":,.") in QUESTIONS:
                riddles.append(f"{module}: {text.splitlines()[0]}")
    assert riddles == []


def test_every_module_has_a_docstring() -> None:
    silent = [module for module in modules() if not ast.get_docstring(tree(module))]
    assert silent == []


def test_commands_print_what_is_harmless_for_a_terminal() -> None:
    """`terminal.say` prints; the library hands on what its launcher has printed with it."""
    bare = ("print", "Console")
    printed = [
        f"{module}:{node.lineno}"
        for module in of("evolver_async")
        if not within(module, ("evolver_async.terminal", "evolver_async.library"))
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in bare
    ]
    assert printed == []


def test_outside_imports_are_declared() -> None:
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").lower()
    aliases = {"zmq": "pyzmq", "yaml": "omegaconf"}
    hyphened = ("reasoning_gym", "prometheus_client", "math_verify")
    aliases |= {one: one.replace("_", "-") for one in hyphened}
    outside = {name.split(".")[0] for module in modules() for name in imports(module)}
    outside -= {*PACKAGES, *sys.stdlib_module_names}
    outside -= {"hardening"}  # beside the sandbox's guest, which runs as a script
    assert [name for name in outside if aliases.get(name, name).lower() not in declared] == []

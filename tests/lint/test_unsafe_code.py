"""Nothing in the product runs code out of data: no pickle, no `eval`, no shell.

Reads the syntax trees, and sees through imports.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for part in ("evolver_async", "actors", "learner") for path in ROOT.glob(f"{part}/**/*.py")
]
PICKLES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib")
FORBIDDEN = {
    *("eval", "exec", "os.system", "os.popen", "builtins.eval", "builtins.exec"),
    *("torch.load", "torch.save", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.unsafe_load_all"),
}
FORBIDDEN_ENDS = ("recv_pyobj", "send_pyobj", "unsafe_load", "unsafe_merge")
SETTINGS = {"trust_remote_code": False, "weights_only": True, "allow_pickle": False, "shell": False}


# runs what a model wrote, confined; tests/actors/sandbox/test_sandbox.py proves how well
CONFINED = {
    "actors/sandbox/guest.py": ["exec"],
    "actors/adapters/reasoning_gym_scorer.py": ["builtins.eval"],
}


def unsafe(source: str) -> list[str]:
    """What in this source could run code out of data, by line; imports are seen through."""
    found, names = [], {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                found += [(node.lineno, alias.name)] * (alias.name.split(".")[0] in PICKLES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            found += [(node.lineno, node.module)] * (node.module.split(".")[0] in PICKLES)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            head, _, rest = ast.unparse(node).partition(".")
            name = ".".join(filter(None, (names.get(head, head), rest)))
            if name in FORBIDDEN or name.rpartition(".")[2] in FORBIDDEN_ENDS:
                found.append((node.lineno, name))
        pairs: list[tuple[object, ast.expr]] = []
        if isinstance(node, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
            called = ast.unparse(node.func)
            modules = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if called.endswith("import_module") or called == "__import__":
                found += [(node.lineno, name) for name in modules if name in PICKLES]
        elif isinstance(node, ast.Dict):
            pairs = [
                (key.value, value)
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant)
            ]
        for name, value in pairs:
            if name in SETTINGS and not (
                isinstance(value, ast.Constant) and value.value is SETTINGS[name]
            ):
                found.append((value.lineno, f"{name}={ast.unparse(value)}"))
    return [f"{line}: {what}" for line, what in sorted(found)]


UNSAFE = (
    "import pickle",
    "import cloudpickle as c",
    "from dill import loads",
    "import shelve, marshal",
    "import importlib\nimportlib.import_module('pickle')",
    "import torch\ntorch.load('x')",
    "import torch as t\nread = t.load",
    "from torch import load as read\nread('x')",
    "f(weights_only=False)",
    "f(weights_only=flag)",
    "f(trust_remote_code=True)",
    "f(trust_remote_code=args.trust)",
    "f(**{'trust_remote_code': 1})",
    "import numpy as np\nnp.load('x', allow_pickle=True)",
    "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
    "from yaml import unsafe_load\nunsafe_load(text)",
    "from omegaconf import OmegaConf\nOmegaConf.unsafe_merge(a, b)",
    "eval(text)",
    "run = exec",
    "import os\nos.system('ls')",
    "import subprocess\nsubprocess.run('ls', shell=True)",
    "socket.recv_pyobj()",
)
SAFE = (
    "import yaml\nyaml.safe_load(text)",
    "model.eval()",
    "f(trust_remote_code=False, weights_only=True, shell=False)",
    "from safetensors.torch import load_file\nload_file('x')",
    "config.load(path)",
)


def test_nothing_runs_code_out_of_data() -> None:
    found = {str(path.relative_to(ROOT)): names_in(path) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == CONFINED


def names_in(path: Path) -> list[str]:
    return [entry.partition(": ")[2] for entry in unsafe(path.read_text(encoding="utf-8"))]


def test_the_search_finds_what_is_unsafe_and_leaves_the_rest() -> None:
    assert [source for source in UNSAFE if not unsafe(source)] == []
    assert [source for source in SAFE if unsafe(source)] == []

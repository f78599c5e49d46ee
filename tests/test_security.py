"""Who gets in, what is never written down. `lint/` has what is never run."""

import asyncio
import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
import zmq
from buffer_world import World
from buffer_world import config as small
from launches import fair_time

from evolver_async.cli import main
from evolver_async.config import ConfigError, secrets
from evolver_async.config.load import dump, from_dict, load, stage_config, to_dict
from evolver_async.config.paths import check_paths
from evolver_async.config.secrets import looks_secret, mask, reveal, without_secrets
from evolver_async.config.values import config_error
from evolver_async.wire import messages
from evolver_async.wire.addresses import from_here
from evolver_async.wire.client import AccessDenied
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.keys import KeysError, check_keys, client_keys, listed, make
from evolver_async.wire.server import Server, check_address

ROOT = Path(__file__).parent.parent
ERROR_S = 20.0  # a client that is not let in knows by then, long before its request times out


# ---- keys


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ev"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def keys(directory: Path) -> Path:
    """Keys of a run, of actor-a, and of actor-b, which is not listed any more."""
    make(directory / "keys", ["actor-a", "actor-b"])
    (directory / "keys" / "allowed" / "actor-b.public").unlink()
    return directory / "keys"


def test_key_files_are_private_and_never_overwritten(keys: Path) -> None:
    everything = [keys, *keys.rglob("*")]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in everything if path.is_file()}
    assert modes == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in everything if path.is_dir()} == {0o700}
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    for names in ([], ["actor-a"], ["actor-c", "actor-a"]):
        with pytest.raises(KeysError, match="not overwritten"):
            make(keys, names)
    for name in ("..", "a/b", "allowed", "run", "server.secret", ""):
        with pytest.raises(KeysError, match="no name for a client"):
            make(keys, [name])
    assert {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()} == before
    make(keys, ["actor-c"])
    assert [path.stem for path in listed(keys)] == ["actor-a", "actor-c", "run"]
    check_keys(keys)


def test_keys_that_cannot_be_used_are_named(keys: Path) -> None:
    secret = keys / "client.secret"
    assert secret.read_text().strip() not in repr(client_keys(keys))
    secret.chmod(0o640)
    with pytest.raises(KeysError, match=r"client\.secret: must have mode 0600, has 0640"):
        client_keys(keys)
    secret.chmod(0o600)
    (keys / "allowed" / "run.public").unlink()
    with pytest.raises(KeysError, match="does not list the run's own"):
        check_keys(keys)
    (keys / "server.public").write_text("x" * 39)
    with pytest.raises(KeysError, match=r"server\.public: is no key"):
        check_keys(keys)
    (keys / "server.secret").unlink()
    with pytest.raises(KeysError, match=r"server\.secret: no such file"):
        check_keys(keys)
    with pytest.raises(KeysError, match="is not a directory"):
        check_keys(keys / "none")


@pytest.mark.parametrize("name", ["allowed", "allowed/run.public"])
def test_a_list_of_keys_that_everybody_may_change_is_refused(keys: Path, name: str) -> None:
    path = keys / name
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(KeysError, match=rf"{name}: must not be writable for all users, has mode"):
        check_keys(keys)


def test_the_command_makes_keys_once(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = directory / "keys"
    assert main(["keys", str(where), "--names", "actor-a"]) == 0
    said = capsys.readouterr().out
    assert f"security.keys={where}" in said and f"copy {where}/actor-a" in said
    secrets = [path.read_text().strip() for path in where.rglob("*.secret")]
    assert len(secrets) == 3 and not any(secret in said for secret in secrets)
    assert main(["keys", str(where)]) == 2
    assert "keys are not overwritten" in capsys.readouterr().err


# ---- who gets in


@contextlib.contextmanager
def serving(directory: Path, address: str, keys: Path | None) -> Iterator[str]:
    (directory / "journal").mkdir(exist_ok=True)
    world = World(directory / "journal", small())
    server = Server(world.service, address, "run", keys=keys)
    stop = threading.Event()
    thread = threading.Thread(target=server.serve, args=(stop,))
    thread.start()
    try:
        yield server.address
    finally:
        stop.set()
        thread.join(10)
        server.close()
        world.store.journal.close()
        assert not thread.is_alive()


def ask(address: str, keys: Path | None, name: str = "a") -> object:
    """The reply to a STATUS; what the client raises, raised within the time for it."""

    async def once() -> object:
        client = DealerClient(address, "run", name, keys=keys)
        try:
            return await client.request(messages.StatusRequest(), timeout_s=10 * ERROR_S)
        finally:
            client.close()

    began = fair_time()
    try:
        return asyncio.run(once())
    finally:
        assert fair_time() - began < ERROR_S


@pytest.mark.parametrize("address", ["ipc://{}/s", "tcp://127.0.0.1:*", "tcp://0.0.0.0:*"])
def test_only_listed_keys_get_in(directory: Path, keys: Path, address: str) -> None:
    make(directory / "other", [])
    with serving(directory, address.format(directory), keys) as at:
        for welcome in (keys, keys / "actor-a"):
            assert isinstance(ask(at, welcome), messages.StatusReply)
        for strange, said in (
            (keys / "actor-b", r"actor-b/client\.secret is not listed there"),
            (directory / "other", r"the server's key is not .*/other/server\.public"),
            (None, "only clients with keys are let in"),
        ):
            with pytest.raises(AccessDenied, match=said) as caught:
                ask(at, strange)
            assert str(caught.value).startswith(at)
        assert isinstance(ask(at, keys), messages.StatusReply)


def test_a_client_with_keys_does_not_talk_to_a_server_without(directory: Path, keys: Path) -> None:
    with serving(directory, f"ipc://{directory}/s", None) as at:
        with pytest.raises(AccessDenied, match="the server has no keys"):
            ask(at, keys)
        assert isinstance(ask(at, None), messages.StatusReply)


def test_a_copied_file_admits_and_a_deleted_one_revokes(directory: Path, keys: Path) -> None:
    make(directory / "spare", ["late"])
    late, entry = keys / "actor-a", keys / "allowed" / "actor-a.public"
    with serving(directory, f"ipc://{directory}/s", keys) as at:
        assert isinstance(ask(at, late), messages.StatusReply)
        away = entry.rename(directory / "away")
        with pytest.raises(AccessDenied):
            ask(at, late)
        (keys / "allowed" / "half.public").write_text("half a copy")
        shutil.copy(away, entry)
        assert isinstance(ask(at, late), messages.StatusReply)


def test_the_server_does_not_serve_raw_sockets_without_a_key(directory: Path, keys: Path) -> None:
    with serving(directory, f"ipc://{directory}/s", keys) as at:
        raw = zmq.Context.instance().socket(zmq.DEALER)
        raw.connect(at)
        raw.send(b"anything")
        assert not raw.poll(500)
        raw.close(linger=0)
        assert isinstance(ask(at, keys), messages.StatusReply)


def test_an_open_address_needs_keys(directory: Path, keys: Path) -> None:
    for address in ("tcp://0.0.0.0:4000", "tcp://*:4000", "tcp://10.1.2.3:4000", "tcp://host:4000"):
        with pytest.raises(ValueError, match=r"buffer\.address: .*needs security\.keys"):
            check_address(address)
        with pytest.raises(ConfigError, match=r"buffer\.address: .*needs security\.keys"):
            load(None, ["stages=[{steps: 1}]", f"buffer.address={address}"])
        load(None, ["stages=[{steps: 1}]", f"buffer.address={address}", f"security.keys={keys}"])
    check_address("tcp://0.0.0.0:*", keys)
    assert from_here("tcp://0.0.0.0:4000") == from_here("tcp://*:4000") == "tcp://127.0.0.1:4000"
    assert from_here("tcp://10.0.0.1:4000") == "tcp://10.0.0.1:4000"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["buffer.address=tcp://0.0.0.0:4000"], "buffer.address: 0.0.0.0 is not a loopback"),
        (["security.keys=/nowhere"], "security.keys: /nowhere: is not a directory"),
        (["env.params.token=hunter2hunter2"], "env.params.token: looks like a secret"),
        (["env.params.size=${oc.env:NO_SUCH}"], "env.params.size: the environment variable NO_SUC"),
    ],
)
def test_what_is_not_safe_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stages: [{kind: rl, steps: 5}]\n")
    assert main(["train", str(recipe), f"run.dir={tmp_path}/runs", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"evolver-async: {said}") and err.count("\n") == 1
    assert "hunter2" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.process
def test_an_actor_that_is_not_let_in_says_so_and_ends(directory: Path, keys: Path) -> None:
    with serving(directory, f"ipc://{directory}/s", keys) as at:
        for extra, said in (
            ([], "only clients with keys"),
            (["--keys", keys / "actor-b"], "listed"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "evolver_async.cli", "actor", "--connect", at, *extra],
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            assert done.returncode == 2
            assert f"--connect: {at}" in done.stderr and said in done.stderr
            assert "Traceback" not in done.stderr


# ---- secrets


def test_names_of_secrets_are_known() -> None:
    for name in (
        *("key", "api_key", "apiKey", "x-api-key", "OPENAI_API_KEY", "OPENAI_APIKEY", "token"),
        *("hf_token", "accessToken", "password", "PGPASSWORD", "secret", "SECRET_NAME", "api_keys"),
        *("Authorization", "credentials", "AWS_SECRET_ACCESS_KEY", "passphrase", "access_tokens"),
    ):
        assert looks_secret(name), name
    for name in (
        *("keys", "tokens", "token_budget", "max_tokens", "norm_tokens", "prefill_tokens", "PWD"),
        *("tokenizer", "monkey", "keyboard", "SSH_AUTH_SOCK", "author", "token_ids", "door_keys"),
    ):
        assert not looks_secret(name), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "postgres://someone:canary-words@db/one"),
        ("SENTRY_DSN", "https://0123456789abcdef@o1.ingest.sentry.io/2"),
        ("GITHUB_PAT", "canary-of-a-pat"),
        ("CI_THING", "ghp_0123456789abcdef"),
        ("ANYTHING", "sk-0123456789abcdef"),
    ],
)
def test_a_variable_is_masked_for_its_name_or_for_the_shape_of_its_value(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("PLAIN_URL", "https://example.org/a@b")
    assert mask(f"cannot reach {value}: https://example.org/a@b") == (
        "cannot reach ***: https://example.org/a@b"
    )


def test_no_key_of_the_configuration_looks_secret_by_accident() -> None:
    config = to_dict(load(None, ["stages=[{steps: 1}]"]))
    assert without_secrets(config) == config


STAGES = "stages=[{steps: 1, override: {env: {params: {token: '${oc.env:CANARY_TOKEN}'}}}}]"


def test_references_are_kept_as_text_and_read_where_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY_TOKEN", "canary-of-the-test")
    refers = ["env.params.login.password='${oc.env:CANARY_TOKEN}'", "env.params.n=${eval.every}"]
    config = load(None, [STAGES, *refers])
    for again in (config, from_dict(to_dict(config)), stage_config(config, 0)):
        assert again.env.params["login"] == {"password": "${oc.env:CANARY_TOKEN}"}
        assert again.env.params["n"] == 25
    dump(config, tmp_path / "config.yaml")
    assert "canary-of" not in (tmp_path / "config.yaml").read_text()
    assert load(tmp_path / "config.yaml") == config
    staged = reveal(stage_config(config, 0).env.params)
    assert staged["token"] == staged["login"]["password"] == "canary-of-the-test"
    monkeypatch.delenv("CANARY_TOKEN")
    load(tmp_path / "config.yaml")  # a learner on a host without it
    with pytest.raises(ConfigError, match=r"env\.params\.login\.password: .* CANARY_TOKEN is not"):
        reveal(config.env.params)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("env.params.api_key=hunter2", r"env\.params\.api_key: looks like a secret"),
        ("judge.params.api_key=hunter2", r"judge\.params\.api_key: looks like a secret: set an"),
        ("env.params.a={authorization: {b: hunter2}}", r"env\.params\.a\.authorization\.b: looks"),
        ("env.params.password='${oc.env:A,hunter2}'", r"env\.params\.password: looks"),
        ("stages=[{steps: 1, override: {env: {params: {key: hunter2}}}}]", r"params\.key: looks"),
        ("run.name='${oc.env:MY_API_KEY}'", r"run\.name: MY_API_KEY looks like a secret"),
        ("env.params.a='${oc.env:A}${run.seed}'", r"env\.params\.a: can refer to"),
    ],
)
def test_a_secret_in_the_configuration_is_refused_by_name(entry: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load(None, ["stages=[{steps: 1}]", entry])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("learner.lr='${oc.env:X}'", "hunter2", "learner.lr: "),
        ("learner.lr='${oc.env:X}'", "hunter-2000\nof two lines", "learner.lr: "),
        ("learner.lr='${oc.env:X}'", "-77.125e1", "learner.lr: must be at least 0, is "),
        ("correction.kind='${oc.env:X}'", "hunter2", "correction.kind: must be one of none, ppo,"),
        ("policy.path='/${oc.env:X}2'", "hunter2hunter", "policy.path: "),
        ("run.name='${oc.env:X}'", "hunter/2'\\", "run.name: must be a plain directory name, is "),
        ("stages=[{steps: 1, override: {learner: {lr: '${oc.env:X}'}}}]", "hunter2", "stages[0]"),
    ],
)
def test_an_error_shows_the_reference_instead_of_what_came_from_the_environment(
    entry: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_error, "references", {})
    monkeypatch.setattr(secrets, "references", config_error.references)
    monkeypatch.setenv("X", value)
    with pytest.raises(ConfigError) as caught:
        check_paths(load(None, ["stages=[{steps: 1}]", entry]))
    text = str(caught.value)
    assert text.startswith(said) and "${oc.env:X}" in text
    assert "hunter" not in text and "77" not in text


def test_logs_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "canary-value")
    monkeypatch.setenv("LOGIN", "canary-login")
    monkeypatch.setenv("SHORT_TOKEN", "4")
    assert mask("a canary-value of 4 by canary-login") == "a *** of 4 by canary-login"
    reveal({"password": "${oc.env:LOGIN}"})
    assert mask("a canary-value of 4 by canary-login") == "a *** of 4 by ***"


@pytest.mark.parametrize(
    "value",
    ["canary/of a+b&ü%", "canary\"with\\quotes'", "-- canary --\nfirst canary\nlast canary"],
)
def test_logs_are_masked_whatever_a_secret_is_encoded_as(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", value)
    percent = quote(value, safe="")
    for text in (
        *(value, quote(value), percent, percent.lower(), quote_plus(value)),
        *(json.dumps({"key": value}), json.dumps(value, ensure_ascii=False)),
        *(repr(value), repr(value.encode()), str(ValueError(value)), repr({"a": value})),
        *(line for line in value.splitlines()),
        textwrap.indent(value, "    "),
    ):
        masked = mask(f"before {text} after")
        assert "canary" not in masked and masked.startswith("before ") and "***" in masked, text
        assert masked.endswith(" after")


ENVIRONMENT = '''
"""A bandit that needs a token, and fails once with the token in its words."""
import logging
from actors.envs.bandit import Bandit


class Tokened(Bandit):
    resets = 0

    def __init__(self, *, token: str, high_probability: float = 0.5) -> None:
        assert token == "canary-4f1c9e-in-a-parameter"
        super().__init__(high_probability=high_probability)
        self.token = token

    def reset(self, task, dynamics_seed):
        logging.getLogger("tokened").info("the token is %s", self.token)
        Tokened.resets += 1
        if Tokened.resets == 6:
            raise RuntimeError(f"401 for {self.token}")
        return super().reset(task, dynamics_seed)
'''
RECIPE = """
env: {name: "tokened:Tokened", params: {token: "${oc.env:BANDIT_TOKEN}"}}
policy: {max_length: 64, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64}
rollout: {group_size: 2, max_turns: 1, max_tokens: 4}
learner: {groups_per_step: 2, minibatches: 1}
stages: [{kind: rl, steps: 3}]
eval: {every: 0, episodes: 2, final_episodes: 2}
metrics: {wandb: offline, panel: none}
launch: {kind: serial}
checkpoint: {every: 1}
buffer: {archive: all}
"""


@pytest.mark.process
def test_a_run_writes_no_byte_of_a_secret(tmp_path: Path) -> None:
    canaries = {
        "BANDIT_TOKEN": "canary-4f1c9e-in-a-parameter",
        "WANDB_API_KEY": "canary0123456789canary0123456789canary01",
        "OTHER_SECRET": "canary-77aa-unused",
    }
    (tmp_path / "tokened.py").write_text(ENVIRONMENT)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    done = subprocess.run(
        [sys.executable, "-m", "evolver_async.cli", "train", "recipe.yaml", "run.name=canary"],
        cwd=tmp_path,
        env=os.environ | canaries | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    kinds = {path.relative_to(tmp_path / "runs" / "canary").parts[0] for path in written}
    assert {"config.yaml", "journal", "checkpoints", "logs", "wandb", "metrics.jsonl"} <= kinds
    contents = {path: path.read_bytes() for path in written}
    leaks = [
        (str(path), name)
        for path, content in contents.items()
        for name, canary in canaries.items()
        if canary.encode() in content
    ]
    assert leaks == []
    assert not any(canary.encode() in done.stdout + done.stderr for canary in canaries.values())
    config = (tmp_path / "runs" / "canary" / "config.yaml").read_text()
    assert "${oc.env:BANDIT_TOKEN}" in config
    logs = b"".join(contents[path] for path in written if path.suffix == ".log")
    assert b"the token is ***" in logs and b"401 for ***" in logs, "the rest is still told"

"""A local environment service of AgentEvolver's protocol that misbehaves as a test tells it to.

    with EnvService(trouble={"step": [status(503)]}) as service:
        env = AgentEvolver(url=service.url, env_type="counting")

A task `up-3` is to say "up" three times. `trouble` lists for every call what is done instead of a
proper answer, one request after the other, None for nothing; what is wrapped in `lost` is sent
after the call was carried out.
"""

import json
import re
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

from http_server import HttpServer, Reply, raw

TASKS = {"train": ["up-3", "up-2"], "dev": ["up-1"], "test_normal": ["up-4"]}
APP_PAGES = """You help your supervisor by Python code, which calls these APIs:
apis.supervisor.show_account_passwords()
apis.supervisor.complete_task(answer)
apis.music.login(password) -> access_token
apis.music.show_playlists(access_token)"""
BLOCK = re.compile(r"```python\n(.*?)\n```", re.DOTALL)


@dataclass(frozen=True)
class Lost:
    """The call is carried out, and then this is answered."""

    reply: Reply


def lost(reply: Reply) -> Lost:
    return Lost(reply)


@dataclass
class Instance:
    need: int
    said: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        return self.said.count("up")


class EnvService:
    """Serves in threads while it is entered."""

    def __init__(self, trouble: dict[str, list[Reply | Lost | None]] | None = None) -> None:
        self.trouble = trouble or {}
        self.instances: dict[str, Instance] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.released: list[str] = []
        self.lock = threading.Lock()
        self.http = HttpServer(lambda path, headers, body: self.reply(path.lstrip("/"), body))

    @property
    def url(self) -> str:
        return self.http.url

    def asked(self, call: str) -> int:
        return sum(name == call for name, _ in self.calls)

    def __enter__(self) -> Self:
        self.http.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.end()

    def reply(self, call: str, body: dict[str, Any]) -> Reply:
        with self.lock:
            self.calls.append((call, body))
            trouble = self.trouble.get(call, [])
            planned = trouble.pop(0) if trouble else None
            if isinstance(planned, Reply):
                answer = planned
            else:
                answer = self.carried_out(call, body)
                answer = planned.reply if planned is not None else answer
        self.http.ended.wait(answer.after_s)
        return answer

    def carried_out(self, call: str, body: dict[str, Any]) -> Reply:
        if call == "get_env_profile":
            return raw({"success": True, "data": TASKS[body["params"]["split"]]})
        if call == "create":
            need = int(body["task_id"].removeprefix("up-"))
            self.instances[body["instance_id"]] = Instance(need)
            said = [
                {"role": "system", "content": "say up"},
                {"role": "user", "content": f"{need} times"},
            ]
            return raw({"success": True, "data": {"state": said, "info": {}}})
        instance = self.instances.get(body["instance_id"])
        if call == "release":
            self.released.append(body["instance_id"])
            found = self.instances.pop(body["instance_id"], None)
            return raw({"success": found is not None, "data": None})
        if instance is None:
            return _detail(400, f"Instance {body['instance_id']} not found!")
        if call == "evaluate":
            share = min(1.0, instance.done / instance.need)
            sparse = body["params"]["sparse"]
            return raw({"success": True, "data": float(share == 1) if sparse else share})
        instance.said.append(body["messages"]["content"])
        over = instance.done >= instance.need
        state = [{"role": "user", "content": f"{instance.done} of {instance.need}"}]
        data = {"state": state, "reward": 0.25, "is_terminated": over, "info": {}}
        return raw({"success": True, "data": data})


def _detail(number: int, text: str) -> Reply:
    return Reply(body=json.dumps({"detail": text}).encode(), status=number)


@dataclass
class Apps(Instance):
    """A supervisor's accounts in a small AppWorld; every task has a password of its own."""

    answer: Any = None
    completed: bool = False
    params: dict[str, Any] = field(default_factory=dict)

    def run(self, code: str) -> str:
        """Run code with `apis`; return what it prints, or how it failed."""
        printed: list[str] = []

        def write(*values: Any) -> None:
            printed.append(" ".join(map(str, values)))

        try:
            exec(code, {"apis": self._apis(), "print": write})  # of tests alone
        except Exception as error:
            return f"Execution failed. Traceback: {error}"
        return "\n".join(printed) or "Execution successful."

    def _apis(self) -> SimpleNamespace:
        password, playlists = f"secret-{self.need}", [f"list {n}" for n in range(self.need)]
        accounts = [{"account_name": "music", "password": password}]

        def login(password: str) -> str:
            if password != accounts[0]["password"]:
                raise ValueError("wrong password")
            return "token"

        def show_playlists(access_token: str) -> list[str]:
            if access_token != "token":
                raise ValueError("no access")
            return playlists

        def complete_task(answer: Any = None) -> None:
            self.answer, self.completed = answer, True

        return SimpleNamespace(
            supervisor=SimpleNamespace(
                show_account_passwords=lambda: accounts, complete_task=complete_task
            ),
            music=SimpleNamespace(login=login, show_playlists=show_playlists),
        )


class AppWorldService(EnvService):
    """A fake AppWorld: the task `up-3` is to tell the number of three playlists, by code that calls
    `apis`."""

    def carried_out(self, call: str, body: dict[str, Any]) -> Reply:
        if call == "create":
            need = int(body["task_id"].removeprefix("up-"))
            self.instances[body["instance_id"]] = Apps(need, params=body["params"])
            said = [
                {"role": "system", "content": APP_PAGES},
                {"role": "user", "content": "How many playlists have I got?"},
            ]
            return raw({"success": True, "data": {"state": said, "info": {}}})
        apps = self.instances.get(body.get("instance_id", ""))
        if not isinstance(apps, Apps) or call not in ("step", "evaluate"):
            return super().carried_out(call, body)
        if call == "evaluate":
            return raw({"success": True, "data": float(apps.answer == apps.need)})
        said = body["messages"]["content"]
        apps.said.append(said)
        found = BLOCK.search(said)
        output = apps.run(found[1]) if found else "no code"
        data = {"state": [{"role": "user", "content": output}], "is_terminated": apps.completed}
        return raw({"success": True, "data": data | {"reward": 0.0, "info": {}}})

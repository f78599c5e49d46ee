"""Experience of a ReMe service (github.com/agentscope-ai/ReMe) in the place of our own.

    experience:
      kind: examples.reme:backend
      params: {url: "http://localhost:8002", workspace: my_run}

Its two calls: POST /retrieve_task_memory for a task, /summary_task_memory for a group's episodes.
"""

from collections.abc import Sequence

import httpx

from actors.experience.own_backend import ExperienceBackend
from evolver_async.config import Config
from evolver_async.wire.transcripts import Transcript

SUMMARY_S = 600.0  # its language model reads the episodes meanwhile


class ReMe:
    """Client of one actor."""

    def __init__(self, url: str, workspace: str) -> None:
        self._client = httpx.AsyncClient(base_url=url)
        self._workspace = {"workspace_id": workspace}

    async def retrieve(self, query: str, top_k: int) -> Sequence[str]:
        asked = {"query": query, "top_k": top_k, **self._workspace}
        reply = await self._client.post("/retrieve_task_memory", json=asked)
        answer = reply.raise_for_status().json()["answer"]
        return [answer] if answer else []

    async def contribute(self, query: str, episodes: Sequence[Transcript]) -> None:
        told = [{"messages": messages(query, one), "score": one.reward} for one in episodes]
        body = {"trajectories": told, **self._workspace}
        reply = await self._client.post("/summary_task_memory", json=body, timeout=SUMMARY_S)
        reply.raise_for_status()

    async def close(self) -> None:
        await self._client.aclose()


def messages(query: str, episode: Transcript) -> list[dict[str, str]]:
    """Return an episode as a chat: the task, then by turns what was seen and said."""
    chat = [{"role": "user", "content": query}]
    for turn in episode.turns:
        chat.append({"role": "user", "content": turn.observation})
        chat.append({"role": "assistant", "content": turn.said})
    return chat


def backend(config: Config) -> ExperienceBackend:
    params = config.experience.params
    return ReMe(params["url"], params["workspace"])

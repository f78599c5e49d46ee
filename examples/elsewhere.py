"""Agent in a process or a container of its own: it asks a run for episodes by HTTP.

It needs nothing but Python and two variables: ENDPOINT, such as http://127.0.0.1:8200, and
EPISODES_KEY.
"""

import json
import os
import time
import urllib.request
from typing import Any

ENDPOINT, KEY = os.environ["ENDPOINT"], os.environ["EPISODES_KEY"]


def post(url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"x-api-key": key})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def play(episode: dict[str, Any]) -> float:
    """Play one episode; return its reward."""
    messages = [{"role": "user", "content": episode["task"]["query"] or "Say something short."}]
    url = f"{episode['base_url']}/chat/completions"
    answer = post(url, episode["api_key"], {"model": "policy", "messages": messages})
    return 1 / (1 + len(answer["choices"][0]["message"]["content"]))


while True:
    try:
        episode = post(f"{ENDPOINT}/episodes/start", KEY, {})
        reward = play(episode)
        post(f"{ENDPOINT}/episodes/{episode['episode']}/finish", KEY, {"reward": reward})
    except OSError as error:  # the run does not listen yet, or has no episode now (503)
        if getattr(error, "code", 503) == 401:
            raise
        time.sleep(0.2)

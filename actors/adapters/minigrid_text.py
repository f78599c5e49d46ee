"""Observations of minigrid and BabyAI as text.

They show a square of cells in front of the agent, each as numbers. The text tells what stands
where, counted in steps from the agent, and hides what the numbers hide.
"""

import importlib
import sys
from typing import Any

ACTIONS = ["left", "right", "forward", "pickup", "drop", "toggle", "done"]
FACING = ("right", "down", "left", "up")  # by direction
HIDDEN = ("unseen", "empty", "floor", "agent")


def is_grid(env: Any) -> bool:
    """Return True for an environment of minigrid that shows its usual observation."""
    module = sys.modules.get("minigrid.minigrid_env")
    if module is None or not isinstance(env.unwrapped, module.MiniGridEnv):
        return False
    parts = getattr(env.observation_space, "spaces", {})
    return {"image", "direction", "mission"} == set(parts)


def grid_text(observation: dict[str, Any]) -> str:
    """Return mission, direction, burden and the things in view, the nearest first; of walls the
    next one ahead and on either side."""
    known = importlib.import_module("minigrid.core.constants")
    states = {number: name for name, number in known.STATE_TO_IDX.items()}
    image_CRF = observation["image"]  # columns, rows, features: kind, colour, state
    columns, rows, _ = image_CRF.shape
    middle, own = columns // 2, rows - 1

    def named(column: int, row: int) -> str:
        kind, colour, state = (int(number) for number in image_CRF[column, row])
        name = known.IDX_TO_OBJECT[kind]
        if name in (*HIDDEN, "wall"):
            return name
        words = f"{known.IDX_TO_COLOR[colour]} {name}"
        return f"{states[state]} {words}" if name == "door" else words

    burden = named(middle, own)
    lines = [
        f"mission: {observation['mission']}",
        f"you face {FACING[int(observation['direction'])]}",
        f"you carry {'nothing' if burden in HIDDEN else burden}",
    ]
    seen = list[tuple[int, str]]()
    for column in range(columns):
        for row in range(rows):
            name, aside, ahead = named(column, row), column - middle, own - row
            if name not in (*HIDDEN, "wall") and (aside or ahead):
                seen.append((abs(aside) + ahead, f"{name} {_place(aside, ahead)}"))
    ways = [(0, -1), (-1, 0), (1, 0)]
    for across, along in ways:
        column, row = middle + across, own + along
        while 0 <= column < columns and 0 <= row < rows and named(column, row) != "wall":
            column, row = column + across, row + along
        if 0 <= column < columns and 0 <= row < rows:
            aside, ahead = column - middle, own - row
            seen.append((abs(aside) + ahead, f"wall {_place(aside, ahead)}"))
    return "\n".join([*lines, *(text for _, text in sorted(seen))])


def _place(aside: int, ahead: int) -> str:
    """Return a place as steps ahead and to a side."""
    side = f"{abs(aside)} {'left' if aside < 0 else 'right'}" if aside else ""
    return ", ".join(part for part in (f"{ahead} ahead" if ahead else "", side) if part)

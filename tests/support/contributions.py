"""Finished groups as the experience service receives them."""

from hypothesis import strategies as st

from evolver_async.wire import messages
from evolver_async.wire.transcripts import Transcript, Turn


def episode(*steps: str, success: bool, number: int = 0, used: tuple[int, ...] = ()) -> Transcript:
    """Steps like "a=right"."""
    pairs = [step.split("=") for step in steps]
    return Transcript(
        trajectory_id=f"7/{number}/0",
        reward=float(success),
        success=success,
        experience_ids=list(used),
        turns=[Turn(observation=f"you see {s}", state=s, action=a) for s, a in pairs],
    )


steps = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["left", "right", "up"])), max_size=6
)


class Told(list[messages.Counters]):
    def __call__(self, counters: messages.Counters) -> None:
        self.append(counters)


def contribution(
    *episodes: Transcript, split: str = "train", query: str = "walk to the goal", stage: int = 0
) -> messages.Contribute:
    about = {"stage": stage, "task_id": "t", "query": query, "split": split}
    return messages.Contribute(**about, episodes=list(episodes))


WON = episode("a=right", "b=down", success=True, number=0)


LOST = episode("a=right", "b=left", success=False, number=1)

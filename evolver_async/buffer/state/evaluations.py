"""Evaluations of exact weights: episodes to grant, and results.

Pure. The episodes are one-member groups of kind `eval`; they are counted here, not kept. An
evaluation has sets of episodes: the deciding one, whose name is "", and those of `eval.sets`.
"""

import msgspec

from evolver_async.schema import WeightId
from evolver_async.wire.evaluation_results import EvalResult, SetResult

DECIDING = ""  # name of the set whose success is eval/success
SetSizes = dict[str, tuple[int, int]]  # tasks, and samples of each, by name of a set


class SetEpisode(msgspec.Struct, frozen=True):
    """Place of an episode in a set of `eval.sets`; `task` counts within the set."""

    set_name: str
    task: int
    temperature: float


class TaskScore(msgspec.Struct):
    """Samples of one task that arrived: the best success and reward."""

    samples: int
    success: bool
    reward: float


class RunningSet(msgspec.Struct):
    """One set under way: sums over arrived episodes; `lost` ones could not be run.

    `k`: samples of each task. `numbers`: sum and count of each reward term and of each number of
    the environment's own. `scores`: by task, for
    sets with a name. `contents`: hashes of the different tasks that were played.
    """

    name: str
    tasks: int
    k: int = 1
    granted: int = 0
    arrived: int = 0
    lost: int = 0
    successes: int = 0
    reward: float = 0.0
    turns: int = 0
    numbers: dict[str, tuple[float, int]] = {}
    scores: dict[int, TaskScore] = {}
    contents: set[int] = set()

    @property
    def episodes(self) -> int:
        return self.tasks * self.k

    def add(
        self,
        task: int,
        content: int,
        success: bool,
        reward: float,
        turns: int,
        numbers: dict[str, float],
    ) -> None:
        """Add an arrived episode."""
        self.arrived += 1
        self.contents.add(content)
        self.successes += success
        self.reward += reward
        self.turns += turns
        for name, value in numbers.items():
            total, count = self.numbers.get(name, (0.0, 0))
            self.numbers[name] = total + value, count + 1
        if self.name == DECIDING:
            return
        if task not in self.scores:
            self.scores[task] = TaskScore(0, False, reward)
        score = self.scores[task]
        score.samples += 1
        score.success |= success
        score.reward = max(score.reward, reward)

    def result(self) -> SetResult:
        """Return the averages. The best of k counts tasks whose k samples have all arrived."""
        whole = [score for score in self.scores.values() if score.samples == self.k]
        return SetResult(
            name=self.name,
            k=self.k,
            episodes=self.arrived,
            success=self.successes / max(1, self.arrived),
            reward_mean=self.reward / max(1, self.arrived),
            turns_mean=self.turns / max(1, self.arrived),
            tasks=len(whole),
            best_success=sum(score.success for score in whole) / max(1, len(whole)),
            best_reward=sum(score.reward for score in whole) / max(1, len(whole)),
            distinct=len(self.contents),
            lost=self.lost,
            numbers={name: total / count for name, (total, count) in self.numbers.items()},
        )


class RunningEvaluation(msgspec.Struct):
    """One evaluation under way; the deciding set is the first of its `sets`.

    `stage`: the stage whose environment and sampling the episodes use.
    """

    weights: WeightId
    take: int
    stage: int
    sets: list[RunningSet]

    @property
    def episodes(self) -> int:
        return sum(one.episodes for one in self.sets)

    @property
    def granted(self) -> int:
        return sum(one.granted for one in self.sets)

    @property
    def arrived(self) -> int:
        return sum(one.arrived for one in self.sets)

    @property
    def by_set(self) -> str:
        """Progress of the sets with a name, as text; "" without any."""
        return "".join(f", {s.name} {s.arrived} of {s.episodes}" for s in self.sets[1:])

    def of(self, name: str) -> RunningSet:
        return next(one for one in self.sets if one.name == name)

    def result(self) -> EvalResult:
        deciding, *others = (one.result() for one in self.sets)
        return EvalResult(
            weights=self.weights,
            step=self.take,
            episodes=deciding.episodes,
            success=deciding.success,
            reward_mean=deciding.reward_mean,
            turns_mean=deciding.turns_mean,
            distinct=deciding.distinct,
            lost=deciding.lost,
            numbers=deciding.numbers,
            sets=others,
        )


class EvaluationQueue(msgspec.Struct):
    """Evaluations under way, oldest first, and results that no DONE has confirmed yet."""

    running: list[RunningEvaluation] = []
    results: list[EvalResult] = []

    def request(
        self, weights: WeightId, take: int, stage: int, episodes: int, sets: SetSizes
    ) -> None:
        """Add an evaluation of `episodes` episodes of the deciding set, and of further `sets`.

        Weights that are being evaluated already get one result, over the larger number and all
        sets; an unconfirmed result is superseded.
        """
        self.confirm([weights])
        found = next((one for one in self.running if one.weights == weights), None)
        if found is None:
            found = RunningEvaluation(weights, take, stage, [RunningSet(DECIDING, episodes)])
            self.running.append(found)
        found.sets[0].tasks = max(found.sets[0].tasks, episodes)
        present = {one.name for one in found.sets}
        found.sets += [
            RunningSet(name, tasks, k) for name, (tasks, k) in sets.items() if name not in present
        ]

    def next(self) -> tuple[RunningEvaluation, RunningSet] | None:
        """The evaluation and its set whose episode number `granted` is to be granted next."""
        return next(
            (
                (evaluation, one)
                for evaluation in self.running
                for one in evaluation.sets
                if one.granted < one.episodes
            ),
            None,
        )

    def granted(self, weights: WeightId, episode: SetEpisode | None) -> int:
        """Count a granted episode; return the stage of the evaluation."""
        evaluation = self._of(weights)
        evaluation.of(_name(episode)).granted += 1
        return evaluation.stage

    def arrived(
        self,
        weights: WeightId,
        episode: SetEpisode | None,
        content: int,
        success: bool,
        reward: float,
        turns: int,
        numbers: dict[str, float],
    ) -> None:
        evaluation = self._of(weights)
        task = episode.task if episode is not None else 0
        evaluation.of(_name(episode)).add(task, content, success, reward, turns, numbers)
        self._finish(evaluation)

    def lost(self, weights: WeightId, episode: SetEpisode | None) -> None:
        """Count an episode that cannot be run (failing environment, missing weights)."""
        evaluation = self._of(weights)
        evaluation.of(_name(episode)).lost += 1
        self._finish(evaluation)

    def confirm(self, delivered: list[WeightId]) -> None:
        """Drop the results that the learner has received."""
        self.results = [result for result in self.results if result.weights not in delivered]

    def abandon(self, lineage: int) -> None:
        """End the evaluations of lineages before `lineage`, whose weights may be gone."""
        self.running = [e for e in self.running if e.weights.lineage >= lineage]
        self.results = [r for r in self.results if r.weights.lineage >= lineage]

    def _of(self, weights: WeightId) -> RunningEvaluation:
        return next(evaluation for evaluation in self.running if evaluation.weights == weights)

    def _finish(self, evaluation: RunningEvaluation) -> None:
        if any(one.arrived + one.lost < one.episodes for one in evaluation.sets):
            return
        self.running.remove(evaluation)
        self.results.append(evaluation.result())


def _name(episode: SetEpisode | None) -> str:
    return DECIDING if episode is None else episode.set_name

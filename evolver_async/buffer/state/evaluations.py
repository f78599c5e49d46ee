"""Evaluations of exact weights: episodes to grant, and results.

Pure. The episodes are one-member groups of kind `eval`; they are counted here, not kept.
"""

import msgspec

from evolver_async.schema import EvalResult, WeightId


class RunningEvaluation(msgspec.Struct):
    """One evaluation under way: sums over arrived episodes; `lost` ones could not be run.

    `stage`: the stage whose environment and sampling the episodes use.
    """

    weights: WeightId
    take: int
    stage: int
    episodes: int
    granted: int = 0
    arrived: int = 0
    lost: int = 0
    successes: int = 0
    reward: float = 0.0
    turns: int = 0


class EvaluationQueue(msgspec.Struct):
    """Evaluations under way, oldest first, and results that no DONE has confirmed yet."""

    running: list[RunningEvaluation] = []
    results: list[EvalResult] = []

    def request(self, weights: WeightId, take: int, stage: int, episodes: int) -> None:
        """Add an evaluation of `episodes` episodes.

        Weights that are being evaluated already get one result, over the larger number; an
        unconfirmed result is superseded.
        """
        self.confirm([weights])
        for evaluation in self.running:
            if evaluation.weights == weights:
                evaluation.episodes = max(evaluation.episodes, episodes)
                return
        self.running.append(RunningEvaluation(weights, take, stage, episodes))

    def next(self) -> RunningEvaluation | None:
        """The evaluation whose episode number `granted` is to be granted next."""
        return next((one for one in self.running if one.granted < one.episodes), None)

    def granted(self, weights: WeightId) -> int:
        """Count a granted episode; return the stage of the evaluation."""
        evaluation = self._of(weights)
        evaluation.granted += 1
        return evaluation.stage

    def arrived(self, weights: WeightId, success: bool, reward: float, turns: int) -> None:
        evaluation = self._of(weights)
        evaluation.arrived += 1
        evaluation.successes += success
        evaluation.reward += reward
        evaluation.turns += turns
        self._finish(evaluation)

    def lost(self, weights: WeightId) -> None:
        """Count an episode that cannot be run (failing environment, missing weights)."""
        evaluation = self._of(weights)
        evaluation.lost += 1
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
        if evaluation.arrived + evaluation.lost < evaluation.episodes:
            return
        self.running.remove(evaluation)
        count = max(1, evaluation.arrived)
        self.results.append(
            EvalResult(
                weights=evaluation.weights,
                step=evaluation.take,
                episodes=evaluation.arrived,
                success=evaluation.successes / count,
                reward_mean=evaluation.reward / count,
                turns_mean=evaluation.turns / count,
            )
        )

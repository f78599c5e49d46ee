"""The table of all keys in docs/configuration.md."""

from pathlib import Path

from evolver_async.config.reference import BEGIN, END, reference, rewrite


def test_the_reference_names_every_key_with_default_and_comment() -> None:
    text = reference()
    assert "| `learner.lr` | `0.0005` | at least 0 | stage, learner |" in text
    assert "| `env.latency.sigma` | `1.0` | at least 0 | stage | of the logarithm |" in text
    assert '| `policy.path` | `""` |  | run | a Hugging Face causal-LM directory' in text
    assert (
        "| `loss.kl_place` | `loss` | loss, reward | stage, learner | k1 only as reward |" in text
    )
    assert "`stages[i].until_success`" in text
    assert "`tasks.mixture[i].weight`" in text


def test_rewriting_the_reference_keeps_what_stands_around_it() -> None:
    text = rewrite(f"before\n{BEGIN}\n(outdated)\n{END}\nafter\n")
    assert text.startswith("before\n") and text.endswith("after\n") and "(outdated)" not in text
    assert rewrite(text) == text


def test_the_readme_reference_is_up_to_date() -> None:
    text = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert rewrite(text) == text, (
        "run: python -m evolver_async.config.reference docs/configuration.md"
    )

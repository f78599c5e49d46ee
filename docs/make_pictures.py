"""The pictures of the README, made from a run's directory.

python docs/make_pictures.py runs/NAME    writes docs/panel.svg and docs/curve.svg
python docs/make_pictures.py runs/NAME --curve arithmetic --tasks sums    docs/arithmetic.svg alone
"""

import argparse
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from evolver_async.config.load import load
from evolver_async.metrics.newest_lineage import current_rows
from evolver_async.metrics.tail import Tail
from evolver_async.runs.watch.live import exact_values
from evolver_async.runs.watch.view import View

FOLDER = Path(__file__).parent
COLUMNS = 86  # of the panel
WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 40, 44  # margins of the plot
SMOOTHED = 5  # steps in the moving average of training success
COLOURS = {
    "training": "#9aa7b4",
    "evaluation": "#0b7285",
    "random": "#adb5bd",
    "optimal": "#adb5bd",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, default=FOLDER, help="default: the folder of this file")
    parser.add_argument("--curve", metavar="NAME", help="draw the curve alone, under this name")
    parser.add_argument("--tasks", default="maps", help="what is held out (default %(default)s)")
    args = parser.parse_args()
    run_dir = args.run_dir
    rows = current_rows(Tail(run_dir / "metrics.jsonl").rows())
    exact = exact_values(run_dir)
    steps = sum(stage.steps for stage in load(run_dir / "config.yaml").stages)
    if args.curve is None:
        draw_panel(View(run_dir.name, steps, exact), rows, args.out / "panel.svg")
    last = next(reversed(exact.values()), None)  # of the last stage
    picture = curve(rows, last, steps, args.tasks)
    (args.out / f"{args.curve or 'curve'}.svg").write_text(picture, encoding="utf-8")


def draw_panel(view: View, rows: list[dict[str, Any]], path: Path) -> None:
    """Write the panel as it stands after `rows`."""
    for row in rows:
        view.feed(row)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(view.panel())
    console.save_svg(str(path), title=f"evolver-async watch {view.name}", unique_id="panel")


def curve(
    rows: list[dict[str, Any]], exact: Mapping[str, float] | None, steps: int, tasks: str
) -> str:
    """SVG of success by learner step: of training (moving average) and on held-out `tasks`."""
    train = [(row["step"], row["train/success"]) for row in rows if "train/success" in row]
    evals = sorted((row["step"], row["eval/success"]) for row in rows if "eval/success" in row)
    smooth = []
    for end in range(len(train)):
        window = [success for _, success in train[max(0, end - SMOOTHED + 1) : end + 1]]
        smooth.append((train[end][0], sum(window) / len(window)))
    last = max(steps, *(step for step, _ in [*train, *evals]))
    parts = [*_axes(last)]
    for name in ("random", "optimal") if exact else ():
        parts.append(_reference(f"{name} policy", exact[name], COLOURS[name]))
    parts.append(_line(smooth, last, COLOURS["training"], 1.5))
    parts.append(_line(evals, last, COLOURS["evaluation"], 2.5))
    for step, success in evals:
        x, y = _place(step, success, last)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS["evaluation"]}"/>')
        parts.append(_text(x, y - 9, f"{success:.2f}", "middle", COLOURS["evaluation"]))
    parts.append(
        _text(LEFT, 20, f"success: evaluation on held-out {tasks}", "start", COLOURS["evaluation"])
    )
    parts.append(_text(LEFT + 260, 20, f"training, mean of {SMOOTHED} steps", "start", "#6c7a89"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _place(step: float, success: float, last: int) -> tuple[float, float]:
    """Pixels of a point."""
    x = LEFT + step / last * (WIDTH - LEFT - RIGHT)
    return x, HEIGHT - BOTTOM - success * (HEIGHT - TOP - BOTTOM)


def _axes(last: int) -> list[str]:
    """Grid lines, their numbers, and the name of the horizontal axis."""
    parts = []
    for fifth in range(6):
        y = _place(0, fifth / 5, last)[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e9ecef"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{fifth / 5:.1f}", "end"))
    for step in range(0, last + 1, round(last / 60) * 10 or 5):
        parts.append(_text(_place(step, 0, last)[0], HEIGHT - BOTTOM + 18, str(step), "middle"))
    return [*parts, _text(WIDTH / 2, HEIGHT - 8, "learner step", "middle")]


def _reference(name: str, success: float, colour: str) -> str:
    """A dashed horizontal line with its name."""
    y = _place(0, success, 1)[1]
    line = f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{colour}" stroke-dasharray="5 4"/>'
    return line + _text(WIDTH - RIGHT, y - 5, f"{name} {success:.3f}", "end", "#868e96")


def _line(points: list[tuple[int, float]], last: int, colour: str, width: float) -> str:
    path = " ".join("{:.1f},{:.1f}".format(*_place(*point, last)) for point in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#495057") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


if __name__ == "__main__":
    main()

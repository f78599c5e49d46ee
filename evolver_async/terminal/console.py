"""Console of rich whose texts are harmless for a terminal; its own styles and moves are kept."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from evolver_async.terminal import harmless


class SafeConsole(Console):
    """Console that replaces the control characters in what it is given to show."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control else Segment(harmless(part.text), part.style)

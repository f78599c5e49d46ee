"""Textual app that shows a run. Keys choose the view; the run is read in the background."""

import asyncio
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Static

from evolver_async.runs.dashboard.actors import actors
from evolver_async.runs.dashboard.evaluated import evaluated
from evolver_async.runs.dashboard.evolving import evolving
from evolver_async.runs.dashboard.feed import RunFeed, RunSnapshot
from evolver_async.runs.dashboard.happenings import happenings
from evolver_async.runs.dashboard.overview import AXES, PlotOptions, overview
from evolver_async.runs.dashboard.staleness import staleness
from evolver_async.runs.dashboard.stock import stock
from evolver_async.terminal import plain

DRAWN = "view", "head", "foot"
EVERY_S = 1.0  # between two looks at the files, and between two requests for STATUS
VIEWS = ("overview", "staleness", "actors", "buffer", "events", "evolving", "replies")
WINDOWS = (1, 10, 50)  # steps in a mean
STATES = {"running": "green", "finished": "cyan", "stopped": "yellow"}
KEYS = """\
1 … 7        overview, staleness, actors, buffer, events,
             evolving: experience, judge and questioning,
             replies of the newest saved evaluation
← →          the previous view, the next view
s            curves of each step, or of means of 10 or 50 steps
t            curves over steps or over training time
↑ ↓          scroll, also PgUp and PgDn
?            these keys
q            quit; the run goes on

cyan: training   green: evaluations   yellow: the second curve"""


class KeyHelp(ModalScreen[None]):
    """List of the keys; any key closes it."""

    CSS = """
    KeyHelp { align: center middle; }
    #keys { width: 72; height: auto; padding: 1 2; border: round $accent; background: $surface; }
    """

    def compose(self) -> ComposeResult:
        yield Static(Text(KEYS), id="keys")

    def on_key(self) -> None:
        self.dismiss()


class RunDashboard(App[None]):
    """Full-screen view of one run."""

    CSS = """
    #head, #foot { height: 1; background: $panel; }
    #scroll { height: 1fr; scrollbar-size-vertical: 1; }
    #view { width: 100%; height: auto; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(n + 1), f"view({n})", name) for n, name in enumerate(VIEWS)),
        Binding("right", "turn(1)", "next", priority=True),
        Binding("left", "turn(-1)", "previous", priority=True),
        Binding("s", "smooth", "smoothing"),
        Binding("t", "axis", "axis"),
        Binding("question_mark", "keys", "keys"),
        Binding("q", "quit", "quit", priority=True),
    ]

    def __init__(self, feed: RunFeed) -> None:
        super().__init__()
        self.feed = feed
        self.chosen = 0
        self.options = PlotOptions()

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with VerticalScroll(id="scroll"):
            yield Static(id="view")
        yield Static(id="foot")

    def on_mount(self) -> None:
        self.title = self.feed.run_dir.name
        self.query_one("#scroll").focus()
        self.run_worker(self._follow_files(), name="files")
        self.run_worker(self._follow_status(), name="status")

    async def _follow_files(self) -> None:
        while True:
            await self.feed.read()
            self._draw()
            if not self.feed.snapshot.live:
                await self.feed.look_back()
                self._draw()
            await asyncio.sleep(EVERY_S)

    async def _follow_status(self) -> None:
        while True:
            await self.feed.ask()
            self._draw()
            await asyncio.sleep(EVERY_S)

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self._draw)

    def action_view(self, number: int) -> None:
        self.chosen = number
        self.query_one("#scroll", VerticalScroll).scroll_home(animate=False)
        self._draw()

    def action_turn(self, by: int) -> None:
        self.action_view((self.chosen + by) % len(VIEWS))

    def action_smooth(self) -> None:
        following = (WINDOWS.index(self.options.window) + 1) % len(WINDOWS)
        self.options = PlotOptions(WINDOWS[following], self.options.axis)
        self._draw()

    def action_axis(self) -> None:
        names = list(AXES)
        following = (names.index(self.options.axis) + 1) % len(names)
        self.options = PlotOptions(self.options.window, names[following])
        self._draw()

    def action_keys(self) -> None:
        self.push_screen(KeyHelp())

    def _draw(self) -> None:
        """Draw the chosen view in the size that the terminal has now.

        A look at the run can end after the app has: then nothing is left to draw on.
        """
        try:
            screen = self.screen_stack[0]
            scroll = screen.query_one("#scroll", VerticalScroll)
            view, head, foot = (screen.query_one(f"#{name}", Static) for name in DRAWN)
        except (LookupError, NoMatches):
            return
        width, height = scroll.size.width - 1, scroll.size.height
        if width < 20 or height < 4:
            return
        lines = self._lines(width, height)
        view.update(Text("\n", no_wrap=True).join(lines))
        head.update(self._head())
        foot.update(self._foot())

    def _lines(self, width: int, height: int) -> list[Text]:
        snapshot = self.feed.snapshot
        match VIEWS[self.chosen]:
            case "overview":
                return overview(snapshot, self.options, width, height)
            case "staleness":
                return staleness(snapshot, self.options, width, height)
            case "actors":
                return actors(snapshot, width)
            case "buffer":
                return stock(snapshot, self.options, width, height)
            case "evolving":
                return evolving(snapshot, self.options, width, height)
            case "replies":
                return evaluated(snapshot, width)
            case _:
                return happenings(snapshot, width)

    def _head(self) -> Text:
        head = Text(no_wrap=True)
        for number, name in enumerate(VIEWS):
            style = "reverse bold" if number == self.chosen else ""
            head.append(f" {number + 1} {name} ", style)
        return head

    def _foot(self) -> Text:
        snapshot = self.feed.snapshot
        foot = self._state_line(snapshot)
        foot.truncate(self.size.width, overflow="ellipsis")
        return foot

    def _state_line(self, snapshot: RunSnapshot) -> Text:
        """Return the state of the run, and the choices by keys or why the buffer is silent."""
        state = "paused" if snapshot.live and snapshot.paused else snapshot.end.state
        foot = Text()
        foot.append(" ? keys  q quit  ", "bold")
        foot.append(state, f"bold {STATES.get(state, 'red')}")
        if snapshot.live and snapshot.silence:
            foot.append(f"  {snapshot.silence}", "yellow")
            return foot
        window, axis = self.options.window, AXES[self.options.axis]
        foot.append(f"  s: {f'mean of {window}' if window > 1 else 'each step'}  t: over {axis}")
        foot.append(f"  {plain(snapshot.name)}")
        if snapshot.end.reason and not snapshot.live:
            foot.append(f"  {plain(snapshot.end.reason)}", "red")
        return foot

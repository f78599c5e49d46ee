"""The figures of a page as one JSON document, and the library that draws them."""

import json
from collections.abc import Sequence

from bokeh.document import Document
from bokeh.embed.util import standalone_docs_json_and_render_items
from bokeh.plotting import figure
from bokeh.resources import Resources


def to_json(figures: Sequence[figure]) -> tuple[str, list[str]]:
    """Return the arguments of `Bokeh.embed.embed_items` as JSON, and the figures' element ids."""
    document = Document()
    with document.models.freeze():  # else every root counts the models of all before it
        for one in figures:
            document.add_root(one)
    docs, items = standalone_docs_json_and_render_items(document)
    targets = {root.id: f"figure-{index}" for index, root in enumerate(document.roots)}
    rendered = [{**item.to_json(), "roots": targets} for item in items]
    return json.dumps({"docs": docs, "items": rendered}), list(targets.values())


def library() -> str:
    """Return the text of BokehJS: the plots alone, without widgets and tables."""
    return "\n".join(Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw)

"""The widget that pages show, and what a notebook stores of it. Made in the kernel."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from nbdist.views.bundle import widget_module

TEXT = (
    "nbdist dashboard: live views, or their picture. If you read this instead, trust the notebook "
    "(View > Activate Command Palette > Trust Notebook), or run the cell again."
)
"""Of the live widget and of the picture that takes its place: tests of notebooks compare them.

Front ends show it where they show no widget, as JupyterLab does in a notebook that is not trusted.
"""
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class Widget(anywidget.AnyWidget):
    """What is stored of a dashboard with a notebook: no data, and of the code the least."""

    _esm = traitlets.Unicode(widget_module()).tag(sync=True)
    text = traitlets.Unicode(TEXT).tag(sync=True)
    widget_id = traitlets.Unicode().tag(sync=True)
    own_model_id = traitlets.Unicode().tag(sync=True)
    version = traitlets.Unicode().tag(sync=True)
    settings = traitlets.Dict().tag(sync=True)

    @property
    def view(self) -> dict[str, Any]:
        """What a notebook keeps in the place where it is shown."""
        return {
            WIDGET_VIEW: {"version_major": 2, "version_minor": 1, "model_id": self.own_model_id}
        }

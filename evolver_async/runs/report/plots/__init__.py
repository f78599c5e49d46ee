"""Figures of the report. Bokeh is imported here alone."""

"""The report of a run: one HTML page, or a folder of pages, that works without a server."""

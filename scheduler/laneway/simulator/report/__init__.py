"""Runs as a page, plots and a document: `writing` writes what `gathering` gathers."""

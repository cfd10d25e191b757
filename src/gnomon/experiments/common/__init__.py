"""Pieces that several experiments use: files, pages, tables, plots, trials, processes. They import no experiment."""

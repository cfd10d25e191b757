"""Pieces that several experiments use: files, pages, tables, plots, progress, trials. They import no experiment."""

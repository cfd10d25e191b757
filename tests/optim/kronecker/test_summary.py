"""The summary of layers, their memory and their work."""

from torch import nn

from gnomon.optim import INGD


def test_the_summary_says_it_before_training(capsys):
    model = nn.Sequential(nn.Embedding(10, 4), nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6))
    rows = INGD(model).summary().rows
    text = capsys.readouterr().out
    for part in ("0.weight", "10 x 4", "Diagonal(10)", "2 of Dense(7)", "adamw", "total"):
        assert part in text
    dense = next(row for row in rows if row.name.startswith("1."))
    # An update of K K^T takes a product, for each of two groups; and C C^T likewise.
    assert dense.update >= 2 * (7**3 + 3**3)
    assert dense.step >= 2 * 3 * 7 * (7 + 3)
    paper = next(row for row in INGD(model, preset="paper").summary().rows if row.name.startswith("1."))
    assert paper.update >= 2 * 3 * (7**3 + 3**3)  # K^T K, the move and K K^T

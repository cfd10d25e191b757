"""``python -m gnomon``, which is how ``torchrun -m gnomon`` starts the command line."""

from .cli import main

main(prog_name="gnomon")

"""The Python API. Everything that the command line does is a function; `paceline` exports them all.

import paceline as pl

recipe = pl.load_recipe("cifar10-fast", {"optim.lr": 0.2})
run = pl.train(recipe, procs=2)                  # trains in processes of its own, as `paceline train` does
run.best, run.metrics, run.load_model()
pl.compare("runs/one", run)                      # comparability, speed-up, accuracy; a table in notebooks

runs.py reads and compares runs, training.py trains and evaluates, planning.py plans without training, and data.py
prepares data. `pl.launch` launches jobs on several nodes (see launch/api.py).
"""

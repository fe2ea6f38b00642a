"""`paceline selftest`: shows on the user's machine whether training is correct, and how fast it is.

checks.py lists the checks. Each needs figures that probes (probes/) measure in rank processes (rank.py), which
groups.py starts on this machine or on other hosts. judges.py turns figures into rows of the table; run.py connects
all of it.
"""

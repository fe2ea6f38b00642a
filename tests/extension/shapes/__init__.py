"""A package of a user: a dataset of drawn shapes, and extensions of every other kind for it."""

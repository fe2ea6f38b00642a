"""The confusion matrix as its non-zero cells, an order that puts confused classes side by side, and confused pairs."""

from typing import Any

import numpy as np

from paceline.analysis.details.scores import SampleScores

_MAX_ORDERED = 2000
_MAX_OPTIMAL = 300
"""Above these numbers of classes, the order is that of the classes, or that of the clustering without refinement."""


def confusion_cells(scores: SampleScores, num_classes: int) -> np.ndarray:
    """Return the non-zero cells of the matrix by label and prediction: int64 (n, 3) of label, prediction, count."""
    cells, counts = np.unique(scores.labels * num_classes + scores.predicted, return_counts=True)
    return np.stack([cells // num_classes, cells % num_classes, counts], axis=1)


def dense(cells: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the whole matrix: a row per label, a column per prediction."""
    matrix = np.zeros((num_classes, num_classes), np.int64)
    matrix[cells[:, 0], cells[:, 1]] = cells[:, 2]
    return matrix


def class_order(cells: np.ndarray, num_classes: int) -> list[int]:
    """Return the classes such that confused ones are near each other: the leaves of a hierarchical clustering.

    The distance of two classes is 1 minus the mean of the two fractions of one class predicted as the other.
    """
    if not 2 < num_classes <= _MAX_ORDERED or not (cells[:, 0] != cells[:, 1]).any():
        return list(range(num_classes))
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    matrix = dense(cells, num_classes).astype(np.float64)
    matrix /= np.maximum(matrix.sum(1, keepdims=True), 1)
    distance = 1 - (matrix + matrix.T) / 2
    np.fill_diagonal(distance, 0)
    tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=num_classes <= _MAX_OPTIMAL)
    order: list[int] = leaves_list(tree).tolist()
    return order


def confused_pairs(cells: np.ndarray, most: int) -> list[dict[str, Any]]:
    """Return the most frequent mistakes: label, prediction, count, and the fraction of the label's images."""
    support: dict[int, int] = {}
    for label, _, count in cells.tolist():
        support[label] = support.get(label, 0) + count
    wrong = sorted((-count, label, predicted) for label, predicted, count in cells.tolist() if label != predicted)
    return [
        {"label": label, "predicted": predicted, "count": -count, "fraction": -count / support[label]}
        for count, label, predicted in wrong[:most]
    ]

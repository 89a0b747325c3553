"""Labels for documents, so that a block can be given one kind of text: hashed words and k-means.

A document's features are counts of the hashed words of its beginning, weighted by how rare a word is and
brought to one length. All of them are whole numbers of at most 1000 with sums below 2^53, held in float64, so
every product and sum is exact: labels do not depend on the processor or on the order of a library's sums.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blocktrain.ids import derive_seed

DIMENSIONS = 1024
BEGINNING_BYTES = 4096
"""The beginning says what a document is about; the rest would double the time of preparation."""
SAMPLE_DOCUMENTS = 20_000
UNIT = 1000
"""Length of a feature vector."""
MAX_PASSES = 30
STARTS = 4
_WORD = re.compile(rb"[a-z\x80-\xff]{3,}")

Counts = NDArray[np.uint8]
Features = NDArray[np.float64]


def word_counts(text: bytes) -> Counts:
    """How often each hashed word stands in the document's beginning, 255 at most."""
    words = _WORD.findall(text[:BEGINNING_BYTES].lower())
    slots = [zlib.crc32(word) % DIMENSIONS for word in words]
    return np.minimum(np.bincount(np.array(slots, np.int64), minlength=DIMENSIONS), 255).astype(np.uint8)


@dataclass(frozen=True)
class Clustering:
    weights: Features
    """One for each slot, higher for rare words."""
    centroids: Features

    @classmethod
    def fit(cls, counts: Counts, clusters: int) -> Clustering:
        """K-means with k-means++ starts drawn by hash; the best of a few starts, the first among equals."""
        seen = np.count_nonzero(counts, axis=0)
        # A fourth root: with a square root four clusters of two sites' pages are 0.90 of one site each, with
        # this or no weight 0.97. No logarithm, since only roots are rounded the same everywhere.
        weights = np.sqrt(np.sqrt(len(counts) / np.maximum(seen, 1)))
        features = _features(counts, weights)
        fitted = [_k_means(features, clusters, start) for start in range(STARTS)]
        return cls(weights, min(fitted, key=lambda one: one[0])[1])

    def label(self, counts: Counts) -> int:
        return int(_nearest(_features(counts[None], self.weights), self.centroids)[0][0])


def _features(counts: Counts, weights: Features) -> Features:
    raw = np.rint(np.sqrt(counts) * weights * 16)
    length = np.sqrt((raw * raw).sum(axis=1, keepdims=True))
    scaled: Features = np.rint(raw * UNIT / np.maximum(length, 1))
    return scaled


def _nearest(features: Features, centroids: Features) -> tuple[NDArray[np.int64], Features]:
    """The nearest centroid of each row (the first among equals) and the squared distance to it."""
    squared = (features * features).sum(axis=1, keepdims=True) + (centroids * centroids).sum(axis=1)
    distances = squared - 2 * (features @ centroids.T)
    labels = distances.argmin(axis=1)
    return labels, np.take_along_axis(distances, labels[:, None], 1)[:, 0]


def _k_means(features: Features, clusters: int, start: int) -> tuple[float, Features]:
    centroids = features[[derive_seed("cluster", start, 0) % len(features)]]
    for index in range(1, clusters):
        total = np.cumsum(_nearest(features, centroids)[1])
        drawn = derive_seed("cluster", start, index) % max(int(total[-1]), 1)
        chosen = min(int(np.searchsorted(total, drawn, "right")), len(features) - 1)
        centroids = np.vstack([centroids, features[chosen]])
    for _ in range(MAX_PASSES):
        labels, _ = _nearest(features, centroids)
        moved = centroids.copy()
        for index in range(clusters):
            mine = features[labels == index]
            if len(mine):  # an empty cluster stays where it is
                moved[index] = np.rint(mine.sum(axis=0) / len(mine))
        if np.array_equal(moved, centroids):
            break
        centroids = moved
    return float(_nearest(features, centroids)[1].sum()), centroids

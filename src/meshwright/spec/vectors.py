"""Records of the smallest classifiers: vectors of features come in, linear layers with ReLU stand between, and a linear
layer tells classes or values (:class:`~meshwright.spec.convolution.ImageClassifier`). Without a layer between it is
softmax regression, or linear regression where its loss is the square."""

from __future__ import annotations

import msgspec


class FeatureVectors(msgspec.Struct, frozen=True, kw_only=True):
    """The first layer of a classifier of features, which reads ``width`` numbers of each sample."""

    width: int
    stream: int = 0

    @property
    def channels(self) -> int:
        """Numbers of a sample."""
        return self.width

    @property
    def num_matrices(self) -> int:
        """Weight tensors of more than one dimension: none."""
        return 0

    def num_params(self, hidden: int) -> int:
        """Return 0, as there are no parameters."""
        return 0


class LinearLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer from ``inputs`` to ``outputs`` numbers with a bias and ReLU behind it."""

    inputs: int
    outputs: int
    stream: int = 0

    @property
    def num_matrices(self) -> int:
        """Weight tensors of more than one dimension."""
        return 1

    def num_params(self, hidden: int) -> int:
        """Weights and biases."""
        return (self.inputs + 1) * self.outputs

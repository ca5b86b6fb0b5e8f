"""Classifiers of vectors of features: softmax regression and multi-layer perceptrons, and regression by squares.

No library has a configuration of these: ``num_features``, ``hidden_sizes`` (none: regression), ``num_labels``, and
``loss``, cross_entropy or square.
"""

from __future__ import annotations

from itertools import pairwise

from meshwright.spec.architecture import Model
from meshwright.spec.convolution import CROSS_ENTROPY, SQUARE, ImageClassifier
from meshwright.spec.ends import Stream
from meshwright.spec.families.parts import model
from meshwright.spec.families.reader import MAX_LAYERS, ConfigReader
from meshwright.spec.layers import Block
from meshwright.spec.vectors import FeatureVectors, LinearLayer


def feature_classifier(r: ConfigReader) -> Model:
    """Linear layers with ReLU between, over the features of each sample."""
    width, rows = r.int("num_features", low=1), r.int("num_labels", "num_classes", low=1)
    widths = r.ints("hidden_sizes", low=1) or []
    loss = r.text("loss", default=CROSS_ENTROPY)
    if loss not in (CROSS_ENTROPY, SQUARE):
        r.fault("M002", f"loss is neither {CROSS_ENTROPY} nor {SQUARE}", "loss", f"say {CROSS_ENTROPY}")
    if len(widths) > MAX_LAYERS:
        r.fault("M002", f"more than {MAX_LAYERS} layers", "hidden_sizes", "as [128, 64]")
    r.raise_faults()
    sizes = (width, *widths)
    layers = [LinearLayer(inputs=a, outputs=b, stream=max(0, at)) for at, (a, b) in enumerate(pairwise(sizes))]
    streams = [Stream(name="features" if not at else f"layer {at}", hidden=size, tokens=1, causal=False)
               for at, size in enumerate(sizes)]  # fmt: skip
    blocks = [Block(before=(one,), norms=0, stream=at) for at, one in enumerate(layers, 1)]
    return model(
        r,
        blocks or [Block(norms=0)],
        embedding=FeatureVectors(width=width),
        head=ImageClassifier(rows=rows, side=0, stream=len(streams) - 1, loss=loss),
        hidden=sizes[-1],
        max_seq_len=1,
        streams=tuple(streams),
    )

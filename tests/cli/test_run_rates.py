"""Settings of a run that follow from its model."""

import meshwright as mw
from meshwright.cli.run_rates import usual_of


def test_classifiers_decay_by_what_resnets_are_trained_with_and_language_models_as_ever():
    assert usual_of(mw.load_model("resnet-18-cifar")) == {"weight_decay": 1e-4}
    assert usual_of(mw.load_model("llama3-8b")) == {}

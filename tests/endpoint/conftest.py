"""A folder with a tokenizer and a template, and a server over a fake engine that tests may share."""

import pytest
from fuzz.fake_model import write_tokenizer

from tests.endpoint.local import app, client


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def served(folder):
    with client(app(folder)) as found:
        yield found

"""Fixtures that several test files share."""

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of a tiny random Llama with a byte-level tokenizer."""
    from lm_helpers import llama, save_model

    return save_model(tmp_path_factory.mktemp("tiny") / "tiny-llama", llama())

"""A recorder looks through all objects of the process for a script's model and optimisers."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="package")
def old_objects_are_not_looked_through():
    """Hide what was imported before these tests, which a script of its own would not have: half a
    million objects, of which each look takes a second.
    """
    gc.collect()
    gc.freeze()

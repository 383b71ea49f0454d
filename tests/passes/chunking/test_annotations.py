"""Annotations of nodes in chunked regions are read back, and other metadata is no annotation."""

import pytest

from pytest_gtrainer.graph.nodes import (
    BODY,
    CHUNK_ID,
    EAGER,
    GRAPH,
    MATERIALIZATION,
    PRODUCER,
    REGION_FQN,
    ROLE,
    SPLIT_BOUNDARY,
    ChunkAnnotation,
    annotation,
    chunk_annotation,
)


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        (ChunkAnnotation("layers.0", BODY, GRAPH, 1), ["1"]),
        (ChunkAnnotation("layers.0.moe", BODY, EAGER, 0), ["0", "eager"]),
        (ChunkAnnotation("layers.0", SPLIT_BOUNDARY, GRAPH, None), ["split_boundary"]),
        (ChunkAnnotation("layers.1", MATERIALIZATION, EAGER, None), ["materialization", "eager"]),
    ],
    ids=str,
)
def test_an_annotation_is_read_back(reported, words):
    """G11, I3"""
    keys = annotation(reported.fqn, reported.role, reported.producer, reported.chunk_id)
    assert chunk_annotation({"module_fqn": "layers.0.w", **keys}) == reported
    assert reported.words() == words


OF_A_BODY, OF_A_BOUNDARY = (
    annotation("layers.0", BODY, GRAPH, 1),
    annotation("layers.0", SPLIT_BOUNDARY, EAGER),
)


@pytest.mark.parametrize(
    "keys",
    [
        {"module_fqn": "layers.0"},
        *(
            {key: value for key, value in OF_A_BODY.items() if key != lacking}
            for lacking in OF_A_BODY
        ),
        {**OF_A_BODY, ROLE: "a role"},
        {**OF_A_BODY, PRODUCER: "somebody"},
        {**OF_A_BODY, REGION_FQN: ""},
        {**OF_A_BODY, ROLE: MATERIALIZATION},
        {**OF_A_BOUNDARY, CHUNK_ID: 1},
        {**OF_A_BOUNDARY, ROLE: BODY},
    ],
    ids=str,
)
def test_what_is_no_annotation_of_ours(keys):
    assert chunk_annotation(keys) is None

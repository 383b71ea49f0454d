"""What a node of a graph is, whose parameter a collective moves, and how parameters lie in payloads.

A traced graph comes in; answers about its nodes and its ``BucketLayout`` go out. First file: ``nodes``, then
``collectives``, ``bucket_plan`` and ``layout``; ``chunks`` says what nodes of chunked regions carry,
``dtypes`` how dtypes are called in short.
"""

"""First steps in a repository that has a model: a bucket plan, and a first test.

``arguments`` describes the commands ``plan`` and ``init`` without importing torch.
"""

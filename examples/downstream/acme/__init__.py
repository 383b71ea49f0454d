"""A trainer that is not pytest-gtrainer's."""

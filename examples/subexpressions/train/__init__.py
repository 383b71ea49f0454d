"""A trainer; not pytest-gtrainer's."""

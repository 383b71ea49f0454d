"""An inference server's model and its fusion pass; not pytest-gtrainer's."""

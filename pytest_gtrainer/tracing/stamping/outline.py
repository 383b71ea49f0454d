from contextlib import contextmanager


@contextmanager
def recorded_calls(model, names):
    yield None


def check_outline(*a):
    pass

"""The bodies of tests that torchtitan skips. It imports no harness of torch, which freezes flags."""


def body_of(test):
    """Return the body of a test, without torchtitan's skip marks around it."""
    while hasattr(test, "__wrapped__"):
        test = test.__wrapped__
    return test

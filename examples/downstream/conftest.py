"""What pytest-gtrainer is told of this repository; and an option that switches the bug on, to see
it caught.
"""


def pytest_addoption(parser):
    parser.addoption(
        "--with-bug", action="store_true", help="let sum_and_divide_pass divide before it sums"
    )


def pytest_gtrainer_passes(config):
    from functools import partial, update_wrapper

    from acme.passes import sum_and_divide_pass

    chosen = partial(sum_and_divide_pass, divide_first=config.getoption("with_bug"))
    return {"sum_and_divide_pass": update_wrapper(chosen, sum_and_divide_pass)}

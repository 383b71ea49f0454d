"""Whether the eager trainer comes to the same numbers twice.

torchtitan skips these: the literals they expect are of one kind of GPU and one nightly of torch. Here
the expected values are those of a run before, from a model and inputs that are made anew.
"""

from unittest import mock

from torchtitan.experiments.graph_trainer.tests import test_bitwise_deterministic as theirs
from unskipped import body_of


def _twice(test):
    def test_eager_self_deterministic(self):
        expected = []

        def keep(actual, literal):
            expected.append(actual)

        def compare(actual, literal):
            assert actual == expected.pop(0)

        with mock.patch.object(theirs, "assert_expected_inline", keep):
            body_of(test)(self)
        assert len(expected) == 3  # loss, weights and gradients

        self.tearDown()
        self.setUp()
        with mock.patch.object(theirs, "assert_expected_inline", compare):
            body_of(test)(self)

    return test_eager_self_deterministic


def _only_that_test(cls):
    # The other tests of the class run as they are.
    body = {name: None for name in dir(cls) if name.startswith("test_")}
    body["test_eager_self_deterministic"] = _twice(cls.test_eager_self_deterministic)
    return type(cls.__name__, (cls,), body)


TestLlama3BitwiseDeterministic = _only_that_test(theirs.TestLlama3BitwiseDeterministic)
TestDSv3BitwiseDeterministic = _only_that_test(theirs.TestDSv3BitwiseDeterministic)
TestQwen3MoEBitwiseDeterministic = _only_that_test(theirs.TestQwen3MoEBitwiseDeterministic)
TestLlama3FlexAttnBitwiseDeterministic = _only_that_test(
    theirs.TestLlama3FlexAttnBitwiseDeterministic
)
TestDSv3FlexAttnBitwiseDeterministic = _only_that_test(theirs.TestDSv3FlexAttnBitwiseDeterministic)
TestQwen3MoEFlexAttnBitwiseDeterministic = _only_that_test(
    theirs.TestQwen3MoEFlexAttnBitwiseDeterministic
)

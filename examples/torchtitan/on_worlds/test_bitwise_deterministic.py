"""Whether the eager trainer comes to the same numbers twice, and a saved graph to those of a trace.

torchtitan skips the first: the literals they expect are of one kind of GPU and one nightly of torch.
Here the expected values are those of a run before, from a model and inputs that are made anew.

It skips the second where attention is FlexAttention, as Python code of masks cannot be pickled. What
is saved has none: each mask is a graph in it, also with the dense formula, which compiles no region.
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


def _past_its_skip(test):
    def test_precompile_vs_trace(self):
        assert self._get_extra_kwargs(self.model)["attention_masks"] is not None
        # The model is made, and has FlexAttention: from here on only the skip asks for the name.
        self.attn_backend = "FlexAttention by its dense formula"
        test(self)

    return test_precompile_vs_trace


def _only_those_tests(cls):
    # The other tests of the class run as they are.
    body = {name: None for name in dir(cls) if name.startswith("test_")}
    body["test_eager_self_deterministic"] = _twice(cls.test_eager_self_deterministic)
    if cls.attn_backend == "flex":
        body["test_precompile_vs_trace"] = _past_its_skip(cls.test_precompile_vs_trace)
    return type(cls.__name__, (cls,), body)


TestLlama3BitwiseDeterministic = _only_those_tests(theirs.TestLlama3BitwiseDeterministic)
TestDSv3BitwiseDeterministic = _only_those_tests(theirs.TestDSv3BitwiseDeterministic)
TestQwen3MoEBitwiseDeterministic = _only_those_tests(theirs.TestQwen3MoEBitwiseDeterministic)
TestLlama3FlexAttnBitwiseDeterministic = _only_those_tests(
    theirs.TestLlama3FlexAttnBitwiseDeterministic
)
TestDSv3FlexAttnBitwiseDeterministic = _only_those_tests(
    theirs.TestDSv3FlexAttnBitwiseDeterministic
)
TestQwen3MoEFlexAttnBitwiseDeterministic = _only_those_tests(
    theirs.TestQwen3MoEFlexAttnBitwiseDeterministic
)

"""Three verdicts, and a difference named at its origin."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pytest_gtrainer import Record, Verdict, assert_bitwise_equal, compare
from pytest_gtrainer.numerics.bits import share_memory
from pytest_gtrainer.numerics.compare import BitwiseDifference
from pytest_gtrainer.numerics.verdict import PHASES, Key, table
from tests.numerics.samples import ALL, NAMES, flip_bit, make_run


def faulty(*faults: tuple[int, int, str, str], element: int = 29, bit: int = 0, **kwargs) -> Record:
    """A run in which one bit is wrong at each of these keys."""
    record = make_run(**kwargs)
    for key in faults:
        flip_bit(record[key], element if record[key].ndim else 0, bit)
    return record


def _keys(verdict: Verdict) -> list[Key]:
    return [difference.key for difference in verdict.differences]


class TestEqual:
    @pytest.mark.parametrize("dtype", ALL, ids=str)
    def test_tensors_of_every_dtype(self, dtype: torch.dtype):
        assert compare(torch.ones(3).to(dtype), torch.ones(3).to(dtype)).outcome == "equal"

    def test_nan_equals_the_same_nan(self):
        assert compare(torch.tensor(torch.nan), torch.tensor(torch.nan)).outcome == "equal"

    def test_empty_tensors_of_one_shape(self):
        """The shard of one of many ranks may be empty."""
        sides = [{"w": torch.ones(0, 3), "b": torch.ones(1)} for _ in range(2)]
        assert compare(*sides).outcome == "equal"

    def test_records(self, run):
        assert str(compare(run(), run())) == "equal: 28 tensors compared, no bit differs"

    def test_partial_records_of_one_rank(self, run):
        assert compare(run(rank=1), run(rank=1)).outcome == "equal"

    def test_modules_through_wrappers(self):
        plain, wrapped = nn.Linear(2, 2), nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)})
        wrapped["_orig_mod"].load_state_dict(plain.state_dict())
        assert compare(wrapped, plain).outcome == "equal"
        assert (
            compare(wrapped, {k: v.clone() for k, v in plain.state_dict().items()}).outcome
            == "equal"
        )

    def test_gradients_that_are_none_on_both_sides(self):
        assert compare([torch.ones(1), None], [torch.ones(1), None]).compared == 1

    @pytest.mark.parametrize("nothing", [None, [], {}, ()], ids=repr)
    def test_nothing_has_a_place_too(self, nothing):
        """A function that returns None in a place does not return less."""
        one, less = [torch.ones(1), nothing], [torch.ones(1)]
        words = "not the same structure: only {} has a place for a tensor at [1]"
        assert words.format("actual") in str(compare(one, less))
        assert words.format("expected") in str(compare(less, tuple(one)))
        assert compare(one, [torch.ones(1), None]).outcome == "equal"
        named = {"a": {"b": nothing}, "c": torch.ones(1)}
        verdict = compare(named, {"c": torch.ones(1)})
        assert (verdict.outcome, verdict.reasons[0][-3:]) == ("different", "a.b")
        # A tensor that is missing is a difference by itself.
        verdict = compare(named, {"a": {"b": [torch.ones(1)]}, "c": torch.ones(1)})
        assert (verdict.outcome, verdict.reasons) == ("different", ())

    def test_the_order_of_names_does_not_count(self):
        a, b = torch.ones(1), torch.zeros(1)
        assert compare({"a": a, "b": b}, {"b": b.clone(), "a": a.clone()}).outcome == "equal"


class TestNamesOfOneMemory:
    """Tied weights are one tensor of several names; so is a tensor that was kept several times."""

    def test_tied_weights_are_equal(self):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            model = nn.ModuleDict(
                {"wte": nn.Embedding(4, 2), "norm": nn.LayerNorm(2), "lm_head": nn.Linear(2, 4)}
            )
            model["lm_head"].weight = model["wte"].weight
            models.append(model)
        for verdict in (compare(*models), compare(*(model.state_dict() for model in models))):
            assert (verdict.outcome, verdict.label) == ("equal", "equal (names that share memory)")
            assert verdict.tied == ("lm_head.weight is wte.weight",)
            assert "    lm_head.weight is wte.weight" in str(verdict).splitlines()

    def test_a_tensor_that_was_kept_without_a_copy(self):
        """V6: the verdict says that one step was compared, not three."""
        sides = []
        for _ in range(2):
            weight = torch.zeros(2)
            kept = [weight.add_(1) for _ in range(3)]
            sides.append(kept)
        assert compare(*sides).tied == ("[1] is [0]", "[2] is [0]")

    def test_where_one_side_alone_ties_both_names_are_compared(self):
        weight = torch.ones(2)
        sides = {"a": weight, "b": weight}, {"a": torch.ones(2), "b": torch.ones(2)}
        assert compare(*sides).tied == compare(*reversed(sides)).tied == ()
        assert compare(*sides).label == "equal"

    def test_parts_of_one_memory_are_not_one_tensor(self):
        sides = []
        for _ in range(2):
            flat = torch.arange(8.0)
            sides.append(
                {"a": flat[:4], "b": flat[4:], "all": flat, "columns": flat.view(4, 2)[:, 0]}
            )
        assert compare(*sides).tied == ()


class TestUnverified:
    """L3: nobody looked."""

    @pytest.mark.parametrize("empty", [{}, [], [None], nn.ReLU(), Record(2)], ids=repr)
    def test_nothing_was_captured(self, empty):
        """L3."""
        verdict = compare(empty, empty)
        assert verdict.outcome == "unverified"
        assert verdict.reasons == ("actual: nothing was captured", "expected: nothing was captured")

    @pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
    def test_tensors_without_elements(self, shape):
        """L3: nothing was looked at."""
        for value in (
            torch.ones(shape),
            [torch.ones(shape), torch.ones(0)],
            {"a": torch.ones(shape)},
        ):
            verdict = compare(value, value)
            assert verdict.outcome == "unverified"
            assert verdict.reasons == ("every tensor is empty, so there is no element to compare",)

    @pytest.mark.parametrize("phase", ["gradient", "weight"])
    def test_a_run_whose_gradients_are_empty(self, phase):
        """L3: its loss alone was compared."""
        record = Record()
        record.add(0, 0, "loss", "loss", torch.ones(1))
        record.add(0, 0, phase, "w", torch.ones(0, 2))
        reasons = (f"every {phase} is empty, so there is no element to compare",)
        assert compare(record, copy.deepcopy(record)).reasons == reasons
        record.add(0, 0, phase, "b", torch.ones(1))
        assert compare(record, copy.deepcopy(record)).outcome == "equal"

    @pytest.mark.parametrize("phases", [["loss"], ["buffer"], ["buffer", "optimizer"]])
    def test_a_record_without_elements(self, phases):
        """L3: nothing was looked at."""
        record = Record()
        for phase in phases:
            record.add(0, 0, phase, "x", torch.ones(0))
        reasons = ("every tensor is empty, so there is no element to compare",)
        assert compare(record, copy.deepcopy(record)).reasons == reasons

    def test_one_side_captured_nothing(self, run):
        verdict = compare(run(), Record(2))
        assert (verdict.outcome, verdict.reasons) == (
            "unverified",
            ("expected: nothing was captured",),
        )

    def test_a_rank_is_missing_on_both_sides(self, run):
        verdict = compare(*(Record.merged([run(rank=0)]) for _ in range(2)))
        assert verdict.outcome == "unverified"
        assert str(verdict).splitlines() == [
            "unverified: 14 tensors compared, no bit differs",
            "  actual has nothing of rank 1 at steps 0, 1: Record(world_size=2, 14 tensors)",
            "  expected has nothing of rank 1 at steps 0, 1: Record(world_size=2, 14 tensors)",
        ]

    def test_many_ranks_are_missing_now_and_then(self):
        """The first of them are named, and the steps at which one is missing."""
        record = Record(8)
        for step in range(3):
            for rank in range(8 if step == 1 else 2):
                record.add(step, rank, "loss", "loss", torch.ones(()))
        assert compare(record, record).reasons[0] == (
            "actual has nothing of ranks 2, 3, 4, 5 and 2 more at steps 0, 2: "
            "Record(world_size=8, 12 tensors)"
        )

    def test_a_rank_is_missing_on_one_side(self, run):
        verdict = compare(Record.merged([run(rank=0)]), run())
        assert (verdict.outcome, len(verdict.only_expected)) == ("unverified", 14)

    def test_tensors_without_values(self):
        verdict = compare(
            {"w": torch.ones(2, device="meta"), "b": torch.ones(1)},
            {"w": torch.ones(2), "b": torch.ones(1)},
        )
        assert (verdict.outcome, verdict.compared) == ("unverified", 1)
        assert verdict.reasons == ("w: a meta tensor holds no values",)

    def test_a_tensor_with_itself(self):
        model = nn.Linear(2, 2)
        verdict = compare(model, model)
        assert verdict.outcome == "unverified"
        assert "the same memory" in str(verdict)
        assert compare(model.state_dict(), model).outcome == "unverified", (
            "other tensors over the same memory"
        )
        assert (
            compare(
                {name: each.clone() for name, each in model.state_dict().items()}, model
            ).outcome
            == "equal"
        )
        lone = torch.ones(3)
        assert compare(lone, lone.view(3)).outcome == "unverified", (
            "one tensor, and the same memory again"
        )

    @pytest.mark.parametrize(
        "which", [["a"], ["b"], ["c"], ["a", "c"], ["a", "b", "c"]], ids="".join
    )
    @pytest.mark.parametrize(
        "how", ["the same object", "a view of it", "a detached alias", "one memory for all"]
    )
    def test_some_tensors_with_themselves(self, which: list[str], how: str):
        """V6: an in-place write to one side would have changed the other, too.

        The way out is a clone; to leave the shared ones out is another.
        """
        sides = [{name: torch.arange(4.0) for name in "abc"} for _ in range(2)]
        alias = {
            "the same object": lambda t: t,
            "a view of it": lambda t: t.view(4),
            "a detached alias": lambda t: nn.Parameter(t).detach(),
            "one memory for all": lambda t: sides[0][which[0]],
        }[how]
        for name in which:
            sides[1][name] = alias(sides[0][name])
        if how == "one memory for all":
            sides[0].update(dict.fromkeys(which, sides[0][which[0]]))
        for pair in (
            sides,
            [list(side.values()) for side in sides],
            [{"nested": side} for side in sides],
        ):
            verdict = compare(*pair)
            assert verdict.outcome == "unverified"
            assert "are the same memory, so nothing was compared: clone one" in verdict.reasons[0]
        assert verdict.reasons[0].startswith(
            f"nested.{which[0]}" + (f" and {len(which) - 1} more" * (len(which) > 1))
        )
        assert (
            compare({name: each.clone() for name, each in sides[0].items()}, sides[1]).outcome
            == "equal"
        )
        rest = [{name: each for name, each in side.items() if name not in which} for side in sides]
        assert compare(*rest).outcome == ("equal" if len(which) < 3 else "unverified")

    @pytest.mark.parametrize("swap", [False, True])
    @pytest.mark.parametrize(
        ("mine", "theirs"),
        [
            (lambda x: x[:6], lambda x: x[1:7]),
            (lambda x: x[7:], lambda x: x[:8]),
            (lambda x: x[::2], lambda x: x[1::3]),
            (lambda x: x.view(4, 2)[:, 0], lambda x: x[:1]),
            (lambda x: x[:4].view(torch.int32), lambda x: x[3:]),
            (lambda x: x[:1].expand(4), lambda x: x[:3]),
        ],
    )
    def test_views_that_overlap_are_one_memory(self, mine, theirs, swap):
        """V6: wherever they begin."""
        flat = torch.zeros(8)
        a, b = (theirs(flat), mine(flat)) if swap else (mine(flat), theirs(flat))
        assert share_memory(a, b)
        views = {"a": flat[:6]}, {"a": flat[1:7]}
        assert compare(*views).outcome == "unverified"
        assert "are the same memory, so nothing was compared" in compare(*views).reasons[0]

    @pytest.mark.parametrize(
        ("mine", "theirs"),
        [
            (lambda x: x[:4], lambda x: x[4:]),
            (lambda x: x[::2], lambda x: x[1::2]),
            (lambda x: x.view(4, 2)[:, 0], lambda x: x.view(4, 2)[:, 1]),
            (lambda x: x[:0], lambda x: x),
            (lambda x: x, lambda x: x.clone()),
        ],
    )
    def test_views_between_each_other_are_apart(self, mine, theirs):
        flat = torch.zeros(8)
        assert not share_memory(mine(flat), theirs(flat))
        assert not share_memory(theirs(flat), mine(flat))

    @pytest.mark.parametrize("count", [2, 3])
    def test_views_that_changed_names_are_the_same_memory(self, count: int):
        """V6"""
        views = torch.zeros(6).chunk(count)
        sides = [dict(zip("abc", each, strict=False)) for each in (views, (*views[1:], views[0]))]
        assert compare(*sides).outcome == "unverified"
        assert "are the same memory under other names" in compare(*sides).reasons[0]
        assert compare(views[1:], views[:-1]).outcome == "equal", "each against the next one"
        shorter = [{"a": side["a"].view(1, -1), "b": side["b"][:1]} for side in sides]
        if count == 2:
            assert compare(*shorter).outcome == "unverified", "each name has a shape of its own"
        with_own = [side | {"own": torch.ones(1)} for side in sides]
        assert compare(*with_own).outcome == "unverified"

    def test_ranks_of_one_record_that_both_sides_share(self, run):
        """V6: ``merged`` shares the tensors of its parts."""
        parts = [run(rank=0), run(rank=1), run(rank=1)]
        verdict = compare(Record.merged(parts[:2]), Record.merged(parts[::2]))
        assert verdict.outcome == "unverified"
        assert verdict.reasons[0].startswith(
            "step 0, rank 0, loss and 13 more: actual and expected are the same"
        )

    def test_a_difference_elsewhere_outweighs_shared_memory(self):
        shared = torch.ones(2)
        verdict = compare(
            {"rope": shared, "w": torch.ones(2)}, {"rope": shared, "w": torch.zeros(2)}
        )
        assert (verdict.outcome, verdict.reasons) == ("different", ())

    def test_empty_tensors_share_nothing(self):
        empty = torch.empty(0)
        assert compare([empty, torch.ones(1)], [empty, torch.ones(1)]).outcome == "equal"

    def test_a_bit_that_differs_outweighs_a_missing_rank(self, run):
        parts = [
            Record.merged([run(rank=0)]),
            Record.merged([faulty((0, 0, "weight", NAMES[0]), rank=0)]),
        ]
        assert compare(*parts).outcome == "different"


class TestDifferent:
    @pytest.mark.parametrize("dtype", ALL, ids=str)
    def test_one_bit_of_every_dtype(self, dtype: torch.dtype):
        actual = torch.ones(3, 4).to(dtype)
        actual.view(torch.uint8).view(-1)[-1] ^= 1
        first = compare(actual, torch.ones(3, 4).to(dtype)).first
        assert (first.element, first.elements, first.numel) == ((2, 3), 1, 12)

    @pytest.mark.parametrize(
        ("actual", "expected", "kind"),
        [
            (torch.ones(2), torch.ones(2, dtype=torch.bfloat16), "dtype"),
            (torch.ones(2), torch.ones(1, 2), "shape"),
            (torch.ones(0), torch.ones(0, 1), "shape"),
            (torch.ones(2, 3).t(), torch.ones(3, 2), "stride"),
            (torch.tensor(0.0), torch.tensor(-0.0), "bits"),
            (
                torch.tensor([0x7FC00000]).to(torch.int32).view(torch.float32),
                torch.tensor([-torch.nan]),
                "bits",
            ),
        ],
    )
    def test_kinds(self, actual: torch.Tensor, expected: torch.Tensor, kind: str):
        verdict = compare(actual, expected)
        assert (verdict.outcome, verdict.first.kind) == ("different", kind)

    @pytest.mark.parametrize(
        ("shape", "strides"),
        [((1, 3), (7, 1)), ((3, 1), (1, 5)), ((1,), (9,)), ((2, 1, 3), (3, 0, 1))],
    )
    def test_strides_that_place_no_element_are_no_difference(self, shape, strides):
        """Those of dimensions of one element."""
        actual = torch.empty_strided(shape, strides).fill_(1)
        assert compare(actual, torch.ones(shape)).outcome == "equal"
        empty = torch.empty_strided((0, 2), (5, 7))
        beside = {"empty": empty, "ones": actual}, {"empty": torch.ones(0, 2), "ones": actual + 0}
        assert compare(*beside).outcome == "equal"

    def test_names_that_do_not_match(self):
        verdict = compare(
            {"w": torch.ones(1), "a": torch.ones(1)}, {"w": torch.ones(1), "b": torch.ones(1)}
        )
        assert str(verdict).splitlines() == [
            "different: 1 tensor compared, no bit differs",
            "  only in actual",
            "    a",
            "  only in expected",
            "    b",
        ]

    def test_records_of_other_worlds(self, run):
        verdict = compare(run(world_size=2, rank=0), run(world_size=4, rank=0))
        assert verdict.outcome == "different"
        assert verdict.reasons[0].startswith(
            "not the same ranks: actual Record(world_size=2, rank=0"
        )

    def test_a_record_of_one_rank_and_one_of_all(self, run):
        """They have the same entries, as there is one rank only; they do not say the same."""
        verdict = compare(run(world_size=1), run(world_size=1, rank=0))
        assert verdict.outcome == "different"
        assert verdict.reasons[0].startswith("not the same ranks: actual Record(world_size=1, ")

    def test_a_gradient_that_one_side_lacks(self):
        assert compare([torch.ones(1), None], [torch.ones(1), torch.ones(1)]).outcome == "different"

    def test_meshes_of_dtensors(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
            ours, theirs, again = (
                DTensor.from_local(torch.ones(2), mesh[name], [Shard(0)], run_check=False)
                for name in ("rows", "columns", "rows")
            )
            first = compare(ours, theirs).first
            assert first.kind == "placements"
            assert (first.actual, first.expected) == ("on ranks [1, 3]", "on ranks [0, 1]")
            assert compare(ours, again).outcome == "equal"
        finally:
            torch.distributed.destroy_process_group()

    def test_placements_of_dtensors(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            sides = [
                DTensor.from_local(torch.ones(2), mesh, [placement], run_check=False)
                for placement in (Shard(0), Replicate())
            ]
            first = compare(*sides).first
            assert (first.kind, first.expected) == ("placements", "(Replicate(),) of [2]")
            assert compare(sides[0], sides[0].clone()).outcome == "equal"
            assert compare(sides[0], torch.ones(2)).outcome == "equal", "its local shard"
            for placements, extent in (
                ([Partial()], (2,)),
                ([Replicate(), Partial("avg")], (1, 2)),
            ):
                mesh = init_device_mesh("cpu", extent)
                terms = DTensor.from_local(torch.ones(2), mesh, placements, run_check=False)
                for pair in ((terms, torch.ones(2)), (torch.ones(2), terms)):
                    verdict = compare(*pair)
                    assert verdict.outcome == "unverified"
                    assert "holds terms of a sum: call redistribute()" in verdict.reasons[0]
                same = DTensor.from_local(torch.ones(2), mesh, placements, run_check=False)
                assert compare(terms, same).outcome == "equal"
            empty = DTensor.from_local(
                torch.ones(0),
                mesh,
                [Replicate(), Shard(0)],
                shape=(1,),
                stride=(1,),
                run_check=False,
            )
            assert compare(empty, empty.clone()).outcome == "equal", (
                "another rank holds the element"
            )
        finally:
            torch.distributed.destroy_process_group()


class TestOrigin:
    """L4: first step, rank, phase, tensor, element; both bit patterns and the distance."""

    def test_the_text_names_everything(self, run):
        actual = faulty(
            (1, 1, "weight", NAMES[0]), (1, 1, "gradient", NAMES[1]), (1, 1, "weight", NAMES[1])
        )
        assert str(compare(actual, run())) == (
            "different: 3 of 28 tensors, 3 elements\n"
            "  first at step 1, rank 1, gradient of layers.0.wq.weight, element (3, 5)\n"
            "    actual   1.32   0x3fa9\n"
            "    expected 1.312  0x3fa8\n"
            "    1 ULP apart; 1 of 64 elements of this bf16[8, 8]\n"
            "  then at\n"
            "    step 1, rank 1, weight of lm_head.weight: 1 of 64\n"
            "    step 1, rank 1, weight of layers.0.wq.weight: 1 of 64"
        )

    def test_the_text_of_a_lone_scalar(self):
        assert str(compare(torch.tensor(-0.0), torch.tensor(0.0))) == (
            "different: 1 of 1 tensor, 1 element\n"
            "  first at the tensor\n"
            "    actual   -0  0x80000000\n"
            "    expected 0   0x00000000\n"
            "    equal values, other sign of zero; 1 of 1 element of this f32[]"
        )

    @pytest.mark.parametrize(
        ("sides", "apart"), [((-1.5, 2.0), "opposite signs"), ((-2.0, -1.0), "8388608 ULP apart")]
    )
    def test_numbers_of_opposite_signs_have_no_count_of_ulps(self, sides, apart):
        text = str(compare(*map(torch.tensor, sides)))
        assert text.endswith(f"\n    {apart}; 1 of 1 element of this f32[]")

    def test_the_text_of_a_nan_payload(self):
        sides = (
            {"w": torch.tensor([word]).to(torch.int32).view(torch.float32)}
            for word in (0x7FC00001, 0x7FC00000)
        )
        assert str(compare(*sides)) == (
            "different: 1 of 1 tensor, 1 element\n"
            "  first at w, element (0)\n"
            "    actual   nan  0x7fc00001\n"
            "    expected nan  0x7fc00000\n"
            "    1 of 1 element of this f32[1]"
        )

    def test_the_text_of_another_dtype(self):
        assert str(compare({"w": torch.ones(2)}, {"w": torch.ones(2).bfloat16()})) == (
            "different: 1 of 1 tensor\n"
            "  first at w: dtype\n"
            "    actual   torch.float32\n"
            "    expected torch.bfloat16\n"
            "    bf16[2] expected"
        )

    def test_long_lists_are_cut(self):
        sides = [{f"w{i}": torch.tensor(float(i + side)) for i in range(300)} for side in range(2)]
        lines = str(compare(*sides)).splitlines()
        assert len(lines) < 20
        assert lines[-1] == "    and 291 more"
        assert max(map(len, lines)) < 80

    @settings(max_examples=60)
    @given(st.sets(st.sampled_from(list(make_run())), min_size=1, max_size=6))
    def test_the_first_of_several_faults_is_reported(self, faults: set[Key]):
        def order(key: Key) -> tuple[int, int, int, int]:
            return key.step, key.rank, PHASES.index(key.phase), ["loss", *NAMES].index(key.name)

        verdict = compare(faulty(*faults, element=0), make_run())
        assert _keys(verdict) == sorted(faults, key=order)
        assert verdict.origin == min((key.step, key.rank) for key in faults)

    def test_it_is_the_origin_in_whatever_order_tensors_were_recorded(self, run):
        """Step, rank and phase decide; among tensors of one phase the order in ``expected``."""
        faults = [key for key in run() if key.phase != "optimizer"]
        actual, expected = faulty(*faults), Record(2)
        for key, tensor in reversed(run().items()):
            expected.add(*key, tensor)
        found = [
            (key.step, key.rank, key.phase, key.name) for key in _keys(compare(actual, expected))
        ]
        assert found[:6] == [
            (0, 0, "loss", "loss"),
            (0, 0, "gradient", NAMES[1]),
            (0, 0, "gradient", NAMES[0]),
            (0, 0, "weight", NAMES[1]),
            (0, 0, "weight", NAMES[0]),
            (0, 1, "loss", "loss"),
        ]

    def test_the_first_of_several_elements_is_reported(self, run):
        actual = run()
        for element in (63, 17, 40):
            flip_bit(actual[1, 0, "weight", NAMES[0]], element)
        first = compare(actual, run()).first
        assert (first.element, first.elements, first.ulp) == ((2, 1), 3, 1)

    def test_a_missing_tensor_counts_for_the_origin(self, run):
        actual = faulty((1, 1, "loss", "loss"))
        del actual._tensors[Key(0, 1, "weight", NAMES[0])]
        verdict = compare(actual, run())
        assert (verdict.outcome, verdict.origin) == ("different", (0, 1))

    def test_outside_a_run_there_is_no_origin(self):
        assert compare(torch.ones(1), torch.zeros(1)).origin is None


def test_a_verdict_is_neither_true_nor_false():
    with pytest.raises(TypeError, match="three outcomes"):
        bool(compare(torch.ones(1), torch.ones(1)))


def test_the_table_has_a_row_for_each_tensor_that_differs_or_that_one_side_lacks():
    """Tabs between all columns also where most are empty: a reader takes them by the heading."""
    actual = {"w": torch.tensor([1.0, -0.0]), "n": torch.tensor([1, 2]), "a": torch.ones(1)}
    expected = {
        "w": torch.tensor([1.0, 0.0]),
        "n": torch.tensor([1, 3]),
        "b": torch.ones(1),
        "s": torch.ones(()),
    }
    heading, *rows = [line.split("\t") for line in table(compare(actual, expected)).splitlines()]
    assert heading == [
        "side",
        "step",
        "rank",
        "phase",
        "name",
        "layout",
        "kind",
        "element",
        "actual",
        "actual_bits",
        "expected",
        "expected_bits",
        "ulp",
        "differing",
        "of",
    ]
    assert rows == [
        [
            "both",
            "0",
            "0",
            "",
            "w",
            "f32[2]",
            "bits",
            "(1)",
            "-0",
            "0x80000000",
            "0",
            "0x00000000",
            "0",
            "1",
            "2",
        ],
        [
            "both",
            "0",
            "0",
            "",
            "n",
            "i64[2]",
            "bits",
            "(1)",
            "2",
            "0x0000000000000002",
            "3",
            "0x0000000000000003",
            "",
            "1",
            "2",
        ],
        ["actual", "0", "0", "", "a", *[""] * 10],
        ["expected", "0", "0", "", "b", *[""] * 10],
        ["expected", "0", "0", "", "s", *[""] * 10],
    ]
    [row] = table(compare({"w": torch.ones(2, 1)}, {"w": torch.ones(2)})).splitlines()[1:]
    assert row.split("\t")[5:] == ["f32[2]", "shape", "", "[2, 1]", "", "[2]", "", "", "0", "2"]


def test_a_verdict_travels_between_processes(run):
    verdict = compare(faulty((0, 1, "loss", "loss")), run())
    assert pickle.loads(pickle.dumps(verdict)) == verdict


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (make_run(), {"w": torch.ones(1)}, "cannot compare Record with dict"),
        (1.0, 1.0, "expected tensors, got float"),
        ({"loss": 1.0}, {"loss": 1.0}, "got float at 'loss'"),
    ],
)
def test_bad_input(actual, expected, message: str):
    with pytest.raises(TypeError, match=message):
        compare(actual, expected)


def test_nothing_on_either_side_is_told_with_what_was_expected():
    with pytest.raises(
        BitwiseDifference,
        match="give what holds tensors: a record of a run, a module, a tensor, or a",
    ):
        assert_bitwise_equal({}, {})
    for sides in ({}, {"w": torch.ones(2)}), ({"w": torch.ones(2)}, {}):
        with pytest.raises(BitwiseDifference, match=r"only in (actual|expected)") as failure:
            assert_bitwise_equal(*sides)
        assert "give what holds" not in str(failure.value)


@pytest.mark.parametrize("phase", ["weight", "loss", "optimizer"])
@pytest.mark.parametrize("lacking", [[0], [2], [0, 1]])
@pytest.mark.parametrize("step", [0, 1])
def test_a_rank_without_gradients_on_both_sides_is_unverified(lacking, step, phase):
    """V1: its weights, or its loss, alone were compared. So it is if one step alone lacks them."""

    def run(*, full=False):
        record = Record(3)
        for each_step in range(2):
            for rank in range(3):
                record.add(each_step, rank, phase, "w", torch.ones(2))
                if full or each_step != step or rank not in lacking:
                    record.add(each_step, rank, "gradient", "w", torch.ones(2))
        return record

    verdict = compare(run(), run())
    assert verdict.outcome == "unverified"
    ranks = "ranks 0, 1" if len(lacking) == 2 else f"rank {lacking[0]}"
    assert f"has no gradient of {ranks} at step {step}" in verdict.reasons[0]
    assert compare(run(full=True), run(full=True)).outcome == "equal"
    alone = [run().select(rank=lacking[0]) for _ in range(2)]
    assert compare(*alone).outcome == "equal"


def test_runs_without_any_gradient_are_compared_by_their_weights():
    """V1: as a step that is recorded behind the optimiser alone."""
    sides = [Record(2), Record(2)]
    for record in sides:
        for rank in range(2):
            record.add(0, rank, "weight", "w", torch.ones(2))
    assert compare(*sides).outcome == "equal"

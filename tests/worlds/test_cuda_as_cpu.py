"""``gt_cuda_as=cpu``: the CPU stands for CUDA where it can, and says by name where it cannot."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pytest_gtrainer import deterministic
from pytest_gtrainer._torch.cuda_as_cpu import NoStandInError, cuda_as_cpu


def places():
    """A tensor, or more, for each way to put one on CUDA."""
    x = torch.ones(2)
    with torch.device("cuda"):
        inside = torch.ones(2)
        named = torch.ones(2, device="meta")
    assert named.is_meta
    return [
        x.cuda(),
        x.cuda(0, non_blocking=True),
        x.to("cuda"),
        x.to("cuda:1", torch.float64),
        x.to(torch.device("cuda"), non_blocking=True),
        x.to(device="cuda"),
        torch.empty(2, device="cuda"),
        torch.randint(0, 3, (2,), device=torch.device("cuda", 3)),
        torch.empty(2, pin_memory=True),
        x.pin_memory(),
        x.new_zeros(2, device="cuda"),
        torch.zeros_like(x, device="cuda"),
        nn.Linear(2, 2).cuda().weight,
        nn.Linear(2, 2).to("cuda").weight,
        nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
        inside,
    ]


def test_tensors_go_to_the_cpu(gt_cuda_as_cpu):
    assert {each.device.type for each in places()} == {"cpu"}
    assert torch.ones(2, device="meta").is_meta
    assert torch.ones(2).to("cuda", torch.float64).dtype == torch.float64


def test_without_it_they_do_not():
    """The twin: a machine without a GPU refuses."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises((RuntimeError, AssertionError)):
        places()


def test_a_library_hears_of_devices_and_torch_does_not():
    before = torch.cuda.is_available, torch.cuda.device_count
    truth = torch.cuda.is_available()
    with cuda_as_cpu(devices=3):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == torch.accelerator.device_count() == 3
        assert torch.cuda.get_device_capability() < (5, 0)
        assert torch.cuda.is_current_stream_capturing() is False
        torch.cuda.synchronize()
        from torch._utils import _get_available_device_type

        assert _get_available_device_type() == "cpu"
        # A module of torch asks for itself.
        asks = {"__name__": "torch.asks", "torch": torch}
        exec("def ask(): return torch.cuda.is_available()", asks)
        assert asks["ask"]() is truth
    assert (torch.cuda.is_available, torch.cuda.device_count) == before


def test_seeds_are_those_of_the_cpu(gt_cuda_as_cpu):
    torch.cuda.manual_seed_all(5)
    first = torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), second)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_states_of_all_devices_are_as_many(devices):
    with cuda_as_cpu(devices):
        states = torch.cuda.get_rng_state_all()
        first = torch.rand(3, device="cuda")
        assert len(states) == torch.cuda.device_count() == torch.accelerator.device_count()
        assert len(states) == devices
        torch.cuda.set_rng_state_all(states)
        assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("options", [{}, {"memory_format": torch.channels_last}])
@pytest.mark.parametrize("device", [(), (0,), ("cuda:0",)])
def test_a_tensor_goes_to_the_cpu_in_the_format_that_is_asked_for(gt_cuda_as_cpu, options, device):
    image = torch.rand(2, 3, 4, 5)
    moved = image.cuda(*device, non_blocking=True, **options)
    assert torch.equal(moved, image)
    assert moved.stride() == (image.to(**options) if options else image).stride()
    # A format that nobody asks for is kept.
    assert moved.cuda().stride() == moved.stride()


@pytest.mark.parametrize(
    "name", ["Stream", "Event", "CUDAGraph", "current_stream", "max_memory_allocated"]
)
def test_what_has_no_stand_in_is_refused_by_name(name, gt_cuda_as_cpu):
    with pytest.raises(NoStandInError, match=rf"torch.cuda.{name}: .*needs a GPU"):
        getattr(torch.cuda, name)()
    assert isinstance(torch.cuda.Stream, type)


def test_dynamo_traces_what_goes_to_the_cpu(gt_cuda_as_cpu):
    @torch.compile(backend="eager", fullgraph=True)
    def step(x):
        return (x * torch.arange(4, device="cuda")).to("cuda", torch.float64)

    assert step(torch.ones(4)).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_nccl_is_gloo_and_a_mesh_is_of_cpus(gt_cuda_as_cpu):
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    try:
        group = dist.new_group([0], backend="cpu:gloo,cuda:nccl")
        mesh = dist.init_device_mesh("cuda", (1,))
        total = torch.ones(2, device="cuda")
        dist.all_reduce(total, group=group)
        assert mesh.device_type == "cpu"
        assert dist.get_backend() == dist.get_backend(group) == "gloo"
    finally:
        dist.destroy_process_group()


@pytest.mark.gt_world("fake", size=4)
def test_a_further_group_is_of_the_worlds_own_backend(gt_world, gt_cuda_as_cpu):
    """gloo's would wait for ranks that are not there."""
    group = dist.new_group([0, 2], backend="nccl", pg_options=object())
    assert dist.get_backend(group) == gt_world.backend == "fake"
    assert dist.get_process_group_ranks(group) == [0, 2]


def test_determinism_does_not_take_cuda_for_started(gt_cuda_as_cpu, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic():
        assert torch.cuda.is_initialized()


def test_torchs_own_skip_decorators_find_enough(gt_cuda_as_cpu):
    from torch.testing._internal.common_distributed import skip_if_lt_x_gpu

    assert skip_if_lt_x_gpu(8)(lambda: "ran")() == "ran"


SKIPS = """
    import pytest, torch, unittest

    @unittest.skipUnless(torch.cuda.is_available(), "no GPU")
    class TestIt(unittest.TestCase):
        def test_a_step(self):
            weight = torch.ones(2, device="cuda", requires_grad=True)
            (weight * torch.arange(2).cuda()).sum().backward()
            assert weight.grad.tolist() == [0.0, 1.0]
"""


def test_the_option_reaches_the_import_of_test_files(pytester):
    before = torch.cuda.is_available, torch.cuda.Stream.__new__
    pytester.makepyfile(SKIPS)
    on = pytester.runpytest_inprocess("--gt-cuda-as=cpu", "--gt-device=cpu", "--gt-gpus=3")
    on.assert_outcomes(passed=1)
    on.stdout.fnmatch_lines(["*CUDA is the CPU in this run, as 3 devices*no test*"])
    assert (torch.cuda.is_available, torch.cuda.Stream.__new__) == before


def test_it_is_off_by_itself(pytester):
    """The twin, and the ini setting."""
    pytester.makepyfile(SKIPS)
    off = pytester.runpytest_inprocess()
    if not torch.cuda.is_available():
        off.assert_outcomes(skipped=1)
    assert "CUDA is the CPU" not in off.stdout.str()
    pytester.makeini("[pytest]\ngt_cuda_as = cpu")
    pytester.runpytest_inprocess("--gt-device=cpu").assert_outcomes(passed=1)

"""Stands for the package of torchtitan's repository in which a run of its trainer is described."""

from dataclasses import dataclass


@dataclass
class OverrideDefinitions:
    """Command lines that are run one after another, with a name and a number of GPUs."""

    override_args: list[list[str]]
    test_descr: str = "default"
    test_name: str = "default"
    ngpu: int = 4
    disabled: bool = False
    skip_rocm_test: bool = False

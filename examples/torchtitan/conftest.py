"""What torchtitan keeps for a process: tables by names, which a second world in it would meet."""

import sys

import pytest

_TABLES = {
    "simple_fsdp": "_wrap_class_cache",
    "fsdp_passes": "_EXTRA_FSDP_PG_REGISTRY",
    "ep_process_group_pass": "_EXTRA_EP_PG_REGISTRY",
}


@pytest.fixture(autouse=True)
def fresh_tables():
    for module, table in _TABLES.items():
        loaded = sys.modules.get(f"torchtitan.experiments.graph_trainer.{module}")
        if loaded is not None:
            getattr(loaded, table).clear()

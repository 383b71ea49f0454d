"""The command lines that torchtitan's CI runs on 4 and 8 GPUs, by name, and those it has switched off."""

from torchtitan.experiments.graph_trainer.tests import integration_tests

FLAVOURS = {
    flavour.test_name: flavour
    for flavour in (
        *integration_tests.build_graph_trainer_test_list(),
        *integration_tests.build_graph_trainer_h100_test_list(),
        *integration_tests.build_graph_trainer_autoparallel_test_list(),
        *integration_tests.build_graph_trainer_autoparallel_h100_test_list(),
    )
}
# Before a compiler, these are the graphs of others: their goldens are equal.
SAME_GRAPH = {
    "aot_fx_trace_llama3_fsdp_tp_regional_inductor": "aot_fx_trace_llama3_fsdp_tp",
    "aot_fx_trace_deepseek_v3_fsdp_tp_ep_regional_inductor": "aot_fx_trace_deepseek_v3_fsdp_tp_ep",
    "aot_fx_trace_deepseek_v3_flexattn_full_inductor_ep_overlap_transformer_batch": (
        "aot_fx_trace_deepseek_v3_flexattn_regional_inductor_ep_overlap_transformer_batch"
    ),
}


def line_of(name):
    """Return the first command line of a flavour: later ones resume its checkpoint."""
    (line, *_) = FLAVOURS[name].override_args
    return line


def eager_line(line):
    """Return the command line of torchtitan's eager trainer, for the same model and parallelism."""
    # The last is the one config that has another name there.
    renamed = {"graph_trainer.": "", "graph_trainer_": "", "debugmodel_moe": "moe_debug"}
    kept = [part for part in line if not part.startswith("--compile.")]
    for old, new in renamed.items():
        kept = [part.replace(old, new) for part in kept]
    return kept


def eager_config(suffix):
    """Return what makes the line of a config that graph_trainer has for its own eager runs."""

    def line_of_config(line):
        kept = [part for part in line if not part.startswith("--compile.")]
        return [part + suffix if part.startswith("--config ") else part for part in kept]

    return line_of_config


def eager_chunks(line):
    """Return the line that chunks modules, and runs them without a trace."""
    eager = {
        "--compile.mode aot_fx_trace": "--compile.mode None",
        "--compile.ep_overlap.strategy graph": "--compile.ep_overlap.strategy eager",
    }
    return [eager.get(part, part) for part in line]

"""What a pass may claim besides the values that it keeps: each is a word of ``fuzz --claims``."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer.attack.extract import inputs_of
from pytest_gtrainer.graph.collectives import group_of, launches, settings_of
from pytest_gtrainer.graph.memory import peak_memory
from pytest_gtrainer.graph.nodes import is_wait, short_name
from pytest_gtrainer.graph.packing import nbytes_of
from pytest_gtrainer.graph.same_on_ranks import nodes_within
from pytest_gtrainer.graphtext.schedule_view import is_free
from pytest_gtrainer.passes.graph_pass import Pass, returned


def shape_of(gm: fx.GraphModule) -> list[tuple[str, ...]]:
    """Return what tells two versions of a graph apart, without the time of their text."""
    lines: list[tuple[str, ...]] = []
    for node in nodes_within(gm):
        lines.append((node.name, node.op, str(node.target), str(node.args), str(node.kwargs)))
    return lines


def broken_claim(
    claims: Sequence[str], a_pass: Pass, after: fx.GraphModule, before: fx.GraphModule
) -> tuple[str, str] | None:
    """Return the first claim that a pass breaks, and how; None if it keeps all.

    Args:
        claims: some of ``CLAIMS``.
        a_pass: is run on ``after`` if it claims idempotence, and may change it.
        after, before: versions with traced values.

    Raises:
        ValueError: a node has no traced value.
    """
    # The one that may change the graph comes last.
    for claim in sorted(claims, key=list(CLAIMS).index):
        words = CLAIMS[claim](a_pass, after, before)
        if words:
            return claim, words
    return None


def check_claims(spelled: str | None) -> tuple[str, ...]:
    """Return the claims that an option's value names, split by commas; none if it is not given.

    Raises:
        ValueError: one of them is no claim, or empty, as what an unset variable of a shell leaves.
    """
    if spelled is None:
        return ()
    claims = tuple(word.strip() for word in spelled.split(","))
    for claim in claims:
        if not claim:
            raise ValueError(
                f"--claims={spelled} names a claim that is empty, and would claim nothing: name "
                f"some of {', '.join(CLAIMS)}, or leave --claims out"
            )
        if claim not in CLAIMS:
            raise ValueError(f"--claims={spelled}: {claim} is none of {', '.join(CLAIMS)}")
    return claims


def _memory(a_pass: Pass, after: fx.GraphModule, before: fx.GraphModule) -> str:
    now, was = peak_memory(after), peak_memory(before)
    if now.peak <= was.peak:
        return ""
    return f"{now.peak} bytes are alive at {now.at}; before the pass at most {was.peak}"


def _cost(a_pass: Pass, after: fx.GraphModule, before: fx.GraphModule) -> str:
    now, was = _costs(after), _costs(before)
    for what, count in now.items():
        if count > was[what]:
            return f"{count} {what}; before the pass {was[what]}"
    return ""


def _costs(gm: fx.GraphModule) -> Counter[str]:
    """Count what takes time, in the order in which it is told."""
    found = Counter[str]()
    for node in gm.graph.nodes:
        if launches(node.target):
            found["collectives"] += 1
            found["bytes in collectives"] += nbytes_of(node.meta.get("val"))
        elif node.op == "call_function" and not is_free(node) and not is_wait(node):
            found["kernels"] += 1
            read = sum(nbytes_of(operand.meta.get("val")) for operand in node.all_input_nodes)
            found["bytes that kernels read and write"] += read + nbytes_of(node.meta.get("val"))
    return found


def _order(a_pass: Pass, after: fx.GraphModule, before: fx.GraphModule) -> str:
    """Launches may go; those that are left have the order of before, in each group."""
    was = _launches(before)
    for group, nodes in _launches(after).items():
        wanted = iter(was.get(group, ()))
        for node in nodes:
            spelled = _spell(node)
            if not any(_spell(each) == spelled for each in wanted):
                return (
                    f"{node} ({spelled}) is not launched where it was, among the collectives of "
                    f"{list(group_ranks(group))}"
                )
    return ""


def _launches(gm: fx.GraphModule) -> Mapping[str, list[fx.Node]]:
    """Return the collectives of each group, in order."""
    found: dict[str, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if launches(node.target):
            found[str(group_of(node))].append(node)
    return found


def _spell(launch: fx.Node) -> str:
    value = launch.meta["val"]
    return f"{short_name(launch)} {settings_of(launch)} {value.dtype} {list(value.shape)}"


def _idempotence(a_pass: Pass, after: fx.GraphModule, before: fx.GraphModule) -> str:
    once = shape_of(after)
    try:
        twice = shape_of(returned(a_pass(after, inputs_of(after))))
    except Exception as error:
        return f"a second run raises {type(error).__name__}: {error}".partition("\n")[0]
    if once == twice:
        return ""
    for line in twice:
        if line not in once:
            return f"a second run makes {line[0]} ({line[2]}) of {line[3]}"
    return f"a second run leaves {len(twice)} nodes of {len(once)}, or moves some"


CLAIMS: Mapping[str, Callable[[Pass, fx.GraphModule, fx.GraphModule], str]] = {
    "memory": _memory,
    "cost": _cost,
    "order": _order,
    "idempotence": _idempotence,
}
"""By word, a function of the pass and both versions that says how a claim is broken, "" if not:

- memory: no more bytes are alive at once than before.
- cost: there are no more kernels and collectives, and no more bytes in them.
- order: the collectives of each group are launched in the order of before; some may be gone.
- idempotence: a second run changes nothing.
"""

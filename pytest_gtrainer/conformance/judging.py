"""How somebody's pass is called, what it claims, how a rule judges it, and the test of all rules.

A judge raises ``AssertionError`` where the rule is broken, and ``Nothing`` where the rule could not
have failed.
"""

import fnmatch
import importlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FrameType
from typing import Any

import pytest
from torch import fx

from pytest_gtrainer import facts
from pytest_gtrainer.conformance.recipes import LINEARS, Recipe, graph_of
from pytest_gtrainer.graph.layout import Payload, bucket_layout
from pytest_gtrainer.graphtext.rendering import render
from pytest_gtrainer.passes.graph_pass import as_pass, options_of
from pytest_gtrainer.worlds.spec import MARKER

World = tuple[str, dict[str, Any]]
FAKE: World = ("fake", {"size": 4, "rank": 1})
GIVEN: dict[str, dict[str, Any]] = {
    "any": {},
    "bucketing": {},
    "separate": {},
    "canonicalisation": {"given": "traced", "gathers_again": False},
    "deduplication": {
        "given": "duplicates",
        "registered": LINEARS,
        "executed": ("w1", "w3", "w2", "w1"),
    },
    "remat": {"given": "tagged", "gathers_again": False},
    "memory_policy": {"gathers_again": False},
    "reassignment": {},
    "ddp": {
        "given": "ddp",
        "mesh": (("replicate", 4),),
        "reduced": None,
        "mixed": False,
        "gathers_again": False,
    },
    "chunking": {
        "given": "chunks",
        "batch": 8,
        "mesh": (),
        "reduced": None,
        "mixed": False,
        "gathers_again": False,
    },
}
"""What the graphs of a kind are like: such that a pass of this kind has something to do."""
KINDS = tuple(GIVEN)
MERGING = ("bucketing", "separate")


def as_given(kind: str, recipes: Iterable[Recipe]) -> list[Recipe]:
    """Recipes of graphs as a kind has them, each once: of ``separate`` the forward and the
    backward.
    """
    parts = ("forward", "backward") if kind == "separate" else ("",)
    return list(
        dict.fromkeys(replace(each, **GIVEN[kind], part=part) for each in recipes for part in parts)
    )


@dataclass(frozen=True, slots=True)
class Adapter:
    """A pass as the rules call it.

    Attributes:
        function: the pass: ``(gm, example_inputs, *, options) -> gm``, ``gm -> gm``, or an
            ``fx.Graph`` in place.
        kind: which rules it is held to: one of ``KINDS``.
        call: ``call(gm, plan)``, for any other signature, and for chunking ``call(gm, config,
            twin)``. An option of these names, ``bucket_plan``, ``config`` or ``twin``, is given
            without it.
        options: of the pass, if there is no ``call``.
        in_place: the pass returns nothing, and the graph that it was given is its result.
        not_claimed: reasons by rule, which may be a pattern such as ``"E*"``: the rule is not run.
        strict: a rule that proves nothing fails; else it is skipped.
        broken: reasons by rule of what is known to be broken: a strict xfail.
        limit: seconds of CPU time that the pass may take on a graph, in the main thread; a pass
            that waits may take sixty times as long by the clock. Code that does not come back to
            Python is not interrupted, nor is anything outside of the main thread.
        path: ``module:name`` by which another process finds it; without one it is pickled.
    """

    function: Callable[..., Any]
    kind: str = "any"
    call: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    in_place: bool = False
    strict: bool = False
    not_claimed: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    limit: float = 60.0
    path: str = ""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"a pass is a function, and {self.function!r} is none")
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}")

    @property
    def name(self) -> str:
        """Of the pass, for tables."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    @property
    def takes_plan(self) -> bool:
        """Return whether the pass is told which modules a bucket is made of."""
        is_told = self.call is not None or "bucket_plan" in options_of(self.function)
        return is_told and self.kind in ("any", *MERGING)

    def run(self, gm: fx.GraphModule, **given: Any) -> fx.GraphModule:
        """The pass's result on a graph, which it may rewrite; a TypeError if it returned none."""
        if self.call is not None:
            result = self.call(gm, *given.values())
        else:
            told = {
                name: value for name, value in given.items() if name in options_of(self.function)
            }
            inputs = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
            result = as_pass(self.function)(gm, inputs, **{**told, **self.options})
        result = gm if result is None and self.in_place else result
        if not isinstance(result, fx.GraphModule):
            way_out = "; if it works in place, say in_place=True" if result is None else ""
            raise TypeError(
                f"{self.name} returned {type(result).__name__}, expected a GraphModule{way_out}"
            )
        for node in result.graph.nodes:
            if foreign := next(
                (each for each in node.all_input_nodes if each.graph is not result.graph), None
            ):
                raise TypeError(
                    f"{self.name} returned a graph whose {node} reads {foreign}, a node of another graph"
                )
        return result


def adapter_at(path: str, kind: str | None) -> Adapter:
    """Return what ``module:name`` names; a function is adapted by its signature. A ValueError or
    other says what is wrong.
    """
    module, _, name = path.partition(":")
    if not name:
        raise ValueError("expected module:name, as my_package.passes:my_bucketing")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return replace(
        found if isinstance(found, Adapter) else Adapter(found, kind or "any"), path=path
    )


def reason_for(rule: str, reasons: Mapping[str, str]) -> str | None:
    """The reason whose pattern fits a rule, if any does."""
    return next((why for pattern, why in reasons.items() if fnmatch.fnmatch(rule, pattern)), None)


class Nothing(Exception):
    """The rule says nothing of this pass on this graph."""


class Raised(Exception):
    """The pass itself raised."""


class Refused(Raised):
    """It raised what an author writes to refuse: no error of ``CRASHES``, and no assertion without
    words.
    """


CRASHES = (AttributeError, LookupError, NameError, ArithmeticError, RecursionError, StopIteration)


class Hung(BaseException):
    """The pass did not end; no ``Exception``, which it might catch."""


WAITING = 60
"""A pass may take so many times its limit by the clock: on a loaded machine one got a twentieth of
a CPU.
"""


@contextmanager
def ended_within(seconds: float, what: str) -> Iterator[None]:
    """Raise ``Hung`` in the main thread once it has used ``seconds`` of CPU time, or ``WAITING``
    times that passed.

    A timer that somebody else has set stays in force, unless it is the longer one by the clock.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start = time.thread_time()

    def used_up(frame: FrameType | None) -> None:
        # The timer counts all threads of the process; those that torch computes with are none of
        # the pass's time.
        if time.thread_time() - start >= seconds:
            raise Hung(
                f"{what} did not end within {seconds:g} s of CPU time; it was at {_place(frame)}"
            )

    def waited(frame: FrameType | None) -> None:
        used = time.thread_time() - start
        times = f"{WAITING * seconds:g} s, of which it computed for {used:.1f} s"
        raise Hung(f"{what} did not end within {times}; it was at {_place(frame)}")

    with (
        _timer(signal.ITIMER_REAL, signal.SIGALRM, WAITING * seconds, waited),
        _timer(signal.ITIMER_PROF, signal.SIGPROF, seconds, used_up),
    ):
        yield


def _place(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown place"


@contextmanager
def _timer(
    which: int, number: int, seconds: float, expired: Callable[[FrameType | None], None]
) -> Iterator[None]:
    """Call ``expired`` after ``seconds`` and then each second, as a pass may catch what it raises.

    A shorter timer of somebody else is left alone; a longer one goes on afterwards.
    """
    left, interval = signal.getitimer(which)
    if 0 < left < seconds:
        yield
        return
    clock = time.monotonic if which == signal.ITIMER_REAL else time.process_time
    handler = signal.signal(number, lambda _, frame: expired(frame))
    start = clock()
    signal.setitimer(which, seconds, min(seconds, 1.0))
    try:
        yield
    finally:
        signal.setitimer(which, 0)
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if left:
            signal.setitimer(which, max(left - (clock() - start), 0.01), interval)


@dataclass(frozen=True)
class Run:
    """A pass on a recipe's graph: what it is given and its result are made when they are first
    read.
    """

    adapter: Adapter
    recipe: Recipe
    request: pytest.FixtureRequest

    @cached_property
    def before(self) -> fx.GraphModule:
        return graph_of(self.recipe)

    @cached_property
    def after(self) -> fx.GraphModule:
        return self.of(graph_of(self.recipe))

    def of(self, gm: fx.GraphModule, **other: Any) -> fx.GraphModule:
        """The pass's result on any graph, told ``other`` options than the recipe's; what it raises
        is ``Refused``, or ``Raised`` if it crashed or hung.
        """
        name = self.adapter.name
        given: dict[str, Any] = {"bucket_plan": self.recipe.plan}
        if self.adapter.kind == "chunking":
            given = {"config": self.recipe.chunking, "twin": graph_of(self.recipe, twin=True)}
        try:
            with ended_within(self.adapter.limit, f"{name} on {self.recipe}"):
                return self.adapter.run(gm, **{**given, **other})
        except Hung as error:
            raise Raised(str(error)) from error
        except Exception as error:
            first = (str(error).strip() or "no message").partition("\n")[0]
            is_crash = isinstance(error, CRASHES) or (
                isinstance(error, AssertionError) and not error.args
            )
            raise (Raised if is_crash else Refused)(
                f"{name} raised {type(error).__name__}: {first}"
            ) from error

    @property
    def is_refused(self) -> bool:
        """Return whether the pass refuses the graph, in words; a crash is raised."""
        try:
            _ = self.after
        except Refused:
            return True
        return False

    @property
    def graphs(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.before, self.after

    @property
    def merged(self) -> list[Payload]:
        """The payloads with several parameters; ``Nothing`` is raised if there are none."""
        found = [
            payload for payload in bucket_layout(self.after).payloads if len(payload.slots) > 1
        ]
        if not found:
            raise Nothing("it merges no collectives of parameters")
        return found

    def keep(self, rule: "Rule") -> str:
        """Keep the graph that broke a rule as a pass file; a sentence that says where."""
        adapter, recipe = self.adapter, self.recipe
        path = self.request.getfixturevalue("gt_artifacts") / f"{adapter.name}-{rule.id}.fxgraph"
        plan = f"(bucket_plan={recipe.plan})" if adapter.takes_plan and adapter.call is None else ""
        mesh = ", ".join(f"{name}={extent}" for name, extent in recipe.mesh)
        head = [f"# {rule.id}: {rule.says}"]
        head += [f"# world: fake {recipe.size}, rank 1", f"# mesh: {mesh}"] if recipe.mesh else []
        head += [f"# passes: {adapter.name}{plan}", "# values: same", ""]
        path.write_text(
            "\n".join(head) + render(graph_of(recipe), mesh=dict(recipe.mesh)), encoding="utf-8"
        )
        return f"The graph that it was given is kept as a pass file: {path}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its id in ``docs/behaviours.txt`` or a word, what it says, and how it is judged.
    ``graphs`` are recipes from small to large; without them the judge chooses its own, and runs
    once. A graph that the pass refuses holds the rule if it ``may_refuse``, else it is an error.
    """

    id: str
    says: str
    kinds: tuple[str, ...]
    graphs: tuple[Recipe, ...]
    world: World
    merging: bool  # says nothing of a pass that merges nothing
    may_refuse: bool
    judge: Callable[[Run], None]


RULES: dict[str, Rule] = {}
IN_PLACE = tuple(
    kind for kind in KINDS if kind != "chunking"
)  # whose results have the values and names of before


def rule(
    id: str,
    says: str,
    kinds: tuple[str, ...],
    *graphs: Recipe,
    world: World = FAKE,
    merging: bool = False,
    may_refuse: bool = False,
) -> Callable[[Any], Any]:
    """Register a judge."""

    def register(judge: Callable[[Run], None]) -> Callable[[Run], None]:
        RULES[id] = Rule(id, says, kinds, graphs, world, merging, may_refuse, judge)
        return judge

    return register


def judge(rule: Rule, adapter: Adapter, request: pytest.FixtureRequest) -> None:
    """Judge a rule in the running test, and tell the table."""
    __tracebackhide__ = True

    def tell(result: str, why: str = "", graph: object = "") -> None:
        of = {"pass": adapter.name, "rule": rule.id, "says": rule.says}
        facts.emit(
            "conformance", **of, result=result, why=why.strip().partition("\n")[0], graph=str(graph)
        )

    if (reason := reason_for(rule.id, adapter.not_claimed)) is not None:
        tell("not claimed", reason)
        pytest.skip(f"not claimed: {reason}")
    runs = [
        Run(adapter, recipe, request)
        for recipe in as_given(adapter.kind, rule.graphs or (Recipe(),))
    ]
    silent = []
    for run in runs:
        try:
            if rule.may_refuse and run.is_refused:
                continue
            if rule.graphs and rule.id != "D1" and render(run.before) == render(run.after):
                raise Nothing("it changes nothing")
            if rule.merging and adapter.kind in MERGING:
                _ = run.merged
            # A rule may try many graphs, and reports what it finds by its own exception.
            with facts.failing_checks(lambda error: None):
                rule.judge(run)
        except Nothing as error:
            silent.append(f"{run.recipe}: {error}")
        except Exception as error:
            is_told = isinstance(error, AssertionError | Raised)
            why = (
                str(error)
                if is_told
                else f"the graph cannot be judged: {type(error).__name__}: {error}"
            )
            tell("broken" if isinstance(error, AssertionError) else "error", why, run.recipe)
            kept = run.keep(rule) if rule.graphs else ""
            cause = error.__cause__ if is_told else error
            raise AssertionError(
                f"{rule.id} ({rule.says}), on {run.recipe}:\n{why}\n{kept}"
            ) from cause
    if len(silent) == len(runs):
        tell("proves nothing", silent[0].partition(": ")[2])
        if adapter.strict:
            raise AssertionError(f"{rule.id} ({rule.says}) proves nothing: {silent[0]}")
        pytest.skip(f"proves nothing: {silent[0]}")
    tell("held")


def test_of(kind: str, function: Callable[..., Any], **options: Any) -> Callable[..., None]:
    """A test of the rules of a kind, with a case a rule, each in the world that it needs; options
    as of ``Adapter``.
    """
    adapter = Adapter(function, kind, **options)

    @pytest.mark.parametrize("rule", cases_of(adapter))
    def test_rule(rule: str, request: pytest.FixtureRequest) -> None:
        __tracebackhide__ = True
        judge(RULES[rule], adapter, request)

    return test_rule


def cases_of(adapter: Adapter) -> list[Any]:
    """The rules of a pass of its kind, as parameters with their marks; a ValueError if it names a
    rule there is not.
    """
    for pattern in (*adapter.not_claimed, *adapter.broken):
        if not fnmatch.filter(RULES, pattern):
            raise ValueError(f"there is no rule {pattern!r}; there are {', '.join(RULES)}")
    cases = []
    for rule in [each for each in RULES.values() if adapter.kind in each.kinds]:
        marks = [getattr(pytest.mark, MARKER)(rule.world[0], **rule.world[1])]
        if (why := reason_for(rule.id, adapter.broken)) is not None:
            marks.append(pytest.mark.xfail(reason=why, strict=True, raises=AssertionError))
        cases.append(pytest.param(rule.id, id=rule.id, marks=marks))
    return cases

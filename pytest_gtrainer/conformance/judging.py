"""Adapters of passes, rules, and the test that judges one by the other.

A judge raises ``AssertionError`` if the rule is broken; ``Nothing`` if it could not have failed.
"""

import fnmatch
import importlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FrameType
from typing import Any
from unittest import SkipTest

import pytest
import torch.distributed as dist
from torch import fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer.attack.models import ModelError
from pytest_gtrainer.conformance.recipes import (
    LINEARS,
    OwnRecipe,
    Recipe,
    graph_of,
    own_recipes,
)
from pytest_gtrainer.facts import counted
from pytest_gtrainer.graph.layout import Payload, bucket_layout
from pytest_gtrainer.graphtext.rendering import render
from pytest_gtrainer.numerics import knobs
from pytest_gtrainer.passes.graph_pass import (
    WrittenConstantError,
    as_pass,
    options_of,
    refusing_written_constants,
)
from pytest_gtrainer.proofs.state import modes_of_torch, put_modes_back
from pytest_gtrainer.worlds import MARKER

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
"""Fields of the recipes by kind of pass, so that a pass of this kind has something to do."""
KINDS = tuple(GIVEN)
MERGING = ("bucketing", "separate")


def as_given(kind: str, recipes: Iterable[Recipe]) -> list[Recipe]:
    """Return the recipes with the fields of a kind, each once.

    The kind ``separate`` has two graphs for each: the forward and the backward.
    """
    parts = ("forward", "backward") if kind == "separate" else ("",)
    found = []
    for recipe in recipes:
        found += [replace(recipe, **GIVEN[kind], part=part) for part in parts]
    # Recipes that differ only in a field that the kind sets are now equal.
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Adapter:
    """A pass as the rules call it.

    Attributes:
        function: the pass: ``(gm, example_inputs, *, options) -> gm``, ``gm -> gm``, or a function
            that rewrites an ``fx.Graph`` in place.
        kind: one of ``KINDS``; it chooses the rules.
        call: ``call(gm, plan)``, for any other signature, and for chunking ``call(gm, config,
            twin)``. An option of these names, ``bucket_plan``, ``config`` or ``twin``, is given
            without it.
        options: options of the pass, if there is no ``call``.
        in_place: the pass returns nothing, and the graph that it was given is its result.
        strict: a rule that proves nothing fails; else it is skipped.
        not_claimed: reasons by rule, which may be a pattern such as ``"E*"``: the rule is not run.
        broken: reasons by rule that is known to be broken: a strict xfail.
        limit: seconds of CPU time that the pass may take on a graph, in the main thread; a pass
            that waits may take sixty times as long by the clock. Code that does not come back to
            Python is not interrupted, nor is anything outside of the main thread.
        path: ``module:name`` by which another process finds it; without one it is pickled.
        models: models of your own, ``module:function`` or a name of ``pytest_gtrainer_models``:
            the rules are judged on their graphs, too. ``--gt-model`` adds to them.
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
    models: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"a pass is a function, and {self.function!r} is none")
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.call is not None:
            facts.check_callable(call=self.call)
        facts.check_switches(in_place=self.in_place, strict=self.strict)
        facts.check_type(self.options, Mapping, "options", "values by name")
        facts.check_type(self.not_claimed, Mapping, "not_claimed", "reasons by rule")
        facts.check_type(self.broken, Mapping, "broken", "reasons by rule")
        if isinstance(self.models, str):
            raise TypeError(f"models is {self.models!r}: give a list of them")
        facts.check_type(self.limit, (int, float), "limit", "a number of seconds")
        if not 0 < self.limit < math.inf:  # a timer of 0 s would be none
            raise ValueError(f"limit={self.limit}: give a number of seconds, above 0")
        if self.models and self.kind == "chunking":
            raise ValueError(
                "kind='chunking' is judged against eager chunking of our own models: leave "
                f"{', '.join(self.models)} out"
            )

    @property
    def name(self) -> str:
        """The name of the pass, for tables."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    @property
    def needs_plan(self) -> bool:
        """Return whether the pass has an option for a bucket plan, which the rules have to give."""
        is_given = "bucket_plan" in self.options
        return self.call is None and "bucket_plan" in options_of(self.function) and not is_given

    @property
    def takes_plan(self) -> bool:
        """Return whether the pass is given a bucket plan."""
        takes = self.call is not None or "bucket_plan" in options_of(self.function)
        return takes and self.kind in ("any", *MERGING)

    def run(self, gm: fx.GraphModule, **given: Any) -> fx.GraphModule:
        """Return the result of the pass on a graph, which it may rewrite.

        ``given`` are the options that the recipe has for it: those that the pass takes are used.
        Raises TypeError if the pass returned no graph, or one that reads nodes of another graph.
        """
        with refusing_written_constants(gm, self.name):
            if self.call is not None:
                result = self.call(gm, *given.values())
            else:
                options = {name: given[name] for name in options_of(self.function) if name in given}
                inputs = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
                result = as_pass(self.function)(gm, inputs, **{**options, **self.options})
        if result is None and self.in_place:
            result = gm
        if not isinstance(result, fx.GraphModule):
            message = f"{self.name} returned {type(result).__name__}, expected a GraphModule"
            if result is None:
                message += "; if it works in place, say in_place=True"
            raise TypeError(message)
        # fx does not notice it: lint looks at names only, and the code would read another's value.
        for node in result.graph.nodes:
            for read in node.all_input_nodes:
                if read.graph is not result.graph:
                    raise TypeError(
                        f"{self.name} returned a graph whose {node} reads {read}, "
                        "a node of another graph"
                    )
        return result


def adapter_at(path: str, kind: str | None) -> Adapter:
    """Return the adapter that ``module:name`` names, or one of the function that it names.

    Raises ValueError for a path without a name, and whatever the import raises.
    """
    module, _, name = path.partition(":")
    if not name:
        raise ValueError("expected module:name, as my_package.passes:my_bucketing")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, Adapter):
        found = Adapter(found, kind or "any")
    return replace(found, path=path)


def reason_for(rule: str, reasons: Mapping[str, str]) -> str | None:
    """Return the reason whose pattern fits a rule; None if none does."""
    for pattern, reason in reasons.items():
        if fnmatch.fnmatch(rule, pattern):
            return reason
    return None


class Nothing(Exception):
    """The rule could not have failed for this pass on this graph."""


class Raised(Exception):
    """The pass itself raised."""


class Refused(Raised):
    """The pass raised an error that an author writes in order to refuse a graph.

    Errors of ``CRASHES`` and assertions without a message are mistakes, and no refusals.
    """


CRASHES = (
    AttributeError,
    LookupError,
    NameError,
    ArithmeticError,
    RecursionError,
    StopIteration,
    WrittenConstantError,
)


# A pass that skips a test would take its rule out of the table.
ENDS = (
    SystemExit,
    SkipTest,
    pytest.skip.Exception,
    pytest.xfail.Exception,
    pytest.fail.Exception,
    pytest.exit.Exception,
)


class Hung(BaseException):
    """The pass did not end. It is no ``Exception``, which the pass might catch."""


# A pass may take this many times its limit by the clock: on a loaded machine a pass has had a
# twentieth of a CPU.
WAITING = 60


@contextmanager
def ended_within(seconds: float, what: str) -> Iterator[None]:
    """Raise ``Hung`` in the main thread after ``seconds`` of CPU time.

    By the clock it may take ``WAITING`` times as long. A timer that somebody else has set stays in
    force, unless it is the longer one by the clock.
    """
    # Python calls signal handlers in the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start = time.thread_time()

    def used_up(frame: FrameType | None) -> None:
        # The timer counts all threads of the process, also those that torch computes with; only
        # this one runs the pass.
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
    """Call ``expired`` after ``seconds``, and then each second: the pass may catch what it raises.

    A shorter timer that is already set is left alone; a longer one goes on afterwards.
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
        # ``signal.signal`` returns None for a handler that C code has installed.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if left:
            # A timer of 0 s would be none.
            signal.setitimer(which, max(left - (clock() - start), 0.01), interval)


@dataclass(frozen=True)
class PassRun:
    """A pass on the graph of a recipe; graph and result are made when they are first read."""

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
        """Return the result of the pass on any graph; ``other`` options replace the recipe's.

        Raises ``Refused`` if the pass refuses the graph, ``Raised`` if it crashed or hung.
        """
        name = self.adapter.name
        given: dict[str, Any] = {"bucket_plan": self.recipe.plan}
        if self.adapter.needs_plan and not self.recipe.plan:
            raise ModelError(
                f"{self.recipe} has no bucket plan: let its function return a TrainConfig"
            )
        if self.adapter.kind == "chunking":
            given = {"config": self.recipe.chunking, "twin": graph_of(self.recipe, twin=True)}
        try:
            with ended_within(self.adapter.limit, f"{name} on {self.recipe}"):
                return self.adapter.run(gm, **{**given, **other})
        except Hung as error:
            raise Raised(str(error)) from error
        except (Exception, *ENDS) as error:
            first_line = (str(error).strip() or "no message").partition("\n")[0]
            message = f"{name} raised {type(error).__name__}: {first_line}"
            is_bare_assertion = isinstance(error, AssertionError) and not error.args
            if is_bare_assertion or isinstance(error, (*CRASHES, *ENDS)):
                raise Raised(message) from error
            raise Refused(message) from error

    @property
    def graphs(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.before, self.after

    @property
    def merged(self) -> list[Payload]:
        """The payloads with several parameters; raises ``Nothing`` if there are none."""
        payloads = bucket_layout(self.after).payloads
        found = [payload for payload in payloads if len(payload.slots) > 1]
        if not found:
            raise Nothing("it merges no collectives of parameters")
        return found

    def keep(self, rule: "Rule") -> str:
        """Keep the graph that broke a rule as a pass file; return a sentence with its path."""
        adapter, recipe = self.adapter, self.recipe
        lines = [f"# {rule.id}: {rule.says}"]
        if recipe.mesh:
            mesh = ", ".join(f"{name}={extent}" for name, extent in recipe.mesh)
            lines += [f"# world: fake {recipe.size}, rank 1", f"# mesh: {mesh}"]
        elif isinstance(recipe, OwnRecipe):
            lines.append(f"# world: fake {recipe.size}, rank {dist.get_rank()}")
        options = ""
        if adapter.takes_plan and adapter.call is None:
            options = f"(bucket_plan={recipe.plan})"
        lines += [f"# passes: {adapter.name}{options}", "# values: same"]
        lines.append(render(graph_of(recipe), mesh=dict(recipe.mesh)))
        path = self.request.getfixturevalue("gt_artifacts") / f"{adapter.name}-{rule.id}.fxgraph"
        path.write_text("\n".join(lines), encoding="utf-8")
        return f"The graph that it was given is kept as a pass file: {path}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule and the function that judges it.

    Attributes:
        id: its id in ``docs/behaviours.txt``, or a word.
        says: its sentence.
        kinds: the kinds of passes that it holds for.
        graphs: recipes from small to large; without them the judge chooses its own, and runs once.
        world: the world that the judge needs.
        merging: the rule proves nothing of a pass that merges no collectives.
        may_refuse: a graph that the pass refuses holds the rule; else it is an error.
        any_model: it can be judged on graphs of other models than ours.
        judge: the function.
    """

    id: str
    says: str
    kinds: tuple[str, ...]
    graphs: tuple[Recipe, ...]
    world: World
    merging: bool
    may_refuse: bool
    any_model: bool
    judge: Callable[[PassRun], None]


RULES: dict[str, Rule] = {}
# The results of these passes have the values and names of before.
IN_PLACE = tuple(kind for kind in KINDS if kind != "chunking")


def rule(
    id: str,
    says: str,
    kinds: tuple[str, ...],
    *graphs: Recipe,
    world: World = FAKE,
    merging: bool = False,
    may_refuse: bool = False,
    any_model: bool | None = None,
) -> Callable[[Any], Any]:
    """Register a judge; the arguments are the attributes of ``Rule``."""

    def register(judge: Callable[[PassRun], None]) -> Callable[[PassRun], None]:
        # Without graphs of its own a rule makes models that it knows.
        fits = bool(graphs) if any_model is None else any_model
        RULES[id] = Rule(id, says, kinds, graphs, world, merging, may_refuse, fits, judge)
        return judge

    return register


def judge(rule: Rule, adapter: Adapter, request: pytest.FixtureRequest, model: str = "") -> None:
    """Judge a rule in the running test, and report the result to the table.

    Args:
        model: judge it on the graphs of this model of the user, not on ours.

    Raises AssertionError if the rule is broken, or if the pass raised; skips the test if the rule
    is not claimed, or proves nothing and the adapter is not strict.
    """
    __tracebackhide__ = True
    name = f"{adapter.name} on {model}" if model else adapter.name

    def report(result: str, why: str = "", graph: object = "") -> None:
        first_line = why.strip().partition("\n")[0]
        judged = {"pass": name, "rule": rule.id, "says": rule.says}
        facts.emit("conformance", **judged, result=result, why=first_line, graph=str(graph))

    reason = reason_for(rule.id, adapter.not_claimed)
    if reason is not None:
        report("not claimed", reason)
        pytest.skip(f"not claimed: {reason}")
    try:
        recipes = _recipes_for(rule, adapter, model)
    except ValueError as error:
        report("error", str(error), model)
        raise AssertionError(str(error)) from None
    could_fail, proving_nothing = [], []
    for recipe in recipes:
        run = PassRun(adapter, recipe, request)
        try:
            with _process_kept():
                _judge_run(rule, run)
            could_fail.append(str(recipe))
        except Nothing as error:
            proving_nothing.append(str(error))
        except Exception as error:
            result = "broken" if isinstance(error, AssertionError) else "error"
            why, cause = str(error), error.__cause__
            if not isinstance(error, AssertionError | Raised):  # a mistake of the rule itself
                why, cause = f"the graph cannot be judged: {type(error).__name__}: {error}", error
            report(result, why, recipe)
            kept = run.keep(rule) if rule.graphs or model else ""
            raise AssertionError(f"{rule.id} ({rule.says}), on {recipe}:\n{why}\n{kept}") from cause
    if not could_fail:
        why = proving_nothing[0]
        report("proves nothing", why)
        if adapter.strict:
            raise AssertionError(f"{rule.id} ({rule.says}) proves nothing: {recipes[0]}: {why}")
        pytest.skip(f"proves nothing: {recipes[0]}: {why}")
    where = f"on {counted(len(recipes), 'graph')}"
    if not rule.graphs and not model:
        where = "on models of its own"
    if proving_nothing:
        where = f"on {len(could_fail)} of {len(recipes)} graphs: {', '.join(could_fail)}"
    report("held", f"could have failed {where}")


def _recipes_for(rule: Rule, adapter: Adapter, model: str) -> list[Recipe]:
    """Return the graphs that a rule is judged on.

    Raises:
        ValueError: the model of the user has no graph.
    """
    if model:
        return own_recipes(model, adapter.kind, GIVEN[adapter.kind])
    return as_given(adapter.kind, rule.graphs or (Recipe(),))


@contextmanager
def _process_kept() -> Iterator[None]:
    """Put back what a pass leaves changed in its process.

    Else the rules "state" that come later would find it changed already, and other rules would
    blame another pass.
    """
    modes, switches = modes_of_torch(), knobs.values()
    with random_states_kept():
        try:
            yield
        finally:
            put_modes_back(modes)
            for knob in knobs.KNOBS:
                was, now = switches[knob.name], knob.read()
                if was != now and knobs.NOT_LOADED not in (was, now):
                    knob.write(was)


def _judge_run(rule: Rule, run: PassRun) -> None:
    """Judge one graph, unless the pass refuses it and may, or leaves it as it is."""
    if rule.may_refuse:
        try:
            _ = run.after
        except Refused:
            return
    # D1 judges also a graph that the pass leaves alone: its buckets are not merged. "state" has to
    # see the first run of the pass, as a second one sets what is set.
    has_graph = bool(rule.graphs) or isinstance(run.recipe, OwnRecipe)
    is_beside = rule.id in ("D1", "state")
    if has_graph and not is_beside and render(run.before) == render(run.after):
        raise Nothing("it changes nothing")
    if rule.merging and run.adapter.kind in MERGING:
        _ = run.merged
    # A rule may try many graphs, and reports what it finds by its own exception: a failed check
    # inside it does not fail the test by itself.
    with facts.failing_checks(lambda error: None):
        rule.judge(run)


def test_of(kind: str, function: Callable[..., Any], **options: Any) -> Callable[..., None]:
    """Return a test with a case for each rule of a kind; ``options`` are those of ``Adapter``."""
    adapter = Adapter(function, kind, **options)

    @pytest.mark.parametrize("rule", cases_of(adapter))
    def test_rule(rule: str, request: pytest.FixtureRequest) -> None:
        __tracebackhide__ = True
        judge_case(rule, adapter, request)

    return test_rule


def cases_of(adapter: Adapter) -> list[Any]:
    """Return the rules of the adapter's kind as parameters, marked with the worlds that they need.

    A parameter is a rule, or a rule and a model of the user: ``"E6"``, ``"E6 my_models:tiny"``.

    Raises ValueError if the adapter names a rule that does not exist.
    """
    for pattern in (*adapter.not_claimed, *adapter.broken):
        if not fnmatch.filter(RULES, pattern):
            raise ValueError(f"there is no rule {pattern!r}; there are {', '.join(RULES)}")
    cases = []
    for rule in RULES.values():
        if adapter.kind not in rule.kinds:
            continue
        world, options = rule.world
        mark = getattr(pytest.mark, MARKER)(world, **options)
        marks = [mark]
        why = reason_for(rule.id, adapter.broken)
        if why is not None:
            marks.append(pytest.mark.xfail(reason=why, strict=True, raises=AssertionError))
        cases.append(pytest.param(rule.id, id=rule.id, marks=marks))
        if not rule.any_model:
            continue
        for model in dict.fromkeys(adapter.models):
            # What is broken on our graphs need not show on every other one.
            own = [mark] if why is None else [mark, pytest.mark.xfail(reason=why, strict=False)]
            case = f"{rule.id} {model}"
            cases.append(pytest.param(case, id=f"{rule.id}-{model}", marks=own))
    return cases


def judge_case(case: str, adapter: Adapter, request: pytest.FixtureRequest) -> None:
    """Judge a parameter of ``cases_of``."""
    __tracebackhide__ = True
    rule, _, model = case.partition(" ")
    judge(RULES[rule], adapter, request, model)

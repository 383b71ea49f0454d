"""Editing string literals in source: only those, wherever they stand and however they are
spelled.
"""

import ast
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gtrainer.golden import inline
from pytest_gtrainer.golden.inline import EditError, Expectation, find_literal, rewritten


def wanted(line: int, old: str, new: str) -> Expectation:
    return Expectation("", line, old, new, "")


def after(source: bytes | str, *edits: Expectation) -> bytes | str:
    """The source with all edits made."""
    new, refused = rewritten(source.encode() if isinstance(source, str) else source, edits)
    assert refused == {}
    return new.decode() if isinstance(source, str) else new


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("same(x, '''old''')", "same(x, '''new''')"),
        ('same(x, """old""")', 'same(x, """new""")'),
        ("same(x, r'''old''')", "same(x, r'''new''')"),
        ("same(x, 'old')", 'same(x, """new""")'),
        ("same(x, u'''old''')", "same(x, u'''new''')"),
        ("same(x, u'old')", 'same(x, """new""")'),
        ("same(x, ('o'\n     'ld'))", 'same(x, ("""new"""))'),
        ("same(x, expect='''old''')", "same(x, expect='''new''')"),
        ("same(\n  x,\n  '''old''',\n)", "same(\n  x,\n  '''new''',\n)"),
        ("same(f('''old'''), '''old''')", "same(f('''old'''), '''new''')"),
        ("same('''old''', '''old''')", "same('''old''', '''new''')"),
        ("same('''old'''.upper(), '''old''')", "same('''old'''.upper(), '''new''')"),
        (
            "same(x, '''old''') if '''old''' else '''old'''",
            "same(x, '''new''') if '''old''' else '''old'''",
        ),
        ("with a, b: same(x, '''old''')", "with a, b: same(x, '''new''')"),
        ("ü = 'äöü'; same('ü', '''old''')", "ü = 'äöü'; same('ü', '''new''')"),
        ("same(x, '''old''')  # '''old'''", "same(x, '''new''')  # '''old'''"),
    ],
)
def test_the_literal_of_the_call_is_replaced_in_its_own_style(source, expected):
    assert after(source, wanted(1, "old", "new")) == expected


def test_a_call_that_begins_above_its_line_is_found():
    """Python gives the line of the attribute where a chain of calls is broken."""
    source = "(case\n .other('''old''')\n .same(x,\n  '''{}'''))"
    assert after(source.format("old"), wanted(3, "old", "new")) == source.format("new")


@pytest.mark.parametrize(
    ("line_end", "mark", "coding"),
    [
        ("\n", b"", "utf-8"),
        ("\r\n", b"", "utf-8"),
        ("\r\n", b"\xef\xbb\xbf", "utf-8"),
        ("\r", b"", "utf-8"),
        ("\n", b"", "latin-1"),
    ],
)
def test_encoding_and_line_ends_stay(line_end, mark, coding):
    lines = [
        f"# -*- coding: {coding} -*-",
        "ä = '\x0c'",
        "same(x, '''one",
        "''')",
        "same(x, '''old''')",
        "",
    ]
    new = ["same(x, '''\\", "a", "b", "''')", "same(x, '''one''')", ""]
    source, expected = (
        mark + line_end.join(text).encode(coding) for text in (lines, lines[:2] + new)
    )
    assert after(source, wanted(3, "one\n", "a\nb\n"), wanted(5, "old", "one")) == expected


def test_edits_are_made_from_the_bottom_up_whatever_their_order():
    source = "same(x, '''a''')\nsame(x, '''b''')\nsame(x, '''c''')\n"
    edits = [wanted(1, "a", "b\nb\n"), wanted(3, "c", "a"), wanted(2, "b", "")]
    expected = "same(x, '''\\\nb\nb\n''')\nsame(x, '''''')\nsame(x, '''a''')\n"
    assert after(source, *edits) == after(source, *edits[::-1]) == expected


def test_an_edit_does_not_find_what_another_has_written():
    """Two calls on one line whose texts change places."""
    assert after(
        "same(x, '''a'''), same(x, '''b''')", wanted(1, "a", "b"), wanted(1, "b", "a")
    ) == ("same(x, '''b'''), same(x, '''a''')")


NOWHERE = "there is no string literal that reads as the old expectation in the call there"


@pytest.mark.parametrize(
    ("source", "line", "problem"),
    [
        ("same(x, OLD)", 1, NOWHERE),
        ("same(x, f'''old''')", 1, NOWHERE),
        ("same(x, b'''old''')", 1, NOWHERE),
        ("same(x, '''other''')\nsame(x, '''old''')", 1, NOWHERE),
        ("pass", 7, NOWHERE),
        (
            "same(x, '''old'''); same(y, '''old''')",
            1,
            "two calls there have the same expectation: put them on lines *",
        ),
        (
            "g(h(x, '''old''')), same(y, '''old''')",
            1,
            "two calls there have the same expectation: put them on lines *",
        ),
    ],
)
def test_what_cannot_be_edited_is_one_sentence_and_the_rest_is_edited(source, line, problem):
    more = "\nsame(x, '''fine''')"
    edit = wanted(line, "old", "new")
    new, refused = rewritten(
        (source + more).encode(), [edit, wanted(source.count("\n") + 2, "fine", "well")]
    )
    assert new.decode() == source + more.replace("fine", "well")
    (said,) = refused.values()
    assert refused.keys() == {edit}
    assert said.startswith(problem.removesuffix("*"))


def test_a_literal_is_edited_once():
    source = b"same(same(\n y, OLD), '''old''')"
    first, second = wanted(1, "old", "new"), wanted(2, "old", "newer")
    new, refused = rewritten(source, [first, second])
    assert new == source.replace(b"'''old", b"'''new")
    assert refused == {
        second: "another expectation has the only literal there that reads as the old text"
    }


@pytest.mark.parametrize("source", [b"same(x,", b"# coding: none\n", b"\xff", b"a\0"])
def test_what_is_not_python_is_one_sentence(source):
    with pytest.raises(EditError, match=r"^is not Python source \("):
        rewritten(source, [wanted(1, "old", "new")])


@pytest.mark.parametrize("spelled", ["'new', more()", "'new'); more(", "'new", "'other'"])
def test_a_spelling_that_would_change_more_is_refused(spelled, monkeypatch):
    monkeypatch.setattr(inline, "spell", lambda literal, text: spelled)
    with pytest.raises(
        EditError, match="cannot be edited without changing more than its expectations"
    ):
        rewritten(b"same(x, 'old')", [wanted(1, "old", "new")])


printable = st.text(string.printable.replace("\r", ""), max_size=20)


@given(
    st.lists(st.tuples(printable, printable, st.sampled_from(["", " ", "\n", "\n\n"])), max_size=6)
)
def test_the_new_source_gives_the_new_texts_and_nothing_else_changes(cases):
    """Any texts, in any place: running the edited source gives them."""
    lines, source = [], ""
    for old, _, space in cases:
        lines.append(source.count("\n") + 1)
        source += f"see({space}{old!r}, {len(lines)})\n"
    edits = {
        wanted(line, old, new)
        for line, (old, new, _) in zip(lines, cases, strict=True)
        if old != new
    }
    seen: list[tuple[str, int]] = []
    exec(after(source, *edits), {"see": lambda *arguments: seen.append(arguments)})
    assert seen == [(new, number) for number, (_, new, _) in enumerate(cases, start=1)]


def test_the_literal_is_that_of_the_outermost_call():
    call = ast.parse("same(f('a', 'b'), 'b')", mode="eval").body
    assert find_literal([call, call.args[0]], wanted(1, "b", "")).col_offset == 18


def wanted_in(source: str, call: str) -> Expectation:
    """The expectation of an empty text by the call in ``source`` that is spelled ``call``."""
    end = len(source[: source.index(call)].encode()) + len(call)
    return Expectation("", 1, "", "new", "", 1, end)


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("same(text().replace('x', ''), WANT)", "same(text().replace('x', ''), WANT)"),
        ("same(re.sub('x', '', text()), want)", "same(re.sub('x', '', text()), want)"),
        ("same(text().strip(''), want=WANT)", "same(text().strip(''), want=WANT)"),
        ("run(lambda: same(text(), WANT), '')", "same(text(), WANT)"),
    ],
)
def test_an_equal_literal_of_another_call_is_left_alone(source, call):
    edit = wanted_in(source, call)
    assert rewritten(source.encode(), [edit]) == (source.encode(), {edit: NOWHERE})


@pytest.mark.parametrize(
    ("source", "call", "written"),
    [
        ("run(lambda: same(x, ''), '')", "same(x, '')", 'same(x, """new""")'),
        ("same(f(['']), '')", "same(f(['']), '')", 'same(f([\'\']), """new""")'),
        ("same(x, ''), same(y, '')", "same(y, '')", 'same(y, """new""")'),
        ("ü, same(x, '')", "same(x, '')", 'same(x, """new""")'),
    ],
)
def test_the_literal_is_that_of_the_call_that_ran(source, call, written):
    assert after(source, wanted_in(source, call)) == source.replace(call, written)


def test_a_call_with_two_literals_that_read_alike_is_refused():
    source = "check(text(), '', name='')"
    edit = wanted_in(source, source)
    new, refused = rewritten(source.encode(), [edit])
    assert new == source.encode()
    assert "several arguments there read as the old expectation" in refused[edit]

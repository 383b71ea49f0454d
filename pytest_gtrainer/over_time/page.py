"""The comparison of two records as one HTML file that fetches nothing."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from pytest_gtrainer.facts import counted, one_line, spell_some
from pytest_gtrainer.over_time.comparing import PHASES, Comparison


def write_page(result: Comparison, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.part")
    try:
        unfinished.write_text(page_of(result), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def page_of(result: Comparison) -> str:
    """Return the page: both runs, what was not compared, and every difference of the phase."""
    style = files("pytest_gtrainer.report").joinpath("template/report.css").read_text("utf-8")
    title = "Two records are equal"
    if result.differences:
        title = f"Two records differ: {one_line(str(result.differences[0]))}"
    elif result.status or result.shorter:
        title = "Two records are equal as far as they go"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>",
            f"<body>\n<header><h1>{escape(title)}</h1></header>\n<main>",
            *_sections(result),
            "</main>\n</body>\n</html>\n",
        ]
    )


def _sections(result: Comparison) -> Iterator[str]:
    yield f"<pre>{escape(chr(10).join(result.heads()))}</pre>"
    if not result.differences:
        values, steps = counted(result.compared, "value"), counted(len(result.steps), "step")
        yield f"<p>equal: {values} in {steps}</p>"
        if result.shorter and result.is_complete:
            yield f"<p>not equal to the end: {escape(result.shorter)}</p>"
        return

    first = result.differences[0]
    details = [line.strip() for line in (*result.element, *result.places, *result.sizes)]
    details += filter(None, [result.exact])
    yield f"<pre>{escape(chr(10).join(map(one_line, details)))}</pre>"
    yield f"<h3>What differs in step {first.step}, {escape(first.phase)}</h3>"
    rows = []
    for difference in result.differences:
        rows.append((difference.name, spell_some(difference.ranks, 8), difference.words))
    yield from _table(("name", "ranks", "how"), rows)

    yield f"<h3>Phases of step {first.step}</h3>"
    counts = []
    for phase in PHASES:
        if phase in result.counts:
            differing, number = result.counts[phase]
            counts.append((phase, str(differing), str(number)))
    yield from _table(("phase", "differ", "of"), counts)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "<table>"
    for tag, cells in (("th", heads), *(("td", row) for row in rows)):
        texts = [f"<{tag}>{escape(one_line(cell))}</{tag}>" for cell in cells]
        yield f"<tr>{''.join(texts)}</tr>"
    yield "</table>"

"""Pass files written by a test, over one small graph."""

import pytest

BODY = """\
fsdp = group(range(0, 2))
if P:
  P.w: f32[2]
if fwd:
  all_gather_into_tensor: f32[4] = _c10d_functional.all_gather_into_tensor(P.w, 2, fsdp)
  wait_tensor: f32[4] = _c10d_functional.wait_tensor(all_gather_into_tensor)
  detach: f32[4] = aten.detach(wait_tensor)
  neg: f32[4] = aten.neg(detach)
if out:
  yield fwd._.neg
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """``write("# check: …")`` -> the path of a pass file.

    It lies where messages name it shortly.
    """
    monkeypatch.chdir(tmp_path)

    def write(*directives, body=BODY, passes="canonicalize_graph_pass"):
        lines = ["# gtrainer graph v2", *([f"# passes: {passes}"] if passes else []), *directives]
        path = tmp_path / "a.fxgraph"
        path.write_text("\n".join(lines) + "\n" + body)
        return path

    return write

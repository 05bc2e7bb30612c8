"""Run folders and the Papermill chain: what is skipped, what is refused, and what a failure leaves on screen."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from musalib import chain, runs, store
from musalib.parameters import ParameterError


@pytest.fixture
def runs_in(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSALIB_RUNS", str(tmp_path / "papermill_runs"))
    return tmp_path / "papermill_runs"


def test_jsonl_survives_a_torn_last_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    with store.JsonlWriter(path) as writer:
        writer.append({"id": 1})
        writer.append({"id": 2, "text": "two\nlines \ud800"})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": 3, "te')
    assert [row["id"] for row in store.read_jsonl(path)] == [1, 2]
    with store.JsonlWriter(path) as writer:
        assert path.read_bytes() == whole
        writer.append({"id": 3})
    assert [row["id"] for row in store.read_jsonl(path)] == [1, 2, 3]
    path.write_bytes(b"{torn}\n" + whole)
    with pytest.raises(ValueError, match="line 1"):
        store.read_jsonl(path)


def test_replacing_keeps_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "value.json"
    store.write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), store.replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert store.read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["value.json"]


def test_manifest_records_outputs_and_status(runs_in):
    run = runs.Run("a", {"seed": 0})
    run.begin("03_sft")
    assert store.read_json(run.manifest_path)["stages"]["03_sft"]["status"] == "running"
    store.write_text(runs.artifacts_of("a", "03_sft") / "policy" / "config.json", "{}")
    store.write_text(runs.artifacts_of("a", "03_sft") / "checkpoint-5" / "big.bin", "work in progress")
    run.notebook("03_sft").write_text("{}")
    run.finish("03_sft", 1.5)
    run.close("done")
    manifest = store.read_json(run.manifest_path)
    outputs = [o["path"] for o in manifest["stages"]["03_sft"]["outputs"]]
    assert outputs == ["03_sft.ipynb", "artifacts/03_sft/policy/config.json"]
    assert manifest["status"] == manifest["stages"]["03_sft"]["status"] == "done"
    assert {"commit", "versions", "device", "wall_s", "parameters"} <= manifest.keys()


def test_a_stage_is_done_only_while_its_outputs_are_unchanged(runs_in):
    run = runs.Run("a", {})
    output = runs.artifacts_of("a", "03_sft") / "eval.jsonl"
    store.write_text(output, "{}\n")
    run.begin("03_sft")
    assert not run.is_done("03_sft")
    run.finish("03_sft", 0.1)
    assert run.is_done("03_sft")
    store.write_text(output, "[]\n")
    assert not run.is_done("03_sft")
    output.unlink()
    assert not run.is_done("03_sft")


def test_another_format_other_parameters_damage_or_a_second_user_are_refused(runs_in):
    runs.Run("a", {"profile": "tiny", "seed": 0}).close("done")
    with pytest.raises(runs.RunError, match=r"seed was 0, now 3.*choose another --run"):
        runs.Run("a", {"profile": "tiny", "seed": 3})
    manifest = runs_in / "a" / "manifest.json"
    store.write_json(manifest, store.read_json(manifest) | {"format": 99})
    with pytest.raises(runs.RunError, match="run format 99"):
        runs.Run("a", {"profile": "tiny", "seed": 0})
    manifest.write_text("{")
    with pytest.raises(runs.RunError, match="damaged"):
        runs.Run("a", {"profile": "tiny", "seed": 0})
    with pytest.raises(runs.RunError, match="run name"):
        runs.folder_of("../elsewhere")
    holder = (
        "import sys, musalib.runs as r; run = r.Run('b', {}); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(runs.RunError, match="in use by another process"):
            runs.acquire(runs_in / "b" / ".lock", "run 'b'", wait_s=0.3)
        other.stdin.close()


PARAMETERS = 'run: str = "demo"\nprofile: str = "smoke"\nseed: int = 0\nsteps: int = None'
WRITE = """from pathlib import Path
from musalib import runs
folder = runs.artifacts_of(run, "{stage}")
folder.mkdir(parents=True, exist_ok=True)
(folder / "out.txt").write_text(f"{{profile}} {{seed}} {{steps}}")"""


@pytest.fixture
def suite(tmp_path, runs_in, monkeypatch):
    """A repository with small notebooks; returns a function that writes one."""
    monkeypatch.setattr(runs, "repository_root", lambda: tmp_path)
    (tmp_path / "notebooks").mkdir()

    def write(stage, *cells, parameters=PARAMETERS):
        notebook = nbformat.v4.new_notebook(
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        )
        first = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
        notebook.cells = [first, *(nbformat.v4.new_code_cell(cell) for cell in cells)]
        nbformat.write(notebook, tmp_path / "notebooks" / f"{stage}.ipynb")

    return write


def test_wrong_requests_stop_before_anything_runs(suite, runs_in):
    suite("00_start", "pass")
    suite("06_rl_multi_turn", "pass")
    for request, message in [
        (chain.Request("tinny"), "did you mean 'tiny'"),
        (chain.Request(start="7"), "no notebook '7'"),
        (chain.Request(only="06_rl_multi_trun"), "did you mean '06_rl_multi_turn'"),
        (chain.Request(start="00", only="06"), "exclude each other"),
        (chain.Request(parameters={"sede": 1}), "did you mean 'seed'"),
        (chain.Request(parameters={"seed": "x"}), "'seed' must be int"),
        (chain.Request(parameters={"profile": "tiny"}), "use --profile"),
    ]:
        with pytest.raises(ParameterError, match=message):
            chain.run_chain(request)
    assert not runs_in.exists()
    known = chain.notebooks()
    assert chain.chosen(chain.Request(start="6"), known) == ["06_rl_multi_turn"]
    assert chain.chosen(chain.Request(), known) == ["00_start", "06_rl_multi_turn"]


@pytest.mark.notebook
def test_chain_runs_skips_what_is_done_and_continues_after_a_failure(suite, runs_in, capsys):
    suite("00_start", WRITE.format(stage="00_start"), "print('hello from the notebook')")
    suite(
        "03_sft",
        WRITE.format(stage="03_sft"),
        "from musalib.tasks import TaskError\nraise TaskError('no class Model')",
    )
    request = chain.Request("smoke", "a", parameters={"seed": 4})
    assert chain.run_chain(request) == 1
    last = capsys.readouterr().err.splitlines()[-4:]
    assert last[0].startswith("FAILED   03_sft, cell ") and "from musalib.tasks import TaskError" in last[0]
    assert last[1] == "why      no class Model"
    assert last[2].split()[1].endswith("a/run.log")
    assert last[3] == "continue musalib run --profile smoke --run a --from 03 -p seed=4"
    manifest = store.read_json(runs_in / "a" / "manifest.json")
    assert manifest["status"] == "failed" and manifest["stages"]["03_sft"]["error"] == "no class Model"
    assert (runs_in / "a/artifacts/00_start/out.txt").read_text() == "smoke 4 None"
    assert "hello from the notebook" in (runs_in / "a" / "run.log").read_text()

    suite("03_sft", WRITE.format(stage="03_sft"))
    assert chain.run_chain(request) == 0
    screen = capsys.readouterr().err
    assert "00_start: done before, skipped" in screen and "03_sft: done in" in screen
    assert store.read_json(runs_in / "a" / "manifest.json")["status"] == "done"
    with pytest.raises(runs.RunError, match="other parameters"):
        chain.run_chain(chain.Request("smoke", "a", parameters={"seed": 5}))


@pytest.mark.notebook
def test_a_dead_kernel_is_a_failure_although_papermill_calls_it_completed(suite, runs_in, capsys):
    suite("00_start", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "print('never')")
    assert chain.run_chain(chain.Request("smoke", "a")) == 1
    last = capsys.readouterr().err.splitlines()[-4:]
    assert last[0].startswith("FAILED   00_start, cell ") and "died without a word" in last[1]
    assert store.read_json(runs_in / "a" / "manifest.json")["stages"]["00_start"]["status"] == "failed"


@pytest.mark.notebook
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_leaves_no_kernel_behind(suite, tmp_path, runs_in, how):
    suite(
        "00_start",
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)",
    )
    program = (
        "import sys; from pathlib import Path; from musalib import chain, runs; "
        f"runs.repository_root = lambda: Path({str(tmp_path)!r}); sys.exit(chain.run_chain(chain.Request('smoke', 'a')))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=-1, text=True) as process:
        pid = wait_for(tmp_path / "pid")
        process.send_signal(how)
        screen = process.communicate(timeout=30)[1]
    deadline = time.monotonic() + 15
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive(pid)
    status = json.loads((runs_in / "a" / "manifest.json").read_text())["stages"]["00_start"]["status"]
    if how == signal.SIGKILL:
        assert status == "running"
    else:
        assert status == "failed" and "stopped by a signal" in screen


def wait_for(path: Path) -> int:
    deadline = time.monotonic() + 40
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, "the notebook did not start"
        time.sleep(0.1)
    return int(path.read_text())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")

"""The pipeline notebooks: what papermill, reviewers and JupyterLab expect of them, and one real run of them all."""

import ast
import dataclasses
import json
import subprocess
import sys

import nbformat
import pytest

from musalib import chain, runs, stage, store
from musalib.parameters import assigned_names
from musalib.profiles import Profile

NOTEBOOKS = sorted((runs.repository_root() / "notebooks").glob("*.ipynb"))
PIPELINE = [
    "00_start_here",
    "01_tasks_and_verifier",
    "02_data_synthesis",
    "03_sft",
    "04_rft",
    "05_rl_single_turn",
    "06_rl_multi_turn",
    "08_ablations",
]


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_pipeline_is_complete():
    assert set(PIPELINE) <= set(chain.notebooks())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_source_notebook_is_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not {"papermill", "widgets"} & notebook.metadata.keys()
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith(
        f"# {path.stem[:2]} "
    )
    assert all(not cell.outputs and cell.execution_count is None for cell in code(notebook))
    assert all(
        not line.lstrip().startswith(("!", "%"))
        for cell in code(notebook)
        for line in cell.source.splitlines()
    )
    assert [cell.metadata.get("tags") for cell in code(notebook)].count(["parameters"]) == 1
    longest = max((len(cell.source.splitlines()) for cell in code(notebook)), default=0)
    assert longest <= 30 and not any("def " in cell.source for cell in code(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_parameters_are_plain_typed_known_and_read(path):
    notebook = nbformat.read(path, as_version=4)
    (parameters,) = [cell for cell in code(notebook) if cell.metadata.get("tags") == ["parameters"]]
    for node, line in zip(ast.parse(parameters.source).body, parameters.source.splitlines(), strict=True):
        assert isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) in chain.TYPES, line
        ast.literal_eval(node.value)
        assert line.count("=") == 1 and "|" not in line, f"papermill --help-notebook would not list: {line}"
    names = set(assigned_names(parameters.source))
    assert names == chain.declared(path).keys()
    rest = "\n".join(cell.source for cell in code(notebook) if cell is not parameters)
    (read,) = {
        node.args[1].id
        for node in ast.walk(ast.parse(rest))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "read_parameters"
    }
    fields = {field.name for field in dataclasses.fields(getattr(stage, read))}
    assert names <= fields, f"nothing reads {names - fields}"
    sizes = {field.name for field in dataclasses.fields(Profile)}
    used = {name for name in names if f"stage.parameters.{name}" in rest}
    assert names - {"run", "profile", "seed"} <= sizes | used


def test_a_missing_input_names_the_notebook_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSALIB_RUNS", str(tmp_path))
    opened = stage.Stage("03_sft", stage.SFTParameters(run="a", profile="smoke"))
    with pytest.raises(stage.MissingInput, match=r"notebooks/02_data_synthesis\.ipynb makes it"):
        opened.input("02_data_synthesis", "base/policy")


def test_a_stage_refuses_artefacts_of_other_parameters(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSALIB_RUNS", str(tmp_path))
    opened = stage.Stage("03_sft", stage.SFTParameters(run="a", profile="smoke", sft_steps=5))
    assert opened.profile.sft_steps == 5 and opened.profile_of("03_sft") == opened.profile
    stage.Stage("03_sft", stage.SFTParameters(run="a", profile="smoke", sft_steps=5))
    with pytest.raises(runs.RunError, match="sft_steps was 5, now 6"):
        stage.Stage("03_sft", stage.SFTParameters(run="a", profile="smoke", sft_steps=6))


@pytest.mark.slow
@pytest.mark.notebook
def test_the_smoke_profile_runs_from_start_to_figure_and_is_skipped_when_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSALIB_RUNS", str(tmp_path / "papermill_runs"))
    monkeypatch.chdir(tmp_path)  # paths do not depend on where the command was started
    command = [sys.executable, "-m", "musalib", "run", "--profile", "smoke", "--run", "a"]
    first = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert first.returncode == 0, first.stderr
    folder = tmp_path / "papermill_runs" / "a"
    manifest = store.read_json(folder / "manifest.json")
    assert manifest["status"] == "done" and list(manifest["stages"]) == PIPELINE
    assert all((folder / f"{name}.ipynb").stat().st_size < 5_000_000 for name in PIPELINE)
    for name in PIPELINE[2:7]:
        artifacts = folder / "artifacts" / name
        assert store.read_jsonl(artifacts / "eval.jsonl")
        assert list(artifacts.rglob("policy/model.safetensors"))
    results = json.loads((folder / "artifacts" / "results.json").read_text())
    for name, path in results.items():
        assert name in first.stderr and path in (
            str(tmp_path / line.split()[-1]) for line in first.stderr.splitlines()[-3:]
        )
    assert "| RL multi |" in (folder / "artifacts/08_ablations/figures/tab_stages.md").read_text()

    again = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert again.returncode == 0 and again.stderr.count("done before, skipped") == len(PIPELINE)
